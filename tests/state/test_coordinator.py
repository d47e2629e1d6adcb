"""Ranks that meet in a store: all hear the same, and one that is missing is named in a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ckptplan.errors import StateError
from ckptplan.state.coordinator import StoreCoordinator, current_coordinator


def on_threads(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


class Shared(StoreCoordinator):
    """A rank that is a thread: the count of rounds is each rank's own, the keys are not."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(store, rank, world_size, timeout_s=timeout_s, name=f"{id(store)}-{rank}")

    def _key(self, number: int) -> str:
        return f"shared/{number}"


def test_every_rank_hears_all_and_little_is_left_in_the_store() -> None:
    store = dist.HashStore()

    def work(rank: int) -> list[Any]:
        coordinator = Shared(store, rank, 3, 20)
        return [coordinator.all_gather({"rank": rank, "round": number}) for number in range(4)]

    for told in on_threads(3, work):
        assert told == [[{"rank": rank, "round": number} for rank in range(3)] for number in range(4)]
    assert store.num_keys() <= 3, "the last round's outcome, as the next one has not begun"


def test_a_long_value_passes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.state.coordinator._PIECE_BYTES", 100)
    store = dist.HashStore()
    value = [f"{number * 7919 % 10007}" for number in range(2000)]
    for told in on_threads(2, lambda rank: Shared(store, rank, 2, 20).all_gather([rank, value])):
        assert told == [[0, value], [1, value]]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_come_is_named_on_all_others_in_time(missing: int) -> None:
    store = dist.HashStore()

    def work(rank: int) -> Any:
        coordinator = Shared(store, rank, 3, 0.5)
        started = time.monotonic()
        if rank == missing:
            return None
        with pytest.raises(StateError) as caught:
            coordinator.all_gather(1)
        return str(caught.value), time.monotonic() - started

    told = on_threads(3, work)
    for rank in {0, 1, 2} - {missing}:
        message, waited_s = told[rank]
        assert message == f"rank {missing} has not answered in 0.5 s: ended, hanging, or doing something else"
        assert waited_s < 3


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_too_late_hears_the_same_and_the_next_round_works(late: int) -> None:
    store = dist.HashStore()
    has_failed = threading.Event()

    def work(rank: int) -> list[Any]:
        coordinator = Shared(store, rank, 2, 0.4)
        heard: list[Any] = []
        if rank == late:
            has_failed.wait(20)
        try:
            heard.append(coordinator.all_gather(rank))
        except StateError as error:
            heard.append(str(error))
        has_failed.set()
        heard.append(coordinator.all_gather(["again", rank]))
        return heard

    for heard in on_threads(2, work):
        assert heard[0].startswith(f"rank {late} has not answered in 0.4 s")
        assert heard[1] == [["again", 0], ["again", 1]]


def test_a_store_that_is_gone_is_a_clear_error() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer\nlong trace")

    with pytest.raises(StateError, match=r"rank 1 has lost the store .* \(Connection reset by peer\)"):
        Shared(Gone(), 1, 2, 1.0).all_gather(1)


def test_without_a_process_group_there_is_one_process() -> None:
    assert current_coordinator(1.0).world_size == 1
    assert current_coordinator(1.0).all_gather({"a": 1}) == [{"a": 1}]
