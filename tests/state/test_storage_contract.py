"""Any storage passes the same suite: its operations, and saving and loading through them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptplan.errors import DamagedCheckpointError, DuplicateCheckpointError, SaveFailedError
from ckptplan.state import CheckpointManager, LocalStorage, Storage, StorageConfig
from ckptplan.state.storage import ReadInto

Make = Callable[[Path], Storage]


class InMemory(Storage):
    """The least that a storage must do; also the example of one's own."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self, folder: str = "") -> list[str]:
        start = folder + "/" if folder else ""
        return sorted({path[len(start) :].split("/")[0] for path in self.files if path.startswith(start)})

    def size_bytes(self, path: str) -> int:
        if path not in self.files:
            raise FileNotFoundError(path)
        return len(self.files[path])

    def reader(self, path: str, *, sparse: bool = False) -> AbstractContextManager[ReadInto]:
        import contextlib

        @contextlib.contextmanager
        def open_it() -> Any:
            if path not in self.files:
                raise FileNotFoundError(path)

            def read_into(offset: int, target: memoryview) -> None:
                data = self.files[path][offset : offset + len(target)]
                if len(data) != len(target):
                    raise OSError("the file ends too early")
                target[:] = data

            yield read_into

        return open_it()

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = b"".join(bytes(piece) for piece in pieces)

    def delete(self, path: str) -> None:
        for name in [name for name in self.files if name == path or name.startswith(path + "/")]:
            del self.files[name]


def _memory_url(tmp_path: Path) -> Storage:
    return StorageConfig(f"memory://{tmp_path.name}/state").open()


MAKERS: dict[str, Make] = {
    "local": lambda tmp_path: LocalStorage(tmp_path / "state"),
    "in memory": lambda tmp_path: InMemory(),
    "memory url": _memory_url,
    "file url": lambda tmp_path: StorageConfig(f"file://{tmp_path}/state").open(),
}


