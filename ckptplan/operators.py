"""The operators that a block consists of, found by running it, and the gate: may this block be replayed?

Nothing is listed by hand: whatever the block runs is recorded by the recorder of ``replay.py``, so what is
planned on is what is executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode  # pinned by tests/test_replay.py

from ckptplan.clock import now_s
from ckptplan.graph import BlockOperators, OperatorCall, Output, Value
from ckptplan.replay import (
    Contents,
    Operation,
    Recorder,
    View,
    about_operator,
    flat,
    is_plain,
    run_recorded,
    run_replayed,
)
from ckptplan.stages import count_flops
from ckptplan.trees import tensors_in

# Calls what it is given with fresh arguments of the block, from equal random state, and returns the result.
RunBlock = Callable[[Callable[..., Any]], Any]


# Tracing -------------------------------------------------------------------------------------------------------------


def trace_operators(
    module: nn.Module, run_block: RunBlock, synchronize: Callable[[], None] = lambda: None, num_timed: int = 3
) -> BlockOperators:
    """Run the block a few times and say what it consists of. Times are the least of ``num_timed`` runs."""
    tracer = _Tracer()
    with _submodule_paths(module) as paths:
        tracer.paths = paths
        run_block(lambda *args, **kwargs: run_recorded(tracer, module, args, kwargs))
    traced = tracer.traced
    flops = _Flops()
    with flops.counter:
        run_block(_under(flops, module))
    times_ms = _least_times(module, run_block, synchronize, num_timed, len(flops.each))
    calls = tuple(
        OperatorCall(name, nth, path, reads, makes, flops.each[index], times_ms[index])
        for index, name, nth, path, reads, makes in traced.calls
    )
    sequence = "\n".join(f"{call.name}#{call.nth}" for call in calls)
    return BlockOperators(calls, traced.values, traced.needed, hashlib.sha256(sequence.encode()).hexdigest()[:16])


def _under(mode: TorchDispatchMode, module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return module(*args, **kwargs)

    return call


@contextmanager
def _submodule_paths(module: nn.Module) -> Iterator[list[str]]:
    """The paths of the submodules that are running, the innermost last."""
    names = {id(part): name for name, part in module.named_modules()}
    running: list[str] = []

    def enter(part: nn.Module, args: Any) -> None:
        running.append(names.get(id(part), running[-1] if running else ""))

    def leave(part: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Traced:
    calls: list[tuple[int, str, int, str, tuple[int, ...], tuple[int, ...]]]
    values: tuple[Value, ...]
    needed: tuple[int, ...]


class _Tracer(Recorder):
    """Holds the whole record of one call."""

    def __init__(self) -> None:
        super().__init__(())
        self.paths: Sequence[str] = ()
        self._operations: list[tuple[Operation, str]] = []
        self._values_made: list[tuple[Contents, Output, int, int]] = []  # contents, name, bytes, operator call
        self._saved: list[View] = []
        self.traced = _Traced([], (), ())

    def pack(self, tensor: torch.Tensor) -> Any:
        saved = super().pack(tensor)
        if isinstance(saved, View):
            self._saved.append(saved)
        return saved

    def note(self, operation: Operation | None, about: Any, nth: int, out: Any, written: list[torch.Tensor]) -> None:
        super().note(operation, about, nth, out, written)
        if operation is None:
            return
        fresh = [reference() for _, reference in (*operation.makes, *operation.writes)]
        for position, tensor in enumerate([*flat(out), *written]):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                contents = self.current(tensor)
                if any(contents is one for one in fresh):
                    fresh = [one for one in fresh if one is not contents]
                    size_bytes = tensor.untyped_storage().nbytes()
                    name = Output(about.name, nth, position)
                    self._values_made.append((contents, name, size_bytes, len(self._operations)))
        self._operations.append((operation, self.paths[-1] if self.paths else ""))

    def finish(self) -> None:
        self.traced = self._result()
        super().finish()

    def _result(self) -> _Traced:
        """The record as numbers. Contents with a tensor are at hand: from outside, or filled unseen."""
        made = [entry for entry in self._values_made if entry[0].tensor is None]
        number = {id(contents): index for index, (contents, *_) in enumerate(made)}
        superseded = {id(before) for operation, _ in self._operations for before, _ in operation.writes}
        values = tuple(
            Value(name, size, call, not contents.is_undefined and id(contents) not in superseded)
            for contents, name, size, call in made
        )
        makes: dict[int, list[int]] = {}
        for index, value in enumerate(values):
            makes.setdefault(value.operator, []).append(index)
        calls = []
        for index, (operation, path) in enumerate(self._operations):
            reads = dict.fromkeys(number[id(v.contents)] for v in operation.reads if id(v.contents) in number)
            calls.append(
                (operation.index, operation.operator, operation.nth, path, tuple(reads), tuple(makes.get(index, ())))
            )
        needed = dict.fromkeys(number[id(v.contents)] for v in self._saved if id(v.contents) in number)
        return _Traced(calls, values, tuple(needed))


class _EachOperator(TorchDispatchMode):
    """Measures every operator that a recorder would record, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.each: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if about_operator(func).is_view:
            return func(*args, **(kwargs or {}))
        return self.measured(lambda: func(*args, **(kwargs or {})))

    def measured(self, run: Callable[[], Any]) -> Any:
        raise NotImplementedError


