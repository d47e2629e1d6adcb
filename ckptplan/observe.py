"""What a block's forward does besides computing: random draws, changed buffers, attributes and inputs.

Observed by running the block from equal states, not guessed from class names. The state is the one before the very
first run (taken in the trace), so that what a forward does only once is seen too. Not seen: global variables, as long
as no output depends on them.
"""

from __future__ import annotations

import array
import collections
import functools
import hashlib
import itertools
import random
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_memory.py

from ckptplan.blocks import is_library
from ckptplan.randomness import library_state, set_torch_state, torch_state
from ckptplan.trace import BlockCall, buffer_versions
from ckptplan.trees import (
    MOST_HASHED,
    array_hash,
    attributes_of,
    has_values,
    is_filled,
    same,
    storage_key,
    tensors_anywhere,
    tensors_in,
    value_hash,
)

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), array.array, itertools.count)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
DEPTH = 6  # how deep nested attribute values are looked into
# A first run may choose another algorithm than later ones, with other rounding.
_FIRST_RTOL = 1e-2
_FIRST_RTOL_HALF = 1e-1

CHANGES_INPUT = "its forward changes its own input in place"


@dataclass(frozen=True)
class Observation:
    """What a block's forward does besides computing.

    Attributes:
        exclusion_reason: None where a recomputation gives exactly what the forward gave.
        data_sizes: elements of all that operators gave whose size depends on data (which tokens an expert gets): with
            other sizes the same block takes other memory.
    """

    draws_random: bool
    mutated_buffers: tuple[str, ...]
    exclusion_reason: str | None
    data_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Run:
    """What one run of a block gave and did."""

    output: list[torch.Tensor]
    mutated: set[str]
    draws: bool
    attributes: dict[str, Any]
    touched_input: bool
    touched_argument: str | None
    drew_from_library: bool


def observe(module: nn.Module, call: BlockCall, run: Callable[..., Any], device: torch.device) -> Observation:
    """Call ``run(*args, **kwargs)``, which runs the module, twice from the state of its first run and compare.

    ``module`` must be a twin: its buffers and attributes are changed. ``call.operators`` is filled in.
    """
    settled = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
    seen = _Operators()
    with seen:
        one = _run_from(call.first.buffers, module, call, seen.watched(run), device)
    two = _run_from(call.first.buffers, module, call, run, device)
    call.operators = seen.digest.hexdigest()
    mutated = {*call.first.changed, *one.mutated, *two.mutated}
    mutated |= {n for n, b in module.named_buffers(remove_duplicate=False) if storage_key(b) in seen.statistics}
    if mutated:  # a forward may do something else once its buffers have changed
        mutated |= _run_from(settled, module, call, run, device).mutated
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    reason = _reason(call, one, two)
    if reason is None and seen.draws_from_own:
        reason = "its forward draws from a random generator of its own, which a recomputation does not restore"
    draws = one.draws or seen.draws
    return Observation(draws, tuple(n for n in names if n in mutated), reason, tuple(seen.data_sizes))


