"""Memory as rows that add up, the optimizer's own step, shards, and the largest batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ckptplan.budget import plan_for_budget
from ckptplan.config import RunConfig
from ckptplan.costs import StageCost
from ckptplan.devices import DEVICES
from ckptplan.errors import InfeasibleTargetError
from ckptplan.footprint import (
    Room,
    Row,
    StaticBytes,
    footprint,
    optimizer_step_bytes,
    room_of,
    room_of_absent,
    sharded,
    static_bytes,
)
from ckptplan.larger_batches import largest_batch
from ckptplan.planners import smallest_reachable
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.run.estimate import plan_footprint

GIB = 2**30


def chain(samples: int = 1, count: int = 4, size: int = GIB) -> ChainProfile:
    """Blocks that save ``size`` for each sample and hand on a hundredth of it."""
    saved, out = size * samples, size * samples // 100
    blocks = tuple(
        BlockProfile(
            f"b{i}",
            output_bytes=(out,),
            output_gradient_bytes=out,
            keep=StageCost(saved, saved + out, saved + 2 * out),
            recompute=StageCost(0, saved // 2, saved + 2 * out),
            forward_time_ms=1.0,
            backward_time_ms=2.0,
            recompute_time_ms=1.0,
        )
        for i in range(count)
    )
    return ChainProfile(blocks)


def test_the_rows_add_up_to_all_of_the_device() -> None:
    room = room_of_absent(DEVICES["h100"])
    static = StaticBytes(10 * GIB, 10 * GIB, 20 * GIB, 5, 7 * GIB, gathered_bytes=GIB, shards=2)
    rows = footprint(room, static, 6 * GIB, 4 * GIB, "b3 backward")
    assert sum(row.size_bytes for row in rows) == room.total_bytes == DEVICES["h100"].memory_bytes
    sizes = {row.name: row.size_bytes for row in rows}
    assert sizes["activations kept"] + sizes["working memory"] == 6 * GIB
    assert sizes["left"] == room.left_bytes - 41 * GIB - 5 - 6 * GIB


def test_a_plans_rows_hold_what_its_blocks_keep_until_the_peak() -> None:
    room = Room("a device", 100 * GIB, (Row("margin", 10 * GIB),))
    static = StaticBytes(30 * GIB, 30 * GIB, 20 * GIB)
    planned = plan_for_budget(chain(size=4 * GIB), RunConfig(budget="auto"), static, torch.device("cpu"), room=room)
    assert planned.budget_bytes == 10 * GIB
    rows = {row.name: row.size_bytes for row in plan_footprint(room, static, chain(size=4 * GIB), planned.plan)}
    assert rows["activations kept"] + rows["working memory"] == planned.plan.predicted_peak_bytes
    assert rows["left"] == 10 * GIB - (planned.plan.predicted_peak_bytes or 0) >= 0
    assert rows["activations kept"] > 0


def test_what_stands_beside_activations_must_fit_and_so_must_the_optimizers_step() -> None:
    room = Room("a device", 100 * GIB, ())
    auto = partial(plan_for_budget, chain(), RunConfig(budget="auto"), device=torch.device("cpu"), room=room)
    with pytest.raises(InfeasibleTargetError, match=r"take 120.00 GiB[\s\S]*20.00 GiB too much"):
        auto(static=StaticBytes(30 * GIB, 30 * GIB, 60 * GIB))
    with pytest.raises(InfeasibleTargetError, match=r"own step 30\.00 GiB"):
        auto(static=StaticBytes(20 * GIB, 20 * GIB, 40 * GIB, 0, 30 * GIB))
    assert auto(static=StaticBytes(20 * GIB, 20 * GIB, 40 * GIB, 0, 19 * GIB)).budget_bytes == 20 * GIB


def test_the_host_has_room_and_its_rows_say_who_takes_it() -> None:
    room = room_of(torch.device("cpu"), own_bytes=1000)
    assert 0 < room.left_bytes < room.total_bytes
    assert [row.name for row in room.taken] == ["other processes and this program", "margin"]


@pytest.mark.parametrize(
    ("make", "on_cuda", "expected"),
    [
        (partial(torch.optim.SGD, lr=0.1), True, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), True, 0),
        (torch.optim.AdamW, True, 4 * (64 * 64 + 64) * 2),  # the denominators of all parameters at once
        (partial(torch.optim.AdamW, fused=True), True, 0),
    ],
)
def test_the_optimizers_own_step_by_hand(make, on_cuda: bool, expected: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    found = optimizer_step_bytes(make(model.parameters()), on_cuda=on_cuda)
    assert found == pytest.approx(expected, abs=64)


def test_one_parameter_after_the_other_takes_less_than_all_at_once() -> None:
    optimizer = torch.optim.AdamW(nn.Sequential(*(nn.Linear(32, 32) for _ in range(9))).parameters())
    one, every = (optimizer_step_bytes(optimizer, on_cuda=on_cuda) for on_cuda in (False, True))
    assert one is not None
    assert every is not None
    assert 0 < one < every


def test_shards_divide_what_stands_and_keep_whole_what_is_gathered() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)), nn.Linear(10, 3, bias=False))
    whole = static_bytes(model, torch.optim.AdamW(model.parameters()))
    part = sharded(whole, model, [model[i] for i in range(4)], 4)
    assert (part.weights_bytes, part.gradients_bytes) == (430, 430)
    assert part.optimizer_bytes == -(-(whole.optimizer_bytes or 0) // 4)
    assert part.gathered_bytes == 30 * 4 + 3 * 400
    assert part.shards == 4


@pytest.mark.parametrize("room", [GIB, 3 * GIB, 10 * GIB + 17, 57 * GIB])
def test_the_largest_batch_is_the_one_that_a_search_over_all_finds(room: int) -> None:
    asked = []

    def profiled(samples: int) -> ChainProfile:
        asked.append(samples)
        return chain(samples)

    found = largest_batch(profiled, room, sample_bytes=1000)
    fitting = [n for n in range(1, 80) if smallest_reachable(chain(n))[0] + 1000 * n <= room]
    assert found.samples == max(fitting, default=0)
    assert len(set(asked)) <= 4
    assert str(found.samples) in found.text or "not even one" in found.text


def test_the_largest_batch_where_the_peak_bends() -> None:
    """From five samples on a kernel takes more: the line through one and two leads too far."""

    def profiled(samples: int) -> ChainProfile:
        return chain(samples if samples < 5 else 2 * samples)

    for room in (4 * GIB, 9 * GIB, 20 * GIB, 33 * GIB):
        fitting = [n for n in range(1, 60) if smallest_reachable(profiled(n))[0] <= room]
        assert largest_batch(profiled, room).samples == max(fitting, default=0)
