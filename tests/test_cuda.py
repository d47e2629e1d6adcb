"""The CUDA path on a real device: ``python -m pytest -m cuda``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptplan.calibrate import calibrate
from ckptplan.data import Batch
from ckptplan.estimate import estimate_profile
from ckptplan.measure import profile_model
from ckptplan.models.gpt import GPT
from ckptplan.models.resnet import ResNet
from ckptplan.planners import plan_checkpoints
from ckptplan.planners.budgets import step_cost
from ckptplan.proof import prove_model
from ckptplan.simulate import no_checkpoint_peak
from ckptplan.subject import Trials
from ckptplan.training import loss_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROOT = Path(__file__).parent.parent


def gpt_and_batch() -> tuple[GPT, Batch]:
    model = GPT(layers=8, width=512, heads=8, sequence_length=512).to(DEVICE)
    tokens = torch.randint(0, 256, (8, 512), device=DEVICE)
    return model, Batch(tokens, tokens)


def resnet_and_batch() -> tuple[ResNet, Batch]:
    model = ResNet(blocks=[2, 2, 2], widths=[32, 64, 128], channels=3, classes=10).to(DEVICE)
    images = torch.randn(32, 3, 64, 64, device=DEVICE)
    return model, Batch(images, torch.randint(0, 10, (32,), device=DEVICE))


@pytest.mark.parametrize("make", [gpt_and_batch, resnet_and_batch])
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.5])
def test_the_measured_peak_is_predicted_and_within_budget(make, autocast_dtype, fraction):
    model, batch = make()
    profile = profile_model(model, None, batch, lambda m, b: loss_of(m, b, autocast_dtype), num_warmup=2, num_trials=3)
    assert profile.meter == "cuda"
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=fraction)
    proof = prove_model(
        model,
        plan,
        batch,
        lambda m, b: loss_of(m, b, autocast_dtype),
        device=DEVICE,
        trials=Trials(1, 2),
        rtol=1e-4 if autocast_dtype is None else 2e-2,
    )
    assert abs(plan.predicted_peak_bytes - proof.peak_bytes) <= 0.01 * proof.peak_bytes
    assert proof.peak_bytes <= plan.budget_bytes * 1.01
    assert proof.device_reserved_bytes >= proof.peak_bytes
    assert proof.gradients.passed, proof.gradients


def test_dropout_draws_the_same_masks_again_on_the_device():
    torch.manual_seed(0)
    model = GPT(layers=4, width=128, heads=4, sequence_length=64, dropout=0.3).to(DEVICE)
    tokens = torch.randint(0, 256, (4, 64), device=DEVICE)
    profile = profile_model(model, None, Batch(tokens, tokens), loss_of, num_warmup=1, num_trials=1)
    plan = plan_checkpoints(
        profile, target_kind="activation_budget_bytes", target_value=10**12, planner="checkpoint_all"
    )
    proof = prove_model(model, plan, Batch(tokens, tokens), loss_of, device=DEVICE, trials=Trials(0, 1), rtol=1e-4)
    assert all(block.is_stochastic for block in profile)
    assert proof.gradients.passed, proof.gradients


def test_a_run_from_the_command_line_uses_the_device_and_says_ok(tmp_path):
    folder = tmp_path / "run"
    overrides = ["runtime=cuda", "logger=none", "steps=5", f"hydra.run.dir={folder}"]
    done = subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["device"] == "cuda:0"
    assert result["memory"]["device_reserved_bytes"] > 0


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
def test_an_estimate_without_the_device_has_the_bytes_that_the_device_shows(autocast_dtype):
    """Fake CPU tensors and the table of kernels against the caching allocator, whose unsplit remainders they lack."""
    model, batch = gpt_and_batch()

    def loss_fn(m, b):
        return loss_of(m, b, autocast_dtype)

    measured = profile_model(model, None, batch, loss_fn, num_warmup=1, num_trials=1)
    with torch.device("meta"):
        shapes = GPT(layers=8, width=512, heads=8, sequence_length=512)
    tokens = torch.randint(0, 256, (8, 512))
    estimated = estimate_profile(shapes, None, Batch(tokens, tokens), loss_fn, device="h100")
    for there, here in zip(measured, estimated, strict=True):
        assert here.keep.saved_bytes == pytest.approx(there.keep.saved_bytes, rel=0.01)
        assert here.keep.backward_peak_bytes == pytest.approx(there.keep.backward_peak_bytes, rel=0.05)
    assert no_checkpoint_peak(estimated) == pytest.approx(no_checkpoint_peak(measured), rel=0.03)


def test_a_calibrated_estimate_orders_plans_as_the_device_does():
    calibration = calibrate(DEVICE, say=lambda line: None)
    model, batch = gpt_and_batch()
    estimated = estimate_profile(
        model.cpu(),
        None,
        Batch(batch.inputs.cpu(), batch.targets.cpu()),
        loss_of,
        device="h100",
        calibration=calibration,
    )
    measured = profile_model(model.to(DEVICE), None, batch, loss_of, num_warmup=3, num_trials=10)
    ratios = [sum(b.recompute_time_ms for b in p) / step_cost(p, "time") for p in (measured, estimated)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.25)


def test_a_block_on_the_host_frees_the_device_and_changes_no_gradient() -> None:
    model, batch = gpt_and_batch()
    profile = profile_model(model, ["layers.*"], batch, loss_of, num_warmup=1, num_trials=3, offload=True)
    option, keep = profile[1].offload[0], profile[1].keep
    assert keep is not None
    assert option.cost.saved_bytes < 0.1 * keep.saved_bytes
    assert option.time_ms is not None
    for text in ("O0 O1 O2 O3 O4 O5 O6 O7", "K0 O1 R(2 3) O4 K5 O6 O7"):
        plan = plan_checkpoints(
            profile, target_kind="activation_budget_fraction", target_value=1.0, planner="text", text=text
        )
        proof = prove_model(model, plan, batch, loss_of, device=DEVICE, trials=Trials(1, 3))
        assert proof.gradients is not None
        assert proof.gradients.passed
        assert proof.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_the_host_is_chosen_only_where_the_step_is_no_slower_for_it() -> None:
    model, batch = gpt_and_batch()
    profile = profile_model(model, ["layers.*"], batch, loss_of, selective=True, offload=True)
    without = replace(profile, blocks=tuple(replace(block, offload=()) for block in profile))
    for share in (0.7, 0.5, 0.3):
        costs = [
            plan_checkpoints(p, target_kind="activation_budget_fraction", target_value=share, planner="optimal")
            for p in (profile, without)
        ]
        assert costs[0].predicted_cost <= costs[1].predicted_cost