class _Operators(TorchDispatchMode):
    """What operators tell of a run, beside what comparing values tells; tensors without values have only this.

    Attributes:
        data_sizes: elements of the outputs whose sizes depend on data.
        draws, draws_from_own: whether random numbers were drawn for tensors without values, from torch's stream and
            from another generator.
        digest: of the operators and the shapes that they gave, in order.
        statistics: storages of tensors without values that batch norms update, which no version counter tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data_sizes: list[int] = []
        self.draws = self.draws_from_own = False
        self.digest = hashlib.sha256()
        self._is_inside = False
        self.statistics: set[int] = set()

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, all of whose operators are part of the digest."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._is_inside = True
            try:
                return run(*args, **kwargs)
            finally:
                self._is_inside = False

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_inside:
            shapes = [(tuple(t.shape), t.dtype) for t in tensors_in(output)]
            self.digest.update(f"{func}{shapes}".encode())
        if torch.Tag.dynamic_output_shape in func.tags:
            self.data_sizes += [t.numel() for t in tensors_in(output)]
        if not all(has_values(t) for t in tensors_in((args, output))):
            names = [argument.name for argument in func._schema.arguments]
            given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | (kwargs or {})
            self._note_without_values(func, given)
        return output

    def _note_without_values(self, func: Any, given: dict[str, Any]) -> None:
        is_attention_without_dropout = "dropout_p" in given and not given["dropout_p"]
        if torch.Tag.nondeterministic_seeded in func.tags and not is_attention_without_dropout:
            self.draws_from_own |= given.get("generator") is not None
            self.draws |= given.get("generator") is None
        if given.get("training", given.get("train")) and "running_mean" in given:
            statistics = tensors_in((given["running_mean"], given.get("running_var")))
            self.statistics |= {storage_key(t) for t in statistics}


def _run_from(
    buffers: dict[str, torch.Tensor],
    module: nn.Module,
    call: BlockCall,
    run: Callable[..., Any],
    device: torch.device,
) -> _Run:
    _restore_buffers(module, buffers)
    set_torch_state(call.first.random_states, device)
    start = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
    versions, library = buffer_versions(module), library_state()
    output, touched_input, touched_argument = _outputs(call, run)
    return _Run(
        output=output,
        mutated={
            name
            for name, b in module.named_buffers(remove_duplicate=False)
            if versions.get(name) != (id(b), b._version) or not same(b, start.get(name))
        },
        draws=not all(same(a, b) for a, b in zip(call.first.random_states, torch_state(device), strict=True)),
        attributes=attribute_state(module),
        touched_input=touched_input,
        touched_argument=touched_argument,
        drew_from_library=library != library_state(),
    )


def _reason(call: BlockCall, one: _Run, two: _Run) -> str | None:
    """Why a recomputation would not give what the forward gave, or would do something twice; None where neither."""
    names = sorted({*one.attributes, *two.attributes})
    changed = [name for name in names if one.attributes.get(name) != two.attributes.get(name)]
    if one.touched_input:
        return f"{CHANGES_INPUT}, so the input kept for a recomputation would be wrong"
    if one.drew_from_library:
        return "its forward draws from Python's or NumPy's global random stream, which a recomputation does not restore"
    if changed:  # an attribute that is set to the same value again is none of these
        return f"its forward changes the Python attribute {changed[0]!r}, which a recomputation would change again"
    if one.touched_argument is not None:
        return f"its forward changes {one.touched_argument}, which a recomputation would change again"
    seen_in_trace = _reason_of_first_run(call)
    if seen_in_trace is not None:
        return seen_in_trace
    if not _alike(one.output, two.output, same):
        return "two runs from the same state give different outputs, so a recomputation would not be exact"
    if not _alike(one.output, [t.detach() for t in tensors_in(call.output)], _nearly):
        return "its first run gives another output than later ones, so a recomputation of it would not be exact"
    return None


def _reason_of_first_run(call: BlockCall) -> str | None:
    first = call.first
    if first.written:
        return f"its forward writes to its parameter {first.written[0]!r}, which a recomputation would find changed"
    if first.made:
        return f"its forward makes the buffer {first.made[0]!r}, which a recomputation would find made"
    if first.graph_kept_in is not None:
        return (
            f"its forward keeps a tensor with its graph in the attribute {first.graph_kept_in!r}, which a "
            "recomputation would replace"
        )
    for name, other in first.shared_with.items():
        return (
            f"the buffer {name!r} is shared with block {other!r} and changes in the forward, so a recomputation would "
            "not find what the forward found"
        )
    return None


def _alike(
    left: list[torch.Tensor], right: list[torch.Tensor], equal: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))


def _nearly(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.numel() or not left.is_floating_point() or not (has_values(left) and has_values(right)):
        return same(left, right)
    difference = (left.double() - right.double()).abs().nan_to_num(0.0, posinf=0.0).max()
    rtol = _FIRST_RTOL if left.element_size() > 2 else _FIRST_RTOL_HALF
    return bool(difference <= rtol * right.double().abs().nan_to_num(0.0).max())


def _outputs(call: BlockCall, run: Callable[..., Any]) -> tuple[list[torch.Tensor], bool, str | None]:
    """What a run gives; whether it changed a tensor among its arguments; which other argument it changed."""
    copies, args, kwargs = call.fresh()
    outside = [t for t in tensors_anywhere((args, kwargs)) if not any(t is c for c in copies)]
    before = [t.detach().clone() for t in outside]
    versions = [t._version for t in (*copies, *outside)]
    start = _argument_states(args, kwargs)
    output = [t.detach().clone() for t in tensors_in(run(*args, **kwargs))]
    end = _argument_states(args, kwargs)
    touched = [t._version for t in (*copies, *outside)] != versions
    touched |= not all(same(c.detach(), o.detach()) for c, o in zip(copies, call.boundary, strict=True))
    for now, then in zip(outside, before, strict=True):
        if not same(now.detach(), then):
            touched = True
            with torch.no_grad():
                now.detach().copy_(then)
    return output, touched, next((name for name in start if start[name] != end[name]), None)


def _argument_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Comparable values of the arguments; of their tensors only which they are."""
    named = {f"its argument {i} (a {type(a).__name__})": a for i, a in enumerate(args)}
    named |= {f"its argument {name!r} (a {type(a).__name__})": a for name, a in kwargs.items()}
    return {name: comparable(value, DEPTH, id) for name, value in named.items()}


