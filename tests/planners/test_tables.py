"""The arrays of the memory model: levels as the simulator has them, and what one change does to each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptplan.planners.tables import FlatTables
from ckptplan.profiles import ChainProfile
from ckptplan.simulate import simulate_plan

Make = Callable[..., ChainProfile]


def _choices(tables: FlatTables, seed: int) -> list[Any]:
    rng = random.Random(seed)
    drawn = [np.array([rng.random() < 0.5 for _ in range(tables.num_blocks)]) for _ in range(3)]
    return [choice & tables.eligible for choice in (np.ones(tables.num_blocks, bool), *drawn)]


def test_levels_are_those_of_the_simulator_stage_by_stage(make_random: Make) -> None:
    for seed in range(40):
        chain = make_random(seed)
        tables = FlatTables(chain, "peak")
        for choice in _choices(tables, seed):
            timeline = simulate_plan(chain, tables.nodes(choice)).timeline
            forward, backward = tables.levels(choice)
            assert [*forward.tolist(), *backward[::-1].tolist()] == [level for _, _, level in timeline]


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
def test_a_change_is_the_difference_of_two_levels(make_random: Make, memory_model: Any) -> None:
    for seed in range(20):
        chain = make_random(seed, most_blocks=7)
        tables = FlatTables(chain, memory_model)
        for choice in _choices(tables, seed):
            before = tables.levels(choice)
            for block in np.flatnonzero(tables.eligible):
                flipped = choice.copy()
                flipped[block] ^= True
                after = tables.levels(flipped)
                for stage in range(len(tables.stages)):
                    for phase in (0, 1):
                        change = tables.change_at(choice, stage, backward=bool(phase))[block]
                        assert change == after[phase][stage] - before[phase][stage], (seed, block, stage, phase)


@pytest.mark.parametrize("memory_model", ["peak", "additive"])
def test_walking_the_state_machine_gives_the_same_peak(make_random: Make, memory_model: Any) -> None:
    for seed in range(40):
        tables = FlatTables(make_random(seed), memory_model)
        machine = tables.transitions()
        for choice in _choices(tables, seed):
            state, retained, peak = 0, 0, 0
            for ways, option in zip(machine, tables.by_stage(choice), strict=True):
                way = next(way for way in ways[state] if way.option == option)
                peak = max(peak, retained + way.need)
                state, retained = way.next_state, retained + way.retained
            assert peak == tables.peak(choice)


def test_a_chain_of_single_tensors_has_at_most_two_states(make_random: Make) -> None:
    chains = [make_random(seed) for seed in range(60)]
    single = [c for c in chains if all(len(block.output_bytes) == 1 for block in c) and len(c.input_bytes) == 1]
    assert len(single) >= 5
    assert max(len(states) for c in single for states in FlatTables(c, "peak").transitions()) == 2
