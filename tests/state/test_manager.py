"""Saving, listing, going back, keeping and leaving: what `CheckpointManager` promises, in one process."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptplan.errors import (
    CheckpointNotFoundError,
    DuplicateCheckpointError,
    FolderInUseError,
    SaveFailedError,
    StateError,
    UnsaveableValueError,
)
from ckptplan.state import CheckpointManager, ItemSpec, Layout, ManagerConfig, Progress, StorageConfig

MODES = pytest.mark.parametrize("mode", ["async", "sync"])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ids(states: CheckpointManager) -> list[str]:
    return [info.checkpoint_id for info in states.list()]


@MODES
def test_a_save_is_finished_in_the_background_and_loads(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path / "deep" / "state", mode=mode) as states:
        future = states.save("step-7", {"w": torch.arange(5.0), "step": 7}, metrics={"loss": 0.5})
        info = future.result()
        assert (info.checkpoint_id, info.sequence, info.step, info.items) == ("step-7", 1, 7, ("w", "step"))
        assert info.metrics == {"loss": 0.5}
        progress = future.progress()
        assert isinstance(progress, Progress)
        assert progress.phase == "done"
        assert progress.written_bytes == progress.total_bytes == info.size_bytes
        assert progress.durable_s is not None
        assert progress.durable_s >= 0
        loaded = states.load("step-7")
        assert loaded["step"] == 7
        assert loaded["w"].tolist() == [0, 1, 2, 3, 4]


@MODES
def test_what_changes_after_save_returns_never_reaches_the_file(tmp_path: Path, mode: str) -> None:
    """C12, B46, B47, B48: twenty rounds of saving and changing everything in place at once."""
    tensors = {f"p{index}": torch.full((200_000,), float(index)) for index in range(8)}
    tensors["strided"] = torch.zeros(300, 300).t()
    state: dict[str, Any] = {"tensors": tensors, "step": 0, "metrics": {"values": [0.0]}}
    expected = {}
    with CheckpointManager(tmp_path, mode=mode) as states:
        for step in range(20):
            expected[step] = {name: float(tensor.flatten()[-1]) for name, tensor in tensors.items()}
            states.save(f"s{step}", state, metrics={"at": step})
            for tensor in tensors.values():
                tensor.add_(1)
            state["step"] += 1
            state["metrics"]["values"][0] += 1.0
            if step % 5 == 4:
                assert states.load("latest")["step"] == step, "loading waits for the pending save (B49)"
        states.wait()
        for step in range(20):
            loaded = states.load(f"s{step}")
            assert loaded["step"] == step
            assert loaded["metrics"] == {"values": [float(step)]}
            for name, value in expected[step].items():
                assert loaded["tensors"][name].unique().tolist() == [value]


def test_a_second_save_waits_for_the_first_and_says_how_long(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        payload = {"w": torch.zeros(8_000_000)}
        first, second = states.save("a", payload), states.save("b", payload)
        assert first.done()
        assert first.progress().wait_s < second.progress().wait_s
        second.result()


def test_two_saves_may_be_pending_where_memory_is_given(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_pending=2, keep_last=2) as states:
        value = torch.zeros(4_000_000)
        for step in range(6):
            value.fill_(step)
            states.save(f"s{step}", {"w": value})
        states.wait()
        assert ids(states)[-2:] == ["s4", "s5"]
        for name in ids(states):
            assert states.load(name)["w"].unique().tolist() == [float(name[1:])]


@MODES
def test_the_files_open_with_the_safetensors_library(tmp_path: Path, mode: str) -> None:
    value = {
        "a": {"b": torch.arange(3), "__metadata__": torch.ones(2), "\ud800": torch.zeros(1)},
        "a.b": torch.arange(4.0).bfloat16(),
        "__metadata__": torch.tensor([True]),
        "e": torch.empty(0, 3),
        "z": torch.tensor([1 + 2j], dtype=torch.complex128),
        "t": torch.arange(6).view(2, 3).t(),
    }
    with CheckpointManager(tmp_path, mode=mode) as states:
        states.save("a", {"item": value}).result()
    loaded = load_file(tmp_path / "a" / "item.0.safetensors")
    assert loaded["a.b"].tolist() == [0, 1, 2]
    assert loaded["a.b~2"].dtype is torch.bfloat16
    assert loaded["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loaded["z"].tolist() == [[1, 2]]
    assert loaded["e"].shape == (0, 3)
    assert len(loaded) == 8


def test_a_big_item_lies_in_several_files_and_loads_whole(tmp_path: Path) -> None:
    value = {f"t{index}": torch.full((1000,), float(index)) for index in range(10)}
    with CheckpointManager(tmp_path, items={"w": ItemSpec(layout=Layout(split_bytes=9000))}) as states:
        states.save("a", {"w": value}).result()
        assert len(list((tmp_path / "a").glob("w.0.*.safetensors"))) == 5
        loaded = states.load("a")["w"]
    assert all(loaded[name].unique().tolist() == [float(name[1:])] for name in value)


# --- ties and views ---


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    shared = torch.arange(10_000.0)
    with CheckpointManager(tmp_path, mode="sync") as states:
        info = states.save("a", {"model": {"in": shared, "out": shared}, "copy": shared.view(100, 100)}).result()
        assert info.size_bytes < 40_000 + 2 * 4096
        loaded = states.load("a")
    assert loaded["model"]["in"].data_ptr() == loaded["model"]["out"].data_ptr() == loaded["copy"].data_ptr()
    loaded["model"]["in"].add_(1)
    assert loaded["copy"][0, 0] == 1


def test_a_small_view_does_not_save_its_whole_base(tmp_path: Path) -> None:
    """B74 and C16: 10 of 1 M elements."""
    base = torch.arange(1_000_000.0)
    with CheckpointManager(tmp_path, mode="sync") as states:
        size = states.save("a", {"w": {"lone": base[5:15], "far": base[-10:]}}).result().size_bytes
        assert size <= 4096 + 80
        size = states.save("b", {"w": {"left": base[0:10], "right": base[5:15], "column": base.view(1000, 1000)[:, 3]}})
        loaded = states.load("b")["w"]
    assert loaded["column"].tolist() == base.view(1000, 1000)[:, 3].tolist()
    loaded["left"][7] = -1
    assert loaded["right"][2] == -1, "overlapping views are one storage again"


def test_views_of_several_dtypes_share_their_memory_again(tmp_path: Path) -> None:
    base = torch.arange(64, dtype=torch.uint8)
    value = {"bytes": base[3:40], "floats": base.view(torch.float32)[1:5], "whole": base.view(torch.int64)[1:]}
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a", {"w": value}).result()
        loaded = states.load("a")["w"]
    assert loaded["bytes"].tolist() == list(range(3, 40))
    assert torch.equal(loaded["floats"].view(torch.uint8), base[4:20])
    loaded["whole"][0] = 0
    assert loaded["bytes"][5:13].tolist() == [0] * 8


# --- ids, order, going back ---


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/abs", "a\n", "a\0b", ".hidden", "-x", "a b", "é", "x" * 129, "latest", "best",
     "superseded", "manifest.json", "a\\b"],
)  # fmt: skip
def test_a_hostile_id_is_refused_before_anything_is_touched(tmp_path: Path, name: str) -> None:
    with CheckpointManager(tmp_path / "s", mode="sync") as states:
        for call in (lambda: states.save(name, {"a": 1}), lambda: states.verify(name), lambda: states.delete(name)):
            with pytest.raises(ValueError, match="checkpoint_id="):
                call()
        if name not in ("latest", "best"):
            with pytest.raises(ValueError, match="checkpoint_id="):
                states.load(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "a b", "x" * 129])
def test_a_hostile_item_name_is_refused(tmp_path: Path, name: str) -> None:
    with CheckpointManager(tmp_path / "s", mode="sync") as states:
        with pytest.raises(ValueError, match="not names of items"):
            states.save("a", {name: 1, "fine": 2})
        with pytest.raises(TypeError, match="payload key 3 is a int"):
            states.save("a", {3: 1})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="payload is empty"):
            states.save("a", {})


@MODES
def test_a_taken_id_fails_that_save_only_and_keeps_the_old_one(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path, mode=mode) as states:
        states.save("a", {"x": 1}).result()
        with pytest.raises(DuplicateCheckpointError, match="'a' exists already"):
            states.save("a", {"x": 2}).result()
        states.save("b", {"x": 3}).result()
        assert states.load("a") == {"x": 1}
        assert ids(states) == ["a", "b"]


@MODES
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_has_the_id_and_is_no_checkpoint_is_set_aside(tmp_path: Path, mode: str, kind: str) -> None:
    """A checkpoint that somebody has half deleted is in nobody's way, and nothing of it is deleted."""
    with CheckpointManager(tmp_path / "s", mode=mode) as states:
        states.save("a", {"x": torch.ones(3)}).result()
        states.save("b", {"x": torch.ones(3)}).result()
    half = tmp_path / "s" / "b"
    (half / "manifest.json").unlink()
    left = sorted(path.name for path in half.iterdir())
    if kind != "folder":
        half.rename(tmp_path / "elsewhere")
        half.touch() if kind == "file" else half.symlink_to(tmp_path / "elsewhere")
    with CheckpointManager(tmp_path / "s", mode=mode) as states:
        states.load("latest")
        states.save("b", {"x": torch.zeros(3)}).result()
        assert ids(states) == ["a", "b"]
        assert torch.equal(states.load("b")["x"], torch.zeros(3))
    aside = tmp_path / "s" / "superseded" / "b"
    assert aside.is_file() if kind == "file" else sorted(path.name for path in aside.iterdir()) == left


