"""Profiles that runs share: measured once for a model, batch and machine, and read by whoever needs the same figures.

A file is found under a key over everything that decides what a profile says, so it is never stale: what changes
leads to another key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ckptplan.errors import CkptplanError
from ckptplan.profiles import ChainProfile
from ckptplan.strict_json import parse_json_object, require_schema, write_text_whole

SHARED_PROFILE_SCHEMA = "ckptplan.shared_profile/1"
# Environment variables that choose kernels, threads or the allocator; which device is the machine's part of the key.
_TUNING = tuple(
    f"{prefix}_" for prefix in "ATEN CUBLAS CUDA CUDNN DNNL GOMP KMP MALLOC MKL NVIDIA OMP ONEDNN PYTORCH TORCH".split()
)
_WHICH_DEVICE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_POLL_S = 0.1


@dataclass(frozen=True)
class SharedProfile:
    """A profile and where it came from.

    Attributes:
        path: the file that holds it; None: it could not be written.
        is_new: measured here and now; else read from ``path``.
        measured_s: seconds that measuring took, whoever did it.
        notes: what went wrong with the files on the way; the profile is good all the same.
    """

    profile: ChainProfile
    path: Path | None
    is_new: bool
    measured_s: float
    notes: tuple[str, ...] = ()


def shared_profile(
    folder: Path,
    key: str,
    measure: Callable[[], ChainProfile],
    *,
    with_options: bool,
    fingerprint: str,
    check_stop: Callable[[], None] = lambda: None,
) -> SharedProfile:
    """The profile of ``key`` in ``folder``, measured if there is none; of several runs at once, one measures.

    Args:
        key: from ``profile_key``.
        with_options: whether options inside blocks are needed; a profile that has them serves those who do not.
        fingerprint: of the live model; a file made for another is not taken.
        check_stop: called while another run measures; may raise to give up.

    A damaged file, or a folder that cannot be written, costs a note.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        is_shared = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder / f".{key}.lock", check_stop))
        except OSError as error:
            is_shared = False
            notes.append(f"the profile is not shared: {error}")
        for has_options in () if not is_shared else (True,) if with_options else (True, False):
            path = _path(folder, key, has_options)
            try:
                profile, measured_s = _read(path, key, fingerprint)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, CkptplanError) as error:
                notes.append(f"{path} is not used: {error}")
                continue
            return SharedProfile(profile, path, False, measured_s, tuple(notes))
        start_s = time.perf_counter()
        profile = measure()
        measured_s = time.perf_counter() - start_s
        path = _path(folder, key, with_options)
        try:
            if is_shared:
                _write(path, key, profile, measured_s)
        except OSError as error:
            is_shared = False
            notes.append(f"the profile is not shared: {error}")
        return SharedProfile(profile, path if is_shared else None, True, measured_s, tuple(notes))


def _path(folder: Path, key: str, has_options: bool) -> Path:
    return folder / f"{key[:32]}{'.options' if has_options else ''}.json"


def _write(path: Path, key: str, profile: ChainProfile, measured_s: float) -> None:
    text = profile.to_json()
    whole = {
        "schema": SHARED_PROFILE_SCHEMA,
        "key": key,
        "digest": _sha256(text.encode()),
        "measured_s": measured_s,
        "profile": json.loads(text),
    }
    write_text_whole(path, json.dumps(whole) + "\n")


def _read(path: Path, key: str, fingerprint: str) -> tuple[ChainProfile, float]:
    data = parse_json_object(path.read_text(encoding="utf-8"), str(path))
    require_schema(data, SHARED_PROFILE_SCHEMA, str(path))
    try:
        profile = ChainProfile.from_json(json.dumps(data["profile"]), str(path))
        found_key, digest, measured_s = data["key"], data["digest"], float(data["measured_s"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks a figure ({error!r})") from error
    if found_key != key:
        raise ValueError("it belongs to another model, batch or machine")
    if digest != _sha256(profile.to_json().encode()):
        raise ValueError("it was changed after it was written")
    if profile.fingerprint != fingerprint:
        raise ValueError("it was made for blocks of another make")
    return profile, measured_s


@contextlib.contextmanager
def _locked(path: Path, check_stop: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of ``path``; the kernel lets it go when its holder dies, whatever kills it."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check_stop()
                time.sleep(_POLL_S)
        yield


# --- the key ----------------------------------------------------------------------------------------------------------


def profile_key(model: nn.Module, tensors: Iterable[torch.Tensor], settings: Mapping[str, Any], device: str) -> str:
    """64 hex digits over everything that decides the figures of a profile.

    Args:
        model: as it will be measured: its structure, shapes, dtypes, flags and the source text of its classes count.
        tensors: the batch; shapes, strides and dtypes count, values do not.
        settings: plain configuration that was used to make model and batch, and how they are measured.
        device: its name, such as "NVIDIA H200"; the processor counts in any case.
    """
    facts = {
        "settings": settings,
        "batch": [[list(t.shape), list(t.stride()), str(t.dtype), str(t.device.type)] for t in tensors],
        "model": _structure(model),
        "code": _code_digests(model),
        "machine": _machine(device),
    }
    return _sha256(json.dumps(facts, sort_keys=True, default=str).encode())


def _structure(model: nn.Module) -> list[Any]:
    found: list[Any] = [[name, _class_name(m), m.training, m.extra_repr()] for name, m in model.named_modules()]
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            flags = [str(tensor.dtype), tensor.requires_grad, str(tensor.device.type)]
            found.append([kind, name, list(tensor.shape), list(tensor.stride()), *flags])
    return found


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch": [torch.__version__, torch.version.cuda, torch.version.git_version],
        "python": platform.python_version(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_TUNING) and name not in _WHICH_DEVICE
        },
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _code_digests(model: nn.Module) -> dict[str, str]:
    """Source file -> digest: of the classes in the model, of own modules that these use, and of this package."""
    names = {type(module).__module__ for module in model.modules()}
    files = set(Path(__file__).resolve().parent.rglob("*.py"))
    seen: set[str] = set()
    while names:
        name = names.pop()
        seen.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            continue
        path = Path(file).resolve()
        files.add(path)
        if not _is_library(path):
            names |= {used for used in _used_modules(module) if used not in seen}
    return {str(path): _sha256(path.read_bytes()) for path in sorted(files) if path.is_file()}


def _used_modules(module: ModuleType) -> set[str]:
    """Modules that stand in the namespace of ``module``, or that something in it was defined in."""
    found = {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
    found |= {str(getattr(value, "__module__", None) or "") for value in vars(module).values() if callable(value)}
    return found & sys.modules.keys()


def _is_library(path: Path) -> bool:
    """Installed code: its versions decide, and following it would lead through all of torch."""
    folders = {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return "site-packages" in path.parts or any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
