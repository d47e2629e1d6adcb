"""What profiling measures, against torch's hooks, hand formulas and the predecessor's figures; what it leaves."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.apply import apply_plan
from ckptplan.benchmark import run_benchmark
from ckptplan.blocks import declare_blocks
from ckptplan.check import check_plan
from ckptplan.errors import NoDifferentiableOutputError, TimingOnlyProfileError
from ckptplan.measure import profile_blocks, profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.chains import DropoutBlock, Residual, declared, mean_square
from tests.tracker import step_peak


def profile(modules: list[nn.Module], x: Any, **options: Any) -> ChainProfile:
    inputs = x if isinstance(x, tuple) else (x,)
    return profile_blocks(declared(modules), inputs, **{"device": "cpu", "num_warmup": 0, "num_trials": 1} | options)


# --- P14: saved bytes against saved-tensor hooks ---


def saved_by_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes of the distinct storages that autograd saves, parameters, inputs and the output itself left out."""
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*args, **kwargs)
    outside = [
        *module.parameters(),
        *module.buffers(),
        *(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)),
    ]
    outputs = output if isinstance(output, tuple) else (output,)
    for tensor in (*outside, *(o for o in outputs if isinstance(o, Tensor))):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


class UnusedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Narrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FrozenTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


IMAGE = torch.randn(2, 4, 8, 8)
BOUNDARIES: dict[str, tuple[nn.Module, Tensor]] = {
    "narrowing to 64": (Narrowing(), torch.randn(16, 64)),
    "1024 to 64": (nn.Sequential(nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(16, 1024)),
    "max pooling": (nn.MaxPool2d(2), IMAGE),
    "unused mask": (UnusedMask(), torch.randn(4, 8)),
    "one tensor as query, key and value": (SelfAttention(), torch.randn(2, 5, 16)),
    "frozen": (FrozenTail(), torch.randn(4, 8)),
    "strided convolution": (nn.Conv2d(4, 8, 3, stride=2), IMAGE),
    "norm and dropout": (nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(4, 8)),
    "in place": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), torch.randn(4, 8)),
    "batch norm": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), IMAGE),
}


@pytest.mark.parametrize("name", list(BOUNDARIES))
@pytest.mark.parametrize("meter", ["cpu", "live"])
def test_saved_bytes_are_what_saved_tensor_hooks_count_by_storage(name: str, meter: str) -> None:
    module, x = BOUNDARIES[name]
    first = nn.Conv2d(4, 4, 1) if x.ndim == 4 else nn.Linear(x.shape[-1], x.shape[-1])
    found = profile([first, module], x, memory=meter)[1]
    inner = x.clone().requires_grad_() * 1
    expected = saved_by_hooks(module, inner)
    assert found.keep.saved_bytes == expected
    if name in ("narrowing to 64", "1024 to 64", "max pooling", "one tensor as query, key and value", "batch norm"):
        assert expected > 0


def test_an_embedding_keeps_its_indices_only() -> None:
    tokens = torch.randint(0, 10, (4, 6))
    found = profile([nn.Embedding(10, 8), nn.Linear(8, 8)], tokens)
    assert found[0].keep.saved_bytes == 0  # the tokens stand before the step
    assert found[0].output_bytes == (4 * 6 * 8 * 4,)
    assert found[1].keep.keeps_input == (True,)


def test_the_estimate_counts_a_kept_output_once() -> None:
    found = profile([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], torch.randn(4, 8))
    assert [b.activation_bytes_estimate for b in found] == [0, 128, 0]
    assert [b.keep.keeps_output for b in found] == [(False,), (True,), (False,)]


# --- the predecessor's snippet (docs/design.md, section 6) ---


