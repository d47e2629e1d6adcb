"""Which part of a tensor a rank holds: against torch.chunk and NumPy slicing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptplan.state.boxes import LEAST_PART_BYTES, BoxIndex, local_boxes, local_shape, replica_of, rows_to_write
from tests.state.thread_ranks import Layout

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, dims: int, most_ranks: int = 8) -> Layout:
    """Meshes of one or two dimensions; every kind of placement that a DTensor may have."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 4)]))
    kinds = [st.none()]
    if dims:
        kinds.append(st.tuples(st.integers(0, dims - 1), st.just(1)))
        kinds.append(st.tuples(st.integers(0, dims - 1), st.integers(2, 3)))
    return Layout(mesh, tuple(draw(st.one_of(kinds)) for _ in mesh))


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = draw(shapes)
    return shape, draw(layouts(len(shape)))


@given(placed())
@settings(max_examples=300, deadline=None)
def test_the_boxes_of_a_rank_are_its_local_tensor(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(layout.world_size):
        where = layout.mesh, layout.coordinate(rank), layout.placements
        expected = layout.local(full, rank)
        assert local_shape(shape, *where) == tuple(expected.shape)
        local = torch.full(expected.shape, -1)
        for box in local_boxes(shape, *where):
            ranges = zip(box.offsets, box.sizes, strict=True)
            part = full[tuple(slice(start, start + size) for start, size in ranges)]
            ranges = zip(box.local_offsets, box.sizes, strict=True)
            local[tuple(slice(start, start + size) for start, size in ranges)] = part
        assert torch.equal(local, expected)


@given(placed(), st.integers(1, 300_000), st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_over_all_ranks_every_byte_is_written_once(
    case: tuple[tuple[int, ...], Layout], item_bytes: int, number: int
) -> None:
    """Big elements, so that boxes are big enough to be cut."""
    shape, layout = case
    written = np.zeros(shape, int)
    for rank in range(layout.world_size):
        where = layout.mesh, layout.coordinate(rank), layout.placements
        for box in local_boxes(shape, *where):
            rows = rows_to_write(box.sizes, item_bytes, number, *replica_of(*where))
            if rows is not None:
                ranges = list(zip(box.offsets, box.sizes, strict=True))
                if ranges:
                    ranges[0] = ranges[0][0] + rows[0], rows[1]
                written[tuple(slice(start, start + size) for start, size in ranges)] += 1
    assert (written == 1).all()


def test_replicas_share_the_writing() -> None:
    by_replica = [rows_to_write((1000, 4), 4096, 0, replica, 4) for replica in range(4)]
    assert by_replica == [(0, 250), (250, 250), (500, 250), (750, 250)], "a big tensor: a quarter each"
    assert LEAST_PART_BYTES > 2 * 4 * 4096
    small = [[rows_to_write((2, 4), 4096, number, replica, 4) for replica in range(4)] for number in range(4)]
    assert [row.index((0, 2)) for row in small] == [0, 1, 2, 3], "small ones go round"
    assert all(row.count(None) == 3 for row in small)


def test_a_strided_shard_of_one_mesh_dimension_is_several_boxes() -> None:
    """Rows 0, 1, 4 and 5 of 8: the predecessor saved these silently wrong."""
    boxes = local_boxes((8, 3), (2,), (0,), ((0, 2),))
    assert [(box.offsets, box.local_offsets, box.sizes) for box in boxes] == [
        ((0, 0), (0, 0), (2, 3)),
        ((4, 0), (2, 0), (2, 3)),
    ]
    # On the mesh of FSDP2 and tensor parallelism the same placement leaves one box.
    assert [box.offsets for box in local_boxes((8, 3), (2, 2), (0, 1), ((0, 2), (0, 1)))] == [(4, 0)]


boxes_in = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(boxes_in, max_size=6), boxes_in)
@settings(max_examples=200, deadline=None)
def test_what_boxes_share_is_what_they_share_element_by_element(
    boxes: list[tuple[int, int, int, int]], wanted: tuple[int, int, int, int]
) -> None:
    def elements(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {
            (x, y)
            for x in range(offsets[0], sum((offsets[0], sizes[0])))
            for y in range(offsets[1], offsets[1] + sizes[1])
        }

    index = BoxIndex([box[:2] for box in boxes], [box[2:] for box in boxes], 2)
    found = {number: elements(offsets, sizes) for number, offsets, sizes in index.overlaps(wanted[:2], wanted[2:])}
    expected = {
        number: elements(box[:2], box[2:]) & elements(wanted[:2], wanted[2:]) for number, box in enumerate(boxes)
    }
    assert found == {number: shared for number, shared in expected.items() if shared}
    assert index.total() == sum(box[2] * box[3] for box in boxes)


def test_a_scalar_is_one_element() -> None:
    assert [tuple(box) for box in local_boxes((), (4,), (3,), (None,))] == [((), (), ())]
    assert BoxIndex([()], [()], 0).overlaps((), ()) == [(0, (), ())]
    assert [rows_to_write((), 4, 5, replica, 4) for replica in range(4)] == [None, (0, 1), None, None]
