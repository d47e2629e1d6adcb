"""A twin of a model to measure on, so that measuring leaves the caller's model as it was.

The twin shares the memory of the parameters, and has its own parameter objects (so the caller's
``.grad``, gradient hooks and optimizer-in-backward hooks see nothing), its own buffers, its own copies of
plain Python attributes, and no module hooks but the model's own: those with which torch computes weights or cuts
matrices, and those with which transformers collects hidden states. Functions that hold modules of the model (a wrapped
forward) get those of the twin. Weights that ``nn.Embedding(max_norm=...)`` changes
when it runs are the twin's own.
"""

from __future__ import annotations

import copy
import functools
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.errors import BlockDeclarationError, CkptplanError
from ckptplan.randomness import random_state_restored
from ckptplan.trees import is_filled, storage_key, tensors_in

T = TypeVar("T")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# parallelize_module puts them on modules, to cut inputs and add up outputs
_TENSOR_PARALLEL_HOOKS = "torch.distributed.tensor"
# transformers puts them on modules in the first forward that is asked for hidden states, attentions or router logits
_COLLECTING_HOOKS = "transformers.utils.output_capturing"
CANNOT_COPY = (TypeError, RuntimeError, NotImplementedError, ValueError, AttributeError)
# weight_norm and spectral_norm (the older forms) and pruning compute the weight in a forward pre-hook.
_WEIGHT_HOOK_MODULES = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune")


def make_twin(value: T) -> T:
    """``value`` (a module, or a tuple or list of modules) with everything of its own but parameter memory.

    An attribute that cannot be copied (a lock, an open file) is shared with the original.
    """
    modules = _modules_in(value)
    memo: dict[int, Any] = {}
    renormed = {id(part.weight) for m in modules for part in m.modules() if getattr(part, "max_norm", None) is not None}
    for module in modules:
        for parameter in module.parameters():
            memory = parameter.detach()
            if id(parameter) in renormed:
                memory = memory.clone()
            memo.setdefault(id(parameter), nn.Parameter(memory, requires_grad=parameter.requires_grad))
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer.detach().clone())
    try:
        twin = copy.deepcopy(value, dict(memo))
    except CANNOT_COPY:
        _share_what_cannot_be_copied(modules, memo)
        twin = copy.deepcopy(value, memo)
    known: dict[int, nn.Module] = {}
    for original, own in zip(modules, _modules_in(twin), strict=True):
        by_path = dict(own.named_modules())
        known.update((id(part), by_path[path]) for path, part in original.named_modules() if path in by_path)
    for part in known.values():
        _drop_user_hooks(part)
        for name, attribute in list(vars(part).items()):
            vars(part)[name] = _rebound(attribute, known)
    return twin


def _rebound(value: Any, known: Mapping[int, nn.Module], depth: int = 4) -> Any:
    """``value`` with the twin's modules in the closures and bindings of functions; copying leaves functions alone."""
    if isinstance(value, nn.Module):
        return known.get(id(value), value)
    if depth == 0:
        return value
    if isinstance(value, types.MethodType):
        owner, function = _rebound(value.__self__, known, depth - 1), _rebound(value.__func__, known, depth - 1)
        return value if owner is value.__self__ and function is value.__func__ else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        new = [_rebound(part, known, depth - 1) for part in parts]
        if all(a is b for a, b in zip(parts, new, strict=True)):
            return value
        count = 1 + len(value.args)
        return functools.partial(new[0], *new[1:count], **dict(zip(value.keywords, new[count:], strict=True)))
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, known, depth)
    return value


