"""The planned model run once on fake tensors: its exact peak, and what runs there, before any memory is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.blocks import no_hooks_on_all_modules
from ckptplan.errors import DryRunError, PlanIncompatibleError
from ckptplan.fakes import UNFIT, KnownValues, quiet_fake_kernels, why_unfit, with_fakes
from ckptplan.memory import LiveStorages
from ckptplan.nodes import Keep
from ckptplan.plan import CheckpointPlan
from ckptplan.randomness import random_state_restored
from ckptplan.subject import LossFn
from ckptplan.trees import tensors_in
from ckptplan.twin import make_twin
from ckptplan.units import format_bytes
from ckptplan.wrappers import no_parallel_calls, sharding_fault

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
    sharded = sharding_fault(model)
    if sharded is not None:
        raise PlanIncompatibleError(sharded)
    if plan.compiled:
        raise DryRunError(
            f"{plan.compiled} of the plan's blocks run compiled, and compiled code allocates where fake tensors do not "
            "see it; their bytes were measured when they were profiled"
        )
    (twin,) = make_twin([model])
    devices = {t.device for t in (*model.parameters(), *model.buffers(), *tensors_in(batch))}
    where = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    places = _Places()
    with ExitStack() as stack:
        for context in (no_hooks_on_all_modules(), random_state_restored(where), torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(quiet_fake_kernels())
        warnings.filterwarnings("ignore", message=".*fake tensor.*")
        # asked of a constant that the model added something to, when it meets a fake tensor
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        fake = KnownValues()
        watch = _PeakWatch(places)
        try:
            with fake:
                own_batch = with_fakes(twin, batch, fake)
                with places.following(_Following(twin, plan, places)), no_parallel_calls(), watch:
                    loss = loss_fn(twin, own_batch)
                    _require_loss(loss)
                    places.now = (_AFTER, "backward")
                    loss.backward()
        except UNFIT as error:
            _refuse(error, places)
    return VerifiedPeak(watch.peak_bytes, watch.operator, *watch.at)


def _refuse(error: Exception, places: _Places) -> NoReturn:
    block, phase = places.now
    raise DryRunError(
        f"the dry run stops in {block} ({phase}): {why_unfit(error)}; measure the plan by a real step instead "
        "(run_benchmark, or train.py with plan_only=false)"
    ) from error


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn gave {found}; expected a scalar loss")
    if not loss.requires_grad:
        raise ValueError("the loss needs no gradient; is every parameter frozen, or was it computed under no_grad?")


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
