"""Activations of a block on the host between its forward and its backward. Nothing is decided here.

    output = run_offloaded(block, block, *args)

What autograd saves while the block runs is copied to the host and let go of on the device when the block has run; the
first saved tensor that backward asks for brings all of them back. Weights, buffers and the block's inputs, which others
hold anyway, stay where they are, and so do tensors of less than ``LEAST_BYTES``.

On CUDA the copies run on a stream of their own, to and from pinned memory: those to the host as soon as the operator
that saves or fills a tensor has returned, beside the rest of the forward, whose end waits for the last; those back in
the order in which backward will ask, each waited for by itself. So device memory is the block's own affair: nothing of
it stands in another stage. On a CPU, where there is no other memory, host copies are numpy's, which the meters of
PyTorch's allocator do not see: the same code, its bytes and its exactness can be tried anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.recompute import no_cast_cache
from ckptplan.replay import is_plain
from ckptplan.trees import has_values, storage_key, tensors_in

LEAST_BYTES = 1024  # a smaller tensor costs more to move than it holds
_WORD = 16  # bytes of the largest dtype; a tensor of any dtype begins and ends with one


def run_offloaded(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)``, the forward of ``module``, with what it saves for backward on the host.

    ``retain_graph`` and second-order gradients work. Without gradients this is a plain call.

    Raises (in backward):
        RuntimeError: an input or a weight was changed in place after the call.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return run_moved(Mover(), call, module, args, kwargs)


def run_moved(
    mover: Mover, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``call(*args, **kwargs)`` under a mover made for this call."""
    given = list(tensors_in((args, kwargs)))
    mover.outside = {storage_key(tensor) for tensor in (*given, *module.parameters(), *module.buffers())}
    try:
        with (
            no_cast_cache({tensor.device.type for tensor in given}),
            torch.autograd.graph.saved_tensors_hooks(mover.pack, mover.unpack),
            mover,
        ):
            return call(*args, **kwargs)
    finally:
        mover.finish()


class Mover(TorchDispatchMode):
    """What one call of a block saves. A dispatch mode, to know when an operator has filled what was saved before it.

    ``outside``: by ``storage_key``, what others hold anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: set[int] = set()
        self._is_packing = False
        self._pending: list[_Moved] = []
        self._held: list[_Held] = []
        self._views: list[_View] = []
        self._moved: dict[int, _Moved] = {}  # by storage, while the block runs
        self._all: list[_Moved] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_packing:  # then the operator that fills the tensor may still be to come
            self._start_copies()
        return out

    # Hooks of autograd

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self._is_moved(tensor):
            held = _Held(self._alias(tensor))
            self._held.append(held)
            return held
        storage = tensor.untyped_storage()
        moved = self._moved.get(id(storage))
        if moved is None or moved.version != tensor._version:
            moved = self._moved[id(storage)] = _Moved(storage, tensor.device, tensor._version, has_values(tensor))
            self._pending.append(moved)
            self._all.append(moved)
        moved.uses += 1
        view = _View(moved, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        view.alias = self._alias(tensor)
        self._views.append(view)
        return view

    def unpack(self, saved: _View | _Held) -> torch.Tensor:
        if isinstance(saved, _Held):
            return saved.checked()
        if saved.alias is not None:  # a backward inside the block's forward
            return saved.alias
        if saved.moved.on_device is None:
            for moved in reversed(self._all):  # about the order in which backward asks
                moved.bring_back()
        return saved.on(saved.moved.take())

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self._is_packing = True
        try:
            return tensor.detach()
        finally:
            self._is_packing = False

    def _is_moved(self, tensor: torch.Tensor) -> bool:
        return (
            is_plain(tensor)
            and tensor.untyped_storage().nbytes() >= LEAST_BYTES
            and storage_key(tensor) not in self.outside
        )

    # Copies

    @property
    def host_bytes(self) -> int:
        return sum(moved.size_bytes for moved in self._all)

    def _start_copies(self) -> None:
        while self._pending:
            self._pending.pop(0).start_copy()

    def finish(self) -> None:
        """The block has run: from here on what it saved is on the host only."""
        self._start_copies()
        for moved in self._all:
            moved.let_go()
        for held in self._held:
            held.version = None if held.tensor.is_inference() else held.tensor._version
        for view in self._views:
            view.alias = None
        self._moved.clear()
        self._held.clear()
        self._views.clear()


@dataclass
class _Held:
    """A saved tensor that stays on the device."""

    tensor: torch.Tensor
    version: int | None = None  # when the block had run; an inference tensor has none

    def checked(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor that the backward of an offloaded block needs was changed in place after its forward: "
                f"{tuple(self.tensor.shape)} of {self.tensor.dtype}"
            )
        return self.tensor


@dataclass
class _View:
    """How a saved tensor lies in its storage; ``alias``: the tensor itself, while the block runs."""

    moved: _Moved
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    alias: torch.Tensor | None = None

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass
class _Moved:
    """A storage that is on the host while it is not needed.

    Attributes:
        uses: saved tensors that lie in it; when all of them were asked for it is let go of again.
    """

    storage: torch.UntypedStorage | None
    device: torch.device
    version: int
    has_values: bool
    uses: int = 0
    host: torch.Tensor | None = None
    on_device: torch.Tensor | None = None
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.storage is not None
        self.size_bytes = -(-self.storage.nbytes() // _WORD) * _WORD
        self._asked = 0
        self._arrived: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        assert self.storage is not None
        if self.has_values:
            source = _as_bytes(self.storage, self.device)
            self.host = _host_bytes(self.size_bytes, self.device)
            self._arrived = _copy(self.host[: len(source)], source, self.device)

    def let_go(self) -> None:
        """The device's memory, once the copy is through: later operators of the main stream wait for that."""
        _wait(self._arrived, self.device)
        self.storage = None

    def bring_back(self) -> None:
        if self.on_device is not None:
            return
        self.on_device = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        if self.host is not None:
            self._arrived = _copy(self.on_device, self.host, self.device)

    def take(self) -> torch.Tensor:
        """The bytes on the device. After the last of its uses they are let go of; ``retain_graph`` may ask again."""
        assert self.on_device is not None
        _wait(self._arrived, self.device)
        memory = self.on_device
        self._asked += 1
        if self._asked == self.uses:
            self._asked, self.on_device = 0, None
        return memory


# The two memories -----------------------------------------------------------------------------------------------------

_streams: dict[torch.device, torch.cuda.Stream] = {}


def _host_bytes(size: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.cuda.Event | None:
    """Beside the main stream, behind what that has been given so far."""
    if device.type != "cuda":
        target.copy_(source)
        return None
    main = torch.cuda.current_stream(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    beside = _streams[device]
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(beside)
    if target.is_cuda:  # a backward that ends early lets go of it while the copy is still under way
        target.record_stream(beside)
    return done


def _wait(done: torch.cuda.Event | None, device: torch.device) -> None:
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
