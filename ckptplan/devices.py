"""What devices can do: rates, memory, and where each figure comes from. Torch-free.

A device that is not at hand is described by its data sheet and by how much of that kernels are known to reach; one
that is, by a small file of measurements (``python -m ckptplan.calibrate``), which replaces the data sheet.
"""

from __future__ import annotations

import bisect
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptplan.strict_json import canonical_json, decode_dataclass, parse_json_object, require_schema, write_text_whole
from ckptplan.units import GIB, MIB

CALIBRATION_SCHEMA = "ckptplan.calibration/1"

# Kinds of work that have rates of their own.
MATRIX, ATTENTION, CONVOLUTION = "matrix", "attention", "convolution"
POINTWISE, TRANSCENDENTAL, NORM = "pointwise", "transcendental", "norm"
BY_FLOPS = (MATRIX, ATTENTION, CONVOLUTION)
BY_BYTES = (POINTWISE, TRANSCENDENTAL, NORM)


@dataclass(frozen=True)
class Share:
    """How much of a rate kernels reach: at the least, likely, at the most."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Device:
    """A device by its data sheet.

    Attributes:
        memory_bytes: what PyTorch sees of its memory (``total capacity`` in its messages), less than what is sold.
        context_bytes: what the CUDA context and its libraries take outside PyTorch's allocator.
        workspace_bytes: of cuBLAS and cuBLASLt, allocated once and kept.
        flops_per_s: of dense matrix products by dtype, without sparsity; float32 is without TF32, PyTorch's default.
        bandwidth_bytes_per_s: of its memory.
        matrix, attention, bandwidth: how much of these rates kernels reach.
        host_link_bytes_per_s: to or from the host's memory, each way: 16 lanes of PCIe 4.0 (16 GT/s, 128b/130b) or 5.0.
        host_link: how much of that copies from pinned memory reach.
        launch_s: host time of one operator of eager PyTorch, at least, likely, at most.
        source: of the figures.
    """

    name: str
    title: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    matrix: Share
    attention: Share
    workspace_bytes: int
    source: str
    bandwidth: Share = Share(0.70, 0.80, 0.92)
    launch_s: Share = Share(3e-6, 5e-6, 10e-6)
    context_bytes: int = 600 * MIB
    host_link_bytes_per_s: float = 31.5e9
    host_link: Share = Share(0.70, 0.80, 0.90)

    def transfer_s(self, size_bytes: int) -> float:
        """Seconds that a copy to or from pinned memory of the host likely takes."""
        return size_bytes / (self.host_link_bytes_per_s * self.host_link.mid)


_HOPPER: dict[str, Any] = {
    "host_link_bytes_per_s": 63.0e9,  # the data sheets give PCIe Gen5, 128 GB/s both ways together
    # cuBLAS recommends 32 MiB on Hopper; PyTorch holds one such workspace for cuBLAS and one for cuBLASLt.
    "workspace_bytes": 64 * MIB,
    # MAMF, the most that a search over shapes found (Bekman, Machine Learning Engineering): 0.80 of 989.
    "matrix": Share(0.50, 0.65, 0.80),
    # FlashAttention-3's abstract gives 35 % for FlashAttention-2, which PyTorch runs, on an H100.
    "attention": Share(0.28, 0.35, 0.42),
}
_AMPERE: dict[str, Any] = {
    "workspace_bytes": 10 * MIB,  # PyTorch's default outside Hopper, 8.1 MiB, and 1 MiB for cuBLASLt
    "matrix": Share(0.55, 0.72, 0.87),  # MAMF: 271 of 312 on an A100 SXM
    "attention": Share(0.45, 0.58, 0.73),  # FlashAttention-2's abstract: 50 to 73 % on an A100
}
_ADA: dict[str, Any] = {
    "workspace_bytes": 10 * MIB,
    "matrix": Share(0.50, 0.68, 0.85),  # as Ampere's, and lower where power limits the clock
    "attention": Share(0.40, 0.55, 0.70),
}


def _rates(half: float, single: float, tf32: float) -> Mapping[str, float]:
    """By dtype, from TFLOP/s; double precision is not planned for."""
    return MappingProxyType(
        {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12, "tf32": tf32 * 1e12}
    )


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "h200",
                "NVIDIA H200 SXM, 141 GB",
                memory_bytes=int(139.8 * GIB),
                flops_per_s=_rates(989.4, 66.9, 494.7),
                bandwidth_bytes_per_s=4.8e12,
                source="NVIDIA H200 data sheet (SXM): 141 GB, 4.8 TB/s, 1,979 TFLOP/s bf16 with sparsity, half dense",
                **_HOPPER,
            ),
            Device(
                "h100",
                "NVIDIA H100 SXM, 80 GB",
                memory_bytes=int(79.1 * GIB),
                flops_per_s=_rates(989.4, 66.9, 494.7),
                bandwidth_bytes_per_s=3.35e12,
                source="NVIDIA H100 data sheet (SXM): 80 GB, 3.35 TB/s, 1,979 TFLOP/s bf16 with sparsity, half dense",
                **_HOPPER,
            ),
            Device(
                "h100_pcie",
                "NVIDIA H100 PCIe, 80 GB",
                memory_bytes=int(79.1 * GIB),
                flops_per_s=_rates(756.5, 51.2, 378.0),
                bandwidth_bytes_per_s=2.0e12,
                source="NVIDIA H100 data sheet (PCIe): 80 GB, 2 TB/s, 1,513 TFLOP/s bf16 with sparsity, half dense",
                **_HOPPER,
            ),
            Device(
                "a100",
                "NVIDIA A100 SXM, 80 GB",
                memory_bytes=int(79.1 * GIB),
                flops_per_s=_rates(312.0, 19.5, 156.0),
                bandwidth_bytes_per_s=2.039e12,
                source="NVIDIA A100 data sheet (SXM, 80 GB): 2,039 GB/s, 312 TFLOP/s bf16, 19.5 fp32, dense",
                **_AMPERE,
            ),
            Device(
                "a100_40gb",
                "NVIDIA A100, 40 GB",
                memory_bytes=int(39.4 * GIB),
                flops_per_s=_rates(312.0, 19.5, 156.0),
                bandwidth_bytes_per_s=1.555e12,
                source="NVIDIA A100 data sheet (40 GB): 1,555 GB/s, 312 TFLOP/s bf16, 19.5 fp32, dense",
                **_AMPERE,
            ),
            Device(
                "l40s",
                "NVIDIA L40S, 48 GB",
                memory_bytes=int(44.4 * GIB),
                flops_per_s=_rates(362.05, 91.6, 183.0),
                bandwidth_bytes_per_s=864e9,
                source="NVIDIA L40S data sheet: 48 GB (ECC on), 864 GB/s, 733 TFLOP/s bf16 with sparsity, half dense",
                **_ADA,
            ),
            Device(
                "a10g",
                "NVIDIA A10G, 24 GB",
                memory_bytes=int(22.0 * GIB),
                flops_per_s=_rates(70.0, 35.0, 35.0),
                bandwidth_bytes_per_s=600e9,
                source="NVIDIA A10G data sheet: 24 GB (ECC on), 600 GB/s, 70 TFLOP/s bf16 dense, 35 fp32",
                **_AMPERE,
            ),
            Device(
                "rtx4090",
                "NVIDIA GeForce RTX 4090, 24 GB",
                memory_bytes=int(23.5 * GIB),
                flops_per_s=_rates(165.2, 82.6, 82.6),
                bandwidth_bytes_per_s=1008e9,
                source="NVIDIA Ada architecture white paper: 24 GB, 1,008 GB/s, 165.2 TFLOP/s bf16 dense (fp32 sums)",
                **_ADA,
            ),
            Device(
                "rtx3090",
                "NVIDIA GeForce RTX 3090, 24 GB",
                memory_bytes=int(23.5 * GIB),
                flops_per_s=_rates(71.0, 35.6, 35.6),
                bandwidth_bytes_per_s=936e9,
                source="NVIDIA GA102 white paper: 24 GB, 936 GB/s, 71 TFLOP/s bf16 dense (fp32 sums), 35.6 fp32",
                **_AMPERE,
            ),
        )
    }
)


def device_named(name: str) -> Device:
    """Raises ``ValueError`` with the nearest name for one that the table does not have."""
    key = name.lower().replace("-", "").replace(" ", "")
    if key in DEVICES:
        return DEVICES[key]
    close = difflib.get_close_matches(key, DEVICES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"device={name!r} is not in the table of devices{hint} It has {', '.join(DEVICES)}")


# Measured on a device ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Seconds that an operator takes by the size of its work (FLOPs or bytes), rising; measured.

    Between points the time is a power of the size; beyond the ends it grows as the size does, but is never below that
    of the smallest point, where it is the operator's own overhead.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        good = len(self.sizes) == len(self.seconds) > 0 and list(self.sizes) == sorted(set(self.sizes))
        if not good or min(self.sizes) <= 0 or min(self.seconds) <= 0:
            raise ValueError(f"a curve needs as many times as rising sizes, all above 0; got {self}")

    def at(self, size: float) -> float:
        """Seconds for work of this size."""
        at = bisect.bisect_left(self.sizes, size)
        if at == 0:
            return self.seconds[0]
        if at == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        (x0, x1), (y0, y1) = self.sizes[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        along = math.log(size / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** along


@dataclass(frozen=True)
class Calibration:
    """Measured times of operators on one device.

    Attributes:
        device: its name, as PyTorch gives it.
        kind: "cpu" or "cuda".
        curves: by "<kind of work> <dtype>", such as "matrix bfloat16" (FLOPs) and "pointwise float32" (bytes).
        spread: relative, between repetitions of one measurement (the median over all of them).
        memory_bytes: of the device.
        settings: torch's version, threads and whatever else decides the times.
    """

    device: str
    kind: str
    curves: dict[str, Curve]
    spread: float
    memory_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical text."""
        curves = {name: {"sizes": list(c.sizes), "seconds": list(c.seconds)} for name, c in self.curves.items()}
        return canonical_json({"schema": CALIBRATION_SCHEMA, **vars(self), "curves": curves}) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all."""
        write_text_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Raises ``ValueError`` for what is no calibration, ``OSError`` for no file."""
        data = parse_json_object(Path(path).read_text(encoding="utf-8"), str(path))
        require_schema(data, CALIBRATION_SCHEMA, str(path))
        curves = data.get("curves")
        if not isinstance(curves, dict) or not curves:
            raise ValueError(f"{path}: curves is {curves!r}; expected an object of measured curves")
        data["curves"] = {name: decode_dataclass(Curve, c, f"{path}: curves[{name!r}]") for name, c in curves.items()}
        return decode_dataclass(cls, data, str(path))


