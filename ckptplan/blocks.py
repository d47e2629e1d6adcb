"""What a block is, and how a model declares its blocks."""

from __future__ import annotations

import difflib
import enum
import fnmatch
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.errors import BlockDeclarationError
from ckptplan.trees import array_hash, attributes_of, is_filled

# In a profile's and a plan's environment: what a forward changes, and the fingerprint without that.
CHANGED_SETTINGS, SETTLED_FINGERPRINT = "changed_settings", "settled_fingerprint"
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class CheckpointableBlock:
    """One block of the chain: a submodule of the model, by reference.

    Attributes:
        block_id: name in plans, profiles and tables; unique in the chain.
        order: 0-based position in the chain.
        module: the module itself.
    """

    block_id: str
    order: int
    module: nn.Module


def require_blocks(blocks: object) -> None:
    """Raise ``TypeError`` unless ``blocks`` is a sequence of ``CheckpointableBlock``, which tells how to get one."""
    remedy = "expected what declare_blocks(model, [(block_id, module), ...]) gives"
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise TypeError(f"blocks is a {type(blocks).__name__}; {remedy}")
    for index, block in enumerate(blocks):
        if not isinstance(block, CheckpointableBlock):
            raise TypeError(f"blocks[{index}] is a {type(block).__name__}; {remedy}")


@dataclass(frozen=True)
class BlockSelection:
    """The blocks chosen from a model, and what to tell the user about the choice."""

    blocks: tuple[CheckpointableBlock, ...]
    source: str  # how they were found
    left_out: tuple[str, ...] = ()  # module paths with parameters that no block covers


