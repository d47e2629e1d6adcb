"""Real signals, sent to real processes in training and in evaluation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptplan.errors import RunInterruptedError
from ckptplan.stopping import StopFlag

ROOT = Path(__file__).parent.parent

# A run of 10,000 steps of 10 ms. It says where it is, and prints its summary when it ends.
SCRIPT = """
import signal, sys, time, types
import torch
from ckptplan.data import Batch
from ckptplan.stopping import StopFlag
from ckptplan.training import TrainSettings, train

phase = sys.argv[1]
batch = Batch(torch.randn(2, 4), torch.tensor([0, 1]))

class Data:
    spec = types.SimpleNamespace(kind="images")
    batches_per_epoch = 10
    def epoch_batches(self, epoch, start=0):
        return iter([batch] * (10 - start))
    def eval_batches(self):
        return iter([batch] * 10_000)

class Model(torch.nn.Linear):
    def forward(self, x):
        if self.training == (phase == "training") and not hasattr(self, "told"):
            self.told = True
            print("in", phase, flush=True)
        time.sleep(0.01)
        return super().forward(x)

def earlier(number, frame):
    print("earlier handler", number, flush=True)

signal.signal(signal.SIGTERM, earlier)
model = Model(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = TrainSettings(steps=10_000, eval_every=1 if phase == "evaluation" else None)
with StopFlag() as stop:
    summary = train(model, Data(), optimizer, learning_rate_at=lambda step: 0.1, settings=settings, stop=stop)
assert signal.getsignal(signal.SIGTERM) is earlier
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(summary.ended, summary.signal, summary.steps, flush=True)
sys.exit(stop.exit_code)
"""


def run_and_signal(phase: str, *numbers: int, pause_s: float = 0.2) -> tuple[int, list[str], float]:
    """Exit code, lines printed and seconds from the first signal to the end of a run signalled in ``phase``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, phase]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"in {phase}\n"
        started = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(pause_s)
        output, _ = process.communicate(timeout=30)
    return process.returncode, output.splitlines(), time.monotonic() - started


@pytest.mark.parametrize("phase", ["training", "evaluation"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_one_signal_ends_the_run_cleanly_in_every_loop(phase: str, number: signal.Signals, code: int) -> None:
    returncode, lines, seconds = run_and_signal(phase, number)
    assert returncode == code
    ended, name, steps = lines[-1].split()
    assert (ended, name) == ("interrupted", number.name)
    assert 1 <= int(steps) < 1000
    assert seconds < 10
    assert ("earlier handler 15" in lines) == (number == signal.SIGTERM)


INTERPRETER_ENDED_BY_CTRL_C = -signal.SIGINT  # KeyboardInterrupt reached the top of the script


def test_a_second_ctrl_c_leaves_at_once() -> None:
    code = """
import sys, time
from ckptplan.stopping import StopFlag
with StopFlag() as stop:
    print("ready", flush=True)
    while True:  # a loop that never asks
        time.sleep(0.01)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == INTERPRETER_ENDED_BY_CTRL_C
    assert "KeyboardInterrupt" in errors


def test_the_first_signal_counts_and_check_raises_it() -> None:
    stop = StopFlag()
    stop.check()
    assert (stop(), stop.signal_name, stop.exit_code) == (False, None, 0)
    stop.request(signal.SIGTERM)
    stop.request(signal.SIGINT)
    assert (stop(), stop.signal_name, stop.exit_code) == (True, "SIGTERM", 143)
    with pytest.raises(RunInterruptedError, match="interrupted by SIGTERM") as caught:
        stop.check()
    assert caught.value.signal_number == 15


def test_handlers_are_called_in_turn_and_put_back_also_after_an_error() -> None:
    called: list[int] = []

    def mine(number: int, frame: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(ZeroDivisionError), StopFlag():  # noqa: PT012 (the handler has to be in place)
            signal.raise_signal(signal.SIGTERM)
            raise ZeroDivisionError
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_changed_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen = []

    def enter() -> None:
        with StopFlag() as stop:
            seen.append(([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], stop()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(handlers, False)]
    assert "not in the main thread" in caplog.text


def test_a_forked_worker_leaves_ctrl_c_to_its_parent_and_dies_of_sigterm() -> None:
    code = """
import os, signal, time
from ckptplan.stopping import StopFlag
with StopFlag() as stop:
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(7)
    time.sleep(0.1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGINT)
    time.sleep(0.1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "Ctrl-C ended the worker"
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], stop(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.stdout.split() == ["15", "False"], done.stderr


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """What nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
