"""The meters against counts by hand, against each other, and the parts of torch that they stand on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import profiler

from ckptplan.memory import CpuAllocatorMeter, LiveStorageMeter, MemoryMeter, make_meter
from tests.tracker import LiveBytes

KIB, MIB = 2**10, 2**20


@pytest.fixture(params=[CpuAllocatorMeter, LiveStorageMeter])
def meter(request: pytest.FixtureRequest) -> MemoryMeter:
    return request.param()


def test_peaks_and_levels_of_a_few_products_are_as_counted_by_hand(meter: MemoryMeter) -> None:
    a = torch.randn(256, 256)  # 256 KiB each
    with meter:
        meter.mark("start")
        b = a @ a  # 1 alive
        c = b @ b  # 2 alive
        meter.mark("two")
        del b  # 1 alive
        meter.mark("one")
        d = torch.cat([c, c, c])  # 1 + 3 alive
        del c  # 3 alive
        meter.mark("three")
        del d
        meter.mark("none")
    levels = [meter.level(name) // KIB for name in ("start", "two", "one", "three", "none")]
    assert levels == [0, 512, 256, 768, 0]
    assert meter.peak("start", "two") == 512 * KIB
    assert meter.peak("two", "one") == 512 * KIB  # what is alive at a stretch's start counts to it
    assert meter.peak("one", "three") == 1024 * KIB
    assert meter.peak("three", "none") == 768 * KIB
    assert meter.peak("start", "none") == 1024 * KIB


def test_bytes_that_stood_before_are_not_followed(meter: MemoryMeter) -> None:
    a = torch.randn(256, 256)
    with meter:
        meter.mark("start")
        del a
        b = torch.ones(64)
        meter.mark("end")
    assert meter.level("end") - meter.level("start") == b.numel() * 4
    assert meter.peak("start", "end") == b.numel() * 4


def test_views_count_nothing_and_in_place_results_neither(meter: MemoryMeter) -> None:
    a = torch.randn(256, 256)
    with meter:
        meter.mark("start")
        b = (a @ a).view(-1)[10:].add_(1.0)
        meter.mark("end")
    assert meter.level("end") == 256 * KIB
    assert b.numel() == 256 * 256 - 10


def test_both_meters_and_the_tests_tracker_agree_on_a_transformer_block() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    x = torch.randn(4, 64, 64, requires_grad=True)

    def step() -> None:
        block(x).square().mean().backward()

    step()  # gradients are there from now on
    peaks = []
    for meter in (CpuAllocatorMeter(), LiveStorageMeter()):
        with meter:
            meter.mark("start")
            step()
            meter.mark("end")
        assert meter.level("end") == 0
        peaks.append(meter.peak("start", "end"))
    tracker = LiveBytes()
    with tracker:
        step()
    allocator, live = peaks
    assert live == tracker.peak
    assert live <= allocator <= live + 0.1 * MIB
    assert live > 1 * MIB


def test_only_the_allocator_sees_a_convolutions_workspace() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(16, 16, 3, padding=1), torch.randn(4, 16, 32, 32)
    output_bytes = 4 * 16 * 32 * 32 * 4
    peaks = []
    for meter in (CpuAllocatorMeter(), LiveStorageMeter()):
        with meter, torch.no_grad():
            meter.mark("start")
            conv(x)
            meter.mark("end")
        peaks.append(meter.peak("start", "end"))
    assert peaks[1] == output_bytes
    assert peaks[0] > 1.1 * output_bytes


def test_the_live_meter_counts_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    meter = LiveStorageMeter()
    with FakeTensorMode():
        a = torch.empty(1 << 20, 1 << 10)  # 4 GiB that nobody has
        with meter:
            meter.mark("start")
            b = a + 1
            meter.mark("end")
    assert meter.peak("start", "end") == 4 * 2**30 == b.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("device", "kind", "name"), [("cpu", "auto", "cpu"), ("cpu", "cpu", "cpu"), ("cpu", "live", "live")]
)
def test_the_right_meter_is_made(device: str, kind: str, name: str) -> None:
    assert make_meter(device, kind).name == name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("vram", "memory='vram' is not a meter; expected one of auto, cpu, cuda, live, off"),
        ("cuda", "memory='cuda' cannot measure device cpu; use memory='auto' or 'live'"),
    ],
)
def test_a_wrong_meter_is_named_with_what_is_allowed(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_meter("cpu", kind)


def test_an_error_inside_the_meter_comes_through_and_the_next_meter_works() -> None:
    with pytest.raises(KeyError, match="mine"), CpuAllocatorMeter():
        {}["mine"]
    meter = CpuAllocatorMeter()
    with meter:
        meter.mark("start")
        a = torch.ones(1024)
        meter.mark("end")
    assert meter.level("end") == a.numel() * 4


def test_the_names_of_torch_that_the_meters_use_are_there() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert hasattr(TorchDispatchMode, "__torch_dispatch__")
    with profiler.profile(use_cpu=True, profile_memory=True) as profile:
        torch.ones(1024)
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    assert [e.nbytes() for e in events] == [4096, -4096]
    assert all(e.device_type() == torch.autograd.DeviceType.CPU for e in events)
    assert events[0].start_ns() <= events[1].start_ns()


def test_the_profiler_prints_nothing() -> None:
    code = (
        "import torch; from ckptplan.memory import CpuAllocatorMeter\n"
        "for _ in range(3):\n"
        "    with CpuAllocatorMeter() as meter:\n"
        "        meter.mark('a'); torch.ones(8); meter.mark('b')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_cuda_meter_reads_the_allocator_at_every_mark_and_resets_its_peak(monkeypatch):
    # No device here: a hand-driven allocator stands for CUDA's, so that the arithmetic is tried everywhere.
    from ckptplan.memory import CudaAllocatorMeter

    allocated, peak = [100], [100]

    def use(level: int) -> None:
        allocated[0] = level
        peak[0] = max(peak[0], level)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: peak[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: peak.__setitem__(0, allocated[0]))
    with CudaAllocatorMeter(torch.device("cuda", 0)) as meter:
        meter.mark("start")
        use(700)
        use(300)
        meter.mark("forward")
        use(450)
        use(120)
        meter.mark("end")
    assert (meter.level("start"), meter.level("forward"), meter.level("end")) == (0, 200, 20)
    assert meter.peak("start", "forward") == 600
    assert meter.peak("forward", "end") == 350
    assert meter.peak("start", "end") == 600
    assert meter.reserved_peak_bytes == 1400


def test_memory_from_before_that_is_let_go_of_counts_nothing_whatever_the_profiler_remembers() -> None:
    """Torch remembers sizes by address: what a meter saw and nobody took off since comes up again, by chance."""
    levels = []
    for _ in range(50):
        with CpuAllocatorMeter():
            held = torch.ones(16384)
        del held
        held = torch.ones(16384)  # often at the same address
        meter = CpuAllocatorMeter()
        with meter:
            meter.mark("start")
            del held
            meter.mark("end")
        levels.append((meter.level("end"), meter.peak("start", "end")))
    assert set(levels) == {(0, 0)}
