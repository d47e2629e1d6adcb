"""Replay: a block runs once, keeps what it is told to, and backward rebuilds the rest operator by operator.

While the block runs, a dispatch mode records every operator that computes something, and saved-tensor hooks
put a note in the place of every tensor that autograd wants to save. What a storage holds between two writes is one
``Contents`` (static single assignment over storages); a tensor is contents and a geometry, so views
need no record, and an operator that works in place makes new contents of the same storage. When backward asks
for a saved tensor, the operators between it and the nearest contents at hand run in their old order.

Nothing counts lifetimes: contents point to the operator that made them, an operator to the contents that it
reads and weakly to those that it makes. So what nobody can ask for is freed at once, a kept tensor that no
saved tensor needs included, and each operator runs again at most once. The Python code of the block never
runs a second time: hooks, counters, buffers and random draws are right by themselves.

One thing escapes: memory that is written where the dispatcher does not see it (NumPy, raw pointers). ``operators.py``
finds that. This file and ``memory.py`` are the only ones that use underscore names of torch; a
test pins each. Study: docs/design.md, section 5.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.graph import Output
from ckptplan.recompute import no_cast_cache
from ckptplan.trees import tensors_in

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # a subclass may be anything; it is kept as it is
_replaying = threading.RLock()  # backward may run in several threads; an operator is replayed by one of them


def run_replayed(call: Callable[..., Any], keep: Iterable[Output], /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``; of what autograd saves, only ``keep`` (and what came from outside) stays alive.

    Backward rebuilds the rest. ``retain_graph`` and second-order gradients work. An output in ``keep`` that
    this call does not produce, or that backward does not need, costs nothing. Without gradients this is a plain call.

    Raises (in backward):
        RuntimeError: a kept tensor, an input or a weight was changed in place after the call.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return run_recorded(Recorder(keep), call, args, kwargs)


def run_recorded(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``call(*args, **kwargs)`` under a recorder made for this call."""
    try:
        with (
            no_cast_cache({t.device.type for t in tensors_in((args, kwargs))}),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
            recorder,
        ):
            return call(*args, **kwargs)
    finally:
        recorder.finish()


# What is recorded ----------------------------------------------------------------------------------------------------


class Contents:
    """What one storage holds from one write to the next."""

    __slots__ = ("__weakref__", "is_outside", "is_shared", "is_undefined", "operation", "storage", "tensor", "version")

    def __init__(self, storage: weakref.ref[torch.UntypedStorage] | None, operation: Operation | None) -> None:
        self.storage = storage
        self.operation = operation  # how to make it; None: it is at hand
        self.tensor: torch.Tensor | None = None  # at hand: kept, from outside, or rebuilt
        self.version: int | None = None  # of ``tensor``, where someone else may write to it
        self.is_outside = False  # no operator seen made it: a parameter, an input, a constant
        self.is_undefined = False  # memory that no operator has filled yet
        self.is_shared = False  # handed to autograd: nothing may be computed into its memory

    def at_hand(self) -> torch.Tensor | None:
        tensor = self.tensor
        if tensor is not None and self.version is not None and tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after the block "
                f"ran: it is at version {tensor._version}; expected version {self.version}. Clone it first, or update "
                "weights after backward"
            )
        return tensor


class View:
    """A tensor: contents, and where in them it lies."""

    __slots__ = ("contents", "dtype", "offset", "size", "stride")

    def __init__(self, contents: Contents, tensor: torch.Tensor) -> None:
        self.contents = contents
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype

    def on(self, base: torch.Tensor) -> torch.Tensor:
        if base.requires_grad:
            base = base.detach()
        if base.dtype is not self.dtype:
            empty = torch.empty(0, dtype=self.dtype, device=base.device)
            return empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if base.shape == self.size and base.stride() == self.stride and base.storage_offset() == self.offset:
            return base
        return torch.as_strided(base, self.size, self.stride, self.offset)


class Operation:
    """One operator call; once it has been replayed it holds nothing."""

    __slots__ = ("args", "function", "index", "kwargs", "makes", "nth", "operator", "random", "reads", "writes")

    def __init__(self, index: int, function: Callable[..., Any], operator: str, nth: int) -> None:
        self.index = index
        self.function = function
        self.operator = operator
        self.nth = nth
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.reads: list[View] = []  # every view among the arguments
        self.random: _RandomState | None = None
        self.makes: list[tuple[int, weakref.ref[Contents]]] = []  # flat position among the results, contents
        self.writes: list[tuple[Contents, weakref.ref[Contents]]] = []  # contents before and after