def declare_blocks(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> tuple[CheckpointableBlock, ...]:
    """The chain of blocks, in the order in which the model runs them.

    Args:
        model: the module that holds every block.
        blocks: ``(block_id, module)`` pairs.

    Raises:
        BlockDeclarationError: an id that is empty, not text or used twice; a module that the model
            does not hold, that is declared twice, that lies inside another block, or that shares a
            submodule with weights with another block (one activation, dropout or table for all is fine).
    """
    inside = {id(module) for module in model.modules()}
    taken_ids: set[str] = set()
    owner: dict[int, str] = {}
    roots: set[int] = set()
    declared = []
    for order, entry in enumerate(blocks):
        try:
            block_id, module = entry
        except (TypeError, ValueError):
            raise BlockDeclarationError(f"block {order} is {entry!r}; expected a pair (block_id, module)") from None
        if not isinstance(block_id, str) or not block_id:
            raise BlockDeclarationError(f"block {order} has the id {block_id!r}; expected a text that is not empty")
        if block_id in taken_ids:
            raise BlockDeclarationError(f"block id {block_id!r} is used twice; every block needs a name of its own")
        if not isinstance(module, nn.Module):
            raise BlockDeclarationError(f"block {block_id!r} is a {type(module).__name__}; expected a torch.nn.Module")
        if id(module) not in inside:
            raise BlockDeclarationError(f"block {block_id!r} is not a submodule of {type(model).__name__}")
        for part in module.modules():
            if id(part) in owner and (part is module or id(part) in roots or _has_weights(part)):
                relation = (
                    "declared twice" if part is module else f"inside another block or shares {type(part).__name__}"
                )
                raise BlockDeclarationError(
                    f"block {block_id!r} is {relation} (with {owner[id(part)]!r}); blocks must not overlap"
                )
        owner.update((id(part), block_id) for part in module.modules())
        roots.add(id(module))
        taken_ids.add(block_id)
        declared.append(CheckpointableBlock(block_id, order, module))
    return tuple(declared)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def select_blocks(model: nn.Module, paths: Sequence[str] | None = None) -> BlockSelection | None:
    """The blocks named by module paths or globs (``layers.*``), else those that ``model.declared_blocks()`` gives.

    None where neither says anything: then ``discovery.find_blocks`` looks for them.

    Raises:
        BlockDeclarationError: a path that names nothing (with the nearest ones), or blocks that overlap.
    """
    if paths:
        pairs, source = _match(model, paths), f"the paths {', '.join(paths)}"
    elif callable(getattr(model, "declared_blocks", None)):
        pairs, source = list(model.declared_blocks()), f"what {type(model).__name__} declares"  # type: ignore[operator]
    else:
        return None
    blocks = declare_blocks(model, pairs)
    return BlockSelection(blocks, source, left_out(model, blocks))


def _match(model: nn.Module, paths: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = {path: module for path, module in model.named_modules() if path}
    chosen: dict[str, nn.Module] = {}
    for pattern in paths:
        found = [path for path in modules if _path_matches(path, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern.replace(".*", ".0"), modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise BlockDeclarationError(
                f"blocks.paths: {pattern!r} names no module of {type(model).__name__}; nearest: {', '.join(near)}. "
                "Give a module path or a glob in which * stands for one name, as 'blocks.paths=[layers.*]'"
            )
        chosen.update((path, modules[path]) for path in found)
    return list(chosen.items())


def _path_matches(path: str, pattern: str) -> bool:
    """``*`` stands for one name: ``layers.*`` has ``layers.0`` but not ``layers.0.norm``."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(fnmatch.fnmatchcase(n, w) for n, w in zip(names, wanted, strict=True))


def block_lists(model: nn.Module, least: int = 2) -> list[tuple[str, nn.Module]]:
    """Every ModuleList and Sequential of so many members or more that lies in no other one, by path.

    A list of lists only (the stages of a network) is none: its members have no forward.
    """
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= least
        is_outer = is_list and all(isinstance(member, (nn.ModuleList, nn.ModuleDict)) for member in module.children())
        if is_list and not is_outer and not any(path.startswith(f"{outer}.") or not outer for outer, _ in found):
            found.append((path, module))
    return found


def member_paths(path: str, holder: nn.Module) -> tuple[str, ...]:
    """Module paths of the members of a list; ``path`` is "" where the model itself is the list."""
    return tuple(f"{path}.{name}" if path else name for name, _ in holder.named_children())


def no_list_message(model: nn.Module) -> str:
    """What to tell about a model in which no list of blocks is found."""
    example = next((path for path, _ in model.named_children()), "layers")
    return (
        f"{type(model).__name__} holds no list of blocks (ModuleList or Sequential); "
        f"name the blocks: 'blocks.paths=[{example}.*]'"
    )


def left_out(model: nn.Module, blocks: Sequence[CheckpointableBlock]) -> tuple[str, ...]:
    """Paths of the modules that hold parameters of their own and lie in no block."""
    covered = {id(part) for block in blocks for part in block.module.modules()}
    return tuple(
        path
        for path, module in model.named_modules()
        if path and id(module) not in covered and any(True for _ in module.parameters(recurse=False))
    )


def call_block(module: nn.Module, value: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call one block of a plain chain with what the previous one returned.

    A tuple or list is spread over the positional arguments, a dict over the keyword arguments,
    anything else is the one argument. ``kwargs`` reach every block that takes them by name.
    """
    chosen = {name: item for name, item in kwargs.items() if takes_keyword(module, name)} if kwargs else {}
    if isinstance(value, dict):
        return module(**value, **chosen)
    if isinstance(value, (tuple, list)):
        return module(*value, **chosen)
    return module(value, **chosen)


def is_called_with(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call's arguments are ``output``, spread as ``call_block`` spreads it."""
    if isinstance(output, dict):
        return not args and kwargs.keys() == output.keys() and all(kwargs[key] is output[key] for key in output)
    given = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    return not kwargs and len(args) == len(given) and all(a is b for a, b in zip(args, given, strict=True))


def hooks_between(earlier: nn.Module, later: nn.Module) -> bool:
    """Whether hooks look at what one block hands to the next, or change it: within a segment they would not see it."""
    if _switched_off or any(hooks_on_all_modules().values()):
        return True
    on_earlier = earlier._forward_hooks, earlier._backward_hooks, earlier._backward_pre_hooks
    on_later = later._forward_pre_hooks, later._backward_hooks, later._backward_pre_hooks
    hooks = [hook for registered in (*on_earlier, *on_later) for hook in registered.values()]
    return not all(map(_is_of_fully_shard, hooks))


def _is_of_fully_shard(hook: Any) -> bool:
    """Whether FSDP2 has put it there: it gathers the segment as a whole, and hands through what it is given."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


_HOOKS_ON_ALL = tuple(f"_global_{name}_hooks" for name in ("forward_pre", "forward", "backward_pre", "backward"))
_NO_USERS = ("ckptplan.", "torch.")
_switched_off: list[dict[str, dict[int, Any]]] = []


def hooks_on_all_modules() -> dict[str, dict[int, Any]]:
    """What users registered by ``register_module_forward_hook`` and the like, by torch's name for it.

    PyTorch's own note which module runs (``FlopCounterMode``) and look at no values.
    """
    found: dict[str, dict[int, Any]] = {}
    for name in _HOOKS_ON_ALL:
        hooks: dict[int, Any] = getattr(nn.modules.module, name, {})
        found[name] = {
            key: hook for key, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(_NO_USERS)
        }
    return found


@contextmanager
def no_hooks_on_all_modules() -> Iterator[None]:
    """Those hooks of the user's are off, so that measuring does not reach them."""
    taken = hooks_on_all_modules()
    if not any(taken.values()):
        yield
        return
    tables: dict[str, dict[int, Any]] = {name: getattr(nn.modules.module, name, {}) for name in taken}
    for name, hooks in taken.items():
        for key in hooks:
            del tables[name][key]
    _switched_off.append(taken)  # they are there when it trains
    try:
        yield
    finally:
        _switched_off.remove(taken)
        for name, hooks in taken.items():
            later = dict(tables[name])
            tables[name].clear()
            tables[name].update({**hooks, **later})


def takes_keyword(module: nn.Module, name: str) -> bool:
    """Whether ``module.forward`` has a parameter of that name, or takes any keyword."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def describe_module(module: nn.Module, *, exact: bool = False, without: Collection[str] = ()) -> str:
    """What a module computes with, as text: classes, settings, shapes, dtypes, gradient and train flags.

    Settings are looked for in attributes, and in dicts, dataclasses, plain objects and closures that these hold.
    Weights and buffers are left out. ``exact`` adds the values of arrays and the identity of what cannot be written as
    text, so that equal texts mean equal computations within one process (up to weights and buffers); without it the
    text is the same in every process. ``without``: settings to leave out, named as ``changed_settings`` does.
    """
    lines = []
    parts = {id(part): path for path, part in module.named_modules()}
    for path, part in module.named_modules():
        kind = type(part)
        lines.append(f"{path}:{kind.__module__}.{kind.__qualname__}({part.extra_repr()}) train={part.training}")
        for name, attribute in sorted(vars(part).items()):
            if name in _MODULE_INTERNALS or name in without:
                continue
            inner = [label.removeprefix(f"{name}.") for label in without if label.startswith(f"{name}.")]
            if inner and _is_object(attribute):
                attribute = types.SimpleNamespace(**_all_but(attributes_of(attribute), inner))
            lines.append(f" {name}={_describe(attribute, exact, parts, _DEPTH)}")
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            lines.append(f" {name}:{tuple(tensor.shape)}:{tensor.dtype}:grad={tensor.requires_grad}")
    return "\n".join(lines)


def settings_of(module: nn.Module) -> dict[tuple[str, str], str]:
    """(path of a part, name of an attribute, or of one in the object that it holds) -> what stands there, as text."""
    found = {}
    parts = {id(part): path for path, part in module.named_modules()}
    for path, part in module.named_modules():
        for name, attribute in vars(part).items():
            if name in _MODULE_INTERNALS:
                continue
            held = {f"{name}.{key}": value for key, value in attributes_of(attribute).items()}
            for label, value in (held if _is_object(attribute) else {name: attribute}).items():
                found[path, label] = _describe(value, False, parts, _DEPTH)
    return found


def changed_settings(before: Mapping[tuple[str, str], str], after: Mapping[tuple[str, str], str]) -> set[str]:
    """Names of the settings that differ: ``calls``, or ``config.problem_type`` within an object."""
    return {key[1] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def _all_but(items: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: item for name, item in items.items() if name not in names}


def _is_object(value: Any) -> bool:
    """Whether it is an object of the user's that holds settings in its attributes."""
    known = (enum.Enum, *_WRITABLE, torch.Tensor, np.ndarray, nn.Module, type, list, tuple, set, frozenset, Mapping)
    if isinstance(value, known) or inspect.isroutine(value) or isinstance(value, functools.partial):
        return False
    return not is_library(type(value)) or type(value) is types.SimpleNamespace


_WRITABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)
_DEPTH = 5  # how deep settings are looked for in nested values
_MOST_ITEMS = 100  # a longer collection is data, not settings


def _describe(value: Any, exact: bool, parts: Mapping[int, str], depth: int) -> str:
    """``parts`` are the submodules, by ``id``: their paths stand for them."""
    kind = type(value)
    opaque = kind.__qualname__ + (f"@{id(value)}" if exact else "")

    def inside(item: Any) -> str:
        return _describe(item, exact, parts, depth - 1)

    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, _WRITABLE):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{kind.__qualname__}:{array_hash(value)}" if exact else kind.__qualname__
    if isinstance(value, nn.Module):
        return f"<{parts[id(value)]}>" if id(value) in parts else opaque
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if depth == 0:
        return opaque
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return _describe_function(value, exact, inside)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and len(value) > _MOST_ITEMS:
        return f"{opaque}[{len(value)}]"
    if isinstance(value, (list, tuple)):
        return f"{kind.__name__}({', '.join(map(inside, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{kind.__name__}({', '.join(sorted(map(inside, value)))})"
    if isinstance(value, Mapping):
        if not exact and not all(isinstance(key, str) for key in value):
            return f"{kind.__name__}()"  # a cache or a table, not settings; as it is before its first entry
        return f"{kind.__name__}({_named(value, exact, inside)})"
    if is_library(kind) and kind is not types.SimpleNamespace:
        return opaque
    return f"{kind.__qualname__}({_named(attributes_of(value), exact, inside)})"


def _named(items: Mapping[Any, Any], exact: bool, inside: Callable[[Any], str]) -> str:
    """Tensors and modules among the items are no settings."""
    chosen = {repr(k): v for k, v in items.items() if exact or not isinstance(v, (torch.Tensor, nn.Module))}
    return ", ".join(f"{key}={inside(item)}" for key, item in sorted(chosen.items(), key=lambda pair: pair[0]))


def _describe_function(value: Any, exact: bool, inside: Callable[[Any], str]) -> str:
    if isinstance(value, functools.partial):
        keywords = sorted(value.keywords.items())
        return f"partial({', '.join(map(inside, (value.func, *value.args)))}, {_named(dict(keywords), exact, inside)})"
    if isinstance(value, types.MethodType):
        return f"{inside(value.__func__)} of {inside(value.__self__)}"
    name = f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, types.FunctionType):
        return name
    cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
    held = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return f"{name}{f'@{id(value.__code__)}' if exact else ''}({', '.join(map(inside, held))})"


def is_library(kind: type) -> bool:
    """A lock, a logger, a generator: what such objects hold are no settings and differs from process to process."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy")


def model_fingerprint(blocks: Sequence[CheckpointableBlock], without: Collection[str] = ()) -> str:
    """SHA-256 over what the blocks compute with, in their order; weights and the settings ``without`` left out."""
    described = ((block, describe_module(block.module, without=without)) for block in blocks)
    text = "\n".join(f"{block.order}:{block.block_id}\n{text}" for block, text in described)
    return hashlib.sha256(text.encode()).hexdigest()