def test_latest_is_by_sequence_whatever_the_clock_and_the_names_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        for name, now in (("z-9", 2000.0), ("a-10", 1000.0), ("m-2", 500.0)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            states.save(name, {"x": name}).result()
        os.utime(tmp_path / "z-9", (9e9, 9e9))
        assert states.latest() == "m-2"
        assert states.steps() == [9, 10, 2]
        assert states.load("latest") == {"x": "m-2"}
    with CheckpointManager(tmp_path) as later:
        assert later.latest() == "m-2"


def test_going_back_moves_the_newer_ones_aside_and_deletes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        for step in (1, 2, 3):
            states.save(f"s-{step}", {"x": step}).result()
        assert states.load("s-1") == {"x": 1}
        assert ids(states) == ["s-1", "s-2", "s-3"], "loading alone changes nothing"
        states.save("s-2", {"x": 20}).result()
        assert ids(states) == ["s-1", "s-2"]
        assert states.load("latest") == {"x": 20}
        assert names_in(tmp_path / "superseded") == ["s-2", "s-3"]
        states.load("s-1")
        states.save("s-3", {"x": 30}).result()
        assert names_in(tmp_path / "superseded") == ["s-2", "s-2.2", "s-3"]
        assert [info.sequence for info in states.list()] == [1, 5]
        manifest = json.loads((tmp_path / "s-3" / "manifest.json").read_bytes().rpartition(b"\nxxh3")[0])
        assert manifest["resumed_from"] == "s-1"
    with CheckpointManager(tmp_path / "superseded") as aside:
        assert aside.load("s-2") == {"x": 2}
        assert aside.load("s-2.2") == {"x": 20}


def test_going_back_is_over_after_the_next_good_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a-1", {"x": 1}).result()
        states.save("a-2", {"x": 2}).result()
        states.load("a-1")
        assert states.save("b", {"x": print}).exception() is not None
        assert ids(states) == ["a-1", "a-2"], "a failed save moves nothing"
        for step in (3, 4):
            states.save(f"a-{step}", {"x": step}).result()
        assert ids(states) == ["a-1", "a-3", "a-4"]


def test_nothing_there_is_said_so(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "none") as states:
        assert states.list() == states.steps() == []
        assert states.latest() is None
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint yet"):
            states.load("latest")
        with pytest.raises(CheckpointNotFoundError, match="'x'"):
            states.load("x")
        with pytest.raises(CheckpointNotFoundError, match="'x'"):
            states.verify("x")
        with pytest.raises(ValueError, match="keep_best"):
            states.best()
    assert not (tmp_path / "none").exists(), "reading makes no folder"


def test_without_a_location_an_id_is_a_path(tmp_path: Path) -> None:
    with CheckpointManager() as states:
        states.save(tmp_path / "run" / "step-1", {"x": 1}).result()
        states.save(str(tmp_path / "other" / "step-2"), {"x": 2}).result()
        assert states.load(tmp_path / "run" / "step-1") == {"x": 1}
        assert states.verify(tmp_path / "other" / "step-2") == []
        with pytest.raises(StateError, match="without a location"):
            states.list()
        with pytest.raises(ValueError, match="checkpoint_id="):
            states.save(tmp_path / "..", {"x": 1})
    with pytest.raises(ValueError, match="need a location"):
        CheckpointManager(keep_last=2)


# --- retention ---


@MODES
def test_retention_keeps_the_union_of_last_best_and_every(tmp_path: Path, mode: str) -> None:
    losses = [5.0, 1.0, float("nan"), 4.0, 1.0, 3.0, 2.0]
    with CheckpointManager(tmp_path, mode=mode, keep_last=2, keep_best=("loss", "min"), keep_every=3) as states:
        for step, loss in enumerate(losses):
            states.save(f"s-{step}", {"x": step}, metrics={"loss": loss}).result()
        states.wait()
        assert states.steps() == [0, 3, 4, 5, 6], "0, 3, 6: every third; 4: the newer of the best; 5, 6: the last"
        assert states.best() == "s-4"
        assert states.best("loss", "max") == "s-0"
        assert states.load("best") == {"x": 4}
        assert [name for name in names_in(tmp_path) if name[0] != "."] == [f"s-{step}" for step in (0, 3, 4, 5, 6)]


def test_retention_never_counts_a_damaged_checkpoint_as_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mode="sync", keep_last=2) as states:
        for step in (1, 2):
            states.save(f"s-{step}", {"x": torch.ones(3)}).result()
    (tmp_path / "s-2" / "x.0.safetensors").unlink()
    with CheckpointManager(tmp_path, mode="sync", keep_last=2) as states:
        states.save("s-3", {"x": torch.ones(3)}).result()
        assert ids(states) == ["s-1", "s-2", "s-3"]


