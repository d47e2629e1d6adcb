"""Several processes, replicated (gloo): one checkpoint together, or none, and the same answer on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan.errors import CheckpointNotFoundError
from ckptplan.state import CheckpointManager, ItemSpec

PREAMBLE = """
import json, os, sys, time
import torch, torch.distributed as dist
from ckptplan.errors import *
from ckptplan.state import CheckpointManager, ItemSpec, StorageConfig
rank, world, location, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def meet():
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=world)
def tell(**facts):
    print(json.dumps(facts), flush=True)
"""


def run_ranks(tmp_path: Path, code: str, world: int = 2, killed: int | None = None) -> list[dict[str, Any]]:
    """What each rank told, by rank; every rank must end well, but for one that kills itself, which tells nothing."""
    meeting = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, str(rank), str(world), str(tmp_path / "s"), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = []
    for number, process in enumerate(ranks):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == (-9 if number == killed else 0), f"rank {number}: {errors}"
        if number == killed:
            continue
        told.append(json.loads(output.splitlines()[-1]))
    return told


SAVE_AND_LOAD = """
states = CheckpointManager(location, items={"mine": ItemSpec(scope="per_rank")}, keep_last=2)
meet()  # after the manager was made: it must not think that it is alone
weights = torch.arange(300_000.0)
for step in range(3):
    mine = {"rng": torch.full((3,), rank), "r": rank}
    future = states.save(f"s-{step}", {"model": {"w": weights + step}, "mine": mine, "step": step})
    info = future.result(60)
loaded = states.load("latest", into={"model": {"w": torch.zeros(300_000)}, "mine": {"rng": None, "r": -1}, "step": -1})
tell(step=loaded["step"], r=loaded["mine"]["r"], rng=loaded["mine"]["rng"].tolist(),
     right=bool(torch.equal(loaded["model"]["w"], weights + 2)), world=info.world_size, latest=states.latest())
states.wait()
states.close()
"""


def test_two_ranks_make_one_checkpoint_and_each_gets_its_own_values_back(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, SAVE_AND_LOAD)
    for rank, facts in enumerate(told):
        assert facts == {"step": 2, "r": rank, "rng": [rank] * 3, "right": True, "world": 2, "latest": "s-2"}
    folder = tmp_path / "s" / "s-2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "mine.0.safetensors", "mine.1.safetensors", "model.0.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "s" / "s-2" / "model.0.safetensors").stat().st_size < 1_210_000, (
        "replicated data is written once"
    )
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [".lock", "s-1", "s-2"]
    with CheckpointManager(tmp_path / "s") as states:
        assert states.verify("s-2") == []
        alone = states.load("s-2", into={"model": None, "step": 0, "mine": None})
        assert alone["step"] == 2
        assert alone["mine"]["r"] == 0


def test_what_is_saved_by_one_is_loaded_by_two_but_for_what_is_per_rank(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "s") as states:
        states.save("a", {"model": {"w": torch.ones(4)}, "lr": 0.5, "mine": {"r": 0}}).result()
    with CheckpointManager(tmp_path / "s", items={"mine": ItemSpec(scope="per_rank")}) as states:
        states.save("b", {"model": {"w": torch.ones(4)}, "lr": 0.5, "mine": {"r": 0}}).result()
    told = run_ranks(
        tmp_path,
        """
meet()
states = CheckpointManager(location)
loaded = states.load("a", into={"model": {"w": torch.zeros(4)}, "lr": 0.0})
target = torch.zeros(4)
try:
    states.load("b", into={"model": {"w": target}, "mine": {"r": 1}})
    error = ""
except StateError as caught:
    error = str(caught)
tell(lr=loaded["lr"], w=loaded["model"]["w"].tolist(), error=error, untouched=bool((target == 0).all()))
states.close()
""",
    )
    for facts in told:
        assert facts["lr"] == 0.5
        assert facts["w"] == [1, 1, 1, 1]
        assert "saved per rank by 1 ranks, so rank 1 has none" in facts["error"]
        assert facts["untouched"], "on every rank, also on the one that could have loaded"


FAILURES = """
meet()
states = CheckpointManager(location, mode=MODE, timeout_s=20)
good = {"w": torch.ones(10), "n": 1}
outcomes = []
def outcome(name, payload):
    error = states.save(name, payload).exception(60)
    outcomes.append(type(error).__name__ if error else "ok")
    return str(error)
outcome("first", good)
text = outcome("unsaveable", {"w": print if rank == 1 else torch.ones(10), "n": 1})
differs = outcome("differs", {"w": torch.ones(10), "n": rank})
small = outcome("differs-in-a-small-tensor", {"w": torch.full((10,), float(rank)), "n": 1})
names = outcome("names", {"w": good["w"], ("a" if rank else "b"): 1})
outcome("first", good)
outcome("last", good)
there = [info.checkpoint_id for info in states.list()]
tell(outcomes=outcomes, text=text, differs=differs, small=small, names=names, there=there)
states.close()
"""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_failure_on_one_rank_fails_that_save_on_all_and_the_next_works(tmp_path: Path, mode: str) -> None:
    """The predecessor reported success for a checkpoint that held only one rank's shard."""
    told = run_ranks(tmp_path, FAILURES.replace("MODE", repr(mode)))
    assert [facts["outcomes"][0] for facts in told] == ["ok", "ok"]
    assert told[1]["outcomes"][1] == "UnsaveableValueError"
    assert told[0]["outcomes"][1] == "SaveFailedError"
    assert "rank 1:" in told[0]["text"]
    for facts in told:
        assert facts["outcomes"][2:5] == ["SaveFailedError"] * 3
        assert "differ between ranks: n;" in facts["differs"]
        assert "differ between ranks: w;" in facts["small"]
        assert "rank 1 saves" in facts["names"]
        assert facts["outcomes"][6] == "ok"
        assert facts["there"] == ["first", "last"]
    assert told[0]["outcomes"][5] == "DuplicateCheckpointError"
    assert told[1]["outcomes"][5] == "SaveFailedError"