def test_the_predecessors_calls_run_as_they_stand_with_their_figures() -> None:
    model = torch.nn.ModuleList(
        [
            torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True)
            for _ in range(4)
        ]
    )
    inputs = (torch.randn(2, 32, 64),)
    blocks = declare_blocks(model, [(f"layer{i}", layer) for i, layer in enumerate(model)])
    profiles = profile_blocks(blocks, inputs, device="cpu", dtype=torch.float32, num_warmup=1, num_trials=2)
    total = sum(p.activation_bytes_estimate or 0 for p in profiles)
    plan = plan_checkpoints(
        profiles,
        blocks,
        target_kind="activation_budget_bytes",
        target_value=total // 2,
        planner="dynamic_programming",
    )
    container = apply_plan(blocks, plan, inputs, None)
    output = container(*inputs)
    result = run_benchmark(
        blocks,
        plan,
        inputs,
        None,
        lambda out: out.float().square().mean(),
        device="cpu",
        dtype=torch.float32,
        check_correctness=True,
        num_warmup=1,
        num_trials=2,
    )
    assert (total, total // 2) == (794_624, 397_312)
    assert [d.checkpointed for d in plan.decisions] == [True, True, True, False]
    assert plan.predicted_peak_bytes <= 397_312
    assert output.shape == (2, 32, 64)
    assert result.correctness_passed
    assert result.bitwise_equal
    assert result.activation_peak_bytes <= 397_312
    # the loss is assumed to cost the gradient of the output only
    assert result.activation_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert result.peak_allocated_bytes > result.activation_peak_bytes
    assert result.step_latency_ms_mean > 0


def test_with_the_loss_measured_prediction_and_measurement_are_equal() -> None:
    blocks = declared([Residual(64) for _ in range(3)])
    x = torch.randn(64, 64)
    found = profile_blocks(
        blocks, (x,), device="cpu", num_warmup=0, num_trials=1, memory="live", make_target=mean_square
    )
    assert found.loss_region == "measured"
    for text in ("K0 K1 K2", "R(0) K1 R(2)", "R(0 1) K2"):
        plan = CheckpointPlan.from_text(text, found)
        container = apply_plan(blocks, plan, (x,))
        measured = step_peak(lambda c=container: mean_square(c(x)), container.parameters())
        assert simulate_plan(found, plan).peak_bytes == measured


def test_the_loss_is_assumed_unless_given_and_makes_a_difference() -> None:
    modules = [nn.Linear(64, 64) for _ in range(3)]
    x = torch.randn(256, 64)
    assumed = profile(modules, x)
    summed = profile(modules, x, make_target=lambda out: out.sum())
    squared = profile(modules, x, make_target=mean_square)
    assert assumed.loss_region == "assumed"
    assert assumed.post is None
    assert summed.loss_region == squared.loss_region == "measured"
    keep_all = CheckpointPlan.from_text("K0 K1 K2", assumed)
    peaks = [simulate_plan(p, keep_all).peak_bytes for p in (summed, assumed, squared)]
    # the gradient of a sum is one expanded number, that of a mean of squares stands beside the kept output
    assert peaks[0] < peaks[1] < peaks[2]
    for found, loss in ((summed, lambda out: out.sum()), (squared, mean_square)):
        chain = nn.Sequential(*modules)
        measured = step_peak(lambda loss=loss, chain=chain: loss(chain(x)), chain.parameters())
        live = profile(modules, x, make_target=loss, memory="live")
        assert simulate_plan(live, keep_all).peak_bytes == pytest.approx(measured, abs=4)  # the loss's own gradient
        real = run_benchmark(declared(modules), keep_all, (x,), None, loss, device="cpu", num_warmup=0, num_trials=1)
        assert simulate_plan(found, keep_all).peak_bytes == pytest.approx(real.activation_peak_bytes, abs=4)


def test_an_output_that_nobody_uses_costs_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, torch.tanh(y)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Two() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x

    net, x = Net(), torch.randn(128, 64)
    blocks = declare_blocks(net, [(f"layers.{i}", layer) for i, layer in enumerate(net.layers)])
    found = profile_model(net, blocks, x, lambda m, b: mean_square(m(b)), num_warmup=0, num_trials=1, memory="live")
    assert found[0].output_gradient_bytes == 128 * 64 * 4
    measured = step_peak(lambda: mean_square(net(x)), net.parameters())
    assert simulate_plan(found, CheckpointPlan.from_text("K0 K1 K2", found)).peak_bytes == measured


# --- P13 and FLOPs ---


def test_twelve_identical_blocks_get_the_same_plan_in_every_profile() -> None:
    modules: list[nn.Module] = [Residual(32) for _ in range(12)]
    x = torch.randn(16, 64, requires_grad=True)
    plans = set()
    for _ in range(3):
        found = profile(modules, x, num_trials=2)
        assert len({b.recompute_time_ms for b in found}) == 1
        plan = plan_checkpoints(found, target_kind="activation_budget_fraction", target_value=0.5)
        plans.add(plan.text)
    assert len(plans) == 1


def test_identical_blocks_whose_first_input_needs_no_gradient_share_their_times_too() -> None:
    found = profile([Residual(32) for _ in range(5)], torch.randn(16, 64), num_trials=3)
    assert len({b.kind for b in found}) == 2  # the first block's backward makes no gradient of its input
    assert len({b.recompute_time_ms for b in found}) == 1


def test_flops_of_linear_layers_are_exact_and_early_stop_leaves_the_last_one_out() -> None:
    rows, width, hidden = 8, 16, 64
    block = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    found = profile([nn.Linear(width, width), block], torch.randn(rows, width))[1]
    one, two = 2 * rows * width * hidden, 2 * rows * hidden * width
    assert found.forward_flops == one + two
    assert found.backward_flops == 2 * (one + two)  # of the input and of the weight, for each
    assert found.recompute_flops == one < found.forward_flops


def test_flops_of_attention_are_counted_on_a_cpu_too() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)

    batch, length, heads, width = 2, 32, 4, 4
    found = profile([nn.Linear(16, 16), Attend()], torch.randn(batch, length, 16))[1]
    linear = 2 * batch * length * 16 * 48
    product = 2 * batch * heads * length * length * width
    assert found.forward_flops == linear + 2 * product
    assert found.backward_flops == 2 * linear + 5 * product


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (1, 2)])
def test_flops_of_lstms_are_counted_on_a_cpu_too(layers: int, directions: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(16, 24, layers, batch_first=True, bidirectional=directions == 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    batch, length = 2, 8
    found = profile([nn.Linear(16, 16), Recurrent()], torch.randn(batch, length, 16))[1]
    widths = [16, *[24 * directions] * (layers - 1)]
    forward = sum(directions * 2 * batch * length * (4 * 24) * (width + 24) for width in widths)  # four gates
    assert found.forward_flops == forward
    assert found.backward_flops == 2 * forward


def test_a_convolution_counts_two_operations_per_weight_and_output_pixel() -> None:
    found = profile([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, stride=2)], torch.randn(2, 4, 9, 9))[1]
    forward = 2 * (2 * 8 * 4 * 4) * (4 * 3 * 3)
    assert found.forward_flops == forward
    assert found.backward_flops == 2 * forward


# --- options ---


def test_a_profile_without_memory_says_so_and_no_plan_is_made_from_it() -> None:
    found = profile([nn.Linear(8, 8) for _ in range(2)], torch.randn(4, 8), memory="off")
    assert found.meter == "off"
    assert all(b.timing_only and b.keep is None and b.activation_bytes_estimate is None for b in found)
    assert all(b.forward_time_ms > 0 for b in found)
    with pytest.raises(TimingOnlyProfileError, match="b0"):
        plan_checkpoints(found, target_kind="activation_budget_bytes", target_value=100)


def test_the_live_meter_leaves_workspaces_out() -> None:
    modules, x = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)], torch.randn(2, 4, 32, 32)
    live, allocator = profile(modules, x, memory="live"), profile(modules, x)
    assert (live.meter, allocator.meter) == ("live", "cpu")
    assert live[1].keep.forward_peak_bytes == 2 * 4 * 32 * 32 * 4
    assert allocator[1].keep.forward_peak_bytes > live[1].keep.forward_peak_bytes


