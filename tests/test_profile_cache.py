"""Shared profiles: one run measures, the others read; whatever decides the figures leads to another file."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptplan.errors import RunInterruptedError
from ckptplan.profile_cache import profile_key, shared_profile
from ckptplan.profiles import BlockProfile, ChainProfile

KEY = "0123456789abcdef" * 4


def a_profile(time_ms: float = 1.0) -> ChainProfile:
    blocks = tuple(BlockProfile(f"layers.{index}", forward_time_ms=time_ms) for index in range(3))
    return ChainProfile(blocks, fingerprint="f")


class Measure:
    """Counts how often it was asked to measure; each profile is another."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> ChainProfile:
        self.count += 1
        return a_profile(float(self.count))


def share(folder: Path, measure: Callable[[], ChainProfile], with_options: bool = False, **changed: Any) -> Any:
    return shared_profile(folder, KEY, measure, **{"with_options": with_options, "fingerprint": "f", **changed})


def test_the_second_run_reads_exactly_what_the_first_measured(tmp_path: Path) -> None:
    measure = Measure()
    first, second = share(tmp_path / "p", measure), share(tmp_path / "p", measure)
    assert measure.count == 1
    assert (first.is_new, second.is_new) == (True, False)
    assert second.profile == first.profile == a_profile(1.0)
    assert (second.path, second.measured_s) == (first.path, first.measured_s)
    assert first.notes == second.notes == ()


def test_a_profile_with_options_serves_planners_without_but_not_the_reverse(tmp_path: Path) -> None:
    measure = Measure()
    assert share(tmp_path, measure).is_new
    assert share(tmp_path, measure, with_options=True).is_new
    assert measure.count == 2
    for wanted in (True, False):
        taken = share(tmp_path, measure, with_options=wanted)
        assert (taken.is_new, taken.profile) == (False, a_profile(2.0))


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _another_figure(text: str) -> str:
    data = json.loads(text)
    data["profile"]["blocks"][0]["forward_time_ms"] = 77.0
    return json.dumps(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut, "is not JSON"),
        (lambda text: "", "is not JSON"),
        (lambda text: "[]", "expected an object"),
        (lambda text: text.replace("shared_profile/1", "shared_profile/9"), "this version reads"),
        (lambda text: text.replace(KEY, "f" * 64), "belongs to another model, batch or machine"),
        (lambda text: text.replace('"measured_s"', '"seconds"'), "lacks a figure"),
        (_another_figure, "was changed after it was written"),
    ],
    ids=["cut", "empty", "a list", "schema", "key", "missing", "figure"],
)
def test_a_damaged_file_is_told_and_measured_again(tmp_path: Path, damage: Callable[[str], str], reason: str) -> None:
    measure = Measure()
    path = share(tmp_path, measure).path
    path.write_text(damage(path.read_text()))
    again = share(tmp_path, measure)
    assert (again.is_new, again.profile) == (True, a_profile(2.0))
    [note] = again.notes
    assert str(path) in note
    assert reason in note
    healed = share(tmp_path, measure)
    assert (healed.is_new, healed.notes) == (False, ())


def test_a_file_of_other_blocks_is_not_taken(tmp_path: Path) -> None:
    measure = Measure()
    share(tmp_path, measure)
    [note] = share(tmp_path, measure, fingerprint="g").notes
    assert "another make" in note
    assert measure.count == 2


def test_a_folder_that_cannot_be_written_costs_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = share(tmp_path / "file" / "below", Measure())
    [note] = found.notes
    assert "the profile is not shared: " in note
    assert (found.is_new, found.path, found.profile) == (True, None, a_profile(1.0))


def test_a_failed_measurement_leaves_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        share(tmp_path, lambda: 1 / 0)
    assert not list(tmp_path.glob("*.json"))
    assert share(tmp_path, Measure()).is_new


def test_of_runs_at_once_one_measures_and_the_others_wait(tmp_path: Path) -> None:
    measure = Measure()

    def slowly() -> ChainProfile:
        time.sleep(0.3)
        return measure()

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(share(tmp_path, slowly))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measure.count == 1
    assert sorted(one.is_new for one in found) == [False, False, False, True]
    assert {one.profile.blocks[0].forward_time_ms for one in found} == {1.0}


def test_a_run_that_waits_can_be_stopped_and_the_lock_of_a_killed_one_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.test_profile_cache import share\n"
        "share(Path(sys.argv[1]), lambda: (print('measuring', flush=True), time.sleep(60)))"
    )
    root = Path(__file__).parent.parent
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "measuring\n"

    def give_up() -> None:
        raise RunInterruptedError(2, "SIGINT")

    with pytest.raises(RunInterruptedError):
        share(tmp_path, Measure(), check_stop=give_up)
    holder.kill()
    holder.communicate()
    assert share(tmp_path, Measure()).is_new


# --- the key ----------------------------------------------------------------------------------------------------------


def key_of(
    model: nn.Module | None = None, batch: torch.Tensor | None = None, settings: Any = None, device: str = "cpu"
) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) if model is None else model
    batch = torch.zeros(2, 4) if batch is None else batch
    return profile_key(model, (batch,), settings or {"trials": [1, 2]}, device)


def test_the_key_does_not_depend_on_weights_values_and_which_device() -> None:
    torch.manual_seed(1)
    first = key_of(batch=torch.zeros(2, 4))
    torch.manual_seed(2)
    assert key_of(batch=torch.ones(2, 4)) == first
    assert len(first) == 64


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "changed",
    [
        {"batch": torch.zeros(3, 4)},
        {"batch": torch.zeros(2, 4, dtype=torch.float64)},
        {"batch": torch.zeros(4, 2).t()},
        {"settings": {"trials": [1, 3]}},
        {"device": "NVIDIA H200"},
        {"model": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))},
        {"model": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()},
        {"model": nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.1))},
        {"model": nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Dropout(0.1))},
        {"model": _frozen()},
    ],
    ids=["shape", "dtype", "strides", "settings", "device", "rate", "mode", "parameters", "weights", "frozen"],
)
def test_whatever_decides_the_figures_changes_the_key(changed: dict[str, Any]) -> None:
    assert key_of(**changed) != key_of()


def test_threads_determinism_and_tuning_variables_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key_of()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert key_of() == first
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert key_of() != first
    monkeypatch.undo()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert key_of() != first
    finally:
        torch.set_num_threads(threads)
    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not was)
        assert key_of() != first
    finally:
        torch.use_deterministic_algorithms(was)
    assert key_of() == first


def test_the_text_of_the_users_modules_changes_the_key_also_of_those_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_shared_maths.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "my_shared_net.py").write_text(
        "from my_shared_maths import twice\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n"
        "    def forward(self, x):\n        return twice(super().forward(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("my_shared_net").Net(4, 4)
    first = key_of(model)
    assert key_of(model) == first
    with (tmp_path / "my_shared_maths.py").open("a") as file:
        file.write("# slower\n")
    second = key_of(model)
    assert second != first
    with (tmp_path / "my_shared_net.py").open("a") as file:
        file.write("# slower\n")
    assert key_of(model) not in (first, second)
    for name in ("my_shared_net", "my_shared_maths"):
        del sys.modules[name]


def test_another_process_finds_the_same_key() -> None:
    program = "from tests.test_profile_cache import key_of; print(key_of())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent.parent,
            env=environment | {"PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (7, 8)
    }
    assert len(keys) == 1