class _RandomState(NamedTuple):
    """Where a stream of random numbers stood before an operator drew from it."""

    generator: torch.Generator | None  # None: the device's default stream
    device: torch.device
    state: torch.Tensor

    @classmethod
    def now(cls, generator: torch.Generator | None, device: torch.device) -> _RandomState:
        if generator is not None:
            return cls(generator, device, generator.get_state())
        if device.type == "cuda":
            return cls(None, device, torch.cuda.get_rng_state(device))
        return cls(None, device, torch.get_rng_state())

    def is_now(self) -> bool:
        return self.state.numpy().tobytes() == self.now(self.generator, self.device).state.numpy().tobytes()

    def set(self) -> None:
        if self.generator is not None:
            self.generator.set_state(self.state)
        elif self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)


class About(NamedTuple):
    """What an operator does, from its schema."""

    name: str
    is_view: bool  # only looks at its inputs in another way
    written: tuple[int, ...]  # positions of the arguments that it writes to
    written_names: tuple[str, ...]
    training_flag: int | None  # position of the flag without which it does not write
    is_random: bool
    is_undefined: bool  # gives memory without defined contents
    overwrites: bool  # fills all of its first argument, whatever was there


# Writes to running statistics that the schemas do not declare: positions of the arguments, of the training flag.
_UNDECLARED_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "batch_norm_gather_stats": ((3, 4), None),
    "batch_norm_gather_stats_with_counts": ((3, 4), None),
    "batch_norm_update_stats": ((1, 2), None),
}
_UNDEFINED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
_OVERWRITING = frozenset("copy_ fill_ zero_ bernoulli_ uniform_ normal_ exponential_ random_".split())

_about_operators: dict[Any, About] = {}


def about_operator(function: Any) -> About:
    found = _about_operators.get(function)
    if found is None:
        found = _about_operators[function] = _read_schema(function)
    return found


def _read_schema(function: Any) -> About:
    schema = function._schema
    namespace, _, bare = schema.name.partition("::")
    name = bare if namespace == "aten" else schema.name
    declared = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    undeclared, flag = _UNDECLARED_WRITES.get(name, ((), None))
    written = (*declared, *undeclared)
    return About(
        name=name,
        is_view=not written and any(r.alias_info is not None for r in schema.returns),
        written=written,
        written_names=tuple(schema.arguments[i].name for i in written),
        training_flag=flag,
        is_random=torch.Tag.nondeterministic_seeded in function.tags,
        is_undefined=name in _UNDEFINED and not written,
        overwrites=name in _OVERWRITING,
    )


def flat(value: Any) -> list[Any]:
    """The results of an operator, or one argument, as a list; lists inside are spread."""
    if not isinstance(value, (tuple, list)):
        return [value]
    found: list[Any] = []
    for item in value:
        if isinstance(item, (tuple, list)):
            found.extend(flat(item))
        else:
            found.append(item)
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


