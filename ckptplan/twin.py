"""A twin of a model to measure on, so that measuring leaves the caller's model as it was.

The twin shares the memory of the parameters, and has its own parameter objects (so the caller's
``.grad``, gradient hooks and optimizer-in-backward hooks see nothing), its own buffers, its own copies of
plain Python attributes, and no module hooks but those with which torch computes weights.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CANNOT_COPY = (TypeError, RuntimeError, NotImplementedError, ValueError, AttributeError)
# weight_norm and spectral_norm (the older forms) compute the weight in a forward pre-hook.
_WEIGHT_HOOK_MODULES = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")


def make_twin(value: T) -> T:
    """``value`` (a module, or a tuple or list of modules) with everything of its own but parameter memory.

    An attribute that cannot be copied (a lock, an open file) is shared with the original.
    """
    modules = _modules_in(value)
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            memo.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer.detach().clone())
    try:
        twin = copy.deepcopy(value, dict(memo))
    except _CANNOT_COPY:
        _share_what_cannot_be_copied(modules, memo)
        twin = copy.deepcopy(value, memo)
    for module in _modules_in(twin):
        for part in module.modules():
            _drop_user_hooks(part)
    return twin


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
            except _CANNOT_COPY:
                memo[id(attribute)] = attribute


def _drop_user_hooks(module: nn.Module) -> None:
    for name in _HOOKS:
        hooks: dict[int, Any] = getattr(module, name, {})
        for key in list(hooks):
            if type(hooks[key]).__module__ not in _WEIGHT_HOOK_MODULES:
                del hooks[key]
