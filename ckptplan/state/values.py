"""Python values as typed JSON, and back, without pickle.

`None`, `True`, whole numbers below 2**63, finite floats and text stand for themselves and a list is a JSON array;
everything else is an object with one key that names its type: `{"tuple": [...]}`, `{"tensor": 7}`. A tensor or array is
a number into the list of leaves; its bytes lie elsewhere. What has no exact form is refused by path and type.

Enum members and namedtuples are stored by the name of their class. Reading them looks that class up among the modules
that are loaded already: a checkpoint never imports anything and no code of the class runs.
"""

from __future__ import annotations

import base64
import enum
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptplan.state.manifest import DTYPE_BYTES
from ckptplan.state.objects import state_of
from ckptplan.state.resharder import DefaultResharder, Resharder, Sharded, is_dtensor
from ckptplan.state.tree import CONTAINERS, LEAF_TAGS, MAPPINGS, MAX_DEPTH, BadValueError, Json, pairs_of, tag_of

_SMALL_INT = 2**63
_TAG_OF_DICT: Mapping[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


Shard = tuple[int, tuple[int, ...]]
"""Number of a sharded tensor, and where a part of it begins."""


class Leaf(NamedTuple):
    """A tensor or array of the payload: the item it belongs to and its name within ("layers.0.weight").

    With `shard` it is a part of a sharded tensor.
    """

    item: str
    name: str
    value: torch.Tensor | np.ndarray[Any, Any]
    shard: Shard | None = None


class ShardedLeaf(NamedTuple):
    """A tensor of the payload that several ranks hold together; its place in the list is its number."""

    item: str
    name: str
    dtype: torch.dtype
    sharded: Sharded


@dataclass
class Encoder:
    """Turns the values of one item into typed JSON; collects the tensors and the faults met on the way.

    One list of leaves, of sharded tensors and of faults may serve the encoders of all items. Without a resharder a
    sharded tensor is a fault.
    """

    item: str
    leaves: list[Leaf] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    resharder: Resharder | None = None
    sharded: dict[Any, ShardedLeaf] = field(default_factory=dict)  # by what tells one tensor from another
    _open: set[int] = field(default_factory=set)

    def encode(self, value: Any, path: str) -> Json:
        """Typed JSON of `value`; a value that cannot be saved adds a fault that names `path` and gives None."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL_INT <= value < _SMALL_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, enum.Enum):
            return self._enum(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, path)
        if isinstance(value, (dict, list, tuple)):
            return self._container(value, path)
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, np.dtype):
            return self._numpy_dtype(value, path)
        if has_state(value):
            return self.encode(state_of(value), path)
        why = "has no exact form in a checkpoint; save a dict of plain values instead"
        if callable(getattr(type(value), "state_dict", None)):
            why = "has state_dict and no load_state_dict, which a load needs; add it, or save the dict that it gives"
        return self._refuse(path, value, why)

    def _refuse(self, path: str, value: Any, why: str) -> None:
        kind = type(value)
        self.faults.append(f"{path}: {kind.__module__}.{kind.__qualname__} {why}")

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES:  # no reader of the format would know it
            return self._refuse(path, value, f"of dtype {name} is not saved; save it as bytes: value.view(torch.uint8)")
        if self.resharder is not None and (is_dtensor(value) or type(self.resharder) is not DefaultResharder):
            try:
                found = self.resharder.describe(path, value)
            except ValueError as error:
                return self._refuse(path, value, str(error))
            if found is not None:
                return self._sharded(value, found, path)
        why = why_not_saveable(value)
        if why:
            return self._refuse(path, value, why)
        self.leaves.append(Leaf(self.item, path[len(self.item) + 1 :], value))
        return {"tensor": len(self.leaves) - 1}

    def _sharded(self, value: torch.Tensor, found: Sharded, path: str) -> Json:
        key = path if found.identity is None else found.identity, found.shape, value.dtype, found.holders, found.note
        leaf = ShardedLeaf(self.item, path[len(self.item) + 1 :], value.dtype, found)
        first = self.sharded.setdefault(key, leaf)
        number = len(self.sharded) - 1 if first is leaf else list(self.sharded).index(key)
        is_parameter = isinstance(value, torch.nn.Parameter)
        return sharded_node(number, value.dtype, found, is_parameter, value.requires_grad and value.is_leaf)

    def _enum(self, value: enum.Enum, path: str) -> Json:
        kind = type(value)
        if (
            kind._member_map_.get(value.name) is not value
            or _find_class(kind.__module__, kind.__qualname__) is not kind
        ):
            return self._refuse(path, value, "is not a named member of an enum that can be found by its name")
        return {"enum": [kind.__module__, kind.__qualname__, value.name]}

    def _numpy(self, value: Any, path: str) -> Json:
        if (
            value.dtype.hasobject
            or value.dtype.names is not None
            or value.dtype.itemsize == 0
            or value.dtype.kind == "V"
        ):
            return self._refuse(path, value, f"with dtype {value.dtype} is not saved; use a plain number or text dtype")
        if isinstance(value, np.generic):
            return {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
        if type(value) is not np.ndarray:
            return self._refuse(path, value, "is a subclass of ndarray; save numpy.asarray of it")
        self.leaves.append(Leaf(self.item, path[len(self.item) + 1 :], value))
        return {"array": len(self.leaves) - 1}

    def _numpy_dtype(self, value: np.dtype[Any], path: str) -> Json:
        if value.hasobject or value.names is not None or np.dtype(value.str) != value:
            return self._refuse(path, value, "is not a plain NumPy dtype")
        return {"numpy_dtype": value.str}

    def _container(self, value: Any, path: str) -> Json:
        if id(value) in self._open:
            return self._refuse(path, value, "contains itself")
        if len(self._open) >= MAX_DEPTH:
            return self._refuse(path, value, f"lies more than {MAX_DEPTH} containers deep")
        self._open.add(id(value))
        try:
            return self._dict(value, path) if isinstance(value, dict) else self._sequence(value, path)
        finally:
            self._open.discard(id(value))

    def _sequence(self, value: Any, path: str) -> Json:
        kind = type(value)
        is_namedtuple = isinstance(value, tuple) and hasattr(kind, "_fields")
        if kind not in (list, tuple, torch.Size) and not is_namedtuple:
            return self._refuse(path, value, "is a subclass of list or tuple; save a plain one")
        if is_namedtuple:
            if _find_class(kind.__module__, kind.__qualname__) is not kind:
                return self._refuse(path, value, "is a namedtuple that cannot be found by its name")
            values = [self.encode(part, f"{path}.{name}") for name, part in zip(kind._fields, value, strict=True)]
            return {"namedtuple": [kind.__module__, kind.__qualname__, list(kind._fields), values]}
        values = [self.encode(part, f"{path}.{index}") for index, part in enumerate(value)]
        if kind is list:
            return values
        return {"tuple": values} if kind is tuple else {"size": values}

    def _dict(self, value: Any, path: str) -> Json:
        kind = type(value)
        tag = _TAG_OF_DICT.get(kind)
        if tag is None:
            return self._refuse(path, value, "is a subclass of dict; save a plain one")
        if tag == "dict" and all(type(key) is str for key in value):
            return {"dict": {key: self.encode(part, f"{path}.{key}") for key, part in value.items()}}
        pairs = []
        for key, part in value.items():
            if type(key) is not str and type(key) is not int:
                self._refuse(f"{path}[{key!r}]", key, "is not a key that can be saved (text or whole number)")
                continue
            pairs.append((key, self.encode(part, f"{path}.{key}")))
        return {"items" if tag == "dict" else tag: [[self.encode(key, path), part] for key, part in pairs]}


def has_state(value: Any) -> bool:
    """Whether `value` is an object that gives and takes its state: `state_dict` and `load_state_dict`."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def sharded_node(number: int, dtype: torch.dtype, found: Sharded, is_parameter: bool, requires_grad: bool) -> Json:
    """The leaf of a tree that stands for a sharded tensor."""
    content = {"number": number, "dtype": str(dtype).removeprefix("torch."), "shape": list(found.shape)}
    content |= {"mesh": list(found.note[0]), "placements": list(found.note[1])}
    if is_parameter or requires_grad:
        content |= {"parameter": is_parameter, "requires_grad": requires_grad}
    return {"sharded": content}


def why_not_saveable(value: torch.Tensor) -> str | None:
    """The reason why this tensor cannot be stored exactly, or None."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        if is_dtensor(value):
            return 'is a DTensor in an item of scope="per_rank"; put it into an item of scope="global"'
        return "is a tensor subclass that is not saved; save the plain tensors that it is made of"
    if value.layout is not torch.strided:
        return f"with layout {value.layout} is not saved; save its indices and values, or to_dense()"
    if value.is_quantized:
        return "is quantized; save int_repr(), scale and zero point instead"
    if value.is_nested:
        return "is nested; save its parts instead"
    if value.is_meta:
        return "is on the meta device and has no values"
    return None


def _find_class(module: str, qualname: str) -> type | None:
    """The class of that name in a module that is loaded already, found without running any code of it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        if found is None:
            return None
        found = vars(found).get(name) if isinstance(found, (type, type(sys))) else None
    return found if isinstance(found, type) else None


Fetch = Callable[[str, str, Any], Any]
"""(path, "tensor", "array" or "sharded", what the node says: a leaf number, or the sharded tensor) -> the value."""


def decode(node: Json, path: str, fetch: Fetch, depth: int = 0) -> Any:
    """The value that `node` stands for; tensors and arrays come from `fetch`. Raises BadValueError."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if depth > MAX_DEPTH + 1:
        raise BadValueError(f"{path}: more than {MAX_DEPTH} containers deep")
    if isinstance(node, list):
        return [decode(part, f"{path}.{index}", fetch, depth + 1) for index, part in enumerate(node)]
    tag, content = tag_of(node, path)
    if tag in LEAF_TAGS:
        return fetch(path, tag, content)
    if tag in CONTAINERS:
        return _decode_container(tag, content, path, fetch, depth)
    try:
        return _DECODE_LEAF[tag](content)
    except BadValueError as error:
        raise BadValueError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, struct.error, AttributeError, RuntimeError) as error:
        raise BadValueError(f"{path}: not a {tag}: {content!r:.80} ({error})") from None


def _decode_container(tag: str, content: Any, path: str, fetch: Fetch, depth: int) -> Any:
    if tag in MAPPINGS:
        parts = {key: decode(part, f"{path}.{key}", fetch, depth + 1) for key, part in pairs_of(tag, content, path)}
        return {"ordered": OrderedDict, "counter": Counter}.get(tag, dict)(parts)
    nodes = content[3] if tag == "namedtuple" else content
    values = [decode(part, f"{path}.{index}", fetch, depth + 1) for index, part in enumerate(nodes)]
    return build_sequence(tag, content, values, path)


def build_sequence(tag: str, content: Any, values: list[Any], path: str) -> Any:
    """The tuple, Size or namedtuple of these values."""
    if tag == "tuple":
        return tuple(values)
    if tag == "size":
        if not all(type(value) is int for value in values):
            raise BadValueError(f"{path}: a Size holds whole numbers only")
        return torch.Size(values)
    module, name, fields, _ = content
    kind = _find_class(module, name)
    if kind is None or not issubclass(kind, tuple) or list(getattr(kind, "_fields", ())) != fields:
        raise BadValueError(
            f"{path}: needs the namedtuple {module}.{name} with the fields {', '.join(fields)}; "
            "import its module before loading"
        )
    return tuple.__new__(kind, values)


def _decode_enum(content: Any) -> enum.Enum:
    module, name, member = content
    kind = _find_class(module, name)
    if kind is None or not issubclass(kind, enum.Enum) or member not in kind._member_map_:
        raise BadValueError(f"needs the enum {module}.{name} with a member {member}; import its module before loading")
    return kind._member_map_[member]


def _decode_numpy(content: Any) -> np.generic:
    dtype, raw = numpy_dtype(content[0]), base64.b64decode(content[1], validate=True)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes instead of {dtype.itemsize}")
    return np.frombuffer(raw, dtype)[0]


def numpy_dtype(text: Any) -> np.dtype[Any]:
    """The plain NumPy dtype of that name; refuses objects and records."""
    if not isinstance(text, str) or len(text) > 32:
        raise ValueError(f"{text!r:.40} is not a NumPy dtype")
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0 or dtype.kind == "V":
        raise ValueError(f"{text!r} is not a plain NumPy dtype")
    return dtype


def torch_dtype(text: Any) -> torch.dtype:
    """The torch dtype of that name."""
    dtype = vars(torch).get(text) if isinstance(text, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r:.40} is not a torch dtype")
    return dtype


_DECODE_LEAF: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "enum": _decode_enum,
    "dtype": torch_dtype,
    "numpy_dtype": numpy_dtype,
    "device": lambda content: torch.device(content),
    "numpy": _decode_numpy,
}
