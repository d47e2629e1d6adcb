"""Damaged and hostile checkpoints: every changed byte is found and named, nothing is run, nothing outside touched."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptplan.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    StateError,
    StateMismatchError,
    UnsupportedStateVersionError,
)
from ckptplan.state import CheckpointManager
from ckptplan.state.attempt import split_digest, with_digest
from ckptplan.state.manifest import parse_manifest

NAMES = ("model.0.safetensors", "other.0.safetensors", "manifest.json")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def payload() -> dict[str, Any]:
    torch.manual_seed(1)
    model = {
        "big": torch.randn(300_000),
        "small": torch.randn(7),
        "tied": None,
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    model["tied"] = model["big"][10:20]
    return {"model": model, "other": [torch.ones(3), {"step": 12, "text": "abc"}]}


def templates() -> dict[str, Any]:
    model = {
        "big": torch.zeros(300_000),
        "small": torch.zeros(7),
        "tied": torch.zeros(10),
        "bytes": torch.zeros(9).byte(),
    }
    return {"model": model, "other": [torch.zeros(3), {"step": 0, "text": ""}]}


def is_untouched(into: dict[str, Any]) -> bool:
    tensors = [*into["model"].values(), into["other"][0]]
    return into["other"][1] == {"step": 0, "text": ""} and all(bool((tensor == 0).all()) for tensor in tensors)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    location = tmp_path_factory.mktemp("damage")
    with CheckpointManager(location, mode="sync") as states:
        states.save("older", payload()).result()
        states.save("ck", payload()).result()
    return location


@pytest.fixture
def location(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "s")
    return tmp_path / "s"


def refusal(location: Path, wanted: type[StateError] = StateError) -> StateError:
    into = templates()
    with CheckpointManager(location, mode="sync") as states:
        with pytest.raises(wanted) as caught:
            states.load("ck", into=into)
        with pytest.raises(wanted):
            states.load("ck")
    assert is_untouched(into), "nothing in memory has changed"
    return caught.value


def _damages(count: int, sizes: dict[str, int]) -> list[tuple[str, str, int]]:
    draw = random.Random(7)
    kinds = [("flip", name) for name in NAMES] + [("cut", name) for name in NAMES]
    return [(kind, name, draw.randrange(sizes[name] * (8 if kind == "flip" else 1)))
            for kind, name in (draw.choice(kinds) for _ in range(count))]  # fmt: skip


def _check_damages(location: Path, count: int) -> None:
    folder = location / "ck"
    contents = {name: (folder / name).read_bytes() for name in NAMES}
    for kind, name, place in _damages(count, {name: len(content) for name, content in contents.items()}):
        damaged = bytearray(contents[name])
        if kind == "flip":
            damaged[place // 8] ^= 1 << place % 8
        else:
            del damaged[place:]
        (folder / name).write_bytes(damaged)
        error = refusal(location, DamagedCheckpointError)
        assert name in str(error), f"{kind} {name} {place}: the file is named: {error}"
        with CheckpointManager(location, mode="sync") as states:
            assert any(name in fault for fault in states.verify("ck"))
        (folder / name).write_bytes(contents[name])
    with CheckpointManager(location, mode="sync") as states:
        states.load("ck", into=templates())


def test_flipped_bits_and_cut_files_are_found_and_named(location: Path) -> None:
    _check_damages(location, 40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_flipped_bits_and_cut_files_are_all_found(location: Path) -> None:
    _check_damages(location, 1000)


def test_every_fault_of_a_checkpoint_is_listed_at_once(location: Path) -> None:
    for name, place in (("model.0.safetensors", -1), ("model.0.safetensors", 4096 + 100), ("other.0.safetensors", 20)):
        content = bytearray((location / "ck" / name).read_bytes())
        content[place] ^= 1
        (location / "ck" / name).write_bytes(content)
    error = refusal(location, DamagedCheckpointError)
    assert len(error.faults) == 3
    assert [fault.split(":")[0] for fault in error.faults] == ["model.0.safetensors"] * 2 + ["other.0.safetensors"]
    assert "'big'" in error.faults[0]


def test_missing_swapped_and_extra_files_are_named(location: Path) -> None:
    folder = location / "ck"
    with CheckpointManager(location, mode="sync") as states:
        (folder / "surplus").write_text("x")
        assert states.verify("ck") == ["surplus: does not belong to the checkpoint"]
        (folder / "surplus").unlink()
        shutil.copy(folder / "other.0.safetensors", folder / "model.0.safetensors")
        assert "model.0.safetensors" in str(refusal(location, DamagedCheckpointError))
        (folder / "model.0.safetensors").unlink()
        assert "model.0.safetensors: missing" in str(refusal(location, DamagedCheckpointError))
        shutil.copy(location / "older" / "model.0.safetensors", folder)
        assert states.verify("ck") == []
        (folder / "manifest.json").unlink()
        with pytest.raises(CheckpointNotFoundError):
            states.load("ck")
        assert states.latest() == "older", "a folder without a manifest is no checkpoint"


def test_a_manifest_of_another_checkpoint_is_refused(location: Path) -> None:
    shutil.copytree(location / "older", location / "renamed")
    with (
        CheckpointManager(location, mode="sync") as states,
        pytest.raises(DamagedCheckpointError, match="of checkpoint 'older'"),
    ):
        states.load("renamed")


def test_a_file_of_the_same_size_from_another_save_is_found(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, mode="sync") as states:
        for step in (1, 2):
            states.save(f"s{step}", {"w": torch.full((10,), float(step))}).result()
        shutil.copy(tmp_path / "s1" / "w.0.safetensors", tmp_path / "s2" / "w.0.safetensors")
        target = torch.zeros(10)
        with pytest.raises(DamagedCheckpointError, match="'s2' is damaged"):
            states.load("s2", into={"w": target})
        assert target.eq(0).all()


def test_a_damaged_latest_raises_and_names_the_next_good_one(location: Path) -> None:
    (location / "ck" / "other.0.safetensors").write_bytes(b"")
    with CheckpointManager(location, mode="sync") as states:
        with pytest.raises(DamagedCheckpointError, match="the next older good one is 'older'") as caught:
            states.load("latest", into=templates())
        assert (caught.value.checkpoint_id, caught.value.next_good) == ("ck", "older")
        states.load(caught.value.next_good)
        states.save("new", {"x": 1}).result()
        assert states.latest() == "new"
        assert names_in(location / "superseded") == ["ck"], "set aside, not deleted"
    (location / "new" / "manifest.json").write_bytes(b"\0" * 100)
    with CheckpointManager(location, mode="sync") as states, pytest.raises(DamagedCheckpointError) as caught:
        states.load("latest")
    assert caught.value.next_good == "older"


# --- malice ---


def rewrite(location: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest of "ck" and gives it a right digest."""
    path = location / "ck" / "manifest.json"
    document = json.loads(split_digest(path.read_bytes())[0])
    change(document)
    path.write_bytes(with_digest(json.dumps(document).encode()))


