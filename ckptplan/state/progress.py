"""How far a job has got through its data, sample by sample, also when the number of its ranks changes on the way.

The example of a `Resharder` for what every rank has of its own: a position cannot be cut like a tensor, but what the
ranks have taken together determines what is left, and that is dealt out anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckptplan.state.resharder import Resharder


class DataProgress:
    """The numbers of the samples of one rank, epoch by epoch, in an order that all ranks share.

        progress = DataProgress(len(dataset), rank, world_size, seed=7)
        for number in progress:                       # the rest of this epoch; the next loop is the next epoch
            step(dataset[number])

    Saved as an item of `scope="per_rank"` with a `DataProgressResharder`, it goes on under any number of ranks: no
    sample of the epoch is lost or taken twice. Ranks may have taken different numbers of samples when they save, but
    must be in the same epoch.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, *, seed: int | None = 0) -> None:
        """`seed`: of the order of each epoch; None: the samples in their own order."""
        if num_samples < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"num_samples={num_samples}, rank={rank}, world_size={world_size}: expected at least one sample, and a "
                "rank below the number of ranks"
            )
        self.num_samples, self.rank, self.world_size, self.seed = num_samples, rank, world_size, seed
        self.epoch = 0
        self.taken = 0  # by this rank, since the number of ranks was last changed
        self._earlier: list[list[int]] = []  # before that: how many each rank had taken, for each number of ranks

    def __iter__(self) -> Iterator[int]:
        """The samples of this rank that are left in the epoch; a sample counts as taken when it is handed out."""
        mine = self.left()[self.rank :: self.world_size]
        while self.taken < len(mine):
            self.taken += 1
            yield int(mine[self.taken - 1])
        self.epoch, self.taken, self._earlier = self.epoch + 1, 0, []

    def left(self) -> np.ndarray[Any, Any]:
        """What was left of the epoch, in order, when the number of ranks was last changed."""
        left = np.arange(self.num_samples)
        if self.seed is not None:
            left = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)
        for taken in self._earlier:
            is_taken = np.zeros(len(left), bool)
            for rank, count in enumerate(taken):
                is_taken[rank :: len(taken)][:count] = True
            left = left[~is_taken]
        return left

    def state_dict(self) -> dict[str, Any]:
        """Whole numbers only."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "epoch": self.epoch,
            "taken": self.taken,
            "earlier": [list(taken) for taken in self._earlier],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the progress through other data, or in another order."""
        for name in ("num_samples", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(f"saved with {name}={state[name]}, this one has {name}={getattr(self, name)}")
        self.epoch, self.taken = state["epoch"], state["taken"]
        self._earlier = [list(taken) for taken in state["earlier"]]


class DataProgressResharder(Resharder):
    """Deals what is left of the epoch out to another number of ranks."""

    def redistribute(self, saved: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
        """The same for every rank: all that it needs is how far each of the earlier ones had got."""
        for name in ("num_samples", "seed", "epoch", "earlier"):
            if any(state[name] != saved[0][name] for state in saved):
                told = ", ".join(f"rank {number}: {state[name]}" for number, state in enumerate(saved))
                raise ValueError(
                    f"the ranks did not save the same {name} ({told}); save at one place of the loop on all"
                )
        taken = [state["taken"] for state in saved]
        return {**saved[0], "taken": 0, "earlier": [*saved[0]["earlier"], taken]}