class _Flops(_EachOperator):
    def __init__(self) -> None:
        super().__init__()
        self.counter = count_flops()

    def measured(self, run: Callable[[], Any]) -> Any:
        before = self.counter.get_total_flops()
        out = run()
        self.each.append(self.counter.get_total_flops() - before)
        return out


class _Times(_EachOperator):
    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.synchronize = synchronize

    def measured(self, run: Callable[[], Any]) -> Any:
        start_s = now_s()
        out = run()
        self.synchronize()
        self.each.append((now_s() - start_s) * 1e3)
        return out


def _least_times(
    module: nn.Module, run_block: RunBlock, synchronize: Callable[[], None], num_timed: int, count: int
) -> list[float]:
    runs = []
    for _ in range(num_timed):
        times = _Times(synchronize)
        run_block(_under(times, module))
        if len(times.each) == count:  # a block that branches at will may run others; those runs tell nothing
            runs.append(times.each)
    return [min(times) for times in zip(*runs, strict=True)] if runs else [0.0] * count


# The gate ------------------------------------------------------------------------------------------------------------


def why_not_replayed(module: nn.Module, run_block: RunBlock) -> str | None:
    """Why this block must not be replayed, or None where a replay of it is exact.

    One run looks at all memory before and after each operator: a write that the dispatcher does not see shows
    as a change between two of them. Then outputs, gradients, buffers and random stream of a replay are compared with
    plain autograd's, bit by bit; where they differ, the saved tensor that is rebuilt differently is named.
    """
    start = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    checker = _Checker()
    try:
        plain = _results(module, start, run_block, module)
    except Exception as error:  # in the model it ran
        return f"its outputs and gradients cannot be compared alone: {type(error).__name__}: {error}"
    try:
        run_block(lambda *args, **kwargs: _checked(checker, module, args, kwargs))
        if checker.fault is not None:
            return checker.fault
        again = _results(module, start, run_block, lambda *args, **kwargs: run_replayed(module, (), *args, **kwargs))
    except Exception as error:  # whatever it is: plain, the block ran
        return f"it does not run under a record: {type(error).__name__}: {error}"
    if all(_same_bits(a, b) for a, b in zip(plain, again, strict=True)):
        return None  # a saved tensor may differ in bytes that nobody reads (the workspace of an LSTM)
    differs = "outputs, gradients, buffers or random stream of a replay differ from plain autograd's"
    return checker.rebuilt_differently() or differs