def _set(*steps: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = steps

    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for step in way:
            part = part[step]
        part[last] = value

    return change


PART = ("ranks", 0)
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "path with dots": _set(*PART, "files", 0, "name", "../../outside"),
    "absolute path": _set(*PART, "files", 0, "name", "/etc/passwd"),
    "file is the manifest": _set(*PART, "files", 0, "name", "manifest.json"),
    "two files of one name": _set(*PART, "files", 1, "name", "model.0.safetensors"),
    "huge file": _set(*PART, "files", 0, "size", 2**61),
    "negative size": _set(*PART, "files", 0, "size", -1),
    "size as float": _set(*PART, "files", 0, "size", 1e9),
    "size as bool": _set(*PART, "files", 0, "header", True),
    "span outside its file": _set(*PART, "spans", 0, "offset", 2**40),
    "huge span": _set(*PART, "spans", 0, "size", 2**60),
    "overlapping spans": _set(*PART, "spans", 1, "offset", 4096),
    "file number": _set(*PART, "spans", 0, "file", 17),
    "negative file number": _set(*PART, "spans", 0, "file", -1),
    "checksums left out": _set(*PART, "spans", 0, "chunks", ""),
    "checksums no digits": _set(*PART, "spans", 1, "chunks", "z" * 32),
    "no chunk size": _set(*PART, "chunk_bytes", 0),
    "huge chunk size": _set(*PART, "chunk_bytes", 2**40),
    "huge shape": _set(*PART, "tensors", 0, "shape", [2**31, 2**31]),
    "negative shape": _set(*PART, "tensors", 0, "shape", [-1, 3]),
    "many dimensions": _set(*PART, "tensors", 0, "shape", [1] * 100),
    "another shape": _set(*PART, "tensors", 1, "shape", [5]),
    "unknown dtype": _set(*PART, "tensors", 0, "dtype", "nn"),
    "object dtype": _set(*PART, "tensors", 0, "dtype", "|O8"),
    "stride beyond the span": _set(*PART, "tensors", 2, "stride", [2**50]),
    "negative stride": _set(*PART, "tensors", 2, "stride", [-1]),
    "offset beyond the span": _set(*PART, "tensors", 2, "offset", 2**50),
    "odd offset": _set(*PART, "tensors", 2, "offset", 3),
    "span number": _set(*PART, "tensors", 0, "span", 99),
    "no ranks": _set("ranks", []),
    "ranks no list": _set("ranks", {"0": {}}),
    "other rank": _set(*PART, "rank", 5),
    "world size": _set("world_size", 3),
    "hostile id": _set("id", "../ck"),
    "sequence as text": _set("sequence", "7"),
    "time as text": _set("time_unix_s", "now"),
    "metrics no numbers": _set("metrics", {"loss": "xyz"}),
    "metrics too big": _set("metrics", {"loss": "0x1p99999"}),
    "hostile item name": _set(*PART, "items", {"../x": {"scope": "global", "tree": 1}}),
    "unknown scope": _set(*PART, "items", "model", "scope", "everywhere"),
    "document no object": lambda document: document.clear(),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(location: Path, name: str) -> None:
    outside = sorted(path.name for path in location.parent.iterdir())
    rewrite(location, HOSTILE[name])
    error = refusal(location, DamagedCheckpointError)
    assert "manifest" in error.faults[0]
    assert sorted(path.name for path in location.parent.iterdir()) == outside


TREES: dict[str, Any] = {
    "leaf number": {"tensor": 999},
    "negative leaf": {"tensor": -1},
    "leaf as text": {"tensor": "0"},
    "tensor as array": {"array": 0},
    "unknown type": {"pickle": "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAhlY2hvIGhpIZSFlFKULg=="},
    "two types": {"tuple": [], "dict": {}},
    "no type": {},
    "enum of os": {"enum": ["os", "system", "x"]},
    "enum of a method": {"enum": ["builtins", "eval", "x"]},
    "enum not text": {"enum": [1, 2, 3]},
    "namedtuple of a class": {"namedtuple": ["subprocess", "Popen", ["args"], [["true"]]]},
    "namedtuple of another shape": {"namedtuple": ["os", "terminal_size", ["columns"], [1]]},
    "bytes no base64": {"bytes": "!!"},
    "float no digits": {"float": "xyz"},
    "int no digits": {"int": "0x"},
    "numpy object": {"numpy": ["|O", "AAAAAAAAAAA="]},
    "numpy huge": {"numpy": ["<U999999999", "AAAA"]},
    "numpy short": {"numpy": ["<f8", "AAAA"]},
    "dtype of torch's functions": {"dtype": "load"},
    "device": {"device": "nowhere:x"},
    "double key": {"items": [[1, 2], [1, 3]]},
    "tensor as key": {"items": [[{"tensor": 0}, 1]]},
    "list as key": {"ordered": [[[], 1]]},
    "pair of three": {"items": [[1, 2, 3]]},
    "size of text": {"size": ["a"]},
}


@pytest.mark.parametrize("name", TREES)
def test_a_hostile_tree_is_refused(location: Path, name: str) -> None:
    rewrite(location, _set(*PART, "items", "model", "tree", {"dict": {"big": TREES[name]}}))
    into = templates()
    with CheckpointManager(location, mode="sync") as states:
        for template in (into, None, {"model": None}):
            with pytest.raises(StateMismatchError, match=r"model\.big"):
                states.load("ck", into=template)
    assert is_untouched(into)


def test_deep_nesting_double_keys_and_constants_are_refused(location: Path) -> None:
    path = location / "ck" / "manifest.json"
    body = split_digest(path.read_bytes())[0]
    deep = b'{"format":"ckptplan-state","version":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for content in (
        deep,
        body[:-1] + b',"id":"ck"}',
        body.replace(b'"sequence":2', b'"sequence":NaN'),
        b"",
        b"null",
        b"\xff",
    ):
        path.write_bytes(with_digest(content))
        refusal(location, DamagedCheckpointError)
    tree: Any = 1
    for _ in range(400):
        tree = [tree]
    path.write_bytes(with_digest(body))
    rewrite(location, _set(*PART, "items", "model", "tree", tree))
    with CheckpointManager(location, mode="sync") as states, pytest.raises(StateMismatchError, match="containers deep"):
        states.load("ck")


