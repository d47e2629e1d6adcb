"""What one save remembers for the next: addresses and places, never tensors and never old values."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptplan.errors import SaveFailedError
from ckptplan.state import CheckpointManager, ItemSpec
from ckptplan.state.arena import Arena
from ckptplan.state.storage import LocalStorage


def payload(value: float) -> dict[str, dict[str, torch.Tensor]]:
    """Big, small, strided and empty tensors, each full of one value."""
    return {
        "model": {
            "big": torch.full((3_000_000,), value),
            **{f"small.{index}": torch.full((7,), value) for index in range(50)},
            "strided": torch.full((20, 30), value).t(),
            "half": torch.full((5,), value, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        "other": {"scalar": torch.tensor(value)},
    }


@pytest.mark.parametrize(("pending", "strided"), [(1, False), (2, False), (1, True)])
def test_tensors_of_the_same_names_elsewhere_in_memory_are_the_ones_saved(
    tmp_path: Path, pending: int, strided: bool
) -> None:
    sets = [payload(0.0), payload(1.0)]
    for which in sets:
        if not strided:  # what has an address may be copied by the list of the save before
            del which["model"]["strided"]
    with CheckpointManager(tmp_path, max_pending=pending) as states:
        for step in range(6):
            which = sets[(step // 2) % 2]  # each twice in a row, then the other
            for tensor in which["model"].values():
                tensor.fill_(step)
            states.save(f"s{step}", which)
        states.wait()
        for step in range(6):
            assert states.verify(f"s{step}") == []
            for name, tensor in states.load(f"s{step}")["model"].items():
                assert (tensor == step).all(), name


def test_between_saves_no_memory_of_a_tensor_is_kept_alive(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as states:
        for kind in ("plain", "strided", "both"):
            # The memory of these tensors is that of arrays, which tell when it is let go.
            arrays = {"plain": np.ones(100, np.float32), "strided": np.ones((20, 30), np.float32)}
            arrays = arrays if kind == "both" else {kind: arrays[kind]}
            tensors = {
                name: torch.from_numpy(array).permute(*range(array.ndim)[::-1]) for name, array in arrays.items()
            }
            for step in range(3):
                states.save(f"{kind}-{step}", {"model": tensors}).result()
            states.wait()
            watched = {name: weakref.ref(array) for name, array in arrays.items()}
            del tensors, arrays
            gc.collect()
            assert [name for name, reference in watched.items() if reference() is not None] == []


def test_a_load_from_many_files_has_few_of_them_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = {f"item{index}": torch.full((10,), float(index)) for index in range(60)}
    reader, now, most = LocalStorage.reader, [0], [0]

    class Counted:
        def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
            self.inner = inner

        def __enter__(self):  # type: ignore[no-untyped-def]
            now[0] += 1
            most[0] = max(most[0], now[0])
            return self.inner.__enter__()

        def __exit__(self, *error):  # type: ignore[no-untyped-def]
            now[0] -= 1
            return self.inner.__exit__(*error)

    with CheckpointManager(tmp_path) as states:
        states.save("a", items).result()
        monkeypatch.setattr(LocalStorage, "reader", lambda *args, **options: Counted(reader(*args, **options)))
        loaded = states.load("a")
    assert all(torch.equal(loaded[name], value) for name, value in items.items())
    assert now == [0], "all are closed"
    assert most[0] <= 4


def test_a_file_that_cannot_be_opened_is_one_fault_and_the_others_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = LocalStorage._open
    opened: list[str] = []

    def refuse(self: LocalStorage, path: str) -> int:
        if path.endswith("/b.0.safetensors"):
            raise PermissionError(13, "Permission denied", path)
        opened.append(path)
        return open_file(self, path)

    with CheckpointManager(tmp_path) as states:
        states.save("a", {name: torch.ones(3_000_000) for name in "abc"}).result()
        monkeypatch.setattr(LocalStorage, "_open", refuse)
        assert states.verify("a") == ["b.0.safetensors: Permission denied"]
    assert {path.rpartition("/")[2] for path in opened} >= {"a.0.safetensors", "c.0.safetensors"}


@pytest.mark.parametrize("fresh", [True, False])
def test_an_item_that_needs_no_copy_is_copied_after_save_returns_and_the_others_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    items = {"frozen": ItemSpec(requires_copy=False), "model": ItemSpec()}
    may_copy, plain_fill = threading.Event(), Arena.fill

    def fill(self: Arena, plans: Any, spans: Any, files: Any, threads: int, filled: Any) -> None:
        if {plans[file].item for file in files} == {"frozen"}:
            assert may_copy.wait(20)
        plain_fill(self, plans, spans, files, threads, filled)

    with CheckpointManager(tmp_path, items=items) as states:
        if not fresh:
            states.save("before", {"frozen": torch.zeros(1000), "model": torch.zeros(1000)}).result()
        monkeypatch.setattr(Arena, "fill", fill)
        frozen, model = torch.full((1000,), 1.0), torch.full((1000,), 2.0)
        future = states.save("s", {"frozen": frozen, "model": model})
        model.fill_(-1)
        frozen.fill_(3)  # against the rule, to see when it is copied
        assert not future.done()
        may_copy.set()
        future.result()
        loaded = states.load("s")
        assert (loaded["model"] == 2).all()
        assert (loaded["frozen"] == 3).all()
        assert states.verify("s") == []


@pytest.mark.parametrize("where", ["process", "thread"])
def test_an_item_that_needs_no_copy_is_held_until_it_is_written(tmp_path: Path, where: str) -> None:
    location = str(tmp_path) if where == "process" else f"file://{tmp_path}"
    with CheckpointManager(location, default=ItemSpec(requires_copy=False)) as states:
        for step in range(10):
            states.save(f"s{step}", {"model": {"w": torch.full((200_000,), float(step))}, "step": step})
            torch.full((200_000,), -1.0)  # would take the place of what was let go
        states.wait()
        for step in range(10):
            loaded = states.load(f"s{step}")
            assert (loaded["model"]["w"] == step).all()
            assert loaded["step"] == step


def test_a_copy_that_fails_after_save_returned_fails_that_save_and_the_next_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fill = Arena.fill

    def fill(self: Arena, plans: Any, spans: Any, files: Any, threads: int, filled: Any) -> None:
        if files:
            raise MemoryError("no pages")
        plain_fill(self, plans, spans, files, threads, filled)

    with CheckpointManager(tmp_path, default=ItemSpec(requires_copy=False)) as states:
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "fill", fill)
            future = states.save("a", {"w": torch.ones(10)})
            with pytest.raises(SaveFailedError, match="no pages"):
                future.result()
        assert states.save("b", {"w": torch.ones(10)}).result().checkpoint_id == "b"
        assert states.steps() == []
        assert [info.checkpoint_id for info in states.list()] == ["b"]