class Recorder(TorchDispatchMode):
    """Records the operators of one call of a block.

    ``note`` is called after each of them (tracing adds to it); ``kept`` are the outputs that were kept.
    """

    def __init__(self, keep: Iterable[Output]) -> None:
        super().__init__()
        self.kept: set[Output] = set()
        self._keep: dict[tuple[str, int], set[int]] = {}
        for output in keep:
            self._keep.setdefault((output.operator, output.nth), set()).add(output.position)
        self._table: dict[int, Contents] = {}  # by identity of the storage: what it holds now
        self._calls: dict[str, int] = {}
        self._count = 0
        self.is_paused = False
        self._is_foreign = False
        self._unfilled: list[tuple[View, torch.Tensor]] = []  # saved tensors that no operator has filled yet

    # Hooks of autograd

    def pack(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            return tensor.detach()
        contents = self.current(tensor)
        view = View(contents, tensor)
        if contents.is_undefined:  # saved first and filled later, as the noise of rrelu is
            self._unfilled.append((view, tensor))
        return view

    def unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, View):
            return saved
        with _replaying, self.paused():  # paused: a backward may run inside the block's forward
            base = _rebuilt(saved.contents)
            saved.contents.is_shared = True
            return saved.on(base)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not recorded."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def finish(self) -> None:
        """From here on, only what a saved tensor can reach is alive."""
        for view, tensor in self._unfilled:  # filled unseen
            if view.contents.tensor is None:
                _take(view.contents, tensor)
        self._unfilled.clear()
        for contents in self._table.values():
            if contents.tensor is not None:
                # Only now: below autograd an alias has a counter of its own, and a write in place counts up
                # only after its operator has returned.
                contents.tensor = contents.tensor.detach()
                contents.version = None if contents.tensor.is_inference() else contents.tensor._version
                contents.operation = None
        self._table.clear()

    # Contents

    def current(self, tensor: torch.Tensor) -> Contents:
        """What the tensor's storage holds now; a storage that no operator seen has made is from outside."""
        storage = tensor.untyped_storage()
        contents = self._table.get(id(storage))
        if contents is None or contents.storage() is not storage:  # type: ignore[misc]
            contents = self._table[id(storage)] = Contents(weakref.ref(storage), None)
            contents.is_outside = True
            contents.tensor = tensor
        return contents

    def _defined(self, tensor: torch.Tensor) -> Contents:
        contents = self.current(tensor)
        if contents.is_undefined:  # somebody reads memory that no operator filled: keep what is there
            _take(contents, tensor)
        return contents

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about = _about_operators.get(func) or about_operator(func)
        if about.is_view or self.is_paused:
            return func(*args, **kwargs)
        nth = self._calls.get(about.name, 0)
        self._calls[about.name] = nth + 1
        operation = Operation(self._count, func, about.name, nth)
        self._count += 1
        written = _written(about, args, kwargs) if about.written else []
        self._is_foreign = False
        self._describe(operation, about, args, kwargs, written)
        is_foreign = self._is_foreign
        if about.is_random:
            out = self._run_random(operation, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self.note(None if is_foreign else operation, about, nth, out, written)
        return out

    def _describe(
        self,
        operation: Operation,
        about: About,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
    ) -> None:
        """Arguments as views; contents that are about to be overwritten are made independent of their memory."""
        if about.is_undefined:
            return  # see note
        reads = operation.reads
        operation.args = tuple([self._described(a, reads, written) for a in args])
        if kwargs:
            operation.kwargs = {name: self._described(a, reads, written) for name, a in kwargs.items()}
        for tensor in written:
            contents = self.current(tensor)
            if contents.tensor is None:
                continue
            if contents.operation is None:
                contents.tensor = _copy_of_all(contents.tensor)
            else:
                contents.tensor = None

    def _described(self, value: Any, reads: list[View], written: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                self._is_foreign = True
                return value
            is_target = written and any(value is target for target in written)
            view = View(self.current(value) if is_target else self._defined(value), value)
            reads.append(view)
            return view
        if type(value) in (list, tuple):
            return type(value)([self._described(item, reads, written) for item in value])
        return value

    def _run_random(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]
        if any(type(t) is FakeTensor for t in tensors):
            return operation.function(*args, **kwargs)  # fake tensors draw nothing
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        state = _RandomState.now(kwargs.get("generator"), device)
        out = operation.function(*args, **kwargs)
        if not state.is_now():
            operation.random = state
        return out

    def note(self, operation: Operation | None, about: About, nth: int, out: Any, written: list[torch.Tensor]) -> None:
        """New contents of what the operator wrote to and of what it made."""
        table = self._table
        keep = self._keep.get((about.name, nth), ()) if self._keep else ()
        results = [out] if isinstance(out, torch.Tensor) else flat(out)
        changed: dict[int, Contents] = {}
        for tensor in written:
            storage = tensor.untyped_storage()
            if id(storage) not in changed:
                after = self._rewritten(self.current(tensor), operation, about, tensor)
                changed[id(storage)] = table[id(storage)] = after
        for position, tensor in enumerate(results):
            if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            contents = table.get(id(storage))
            if contents is None or contents.storage() is not storage:  # type: ignore[misc]
                contents = table[id(storage)] = self._made(operation, about, position, tensor, storage)
            elif changed.get(id(storage)) is not contents:
                continue  # an input handed through
            if position in keep:
                self._keep_now(contents, operation, position, tensor)
        if keep and written:
            for position, tensor in enumerate(written, len(results)):
                if position in keep:
                    self._keep_now(changed[id(tensor.untyped_storage())], operation, position, tensor)

    def _rewritten(self, before: Contents, operation: Operation | None, about: About, tensor: torch.Tensor) -> Contents:
        after = Contents(before.storage, operation)
        after.is_outside = before.is_outside
        if before.is_outside or operation is None:
            after.tensor = tensor
        fills_all = about.overwrites and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        after.is_undefined = before.is_undefined and not fills_all
        if operation is not None:
            operation.writes.append((before, weakref.ref(after)))
        if before.is_undefined:
            for view, _ in self._unfilled:
                if view.contents is before:
                    view.contents = after
            if not after.is_undefined:
                self._unfilled = [(view, t) for view, t in self._unfilled if view.contents is not after]
        return after

    def _made(
        self,
        operation: Operation | None,
        about: About,
        position: int,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
    ) -> Contents:
        contents = Contents(weakref.ref(storage), operation)
        if operation is None:  # made by an operator on tensors of a subclass
            contents.is_outside = True
            contents.tensor = tensor
        else:
            operation.makes.append((position, weakref.ref(contents)))
            if about.is_undefined:
                contents.is_undefined = True
                _make_empty_again(operation, tensor)
        return contents

    def _keep_now(self, contents: Contents, operation: Operation | None, position: int, tensor: torch.Tensor) -> None:
        if operation is not None and not contents.is_undefined:
            contents.tensor = tensor
            self.kept.add(Output(operation.operator, operation.nth, position))


def _take(contents: Contents, tensor: torch.Tensor) -> None:
    """Keep what is in memory now, whoever put it there."""
    contents.is_undefined = False
    contents.operation = None
    contents.tensor = tensor


def _written(about: About, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator is about to write to."""
    flag = about.training_flag
    if flag is not None and flag < len(args) and not args[flag]:
        return []
    targets = [args[i] for i in about.written if i < len(args)]
    targets += [kwargs[name] for name in about.written_names if name in kwargs]
    return [t for t in flat(targets) if isinstance(t, torch.Tensor) and is_plain(t)]


def _make_empty_again(operation: Operation, tensor: torch.Tensor) -> None:
    """Empty memory is made from its geometry, so that it hangs on no other tensor."""
    operation.function = torch.empty_strided
    operation.args = (tuple(tensor.shape), tensor.stride())
    operation.kwargs = {"dtype": tensor.dtype, "device": tensor.device}


def _copy_of_all(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of the whole storage."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor.detach(), (count,), (1,), 0).clone()
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


# Rebuilding ----------------------------------------------------------------------------------------------------------


def _rebuilt(contents: Contents) -> torch.Tensor:
    """The tensor that ``contents`` stand for; runs the operators between it and what is at hand."""
    tensor = contents.at_hand()
    if tensor is not None:
        return tensor
    todo = _operations_behind(contents)
    # Below autograd no graph is built; arguments were recorded after autocast; some kernels look at the grad mode.
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), torch.enable_grad():
        while todo:
            _run_again(todo.pop())
    tensor = contents.tensor
    assert tensor is not None, "a replayed operator gave no result"
    return tensor


def _operations_behind(contents: Contents) -> list[Operation]:
    """What has to run, the last one first."""
    found: dict[int, Operation] = {}
    pending = [contents]
    while pending:
        wanted = pending.pop()
        if wanted.at_hand() is not None:
            continue
        operation = wanted.operation
        if operation is None:
            raise RuntimeError("a saved tensor cannot be rebuilt: an earlier attempt failed half-way")
        if operation.index not in found:
            found[operation.index] = operation
            pending.extend([view.contents for view in operation.reads])
    return [found[index] for index in sorted(found, reverse=True)]


def _run_again(operation: Operation) -> None:
    """Run one operator and put its results where they are still wanted."""
    after = _own_what_is_written(operation) if operation.writes else ()
    args = tuple([_as_argument(a) for a in operation.args])
    kwargs = {name: _as_argument(a) for name, a in operation.kwargs.items()}
    if operation.random is None:
        out = operation.function(*args, **kwargs)
    else:
        out = _run_from_state(operation, args, kwargs)
    results = [out] if isinstance(out, torch.Tensor) else flat(out)
    made = [(reference(), results[position]) for position, reference in operation.makes]
    made += [(reference(), memory.tensor) for memory, reference in after]
    for contents, tensor in made:
        if contents is not None:
            contents.operation = None
            if contents.tensor is None:
                contents.tensor = tensor
    operation.args, operation.kwargs, operation.reads = (), {}, []


def _own_what_is_written(operation: Operation) -> list[tuple[Contents, weakref.ref[Contents]]]:
    """Memory for the operator to write to: that of the old contents if nobody wants them any more, else a copy."""
    after = []
    while operation.writes:
        before, reference = operation.writes.pop(0)
        memory = Contents(None, None)
        memory.tensor = before.tensor
        is_wanted = before.is_shared
        for view in operation.reads:
            if view.contents is before:
                view.contents = memory
        alive = weakref.ref(before)
        del before
        if is_wanted or alive() is not None:
            assert memory.tensor is not None
            memory.tensor = _copy_of_all(memory.tensor)
        after.append((memory, reference))
    return after


def _as_argument(value: Any) -> Any:
    if type(value) is View:
        tensor = value.contents.tensor
        assert tensor is not None, "an operator is replayed before what it reads"
        return value.on(tensor)
    if type(value) in (list, tuple):
        return type(value)([_as_argument(item) for item in value])
    return value


def _run_from_state(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operator from where its stream stood; the stream is left where it stands now."""
    state = operation.random
    assert state is not None
    now = _RandomState.now(state.generator, state.device)
    state.set()
    try:
        return operation.function(*args, **kwargs)
    finally:
        now.set()