WRITER_DIES = """
import signal
meet()
states = CheckpointManager(location, items={"mine": ItemSpec(scope="per_rank")}, timeout_s=30)
payload = {"mine": torch.ones(1000), "n": 1}
states.save("first", payload).result(60)
if rank == 1:
    os.kill(states.writer_pid, signal.SIGSTOP)
future = states.save("second", payload)
if rank == 1:
    os.kill(states.writer_pid, signal.SIGKILL)
error = future.exception(60)
dist.barrier()
third = states.save("third", payload).exception(60)
dist.barrier()
tell(error=repr(error), third=repr(third), there=[i.checkpoint_id for i in states.list()])
states.close()
"""


def test_a_rank_whose_writer_dies_publishes_nothing_half(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, WRITER_DIES)
    assert "WriterDiedError" in told[1]["error"]
    assert "rank 1 failed: the writer process" in told[0]["error"]
    for facts in told:
        assert facts["third"] == "None"
        assert facts["there"] == ["first", "third"]
    with CheckpointManager(tmp_path / "s") as states:
        assert states.verify("first") == states.verify("third") == []


RANK_DIES = """
import signal
meet()
states = CheckpointManager(location, items={"mine": ItemSpec(scope="per_rank")}, timeout_s=5)
payload = {"w": torch.ones(1000), "mine": torch.full((5,), rank), "n": 1}
states.save("first", payload).result(60)
if rank == 1:
    if WHEN == "handed over":
        states.save("second", payload)
    os.kill(os.getpid(), signal.SIGKILL)
errors = [states.save(name, payload).exception(60) for name in ("second", "third")]
tell(errors=[type(error).__name__ for error in errors], there=[info.checkpoint_id for info in states.list()])
states.close()
"""


@pytest.mark.parametrize(
    ("when", "errors", "there"),
    [
        ("before", ["SaveFailedError", "SaveFailedError"], ["first"]),
        ("handed over", ["NoneType", "SaveFailedError"], ["first", "second"]),
    ],
)
def test_a_killed_rank_loses_nothing_that_was_handed_over_and_holds_up_nobody(
    tmp_path: Path, when: str, errors: list[str], there: list[str]
) -> None:
    (told,) = run_ranks(tmp_path, f"WHEN = {when!r}\n{RANK_DIES}", killed=1)
    assert told == {"errors": errors, "there": there}
    with CheckpointManager(tmp_path / "s") as states:
        assert [info.checkpoint_id for info in states.list()] == there
        assert [states.verify(name) for name in there] == [[]] * len(there)


def test_damage_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    told = run_ranks(
        tmp_path,
        """
meet()
states = CheckpointManager(location)
states.save("a", {"w": torch.ones(1000)}).result(60)
states.save("b", {"w": torch.ones(1000)}).result(60)
dist.barrier()
if rank == 0:
    with open(location + "/b/w.0.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"x")
dist.barrier()
target = torch.zeros(1000)
try:
    states.load("latest", into={"w": target})
except DamagedCheckpointError as error:
    tell(next=error.next_good, untouched=bool((target == 0).all()))
states.close()
""",
    )
    assert told == [{"next": "a", "untouched": True}] * 2


class RankOne:
    """Rank 1 of 2 whose rank 0 says what is scripted."""

    rank, world_size = 1, 2

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def all_gather(self, value: Any) -> list[Any]:
        return [self.said.pop(0), value]


def test_rank_0_decides_which_one_is_the_latest_and_the_others_follow(tmp_path: Path) -> None:
    """B61: a rank that sees an older state of a network folder must not take another way."""
    with CheckpointManager(tmp_path, mode="sync") as states:
        for name in ("a", "b"):
            states.save(name, {"x": name}).result()
    with CheckpointManager(tmp_path, mode="sync", coordinator=RankOne([None, "a", None, [[], []]])) as states:
        assert states.load("latest", into={"x": ""}) == {"x": "a"}
    nothing = {"kind": "CheckpointNotFoundError", "text": "there is no checkpoint yet"}
    alone = CheckpointManager(tmp_path, mode="sync", coordinator=RankOne([nothing]))
    with alone as states, pytest.raises(CheckpointNotFoundError, match="rank 0: there is no checkpoint yet"):
        states.load("latest")


def test_ranks_save_together_through_a_url(tmp_path: Path) -> None:
    told = run_ranks(
        tmp_path,
        """
meet()
states = CheckpointManager(storage=StorageConfig("file://" + location), items={"mine": ItemSpec(scope="per_rank")})
states.save("a", {"w": torch.ones(1000), "mine": torch.full((5,), rank)}).result(60)
loaded = states.load("latest")
tell(mine=loaded["mine"].tolist(), w=float(loaded["w"].sum()), faults=states.verify("a"))
states.close()
""",
    )
    assert told == [{"mine": [rank] * 5, "w": 1000.0, "faults": []} for rank in range(2)]


@pytest.mark.slow
def test_three_ranks_agree_as_two_do(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, SAVE_AND_LOAD, world=3)
    assert [facts["r"] for facts in told] == [0, 1, 2]
