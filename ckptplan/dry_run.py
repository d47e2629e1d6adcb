"""The planned model run once on fake tensors: its exact peak, and what runs there, before any memory is touched."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import (  # pinned by tests/test_dry_run.py
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from ckptplan.apply import checkpointed
from ckptplan.errors import DryRunError
from ckptplan.memory import LiveStorages
from ckptplan.plan import CheckpointPlan, Keep
from ckptplan.randomness import random_state_restored
from ckptplan.subject import LossFn
from ckptplan.trees import map_tensors, tensors_in
from ckptplan.twin import make_twin
from ckptplan.units import format_bytes

_BEFORE, _AFTER = "before the blocks", "head and loss"


@dataclass(frozen=True)
class VerifiedPeak:
    """What a dry run showed.

    Attributes:
        peak_bytes: most bytes of tensors alive at once above what stands before the step (parameters, their gradients,
            buffers, the batch). Temporaries inside kernels are not in it; compare it with a profile that was measured
            with ``memory="live"``.
        operator: that made the tensor with which the peak was reached, as in ``"aten.mm.default"``.
        block: in which it ran, or "before the blocks" or "head and loss".
        phase: "forward", "recomputation" or "backward".
    """

    peak_bytes: int
    operator: str
    block: str
    phase: str

    @property
    def text(self) -> str:
        """As in ``peak 12.5 MiB at aten.mm.default in layers.3 (backward)``."""
        return f"peak {format_bytes(self.peak_bytes)} at {self.operator} in {self.block} ({self.phase})"


def verify_plan(model: nn.Module, plan: CheckpointPlan, batch: Any, loss_fn: LossFn) -> VerifiedPeak:
    """The exact peak of a training step of ``model`` under ``plan``, by a dry run on fake tensors.

    No activation is allocated; the model, its gradients and the random streams are left as they were. Buffers are
    copied once. Integers, masks and small constants, and what is made from such alone, have their values, so the model
    decides by them as in a real step.

    Args:
        batch: handed to ``loss_fn``; of its floating point tensors only shapes, dtypes and devices matter.
        loss_fn: ``loss_fn(model, batch)`` -> scalar loss.

    Raises:
        PlanIncompatibleError: the plan does not belong to the model.
        DryRunError: the step needs values, which fake tensors do not have, or an operator that knows no fake tensors.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; expected a function loss_fn(model, batch)")
    checkpointed(model, plan)  # a plan of another model is told before the model is copied
    if plan.compiled:
        raise DryRunError(
            f"{plan.compiled} of the plan's blocks run compiled, and compiled code allocates where fake tensors do not "
            "see it; their bytes were measured when they were profiled"
        )
    (twin,) = make_twin([model])
    devices = {t.device for t in (*model.parameters(), *model.buffers(), *tensors_in(batch))}
    where = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    places = _Places()
    with random_state_restored(where), torch.enable_grad(), warnings.catch_warnings(), _quiet_fake_kernels():
        warnings.filterwarnings("ignore", message=".*fake tensor.*")
        # asked of a constant that the model added something to, when it meets a fake tensor
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        fake = _KnownValues()
        watch = _PeakWatch(places)
        try:
            with fake:
                own_batch = _with_fakes(twin, batch, fake)
                with places.following(_Following(twin, plan, places)), watch:
                    loss = loss_fn(twin, own_batch)
                    _require_loss(loss)
                    places.now = (_AFTER, "backward")
                    loss.backward()
        except _UNFIT as error:
            _refuse(error, places)
    return VerifiedPeak(watch.peak_bytes, watch.operator, *watch.at)


_UNFIT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    RuntimeError,  # what fake kernels raise where the real ones run; NotImplementedError is one
)
# Their fake kernels give an empty workspace, as only the library behind the real one knows how much it takes.
_UNKNOWN_WORKSPACE = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})


