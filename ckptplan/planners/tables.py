"""The memory model as arrays, for planners of flat plans: levels of a choice, and what one change would do.

A flat plan is a choice per block: keep (False) or recompute (True). Everything here is exact; the simulator and
the referee say the same about the same plan (tests hold all three against brute force).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptplan.costs import StageCost
from ckptplan.nodes import PlanNode, flat_nodes
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, MemoryModel, as_chain, recompute_costs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

KEEP, RECOMPUTE = 0, 1
NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class PlannerResult:
    """What a planner hands back: the tree, and how far it may be from the best of its kind.

    ``optimality_gap`` is relative: 0.0 proved optimal, 0.02 at most 2 % above the optimum, None nothing known.
    """

    nodes: tuple[PlanNode, ...]
    optimality_gap: float | None = None


@dataclass(frozen=True)
class StageTable:
    """One stage of the chain; index 0 of each pair is keep, index 1 recompute (None: not allowed)."""

    costs: tuple[StageCost, StageCost | None]
    inputs: tuple[int, ...]  # storage numbers
    outputs: tuple[int, ...]
    work: float = 0.0  # what recomputing it costs


class Transition(NamedTuple):
    """One way to run a stage in one state.

    Attributes:
        need: most bytes alive in its forward and backward, above what the stages before it retain.
        retained: bytes it adds to what is retained.
    """

    option: int
    need: int
    retained: int
    next_state: int
    work: float


class FlatTables:
    """Stages, boundary storages and costs of a chain under one memory model."""

    def __init__(
        self, profile: ChainProfile | Sequence[BlockProfile], memory_model: MemoryModel, cost: CostKind | None = None
    ) -> None:
        """Without ``cost`` each block costs 1 to recompute, for questions that are not about cost."""
        chain = as_chain(profile)
        self.num_blocks = len(chain)
        self.work: tuple[float | None, ...] = (
            tuple(1.0 if block.eligible_for_checkpoint else None for block in chain)
            if cost is None
            else recompute_costs(chain, cost)
        )
        self.eligible: Bools = np.array([work is not None for work in self.work])
        self.storage_bytes: list[int] = []
        self.first_stage = 0  # of block 0
        self.stages: list[StageTable] = []
        if memory_model == "additive":
            self._add_additive_stages(chain)
        else:
            self._add_stages(chain)
        self._make_arrays()

    # building

    def _add_additive_stages(self, chain: ChainProfile) -> None:
        for block, work in zip(chain, self.work, strict=True):
            kept = StageCost(block.activation_bytes_estimate or 0, 0, 0, (False,), (False,))
            dropped = None if work is None else StageCost(0, 0, 0, (False,), (False,))
            self.stages.append(StageTable((kept, dropped), (), (), work or 0.0))
        self.stages.append(StageTable((StageCost(0, 0, 0, (False,), (False,)), None), (), ()))

    def _add_stages(self, chain: ChainProfile) -> None:
        at_hand = self._new_storages([0] * len(chain.input_bytes))
        if chain.pre is not None:
            pre = chain.pre
            at_hand = self._add_stage((pre.cost, None), at_hand, pre.output_bytes, pre.output_is_input)
            self.first_stage = 1
        for block, work in zip(chain, self.work, strict=True):
            assert block.keep is not None  # require_memory
            costs = (block.keep, None if work is None else block.recompute)
            at_hand = self._add_stage(costs, at_hand, block.output_bytes, block.output_is_input, work or 0.0)
        if chain.post is not None:
            post = chain.post
            self._add_stage((post.cost, None), at_hand, post.output_bytes, post.output_is_input)
        else:
            gradient = chain[-1].output_gradient_bytes or 0
            self._add_stage((StageCost(0, 0, gradient, (False,), (False,)), None), at_hand, (), ())

    def _new_storages(self, sizes: Sequence[int]) -> tuple[int, ...]:
        first = len(self.storage_bytes)
        self.storage_bytes.extend(sizes)
        return tuple(range(first, len(self.storage_bytes)))

    def _add_stage(
        self,
        costs: tuple[StageCost, StageCost | None],
        inputs: tuple[int, ...],
        output_bytes: Sequence[int],
        output_is_input: Sequence[int | None],
        work: float = 0.0,
    ) -> tuple[int, ...]:
        outputs = tuple(
            self._new_storages([size])[0] if passed is None else inputs[passed]
            for size, passed in zip(output_bytes, output_is_input, strict=True)
        )
        self.stages.append(StageTable(costs, inputs, outputs, work))
        return outputs

    def _make_arrays(self) -> None:
        n, num_storages = len(self.stages), len(self.storage_bytes)
        self.saved, self.forward_peak, self.backward_peak = (np.zeros((2, n), np.int64) for _ in range(3))
        made_at, last_use = np.full(num_storages, -1), np.full(num_storages, -1)
        touches: list[tuple[int, int, bool, bool]] = []  # storage, stage, held when kept, held when recomputed
        for index, stage in enumerate(self.stages):
            kept, recomputed = stage.costs
            for option, figures in ((KEEP, kept), (RECOMPUTE, recomputed or kept)):
                self.saved[option, index] = figures.saved_bytes
                self.forward_peak[option, index] = figures.forward_peak_bytes
                self.backward_peak[option, index] = figures.backward_peak_bytes
            held = [held_storages(stage, option) for option in (KEEP, RECOMPUTE)]
            for storage in dict.fromkeys(stage.inputs + stage.outputs):
                if storage in held[KEEP] or storage in held[RECOMPUTE]:
                    touches.append((storage, index, storage in held[KEEP], storage in held[RECOMPUTE]))
            for storage in stage.inputs:
                last_use[storage] = index
            for storage in set(stage.outputs) - set(stage.inputs):
                made_at[storage] = last_use[storage] = index
        touches.sort()
        columns = np.array(touches, np.int64).reshape(-1, 4)
        self.touch_storage, self.touch_stage = columns[:, 0], columns[:, 1]
        self.touch_held: Bools = columns[:, 2:].T.astype(bool)
        self.size: Ints = np.array(self.storage_bytes, np.int64)
        self.made_at, self.last_use = made_at, last_use
        self.letting = [i for i, s in enumerate(self.stages) if any(cost and cost.inputs_let_go for cost in s.costs)]

    # judging a choice

    def by_stage(self, choice: Bools) -> Ints:
        """A choice over blocks as option numbers over stages."""
        options = np.zeros(len(self.stages), np.int64)
        options[self.first_stage : self.first_stage + self.num_blocks] = choice
        return options

    def first_keepers(self, options: Ints) -> tuple[Ints, Ints, Bools]:
        """Per storage the first and second stage that hold it under ``options`` (NEVER); per touch, does it hold."""
        held = self.touch_held[options[self.touch_stage], np.arange(len(self.touch_stage))]
        first, second = (np.full(len(self.size), NEVER) for _ in range(2))
        np.minimum.at(first, self.touch_storage[held], self.touch_stage[held])
        later = held & (self.touch_stage > first[self.touch_storage])
        np.minimum.at(second, self.touch_storage[later], self.touch_stage[later])
        return first, second, held

    def levels(self, choice: Bools) -> tuple[Ints, Ints]:
        """Most bytes alive in the forward and in the backward of each stage."""
        options = self.by_stage(choice)
        n = len(options)
        stage = np.arange(n)
        first, _, _ = self.first_keepers(options)
        kept = first < NEVER
        forward, backward = (np.zeros(n + 2, np.int64) for _ in range(2))
        np.add.at(forward, self.made_at + 1, self.size)
        np.subtract.at(forward, self.last_use[~kept] + 1, self.size[~kept])
        np.add.at(backward, np.maximum(first, self.made_at + 1)[kept], self.size[kept])
        saved = self.saved[options, stage]
        forward[1 : n + 1] += saved
        backward[1 : n + 1] += saved
        backward_peak = self.backward_peak[options, stage]
        for index in self.letting:
            backward_peak[index] += self._more_beside(index, int(options[index]), first)
        return np.cumsum(forward)[:n] + self.forward_peak[options, stage], np.cumsum(backward)[:n] + backward_peak

    def _more_beside(self, index: int, option: int, first_keepers: Ints) -> int:
        """By how much a stage's backward peaks higher because stages before it hold inputs that it lets go of."""
        stage = self.stages[index]
        cost = stage.costs[option]
        if cost is None:  # recomputed it is counted as kept, and never chosen
            return 0
        alone = [int(self.size[s]) if first_keepers[s] >= index else 0 for s in stage.inputs]
        return cost.backward_peak_beside(alone) - cost.backward_peak_bytes

    def peak(self, choice: Bools) -> int:
        """Most bytes alive in the whole step."""
        return self.peak_and_stage(choice)[0]

    def peak_and_stage(self, choice: Bools) -> tuple[int, int]:
        """The peak, and the first stage that reaches it."""
        levels = np.maximum(*self.levels(choice))
        stage = int(levels.argmax())
        return int(levels[stage]), stage

    def change_at(self, choice: Bools, stage: int, backward: bool) -> Ints:
        """Per block, by how many bytes the level at ``stage`` changes if that block alone is changed over."""
        options = self.by_stage(choice)
        first, second, _ = self.first_keepers(options)
        of, at = self.touch_storage, self.touch_stage
        other = np.where(at == first[of], second[of], first[of])
        flipped = self.touch_held[1 - options[at], np.arange(len(at))]
        after = np.minimum(other, np.where(flipped, at, NEVER))
        now_counts = self._counts(of, first[of], stage, backward)
        change = self.size[of] * (self._counts(of, after, stage, backward).astype(np.int64) - now_counts)
        per_stage = np.zeros(len(options), np.int64)
        np.add.at(per_stage, at, change)
        everywhere = np.arange(len(options))
        per_stage[:stage] += (self.saved[1 - options, everywhere] - self.saved[options, everywhere])[:stage]
        own = self.backward_peak if backward else self.forward_peak
        per_stage[stage] += own[1 - options[stage], stage] - own[options[stage], stage]
        if backward and stage in self.letting:
            self._add_letting_changes(per_stage, options, stage, first)
        return per_stage[self.first_stage : self.first_stage + self.num_blocks]

    def _add_letting_changes(self, per_stage: Ints, options: Ints, stage: int, first: Ints) -> None:
        """Of the stages that may hold an input of this one, and of itself: each changed over alone."""
        now = self._more_beside(stage, int(options[stage]), first)
        touching = np.isin(self.touch_storage, self.stages[stage].inputs) & (self.touch_stage <= stage)
        for index in {stage, *self.touch_stage[touching].tolist()}:
            changed = options.copy()
            changed[index] = 1 - options[index]
            per_stage[index] += self._more_beside(stage, int(changed[stage]), self.first_keepers(changed)[0]) - now

    def _counts(self, storage: Ints, first_keeper: Ints, stage: int, backward: bool) -> Bools:
        """Does the storage count at this stage when it is first held by ``first_keeper``?"""
        exists = self.made_at[storage] < stage
        if backward:
            return exists & (first_keeper <= stage)
        return exists & ((self.last_use[storage] >= stage) | (first_keeper < stage))

    # as a state machine

    def transitions(self) -> list[list[list[Transition]]]:
        """Per stage, per state (which storages at hand somebody holds already), the ways to run the stage.

        State 0 of stage 0 is the start. Only reachable states are listed; a chain of single tensors has one or two.
        """
        states: list[frozenset[int]] = [frozenset()]
        machine = []
        for stage in self.stages:
            numbers: dict[frozenset[int], int] = {}
            machine.append([self._ways(stage, state, numbers) for state in states])
            states = list(numbers)
        return machine

    def _ways(self, stage: StageTable, state: frozenset[int], numbers: dict[frozenset[int], int]) -> list[Transition]:
        at_hand, handed_on = set(stage.inputs), set(stage.outputs)
        ways = []
        for option, cost in enumerate(stage.costs):
            if cost is None:
                continue
            held = held_storages(stage, option)
            unheld_bytes = self._bytes_of(at_hand - state)
            newly_bytes = self._bytes_of((held & at_hand) - state)
            own_bytes = self._bytes_of((held & handed_on) - at_hand)
            alone = [0 if storage in state else self.storage_bytes[storage] for storage in stage.inputs]
            following = frozenset(s for s in handed_on if (s in held or s in state) and self.storage_bytes[s])
            ways.append(
                Transition(
                    option=option,
                    need=max(unheld_bytes + cost.forward_peak_bytes, newly_bytes + cost.backward_peak_beside(alone)),
                    retained=newly_bytes + own_bytes + cost.saved_bytes,
                    next_state=numbers.setdefault(following, len(numbers)),
                    work=stage.work if option == RECOMPUTE else 0.0,
                )
            )
        return ways

    def _bytes_of(self, storages: set[int] | frozenset[int]) -> int:
        return sum(self.storage_bytes[s] for s in storages)

    def total_work(self, choice: Bools) -> float:
        """Cost of the recomputation, summed in chain order."""
        return sum(work or 0.0 for work, chosen in zip(self.work, choice, strict=True) if chosen)

    def nodes(self, choice: Bools) -> tuple[PlanNode, ...]:
        return flat_nodes([bool(chosen) for chosen in choice])


def held_storages(stage: StageTable, option: int) -> set[int]:
    """Storages that the stage holds until its backward under this option (none where it is not allowed)."""
    cost = stage.costs[option]
    if cost is None:
        return set()
    held = set()
    for storages, flags in ((stage.inputs, cost.keeps_input), (stage.outputs, cost.keeps_output)):
        spread = flags * len(storages) if len(flags) == 1 else flags
        held |= {storage for storage, kept in zip(storages, spread, strict=True) if kept}
    return held
