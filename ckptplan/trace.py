"""One real forward of a model, cut at its blocks: what each block is called with, and whether they form a chain.

Works on a twin (see ``twin.py``): block forwards are exchanged for stand-ins while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import changed_settings, is_called_with, settings_of
from ckptplan.errors import BlockDeclarationError, UnsupportedBoundaryError
from ckptplan.randomness import torch_state
from ckptplan.signatures import call_signature, nesting
from ckptplan.stages import GradientLayout, copies_of, own_copies
from ckptplan.subject import Subject
from ckptplan.trees import map_tensors, same, storage_key, tensors_anywhere, tensors_in
from ckptplan.twin import WriteGuard, computed_weights
from ckptplan.wrappers import no_foreign_calls, no_parallel_calls

Step = Callable[[], Any]  # one forward of the whole model; returns the loss, or the output where there is no loss
Autocast = tuple[bool, torch.dtype, bool]


@dataclass
class FirstRun:
    """State of a block around the first run of its forward, which may change what no later run does.

    Attributes:
        buffers, versions, random_states: what the run started from (see ``buffer_versions``).
        changed: names of the buffers that it wrote to or replaced.
        made: names of the buffers that were None before it.
        graph_kept_in: an attribute in which it left a tensor with its graph.
        written: parameters (named as in the whole model) that it wrote to.
        shared_with: per name in ``changed``, another block that holds the same buffer.
    """

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    random_states: list[torch.Tensor] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    graph_kept_in: str | None = None
    written: tuple[str, ...] = ()
    shared_with: dict[str, str] = field(default_factory=dict)


@dataclass
class BlockCall:
    """What a block was called with and gave back in the real forward; all tensors cut off from the graph.

    Attributes:
        boundary: the tensors that earlier stages made, as distinct objects, in order.
        standing: memory of these that stands before the step (they are views of weights), by ``storage_key``.
        signature: shapes, dtypes and gradient flags of every argument, as text.
        block: the number of the block among those declared.
        follows: it takes exactly what the call before returned, spread as ``call_block`` does it.
        is_alike: and it returns the like of it; in a segment each block hands through what the last one returns.
        operators: digest of the operators that it runs and of the shapes that they give, once it has been observed.
        passed, views: which distinct tensors of the output are tensors of the boundary, or lie in their memory, by
            position.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    boundary: list[torch.Tensor]
    standing: frozenset[int] = frozenset()
    output: Any = None
    autocast: Autocast = (False, torch.float32, True)
    with_gradients: bool = True
    signature: str = ""
    block: int = 0
    follows: bool = False
    is_alike: bool = False
    operators: str = ""
    passed: dict[int, int] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)
    first: FirstRun = field(default_factory=FirstRun)

    def fresh(
        self, handed_back: GradientLayout | None = None
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Owned copies of the boundary tensors, and the arguments with the copies in their places."""
        copies = own_copies(self.boundary, handed_back, self.standing)
        by_id = {id(old): new for old, new in zip(self.boundary, copies, strict=True)}
        args, kwargs = map_tensors((self.args, self.kwargs), lambda t: by_id.get(id(t), t))
        return copies, args, kwargs


@dataclass
class ChainTrace:
    """The calls of all blocks, in order."""

    calls: list[BlockCall] = field(default_factory=list)
    has_pre: bool = False  # the first block's input is made by code of the model


class StopAtFirstBlock(Exception):
    """Ends the forward in front of the first block, carrying the boundary tensors."""

    def __init__(self, boundary: list[torch.Tensor]) -> None:
        super().__init__("stopped at the first block")
        self.boundary = boundary


@contextmanager
def exchanged_forwards(modules: Sequence[nn.Module], stands: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Each module's ``forward`` is its stand-in while the context lasts; signatures stay those of the originals."""
    own = [vars(module).get("forward") for module in modules]  # a forward that somebody set on the instance
    try:
        for module, stand in zip(modules, stands, strict=True):
            module.forward = functools.update_wrapper(stand, module.forward)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def autocast_now(device: torch.device) -> Autocast:
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast_as(device: torch.device, state: Autocast) -> AbstractContextManager[Any]:
    enabled, dtype, cached = state
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)


