"""Device, number format, seed and determinism of a run: chosen once, here, and explained."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptplan.config import FREE, RuntimeConfig
from ckptplan.config.wording import config_error
from ckptplan.devices import DEVICES, Device
from ckptplan.randomness import seed_everything


@dataclass(frozen=True)
class Runtime:
    """What a run computes on.

    Attributes:
        parameter_dtype: of the weights.
        autocast_dtype: of matrix products under autocast; None: no autocast.
        explanation: one line for the log.
        planned_for: a device that is not there, in whose place fake CPU tensors are looked at.
    """

    device: torch.device
    parameter_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    explanation: str
    planned_for: Device | None = None

    @property
    def device_name(self) -> str:
        """Such as "cpu" or "NVIDIA H200"."""
        if self.planned_for is not None:
            return self.planned_for.title
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)


_FORMATS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "bf16_mixed": (torch.float32, torch.bfloat16),
    "fp16_mixed": (torch.float32, torch.float16),
}


def choose_runtime(config: RuntimeConfig, seed: int) -> Runtime:
    """Resolve ``auto``, set threads and determinism for this process, and seed every random stream.

    Raises:
        ConfigError: a device that is not there, or fp16 without a CUDA device.
    """
    planned_for = DEVICES.get(config.device)
    device, why = _device(config.device if planned_for is None else "cpu")
    parameter_dtype, autocast_dtype = _FORMATS[str(config.dtype)]
    if autocast_dtype is torch.float16 and device.type != "cuda" and planned_for is None:
        raise config_error(
            "runtime.dtype", "fp16_mixed", f"{device} has no fp16 training", remedy="runtime.dtype=bf16_mixed"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _set_determinism(config.deterministic, device)
    seed_everything(seed)
    if planned_for is not None:
        told = f"{planned_for.title}, which is not here: figures are estimated ({planned_for.source}), {config.dtype}"
        return Runtime(device, parameter_dtype, autocast_dtype, told, planned_for)
    order = "deterministic kernels" if config.deterministic else "kernels as they come"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Runtime(device, parameter_dtype, autocast_dtype, f"{device} ({why}), {config.dtype}, {order}{threads}")


def _device(wanted: str) -> tuple[torch.device, str]:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0), "the first CUDA device"
        return torch.device("cpu"), "no CUDA device here"
    if wanted == FREE:
        return torch.device("cuda", free_cuda_device()), "one that no other run has taken"
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            problem = f"this PyTorch ({torch.__version__}) sees {count} CUDA devices"
            raise config_error("runtime.device", wanted, problem, remedy="runtime.device=cpu, or runtime=auto")
        device = torch.device("cuda", index)
    return device, "as asked for"


_taken: dict[int, int] = {}  # by number, the open lock of a device that this process has taken


def free_cuda_device() -> int:
    """The first CUDA device that no other process has taken by this function; it stays this one's until that ends.

    A device is taken by a lock on a file of its own in the folder for temporary files. Raises ``ConfigError``.
    """
    import fcntl  # not on Windows

    if _taken:  # of an earlier run in this process, as a pool of workers has them
        return next(iter(_taken))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder = Path(tempfile.gettempdir()) / f"ckptplan-devices-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for number in range(count):
        name = getattr(torch.cuda.get_device_properties(number), "uuid", number)  # also where only some are visible
        descriptor = os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        _taken[number] = descriptor
        return number
    problem = f"other runs have taken all {count} CUDA devices" if count else "this PyTorch sees no CUDA device"
    raise config_error("runtime.device", FREE, problem, remedy="runtime=auto, or fewer jobs at once")


def _set_determinism(deterministic: bool, device: torch.device) -> None:
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
    # Warn only: a kernel without a deterministic form is told, and must not end a run after an hour.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
