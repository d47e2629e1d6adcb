"""Every value comes back exactly, with its type, or is refused at save by path and type."""

from __future__ import annotations

import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptplan.errors import StateMismatchError, UnsaveableValueError
from ckptplan.state import CheckpointManager


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 10


Point = namedtuple("Point", ["x", "y"])


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and bits, recursively; an oracle that knows nothing of the engine."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_tensor(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or left.requires_grad != right.requires_grad:
        return False
    left, right = left.detach().resolve_conj().resolve_neg(), right.detach().resolve_conj().resolve_neg()
    return _bytes(left) == _bytes(right)


def _bytes(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with CheckpointManager(tmp_path_factory.mktemp("values"), mode="sync", keep_last=2) as manager:
        manager.counter = 0  # type: ignore[attr-defined]
        yield manager


def round_trip(states: Any, value: Any) -> Any:
    states.counter += 1
    states.save(f"v{states.counter}", {"item": value}).result()
    return states.load(f"v{states.counter}")["item"]


EXACT: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 10**6000],
    "floats": [0.0, -0.0, 1e-320, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 0.1],
    "a nan with a payload": struct.unpack("d", struct.pack("Q", 0x7FF8000000001234))[0],
    "text": ["", "a", "\0", "\ud800", "\U0001f600", "line\nbreak", '"quoted"', "xxh3_128:"],
    "bytes": [b"", bytes(range(256))],
    "nested": {"a": [1, (2, {"b": ()}), []], "": {}, "a.b": 1, "a\0": 2, "__metadata__": 3, "\u00e9": 4},
    "int keys": {0: "a", -5: "b", 2**70: "c", "0": "text beside the number"},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "counter": Counter({"x": 3, 7: 1}),
    "enums": [Colour.RED, Colour.BLUE, Level.HIGH],
    "namedtuple": Point(1, [Point(2, 3), None]),
    "size": torch.Size([2, 0, 3]),
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e5m2, np.dtype("<f4"), np.dtype(">i8")],
    "devices": [torch.device("cpu"), torch.device("cuda", 3)],
    "numpy scalars": [np.float32(1.5), np.int8(-3), np.bool_(True), np.float64("nan"), np.str_("ab")],
    "numpy date": np.datetime64("2026-01-02"),
    "numpy arrays": [np.arange(6).reshape(2, 3)[:, ::2], np.array(3.0), np.empty((0, 4), np.int16)],
    "numpy text": np.array(["a", "bcd"]),
    "numpy orders": [np.arange(3, dtype=">i4"), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([True])],
    "random states": [random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state()],
    "numpy generator": np.random.default_rng(5).bit_generator.state,
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_value_comes_back_exactly(states: Any, name: str) -> None:
    assert same(round_trip(states, EXACT[name]), EXACT[name])


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, on making such a tensor
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_comes_back_bit_by_bit(states: Any, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (96,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    value = {
        "whole": tensor,
        "scalar": tensor[0].clone(),
        "empty": tensor[:0].clone(),
        "grid": tensor[:6].clone().view(2, 3),
    }
    assert same(round_trip(states, value), value)


TENSORS: dict[str, Any] = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": torch.arange(10)[::2],
    "expanded": torch.tensor([1.0]).expand(1000, 1000),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "64 dimensions": torch.zeros([1] * 64),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "frozen parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "buffer": torch.nn.Buffer(torch.randn(3)),
    "wants a gradient": torch.randn(3, requires_grad=True),
    "nan and inf": torch.tensor([math.nan, math.inf, -0.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_an_odd_tensor_comes_back_exactly(states: Any, name: str) -> None:
    assert same(round_trip(states, TENSORS[name]), TENSORS[name])


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    return cycle


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    return deep


Local = namedtuple("Elsewhere", ["x"])

REFUSED: dict[str, tuple[Any, str]] = {
    "function": (lambda: 1, "item.here: builtins.function"),
    "set": ({1, 2}, "item.here: builtins.set"),
    "complex": (1j, "item.here: builtins.complex"),
    "deque": (deque([1]), "item.here: collections.deque"),
    "defaultdict": (defaultdict(int), "item.here: collections.defaultdict"),
    "path": (Path("x"), "item.here: pathlib"),
    "bytearray": (bytearray(b"x"), "item.here: builtins.bytearray"),
    "module without state": (math, "item.here: builtins.module"),
    "sparse": (torch.eye(3).to_sparse(), "torch.sparse_coo"),
    "meta": (torch.empty(3, device="meta"), "meta device"),
    "cycle": (_cycle(), "item.here.0.again: builtins.list contains itself"),
    "too deep": (_deep(), "more than 100 containers deep"),
    "object array": (np.array([None, {}]), "item.here: numpy.ndarray with dtype object"),
    "record array": (np.zeros(2, [("a", "i4")]), "item.here: numpy.ndarray"),
    "tuple key": ({(1, 2): 3}, "builtins.tuple is not a key"),
    "bool key": ({True: 1}, "builtins.bool is not a key"),
    "float key": ({1.5: 1}, "builtins.float is not a key"),
    "lost namedtuple": (Local(1), "namedtuple that cannot be found"),
    "dtype below a byte": (torch.zeros(3, dtype=torch.uint8).view(torch.uint4), "of dtype uint4 is not saved"),
    "half an interface": (type("Half", (), {"state_dict": dict})(), "has state_dict and no load_state_dict"),
    "subclass of dict": (type("Mine", (dict,), {})(), "is a subclass of dict"),
    "subclass of tensor": (torch.zeros(2).as_subclass(type("T", (torch.Tensor,), {})), "tensor subclass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_by_path_and_type(states: Any, name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(UnsaveableValueError, match=message.replace("(", r"\(")):
        round_trip(states, {"here": value})
    assert same(round_trip(states, [1]), [1]), "the next save works"


EVERY_DTYPE = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_comes_back_to_the_bit_or_is_refused_and_what_was_there_stays(tmp_path: Path, dtype: Any) -> None:
    """A state that could be saved and not be read would take the good ones before it along, by retention."""
    try:
        value = torch.arange(1, 17, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):  # quantized, opaque: no tensor of plain bytes
        return
    with CheckpointManager(tmp_path, mode="sync", keep_last=1) as states:
        states.save("good", {"x": torch.ones(3)})
        problem = states.save("new", {"x": value}).exception()
    with CheckpointManager(tmp_path) as states:
        (kept,) = states.list()
        assert states.verify(kept.checkpoint_id) == []
        found = states.load("latest")["x"]
    if problem is None:
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    else:
        assert isinstance(problem, UnsaveableValueError)
        assert torch.equal(found, torch.ones(3))


def test_everything_that_cannot_be_saved_is_named_at_once(states: Any) -> None:
    future = states.save("bad", {"a": {"f": print}, "b": [1, {2}], "c": 3})
    error = future.exception()
    assert isinstance(error, UnsaveableValueError)
    assert [fault.split(":")[0] for fault in error.faults] == ["a.f", "b.1"]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.sampled_from(Colour)
    | st.sampled_from(Level)
    | st.sampled_from(DTYPES)
    | st.floats(width=16).map(np.float16)
    | st.lists(st.integers(0, 65535), max_size=3).map(lambda numbers: np.array(numbers, np.uint16))
    | st.lists(st.floats(), max_size=3).map(lambda numbers: torch.tensor(numbers, dtype=torch.float64))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
        | st.lists(st.tuples(st.text() | st.integers(), inner), max_size=4).map(OrderedDict)
        | st.dictionaries(st.text() | st.integers(), st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@given(value=values)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nested_values_come_back_exactly(states: Any, value: Any) -> None:
    assert same(round_trip(states, value), value)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, shape, strides and offset over random bytes; complex ones also conjugate, and as negative views."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    base = torch.randint(0, 2 if dtype is torch.bool else 256, (8192,), dtype=torch.uint8).view(dtype)
    strides = [draw(st.integers(0, 6)) for _ in shape]
    made = base.as_strided(shape, strides, draw(st.integers(0, 20)))
    if dtype in (torch.complex64, torch.complex128):
        form = draw(st.sampled_from(["plain", "conjugate", "negative"]))
        made = made if form == "plain" else made.conj() if form == "conjugate" else made.conj().imag
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, on making such a tensor
@given(made=st.lists(tensors(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tensors_with_any_strides_come_back_exactly(states: Any, made: list[torch.Tensor]) -> None:
    assert same(round_trip(states, made), made)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_views_of_one_storage_are_views_of_one_storage_again(states: Any, data: st.DataObject) -> None:
    base = torch.arange(64.0)
    places = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(1, 8)), min_size=2))
    made = [base.as_strided((count,), (step,), start) for start, step, count in places]
    loaded = round_trip(states, made)
    assert same(loaded, made)
    for tensors in (made, loaded):  # a write through one view is seen through the same others
        with torch.no_grad():
            tensors[0].add_(100)
    assert same(loaded, made)


def test_an_enum_that_is_not_loaded_is_asked_for_before_anything_changes(tmp_path: Path) -> None:
    target = torch.zeros(2)
    with CheckpointManager(tmp_path, mode="sync") as states:
        states.save("a", {"t": torch.ones(2), "e": Colour.RED}).result()
        hidden = globals().pop("Colour")
        try:
            with pytest.raises(
                StateMismatchError, match=r"needs the enum .*Colour with a member RED; import its module"
            ):
                states.load("a", into={"t": target, "e": None})
        finally:
            globals()["Colour"] = hidden
    assert target.tolist() == [0, 0]