@pytest.fixture(params=[*MAKERS, "s3", "s3 with a cache"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param in MAKERS:
        return MAKERS[request.param](tmp_path)
    url = request.getfixturevalue("bucket").url
    cache = str(tmp_path / "cache") if request.param == "s3 with a cache" else None
    return StorageConfig(url, cache=cache).open()


def test_what_is_written_is_read_at_any_offset(storage: Storage) -> None:
    storage.write("a/b.bin", [b"0123", memoryview(b"456"), bytearray(b"789")])
    assert storage.size_bytes("a/b.bin") == 10
    assert storage.read("a/b.bin") == b"0123456789"
    with storage.reader("a/b.bin", sparse=True) as read_into:
        part = bytearray(4)
        read_into(3, memoryview(part))
        assert part == b"3456"
        with pytest.raises(OSError, match="early"):
            read_into(8, memoryview(part))
    storage.write("a/empty", [])
    assert storage.read("a/empty") == b""


def test_names_are_those_directly_in_a_folder(storage: Storage) -> None:
    assert storage.names() == storage.names("nowhere") == []
    for path in ("x/one", "x/two", "x/deep/three", "y/one"):
        storage.write(path, [b"1"])
    assert storage.names() == ["x", "y"]
    assert storage.names("x") == ["deep", "one", "two"]


def test_a_file_that_is_there_is_never_replaced(storage: Storage) -> None:
    storage.write("a/b", [b"first"])
    with pytest.raises(FileExistsError):
        storage.write("a/b", [b"second"])
    assert storage.read("a/b") == b"first"


def test_a_write_that_fails_leaves_nothing(storage: Storage) -> None:
    def failing() -> Any:
        yield b"half"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        storage.write("a/b", failing())
    assert "b" not in storage.names("a")
    assert storage.names("a") == []


def test_what_is_not_there_is_not_found_and_deleting_it_is_fine(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.size_bytes("a/b")
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")
    storage.delete("a")
    storage.write("a/b", [b"1"])
    storage.write("a/c/d", [b"1"])
    storage.delete("a/b")
    assert storage.names("a") == ["c"]
    storage.delete("a")
    assert storage.names() == []


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_manager_works_on_any_storage(storage: Storage, mode: str) -> None:
    value = {"w": torch.arange(400_000.0), "c": torch.arange(6).view(2, 3).t(), "n": {"step": 0}}
    with CheckpointManager(storage=storage, mode=mode, keep_last=2) as states:
        for step in range(4):
            value["n"]["step"] = step
            states.save(f"s-{step}", {"item": value}, metrics={"loss": step})
            value["w"].add_(1)
        states.wait()
        assert states.steps() == [2, 3]
        into = {"item": {"w": torch.zeros(400_000), "c": torch.zeros(3, 2).long(), "n": {"step": -1}}}
        states.load("latest", into=into)
        assert into["item"]["n"] == {"step": 3}
        assert torch.equal(into["item"]["w"], torch.arange(400_000.0) + 3)
        assert into["item"]["c"].tolist() == [[0, 3], [1, 4], [2, 5]]
        with pytest.raises(DuplicateCheckpointError):
            states.save("s-3", {"item": 1}).result()
        assert states.verify("s-2") == states.verify("s-3") == []
        states.load("s-2")
        states.save("s-3", {"item": "again"}).result()
        assert states.load("latest") == {"item": "again"}
        assert storage.names("superseded") == ["s-3"]
        states.delete("s-3")
        assert states.steps() == [2]


def test_damage_on_any_storage_is_found(storage: Storage) -> None:
    with CheckpointManager(storage=storage, mode="sync") as states:
        states.save("a", {"w": torch.arange(1000.0)}).result()
        name = next(fault for fault in _files(storage, "a") if fault.endswith("safetensors"))
        content = bytearray(storage.read(name))
        content[5000] ^= 4
        storage.delete(name)
        storage.write(name, [content])
        target = torch.zeros(1000)
        with pytest.raises(DamagedCheckpointError, match="does not match its checksum"):
            states.load("a", into={"w": target})
        assert target.eq(0).all()


def _files(storage: Storage, folder: str) -> list[str]:
    found = []
    for name in storage.names(folder):
        inner = storage.names(f"{folder}/{name}")
        found += [f"{folder}/{name}/{file}" for file in inner if file != name] or [f"{folder}/{name}"]
    return found


class Unreliable(InMemory):
    """Slow, and fails the writes whose numbers are named."""

    def __init__(self, failing: set[int], delay_s: float = 0.0) -> None:
        super().__init__()
        self.failing, self.delay_s, self.writes = failing, delay_s, 0

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        self.writes += 1
        time.sleep(self.delay_s)
        if self.writes in self.failing:
            for _ in pieces:
                raise ConnectionResetError(104, "the store hung up", path)
        super().write(path, pieces)


@pytest.mark.parametrize("failing", [1, 2, 3], ids=["first file", "second file", "manifest"])
def test_a_flaky_storage_fails_that_save_and_the_next_works(failing: int) -> None:
    storage = Unreliable({failing})
    with CheckpointManager(storage=storage) as states:
        payload = {"a": torch.ones(3), "b": torch.ones(3)}
        error = states.save("x", payload).exception()
        assert isinstance(error, SaveFailedError)
        assert error.errno == 104
        assert "hung up" in str(error)
        assert states.list() == []
        assert storage.files == {}
        states.save("x", payload).result()
        assert states.verify("x") == []


def test_a_slow_storage_holds_up_the_second_save_only(tmp_path: Path) -> None:
    storage = Unreliable(set(), delay_s=0.2)
    with CheckpointManager(storage=storage) as states:
        value = torch.zeros(1000)
        started = time.monotonic()
        states.save("a", {"w": value})
        first_s = time.monotonic() - started
        value.fill_(1)
        second = states.save("b", {"w": value})
        assert first_s < 0.2 <= second.progress().wait_s + first_s
        second.result()
        assert states.load("a")["w"].sum() == 0
        assert states.load("b")["w"].sum() == 1000


def test_a_storage_config_pickles_and_options_need_a_url(tmp_path: Path) -> None:
    config = StorageConfig("memory://x", (("skip_instance_cache", True),))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="options="):
        StorageConfig(str(tmp_path), (("key", "x"),)).open()


@pytest.mark.parametrize("path", ["../x", "a/../../x", "a/./b"])
def test_no_path_leads_out_of_the_location(tmp_path: Path, path: str) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    for storage in (LocalStorage(tmp_path / "state"), StorageConfig(f"file://{tmp_path}/state").open()):
        storage.write("a/b", [b"1"])
        with pytest.raises(FileNotFoundError):
            storage.read(path)
        storage.delete("a")