def test_keywords_reach_every_block_that_takes_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = self.linear(x)
            return y if scale is None else torch.tanh(y * scale)

    blocks = declared([Scaled(), nn.Linear(8, 8), Scaled()])
    scale = torch.ones(8, requires_grad=True)
    found = profile_blocks(blocks, (torch.randn(4, 8),), {"scale": scale}, device="cpu", num_trials=1)
    plain = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_trials=1)
    for i in (0, 2):  # the product is saved too
        assert found[i].activation_bytes_estimate > plain[i].activation_bytes_estimate
    assert found[1].activation_bytes_estimate == plain[1].activation_bytes_estimate
    assert scale.grad is None


def test_autocast_is_part_of_what_is_measured() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(module(x))

    blocks = declare_blocks(model, [(str(i), m) for i, m in enumerate(model)])
    found = profile_model(model, blocks, torch.randn(32, 64), loss_fn, num_warmup=0, num_trials=1)
    assert found[1].output_bytes == (32 * 64 * 2,)
    assert found.environment["autocast"] == "torch.bfloat16, cache on"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"device": "cuda"}, RuntimeError, "sees no CUDA device"),
        ({"dtype": torch.float64}, ValueError, r"b0.weight is torch.float32, dtype=torch.float64 was asked for"),
        ({"num_trials": 0}, ValueError, "num_trials=0 is too small"),
        ({"num_trials": 1.5}, TypeError, "num_trials=1.5 is a float"),
        ({"num_warmup": True}, TypeError, "num_warmup=True is a bool"),
        ({"num_warmup": -1}, ValueError, "num_warmup=-1 is too small"),
        ({"memory": "vram"}, ValueError, "memory='vram' is not a meter"),
        ({"make_target": lambda out: out}, TypeError, r"the loss is a tensor of shape \(4, 8\)"),
        ({"make_target": lambda out: 3.0}, TypeError, "the loss is float"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        change = {"device": "cuda:99"}
        message = ""
    with pytest.raises(error, match=message):
        profile([nn.Linear(8, 8)], torch.randn(4, 8), **change)


def test_inputs_and_blocks_of_the_wrong_kind_are_named() -> None:
    blocks = declared([nn.Linear(8, 8)])
    with pytest.raises(TypeError, match="example_inputs is a Tensor; expected a tuple"):
        profile_blocks(blocks, torch.randn(4, 8), device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"blocks\[0\] is a Linear; expected what declare_blocks"):
        profile_blocks([nn.Linear(8, 8)], (torch.randn(4, 8),), device="cpu")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="blocks is a Sequential; expected what declare_blocks"):
        profile_blocks(nn.Sequential(nn.Linear(8, 8)), (torch.randn(4, 8),), device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="blocks is empty"):
        profile_blocks((), (torch.randn(4, 8),), device="cpu")
    with pytest.raises(ValueError, match=r"an example input of shape \(4, 8\) is on meta"):
        profile_blocks(blocks, (torch.randn(4, 8, device="meta"),), device="cpu")
    with pytest.raises(ValueError, match=r"b0.weight is on meta"):
        profile_blocks(declared([nn.Linear(8, 8, device="meta")]), (torch.randn(4, 8),), device="cpu")
    with pytest.raises(ValueError, match="has no shape yet"):
        profile_blocks(declared([nn.LazyLinear(8)]), (torch.randn(4, 8),), device="cpu")


