"""A step of a model in which a stand-in takes the place of every block: what the model itself does around them.

Each stand-in gives copies of what its block returned, and in the backward gradients as the block hands them back, so
that everything else happens as in a real step: what the model's own code saves, what its variables hold, which
gradients wait in the autograd engine and for how long. Blocks called any number of times, with anything, are fine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_memory.py

from ckptplan.errors import BlockDeclarationError, CkptplanError, UnsupportedBoundaryError
from ckptplan.stages import (
    Bases,
    GradientLayout,
    Letting,
    Mark,
    allocate_gradients,
    base_of,
    copy_of,
    is_weight_copy,
    layout_of,
    output_gradient_marked,
)
from ckptplan.subject import Subject
from ckptplan.trace import BlockCall, boundary_of, exchanged_forwards, forget_graphs
from ckptplan.trees import distinct_storages, given_storages, map_tensors, storage_key, tensors_in


@dataclass
class Arrival:
    """What came back to one call in the backward.

    Attributes:
        layout: per position among the distinct tensors of the output how its gradient lies in memory.
        pinned: the positions whose gradients somebody else holds on to (the other way round a residual).
        pinned_bytes: their storages.
    """

    layout: GradientLayout
    pinned: tuple[int, ...] = ()
    pinned_bytes: int = 0


@dataclass
class Skeleton:
    """How to run such steps.

    Attributes:
        subject: one name and one module per call.
        calls: in the order in which they run.
        handed_back: per call how the block hands back the gradients of its boundary; None: each on its own.
        weights: per call the block's weights that other stages use too; their gradients wait in the engine.
    """

    subject: Subject
    calls: Sequence[BlockCall]
    standing: set[int]
    handed_back: list[GradientLayout | None] = field(default_factory=list)
    weights: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handed_back = self.handed_back or [None] * len(self.calls)
        self.weights = self.weights or [[] for _ in self.calls]

    def forward(self, mark: Mark, watch: Callable[[int, list[torch.Tensor], Any], None] | None = None) -> Step:
        """One forward. Marks "start", "enter 0", "leave 0", ..., "forward".

        Args:
            watch: called in every stand-in with the number of the call, its boundary and its output.
        """
        for module in self.subject.modules:
            forget_graphs(module)
        step = Step(self, mark, watch)
        distinct = {id(module): module for module in self.subject.modules}
        stands = [step.stand_for(module) for module in distinct.values()]
        mark("start")
        try:
            marked = output_gradient_marked(self.subject.twin, mark)
            with marked, exchanged_forwards(list(distinct.values()), stands):
                step.loss = self.subject.run_step()
        except (CkptplanError, torch.cuda.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever the model's code raises where it misses what a block leaves
            raise UnsupportedBoundaryError(
                f"the model fails where its blocks are stood in for ({type(error).__name__}: {error}): it reads what a "
                "block leaves beside its output, in an attribute or a hook (router logits, hidden states, an auxiliary "
                "loss). Switch that off, or return it from the block"
            ) from error
        if step.number != len(self.calls):
            name = self.subject.names[step.number]
            raise BlockDeclarationError(_another_order(f"does not call block {name!r}"))
        mark("forward")
        return step


def _another_order(what: str) -> str:
    return (
        f"the model {what} in a second forward on the same batch: which blocks it runs is left to chance (layers "
        "dropped at random?). Switch that off to plan it"
    )


class Step:
    """One step under way; lives until its backward is over."""

    def __init__(
        self, skeleton: Skeleton, mark: Mark, watch: Callable[[int, list[torch.Tensor], Any], None] | None
    ) -> None:
        self.skeleton, self.mark, self.watch = skeleton, mark, watch
        self.number = 0
        self.loss: Any = None
        self.arrivals: list[Arrival | None] = [None] * len(skeleton.calls)
        self.arriving: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}

    def backward(self) -> list[Arrival]:
        """The backward, outside autocast as in a training step. Marks "arrive k", "freed k", "handed k", "end".

        Raises ``UnsupportedBoundaryError`` for a block whose output does not reach the loss.
        """
        with torch.autocast(self.loss.device.type, enabled=False):
            self.loss.backward()
        self.mark("end")
        self.loss = None  # the graph knows this step: without a loss there is no cycle
        for number, (arrival, call) in enumerate(zip(self.arrivals, self.skeleton.calls, strict=True)):
            if arrival is None and any(t.requires_grad for t in tensors_in(call.output)):
                raise UnsupportedBoundaryError(
                    f"no gradient comes back to block {self.skeleton.subject.names[number]!r}: the model does not use "
                    "what it returns for the loss, so it saves nothing that backward needs. Leave it out of the blocks"
                )
        return [arrival or Arrival({}) for arrival in self.arrivals]

    def stand_for(self, module: nn.Module) -> Callable[..., Any]:
        def stand(*args: Any, **kwargs: Any) -> Any:
            number = self._take(module)
            self.mark(f"enter {number}")
            boundary = boundary_of(args, kwargs, self.skeleton.standing)
            call = self.skeleton.calls[number]
            if [t.shape for t in boundary] != [t.shape for t in call.boundary]:
                name = self.skeleton.subject.names[number]
                raise BlockDeclarationError(_another_order(f"calls block {name!r} with other tensors"))
            output = self._answer(number, boundary)
            if self.watch is not None:
                self.watch(number, boundary, output)
            self.mark(f"leave {number}")
            return output

        return stand

    def _take(self, module: nn.Module) -> int:
        modules = self.skeleton.subject.modules
        if self.number == len(modules) or modules[self.number] is not module:
            raise BlockDeclarationError(_another_order("calls the blocks in another order"))
        self.number += 1
        return self.number - 1

    def _answer(self, number: int, boundary: list[torch.Tensor]) -> Any:
        call = self.skeleton.calls[number]
        sources = list({id(t): t for t in tensors_in(call.output)}.values())
        made: dict[int, torch.Tensor] = {}  # by position
        bases: Bases = {}
        for position, source in enumerate(sources):
            if position in call.passed:
                made[position] = boundary[call.passed[position]]
            elif storage_key(source) in self.skeleton.standing:
                made[position] = source
            elif position in call.views:
                bases[storage_key(source)] = base_of(boundary[call.views[position]])
        entry = self._entry(number, boundary)
        fresh = [p for p, s in enumerate(sources) if p not in made and s.requires_grad]
        if fresh:
            found = _Exit.apply(self, number, tuple(fresh), entry, bases, *(sources[p].detach() for p in fresh))
            made.update(zip(fresh, found, strict=True))
        made.update({p: copy_of(s, bases) for p, s in enumerate(sources) if p not in made})
        places = {id(source): made[p] for p, source in enumerate(sources)}
        return map_tensors(call.output, lambda t: places[id(t)])

    def _entry(self, number: int, boundary: list[torch.Tensor]) -> torch.Tensor:
        """Stands for the inputs in the graph; takes no memory."""
        layout = self.skeleton.handed_back[number]
        wanted = [p for p, t in enumerate(boundary) if t.requires_grad and (layout is None or p in layout)]
        specs = [(None if layout is None else layout[p], boundary[p]) for p in wanted]
        weights = self.skeleton.weights[number]
        specs += [(None, w) for w in weights]
        shapes = [(g, t.shape, t.detach().new_empty(0)) for g, t in specs]
        device = self.skeleton.subject.device
        anchor = torch.empty(0, device=device, requires_grad=True)
        return _Entry.apply(self, number, shapes, anchor, *(boundary[p] for p in wanted), *weights)

    def arrived(self, number: int, positions: tuple[int, ...], gradients: Sequence[torch.Tensor | None]) -> None:
        self.mark(f"arrive {number}")
        layout = layout_of(gradients)
        self.arrivals[number] = Arrival({positions[i]: shared for i, shared in layout.items()})
        self.arriving[number] = [
            weakref.ref(g.untyped_storage()) for g in gradients if g is not None
        ]  # in the order of the layout

    def freed(self, number: int) -> None:
        self.mark(f"freed {number}")
        arrival = self.arrivals[number]
        held = [ref() for ref in self.arriving.pop(number, ())]
        if arrival is not None:
            arrival.pinned = tuple(p for p, storage in zip(arrival.layout, held, strict=True) if storage is not None)
            arrival.pinned_bytes = sum({id(s): s.nbytes() for s in held if s is not None}.values())


class _Entry(torch.autograd.Function):
    """Where the gradients of a block's inputs are made, when those of its output are gone."""

    @staticmethod
    def forward(ctx: Any, step: Step, number: int, shapes: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.step, ctx.number, ctx.shapes = step, number, shapes
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step, ctx.step = ctx.step, None
        step.freed(ctx.number)
        made = allocate_gradients(ctx.shapes)
        step.mark(f"handed {ctx.number}")
        return (None, None, None, None, *made)


class _Exit(torch.autograd.Function):
    """Where the gradients of a block's output arrive."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        number: int,
        positions: tuple[int, ...],
        entry: torch.Tensor,
        bases: Bases,
        *sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.number, ctx.positions, ctx.entry = step, number, positions, (entry.dtype, entry.device)
        return tuple(copy_of(source, bases) for source in sources)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step, ctx.step = ctx.step, None
        step.arrived(ctx.number, ctx.positions, gradients)
        dtype, device = ctx.entry
        return (None, None, None, torch.empty(0, dtype=dtype, device=device), None, *(None for _ in gradients))


def entered_call(node: Any) -> int | None:
    """The call whose inputs' gradients a node of the graph stands for; None: it is another node."""
    return node.number if type(node) is _Entry._backward_cls else None  # type: ignore[attr-defined]  # torch's own


def left_call(node: Any) -> int | None:
    """The call to whose output gradients come at a node; None: it is another node."""
    return node.number if type(node) is _Exit._backward_cls else None  # type: ignore[attr-defined]  # torch's own


# Who holds what ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Holding:
    """Memory made in a step by the model's own code or by a stand-in.

    Stages are numbered in running order: 2 k is what the model runs before call k, 2 k + 1 is the call.

    Attributes:
        made_at: the stage.
        saved_by: even numbers of the stages whose graphs hold it.
        is_weight_copy: it is a copy of a weight in a narrower type.
    """

    size_bytes: int
    made_at: int
    storage: weakref.ref[torch.UntypedStorage]
    saved_by: set[int] = field(default_factory=set)
    is_weight_copy: bool = False


@dataclass
class Anatomy:
    """Which memory the model's own variables hold at which time.

    Attributes:
        behind: per stage but the last, what is alive behind it without autograd, or held by a part of the graph that
            goes before the loss is there; in the order in which it was made.
        is_empty: per even stage whether it runs no operator at all.
        taken, given: per call the memory of its boundary's and of its output's distinct storages; None: it stands
            before the step.
    """

    holdings: list[Holding] = field(default_factory=list)
    behind: list[list[Holding]] = field(default_factory=list)
    is_empty: list[bool] = field(default_factory=list)
    taken: list[list[Holding | None]] = field(default_factory=list)
    given: list[list[Holding | None]] = field(default_factory=list)

    def watched_by(self, letting: Letting) -> Callable[[int, list[torch.Tensor], Any], None]:
        """To be called in the stand-ins of another step: what blocks take and give there is watched.

        What no block takes, no block holds: the regions of that step itself say when it goes.
        """
        seen: set[int] = set()

        def called(number: int, boundary: list[torch.Tensor], output: Any) -> None:
            for holdings, tensors in ((self.taken[number], boundary), (self.given[number], tensors_in(output))):
                for holding, tensor in zip(holdings, distinct_storages(tensors), strict=True):
                    if holding is not None and id(holding) not in seen:
                        seen.add(id(holding))
                        letting.watch(tensor.untyped_storage(), holding)

        return called


def find_anatomy(skeleton: Skeleton) -> Anatomy:
    """By one forward whose graph keeps nothing: what autograd would save is noted and dropped."""
    watcher = _Watcher()
    with torch.autograd.graph.saved_tensors_hooks(watcher.saved, _never):
        with watcher:
            step = skeleton.forward(watcher.mark, watcher.called)
        watcher.note_what_is_saved()
        step.loss = None
    return watcher.anatomy


class _Saved:
    """Stands in the graph for a tensor that autograd would save there; gone with that part of the graph."""


def _never(_: _Saved) -> torch.Tensor:
    raise AssertionError("this forward has no backward")


class _Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.anatomy = Anatomy()
        self.stage = 0
        self.has_run = False  # an operator, in this stage
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, Holding] = weakref.WeakKeyDictionary()
        self._saved: list[tuple[weakref.ref[_Saved], Holding, int]] = []  # with the stage
        self._in_graph: list[tuple[list[Holding], list[int]]] = []  # per list of ``behind``, of those the ones there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stage % 2 == 0 and not self.has_run:
            self._begin()
        given = given_storages(args, kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage not in self._known and storage_key(tensor) not in given:
                is_copy = is_weight_copy(func, args, out)
                holding = Holding(storage.nbytes(), self.stage, weakref.ref(storage), is_weight_copy=is_copy)
                self._known[storage] = holding
                self.anatomy.holdings.append(holding)
        return out

    def _begin(self) -> None:
        """The first operator behind a call: the model's variables are what they are while this region runs."""
        self.has_run = True
        if self.stage:
            self.anatomy.behind.append(self._alive())

    def saved(self, tensor: torch.Tensor) -> _Saved:
        holding, stands = self._known.get(tensor.untyped_storage()), _Saved()
        if holding is not None and self.stage % 2 == 0:
            self._saved.append((weakref.ref(stands), holding, self.stage))
        return stands

    def note_what_is_saved(self) -> None:
        """Of what was saved, what the loss still holds: a result that nobody uses goes, and its graph with it."""
        gone = set()
        for number, (stands, holding, stage) in enumerate(self._saved):
            if stands() is None:
                gone.add(number)
            else:
                holding.saved_by.add(stage)
        for behind, numbers in self._in_graph:
            held = {id(h) for h in behind} | {id(self._saved[number][1]) for number in numbers if number in gone}
            behind[:] = [h for h in self.anatomy.holdings if h.size_bytes and id(h) in held]

    def mark(self, name: str) -> None:
        kind = name.split(" ")[0]
        if kind == "enter":
            self._end_region()
            self.stage += 1
        elif kind == "leave":
            self.stage += 1
            self.has_run = False
        elif kind == "forward" and self.stage:
            self.anatomy.is_empty.append(not self.has_run)
            if not self.has_run:
                self.anatomy.behind.append(self._alive())

    def _end_region(self) -> None:
        self.anatomy.is_empty.append(not self.has_run)
        alive = self._alive()
        if self.stage and not self.has_run:
            self.anatomy.behind.append(alive)  # behind the call before
        self.anatomy.behind.append(alive)

    def called(self, number: int, boundary: list[torch.Tensor], output: Any) -> None:
        self.anatomy.taken.append([self._of(t) for t in distinct_storages(boundary)])
        self.anatomy.given.append([self._of(t) for t in distinct_storages(tensors_in(output))])

    def _of(self, tensor: torch.Tensor) -> Holding | None:
        return self._known.get(tensor.untyped_storage())

    def _alive(self) -> list[Holding]:
        found = [h for h in self.anatomy.holdings if h.size_bytes and h.storage() is not None]
        in_graph = [number for number, (stands, _, _) in enumerate(self._saved) if stands() is not None]
        self._in_graph.append((found, in_graph))
        return found