@pytest.mark.parametrize(
    "settings",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_every": -1}, {"keep_best": ("loss", "least")}, {"mode": "fast"},
     {"timeout_s": 0}, {"max_pending": 0}, {"timeout_s": float("nan")}, {"timeout_s": "a"}, {"max_pending": 1.5}],
)  # fmt: skip
def test_settings_without_sense_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        CheckpointManager(tmp_path, **settings)


def test_delete_takes_one_away(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a", {"x": 1}).result()
        states.save("b", {"x": 2}).result()
        states.delete("b")
        assert ids(states) == ["a"]
        with pytest.raises(CheckpointNotFoundError):
            states.delete("b")
        states.save("b", {"x": 3}).result()
        assert states.load("latest") == {"x": 3}


# --- items and configs ---


def test_items_that_are_not_declared_or_missing_are_named(tmp_path: Path) -> None:
    config = CheckpointManager.Config.with_sync_save(
        location=tmp_path, items={"model": ItemSpec(), "extra": ItemSpec(required=False)}, default=None
    )
    with CheckpointManager(config) as states:
        with pytest.raises(ValueError, match=r"not declared: a, z \(declared: extra, model\)"):
            states.save("a", {"model": 1, "z": 2, "a": 3})
        with pytest.raises(ValueError, match="required items are missing: model"):
            states.save("a", {"extra": 1})
        assert states.save("a", {"model": 1}).done()
        assert states.load("a", into={"model": 0}) == {"model": 1}


def test_presets_and_storage_configs_make_managers(tmp_path: Path) -> None:
    assert ManagerConfig.with_async_save().mode == "async"
    config = ManagerConfig.with_sync_save(storage=StorageConfig(str(tmp_path)))
    with CheckpointManager(config, keep_last=1) as states:
        states.save("a", {"x": 1})
        states.save("b", {"x": 1})
        assert ids(states) == ["b"]
    with pytest.raises(ValueError, match="not both"):
        ManagerConfig(location=tmp_path, storage=StorageConfig(str(tmp_path)))


@pytest.mark.parametrize("metrics", [{"loss": "1"}, {"loss": True}, {1: 2.0}, {"loss": torch.tensor(1.0)}])
def test_metrics_are_names_and_numbers(tmp_path: Path, metrics: Any) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states, pytest.raises(TypeError, match=r"metrics\["):
        states.save("a", {"x": 1}, metrics=metrics)


# --- failures ---


@MODES
def test_a_failure_is_raised_once_where_it_is_looked_at(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path, mode=mode) as states:
        future = states.save("a", {"x": print})
        with pytest.raises(UnsaveableValueError, match="x: builtins"):
            future.result()
        states.save("b", {"x": 1}).result()
        states.wait()


@MODES
@pytest.mark.parametrize("call", ["save", "load", "wait", "close"])
def test_a_failure_that_nobody_has_seen_is_raised_by_the_next_call_once(tmp_path: Path, mode: str, call: str) -> None:
    with CheckpointManager(tmp_path, mode=mode) as states:
        states.save("a", {"x": 1}).result()
        states.save("b", {"x": print})
        calls = {
            "save": lambda: states.save("c", {"x": 2}), "load": lambda: states.load("a"),
            "wait": states.wait, "close": states.close,
        }  # fmt: skip
        with pytest.raises(UnsaveableValueError):
            calls[call]()
        if call == "save":
            states.save("c", {"x": 2}).result()
            assert ids(states) == ["a", "c"]
        elif call != "close":
            calls[call]()


def test_leaving_the_block_waits_and_never_hides_the_exception_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path) as states:
            states.save("good", {"w": torch.zeros(1_000_000)})
            states.wait()
            states.save("bad", {"x": print})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "x: builtins" in caplog.text
    with CheckpointManager(tmp_path) as states:
        assert ids(states) == ["good"]


