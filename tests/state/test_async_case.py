"""Case C12: twenty rounds of saving through a slow storage while everything is changed in place.

python -m pytest -m slow tests/state/test_async_case.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The writer as it is, but that each checkpoint takes half a second more.
SLOWER = """
    import time
    finish = Attempt.finish
    def slow(self):
        time.sleep(0.5)
        finish(self)
    Attempt.finish = slow
    main()
"""

PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch
from ckptplan.state import CheckpointManager, StorageConfig, writer_program

slow_writer, kind, location = sys.argv[1:]
MILLION = 1_000_000
model = torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.full((MILLION,), float(i))) for i in range(8)})
model.register_buffer("average", torch.zeros(1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
counter, metrics = 0, {"loss": 0.0, "history": [0]}

def tensors():
    yield from model.state_dict().values()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))

tensors_now = list(tensors())
with torch.no_grad():  # whole numbers: adding 1 twenty times is exact
    for number, value in enumerate(tensors_now):
        value.fill_(number)
first = [value.clone() for value in tensors_now]
state_bytes = sum(value.nbytes for value in tensors_now)
loaded_model = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}  # templates of a load
assert 8 * 3 * 4 * MILLION < state_bytes < 8 * 3 * 4 * MILLION + 10_000

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

most, over = 0, threading.Event()
def watch():
    global most
    while not over.wait(0.002):
        most = max(most, resident())

if kind == "local":
    writer_program.__file__ = slow_writer
    states = CheckpointManager(location)
else:
    opened = StorageConfig("file://" + location).open()
    write = opened.write
    def slow_write(path, pieces):
        if path.endswith("manifest.json"):
            time.sleep(0.5)
        write(path, pieces)
    opened.write = slow_write
    states = CheckpointManager(storage=opened)

base = resident()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
third = None
stalls = []
with states:
    for k in range(1, 21):
        payload = {"model": model, "optimizer": optimizer, "counter": counter, "metrics": metrics}
        began = time.monotonic()
        future = states.save(f"step-{k}", payload, metrics={"at": counter})
        stalls.append((future.progress().wait_s, time.monotonic() - began))
        with torch.no_grad():
            for value in tensors_now:
                value.add_(1)
        counter += 1
        metrics["loss"] += 0.5
        metrics["history"].append(counter)
        if k % 2:
            future.result()
        if k % 5 == 0:
            into = {"model": loaded_model, "counter": -1, "metrics": {"loss": -1.0, "history": None}}
            loaded = states.load("latest", into=into)
            assert loaded["counter"] == k - 1, (k, loaded["counter"])
            for name, value in loaded_model.items():
                start = float(first[list(loaded_model).index(name)].flatten()[0])
                assert value.eq(start + k - 1).all(), (k, name)
            assert loaded["metrics"] == {"loss": 0.5 * (k - 1), "history": list(range(k))}
        if k == 3:
            third = resident()
    states.wait()
    twentieth = resident()
    over.set()
    watcher.join()
    assert [info.checkpoint_id for info in states.list()] == [f"step-{k}" for k in range(1, 21)]
    for k in range(1, 21):
        stored = states.load(f"step-{k}")
        found = [*stored["model"].values()]
        for state in stored["optimizer"]["state"].values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        assert len(found) == len(first) == 8 + 1 + 8 * 3
        for value, start in zip(found, first, strict=True):
            assert torch.equal(value, start + (k - 1)), k
        assert stored["counter"] == k - 1
        assert stored["metrics"] == {"loss": 0.5 * (k - 1), "history": list(range(k))}

waits = [wait for wait, _ in stalls]
assert max(waits[1::2]) < 0.1, waits
assert sum(wait > 0.2 for wait in waits[2::2]) > 4, waits  # only a save that finds the last one unfinished waits
assert most - base <= 2 * state_bytes, ((most - base) / state_bytes)
assert abs(twentieth - third) <= 0.1 * third, (third, twentieth)
print(f"{kind}: most memory beside the state {(most - base) / state_bytes:.2f} x the state, "
      f"after round 20 / after round 3 {twentieth / third:.3f}, stall {max(s - w for w, s in stalls[1:]):.3f} s")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["local", "url"])
def test_each_stored_step_is_that_of_its_call_and_memory_is_that_of_one_copy(tmp_path: Path, kind: str) -> None:
    from ckptplan.state import writer_program

    program = Path(writer_program.__file__).read_text()
    assert program.endswith("\n    main()\n")
    slow_writer = tmp_path / "slow_writer.py"
    slow_writer.write_text(
        program.replace("__file__", repr(writer_program.__file__)).removesuffix("\n    main()\n") + SLOWER
    )
    command = [sys.executable, "-c", PROGRAM, str(slow_writer), kind, str(tmp_path / "state")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(ended.stdout)