def test_an_unknown_version_is_told_from_damage(location: Path) -> None:
    rewrite(location, _set("version", 2))
    with CheckpointManager(location, mode="sync") as states:
        with pytest.raises(UnsupportedStateVersionError, match="format version 2; this ckptplan reads version 1"):
            states.load("ck")
        assert states.verify("ck") != []


def test_links_and_pipes_in_the_place_of_files_are_not_followed(location: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    shutil.copy(location / "ck" / "model.0.safetensors", secret)
    (location / "ck" / "model.0.safetensors").unlink()
    (location / "ck" / "model.0.safetensors").symlink_to(secret)
    assert "model.0.safetensors" in str(refusal(location, DamagedCheckpointError))
    (location / "ck" / "model.0.safetensors").unlink()
    os.mkfifo(location / "ck" / "model.0.safetensors")
    assert "model.0.safetensors" in str(refusal(location, DamagedCheckpointError))
    shutil.move(location / "ck", tmp_path / "elsewhere")
    (location / "ck").symlink_to(tmp_path / "elsewhere")
    with CheckpointManager(location, mode="sync") as states:
        with pytest.raises((StateError, OSError)):
            states.load("ck")
        with pytest.raises((StateError, OSError)):
            states.delete("ck")
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_manifest_makes_the_reader_do_anything_but_read_or_refuse(original: Path, data: st.DataObject) -> None:
    """Fuzz: one random node of the document is replaced by something random, with a right digest."""
    document = json.loads(split_digest((original / "ck" / "manifest.json").read_bytes())[0])
    junk = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=5,
    )
    node: Any = document
    while True:
        keys = list(range(len(node))) if isinstance(node, list) else list(node)
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, (list, dict)) or not inner or data.draw(st.integers(0, 3)) == 0:
            node[key] = data.draw(junk)
            break
        node = inner
    try:
        manifest = parse_manifest(with_digest(json.dumps(document).encode()), "ck")
    except (DamagedCheckpointError, UnsupportedStateVersionError):
        return
    for part in manifest.ranks:
        assert all(span.offset_bytes + span.size_bytes <= part.files[span.file].size_bytes for span in part.spans)


@given(content=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(content: bytes) -> None:
    for candidate in (content, with_digest(content)):
        with pytest.raises((DamagedCheckpointError, UnsupportedStateVersionError)):
            parse_manifest(candidate, "ck")