def _rebound_function(function: types.FunctionType, known: Mapping[int, nn.Module], depth: int) -> types.FunctionType:
    cells = function.__closure__ or ()
    filled = [cell for cell in cells if is_filled(cell)]
    contents = {id(cell): _rebound(cell.cell_contents, known, depth - 1) for cell in filled}
    defaults = tuple(_rebound(item, known, depth - 1) for item in function.__defaults__ or ())
    is_same = all(contents[id(cell)] is cell.cell_contents for cell in filled)
    if is_same and all(a is b for a, b in zip(defaults, function.__defaults__ or (), strict=True)):
        return function
    # a cell that stays as it is stays shared with other functions of the same scope
    new = tuple(
        types.CellType(contents[id(c)]) if id(c) in contents and contents[id(c)] is not c.cell_contents else c
        for c in cells
    )
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, new)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def computed_weights(module: nn.Module) -> set[str]:
    """Attributes that the older weight_norm and spectral_norm, and pruning, compute before every forward."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__ in _WEIGHT_HOOK_MODULES]
    return {str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", "")) for hook in hooks}


def _modules_in(value: Any) -> list[nn.Module]:
    return [value] if isinstance(value, nn.Module) else list(value)


def _share_what_cannot_be_copied(modules: list[nn.Module], memo: dict[int, Any]) -> None:
    skip = {"_parameters", "_buffers", "_modules", *_HOOKS}
    for part in {id(m): m for module in modules for m in module.modules()}.values():
        for name, attribute in vars(part).items():
            if name in skip or isinstance(attribute, (bool, int, float, str, nn.Module, type(None))):
                continue
            try:
                copy.deepcopy(attribute, dict(memo))
            except CANNOT_COPY:
                memo[id(attribute)] = attribute


def _drop_user_hooks(module: nn.Module) -> None:
    for name in _HOOKS:
        hooks: dict[int, Any] = getattr(module, name, {})
        for key in list(hooks):
            if _is_users(hooks[key]):
                del hooks[key]


def _is_users(hook: Any) -> bool:
    is_of_weights = type(hook).__module__ in _WEIGHT_HOOK_MODULES
    defined_in = str(getattr(hook, "__module__", None))
    return not (is_of_weights or defined_in == _COLLECTING_HOOKS or defined_in.startswith(_TENSOR_PARALLEL_HOOKS))


@contextmanager
def missing_hooks_told(model: nn.Module) -> Iterator[None]:
    """Around a step of a twin of ``model``: where the loss fails and the model has hooks that twins have not.

    Raises ``BlockDeclarationError`` then. What is raised inside a module, and any error of a model without such hooks,
    is left as it is.
    """
    try:
        yield
    except (CkptplanError, torch.cuda.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        hooked = [path or "the model itself" for path, part in model.named_modules() if _has_user_hooks(part)]
        if not hooked or _is_raised_in_a_module(error):
            raise
        more = f" and {len(hooked) - 3} more" if len(hooked) > 3 else ""
        raise BlockDeclarationError(
            f"the loss fails on the copy of the model that is measured ({type(error).__name__}: {error}). The copy has "
            f"no hooks of yours (they are on {', '.join(hooked[:3])}{more}). If the loss needs what a hook collects, "
            "let the model return it; if the error has nothing to do with them, remove the hooks to see it alone"
        ) from error


def _is_raised_in_a_module(error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code.co_name == "_call_impl" for frame in frames)  # of nn.Module


def _has_user_hooks(module: nn.Module) -> bool:
    return any(_is_users(hook) for name in _HOOKS for hook in getattr(module, name, {}).values())


class WriteGuard(TorchDispatchMode):
    """While it is active, the first write to one of ``tensors`` (or a view of it) saves what was there.

    Attributes:
        saved: the old values, by the names given.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)
        self.saved: dict[str, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self._names.setdefault(storage_key(tensor), []).append(name)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(given.get(argument.name))
        return func(*args, **kwargs)

    def _save(self, written: Any) -> None:
        for tensor in tensors_in(written):
            for name in self._names.get(storage_key(tensor), ()):
                self.saved.setdefault(name, self.tensors[name].detach().clone())

    def restore(self) -> None:
        """Put the old values back; to be called when the guard is not active any more."""
        with torch.no_grad():
            for name, old in self.saved.items():
                self.tensors[name].detach().copy_(old)


def own_written_weights(
    model: nn.Module, twin: nn.Module, run: Callable[[nn.Module], Any], device: torch.device
) -> None:
    """Give ``twin`` memory of its own for the parameters that the forward itself writes to (a clamp, a renorm).

    They are found by one forward, ``run`` of another twin under ``no_grad``, after which the old values are put back.
    """
    (trial,) = make_twin([model])
    guard = WriteGuard(dict(model.named_parameters()))
    try:
        with random_state_restored(device), torch.no_grad(), guard:
            run(trial)
    finally:
        guard.restore()
    for name in guard.saved:
        parameter = twin.get_parameter(name)
        parameter.data = parameter.detach().clone()
