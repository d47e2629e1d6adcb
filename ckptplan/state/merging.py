"""Compares a stored tree with a template: what does not fit, which tensors are wanted, and how to finish.

Nothing is changed before `finish` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckptplan.state.manifest import View
from ckptplan.state.named import OptimizerByName
from ckptplan.state.objects import (
    fills_in_place,
    load_optimizer,
    own_names,
    state_of,
    unwrap,
)
from ckptplan.state.resharder import Piece, Resharder, empty_like, is_dtensor
from ckptplan.state.stored import ShardedTensors, StoredTensor
from ckptplan.state.tree import CONTAINERS, LEAF_TAGS, MAPPINGS, BadValueError, Json, pairs_of, tag_of
from ckptplan.state.values import build_sequence, decode, has_state, torch_dtype

Finish = Callable[[], Any]
"""Writes into the template, when every byte is known to be right, and returns the value."""


@dataclass
class Request:
    """A tensor or array that is wanted: into `target`, or new (None). `value` is there when it has been read."""

    path: str
    stored: View | StoredTensor
    is_array: bool = False
    target: Any = None
    value: Any = None
    pieces: Sequence[Piece] | None = None  # what this rank holds of a sharded target
    is_parameter: bool = False
    requires_grad: bool = False

    @property
    def view(self) -> View:
        """Of a tensor that is stored as a whole."""
        assert isinstance(self.stored, View)
        return self.stored


@dataclass
class Merged:
    """What came of one item: faults, or what to read and how to finish."""

    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    finish: Finish = field(default=lambda: None)


def merge(
    tree: Json,
    template: Any,
    name: str,
    tensors: Sequence[View],
    *,
    strict: bool,
    resharder: Resharder,
    sharded: ShardedTensors,
) -> Merged:
    """Compares item `name` with its template. `tensors`: the views that the leaf numbers of the tree mean."""
    merged = Merged()
    merger = _Merger(tensors, strict, resharder, sharded, merged)
    try:
        merged.finish = merger.merge(tree, template, name)
    except BadValueError as error:
        merged.faults.append(str(error))
    return merged


class _Merger:
    def __init__(
        self, tensors: Sequence[View], strict: bool, resharder: Resharder, sharded: ShardedTensors, merged: Merged
    ) -> None:
        self._tensors, self._strict, self._merged = tensors, strict, merged
        self._resharder, self._sharded = resharder, sharded

    def merge(self, node: Json, template: Any, path: str) -> Finish:
        if template is None:
            return self._everything(node, path)
        if isinstance(template, torch.Tensor):
            return self._tensor(node, template, path)
        if isinstance(template, np.ndarray):
            return self._array(node, template, path)
        if isinstance(template, torch.nn.Module):
            return self._module(node, template, path)
        if isinstance(template, (torch.optim.Optimizer, OptimizerByName)):
            return self._optimizer(node, template, path)
        if has_state(template):
            return self._object(node, template, path)
        if isinstance(template, dict):
            return self._dict(node, template, path)
        if isinstance(template, list):
            return self._list(node, template, path)
        if isinstance(template, tuple):
            return self._tuple(node, template, path)
        return self._leaf(node, template, path)

    def _fault(self, path: str, why: str) -> Finish:
        self._merged.faults.append(f"{path}: {why}")
        return lambda: None

    def _request(
        self, path: str, tag: str, content: Any, target: Any = None, pieces: Sequence[Piece] | None = None
    ) -> Request:
        if tag == "sharded":
            flags = content.get("parameter", False), content.get("requires_grad", False)
            request = Request(path, self._sharded.of(content, path), False, target, None, pieces, *flags)
        elif content >= len(self._tensors):
            raise BadValueError(f"{path}: there is no leaf {content}")
        else:
            view = self._tensors[content]
            is_array = tag == "array"
            if is_array != (view.dtype[0] in "<>|="):
                raise BadValueError(f"{path}: leaf {content} is not a {tag}")
            request = Request(path, view, is_array, target, None, pieces, view.is_parameter, view.requires_grad)
        self._merged.requests.append(request)
        return request

    def _everything(self, node: Json, path: str) -> Finish:
        requests: dict[str, Request] = {}

        def note(path: str, tag: str, content: Any) -> None:
            requests[path] = self._request(path, tag, content)

        decode(node, path, note)  # finds what cannot be decoded now, while nothing has been changed
        return lambda: decode(node, path, lambda path, tag, content: requests[path].value)

    def _tensor(self, node: Json, template: torch.Tensor, path: str) -> Finish:
        tag, content = self._tag(node, path)
        if tag not in ("tensor", "sharded"):
            return self._fault(path, f"expected a tensor {describe(template)}, stored is {self._describe(node, path)}")
        try:
            found = self._resharder.describe(path, template)
        except ValueError as error:
            return self._fault(path, f"the template {error}")
        dtype = str(template.dtype).removeprefix("torch.")
        shape = tuple(template.shape) if found is None else found.shape
        stored = self._shape_of(tag, content)
        if stored is not None and stored != (dtype, shape):
            told, have = f"{dtype} {list(shape)}", self._describe(node, path)
            return self._fault(path, f"expected {told}, stored is {have}; nothing is cast or reshaped")
        for part in [template] if found is None else [piece.tensor for piece in found.pieces]:
            if any(size > 1 and step == 0 for size, step in zip(part.shape, part.stride(), strict=True)):
                why = "the template is an expanded tensor: several elements share one place in memory"
                return self._fault(path, why)
        pieces = None if found is None else [Piece(offsets, part.detach()) for offsets, part in found.pieces]
        self._request(path, tag, content, template.detach(), pieces)
        return lambda: template

    def _shape_of(self, tag: str, content: Any) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a leaf; None where there is no such leaf."""
        if tag == "sharded":
            return content["dtype"], tuple(content["shape"])
        view = self._tensors[content] if content < len(self._tensors) else None
        return None if view is None else (view.dtype, view.shape)

    def _array(self, node: Json, template: np.ndarray[Any, Any], path: str) -> Finish:
        tag, content = self._tag(node, path)
        view = self._tensors[content] if tag == "array" and content < len(self._tensors) else None
        if view is None or view.dtype != template.dtype.str or view.shape != template.shape:
            return self._fault(path, f"expected {describe(template)}, stored is {self._describe(node, path)}")
        if not template.flags.writeable:
            return self._fault(path, "the template is a read-only array")
        self._request(path, tag, content, template)
        return lambda: template

    def _dict(self, node: Json, template: dict[Any, Any], path: str) -> Finish:
        pairs = self._pairs(node, path)
        if pairs is None:
            return self._fault(path, f"expected a dict, stored is {self._describe(node, path)}")
        self._compare_keys(pairs, template, path)
        is_fresh_optimizer = set(template) == {"state", "param_groups"} and not template["state"]
        parts = {}
        for key, part in pairs.items():
            if key in template:
                inner = None if is_fresh_optimizer and key == "state" else template[key]
                parts[key] = self.merge(part, inner, f"{path}.{key}")

        def finish() -> Any:
            for key, part in parts.items():
                template[key] = part()
            return template

        return finish

    def _compare_keys(self, pairs: dict[int | str, Json], template: Any, path: str) -> None:
        if not self._strict:
            return
        for key in template:
            if key not in pairs:
                self._fault(f"{path}.{key}", "missing in the checkpoint")
        for key in pairs:
            if key not in template:
                self._fault(f"{path}.{key}", "unexpected: in the checkpoint, not in the template")

    def _list(self, node: Json, template: list[Any], path: str) -> Finish:
        if not isinstance(node, list):
            return self._fault(path, f"expected a list, stored is {self._describe(node, path)}")
        if self._strict and len(node) != len(template):
            return self._fault(path, f"expected a list of {len(template)}, stored is one of {len(node)}")
        shared = zip(node, template, strict=False)
        parts = [self.merge(part, inner, f"{path}.{index}") for index, (part, inner) in enumerate(shared)]

        def finish() -> Any:
            for index, part in enumerate(parts):
                template[index] = part()
            return template

        return finish

    def _tuple(self, node: Json, template: tuple[Any, ...], path: str) -> Finish:
        tag, content = self._tag(node, path)
        kind = "namedtuple" if hasattr(template, "_fields") else "size" if isinstance(template, torch.Size) else "tuple"
        if tag != kind:
            return self._fault(path, f"expected a {kind}, stored is {self._describe(node, path)}")
        nodes = content[3] if tag == "namedtuple" else content
        if len(nodes) != len(template) or (
            tag == "namedtuple" and content[2] != list(getattr(template, "_fields", ()))
        ):
            return self._fault(path, f"expected {kind} of {len(template)}, stored is one of {len(nodes)}")
        parts = [
            self.merge(part, inner, f"{path}.{index}")
            for index, (part, inner) in enumerate(zip(nodes, template, strict=True))
        ]
        if tag == "namedtuple":
            return lambda: tuple.__new__(type(template), [part() for part in parts])
        return lambda: build_sequence(tag, content, [part() for part in parts], path)

    def _leaf(self, node: Json, template: Any, path: str) -> Finish:
        if isinstance(node, list) or (isinstance(node, dict) and tag_of(node, path)[0] in (*CONTAINERS, *LEAF_TAGS)):
            return self._fault(path, f"expected {describe(template)}, stored is {self._describe(node, path)}")
        value = decode(node, path, _no_tensor)
        numbers = (int, float)
        fits = value is None or type(value) is type(template) or (type(value) in numbers and type(template) in numbers)
        if not fits:
            return self._fault(path, f"expected {describe(template)}, stored is {describe(value)}")
        return lambda: value

    def _module(self, node: Json, template: torch.nn.Module, path: str) -> Finish:
        module = unwrap(template)
        state = state_of(module)
        if fills_in_place(module, state):
            finish = self._dict(node, dict(state), path)

            def fill() -> Any:
                finish()
                return template

            return fill
        # Tensors are filled in place all the same; extra state is the module's own affair.
        finish = self._dict(node, {name: v if isinstance(v, torch.Tensor) else None for name, v in state.items()}, path)
        names, strict = own_names(module), self._strict

        def load() -> Any:
            loaded = finish()
            own = module.state_dict()  # carries the versions of the module's parts
            own.update({names.get(name, name): value for name, value in loaded.items()})
            module.load_state_dict(own, strict=strict)
            return template

        return load

    def _optimizer(self, node: Json, template: torch.optim.Optimizer | OptimizerByName, path: str) -> Finish:
        pairs = self._pairs(node, path)
        if pairs is None or set(pairs) != {"state", "param_groups"}:
            return self._fault(path, f"expected an optimizer's state, stored is {self._describe(node, path)}")
        live = template.state_dict()
        self._compare_groups(pairs["param_groups"], live["param_groups"], f"{path}.param_groups")
        stored_state = self._pairs(pairs["state"], f"{path}.state") or {}
        own = template.optimizer if isinstance(template, OptimizerByName) else template
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        keys = [key for group in live["param_groups"] for key in group["params"]]
        parameter_of = dict(zip(keys, parameters, strict=True))
        state: dict[int | str, Finish] = {}
        for key, part in stored_state.items():
            # What is live already is filled in place; what is not there yet is made.
            state[key] = self._entry(part, live["state"].get(key), f"{path}.state.{key}", parameter_of.get(key))
        groups = self._everything(pairs["param_groups"], f"{path}.param_groups")

        def load() -> Any:
            loaded = {"state": {key: part() for key, part in state.items()}, "param_groups": groups()}
            if isinstance(template, OptimizerByName):
                template.load_state_dict(loaded)
            else:
                load_optimizer(template, loaded)
            return template

        return load

    def _entry(self, node: Json, live: Any, path: str, parameter: torch.Tensor | None) -> Finish:
        """State of one parameter: each tensor into the live one of that name, everything else as stored.

        What is not there yet and belongs to a sharded parameter is made to lie as that does.
        """
        pairs = self._pairs(node, path)
        if pairs is None:
            return self._everything(node, path)
        parts = {}
        for key, part in pairs.items():
            inner = live.get(key) if isinstance(live, dict) else None
            if not isinstance(inner, torch.Tensor):
                inner = self._made_like(part, parameter, f"{path}.{key}")
            parts[key] = self.merge(part, inner, f"{path}.{key}")
        return lambda: {key: part() for key, part in parts.items()}

    def _made_like(self, node: Json, parameter: torch.Tensor | None, path: str) -> torch.Tensor | None:
        tag, content = self._tag(node, path)
        if parameter is None or not is_dtensor(parameter) or tag not in ("tensor", "sharded"):
            return None
        stored = self._shape_of(tag, content)
        if stored is None or (tag == "tensor" and stored[1] != tuple(parameter.shape)):
            return None  # such as a count of steps
        note = tuple(content["placements"]) if tag == "sharded" else ()
        return empty_like(parameter, stored[1], torch_dtype(stored[0]), note)

    def _compare_groups(self, node: Json, live: list[dict[str, Any]], path: str) -> None:
        stored = [self._pairs(part, path) for part in node] if isinstance(node, list) else []
        if len(stored) != len(live):
            self._fault(path, f"expected {len(live)} parameter groups, stored are {len(stored)}")
            return
        for index, (group, own) in enumerate(zip(stored, live, strict=True)):
            params = (group or {}).get("params")
            self._compare_params(params if isinstance(params, list) else [], own["params"], f"{path}.{index}")
            # A scheduler adds keys to the groups, so only what this optimizer needs must be there.
            missing = [key for key in own if key not in (group or {}) and key != "initial_lr"]
            if missing and self._strict:
                self._fault(
                    f"{path}.{index}", f"missing in the checkpoint: {', '.join(missing)}; is it another optimizer?"
                )

    def _compare_params(self, stored: list[Any], own: list[int | str], path: str) -> None:
        if any(isinstance(key, str) for key in (*stored, *own)):
            for key in own:
                if key not in stored:
                    self._fault(f"{path}.params", f"{key!r} is missing in the checkpoint")
            for key in stored:
                if key not in own:
                    self._fault(f"{path}.params", f"{key!r} is unexpected: in the checkpoint, not in the template")
        elif len(stored) != len(own):
            self._fault(path, f"expected {len(own)} parameters, stored are {len(stored)}")

    def _object(self, node: Json, template: Any, path: str) -> Finish:
        """An object knows its own state; only the names at the top are compared, where it has some already."""
        live, pairs = template.state_dict(), self._pairs(node, path)
        if isinstance(live, dict) and live and pairs is not None:
            self._compare_keys(pairs, live, path)
        elif isinstance(live, dict) and pairs is None:
            return self._fault(
                path, f"expected the state of {type(template).__name__}, stored is {self._describe(node, path)}"
            )
        finish = self._everything(node, path)

        def load() -> Any:
            template.load_state_dict(finish())
            return template

        return load

    def _tag(self, node: Json, path: str) -> tuple[str, Any]:
        return tag_of(node, path) if isinstance(node, dict) else ("", None)

    def _pairs(self, node: Json, path: str) -> dict[int | str, Json] | None:
        if not isinstance(node, dict):
            return None
        tag, content = tag_of(node, path)
        return dict(pairs_of(tag, content, path)) if tag in MAPPINGS else None

    def _describe(self, node: Json, path: str) -> str:
        if isinstance(node, list):
            return f"a list of {len(node)}"
        if not isinstance(node, dict):
            return describe(node)
        tag, content = tag_of(node, path)
        stored = self._shape_of(tag, content) if tag in LEAF_TAGS else None
        return f"a {tag}" if stored is None else f"{stored[0]} {list(stored[1])}"


def _no_tensor(path: str, tag: str, content: Any) -> Any:
    raise BadValueError(f"{path}: unexpected {tag}")


def describe(value: Any) -> str:
    """A value in a message: dtype and shape of a tensor, else its type and text."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
