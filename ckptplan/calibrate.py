"""Measure what a device does per second: ``python -m ckptplan.calibrate FILE``, in about a minute.

The file replaces the data sheet's rates in plans for that device (``runtime.calibration=FILE``, or
``estimate_profile(..., calibration=Calibration.load(FILE))``). It also works on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ckptplan.devices import (
    ATTENTION,
    CONVOLUTION,
    MATRIX,
    NORM,
    POINTWISE,
    TRANSCENDENTAL,
    Calibration,
    Curve,
)

Run = Callable[[], object]
# One measurement: its kind of work, its size (FLOPs or bytes), and the operator.
Case = tuple[str, float, Run]

LEAST_BATCH_S = 2e-3  # a measurement repeats an operator until so much time has gone
NUM_REPETITIONS = 7


def calibrate(device: torch.device, *, largest: float = 1.0, say: Callable[[str], object] = print) -> Calibration:
    """Times of operators on ``device`` over their sizes, in float32 and, where it has products of it, bfloat16.

    Args:
        largest: factor on the largest sizes, for a quick try.
    """
    curves: dict[str, Curve] = {}
    spreads: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        points: dict[str, list[tuple[float, float]]] = {}
        for kind, size, run in _cases(device, dtype, largest):
            seconds, spread = _seconds(run, device)
            points.setdefault(kind, []).append((size, seconds))
            spreads.append(spread)
        for kind, of_kind in points.items():
            of_kind.sort()
            curves[f"{kind} {name}"] = Curve(tuple(s for s, _ in of_kind), tuple(t for _, t in of_kind))
            size, seconds = of_kind[-1]
            say(f"{kind} {name}: {size / seconds:.3g} a second at the largest size, {of_kind[0][1] * 1e6:.3g} us least")
    is_cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else _host_bytes()
    return Calibration(
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        kind=device.type,
        curves=curves,
        spread=statistics.median(spreads),
        memory_bytes=int(memory),
        settings={"torch": torch.__version__, "threads": torch.get_num_threads()},
    )


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _seconds(run: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of one call, the least of several batches of calls, and the relative distance of their median from it."""

    def batch(count: int) -> float:
        _wait(device)
        start_s = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        return (time.perf_counter() - start_s) / count

    once = min(batch(1) for _ in range(3))
    count = max(1, int(LEAST_BATCH_S / once))
    found = sorted(batch(count) for _ in range(NUM_REPETITIONS))
    return found[0], statistics.median(found) / found[0] - 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cases(device: torch.device, dtype: torch.dtype, largest: float) -> Iterator[Case]:
    """Sizes in steps of four, small ones too: there an operator's own overhead decides."""
    big = largest * (16.0 if device.type == "cuda" else 1.0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    for width in _steps(16, 512 * big**0.34):
        product = functools.partial(torch.addmm, made(width), made(4 * width, width), made(width, width))
        yield MATRIX, 2.0 * 4 * width**3, product
    for length in _steps(32, 512 * big**0.5):
        heads = made(2, 4, length, 32)
        attend = functools.partial(F.scaled_dot_product_attention, heads, heads, heads)
        yield ATTENTION, 2.0 * 2 * 2 * 4 * length * length * 32, attend
    for side in _steps(8, 32 * big**0.5):
        convolve = functools.partial(F.conv2d, made(4, 16, side, side), made(16, 16, 3, 3), padding=1)
        yield CONVOLUTION, 2.0 * 4 * 16 * 16 * 9 * side**2, convolve
    for rows in _steps(4, 2**13 * big):
        x, scale = made(rows, 256), made(256)
        size_bytes = float(x.numel() * x.element_size())
        yield POINTWISE, 3 * size_bytes, functools.partial(torch.add, x, x)
        yield TRANSCENDENTAL, 2 * size_bytes, functools.partial(F.gelu, x)
        yield NORM, 2 * size_bytes, functools.partial(F.layer_norm, x, (256,), scale, scale)


def _steps(first: int, last: float) -> Iterator[int]:
    size = first
    while size <= max(first, last):
        yield size
        size *= 2 if last / first <= 64 else 4


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ckptplan.calibrate", description=__doc__)
    parser.add_argument("file", help="where the measurements are written, such as h100.json")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    given = parser.parse_args(arguments)
    where = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(where)
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
            raise RuntimeError(f"this PyTorch ({torch.__version__}) has no such device")
    except RuntimeError as error:
        print(f"--device {where}: {error}; use --device cpu, or a PyTorch with CUDA", file=sys.stderr)
        return 2
    found = calibrate(device)
    found.save(given.file)
    print(f"{given.file}: {found.device}, measurements scatter by {found.spread:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
