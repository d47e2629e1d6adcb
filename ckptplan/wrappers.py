"""Recomputation that a model brings along: wrappers, switches and calls of other libraries.

Under a plan such a block would be computed a third time, and what is measured would not be what is trained, so
these are found and told by name. Nothing of the other libraries is imported.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ckptplan.errors import BlockDeclarationError

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


_SYNCHRONIZING = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def parallel_fault(model: nn.Module) -> str | None:
    """Why a model that is, or holds, a data parallel wrapper cannot be copied and patched; None: it has none.

    A copy of such a wrapper would meet the other processes, which need not measure anything.
    """
    for path, part in model.named_modules():
        if isinstance(part, _SYNCHRONIZING):
            name = type(part).__name__
            if not path:
                return (
                    f"the model is wrapped in {name}: give model.module, which it calls (a plan applied to that is in "
                    "force under the wrapper, whichever came first)"
                )
            return (
                f"{path!r} is wrapped in {name}, and a copy of it would talk to other processes: plan first, wrap "
                f"afterwards; or give the part inside, model.{path}.module"
            )
    return None


def sharding_fault(model: nn.Module) -> str | None:
    """Why a model whose weights are spread over processes cannot be measured: each forward would gather them.

    Over a mesh whose collectives exchange nothing (PyTorch's fake process group) it can.
    """
    for path, part in model.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            return _sharded(f"{path or 'the model'} is wrapped in FullyShardedDataParallel")
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor, of fully_shard or of tensor parallel
        if mesh is not None and any(dist.get_backend(group) != "fake" for group in mesh.get_all_groups()):
            return _sharded(f"the weight {name!r} is a {type(parameter).__name__}, a shard of the whole")
    return None


def _sharded(what: str) -> str:
    return (
        f"{what}, so every measured step would talk to other processes: measure and plan before sharding, on the whole "
        "model (on device 'cpu' or of fewer blocks where it does not fit), hand all processes that plan, then shard"
    )


@contextmanager
def no_parallel_calls() -> Iterator[None]:
    """Raise ``BlockDeclarationError`` in this thread in front of a call of a data parallel wrapper.

    A loss that calls the wrapper instead of the model that it is given would wait for other processes for ever.
    """
    thread = threading.get_ident()

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(module, _SYNCHRONIZING) and threading.get_ident() == thread:
            raise BlockDeclarationError(
                f"the loss calls a {type(module).__name__} instead of the model that it is given, which would wait for "
                "other processes: write loss_fn(model, batch) so that it calls the model of its argument"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def no_foreign_calls(model: nn.Module) -> Iterator[None]:
    """Raise ``BlockDeclarationError`` at the end if ``watched_calls`` found any, whatever else went wrong by then."""
    found: list[str] = []
    try:
        with watched_calls(model) as found:
            yield
    except Exception as error:  # such a backward pass meets a graph that is cut at the blocks
        if found:
            raise BlockDeclarationError("; ".join(found)) from error
        raise
    if found:
        raise BlockDeclarationError("; ".join(found))


@contextmanager
def watched_calls(model: nn.Module) -> Iterator[list[str]]:
    """What in ``model``, or in the loss around it, keeps it from being measured as a chain: a sentence each, once.

    These are calls of ``torch.utils.checkpoint.checkpoint``, by submodule, and backward passes within the step. The
    interpreter reports every call of a function, so it does not matter under which name it was imported. Where a
    profiler or a coverage tool listens already, nothing is watched.
    """
    found: list[str] = []
    if sys.getprofile() is not None:
        yield found
        return
    recomputes = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    backward_calls = {
        torch.autograd.grad.__code__: "torch.autograd.grad",
        torch.autograd.backward.__code__: "backward()",
    }
    paths = {id(module): path for path, module in model.named_modules()}
    callers: list[str] = []

    def listen(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        if frame.f_code is recomputes:
            callers.append(_calling_module(frame, paths))
        elif frame.f_code in backward_calls:
            found.append(_backward_message(backward_calls[frame.f_code]))

    sys.setprofile(listen)
    try:
        yield found
    finally:
        sys.setprofile(None)
        if callers:
            found.append(_own_calls_message(list(dict.fromkeys(callers))))
        found[:] = dict.fromkeys(found)


def _backward_message(function: str) -> str:
    return (
        f"the loss calls {function} (a gradient penalty, a meta-learning step), so a backward is part of the step, "
        "which is not measured: profile with the loss without that part; the plan made for it gives exact "
        "second-order gradients too, while the peak is higher than predicted"
    )


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
    parallel = parallel_fault(model)
    if parallel is not None:
        return [parallel]
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


def _own_calls_message(paths: list[str]) -> str:
    named = ", ".join(path or "the model's own forward" for path in paths)
    return (
        f"something else recomputes in the model already: torch.utils.checkpoint is called by {named}; take the call "
        "out, the plan says what is recomputed"
    )
