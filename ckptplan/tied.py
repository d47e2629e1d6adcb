"""Weights that several stages use: what their gradients cost while they wait for each other.

The autograd engine hands a weight its gradient when all of it has come. That of a matrix which head and embedding
share waits in the engine from the head's backward to the embedding's, and every backward between stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ckptplan.choices import Choices, option_forward
from ckptplan.compiled_choices import compiled_forward
from ckptplan.costs import StageCost
from ckptplan.errors import BlockDeclarationError
from ckptplan.kinds import Kind, block_forward, settled_bytes, with_loss
from ckptplan.memory import make_meter
from ckptplan.offload_choices import offload_forward
from ckptplan.profiles import BlockProfile
from ckptplan.stages import Mark, StageForward, StageRun, gradients_handed_back, stage_bytes, time_stage
from ckptplan.subject import Subject
from ckptplan.trace import BlockCall, ChainTrace
from ckptplan.trees import tensors_in


@dataclass(frozen=True, eq=False)
class SharedWeight:
    """A tensor whose gradient has parts from several stages.

    Attributes:
        stages: their numbers, ascending; the last one's backward runs first.
        is_copied: the first part comes as a view, so the engine adds the second one to it in a new tensor.
    """

    tensor: torch.Tensor
    stages: tuple[int, ...]
    is_copied: bool

    @property
    def gradient_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class SharedWeights:
    """All of a model. Stage 0 is what runs before the blocks, then come the blocks, then what runs after them."""

    subject: Subject
    trace: ChainTrace
    memory: str  # the meter's name
    weights: tuple[SharedWeight, ...]

    @staticmethod
    def of(
        subject: Subject, trace: ChainTrace, regions: dict[str, StageForward], kinds: Sequence[Kind], memory: str
    ) -> SharedWeights:
        """Found by what belongs to each block, and in the graphs of the regions."""
        used = [_used_by_region(regions["pre"]) if "pre" in regions else []]
        used += [used_by_block(module, call) for module, call in zip(subject.modules, trace.calls, strict=True)]
        used += [_used_by_region(regions["post"]) if "post" in regions else []]
        tensors = {id(t): t for found in used for t in found}
        stages: dict[int, list[int]] = {key: [] for key in tensors}
        for stage, found in enumerate(used):
            for key in {id(t) for t in found}:
                stages[key].append(stage)
        none = SharedWeights(subject, trace, memory, ())
        weights = []
        for key, at in stages.items():
            if len(at) > 1:
                is_after = at[-1] == len(used) - 1
                last = regions["post"] if is_after else none.block_forward(at[-1] - 1, kinds[at[-1] - 1])
                weights.append(SharedWeight(tensors[key], tuple(at), _comes_as_view(last, tensors[key])))
        return replace(none, weights=tuple(weights))

    def waiting_bytes(self, stage: int) -> int:
        """Bytes of gradients that wait in the engine while ``stage`` runs its backward."""
        return sum(w.gradient_bytes for w in self.weights if w.stages[0] <= stage < w.stages[-1])

    def block_forward(self, order: int, kind: Kind) -> StageForward:
        """The block itself, kept; not the example of its kind."""
        own = replace(kind, module=self.subject.modules[order], call=self.trace.calls[order])
        return block_forward(own, self.subject.device, None)

    def stage_bytes(self, forward: StageForward, stage: int, *, waits: bool = False) -> StageCost:
        """Of one run in which the gradients that the stage begins stay, and room is taken where one is copied.

        ``waits``: what has come for the gradients that it ends stands beside it until then.
        """
        time_stage(forward, lambda: None)  # lazily made workspaces are there afterwards
        held: list[torch.Tensor] = []
        keep: Callable[[torch.Tensor], None] = held.append
        handles = [w.tensor.register_hook(keep) for w in self.weights if w.stages[-1] == stage]
        handles += [w.tensor.register_hook(_take_room) for w in self._copied_at(stage)]
        waiting = [w.tensor for w in self.weights if waits and w.stages[0] == stage]

        def beside_waiting(mark: Mark) -> StageRun:
            return replace(forward(mark), waiting=waiting)

        try:
            return stage_bytes(beside_waiting, make_meter(self.subject.device, self.memory))
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def of_calls(subject: Subject, trace: ChainTrace, kinds: Sequence[Kind], memory: str) -> SharedWeights:
        """Those of blocks that are called more than once, or share weights with others."""
        none = SharedWeights(subject, trace, memory, ())
        used = [used_by_block(module, call) for module, call in zip(subject.modules, trace.calls, strict=True)]
        weights = []
        for key, tensor in {id(t): t for found in used for t in found}.items():
            at = [order for order, found in enumerate(used) if any(id(t) == key for t in found)]
            if len(at) > 1:
                is_view = _comes_as_view(none.block_forward(at[-1], kinds[at[-1]]), tensor)
                weights.append(SharedWeight(tensor, tuple(order + 1 for order in at), is_view))
        return replace(none, weights=tuple(weights))

    def block_beside(
        self, block: BlockProfile, kind: Kind, choices: Choices | None = None, *, with_waiting: bool = True
    ) -> BlockProfile:
        """The block's figures beside the gradients that wait; those that it begins or copies are measured with it.

        What waits does so during a replay as well, like the gradient that comes in, and is counted with it. Without
        ``with_waiting`` it is left out: somebody else counts it.
        """
        stage = block.order + 1
        waiting_bytes = self.waiting_bytes(stage) if with_waiting else 0
        own = [w for w in self.weights if w.stages[-1] == stage or w in self._copied_at(stage)]
        own += [] if with_waiting else [w for w in self.weights if w.stages[0] == stage]
        if block.keep is None or not (waiting_bytes or own):
            return block
        own_kind = replace(kind, module=self.subject.modules[block.order], call=self.trace.calls[block.order])
        device = self.subject.device

        def beside(cost: StageCost, forward: StageForward) -> StageCost:
            found = with_loss(cost, waiting_bytes)
            return self._grown(found, forward, stage, waits=not with_waiting) if own else found

        keep = beside(block.keep, block_forward(own_kind, device, None))
        again = block.recompute and beside(block.recompute, block_forward(own_kind, device, own_kind.guards))
        of_options = zip(block.selective, choices.found if choices else (), strict=True)
        replayed = block.replayed_backward_peak_bytes
        grown_bytes = keep.backward_peak_bytes - block.keep.backward_peak_bytes  # what waits is in it
        return replace(
            block,
            keep=keep,
            recompute=again,
            replayed_backward_peak_bytes=None if replayed is None else replayed + grown_bytes,
            selective=tuple(
                replace(option, cost=beside(option.cost, option_forward(own_kind, choice.saved_ops, device)))
                for option, choice in of_options
            ),
            compiled=tuple(
                replace(option, cost=beside(option.cost, compiled_forward(own_kind, option.budget, device)))
                for option in block.compiled
            ),
            offload=tuple(
                replace(option, cost=beside(option.cost, offload_forward(own_kind, device))) for option in block.offload
            ),
            output_gradient_bytes=(block.output_gradient_bytes or 0) + waiting_bytes,
        )

    def ended_bytes(self, stage: int) -> int:
        """Of gradients that wait until this stage and end in it."""
        return sum(w.gradient_bytes for w in self.weights if w.stages[0] == stage)

    def _grown(self, cost: StageCost, forward: StageForward, stage: int, *, waits: bool) -> StageCost:
        """The cost where gradients that the stage begins stay or are copied: its backward peaks higher."""
        without = settled_bytes(forward, self.subject.device, self.memory)
        with_them = self.stage_bytes(forward, stage, waits=waits)
        grown = with_loss(cost, with_them.backward_peak_bytes - without.backward_peak_bytes)
        beside_bytes = grown.backward_peak_bytes - with_them.backward_peak_bytes  # the loss, and what waits
        return replace(grown, inputs_let_go=with_loss(with_them, beside_bytes).inputs_let_go)

    def _copied_at(self, stage: int) -> list[SharedWeight]:
        return [w for w in self.weights if w.is_copied and w.stages[-2] == stage]


def require_copies_of_their_own(subject: Subject, calls: Sequence[BlockCall], kinds: Sequence[Kind]) -> None:
    """Raise ``BlockDeclarationError`` where two calls share copies of weights in autocast's cache.

    What one of them needs would depend on what becomes of the other, which no figures of single blocks can say.
    """
    users: dict[int, int] = {}
    for order, (module, call, kind) in enumerate(zip(subject.modules, calls, kinds, strict=True)):
        enabled, _, is_cached = call.autocast
        if not (enabled and is_cached):
            continue
        names = {id(weight): name for name, weight in kind.module.named_parameters(remove_duplicate=False)}
        for weight in kind.copied_weights:
            name = names.get(id(weight))
            own = weight if name is None else module.get_parameter(name)  # or one that it is handed
            first = users.setdefault(id(own), order)
            if first != order and own.requires_grad:
                raise BlockDeclarationError(
                    f"{subject.names[first]!r} and {subject.names[order]!r} compute with one weight "
                    f"({name or 'handed to both'}) under an autocast that keeps one copy of it for both, so what one "
                    "takes depends on the other: enter it with torch.autocast(..., cache_enabled=False)"
                )


def used_by_block(module: nn.Module, call: BlockCall) -> list[torch.Tensor]:
    """Its parameters, and what of the batch or the model reaches it beside the chain."""
    given = (t for t in tensors_in((call.args, call.kwargs)) if t.is_leaf)
    return [t for t in (*module.parameters(), *given) if t.requires_grad]


def _used_by_region(forward: StageForward) -> list[torch.Tensor]:
    """The leaves of its graph."""
    run = forward(lambda name: None)
    to_visit = [t.grad_fn for t in tensors_in(run.output) if t.grad_fn is not None]
    seen = set(to_visit)
    leaves: list[torch.Tensor] = []
    while to_visit:
        node = to_visit.pop()
        if hasattr(node, "variable"):  # a leaf's accumulator
            leaves.append(node.variable)
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        to_visit += following
    return leaves


def _comes_as_view(forward: StageForward, tensor: torch.Tensor) -> bool:
    """Whether the gradient that the stage makes for ``tensor`` shares its memory with another tensor."""
    found: list[bool] = []

    def note(gradient: torch.Tensor) -> None:
        found.append(gradient._is_view())

    handle = tensor.register_hook(note)
    try:
        gradients_handed_back(forward)
    finally:
        handle.remove()
    return any(found)


def _take_room(gradient: torch.Tensor) -> None:
    torch.empty_like(gradient)