class _Checker(Recorder):
    """Knows what each storage held when it was last looked at."""

    def __init__(self) -> None:
        super().__init__(())
        self.fault: str | None = None
        self._last: dict[int, tuple[Contents, torch.Tensor]] = {}
        self._saved: list[tuple[View, torch.Tensor, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about = about_operator(func)
        if about.is_view or self.is_paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = _plain_tensors([*args, *kwargs.values()])
        self._look_at(given, f"before {about.name!r} read it")
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._look_at(
            [*given, *_plain_tensors(out)], f"while {about.name!r} ran, which does not declare that it writes"
        )
        return out

    def pack(self, tensor: torch.Tensor) -> Any:
        saved = super().pack(tensor)
        if isinstance(saved, View):
            with self.paused():
                self._look_at([tensor], "before autograd saved it")
                maker = saved.contents.operation
                label = f"{maker.operator}#{maker.nth}" if maker is not None else "what came from outside"
                self._saved.append((saved, tensor.detach().clone(), label))
        return saved

    def leave(self, output: Any) -> None:
        with self.paused():
            self._look_at(_plain_tensors(tensors_in(output)), "before the block returned")

    def _look_at(self, tensors: Sequence[torch.Tensor], when: str) -> None:
        for tensor in tensors:
            contents = self.current(tensor)
            if contents.is_undefined:
                continue
            now = _bytes_of(tensor)
            known = self._last.get(id(contents))
            if known is None:
                self._last[id(contents)] = (contents, now.clone())
            elif not torch.equal(known[1], now) and self.fault is None:
                maker = contents.operation
                what = f"the result of {maker.operator}#{maker.nth}" if maker is not None else "a tensor from outside"
                self.fault = (
                    f"{what} (shape {tuple(tensor.shape)}) was changed {when}, by a write that PyTorch's dispatcher "
                    "does not see (NumPy, a raw pointer), which a replay would not repeat"
                )

    def rebuilt_differently(self) -> str | None:
        self._last.clear()
        for saved, expected, label in reversed(self._saved):
            if not _same_bits(self.unpack(saved), expected):
                return f"the result of {label} is another one when it is computed again from its inputs"
        return None


def _checked(checker: _Checker, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = [t for t in tensors_in((args, kwargs)) if is_plain(t)]
    before = [t.detach().clone() for t in inputs]

    def call(*args: Any, **kwargs: Any) -> Any:
        output = module(*args, **kwargs)
        checker.leave(output)
        return output

    output = run_recorded(checker, call, args, kwargs)
    if not all(_same_bits(t.detach(), b) for t, b in zip(inputs, before, strict=True)) and checker.fault is None:
        checker.fault = "its forward changes its own input in place"
    return output


def _plain_tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in flat(values) if isinstance(t, torch.Tensor) and is_plain(t)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
        return left is right
    return torch.equal(_bytes_of(left.contiguous().clone()), _bytes_of(right.contiguous().clone()))


def _results(
    module: nn.Module, start: dict[str, torch.Tensor], run_block: RunBlock, call: Callable[..., Any]
) -> list[torch.Tensor | None]:
    """Outputs, gradients, buffers and the CPU's random stream after one forward and backward."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(start[name])
    wanted: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]

    def with_inputs(*args: Any, **kwargs: Any) -> Any:
        wanted.extend(_differentiable((args, kwargs)))
        return call(*args, **kwargs)

    outputs = tensors_in(run_block(with_inputs))
    roots = _differentiable(outputs)
    found = torch.autograd.grad(roots, wanted, [r.detach().clone() for r in roots], allow_unused=True)
    values = [t.detach().clone() for t in (*outputs, *module.buffers())]
    return [*values, *found, torch.get_rng_state()]


def _differentiable(value: Any) -> list[torch.Tensor]:
    """The distinct tensors of a value that a gradient flows into."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())
