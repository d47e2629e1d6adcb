"""The global random streams of Python, NumPy, torch and a device: seeding, comparing, putting back.

Users' models and data draw from the global streams, so these are what has to be handled here; code of
our own draws from private generators.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of_rank(seed: int, rank: int, step: int = 0) -> int:
    """The seed of one of several processes from a step on; that of rank 0 and step 0 is ``seed`` itself."""
    if rank == 0 and step == 0:
        return seed
    digest = hashlib.blake2b(f"{seed},{rank},{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def library_state() -> tuple[Any, ...]:
    """The states of Python's and NumPy's streams, comparable with ``==``."""
    name, keys, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, bytes(np.asarray(keys)), position, tuple(rest)


def torch_state(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's CPU stream and of ``device``'s own, if it is another."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Put back what ``torch_state`` gave."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def seed_without_devices(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU stream; no device is touched."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@dataclass(frozen=True)
class GlobalStreams:
    """Where all streams stood: Python's, NumPy's, torch's."""

    python_state: tuple[Any, ...]
    numpy_state: Any
    torch_states: list[torch.Tensor]

    @staticmethod
    def now(device: torch.device) -> GlobalStreams:
        return GlobalStreams(random.getstate(), np.random.get_state(), torch_state(device))

    def put_back(self, device: torch.device) -> None:
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        set_torch_state(self.torch_states, device)


def streams_to_save(device: torch.device) -> dict[str, Any]:
    """Where all streams stand, as plain values and tensors: Python's, NumPy's, torch's, each CUDA device's."""
    cuda = None
    if device.type == "cuda":
        cuda = [torch.cuda.get_rng_state(number) for number in range(torch.cuda.device_count())]
    python, numpy = random.getstate(), np.random.get_state()
    return {"python": python, "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def put_back_streams(stored: Mapping[str, Any], device: torch.device) -> bool:
    """Put back what ``streams_to_save`` gave, here or elsewhere; False: nothing for ``device``'s own."""
    random.setstate(stored["python"])
    np.random.set_state(stored["numpy"])
    torch.set_rng_state(stored["torch"])
    if device.type != "cuda":
        return True
    states = (stored["cuda"] or [])[: torch.cuda.device_count()]
    for number, state in enumerate(states):
        torch.cuda.set_rng_state(state, number)
    return (device.index or 0) < len(states)


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """All streams are left where they were found, on success and on error."""
    streams = GlobalStreams.now(device)
    try:
        yield
    finally:
        streams.put_back(device)
