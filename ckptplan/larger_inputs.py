"""Inputs larger than those that were measured: noted while a model is profiled, told while it trains."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.errors import LargerBatchWarning
from ckptplan.profiles import INPUTS_KEY
from ckptplan.subject import LossFn
from ckptplan.trees import tensors_in

Shapes = list[list[int]]


class LargestInputs:
    """The largest inputs of a model so far; as a forward pre-hook it tells of larger ones, each time that they grow.

    An object, not a closure, so that a model pickles with it.
    """

    def __init__(self, environment: Mapping[str, Any] | None = None) -> None:
        self.shapes: Shapes | None = (environment or {}).get(INPUTS_KEY)

    def watching(self, loss_fn: LossFn) -> LossFn:
        """``loss_fn`` that notes what the model is called with."""

        def watched(model: nn.Module, batch: Any) -> torch.Tensor:
            handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
            try:
                return loss_fn(model, batch)
            finally:
                handle.remove()

        return watched

    def as_environment(self) -> dict[str, Any]:
        """Empty where the model itself was not called (the loss calls a method or parts of it)."""
        return {} if self.shapes is None else {INPUTS_KEY: self.shapes}

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = _shapes(args, kwargs)
        if self.shapes is None or _is_larger(shapes, self.shapes):
            self.shapes = shapes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.shapes is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        shapes = _shapes(args, kwargs)
        if _is_larger(shapes, self.shapes):
            before, self.shapes = self.shapes, shapes
            warnings.warn(
                f"the model is called with inputs {_text(shapes)}, larger than those that were measured "
                f"({_text(before)}): the predicted peak does not hold for them. Measure and plan again with the "
                "largest batch",
                LargerBatchWarning,
                stacklevel=_callers_level(),
            )


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _callers_level() -> int:
    """Which frame above the one that warns is the user's: the line that calls the model."""
    frame = inspect.currentframe()
    level = 0  # of this function; its caller, which warns, is 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    return [list(tensor.shape) for tensor in tensors_in((args, kwargs))]


def _is_larger(shapes: Shapes, than: Shapes) -> bool:
    """More elements; or, of the same tensors, longer ones, where what grows with the square of a length takes more."""
    count, before = _elements(shapes), _elements(than)
    if count > before or [len(s) for s in shapes] != [len(s) for s in than]:
        return count > before
    longer = [
        now / then for s, t in zip(shapes, than, strict=True) for now, then in zip(s[1:], t[1:], strict=True) if then
    ]
    return count * max(longer, default=1.0) > before


def _elements(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _text(shapes: Shapes) -> str:
    return " ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)
