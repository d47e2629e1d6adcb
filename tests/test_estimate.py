"""Profiles of devices that are not there: fake tensors against real ones, and what CUDA's kernels would hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.batch_size import resized
from ckptplan.data import Batch
from ckptplan.devices import DEVICES, Calibration, Curve
from ckptplan.errors import BlockDeclarationError, DryRunError, UnsupportedBoundaryError
from ckptplan.estimate import ESTIMATED, estimate_profile, estimated_range, is_estimated
from ckptplan.kernels import cuda_kernels
from ckptplan.measure import profile_model
from ckptplan.models.gpt import GPT
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile
from ckptplan.training import loss_of
from tests.zoo.entries import ENTRIES, Entry, mean_square
from tests.zoo.examine import made
from tests.zoo.transformers_models import TRANSFORMERS

# Bytes of these depend on values (how many tokens an expert gets) or on a library that only a real run asks.
NEEDS_A_RUN = ("experts", "LSTM", "transformers Mixtral")
REFUSED = (BlockDeclarationError, UnsupportedBoundaryError)

FAST = ("batch norm", "tied embedding", "one layer twice", "hooks")


def flat_calibration() -> Calibration:
    """A machine on which every operator takes a second."""
    curves = {f"{kind} float32": Curve((1.0, 1e30), (1.0, 1.0 + 1e-9)) for kind in ("matrix", "pointwise")}
    return Calibration("a test", "cpu", curves, 0.0, 2**30)


def on_shapes(entry: Entry, samples: int | None = None) -> ChainProfile:
    model, batch = made(entry)
    batch = batch if samples is None else resized(batch, samples)
    loss_fn = entry.profile_loss_fn or entry.loss_fn
    return estimate_profile(model, entry.blocks, batch, loss_fn, device="cpu", calibration=flat_calibration())


def figures(profile: ChainProfile) -> list[object]:
    """Everything that planning reads but times."""
    of_blocks = [
        [
            *(b.block_id, b.keep, b.recompute, b.output_bytes, b.output_is_input, b.output_gradient_bytes),
            *(b.guard_bytes, b.replay_copy_bytes, b.stopped_forward_peak_bytes, b.replayed_backward_peak_bytes),
            *(b.forward_flops, b.backward_flops, b.recompute_flops, b.eligible_for_checkpoint, b.mutated_buffers),
            b.is_stochastic,
        ]
        for b in profile
    ]
    of_regions = [(r.name, r.cost, r.output_bytes, r.output_is_input) for r in profile.regions]
    return [of_blocks, of_regions, profile.input_bytes, profile.loss_bytes, profile.fingerprint]


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[] if e.name in FAST else [pytest.mark.slow]) for e in [*ENTRIES, *TRANSFORMERS]],
)
def test_fake_tensors_have_the_bytes_of_real_ones(entry: Entry) -> None:
    model, batch = made(entry)
    loss_fn = entry.profile_loss_fn or entry.loss_fn
    if entry.refused is not None:
        with pytest.raises((*REFUSED, DryRunError)):
            on_shapes(entry)
    elif entry.name.startswith(NEEDS_A_RUN):
        with pytest.raises(DryRunError, match="cannot be estimated without running it"):
            on_shapes(entry)
    else:
        real = profile_model(model, entry.blocks, batch, loss_fn, num_warmup=0, num_trials=1, memory="live")
        assert figures(on_shapes(entry)) == figures(real)


RUNS_ON_SHAPES = [e for e in [*ENTRIES, *TRANSFORMERS] if e.refused is None and not e.name.startswith(NEEDS_A_RUN)]
# One image: PyTorch gives a view's dimension of one another stride on fake tensors than on real ones, convolutions read
# their memory format from it, and the backward of a block peaks 64 or 128 bytes higher.
LEAST_SAMPLES = {"transformers SegFormer": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in RUNS_ON_SHAPES])
def test_fake_tensors_have_the_bytes_of_real_ones_with_one_to_eight_samples(entry: Entry) -> None:
    loss_fn = entry.profile_loss_fn or entry.loss_fn
    for samples in range(LEAST_SAMPLES.get(entry.name, 1), 9):
        model, batch = made(entry)
        real = profile_model(
            model, entry.blocks, resized(batch, samples), loss_fn, num_warmup=0, num_trials=1, memory="live"
        )
        assert figures(on_shapes(entry, samples)) == figures(real), f"{samples} samples"


def gpt(layers: int = 3, **sizes: int) -> GPT:
    return GPT(**{"layers": layers, "width": 32, "heads": 4, "sequence_length": 16, "vocab_size": 50} | sizes)


def tokens(batch_size: int, length: int = 16) -> Batch:
    drawn = torch.randint(50, (batch_size, length))
    return Batch(drawn, drawn)


@pytest.mark.parametrize("batch_size", [1, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in range(2, 8))])
def test_at_every_batch_size(batch_size: int) -> None:
    model, batch = gpt(), tokens(batch_size)
    real = profile_model(model, None, batch, loss_of, num_warmup=0, num_trials=1, memory="live")
    fake = estimate_profile(model, None, batch, loss_of, device="cpu", calibration=flat_calibration())
    assert figures(fake) == figures(real)


def test_a_model_without_memory_gives_what_the_same_model_with_memory_gives() -> None:
    with torch.device("meta"):
        shapes = gpt()
    batch = tokens(2)
    assert estimate_profile(shapes, None, batch, loss_of, device="h100") == estimate_profile(
        gpt(), None, batch, loss_of, device="h100"
    )


def test_equal_blocks_are_looked_at_once_and_nothing_changes() -> None:
    class Numbered(nn.Module):
        """Reaches its layers by number, so that it cannot be cut short."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(9):
                x = self.layers[number](x)
            return x

    class Listed(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    calls = {}
    found = {}
    for kind in (Numbered, Listed):
        count = [0]

        def loss(model: nn.Module, batch: torch.Tensor, count: list[int] = count) -> torch.Tensor:
            count[0] += len(model.layers)  # type: ignore[arg-type]
            return mean_square(model, batch)

        found[kind] = estimate_profile(kind(), "layers.*", torch.randn(4, 8), loss, device="a100")
        calls[kind] = count[0]
    assert figures(found[Listed]) == figures(found[Numbered])
    assert calls[Listed] < calls[Numbered] / 2
    for long, full in zip(found[Listed], found[Numbered], strict=True):
        assert long.forward_time_ms == pytest.approx(full.forward_time_ms)
        assert long.recompute_time_ms == pytest.approx(full.recompute_time_ms)


def test_the_caller_sees_nothing_of_it() -> None:
    model, batch = gpt(), tokens(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    estimate_profile(model, None, batch, loss_of, device="h100")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    assert layer(torch.randn(2, 4, 8)).requires_grad  # CPU kernels again


def test_the_plan_of_an_estimate_runs_on_the_real_model() -> None:
    model, batch = gpt(), tokens(2)
    profile = estimate_profile(model, None, batch, loss_of, device="h200")
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.7)
    assert plan.recomputed > 0
    with checkpointed(model, plan):
        loss_of(model, batch).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_estimate_says_what_it_is_and_is_read_back() -> None:
    profile = estimate_profile(gpt(), None, tokens(2), loss_of, device="l40s")
    assert is_estimated(profile)
    assert {b.activation_bytes_method for b in profile} == {"estimated"}
    assert {b.device for b in profile} == {"l40s"}
    assert profile.environment["device"] == "NVIDIA L40S, 48 GB"
    assert "data sheet" in profile.environment[ESTIMATED]["rates"]
    assert ChainProfile.from_json(profile.to_json()) == profile


def test_times_have_a_range_around_the_likely_one() -> None:
    profile = estimate_profile(gpt(), None, tokens(2), loss_of, device="h100")
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.7)
    found = estimated_range(profile, plan)
    low, likely, high = found.step_ms
    assert 0 < low < likely < high
    assert 0 < found.overhead_ratio[0] <= found.overhead_ratio[1] <= found.overhead_ratio[2] < 1
    measured = replace(profile, environment={})
    with pytest.raises(ValueError, match="measured"):
        estimated_range(measured, plan)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192, bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], 1, 64)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
        return (
            F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True).transpose(1, 2).flatten(2)
        )


