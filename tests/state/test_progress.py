"""Data loader progress under a changing number of ranks: the epoch's samples, each once."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptplan.errors import StateMismatchError
from ckptplan.state import CheckpointManager, DataProgress, DataProgressResharder, ItemSpec
from tests.state.thread_ranks import ThreadRank, on_ranks

stages = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=4)


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(0, 5)), stages, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_no_sample_is_lost_or_taken_twice(
    num_samples: int, seed: int | None, stages: list[list[int]], last: int
) -> None:
    """Each stage is a number of ranks, each of which takes so many samples (or what there is) before all save."""
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for takes in [*stages, [num_samples] * last]:
        ranks = [DataProgress(num_samples, rank, len(takes), seed=seed) for rank in range(len(takes))]
        for rank, progress in enumerate(ranks):
            if states:
                same = len(states) == len(takes)
                resharder = DataProgressResharder()
                progress.load_state_dict(states[rank] if same else resharder.redistribute(states, rank, len(takes)))
        for progress, take in zip(ranks, takes, strict=True):
            left = len(progress.left()[progress.rank :: progress.world_size]) - progress.taken
            seen += islice(progress, min(take, left))
            assert progress.epoch == 0
        states = [progress.state_dict() for progress in ranks]
    assert sorted(seen) == list(range(num_samples))


def test_with_the_same_ranks_the_order_goes_on_as_it_would_have() -> None:
    whole = list(DataProgress(20, 1, 3, seed=4))
    first = DataProgress(20, 1, 3, seed=4)
    begun = list(islice(first, 2))
    second = DataProgress(20, 1, 3, seed=4)
    second.load_state_dict(first.state_dict())
    assert [*begun, *second] == whole
    assert second.epoch == 1
    assert list(second) != whole, "another epoch, another order"


def test_four_ranks_save_and_three_go_on_through_a_manager(tmp_path: Path) -> None:
    items = {"data": ItemSpec(scope="per_rank", resharder=DataProgressResharder())}

    def begin(coordinator: ThreadRank) -> list[int]:
        progress = DataProgress(50, coordinator.rank, coordinator.world_size)
        taken = list(islice(progress, 3 + coordinator.rank))
        with CheckpointManager(tmp_path, mode="sync", items=items, coordinator=coordinator) as states:
            states.save("a", {"data": progress}).result(30)
        return taken

    def go_on(coordinator: ThreadRank) -> list[int]:
        progress = DataProgress(50, coordinator.rank, coordinator.world_size)
        with CheckpointManager(tmp_path, mode="sync", items=items, coordinator=coordinator) as states:
            assert states.load("a", into={"data": progress})["data"] is progress
        return list(progress)

    seen = [number for taken in (*on_ranks(4, begin), *on_ranks(3, go_on)) for number in taken]
    assert sorted(seen) == list(range(50))


def test_ranks_in_different_epochs_load_nothing_anywhere(tmp_path: Path) -> None:
    items = {"data": ItemSpec(scope="per_rank", resharder=DataProgressResharder())}

    def begin(coordinator: ThreadRank) -> None:
        progress = DataProgress(10, coordinator.rank, 2)
        progress.epoch = coordinator.rank
        with CheckpointManager(tmp_path, mode="sync", items=items, coordinator=coordinator) as states:
            states.save("a", {"data": progress, "lr": 0.5}).result(30)

    on_ranks(2, begin)
    progress = DataProgress(10, 0, 1)
    why = r"data: the ranks did not save the same epoch \(rank 0: 0, rank 1: 1\)"
    with CheckpointManager(tmp_path, mode="sync", items=items) as states, pytest.raises(StateMismatchError, match=why):
        states.load("a", into={"data": progress, "lr": 0.0})
    assert progress.state_dict() == DataProgress(10, 0, 1).state_dict()


def test_a_per_rank_item_without_a_resharder_tells_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    items = {"rng": ItemSpec(scope="per_rank")}

    def begin(coordinator: ThreadRank) -> None:
        with CheckpointManager(tmp_path, mode="sync", items=items, coordinator=coordinator) as states:
            states.save("a", {"rng": coordinator.rank}).result(30)

    on_ranks(3, begin)

    def load(coordinator: ThreadRank) -> Any:
        with CheckpointManager(tmp_path, mode="sync", items=items, coordinator=coordinator) as states:
            try:
                return states.load("a", into={"rng": -1})["rng"]
            except StateMismatchError as error:
                return str(error)

    assert on_ranks(2, load) == [0, 1]
    assert [record.message for record in caplog.records] == [
        "rng was saved per rank by 3 ranks: what rank 2 saved is not loaded"
    ]
    for message in on_ranks(4, load):
        assert "saved per rank by 3 ranks, so rank 3 has none; leave it out of into=" in message


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="saved with num_samples=10, this one has num_samples=11"):
        DataProgress(11, 0, 1).load_state_dict(DataProgress(10, 0, 1).state_dict())
    with pytest.raises(ValueError, match="expected at least one sample"):
        DataProgress(5, 2, 2)
