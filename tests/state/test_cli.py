"""The command line and the export, looked at from outside."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec.registry  # noqa: F401 - in sys.modules under this name; fsspec.registry is the mapping
import pytest
import torch
from safetensors.torch import load_file

from ckptplan.errors import DamagedCheckpointError, StateError
from ckptplan.state import CheckpointManager, StorageConfig
from ckptplan.state.cli import main
from ckptplan.state.export import export_item


@pytest.fixture
def location(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "s", mode="sync") as states:
        weights = {"w": torch.arange(6.0).view(2, 3), "t": torch.arange(6).view(2, 3).t(), "n": 3, "e": {}}
        weights["tied"] = weights["w"]
        states.save("step-1", {"model": weights, "lr": 0.5}, metrics={"loss": 2.0}).result()
        weights["w"][0, 0] = 9
        states.save("step-2", {"model": weights, "lr": 0.25, "more": [1]}).result()
    return tmp_path / "s"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_ls_lists_in_the_order_of_saving(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (location / ".attempt-x-1").mkdir()
    assert run("ls", location) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["id", "sequence"]
    assert lines[1].startswith("step-1")
    assert lines[1].endswith("loss=2")
    assert lines[3] == "left by an interrupted save: .attempt-x-1"
    assert run("ls", location, "--json") == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(entry["checkpoint_id"], entry["sequence"], entry["items"]) for entry in entries] == [
        ("step-1", 1, ["model", "lr"]),
        ("step-2", 2, ["model", "lr", "more"]),
    ]


def test_verify_tells_damage_by_its_exit_code(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", location) == 0
    assert capsys.readouterr().out == "step-1: whole\nstep-2: whole\n"
    content = bytearray((location / "step-2" / "model.0.safetensors").read_bytes())
    content[-1] ^= 1
    (location / "step-2" / "model.0.safetensors").write_bytes(content)
    assert run("verify", location, "latest") == 1
    assert capsys.readouterr().out.splitlines()[0] == "step-2: DAMAGED"
    assert run("verify", location, "step-9") == 2
    assert run("verify", location / "nowhere") == 2


def test_show_names_every_value(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", location, "step-1") == 0
    out = capsys.readouterr().out
    assert "step-1: sequence 1, 1 rank(s)" in out
    assert "metric loss = 2" in out
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["w", "float32 [2, 3]"] in lines
    assert ["t", "int64 [3, 2]"] in lines
    assert ["n", "3"] in lines
    assert ["lr", "0.5"] in lines
    assert ["e", "empty dict"] in lines


def test_diff_tells_what_changed(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", location, "step-1", "step-2") == 1
    assert capsys.readouterr().out.splitlines() == [
        "+ more.0: only in step-2",
        "~ model.w: float32 [2, 3], other values",
        "~ model.tied: float32 [2, 3], other values",
        "~ lr: 0.5 -> 0.25",
        "4 differences in 7 values",
    ]
    assert run("diff", location, "step-1", "step-1") == 0


def test_rm_deletes_all_or_nothing(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rm", location, "step-1", "step-9") == 2
    assert "nothing was deleted" in capsys.readouterr().err
    assert run("rm", location, "../s") == 2
    assert run("rm", location, "step-1") == 0
    assert run("ls", location) == 0
    assert "step-1" not in capsys.readouterr().out.replace("deleted step-1", "")


def test_rm_refuses_while_a_run_writes_there(location: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(location) as states:
        states.save("step-3", {"x": 1}).result()
        assert run("rm", location, "step-1") == 2
    assert "is being written by" in capsys.readouterr().err


def test_export_opens_with_the_safetensors_library(location: Path, tmp_path: Path) -> None:
    assert run("export", location, "step-2", tmp_path / "out") == 0
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded["w"].tolist() == loaded["tied"].tolist() == [[9, 1, 2], [3, 4, 5]]
    assert loaded["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert set(loaded) == {"w", "tied", "t"}
    assert run("export", location, "step-2", tmp_path / "out") == 2, "never over something else"


def test_a_big_export_has_shards_and_an_index(tmp_path: Path) -> None:
    base = torch.arange(40.0)
    value = {f"layer.{index}": base[index : index + 10 : 2] for index in range(5)}
    value |= {"half": torch.ones(3).bfloat16(), "big": torch.tensor([[1 + 2j]], dtype=torch.complex128)}
    with CheckpointManager(tmp_path / "s", mode="sync") as states:
        states.save("a", {"model": value}).result()
    made = export_item(StorageConfig(str(tmp_path / "s")).open(), "a", "model", tmp_path / "out", shard_bytes=50)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert made.files[-1] == "model.safetensors.index.json"
    assert index["metadata"]["total_size"] == 5 * 20 + 6 + 16
    assert set(index["weight_map"]) == set(value)
    for name, file in index["weight_map"].items():
        loaded = load_file(tmp_path / "out" / file)[name]
        expected = torch.view_as_real(value[name]) if name == "big" else value[name]
        assert torch.equal(loaded, expected)
    sizes = [(tmp_path / "out" / name).stat().st_size for name in made.files[:-1]]
    assert len(sizes) == 3


def test_an_export_that_fails_leaves_nothing_that_looks_like_one(
    location: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = location / "step-2" / "model.0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (tmp_path / "empty").mkdir()
    for target in ("new", "empty"):
        assert run("export", location, "step-2", tmp_path / target) == 2
        assert "model.0.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_checkpoint_that_is_a_link_is_damaged_and_the_others_are_checked(
    location: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (location / "step-0").symlink_to("step-1")
    assert run("verify", location) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["step-1: whole", "step-2: whole", "step-0: DAMAGED"]
    with CheckpointManager(location) as states:
        assert states.load("step-2")["lr"] == 0.25
        with pytest.raises(DamagedCheckpointError):
            states.load("step-0")


def test_a_run_or_one_checkpoint_given_for_the_folder_of_them_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = tmp_path / "run" / "state"
    with CheckpointManager(states, mode="sync") as manager:
        manager.save("step-1", {"x": 1})
    for command, given in itertools.product(("ls", "verify"), (tmp_path / "run", states / "step-1")):
        assert run(command, given) == 2
        assert capsys.readouterr().err == f"error: {given} is no folder of checkpoints; it is {states}\n"
    assert run("export", states, "step-1", tmp_path / "out", "--item", "x") == 2
    assert "item 'x' of 'step-1' holds no tensors; its items: x" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_no_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        assert run("ls", tmp_path / name) == 2
        assert capsys.readouterr().err.startswith("error: there is no folder")
    assert run("ls", tmp_path) == 0


def test_a_url_whose_package_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # loaded before
    assert run("ls", "s3://bucket/run") == 2
    assert "pip install -e '.[s3]'" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error(location: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # the reader has left already
    command = [sys.executable, "-m", "ckptplan.state", "show", str(location), "step-1"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_would_collide_in_an_export_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "s", mode="sync") as states:
        states.save("a", {"model": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "n": 1}).result()
    storage = StorageConfig(str(tmp_path / "s")).open()
    with pytest.raises(StateError, match=r"two tensors of 'model' would have the name 'a\.b'"):
        export_item(storage, "a", "model", tmp_path / "out")
    with pytest.raises(StateError, match="has no item 'x'; it has model, n"):
        export_item(storage, "a", "x", tmp_path / "out")


def test_the_command_line_runs_as_a_program_without_torch(location: Path) -> None:
    code = (
        "import sys; from ckptplan.state.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for arguments in (["ls"], ["verify"], ["show"], ["diff", "step-1", "step-2"]):
        command = [sys.executable, "-c", code, arguments[0], str(location), *arguments[1:]]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode in (0, 1)
    done = subprocess.run(
        [sys.executable, "-m", "ckptplan.state", "ls", str(location)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step-") == 2


def test_the_engine_imports_nothing_of_the_planning_half() -> None:
    import ast

    import ckptplan.state

    for path in Path(ckptplan.state.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                allowed = ("ckptplan.state", "ckptplan.errors", "ckptplan.units")
                assert not name.startswith("ckptplan") or name.startswith(allowed), f"{path.name} imports {name}"
                assert name.split(".")[0] not in ("pickle", "shelve", "marshal", "dill"), f"{path.name} imports {name}"
