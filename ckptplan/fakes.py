"""Models and batches as fake tensors: shapes without memory, on which all code of a step runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (  # pinned by tests/test_dry_run.py
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from ckptplan.trees import map_tensors, tensors_in

UNFIT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    RuntimeError,  # what fake kernels raise where the real ones run; NotImplementedError is one
)
# Their fake kernels give an empty workspace, as only the library behind the real one knows how much it takes.
_UNKNOWN_WORKSPACE = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})

_NORMS = frozenset({"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"})


@contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """Torch logs where a fake kernel fails before it raises; the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def why_unfit(error: Exception) -> str:
    """What fake tensors cannot do, in words."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} decides by the values of tensors (control flow or a shape), and fake tensors have none"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def with_fakes(twin: nn.Module, batch: Any, fake: KnownValues) -> Any:
    """Parameters (with gradients), buffers of the twin made fake; the batch as fake tensors."""
    made: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            own = tensor.detach()
            has_values = fake.knows(own) and not (own.is_floating_point() or own.is_complex())
            made[id(tensor)] = own.clone() if has_values else fake.shape_of(own)
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


class KnownValues(FakeTensorMode):
    """Fake tensors, but token ids, positions, masks and small constants, and what is made from such alone, have values.

    Models decide by them how they go on ("is anything padded?"), and some ask whether they are given fake tensors and
    then go on in another way, with other kernels. What the model holds outside its parameters and buffers is taken for
    its shape where it meets a fake tensor.
    """

    def __init__(self, statistics: torch.dtype | None = None) -> None:
        """``statistics``: dtype of what norms keep of half precision inputs; None: as CPU kernels have it."""
        super().__init__(allow_non_fake_inputs=True)
        self.statistics = statistics
        self._overwritten: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # with what nobody knows

    def shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor in its place; of one on the meta device a fake CPU tensor."""
        made: Any = self.from_tensor(tensor)
        if tensor.device.type == "meta":
            made.fake_device = torch.device("cpu")
        return made

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
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return self._with_statistics(args, out) if name in _NORMS else out
        if name == "aten::set_":  # as a copied generator does with its state; refused by fake tensors
            return func(*args, **kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)
        if not all(_is_small(tensor) for tensor in tensors_in(out)):
            return out
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # a kernel of another device
            return out

    def _with_statistics(self, args: Any, out: Any) -> Any:
        """Fake kernels give means and deviations the input's dtype, also where the kernel gives them the weight's."""
        dtype = self.statistics or next((t.dtype for t in tensors_in(args[1:]) if t.dtype is torch.float32), None)
        if dtype is None or out[0].element_size() >= dtype.itemsize:
            return out
        with self:
            return (out[0], *(torch.empty_like(t, dtype=dtype) for t in out[1:]))

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
