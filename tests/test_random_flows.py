"""Random models, each under plans of every sort: predicted to the byte, with the plain model's gradients bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

import ckptplan
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.selective import short_names
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.random_flows import WIDTH, RandomModel, loss_of

LOSSES_BYTES = (
    64  # of scalars: each part of a loss is a number, whose gradient waits beside a block or has gone by then
)


def _plans(profile: ChainProfile, rng: random.Random) -> list[CheckpointPlan]:
    """All kept, all recomputed, four at random with parts of blocks kept, and a planner's for two budgets."""
    ways = []
    for i, block in enumerate(profile):
        again = [f"R({i})"] if block.eligible_for_checkpoint else []
        parts = (",".join(short_names(block, option)) for option in block.selective)
        ways.append([f"K{i}", *again, *(f"S{i}[{names}]" for names in parts)])
    texts = [[way[0] for way in ways], [way[min(1, len(way) - 1)] for way in ways]]
    texts += [[rng.choice(way) for way in ways] for _ in range(4)]
    plans = {text: CheckpointPlan.from_text(text, profile) for text in map(" ".join, texts)}
    peaks = [simulate_plan(profile, plan).peak_bytes for plan in plans.values()]
    for share in (0.2, 0.6):
        budget_bytes = int(min(peaks) + share * (max(peaks) - min(peaks)))
        plan = ckptplan.plan_checkpoints(
            profile, target_kind="activation_budget_bytes", target_value=budget_bytes, planner="optimal"
        )
        plans[plan.text] = plan
    return list(plans.values())


@dataclass(frozen=True)
class Outcome:
    """Of one plan of a random model: by how much its peak is predicted too high, in bytes and as a share."""

    seed: int
    text: str
    bytes_above: int
    share_above: float


def outcomes_of(seed: int) -> list[Outcome]:
    """Of the plans of that seed's model; gradients are those without a plan, bit by bit."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, batch = RandomModel(seed), torch.randn(rng.choice([32, 64]), WIDTH)
    profile = ckptplan.profile_model(
        model, "layers.*", batch, loss_of, num_warmup=0, num_trials=1, selective=rng.random() < 0.5
    )
    found = []
    for plan in _plans(profile, rng):
        proof = prove_model(
            model, plan, batch, loss_of, device=torch.device("cpu"), trials=Trials(0, 1), time_steps=False
        )
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal, (seed, plan.text, proof.gradients)
        assert proof.peak_bytes is not None
        above = simulate_plan(profile, plan).peak_bytes - proof.peak_bytes
        found.append(Outcome(seed, plan.text, above, above / proof.peak_bytes))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_random_model_trains_as_planned(seed: int) -> None:
    assert [outcome for outcome in outcomes_of(seed) if abs(outcome.bytes_above) > LOSSES_BYTES] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_three_hundred_random_models_none_is_predicted_low_and_few_high() -> None:
    """High by more than 1 % is where the model's own code drops what no block holds (docs/theory.md)."""
    found = [outcome for seed in range(12, 312) for outcome in outcomes_of(seed)]
    low = [outcome for outcome in found if outcome.share_above < -0.01]
    assert [outcome for outcome in low if not RandomModel(outcome.seed).again] == []
    assert min(outcome.share_above for outcome in found) > -0.06, low  # a block called twice: see the same page
    assert len({outcome.seed for outcome in low}) <= 3, low
    high = [outcome for outcome in found if outcome.share_above > 0.01]
    assert len({outcome.seed for outcome in high}) <= 3, high
