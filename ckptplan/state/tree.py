"""The grammar of typed JSON: what the nodes of an item's tree look like. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 100  # of nested containers; deeper is refused, so that no reader runs out of stack

Json = Any
"""A value of the JSON grammar: None, bool, int, float, str, list or dict with text keys."""


class BadValueError(ValueError):
    """A node of the tree is not typed JSON of this format; the message starts with its path."""


_LEAVES = ("int", "float", "bytes", "enum", "dtype", "numpy_dtype", "device", "numpy")
CONTAINERS = ("dict", "items", "ordered", "counter", "tuple", "size", "namedtuple")
LEAF_TAGS = ("tensor", "array", "sharded")  # what has bytes in the files
MAPPINGS = ("dict", "items", "ordered", "counter")


def tag_of(node: Json, path: str) -> tuple[str, Any]:
    """Type name and content of a JSON object; checks the form of both. Raises BadValueError."""
    if not isinstance(node, dict) or len(node) != 1:
        raise BadValueError(f"{path}: expected a value, found {node!r:.80}")
    tag, content = next(iter(node.items()))
    expected: Any
    if tag in ("tensor", "array"):
        expected, form = type(content) is int and content >= 0, "a leaf number"
    elif tag == "sharded":
        expected, form = _is_sharded(content), "number, dtype, shape, mesh and placements"
    elif tag == "dict":
        expected, form = isinstance(content, dict), "an object"
    elif tag in ("items", "ordered", "counter"):
        expected = isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
        form = "a list of pairs"
    elif tag in ("tuple", "size"):
        expected, form = isinstance(content, list), "a list"
    elif tag == "namedtuple":
        expected = isinstance(content, list) and len(content) == 4 and isinstance(content[2], list)
        expected = expected and isinstance(content[3], list) and len(content[2]) == len(content[3])
        expected = expected and all(isinstance(part, str) for part in (*content[:2], *content[2]))
        form = "module, class, fields and values"
    elif tag in _LEAVES:
        expected, form = True, ""
    else:
        raise BadValueError(f"{path}: unknown type {tag!r:.40}")
    if not expected:
        raise BadValueError(f"{path}: {tag} needs {form}, found {content!r:.80}")
    return tag, content


def _is_sharded(content: Any) -> bool:
    if not isinstance(content, dict) or not {"number", "dtype", "shape", "mesh", "placements"} <= set(content):
        return False
    counts = [content["number"], *content["shape"], *content["mesh"]]
    return (
        all(isinstance(content[key], list) and len(content[key]) <= 64 for key in ("shape", "mesh", "placements"))
        and all(type(count) is int and 0 <= count < 2**62 for count in counts)
        and all(isinstance(text, str) for text in (content["dtype"], *content["placements"]))
        and all(isinstance(content.get(key, False), bool) for key in ("parameter", "requires_grad"))
    )


def pairs_of(tag: str, content: Any, path: str) -> list[tuple[int | str, Json]]:
    """Keys and nodes of a mapping, keys decoded; a key that occurs twice is refused."""
    if tag == "dict":
        return list(content.items())
    pairs = [(_key(key, path), node) for key, node in content]
    if len({key for key, _ in pairs}) != len(pairs):
        raise BadValueError(f"{path}: a key occurs twice")
    return pairs


def _key(node: Json, path: str) -> int | str:
    if isinstance(node, dict) and len(node) == 1 and isinstance(node.get("int"), str):
        try:
            return int(node["int"], 16)
        except ValueError:
            pass
    elif type(node) is str or type(node) is int:
        return node
    raise BadValueError(f"{path}: {node!r:.40} is not a key")


def leaves_of(node: Json, path: str, depth: int = 0) -> Iterator[tuple[str, Json]]:
    """Path and node of everything that is no container; an empty container counts. Raises BadValueError."""
    if depth > MAX_DEPTH + 1:
        raise BadValueError(f"{path}: more than {MAX_DEPTH} containers deep")
    if isinstance(node, list):
        children: list[tuple[Any, Json]] = list(enumerate(node))
    elif isinstance(node, dict):
        tag, content = tag_of(node, path)
        if tag not in CONTAINERS:
            yield path, node
            return
        if tag in MAPPINGS:
            children = list(pairs_of(tag, content, path))
        else:
            children = list(enumerate(content[3] if tag == "namedtuple" else content))
    else:
        children = []
    if not children:
        yield path, node
    for key, child in children:
        yield from leaves_of(child, f"{path}.{key}" if path else str(key), depth + 1)
