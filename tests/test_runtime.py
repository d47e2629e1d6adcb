"""Device, number format, threads, seed and determinism of a run."""

from __future__ import annotations

import random

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
