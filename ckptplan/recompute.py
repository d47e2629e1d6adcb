"""Running code whose activations are dropped and computed again in backward.

This is PyTorch's non-reentrant ``torch.utils.checkpoint`` with early stop and its determinism check on,
plus what it does not do:

- buffers that the code changes (BatchNorm's running statistics, a moving average) are changed once: the
  recomputation starts from the values that the forward started from and works on copies;
- random streams are restored wherever the forward drew from them, seen by comparing their states (about 5 kB are
  kept per call that draws on a CPU), so that dropout switched on after planning stays exact;
- the attention kernels that were allowed in the forward (``torch.nn.attention.sdpa_kernel``) are those of the
  recomputation, also where backward runs outside that context;
- a call inside another one keeps nothing of its own until backward comes to the outer one: the first values of
  buffers are the outer's, and where the streams stood is noted when the outer runs again;
- what would make the gradients wrong without a word is an error: a buffer changed that nobody guards, weights or the
  train mode changed between forward and backward.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckptplan.errors import PlanIncompatibleError
from ckptplan.randomness import set_torch_state, torch_state
from ckptplan.trees import split_tensors

BufferSlot = tuple[nn.Module, str]  # the submodule that holds the buffer, and the buffer's name in it


@dataclass(frozen=True)
class Guards:
    """What a recomputation must restore or watch to be exact; random streams are seen to in every call.

    Attributes:
        buffers: the buffers that the code changes.
        modules: whose weights, other buffers and train mode must not change unnoticed.
    """

    buffers: tuple[BufferSlot, ...] = ()
    modules: tuple[nn.Module, ...] = ()


def buffer_slots(module: nn.Module, names: Sequence[str] | None = None) -> tuple[BufferSlot, ...]:
    """The named buffers of ``module`` (all of them for None), each with the submodule that holds it."""
    slots = []
    for path, _ in module.named_buffers(remove_duplicate=False):
        if names is None or path in names:
            parent, _, name = path.rpartition(".")
            slots.append((module.get_submodule(parent), name))
    return tuple(slots)


def run_recomputed(call: Callable[..., Any], guards: Guards, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``, keeping its inputs only; backward runs it again, on copies of the guarded buffers.

    Without gradients this is a plain call. PyTorch's checkpoint is handed bare tensors only: it would keep a
    tuple of tensors alive by itself, out of reach of an enclosing recomputation, and it has keyword
    arguments of its own (``debug``, ``context_fn``).

    Raises:
        PlanIncompatibleError: the forward changes a buffer that is not guarded.
        RuntimeError: in backward, if weights or the train mode changed since the forward.
    """
    return run_segment(lambda *a, **k: run_block(call, guards, *a, **k), guards, *args, **kwargs)


def run_segment(call: Callable[..., Any], guards: Guards, /, *args: Any, **kwargs: Any) -> Any:
    """``run_recomputed`` for code of several blocks, each of which runs under ``run_block`` with guards of its own."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    tensors, put_back = split_tensors((args, kwargs))
    run = _Recomputation(call, guards, (args, kwargs), put_back, {t.device for t in tensors})
    del args, kwargs
    return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)


def run_block(call: Callable[..., Any], guards: Guards, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``; inside a recomputation on copies of the buffers that it changes."""
    starts = _innermost_starts()
    if starts is None or not guards.buffers:
        return call(*args, **kwargs)
    known = [slot for slot in guards.buffers if slot_key(slot) in starts]
    return run_on_copies(call, known, [starts[slot_key(slot)] for slot in known], *args, **kwargs)


