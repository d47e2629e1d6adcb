"""Sharded tensors saved under one layout and loaded under another: against NumPy slicing of the whole tensor.

Ranks are threads and tensors are sharded by hand here; DTensors and processes are in test_sharded_ranks.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptplan.errors import DamagedCheckpointError, SaveFailedError, StateMismatchError
from ckptplan.state import CheckpointManager, ItemSpec, LocalStorage
from ckptplan.state.attempt import split_digest, with_digest
from ckptplan.state.cli import main
from ckptplan.state.export import export_item
from tests.state.test_boxes import layouts
from tests.state.thread_ranks import ByHand, Layout, ThreadRank, on_ranks

ROWS = {world: Layout((world,), ((0, 1),)) for world in (1, 2, 3, 4)}
numbers = itertools.count()  # of locations in memory: each example has one of its own
COLUMNS = {world: Layout((world,), ((1, 1),)) for world in (1, 2, 3, 4)}


def save(location: Any, layout: Layout, tensors: dict[str, torch.Tensor], **other: Any) -> None:
    """Saves the item "model" from as many ranks as the layout has."""
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}

    def work(coordinator: ThreadRank) -> None:
        spec = ItemSpec(resharder=ByHand(shapes, dict.fromkeys(shapes, layout), coordinator.rank))
        with manager(location, coordinator, model=spec) as states:
            local = {name: layout.local(tensor, coordinator.rank) for name, tensor in tensors.items()}
            states.save("a", {"model": {**local, **other}}).result(60)

    on_ranks(layout.world_size, work)


def manager(location: Any, coordinator: ThreadRank, **items: ItemSpec) -> CheckpointManager:
    return CheckpointManager(location, mode="sync", items=items, coordinator=coordinator, timeout_s=30)


def load(
    location: Any, layout: Layout, shapes: dict[str, tuple[int, ...]], template: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The item "model" as each rank gets it, into what `template` gives it."""
    known = {f"model.{name}": shape for name, shape in shapes.items()}

    def work(coordinator: ThreadRank) -> dict[str, Any]:
        spec = ItemSpec(resharder=ByHand(known, dict.fromkeys(known, layout), coordinator.rank))
        with manager(location, coordinator, model=spec) as states:
            loaded: dict[str, Any] = states.load("a", into={"model": template(coordinator.rank)})["model"]
            return loaded

    return on_ranks(layout.world_size, work)


@st.composite
def resharding(draw: st.DrawFn) -> tuple[torch.Tensor, Layout, Layout, bool]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]))
    full = torch.randint(0, 2 if dtype == torch.bool else 1000, shape).to(dtype)
    return full, draw(layouts(len(shape))), draw(layouts(len(shape))), draw(st.booleans())


@given(resharding())
@settings(max_examples=60, deadline=None)
def test_any_layout_loads_into_any_other(case: tuple[torch.Tensor, Layout, Layout, bool]) -> None:
    full, source, target, is_strided = case
    location = f"memory://sharded-{next(numbers)}"
    save(location, source, {"w": full}, lr=0.5)

    def template(rank: int) -> dict[str, Any]:
        local = torch.zeros_like(target.local(full, rank))
        if is_strided and local.dim() > 1:
            local = local.transpose(0, -1).contiguous().transpose(0, -1)
        return {"w": local, "lr": 0.0}

    for rank, loaded in enumerate(load(location, target, {"w": tuple(full.shape)}, template)):
        assert torch.equal(loaded["w"], target.local(full, rank))
        assert loaded["lr"] == 0.5
    with CheckpointManager(location, mode="sync") as states:
        whole = states.load("a")["model"]["w"]
        assert whole.dtype == full.dtype
        assert torch.equal(whole, full)
        plain = torch.zeros_like(full)
        states.load("a", into={"model": {"w": plain, "lr": 0.0}})
        assert torch.equal(plain, full)
        # A memory store goes on showing an emptied folder, which is where the ranks met.
        assert states.verify("a") == [] or full.numel() == 0