def test_a_chain_without_any_gradient_is_refused() -> None:
    modules = [nn.Linear(8, 8).requires_grad_(False) for _ in range(2)]
    with pytest.raises(NoDifferentiableOutputError, match="all parameters frozen") as caught:
        profile(modules, torch.randn(4, 8))
    assert caught.value.block_ids == ("b0", "b1")


def test_profiling_works_under_no_grad_and_inference_mode() -> None:
    modules, x = [nn.Linear(8, 8), nn.Linear(8, 8)], torch.randn(4, 8)
    expected = profile(modules, x)[1].keep
    with torch.no_grad():
        assert profile(modules, x)[1].keep == expected
    with torch.inference_mode():
        assert profile(modules, x)[1].keep == expected
        assert profile(modules, torch.randn(4, 8))[1].keep == expected  # an inference tensor


# --- P9: what is left ---


class Watched(nn.Module):
    """Everything that a careless profiler disturbs."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.calls = 0
        self.history: list[int] = []
        self.fail_at = fail_at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise RuntimeError("midway")
        return x + self.inner(x) * random.random() * float(np.random.rand())  # noqa: NPY002


def everything(model: nn.Module, x: Tensor) -> dict[str, Any]:
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "objects": [id(p) for p in model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "training": [m.training for m in model.modules()],
        "attributes": [(m.calls, list(m.history)) for m in model.modules() if isinstance(m, Watched)],
        "forwards": ["forward" in vars(m) for m in model.modules()],
        "input": (x.clone(), x.requires_grad, None if x.grad is None else x.grad.clone(), x._version),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "gradient mode": torch.is_grad_enabled(),
    }


def same_state(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same_state(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


@pytest.mark.parametrize("fail_at", [None, 1, 2, 4, 7])
@pytest.mark.parametrize("action", ["profile", "benchmark", "validate and apply"])
def test_nothing_of_the_callers_is_touched_also_when_a_block_raises_midway(
    action: str, fail_at: int | None, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), Watched(fail_at), nn.Linear(8, 8))
    model[2].weight.requires_grad_(False)
    model[2].eval()
    fired: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.5)
            p.register_post_accumulate_grad_hook(lambda p: (fired.append("step"), optimizer.step()))
    for module in model.modules():
        module.register_forward_hook(lambda *args: fired.append("forward"))
        module.register_forward_pre_hook(lambda *args: fired.append("pre"))
    x = torch.randn(4, 8, requires_grad=True)
    blocks = declare_blocks(model, [(str(i), m) for i, m in enumerate(model)])
    before = everything(model, x)
    plan = CheckpointPlan.from_text("R(0) K1 K2", ["0", "1", "2"])
    run: dict[str, Callable[[], Any]] = {
        "profile": lambda: profile_blocks(
            blocks, (x,), device="cpu", num_warmup=0, num_trials=1, make_target=mean_square
        ),
        "benchmark": lambda: run_benchmark(
            blocks, plan, (x,), None, mean_square, device="cpu", num_warmup=0, num_trials=1
        ),
        "validate and apply": lambda: apply_plan(blocks, plan, (x,)),
    }
    if fail_at is not None and action != "validate and apply":
        with pytest.raises(RuntimeError, match="midway"):
            run[action]()
    else:
        run[action]()
    after = everything(model, x)
    assert {key for key in before if not same_state(before[key], after[key])} == set()
    assert fired == []


def test_profiling_prints_nothing() -> None:
    code = (
        "import torch; from torch import nn; from ckptplan.measure import profile_blocks\n"
        "from ckptplan.blocks import declare_blocks\n"
        "m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "profile_blocks(declare_blocks(m, [('a', m[0]), ('b', m[1])]), (torch.ones(2, 4),), device='cpu')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_stop_between_trials_ends_the_profiling() -> None:
    class StopNow(Exception):
        pass

    calls = []

    def check_stop() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise StopNow

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    blocks = declare_blocks(model, [("0", model[0]), ("1", model[1])])
    with pytest.raises(StopNow):
        profile_model(model, blocks, torch.ones(2, 4), lambda m, b: mean_square(m(b)), check_stop=check_stop)
    assert len(calls) == 3


@pytest.mark.slow
def test_the_blocks_times_add_up_to_the_whole_step_within_20_percent() -> None:
    """B45, on blocks large enough for the clock."""
    import time

    torch.manual_seed(0)
    modules = [Residual(512) for _ in range(6)]
    x = torch.randn(1024, 64)
    found = profile(modules, x, num_warmup=2, num_trials=7, make_target=mean_square)
    stages = [*found, found.post]
    total_ms = sum(s.forward_time_ms + s.backward_time_ms for s in stages)
    chain = nn.Sequential(*modules)
    whole = []
    for _ in range(9):
        start = time.perf_counter()
        mean_square(chain(x)).backward()
        whole.append((time.perf_counter() - start) * 1e3)
    assert total_ms == pytest.approx(float(np.median(whole[2:])), rel=0.2)
    assert found[1].recompute_time_ms < found[1].forward_time_ms * 1.2


def test_dropout_blocks_keep_the_random_state_and_others_do_not() -> None:
    found = profile([DropoutBlock(), Residual(16, 16)], torch.randn(4, 16))
    assert found[0].recompute.saved_bytes == torch.get_rng_state().numel()
    assert found[1].recompute.saved_bytes == 0


class Net(nn.Module):
    """The README's: its first block is fed by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