def test_flash_attention_keeps_its_inputs_its_output_and_one_sum_a_row() -> None:
    """By hand: 2 x 128 x 64 bf16 is 32,768 bytes; queries, keys and values lie in one product of three times that."""
    model = nn.Sequential(Attention(dropout=0.1), Attention(dropout=0.1)).to(torch.bfloat16)
    x = torch.randn(2, 128, 64, dtype=torch.bfloat16)
    block = estimate_profile(model, ["0", "1"], x, mean_square, device="a100")[0]
    tensor = 2 * 128 * 64 * 2
    sums, philox = 2 * 128 * 4, 2 * 512
    assert block.keep is not None
    assert block.keep.saved_bytes == 3 * tensor + sums + philox
    assert block.keep.keeps_output == (True,)


def test_the_backward_of_flash_attention_has_its_workspace() -> None:
    """Float32 sums for the query's gradient in rows of 128, and one float32 a row: gone when the backward is."""
    tensor, sums, philox = 2 * 128 * 64 * 2, 2 * 128 * 4, 2 * 512
    workspace = 2 * 128 * 64 * 4 + 2 * 128 * 4
    held = tensor + sums + philox  # the output and what goes with it; queries, keys and values are the block's input
    arriving, made, loss = tensor, 3 * tensor, 2 * 2
    assert _backward_peak() == held + arriving + made + workspace + loss