def trace_subject(subject: Subject, *, linked: bool = True) -> ChainTrace:
    """``trace_chain`` of a twin, which leaves the caller's weights as they are whatever the forward does to them.

    Raises: as ``trace_chain``.
    """
    guard = WriteGuard(subject.callers_parameters)
    before = {name: buffer.detach().clone() for name, buffer in subject.callers_buffers.items()}
    outside = [*subject.outside, *(() if linked else subject.standing_tensors())]
    settings = [settings_of(module) for module in subject.modules]
    try:
        with no_foreign_calls(subject.twin), no_parallel_calls():
            trace = trace_chain(
                subject.names, subject.modules, subject.run_step, outside, subject.device, guard=guard, linked=linked
            )
    finally:
        guard.restore()
        strange = _put_back(subject.callers_buffers, before)
    if strange:
        raise BlockDeclarationError(_original_used("the model changes the buffer", strange[0]))
    for module, held in zip(subject.modules, settings, strict=True):
        subject.changed_settings |= changed_settings(held, settings_of(module))
    keys = {storage_key(subject.callers_parameters[name]) for name in guard.saved}
    for parameter in subject.twin.parameters():
        if storage_key(parameter) in keys:  # from here on it writes to memory of the twin's
            parameter.data = parameter.detach().clone()
    return trace


def _put_back(buffers: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> list[str]:
    """Undo changes of the caller's buffers; the names of those that changed (batch norms write past every guard)."""
    changed = [name for name, buffer in buffers.items() if not same(buffer, before[name])]
    with torch.no_grad():
        for name in changed:
            buffers[name].detach().copy_(before[name])
    return changed


def _original_used(what: str, name: str) -> str:
    return (
        f"{what} {name!r} through a reference to itself that a copy of the model keeps (a global name, an object that "
        "refuses to be copied), so profiling would change your model. Reach submodules through self"
    )


def trace_chain(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    step: Step,
    outside: Sequence[torch.Tensor],
    device: torch.device,
    guard: WriteGuard | None = None,
    linked: bool = True,
) -> ChainTrace:
    """Run ``step`` once and record every block's call.

    Args:
        names, modules: the blocks in declared order.
        outside: tensors that stand before the step (the batch, constants); they are no boundary.
        guard: watches the parameters of the model of which ``modules`` are a twin's.
        linked: every block must run once, in order, on exactly what the one before returned. Else the calls are
            recorded as they come, with all that the step made before them as their boundary.

    Raises:
        BlockDeclarationError: a block that does not run, or that computes with parameters that ``guard`` watches
            instead of the twin's; where ``linked`` also one that runs twice or out of order.
        UnsupportedBoundaryError: where ``linked``, a block that is not called with what the previous one returned, or
            whose output the model uses for something else too.
    """
    trace = ChainTrace()
    guard = guard or WriteGuard({})
    callers = {id(tensor): name for name, tensor in guard.tensors.items()}
    edges: list[list[Edge]] = []  # what each block returned, as places in the graph
    versions: list[int] = []
    standing = {storage_key(t) for t in outside}
    standing.update(storage_key(t) for m in modules for t in (*m.parameters(), *m.buffers()))
    previous: list[torch.Tensor] = []
    last_output: Any = None

    def stand_for(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand(*args: Any, **kwargs: Any) -> Any:
            nonlocal previous, versions, last_output
            boundary = boundary_of(args, kwargs, standing)
            if linked:
                _require_order(index, len(trace.calls), names)
                boundary = _boundary(index, names, args, kwargs, previous, standing)
                _require_untouched(index, names, previous, versions)
            if not trace.calls:
                trace.has_pre = bool(boundary)
            call = _recorded(args, kwargs, boundary, standing, autocast_now(device))
            call.with_gradients = torch.is_grad_enabled()
            call.block, call.follows = index, bool(trace.calls) and is_called_with(last_output, args, kwargs)
            trace.calls.append(call)
            already = set(guard.saved)
            call.first = first_runs[index]
            unchanged = {id(t): t._version for t in tensors_in((args, kwargs))}
            held = {id(t) for t in tensors_anywhere((args, kwargs))}
            output = original(*args, **kwargs)
            _require_no_graph_left(names[index], args, kwargs, held)
            _note_changes(call.first, modules[index])
            call.first.written = tuple(name for name in guard.saved if name not in already)
            _require_own_parameters(output, callers, f"block {names[index]!r}")
            call.is_alike = call.follows and nesting(output) == nesting(last_output)
            call.passed, call.views = _handed_through(output, boundary)
            without_graph = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors_in(output)}
            call.output = map_tensors(output, lambda t: without_graph[id(t)])
            cut = last_output = _cut(output, {id(t) for t in tensors_in(output) if unchanged.get(id(t)) == t._version})
            previous = list({id(t): t for t in tensors_in(cut)}.values())
            versions = [t._version for t in previous]
            edges.append([_edge(t) for t in previous if t.grad_fn is not None])
            return cut

        return stand

    stands = [stand_for(i, m.forward) for i, m in enumerate(modules)]
    with exchanged_forwards(modules, stands), _first_runs(modules, device) as first_runs, guard:
        result = step()
    missing = sorted(set(range(len(modules))) - {call.block for call in trace.calls})
    if missing:
        raise BlockDeclarationError(
            f"block {names[missing[0]]!r} is declared but does not run in the model's forward; leave it out"
        )
    _require_own_parameters(result, callers, "the code before or after the blocks")
    if linked:
        _require_used_by_blocks_only(result, edges, names)
    _note_shared_buffers(trace, names, modules)
    return trace


def _require_no_graph_left(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], held: set[int]) -> None:
    """A cache that is filled while training: what is put there hangs on this step's graph and reaches other blocks."""
    for label, argument in (*enumerate(args), *kwargs.items()):
        inside = {id(t) for t in tensors_in(argument)}
        left = [t for t in tensors_anywhere(argument) if id(t) not in held | inside and t.grad_fn is not None]
        if left:
            raise UnsupportedBoundaryError(
                f"block {name!r} leaves tensors with their graph in its argument {label!r} (a "
                f"{type(argument).__name__}), where they reach others past what the block returns. If it is a "
                "key-value cache: that is for generation, call the model with use_cache=False"
            )


