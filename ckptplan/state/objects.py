"""Objects that give and take their state: modules, optimizers, schedulers, scalers and whatever looks like them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ckptplan.state.resharder import local_of

_COMPILED_PREFIX = "_orig_mod."


def state_of(value: Any) -> Any:
    """The object's state, under the names of the plain module, whatever wrapper is round it."""
    if not isinstance(value, torch.nn.Module):
        return value.state_dict()
    return plain_names(unwrap(value).state_dict())


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The plain module inside a data-parallel wrapper or a compiled module."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and isinstance(module._orig_mod, torch.nn.Module):
            module = module._orig_mod
        else:
            return module


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """Without the prefixes that compiled submodules put into names."""
    if not any(_COMPILED_PREFIX in name for name in state):
        return state
    return OrderedDict((name.replace(_COMPILED_PREFIX, ""), value) for name, value in state.items())


def own_names(module: torch.nn.Module) -> dict[str, str]:
    """Plain name -> name in the module's own state."""
    return {name.replace(_COMPILED_PREFIX, ""): name for name in module.state_dict()}


def fills_in_place(module: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Whether writing into the tensors of `state` is all that loading means for this module.

    Not so for extra state, for hooks and own methods that want to see the load, and for a state made of copies.
    """
    own = {_place_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if not all(isinstance(value, torch.Tensor) and _place_of(value) in own for value in state.values()):
        return False
    return all(not _watches_loading(part) for part in module.modules())


def _place_of(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _watches_loading(module: torch.nn.Module) -> bool:
    kind = type(module)
    if kind.load_state_dict is not torch.nn.Module.load_state_dict:
        return True
    # PyTorch's own modules override this only to read the state of old versions.
    load = kind._load_from_state_dict
    if load is not torch.nn.Module._load_from_state_dict and not load.__module__.startswith("torch.nn."):
        return True
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    # FSDP's hook brings the parameters into their sharded form, which taking the state has done.
    return not all(getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.") for hook in hooks)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, and then the dtypes of the state as they were stored (torch casts them to the parameter's)."""
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, stored in state["state"].get(number, {}).items():
            live = optimizer.state[parameter].get(name)
            if isinstance(stored, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != stored.dtype:
                optimizer.state[parameter][name] = stored.to(live.device)
