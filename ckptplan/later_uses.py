"""What else takes the inputs of blocks, and so sends a part of their gradient before a block's own backward.

Found in one backward of a skeleton step: the gradients that the model's own code sends, and where they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptplan.skeleton import Skeleton, entered_call, left_call
from ckptplan.stages import GradientLayout, SharedGradient, layout_of
from ckptplan.trace import BlockCall
from ckptplan.trees import storage_key, tensors_in


def ignore(name: str) -> None:
    pass


Place = tuple[int, int]  # a call, and a position in its boundary

_FIRST_APART = 1_000_000  # numbers of storages that are told apart from those of whole layouts, which count from 0


@dataclass(frozen=True)
class _Sent:
    """A gradient that the model's own code sends along an edge of the graph (to an output of a node)."""

    edge: tuple[Any, int]
    memory: int  # by ``storage_key``
    layout: SharedGradient | None


@dataclass
class LaterUses:
    """What else takes the inputs of calls, and so sends a part of their gradient before the call's own backward.

    Attributes:
        by_calls: per input the later calls that take the same tensor.
        by_model: per input that the model's own code takes too (a loss on hidden states, ``x + block(x)``), what has
            come from there.
        arriving: per call the memory of the gradients that come to its output, with the output's position.
        held: per call the positions of those gradients that somebody holds on to for another purpose than ``by_model``.
    """

    by_calls: dict[Place, list[Place]] = field(default_factory=dict)
    by_model: dict[Place, list[_Sent]] = field(default_factory=dict)
    arriving: dict[int, dict[int, int]] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def of(skeleton: Skeleton) -> LaterUses:
        uses = LaterUses()
        seen: dict[int, list[Place]] = {}
        edges: dict[Place, tuple[Any, int]] = {}
        taken: list[torch.Tensor] = []  # held, so that no identity is given twice

        def note(number: int, boundary: list[torch.Tensor], output: object) -> None:
            taken.extend(boundary)
            for position, tensor in enumerate(boundary):
                seen.setdefault(id(tensor), []).append((number, position))
                edges[number, position] = (tensor.grad_fn, tensor.output_nr)

        step = skeleton.forward(ignore, note)
        uses.by_calls = {place: places[i + 1 :] for places in seen.values() for i, place in enumerate(places)}
        sent: list[_Sent] = []
        for node in nodes_of(step.loss):
            if left_call(node) is not None:
                _when_reached(node, uses, edges, sent)
            elif entered_call(node) is None and hasattr(node, "next_functions"):
                _note_sent(node, sent)
        step.backward()
        return uses

    def waiting_at(self, place: Place, arriving: GradientLayout, call: BlockCall) -> SharedGradient | None:
        """How the one part from the model's own code lies: maybe in memory of a gradient that comes to the call."""
        (part,) = self.by_model[place]
        position = self.arriving[place[0]].get(part.memory)
        if position is None:
            return _apart(part.layout, place[1])
        output = list({id(t): t for t in tensors_in(call.output)}.values())[position]
        shared = arriving[position] or _whole(output, _FIRST_APART - 1 - position)
        arriving[position] = shared
        own = part.layout or _whole(call.boundary[place[1]], 0)
        return replace(own, storage=shared.storage, storage_bytes=shared.storage_bytes)


def _when_reached(node: Any, uses: LaterUses, edges: Mapping[Place, tuple[Any, int]], sent: Sequence[_Sent]) -> None:
    """As the gradients come to a call: what was sent before waits, for its inputs or for somebody else."""
    number = node.number
    own = {edge: place for place, edge in edges.items() if place[0] == number}

    def note(gradients: Sequence[torch.Tensor | None]) -> None:
        present = [(p, g) for p, g in zip(node.positions, gradients, strict=True) if g is not None]
        uses.arriving[number] = {storage_key(g): p for p, g in present}
        for part in sent:
            if part.edge in own:
                uses.by_model.setdefault(own[part.edge], []).append(part)
            elif part.memory in uses.arriving[number] and part.edge[0] is not node and _is_to_come(part.edge[0], node):
                uses.held.setdefault(number, set()).add(uses.arriving[number][part.memory])

    node.register_prehook(note)


def _is_to_come(node: Any, now: Any) -> bool:
    """Whether a node runs later than the one that runs now: the youngest come first."""
    return node is not None and bool(node._sequence_nr() < now._sequence_nr())


def _note_sent(node: Any, into: list[_Sent]) -> None:
    edges = node.next_functions

    def note(gradients: Sequence[torch.Tensor | None], _: object) -> None:
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                into.append(_Sent(edge, storage_key(gradient), layout_of([gradient])[0]))

    node.register_hook(note)


def _apart(layout: SharedGradient | None, position: int) -> SharedGradient | None:
    """With a number of its own for the storage."""
    return layout and replace(layout, storage=_FIRST_APART + position)


def _whole(tensor: torch.Tensor, storage: int) -> SharedGradient:
    """A gradient of the tensor's shape that fills a storage."""
    shape = tensor.shape
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return SharedGradient(storage, tensor.numel() * tensor.element_size(), stride, 0)


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    return [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]


def nodes_of(loss: torch.Tensor) -> list[Any]:
    """All of the graph."""
    to_visit: list[Any] = [loss.grad_fn]
    seen = set(to_visit)
    found: list[Any] = []
    while to_visit:
        node = to_visit.pop()
        found.append(node)
        following = {after for after, _ in getattr(node, "next_functions", ()) if after is not None} - seen
        seen |= following
        to_visit += following
    return found
