"""Recomputation that a model brings along: wrappers, switches and calls of other libraries.

Under a plan such a block would be computed a third time, and what is measured would not be what is trained, so
these are found and told by name. Nothing of the other libraries is imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

_WRAPPERS = ("CheckpointWrapper", "CheckpointImpl")  # PyTorch's and fairscale's
# An attribute that is True on a module which recomputes -> how its library switches it off.
_SWITCHES = {
    "gradient_checkpointing": "call model.gradient_checkpointing_disable()",
    "grad_checkpointing": "call model.set_grad_checkpointing(False)",
}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """One place at which something else recomputes.

    Attributes:
        path: of the submodule ("" for the model itself).
        what: what it is, for a message.
        remedy: what to do.
        switch: the attribute that switches it on, if it is one.
    """

    path: str
    what: str
    remedy: str
    switch: str | None = None

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'}: {self.what}; {self.remedy}"


def foreign_checkpoints(model: nn.Module) -> list[ForeignCheckpoint]:
    """Wrappers (``apply_activation_checkpointing``), and the switches of Hugging Face, diffusers and timm."""
    found = []
    for path, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS:
            what = f"a {type(module).__name__} ({type(module).__module__.partition('.')[0]})"
            found.append(ForeignCheckpoint(path, what, "use the module that it wraps"))
        for switch, remedy in _SWITCHES.items():
            if getattr(module, switch, None) is True:
                found.append(ForeignCheckpoint(path, f"its switch {switch} is on", remedy, switch))
    return found


def switched_off(model: nn.Module) -> Callable[[], None]:
    """Switch off what ``foreign_checkpoints`` finds switched on; the function returned puts it back."""
    switched = [(model.get_submodule(f.path), f.switch) for f in foreign_checkpoints(model) if f.switch is not None]

    def put(value: bool) -> None:
        for module, switch in switched:
            setattr(module, switch, value)

    put(False)
    return lambda: put(True)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` was applied to it."""
    if type(module).__name__ == "OptimizedModule":
        return True
    return vars(module).get("_compiled_call_impl") is not None


def compiled_part(model: nn.Module) -> str | None:
    """The path of a part that is compiled ("" for the model itself), or None."""
    return next((path for path, module in model.named_modules() if is_compiled(module)), None)


def is_data_parallel(model: nn.Module) -> bool:
    return isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))


@contextmanager
def checkpoint_calls(model: nn.Module) -> Iterator[list[str]]:
    """Paths of the submodules that call ``torch.utils.checkpoint.checkpoint`` while the context lasts, each once.

    The interpreter reports every call of a function, so it does not matter under which name the model imported
    it. Where a profiler or a coverage tool listens already, nothing is watched.
    """
    found: list[str] = []
    if sys.getprofile() is not None:
        yield found
        return
    wanted = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    paths = {id(module): path for path, module in model.named_modules()}

    def listen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is wanted:
            path = _calling_module(frame, paths)
            if path not in found:
                found.append(path)

    sys.setprofile(listen)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _calling_module(frame: FrameType | None, paths: dict[int, str]) -> str:
    """The path of the nearest module of the model whose method is running."""
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path
        frame = frame.f_back
    return ""


def plainness_faults(model: nn.Module) -> list[str]:
    """Why ``model`` cannot be profiled or patched as it is: what wraps it, compiled it, or recomputes in it."""
    if is_data_parallel(model):
        return [
            f"the model is wrapped in {type(model).__name__}: give model.module, which it calls (a plan applied to "
            "that is in force under the wrapper, whichever came first)"
        ]
    compiled = compiled_part(model)
    if compiled is not None:
        return [
            f"{compiled or 'the model'} is compiled already (torch.compile), so its forward cannot be exchanged: "
            "profile and apply the plan to the model as it was before, then compile"
        ]
    found = foreign_checkpoints(model)
    if not found:
        return []
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return [f"something else recomputes in the model already: {found[0]}{more}"]


def own_calls_message(paths: list[str]) -> str:
    """What to tell where ``checkpoint_calls`` found some."""
    named = ", ".join(path or "the model's own forward" for path in paths)
    return (
        f"something else recomputes in the model already: torch.utils.checkpoint is called by {named}; take the call "
        "out, the plan says what is recomputed"
    )
