"""Device, number format, threads, seed and determinism of a run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptplan.config import DType, RuntimeConfig
from ckptplan.errors import ConfigError
from ckptplan.runtime import choose_runtime


@pytest.fixture(autouse=True)
def _settings_put_back():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def other_process_takes_a_device(folder: str) -> subprocess.Popen[str]:
    """Prints the number that it got, and keeps it until its input ends."""
    program = (
        "import sys, tempfile, torch; tempfile.tempdir = sys.argv[1]\n"
        "torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2\n"
        "torch.cuda.get_device_properties = lambda number: number\n"
        "from ckptplan.runtime import free_cuda_device\n"
        "print(free_cuda_device(), free_cuda_device(), flush=True); sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: number)
    monkeypatch.setattr("ckptplan.runtime._taken", {})
    return tmp_path


def test_each_process_takes_a_device_of_its_own_and_gives_it_back_when_it_ends(two_devices: Path) -> None:
    from ckptplan.runtime import free_cuda_device

    with (
        other_process_takes_a_device(str(two_devices)) as first,
        other_process_takes_a_device(str(two_devices)) as other,
    ):
        numbers = {process.stdout.readline().strip() for process in (first, other)}  # type: ignore[union-attr]
        assert numbers == {"0 0", "1 1"}, "and the same one when it asks again"
        with pytest.raises(ConfigError, match="other runs have taken all 2 CUDA devices"):
            free_cuda_device()
        for process in (first, other):
            process.communicate("")
    assert free_cuda_device() == 0


def test_without_a_cuda_device_there_is_no_free_one() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.device=cuda:free: this PyTorch sees no CUDA device"):
        choose_runtime(RuntimeConfig(device="cuda:free"), 0)


@pytest.mark.parametrize(
    ("dtype", "parameters", "autocast"),
    [
        (DType.float32, torch.float32, None),
        (DType.bfloat16, torch.bfloat16, None),
        (DType.bf16_mixed, torch.float32, torch.bfloat16),
    ],
)
def test_the_number_format_says_what_weights_and_products_have(dtype, parameters, autocast) -> None:
    runtime = choose_runtime(RuntimeConfig(device="cpu", dtype=dtype), 0)
    assert (runtime.parameter_dtype, runtime.autocast_dtype) == (parameters, autocast)
    assert runtime.device == torch.device("cpu")
    assert runtime.device_name == "cpu"
    assert dtype.value in runtime.explanation


def test_fp16_on_a_cpu_is_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"runtime.dtype=.*fp16_mixed[\s\S]*runtime.dtype=bf16_mixed"):
        choose_runtime(RuntimeConfig(device="cpu", dtype=DType.fp16_mixed), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told where no CUDA device is")
def test_auto_explains_its_choice_and_a_missing_device_is_named() -> None:
    runtime = choose_runtime(RuntimeConfig(device="auto"), 0)
    assert runtime.explanation.startswith("cpu (no CUDA device here), float32, deterministic kernels")
    with pytest.raises(ConfigError, match=r"cuda[\s\S]*sees 0 CUDA devices[\s\S]*runtime.device=cpu"):
        choose_runtime(RuntimeConfig(device="cuda"), 0)
    with pytest.raises(ConfigError, match="cuda:7"):
        choose_runtime(RuntimeConfig(device="cuda:7"), 0)


def test_every_stream_is_seeded() -> None:
    draws = []
    for seed in (5, 5, 6):
        choose_runtime(RuntimeConfig(device="cpu"), seed)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_threads_and_determinism_are_set() -> None:
    runtime = choose_runtime(RuntimeConfig(device="cpu", threads=2, deterministic=True), 0)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert "2 threads" in runtime.explanation
    runtime = choose_runtime(RuntimeConfig(device="cpu", threads=1, deterministic=False), 0)
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert "kernels as they come" in runtime.explanation