def _restore_buffers(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def attribute_state(module: nn.Module) -> dict[str, Any]:
    """Comparable values of the Python attributes of a module, its submodules and their classes, by dotted name."""
    parts = frozenset(id(part) for part in module.modules())
    state = instance_state(module)
    for kind in {kind for part in module.modules() for kind in type(part).__mro__ if not is_library(kind)}:
        for name, value in vars(kind).items():
            if not name.startswith("__") and not hasattr(type(value), "__get__"):  # no methods, no properties
                state[f"{kind.__qualname__}.{name}"] = comparable(value, DEPTH, _values_of, parts)
    return state


def instance_state(module: nn.Module) -> dict[str, Any]:
    """``attribute_state`` without the classes."""
    parts = frozenset(id(part) for part in module.modules())
    named = attributes_by_name(module)
    return {name: comparable(value, DEPTH, _values_of, parts) for name, (_, value) in named.items()}


def attributes_by_name(module: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    """Holder and value of the Python attributes of a module and its submodules, by dotted name."""
    return {
        f"{path}.{name}".lstrip("."): (part, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _MODULE_INTERNALS
    }


def _values_of(tensor: torch.Tensor) -> Any:
    return array_hash(tensor), tensor._version if tensor.numel() > MOST_HASHED else None


def comparable(
    value: Any,
    depth: int,
    of_tensor: Callable[[torch.Tensor], Any],
    seen: frozenset[int] = frozenset(),
    of_opaque: Callable[[Any], Any] = id,
) -> Any:
    """Equal for values that hold the same; objects in ``seen`` are described elsewhere.

    ``of_opaque`` stands for objects that cannot be looked into; by default two such are equal if they are one.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return _random_state(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
    if depth == 0 or isinstance(value, _OPAQUE) or id(value) in seen:
        return of_opaque(value)
    seen = seen | {id(value)}

    def inside(items: Iterable[Any]) -> list[Any]:
        return [comparable(item, depth - 1, of_tensor, seen, of_opaque) for item in items]

    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return list(zip(map(repr, value.keys()), inside(value.values()), strict=True))
    if isinstance(value, (list, tuple, collections.deque)):
        return inside(value)
    if isinstance(value, functools.partial):
        return inside([value.func, value.args, value.keywords])
    if isinstance(value, types.MethodType):
        return inside([value.__func__, value.__self__])
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return of_opaque(value), inside([*cells, *(value.__defaults__ or ()), vars(value)])
    held = {name: item for name, item in attributes_of(value).items() if name != "_parameters"}
    if not held:
        return of_opaque(value), repr(value) if of_opaque is id else None  # an iterator may show where it stands
    return list(zip(held, inside(held.values()), strict=True))


def _random_state(stream: Any) -> Any:
    if isinstance(stream, torch.Generator):
        return value_hash(stream.get_state())
    if isinstance(stream, random.SystemRandom):
        return None  # the machine's entropy has no state
    if isinstance(stream, random.Random):
        return stream.getstate()
    return repr(stream.bit_generator.state if isinstance(stream, np.random.Generator) else stream.get_state())