def test_a_plain_checkpoint_loads_into_shards_of_what_shares_memory(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a", {"model": {"whole": base, "turned": base.t(), "part": base[1:, 2:]}}).result()
    shapes = {"whole": (4, 6), "turned": (6, 4), "part": (3, 4)}
    for rank, loaded in enumerate(
        load(
            tmp_path,
            ROWS[3],
            shapes,
            lambda rank: {name: ROWS[3].local(torch.zeros(shape), rank) for name, shape in shapes.items()},
        )
    ):
        assert torch.equal(loaded["whole"], ROWS[3].local(base, rank))
        assert torch.equal(loaded["turned"], ROWS[3].local(base.t(), rank))
        assert torch.equal(loaded["part"], ROWS[3].local(base[1:, 2:], rank))


def test_every_byte_is_written_once_and_replicas_share_the_writing(tmp_path: Path) -> None:
    full = torch.randn(1024, 1024)  # 4 MiB
    replicated = Layout((2, 2), (None, (0, 1)))
    save(tmp_path, replicated, {"w": full})
    sizes = [path.stat().st_size for path in sorted((tmp_path / "a").glob("model.*.safetensors"))]
    assert sizes == [4096 + 2**20] * 4
    save(tmp_path / "all", Layout((4,), (None,)), {"w": full, "small": torch.ones(3)})
    sizes = [path.stat().st_size for path in sorted((tmp_path / "all" / "a").glob("model.*.safetensors"))]
    assert sorted(sizes) == [4096 + 2**20] * 3 + [4096 + 2**20 + 12]


class CountingStorage(LocalStorage):
    """Remembers which bytes of which file were read."""

    def __init__(self, location: Path) -> None:
        super().__init__(location)
        self.read_bytes: dict[str, set[tuple[int, int]]] = {}

    def reader(self, path: str, *, sparse: bool = False) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def counted() -> Any:
            with LocalStorage.reader(self, path, sparse=sparse) as read_into:

                def read(offset: int, target: memoryview) -> None:
                    self.read_bytes.setdefault(path, set()).add((offset, offset + len(target)))
                    read_into(offset, target)

                yield read

        return counted()

    def distinct_bytes(self) -> int:
        """Read bytes of the tensors (not of headers and manifests), each counted once: the second pass finds them
        in the page cache."""
        total = 0
        for path, ranges in self.read_bytes.items():
            end = 4096 if path.endswith(".safetensors") else 2**62
            for start, stop in sorted(ranges):
                total += max(0, stop - max(start, end))
                end = max(end, stop)
        return total


def bytes_read(tmp_path: Path, source: Layout, target: Layout, full: torch.Tensor) -> float:
    """Over all ranks, as a multiple of what they want."""
    location = tmp_path / f"{source.mesh}-{target.mesh}-{source.placements}"
    save(location, source, {"w": full})
    known = {"model.w": tuple(full.shape)}
    wanted = sum(target.local(full, rank).nbytes for rank in range(target.world_size))

    def work(coordinator: ThreadRank) -> int:
        storage = CountingStorage(location)
        spec = ItemSpec(resharder=ByHand(known, {"model.w": target}, coordinator.rank))
        with CheckpointManager(storage=storage, mode="sync", items={"model": spec}, coordinator=coordinator) as states:
            local = torch.zeros_like(target.local(full, coordinator.rank))
            states.load("a", into={"model": {"w": local}})
            assert torch.equal(local, target.local(full, coordinator.rank))
        return storage.distinct_bytes()

    return sum(on_ranks(target.world_size, work)) / wanted


def test_row_shards_read_hardly_more_than_they_want(tmp_path: Path) -> None:
    full = torch.randn(997, 1111)  # 4.4 MB; no border falls on a chunk's
    for source in ROWS.values():
        for target in ROWS.values():
            assert 1.0 <= bytes_read(tmp_path, source, target, full) <= 1.1


def test_column_shards_read_their_own_parts_and_rows_are_read_whole(tmp_path: Path) -> None:
    full = torch.randn(512, 1024)
    assert bytes_read(tmp_path, COLUMNS[2], COLUMNS[2], full) == 1.0
    assert bytes_read(tmp_path, COLUMNS[2], COLUMNS[4], full) <= 2.1
    assert 3.9 <= bytes_read(tmp_path, ROWS[2], COLUMNS[4], full) <= 4.1, (
        "each rank reads all rows; docs/state.md says so"
    )


def test_tied_shards_are_written_once_and_are_one_tensor_again(tmp_path: Path) -> None:
    full = torch.randn(64, 256)
    shapes = {"model.head": (64, 256), "model.embedding": (64, 256)}

    def work(coordinator: ThreadRank) -> None:
        spec = ItemSpec(resharder=ByHand(shapes, dict.fromkeys(shapes, ROWS[2]), coordinator.rank))
        with manager(tmp_path, coordinator, model=spec) as states:
            local = ROWS[2].local(full, coordinator.rank)
            states.save("a", {"model": {"head": local, "embedding": local}}).result(60)

    on_ranks(2, work)
    assert sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")) == 2 * 4096 + full.nbytes
    with CheckpointManager(tmp_path, mode="sync") as states:
        loaded = states.load("a")["model"]
        assert torch.equal(loaded["head"], full)
        assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()
        shared = torch.zeros(64, 256)
        states.load("a", into={"model": {"head": shared, "embedding": shared}})
        assert torch.equal(shared, full)
    save(tmp_path / "apart", ROWS[2], {"head": full, "embedding": full.clone()})
    with CheckpointManager(tmp_path / "apart", mode="sync") as states:
        shared = torch.zeros(64, 256)
        with pytest.raises(StateMismatchError, match=r"shares memory .* but is stored apart"):
            states.load("a", into={"model": {"head": shared, "embedding": shared}})
        assert not shared.any()


def test_a_mismatch_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    save(tmp_path, ROWS[2], {"w": torch.ones(6, 2)})

    def work(coordinator: ThreadRank) -> tuple[str, bool]:
        wanted = (6, 2) if coordinator.rank == 0 else (6, 3)
        spec = ItemSpec(resharder=ByHand({"model.w": wanted}, {"model.w": ROWS[2]}, coordinator.rank))
        local = torch.zeros(3, wanted[1])
        with manager(tmp_path, coordinator, model=spec) as states, pytest.raises(StateMismatchError) as caught:
            states.load("a", into={"model": {"w": local}})
        return str(caught.value), bool(local.any())

    for message, has_changed in on_ranks(2, work):
        assert "model.w: expected float32 [6, 3], stored is float32 [6, 2]; nothing is cast or reshaped" in message
        assert not has_changed


def test_damage_in_one_ranks_part_changes_nothing_on_any(tmp_path: Path) -> None:
    save(tmp_path, ROWS[2], {"w": torch.ones(6, 2)})
    path = tmp_path / "a" / "model.1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def work(coordinator: ThreadRank) -> tuple[str, bool]:
        spec = ItemSpec(resharder=ByHand({"model.w": (6, 2)}, {"model.w": ROWS[2]}, coordinator.rank))
        local = torch.zeros(3, 2)
        with manager(tmp_path, coordinator, model=spec) as states, pytest.raises(DamagedCheckpointError) as caught:
            states.load("a", into={"model": {"w": local}})
        return str(caught.value), bool(local.any())

    for message, has_changed in on_ranks(2, work):
        assert "rank 1: model.1.safetensors: 'w' does not match its checksum" in message
        assert not has_changed


def test_ranks_that_describe_a_tensor_differently_save_nothing(tmp_path: Path) -> None:
    def work(coordinator: ThreadRank) -> str:
        shape = (4, 2) if coordinator.rank == 0 else (4, 3)
        by_hand = ByHand({"model.w": shape}, {"model.w": ROWS[2]}, coordinator.rank)
        spec = ItemSpec(scope="global", required=False, resharder=by_hand)
        with manager(tmp_path, coordinator, model=spec) as states:
            error = states.save("a", {"model": {"w": torch.ones(2, shape[1])}}).exception(60)
            assert states.save("b", {"n": 1}).exception(60) is None
        assert isinstance(error, SaveFailedError)
        return str(error)

    for message in on_ranks(2, work):
        assert "sharded tensors differ between ranks" in message
        assert message.endswith("model")


def test_a_missing_part_is_seen_before_anything_changes(tmp_path: Path) -> None:
    """A manifest that a faulty program wrote: whole by its checksums, but not the whole tensor."""
    save(tmp_path, ROWS[2], {"w": torch.ones(6, 2)})
    path = tmp_path / "a" / "manifest.json"
    body, _ = split_digest(path.read_bytes())
    path.write_bytes(with_digest(body.replace(b'"shard":[0,[3,0]]', b'"shard":[1,[3,0]]')))
    with CheckpointManager(tmp_path, mode="sync") as states:
        target = torch.zeros(6, 2)
        with pytest.raises(StateMismatchError, match=r"6 elements are stored for float32 \[6, 2\], which has 12"):
            states.load("a", into={"model": {"w": target}})
        assert not target.any()
        assert states.verify("a") == ["model.w: 6 elements are stored for float32 [6, 2], which has 12"]


def test_the_command_line_sees_whole_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"w": torch.randn(7, 6), "b": torch.randn(5), "s": torch.tensor(2.0)}
    matrices = {"w": tensors["w"], "b": tensors["b"]}
    save(tmp_path / "two", ROWS[2], matrices, n=3)
    save(tmp_path / "three", Layout((3,), (None,)), matrices, n=3)
    save(tmp_path / "four", Layout((2, 2), (None, None)), tensors)
    (tmp_path / "all").mkdir()
    for name in ("two", "three"):
        (tmp_path / name / "a").rename(tmp_path / "all" / name)
        path = tmp_path / "all" / name / "manifest.json"
        body, _ = split_digest(path.read_bytes())
        path.write_bytes(with_digest(body.replace(b'"id":"a"', f'"id":"{name}"'.encode())))
    location = str(tmp_path / "all")
    assert main(["verify", location]) == 0
    assert main(["ls", location]) == 0
    capsys.readouterr()
    assert main(["show", location, "two"]) == 0
    shown = capsys.readouterr().out
    assert "w  float32 [7, 6], S0 on a mesh of [2]" in shown
    assert "n  3" in shown
    assert main(["diff", location, "two", "three"]) == 0, "the same values, however they lie"
    assert main(["export", location, "two", str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == {"w", "b"}
    assert torch.equal(exported["w"], tensors["w"])
    assert torch.equal(exported["b"], tensors["b"])
    export_item(LocalStorage(tmp_path / "four"), "a", "model", tmp_path / "out4")
    assert torch.equal(load_file(tmp_path / "out4" / "model.safetensors")["s"], tensors["s"])
    save(tmp_path / "changed", ROWS[3], {"w": tensors["w"] + 1, "b": tensors["b"]}, n=3)
    (tmp_path / "changed" / "a").rename(tmp_path / "all" / "a")
    capsys.readouterr()
    assert main(["diff", location, "two", "a"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "~ model.w: float32 [7, 6], other values",
        "1 differences in 3 values",
    ]


def test_a_save_is_two_exchanges_between_ranks_and_a_load_four(tmp_path: Path) -> None:
    """However many ranks and tensors there are; docs/state.md says so."""

    def work(coordinator: ThreadRank) -> tuple[int, int]:
        spec = ItemSpec(resharder=ByHand({"model.w": (6, 2)}, {"model.w": ROWS[3]}, coordinator.rank))
        with manager(tmp_path, coordinator, model=spec) as states:
            states.save("a", {"model": {"w": torch.ones(2, 2)}}).result(60)
            after_save = coordinator.num_gathers
            states.load("latest", into={"model": {"w": torch.zeros(2, 2)}})
        return after_save, coordinator.num_gathers - after_save

    assert on_ranks(3, work) == [(2, 4)] * 3