NESTS = [
    "R(0 1) K2 K3",
    "R(0 R(1 2)) K3",
    "R(0 1 2 3)",
    "R(R(0) R(1)) K2 R(3)",
    "R(R(R(0) 1) R(2)) K3",
    "R(R(0 1) R(2 3))",
]


@pytest.mark.parametrize("text", NESTS)
def test_segments_from_block_0_of_the_readmes_model_are_planned_and_proved(text: str) -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    model, batch = Net(), (torch.randn(16, 32, 64), torch.randint(10, (16,)))
    found = profile_model(model, "layers.*", batch, loss_fn, num_warmup=0, num_trials=1)
    assert found.pre is None
    target: Any = {"target_kind": "activation_budget_fraction", "target_value": 1.0, "on_infeasible": "best_effort"}
    plan = plan_checkpoints(found, planner="text", text=text, **target)
    check_plan(found, plan)
    proof = prove_model(model, plan, batch, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
    assert proof.gradients is not None
    assert proof.gradients.passed
    assert plan.predicted_peak_bytes == proof.peak_bytes


def test_an_iterator_is_no_batch() -> None:
    with pytest.raises(TypeError, match=r"batch is a list_iterator.*next\(iter\(loader\)\)"):
        profile_model(Net(), "layers.*", iter([torch.randn(2, 32, 64)]), lambda model, batch: model(next(batch)).sum())
