"""Case C25: whole runs with two processes that read their data, stopped once in each phase, and resumed.

python -m pytest -m slow tests/test_stop_signals.py
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptplan.record import load_metrics, load_result
from ckptplan.state import CheckpointManager
from tests.test_kills import REPOSITORY, rows, state
from tests.test_resuming import NOISY, TRAINED, assert_same

STEPS = 20
SETTINGS = (*NOISY, f"steps={STEPS}", "state.every=2", "state.keep_last=null", "report=false", "data_workers=2")
OWN_LOADER = tuple(text.replace("noisy_samples", "OwnLoader") for text in SETTINGS if text != "data_workers=2")

# `train.py`, but that one phase (of the step named) takes a second more, and makes a file when it begins.
PROGRAM = """
import sys, time
from pathlib import Path
import ckptplan.resuming, ckptplan.run, ckptplan.run.profiling, ckptplan.run.proving, ckptplan.training
from ckptplan.cli import main
phase, marker = sys.argv[1], Path(sys.argv[2])
places = {
    "profile": (ckptplan.run.profiling, "profile_model", 1),
    "proof": (ckptplan.run.proving, "prove_model", 1),
    "warm-up": (ckptplan.training, "_optimizer_step", 3),  # of 5 steps
    "training": (ckptplan.training, "_optimizer_step", 12),
    "evaluation": (ckptplan.training, "evaluate", 2),
    "saving": (ckptplan.resuming.RunStates, "_save", 4),
}
if phase in places:
    owner, name, when = places[phase]
    original, calls = getattr(owner, name), 0
    def slow(*arguments, **options):
        global calls
        calls += 1
        if calls == when:
            marker.touch()
            time.sleep(1)
        return original(*arguments, **options)
    setattr(owner, name, slow)
sys.exit(main(sys.argv[3:]))
"""


def session(leader: int) -> set[int]:
    """The processes that a run has started, itself included, that still live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


def start(folder: Path, settings: tuple[str, ...], *more: str, phase: str = "none") -> subprocess.Popen[bytes]:
    arguments = [phase, str(folder.parent / f"{folder.name}.{phase}"), f"hydra.run.dir={folder}"]
    command = [sys.executable, "-c", PROGRAM, *arguments, f"output_dir={folder.parent}", *settings, *more]
    with (folder.parent / "console.log").open("ab") as console:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=console, stderr=console, start_new_session=True)


def wait(process: subprocess.Popen[bytes], log: Path) -> int:
    """Its exit code; none of its processes is left."""
    try:
        code = process.wait(30)
    finally:
        process.kill()
    deadline_s = time.monotonic() + 10  # a writer may still be finishing what it was handed
    while left := session(process.pid):
        assert time.monotonic() < deadline_s, (left, log.read_text()[-3000:])
        time.sleep(0.01)
    return code


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert start(folder, SETTINGS).wait(120) == 0
    return folder


@pytest.fixture(scope="module")
def whole_of_own_loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "own"
    assert start(folder, OWN_LOADER).wait(120) == 0
    return folder


def stop_and_resume(
    folder: Path, whole: Path, phase: str, sent: tuple[int, ...], settings: tuple[str, ...]
) -> int | None:
    """Send the signals in that phase, 0.2 s apart; returns the step that the run went on from."""
    log = folder.parent / "console.log"
    process = start(folder, settings, phase=phase)
    marker = folder.parent / f"{folder.name}.{phase}"
    while not marker.exists():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.01)
    if phase in ("warm-up", "training", "evaluation", "saving"):
        assert len(session(process.pid)) >= 4  # the trainer, two that read, the writer
    for number in sent:
        process.send_signal(number)
        time.sleep(0.2)
    assert wait(process, log) == 128 + sent[0]
    result = load_result(folder)
    assert (result["status"], result["error"]["signal"]) == ("interrupted", signal.Signals(sent[0]).name)
    saved = result["state"]["step"]
    if (folder / "state").exists():
        with CheckpointManager(folder / "state", mode="sync") as states:
            assert [states.verify(info.checkpoint_id) for info in states.list()] == [[]] * len(states.list())
    if saved is not None and len(sent) == 1:
        assert saved == result["training"]["steps"] == max(row["step"] for row in load_metrics(folder))
    again = start(folder, settings, *(["resume=auto"]))
    assert wait(again, log) == 0, log.read_text()[-3000:]
    assert rows(folder) == rows(whole)
    mine, right = state(folder, STEPS), state(whole, STEPS)
    for item in TRAINED:
        assert_same(mine[item], right[item], item)
    evaluated = [(row["step"], row["eval/loss"]) for row in load_metrics(folder) if "eval/loss" in row]
    assert evaluated == [(row["step"], row["eval/loss"]) for row in load_metrics(whole) if "eval/loss" in row]
    return saved


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "saved"),
    [("profile", None), ("proof", None), ("warm-up", 3), ("training", 12), ("evaluation", 6), ("saving", 8)],
)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_any_phase_after_its_step_and_the_resumed_run_is_the_same(
    tmp_path: Path, whole: Path, phase: str, saved: int | None, sent: int
) -> None:
    assert stop_and_resume(tmp_path / "run", whole, phase, (sent,), SETTINGS) == saved
    assert ("nothing to save" in (tmp_path / "console.log").read_text()) is (saved is None)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_second_ctrl_c_while_saving_ends_at_once_and_the_state_before_is_whole(tmp_path: Path, whole: Path) -> None:
    """What the writer has been handed wholly, step 6, it finishes, though the run has not waited to hear of it."""
    assert stop_and_resume(tmp_path / "run", whole, "saving", (signal.SIGINT,) * 2, SETTINGS) == 4
    assert load_result(tmp_path / "run")["state"]["resumed_step"] == 6


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "sent", "saved"),
    [
        ("training", (signal.SIGTERM,), 12),
        ("evaluation", (signal.SIGINT,), 6),
        ("saving", (signal.SIGINT, signal.SIGINT), 4),
    ],
)
def test_data_with_processes_of_its_own_leaves_none_of_them_either(
    tmp_path: Path, whole_of_own_loader: Path, phase: str, sent: tuple[int, ...], saved: int
) -> None:
    assert stop_and_resume(tmp_path / "run", whole_of_own_loader, phase, sent, OWN_LOADER) == saved