# Time of an operator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Seconds of an operator on a device, under one assumption of what its kernels reach.

    By the data sheet: max(FLOPs / (rate * share), bytes / (bandwidth * share)) + launch. Calibrated: the measured
    curve, faster or slower by its spread.

    Attributes:
        share: "low", "mid" or "high".
    """

    device: Device | None
    calibration: Calibration | None = None
    share: str = "mid"

    def seconds(self, kind: str, dtype: str, flops: float, size_bytes: float) -> float:
        """Of one operator: its kind of work, the dtype of its inputs, its FLOPs, the bytes that it reads and writes."""
        if self.calibration is not None:
            slower = {"low": 1 + self.calibration.spread, "mid": 1.0, "high": 1 / (1 + self.calibration.spread)}
            curve = _curve(self.calibration, kind, dtype)
            if curve is not None:
                return curve.at(flops if kind in BY_FLOPS else size_bytes) * slower[self.share]
        if self.device is None:
            raise ValueError(f"the calibration has no curve for {kind} of {dtype}, and there is no data sheet")
        rate = self.device.flops_per_s.get(dtype, self.device.flops_per_s["float32"])
        of_rate = getattr(self.device.attention if kind == ATTENTION else self.device.matrix, self.share)
        bandwidth = self.device.bandwidth_bytes_per_s * getattr(self.device.bandwidth, self.share)
        launch_s = getattr(self.device.launch_s, {"low": "high", "mid": "mid", "high": "low"}[self.share])
        return max(flops / (rate * of_rate), size_bytes / bandwidth) + float(launch_s)


def _curve(calibration: Calibration, kind: str, dtype: str) -> Curve | None:
    """The nearest one measured: of the same dtype, else of float32; convolutions and attention as matrix products."""
    for name in (kind, MATRIX if kind in BY_FLOPS else POINTWISE):
        for of in (dtype, "float32"):
            if f"{name} {of}" in calibration.curves:
                return calibration.curves[f"{name} {of}"]
    return None