@contextmanager
def _quiet_fake_kernels() -> Iterator[None]:
    """Torch logs where a fake kernel fails before it raises; the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _refuse(error: Exception, places: _Places) -> NoReturn:
    block, phase = places.now
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        reason = f"{error.func} decides by the values of tensors (control flow or a shape), and fake tensors have none"
    else:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    raise DryRunError(
        f"the dry run stops in {block} ({phase}): {reason}; measure the plan by a real step instead "
        "(run_benchmark, or train.py with plan_only=false)"
    ) from error


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn gave {found}; expected a scalar loss")
    if not loss.requires_grad:
        raise ValueError("the loss needs no gradient; is every parameter frozen, or was it computed under no_grad?")


def _with_fakes(twin: nn.Module, batch: Any, fake: _KnownValues) -> Any:
    """Parameters (with gradients), buffers of the twin made fake; the batch as fake tensors."""
    made: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            own = tensor.detach()
            has_values = fake.knows(own) and not (own.is_floating_point() or own.is_complex())
            made[id(tensor)] = own.clone() if has_values else fake.from_tensor(own)
        return made[id(tensor)]

    parameters: dict[int, nn.Parameter] = {}
    for part in twin.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                own = nn.Parameter(faked(parameter), requires_grad=parameter.requires_grad)
                own.grad = torch.zeros_like(own) if own.requires_grad else None
                parameters[id(parameter)] = own
            part._parameters[name] = parameters[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else faked(buffer)

    def of_batch(tensor: torch.Tensor) -> torch.Tensor:
        own = faked(tensor).requires_grad_(tensor.requires_grad)
        if own.requires_grad and own.grad is None:
            own.grad = torch.zeros_like(own)
        return own

    return map_tensors(batch, of_batch)


MOST_KNOWN_ELEMENTS = 2**20


class _KnownValues(FakeTensorMode):
    """Fake tensors, but token ids, positions, masks and small constants, and what is made from such alone, have values.

    Models decide by them how they go on ("is anything padded?"), and some ask whether they are given fake tensors and
    then go on in another way, with other kernels. What the model holds outside its parameters and buffers is taken for
    its shape where it meets a fake tensor.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._overwritten: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # with what nobody knows

    def knows(self, tensor: torch.Tensor) -> bool:
        return _is_small(tensor) and not isinstance(tensor, FakeTensor) and not self._is_overwritten(tensor)

    def _is_overwritten(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._overwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _UNKNOWN_WORKSPACE:
            raise UnsupportedFakeTensorException(f"only a real run of {name} tells how much workspace it takes")
        if not all(self.knows(tensor) for tensor in tensors_in((args, kwargs))):
            self._note_writes(func, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)
        return func(*args, **kwargs) if all(_is_small(tensor) for tensor in tensors_in(out)) else out

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        if not func._schema.is_mutable:
            return
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(given.get(argument.name)):
                    if not isinstance(tensor, FakeTensor):
                        self._overwritten.add(tensor.untyped_storage())


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() <= MOST_KNOWN_ELEMENTS


class _PeakWatch(LiveStorages):
    """Live bytes, with the operator and the place of the latest peak."""

    def __init__(self, places: _Places) -> None:
        super().__init__()
        self.places = places
        self.operator, self.at = "", (_BEFORE, "forward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.peak_bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak_bytes > before:
            self.operator, self.at = str(func), self.places.now
        return out


class _Places:
    """The block and phase that run now."""

    def __init__(self) -> None:
        self.now = (_BEFORE, "forward")
        self.is_backward = False

    @contextmanager
    def following(self, patch: _Following) -> Iterator[None]:
        with patch, patch.hooks():
            yield

    def run(self, name: str, last: bool, call: Callable[[], Any]) -> Any:
        """Call a block; when the gradient of its output arrives, its backward begins."""
        outer = self.now
        again = outer[1] in ("backward", "recomputation")
        self.now = (name, "recomputation" if again else "forward")
        output = call()
        self.now = outer if again else ((_AFTER, "forward") if last else self.now)
        if not again:
            self._on_gradient(output, name)
        return output

    def _on_gradient(self, value: Any, name: str) -> None:
        def arrived(gradient: torch.Tensor) -> None:
            self.now = (name, "backward")

        for tensor in tensors_in(value):
            if tensor.requires_grad:
                tensor.register_hook(arrived)

    def on_input(self, value: Any) -> None:
        """When the gradient of what comes into the first block is there, what stands before it goes on."""
        for tensor in tensors_in(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self._set((_BEFORE, "backward")))

    def _set(self, place: tuple[str, str]) -> None:
        self.now = place


class _Following(checkpointed):
    """The plan's patch, with every call of a block told."""

    def __init__(self, model: nn.Module, plan: CheckpointPlan, places: _Places) -> None:
        super().__init__(model, plan)
        self.places = places

    def _call(self, index: int, value: Any) -> Any:
        names = self.plan.block_ids  # one per call of a block
        is_last = index == len(names) - 1
        return self.places.run(names[index], is_last, lambda: super(_Following, self)._call(index, value))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Kept blocks are not patched: their own calls tell. So does what comes into the first block."""
        handles = []
        last = len(self.plan.block_ids) - 1
        for node in self.plan.nodes:
            if isinstance(node, Keep):
                module, name = self._modules[node.block], self.plan.block_ids[node.block]
                handles += self._kept(module, name, node.block == last)
        first = self.blocks[0].module
        handles.append(first.register_forward_pre_hook(lambda m, a, k: self.places.on_input((a, k)), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _kept(self, module: nn.Module, name: str, is_last: bool) -> list[Any]:
        def entered(*_: Any) -> None:
            self.places.now = (name, "forward")

        def left(_: nn.Module, args: Any, output: Any) -> None:
            self.places.run(name, is_last, lambda: output)

        return [module.register_forward_pre_hook(entered), module.register_forward_hook(left)]