def run_on_copies(
    call: Callable[..., Any], slots: Sequence[BufferSlot], starts: Sequence[torch.Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    """``call(*args, **kwargs)`` with copies of ``starts`` in place of the buffers."""
    # The buffers are exchanged, not overwritten: writing into them would invalidate what autograd saved.
    current = [getattr(owner, name) for owner, name in slots]
    try:
        for (owner, name), start in zip(slots, starts, strict=True):
            setattr(owner, name, start.clone())
        return call(*args, **kwargs)
    finally:
        for (owner, name), buffer in zip(slots, current, strict=True):
            setattr(owner, name, buffer)


SlotKey = tuple[int, str]


def slot_key(slot: BufferSlot) -> SlotKey:
    """A buffer's place as a key; modules need not be hashable."""
    return id(slot[0]), slot[1]


class _Running(threading.local):
    """The recomputed calls that this thread is inside of, and for each whether it runs again."""

    def __init__(self) -> None:
        self.calls: list[tuple[_Recomputation, bool]] = []


_running = _Running()


def _innermost_starts() -> dict[SlotKey, torch.Tensor] | None:
    return next((call.starts for call, is_again in reversed(_running.calls) if is_again), None)


class _Recomputation:
    """One call: the forward first, and the same again whenever it is called once more.

    A call inside another one's forward is remembered there. It is this object that backward uses, not the one that
    stands for it when the outer call runs again; so the outer hands it what that one would have noted.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        guards: Guards,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        put_back: Callable[[Sequence[torch.Tensor]], Any],
        devices: set[torch.device],
    ) -> None:
        self.call, self.guards, self.put_back = call, guards, put_back
        self.devices = sorted(devices, key=str)
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self.starts: dict[SlotKey, torch.Tensor] = {}
        self.random: list[list[torch.Tensor]] | None = None  # where the streams stood, if the forward drew from them
        self.draws = False
        self.watch: _Watch | None = None
        self.attention_kernels: tuple[bool, ...] = ()
        self.inner: list[weakref.ref[_Recomputation]] = []  # calls inside this one, in order
        self.num_again = 0  # of those, how many the present run has come to
        self.is_inside, self.is_stand_in = bool(_running.calls), False
        if self.is_inside:
            self._tell_outer(*_running.calls[-1])

    def _tell_outer(self, outer: _Recomputation, outer_is_again: bool) -> None:
        self.starts, self.is_stand_in = outer.starts, outer_is_again
        if not outer_is_again:
            outer.inner.append(weakref.ref(self))
            return
        if outer.num_again == len(outer.inner):
            raise RuntimeError(
                "a recomputation runs another recomputed call that its forward did not run; code that decides by "
                "something else than its inputs cannot be recomputed"
            )
        original = outer.inner[outer.num_again]()
        outer.num_again += 1
        if original is not None and original.draws:
            original.random = self._random_states()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with no_cast_cache({device.type for device in self.devices}):
            if self.given is not None:
                # the containers of the caller, so that what the code writes into them is seen outside, once
                (args, kwargs), self.given = self.given, None
                return self._forward(args, kwargs)
            args, kwargs = self.put_back(inputs)
            return self._again(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new = [slot for slot in self.guards.buffers if slot_key(slot) not in self.starts]
        if new:
            own = {slot_key((owner, name)): getattr(owner, name).detach().clone() for owner, name in new}
            self.starts = {**self.starts, **own}
        self.watch = _Watch(self.guards)
        self.attention_kernels = _attention_kernels()
        output = self._noting_draws(args, kwargs)
        self.watch.require_buffers_unchanged()
        return output

    def _noting_draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [] if self.is_inside else self._random_states()
        digests = _digests(self._random_states()) if self.is_inside and not self.is_stand_in else []
        with self._running_now(is_again=False):
            output = self.call(*args, **kwargs)
        if digests:
            self.draws = digests != _digests(self._random_states())
        elif before and not _equal_states(before, self._random_states()):
            self.draws, self.random = True, before
        return output

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.watch is not None
        self.watch.require_same_weights()
        self.num_again = 0
        with self._running_now(is_again=True), self._streams_put_back(), _attention_kernels_are(self.attention_kernels):
            return self.call(*args, **kwargs)

    @contextmanager
    def _running_now(self, *, is_again: bool) -> Iterator[None]:
        _running.calls.append((self, is_again))
        try:
            yield
        finally:
            _running.calls.pop()

    def _random_states(self) -> list[list[torch.Tensor]]:
        return [torch_state(device) for device in self.devices] or [torch_state(torch.device("cpu"))]

    @contextmanager
    def _streams_put_back(self) -> Iterator[None]:
        if not self.draws:
            yield
            return
        if self.random is None:
            raise RuntimeError("a recomputed call runs again before the one around it did; this is a fault in ckptplan")
        devices = self.devices or [torch.device("cpu")]
        now = self._random_states()
        try:
            for device, states in zip(devices, self.random, strict=True):
                set_torch_state(states, device)
            yield
        finally:
            for device, states in zip(devices, now, strict=True):
                set_torch_state(states, device)


def _digests(states: list[list[torch.Tensor]]) -> list[bytes]:
    """What tells states apart without holding them. They are read past any mode that gives fake tensors."""
    flat = [state for of_device in states for state in of_device]
    return [hashlib.sha256(ctypes.string_at(state.data_ptr(), state.nbytes)).digest() for state in flat]


def _equal_states(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return _digests(left) == _digests(right)


class _Watch:
    """Weights, unguarded buffers and train flags as they were at the forward."""

    def __init__(self, guards: Guards) -> None:
        guarded = {(id(owner), name) for owner, name in guards.buffers}
        parts = [part for module in guards.modules for part in module.modules()]
        self.flags = [(part, part.training) for part in parts]
        self.weights = [(part, n, p, p._version) for part in parts for n, p in part.named_parameters(recurse=False)]
        self.buffers = [
            (part, name, buffer, buffer._version)
            for part in parts
            for name, buffer in part.named_buffers(recurse=False)
            if (id(part), name) not in guarded
        ]

    def require_buffers_unchanged(self) -> None:
        for part, name, buffer, version in self.buffers:
            if getattr(part, name) is not buffer or buffer._version != version:
                raise PlanIncompatibleError(
                    f"the forward of {type(part).__name__} changes its buffer {name!r}, which the plan does not guard: "
                    "it did not when the model was profiled (in eval mode?). Profile it as it is trained, plan again"
                )

    def require_same_weights(self) -> None:
        for part, name, weight, version in self.weights:
            if getattr(part, name) is not weight or weight._version != version:
                raise RuntimeError(
                    f"the weight {name!r} of {type(part).__name__} was changed between forward and backward, so a "
                    "recomputed block would give other activations; update weights after backward (with "
                    "torch.func.functional_call: take the plan off first, it puts the weights back after the forward)"
                )
        for part, training in self.flags:
            if part.training != training:
                raise RuntimeError(
                    f"{type(part).__name__} was switched to {'train' if part.training else 'eval'} mode between "
                    "forward and backward, so a recomputed block would give other activations; switch after backward"
                )


_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose from: one setting for all devices, CPUs included."""
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION_KERNELS)


def _allow_attention_kernels(allowed: Sequence[bool]) -> None:
    for name, is_allowed in zip(_ATTENTION_KERNELS, allowed, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_allowed)


@contextmanager
def _attention_kernels_are(allowed: tuple[bool, ...]) -> Iterator[None]:
    now = _attention_kernels()
    if allowed == now:
        yield
        return
    try:
        _allow_attention_kernels(allowed)
        yield
    finally:
        _allow_attention_kernels(now)


@contextmanager
def no_cast_cache(device_kinds: Iterable[str]) -> Iterator[None]:
    """Autocast as it is, without its cache, which would hold a copy of every weight until the user's context ends."""
    with ExitStack() as stack:
        for kind in device_kinds:
            if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
                stack.enter_context(torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False))
        yield