def test_a_closed_manager_refuses_and_closing_twice_is_fine(tmp_path: Path) -> None:
    states = CheckpointManager(tmp_path)
    states.close()
    states.close()
    for call in (lambda: states.save("a", {"x": 1}), lambda: states.load("a"), states.list, states.wait):
        with pytest.raises(StateError, match="closed"):
            call()


def test_two_managers_on_one_folder_do_not_write_together(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first, CheckpointManager(tmp_path) as second:
        first.save("a", {"x": 1}).result()
        assert second.load("latest") == {"x": 1}, "reading is free"
        with pytest.raises(FolderInUseError, match="this process, by another manager"):
            second.save("b", {"x": 2}).result()
        first.close()
        second.save("c", {"x": 3}).result()
        assert ids(second) == ["a", "c"]


def test_what_an_interrupted_save_has_left_is_named_once_and_cleaned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = tmp_path / ".attempt-a-0123"
    stale.mkdir()
    (stale / "x.0.safetensors").write_bytes(b"half")
    (stale / "manifest.json").write_bytes(b"{}")
    with CheckpointManager(tmp_path, mode="async") as states:
        assert ids(states) == []
        assert states.save("bad", {"x": print}).exception() is not None
        assert stale.exists(), "kept until a save is good"
        states.save("a", {"x": torch.ones(2)}).result()
        states.save("b", {"x": 1}).result()
        states.wait()
        assert not stale.exists()
        assert names_in(tmp_path / "a") == ["manifest.json", "x.0.safetensors"]
        assert states.verify("a") == []
    assert caplog.text.count(".attempt-a-0123") == 1


def test_a_forked_child_cannot_use_the_manager_and_does_not_hold_the_folder(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from ckptplan.errors import StateError
from ckptplan.state import CheckpointManager
states = CheckpointManager({str(tmp_path)!r})
states.save("a", {{"x": 1}}).result()
child = os.fork()
if child == 0:
    try:
        states.save("b", {{"x": 2}})
    except StateError as error:
        ok = "forked" in str(error)
    time.sleep(3)
    os._exit(0 if ok else 1)
states.save("c", {{"x": 3}}).result()
states.close()
with CheckpointManager({str(tmp_path)!r}) as again:
    again.save("d", {{"x": 4}}).result()
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_manager_that_is_dropped_finishes_and_lets_go_of_the_folder(tmp_path: Path) -> None:
    states = CheckpointManager(tmp_path)
    states.save("a", {"w": torch.zeros(2_000_000)})
    pid = states.writer_pid
    del states
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
    with CheckpointManager(tmp_path) as states:
        states.save("b", {"w": torch.zeros(2)}).result()
        assert ids(states) == ["a", "b"]


def test_a_script_that_never_closes_loses_nothing(tmp_path: Path) -> None:
    code = f"""
import torch
from ckptplan.state import CheckpointManager
states = CheckpointManager({str(tmp_path)!r})
states.save("a", {{"w": torch.zeros(5_000_000)}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with CheckpointManager(tmp_path) as states:
        assert states.verify("a") == []


def test_prewarming_saves_nothing_and_the_save_after_is_right(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        value = torch.zeros(1_000_000)
        states.prewarm({"w": value})
        assert ids(states) == []
        value.fill_(3)
        states.save("a", {"w": value}).result()
        assert states.load("a")["w"].unique().tolist() == [3]


def test_shapes_may_change_from_save_to_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        for index, size in enumerate((10, 3_000_000, 5, 0, 3_000_001)):
            states.save(
                f"s{index}", {"w": torch.full((size,), float(index)), "n": index, f"only{index}": torch.ones(index)}
            )
        states.wait()
        for index, size in enumerate((10, 3_000_000, 5, 0, 3_000_001)):
            loaded = states.load(f"s{index}")
            assert loaded["w"].shape == (size,)
            assert (loaded["w"] == index).all()
            assert loaded[f"only{index}"].numel() == index


def test_saving_and_loading_draw_no_random_numbers_and_change_no_training_state(tmp_path: Path) -> None:
    """B77: looking has no side effects."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    before, flags = torch.get_rng_state(), torch.is_grad_enabled()
    with CheckpointManager(tmp_path) as states:
        states.save("a", {"model": model, "optimizer": optimizer})
        states.load("a")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled() == flags
    assert optimizer.state_dict()["state"] == {}


def test_no_memory_for_a_snapshot_writes_on_the_spot_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptplan.state.saving.available_bytes", lambda: 100_000)
    caplog.set_level(logging.WARNING)
    with CheckpointManager(tmp_path) as states:
        for name in ("a", "b"):
            assert states.save(name, {"w": torch.ones(1_000_000)}).done()
        assert states.load("b")["w"].sum() == 1_000_000
    assert caplog.text.count("training waits") == 1


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_memory_that_the_system_refuses_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """A limit of the process (``ulimit -n``, ``-f``), met by the first save or when the state has grown."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with CheckpointManager(tmp_path) as states:
        states.save("a", {"w": torch.ones(10)}).result()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(os, call, refuse)
        for name in ("b", "c"):
            assert states.save(name, {"w": torch.ones(1_000_000)}).done()
        assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
        assert states.load("c")["w"].sum() == 1_000_000
        assert ids(states) == ["a", "b", "c"]
    assert caplog.text.count("File too large: saves are written on the spot") == 1


def test_without_a_writer_process_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.state.saving.is_supported", lambda: False)
    with CheckpointManager(tmp_path, keep_last=2) as states:
        value = torch.zeros(500_000)
        for step in range(4):
            value.fill_(step)
            states.save(f"s-{step}", {"w": value, "c": value.view(1000, 500).t()})
            value.fill_(-1)
        states.wait()
        assert states.steps() == [2, 3]
        assert states.load("s-3")["w"].unique().tolist() == [3]


def test_an_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with CheckpointManager(tmp_path / "file" / "state") as states:
        error = states.save("a", {"x": 1}).exception()
        assert isinstance(error, SaveFailedError)
        assert isinstance(error, OSError)
        assert error.errno == 20


def test_every_public_name_is_there_and_no_other() -> None:
    import ckptplan.state as state

    assert [name for name in state.__all__ if getattr(state, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="public names: CheckpointManager"):
        state.Nothing  # noqa: B018