def _backward_peak(dtype: torch.dtype = torch.bfloat16) -> int:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x[:, 0], x[:, 1], x[:, 2]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Bare()])
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x * self.scale)

    x = torch.randn(2, 3, 1, 128, 64, dtype=dtype)
    block = estimate_profile(Model(), "blocks.*", x, mean_square, device="a100")[0]
    assert block.keep is not None
    return block.keep.backward_peak_bytes


def test_dropout_keeps_one_byte_an_element_on_cuda_and_a_factor_on_the_cpu() -> None:
    layer = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    model, x = nn.Sequential(layer, nn.Linear(64, 64)), torch.randn(32, 64)
    of_cuda = estimate_profile(model, ["0"], x, mean_square, device="h100")[0].keep
    of_cpu = estimate_profile(model, ["0"], x, mean_square, device="cpu", calibration=flat_calibration())[0].keep
    assert of_cuda is not None
    assert of_cpu is not None
    assert (of_cuda.saved_bytes, of_cpu.saved_bytes) == (32 * 64, 32 * 64 * 4)


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 2)), torch.randn(1, 3)
    block = estimate_profile(model, ["0"], x, mean_square, device="h100")[0]
    assert block.keep is not None
    assert block.keep.forward_peak_bytes == 2 * 512  # the product and its tanh, 20 bytes each


def test_autocast_runs_norms_in_float32_as_cuda_does() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    with cuda_kernels(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(x, (8,)).dtype is torch.float32
        assert F.softmax(x, dim=-1).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.softmax(x, dim=-1).dtype is torch.bfloat16


def test_matrix_products_take_the_data_sheets_time() -> None:
    """8,192 tokens through a square layer of 8,192: 1.0995e12 FLOPs forward, far above the ridge of every device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16), nn.Identity())
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    for device in DEVICES.values():
        block = estimate_profile(model, ["0"], x, mean_square, device=device)[0]
        seconds = 2 * 8192**3 / (device.flops_per_s["bfloat16"] * device.matrix.mid) + device.launch_s.mid
        assert block.forward_time_ms == pytest.approx(seconds * 1e3, rel=1e-6), device.name


def test_an_unknown_device_and_a_cpu_without_rates_are_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        estimate_profile(gpt(), None, tokens(1), loss_of, device="h1000")
    with pytest.raises(ValueError, match="calibration"):
        estimate_profile(gpt(), None, tokens(1), loss_of, device="cpu")


def test_a_device_of_the_table_is_not_measured() -> None:
    with pytest.raises(ValueError, match="estimate_profile"):
        profile_model(gpt(), None, tokens(1), loss_of, device="h100")


def test_a_model_that_decides_by_values_is_refused_with_a_remedy() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.mean() > 0 else x

    model = nn.Sequential(nn.Linear(4, 4), Decides())
    with pytest.raises(DryRunError, match="Profile it where it runs"):
        estimate_profile(model, ["0", "1"], torch.randn(2, 4), mean_square, device="h100")


def test_on_the_host_of_a_device_that_is_not_there_bytes_are_those_of_a_run_and_time_is_what_nothing_hides() -> None:
    model = GPT(layers=3, width=64, heads=4, sequence_length=64, vocab_size=50)
    tokens = torch.randint(50, (8, 64))
    batch = Batch(tokens, tokens)
    device = DEVICES["h100"]
    profile = estimate_profile(model, ["layers.*"], batch, loss_of, device="h100", offload=True)
    measured = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=0, num_trials=1, offload=True)
    (option,), (real,) = profile[1].offload, measured[1].offload
    assert 0.9 < option.host_bytes / real.host_bytes < 1.1, "attention's kernel keeps other things there"
    assert option.cost.saved_bytes < 0.1 * profile[1].keep.saved_bytes  # type: ignore[union-attr]
    transfer_ms = option.host_bytes / (63.0e9 * 0.8) * 1e3
    times = (profile[1].forward_time_ms, profile[1].backward_time_ms)
    assert option.time_ms == pytest.approx(sum(max(0.0, transfer_ms - (ms or 0)) for ms in times))
    assert device.transfer_s(63_000_000_000) == pytest.approx(1 / 0.8)
    without = estimate_profile(model, ["layers.*"], batch, loss_of, device="h100")
    assert not any(block.offload for block in without)


def test_a_slow_link_is_worth_it_only_where_recomputing_takes_longer() -> None:
    model = GPT(layers=4, width=64, heads=4, sequence_length=64, vocab_size=50)
    tokens = torch.randint(50, (8, 64))
    chosen = {}
    for name, rate in (("fast", 1e18), ("slow", 1e3)):
        device = replace(DEVICES["h100"], host_link_bytes_per_s=rate)
        profile = estimate_profile(model, ["layers.*"], Batch(tokens, tokens), loss_of, device=device, offload=True)
        plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.6, planner="optimal")
        chosen[name] = plan.offloaded, plan.recomputed
    assert chosen["fast"][0] > 0
    assert chosen["slow"][0] == 0 < chosen["slow"][1]