@contextmanager
def _first_runs(modules: Sequence[nn.Module], device: torch.device) -> Iterator[dict[int, FirstRun]]:
    """By number what each block started from, filled when it is called, before hooks compute its weights."""
    first: dict[int, FirstRun] = {}

    def note(index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            buffers = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
            first[index] = FirstRun(buffers, buffer_versions(module), torch_state(device))

        return before

    handles = [m.register_forward_pre_hook(note(i), prepend=True) for i, m in enumerate(modules)]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()


def _note_changes(first: FirstRun, module: nn.Module) -> None:
    now = dict(module.named_buffers(remove_duplicate=False))
    versions = buffer_versions(module)
    first.changed = tuple(
        name
        for name, buffer in now.items()
        if name in first.buffers and (versions[name] != first.versions[name] or not same(buffer, first.buffers[name]))
    )
    first.made = tuple(name for name in now if name not in first.buffers)
    first.graph_kept_in = forget_graphs(module)


def buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer is and how often it was written to: a write may leave the value as it was.

    That is so for a power iteration that has converged, until the weights change.
    """
    return {name: (id(b), b._version) for name, b in module.named_buffers(remove_duplicate=False)}


def forget_graphs(module: nn.Module) -> str | None:
    """Cut off from their graphs all tensors that a block keeps in attributes; the name of one, if there was any.

    A graph is for one backward, so a later step must not find it there.
    """
    kept: str | None = None
    for path, part in module.named_modules():
        computed = computed_weights(part)  # made anew in every run
        for name, value in list(vars(part).items()):
            if name in ("_parameters", "_modules", *computed) or all(t.grad_fn is None for t in tensors_in(value)):
                continue
            kept = f"{path}.{name}".lstrip(".")
            vars(part)[name] = map_tensors(value, _without_graph)
    return kept


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)


Edge = tuple[Any, int]  # an autograd node, and which of its outputs


def _edge(tensor: torch.Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def _edges_behind(value: Any) -> dict[Edge, None]:
    """All of the graph that a backward from ``value`` goes through, each place once."""
    reached: dict[Edge, None] = {}
    coming = [_edge(t) for t in tensors_in(value) if t.grad_fn is not None]
    while coming:
        edge = coming.pop()
        if edge not in reached:
            reached[edge] = None
            coming.extend(e for e in edge[0].next_functions if e[0] is not None)
    return reached


def _require_own_parameters(output: Any, callers: Mapping[int, str], who: str) -> None:
    """A lambda that was made with the model in sight still computes with the original, not with the twin."""
    for node, _ in _edges_behind(output):
        name = callers.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise BlockDeclarationError(_original_used(f"{who} computes with the parameter", name))


def _require_untouched(
    index: int, names: Sequence[str], previous: Sequence[torch.Tensor], versions: Sequence[int]
) -> None:
    if [t._version for t in previous] != list(versions):
        raise UnsupportedBoundaryError(
            f"the model changes what {names[index - 1]!r} returned in place before it calls {names[index]!r}: it "
            "computes something between the two. Move that code into one of them"
        )


def _require_used_by_blocks_only(result: Any, edges: Sequence[Sequence[Edge]], names: Sequence[str]) -> None:
    """The graph of the result begins at the last block's output, unless the model kept another one and used it."""
    reached = _edges_behind(result)
    at_end = set(edges[-1])
    for name, mine in zip(names[:-1], edges[:-1], strict=True):
        if any(edge in reached and edge not in at_end for edge in mine):
            raise UnsupportedBoundaryError(
                f"the model uses what block {name!r} returned for something else than calling the next block (a skip "
                "around blocks, an output of its own, a sum of losses): in a chain each block's output goes to "
                "the next one only. Hand it on through the blocks, or declare the blocks between as one"
            )


def _note_shared_buffers(trace: ChainTrace, names: Sequence[str], modules: Sequence[nn.Module]) -> None:
    """Of buffers that several blocks hold and one of them changes, each block's recomputation sees a later state."""
    holders: dict[int, dict[int, str]] = {}
    for index, module in enumerate(modules):
        for name, buffer in module.named_buffers(remove_duplicate=False):
            holders.setdefault(id(buffer), {}).setdefault(index, name)
    for shared in (h for h in holders.values() if len(h) > 1):
        using = [call for call in trace.calls if call.block in shared]
        if any(shared[call.block] in call.first.changed for call in using):
            for call in using:
                other = next(i for i in shared if i != call.block)
                call.first.shared_with[shared[call.block]] = names[other]


def _require_order(index: int, already: int, names: Sequence[str]) -> None:
    if index < already:
        raise BlockDeclarationError(
            f"block {names[index]!r} runs again after {names[already - 1]!r}; a block must run once per forward"
        )
    if index > already:
        raise BlockDeclarationError(
            f"block {names[index]!r} runs before {names[already]!r}; declare the blocks in the order in which they run"
        )


def _boundary(
    index: int,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    previous: Sequence[torch.Tensor],
    standing: set[int],
) -> list[torch.Tensor]:
    """The tensors that came from the previous block (for the first: from the model), distinct objects in order."""
    given = boundary_of(args, kwargs, standing)
    if index == 0:
        return given
    handed = {id(t) for t in previous}
    strange = [t for t in given if id(t) not in handed]
    if strange:
        raise UnsupportedBoundaryError(
            f"block {names[index]!r} is called with a tensor of shape {tuple(strange[0].shape)} that is neither what "
            f"{names[index - 1]!r} returned nor part of the batch: the model computes something between the two. "
            "Declare blocks that follow each other directly, or move that code into one of them"
        )
    return list(previous)


def boundary_of(args: tuple[Any, ...], kwargs: dict[str, Any], standing: set[int]) -> list[torch.Tensor]:
    """The distinct tensors of a call's arguments that the step has made, in order; views of weights are made too."""
    given = {id(t): t for t in tensors_in((args, kwargs))}
    return [t for t in given.values() if storage_key(t) not in standing or t.grad_fn is not None]


def _handed_through(output: Any, boundary: Sequence[torch.Tensor]) -> tuple[dict[int, int], dict[int, int]]:
    """By position among the output's tensors: which tensor of the boundary it is, or in whose memory it lies."""
    at, at_storage = ({key(t): i for i, t in reversed(list(enumerate(boundary)))} for key in (id, storage_key))
    passed, views = {}, {}
    for position, tensor in enumerate({id(t): t for t in tensors_in(output)}.values()):
        if id(tensor) in at:
            passed[position] = at[id(tensor)]
        elif storage_key(tensor) in at_storage:
            views[position] = at_storage[storage_key(tensor)]
    return passed, views


def _recorded(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    boundary: list[torch.Tensor],
    standing: set[int],
    autocast: Autocast,
) -> BlockCall:
    given = tensors_in((args, kwargs))
    # a weight that several calls are handed is one tensor for all of them, as the parts of its gradient are added up
    weights = {id(t) for t in given if t.is_leaf and t.requires_grad and storage_key(t) in standing}
    # what the block before returned belongs to the boundary, though it be the batch itself and not given on
    recorded = {id(t): t for t in (*given, *boundary)}.values()
    cut = {id(t): t if id(t) in weights else t.detach().requires_grad_(t.requires_grad) for t in recorded}
    # copies: the block may change its input in place, and what came in is what has to be recorded
    made = [t for t in boundary if storage_key(t) not in standing]
    cut.update((id(t), copy) for t, copy in zip(made, copies_of(made), strict=True))
    at_boundary = {id(t) for t in boundary}
    for key, stand_in in cut.items():  # an input of the user's that wants a gradient has one before the step
        if stand_in.requires_grad and key not in at_boundary | weights:
            stand_in.grad = torch.zeros_like(stand_in)
    own_args, own_kwargs = map_tensors((args, kwargs), lambda t: cut[id(t)])
    own_boundary = [cut[id(t)] for t in boundary]
    inside = {id(t) for t in own_boundary}
    return BlockCall(
        own_args,
        own_kwargs,
        own_boundary,
        frozenset(storage_key(t) for t in boundary) & standing,
        autocast=autocast,
        signature=call_signature(own_args, own_kwargs, inside),
    )


def _cut(output: Any, passed: set[int]) -> Any:
    """The output without its graph; what the block handed through as it was stays the same object."""
    fresh = list({id(t): t for t in tensors_in(output) if id(t) not in passed}.values())
    detached = [t.detach().requires_grad_(t.requires_grad) for t in fresh]
    copies = {id(old): new for old, new in zip(fresh, own_copies(detached), strict=True)}
    return map_tensors(output, lambda t: copies.get(id(t), t))
