"""What is looked at for each model of the zoo: planned training against plain, predicted against measured peaks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.errors import BlockDeclarationError, UnsupportedBoundaryError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import least_nested_peak, plan_checkpoints, smallest_reachable
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.randomness import library_state
from ckptplan.simulate import no_checkpoint_peak
from ckptplan.subject import Trials
from tests.zoo.entries import Entry

PLANNERS = {"dynamic_programming": smallest_reachable, "optimal": least_nested_peak}
CPU = torch.device("cpu")


@dataclass
class Verdict:
    """What became of one model.

    Attributes:
        refused: the message with which profiling refused it, else None.
        kept: per block that is never recomputed, why.
        texts: the distinct plans that were tried, in all three budgets of both planners.
        errors: of each plan, (predicted - measured) / measured peak.
        faults: what differs from the plain model, by plan.
    """

    refused: str | None = None
    kept: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        if self.refused is not None:
            return "refused"
        return "runs" if not self.kept else "runs, some blocks kept"


def examine(entry: Entry) -> Verdict:
    model, batch = made(entry)
    loss_fn = entry.profile_loss_fn or entry.loss_fn
    try:
        profile = profile_model(model, entry.blocks, batch, loss_fn, num_warmup=0, num_trials=1, selective=True)
    except (BlockDeclarationError, UnsupportedBoundaryError) as error:
        return Verdict(refused=str(error))
    verdict = Verdict(kept={b.block_id: b.exclusion_reason for b in profile if b.exclusion_reason is not None})
    plain = trained(entry, None)
    for plan in plans(profile):
        verdict.texts.append(plan.text)
        verdict.faults += [f"{plan.text}: {name}" for name in differences(trained(entry, plan), plain)]
        model, batch = made(entry)
        proof = prove_model(
            model, plan, batch, loss_fn, device=CPU, trials=Trials(0, 1), time_steps=False, check_gradients=False
        )
        assert proof.peak_bytes is not None
        assert plan.predicted_peak_bytes is not None
        verdict.errors.append((plan.predicted_peak_bytes - proof.peak_bytes) / proof.peak_bytes)
    return verdict


def made(entry: Entry) -> tuple[nn.Module, Any]:
    seed(0)
    model, batch = entry.make()
    seed(1)
    return model, batch


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - users' blocks draw from it
    torch.manual_seed(number)


def plans(profile: ChainProfile) -> Iterator[CheckpointPlan]:
    """At the most, the middle and the least budget of both planners; each plan once."""
    texts = set()
    most = no_checkpoint_peak(profile)
    for planner, least_peak in PLANNERS.items():
        least = least_peak(profile)[0]
        for budget in (most, (most + least) // 2, least):
            plan = plan_checkpoints(
                profile, target_kind="activation_budget_bytes", target_value=budget, planner=planner, cost="flops"
            )
            if plan.text not in texts:
                texts.add(plan.text)
                yield plan


def trained(entry: Entry, plan: CheckpointPlan | None) -> dict[str, Any]:
    """Two training steps, a training forward without gradients and an evaluation: all that they leave, by name."""
    model, batch = made(entry)
    patch = None if plan is None else checkpointed(model, plan).permanent()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    left: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = entry.loss_fn(model, batch)
        loss.backward()
        left[f"loss {step}"] = loss.detach()
        left |= {f"gradient {step} of {n}": p.grad for n, p in model.named_parameters()}
        left = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in left.items()}
        optimizer.step()
    if entry.loss_fn.__name__ != "gradient_penalty":  # which needs gradients
        with torch.no_grad():
            left["loss without gradients"] = entry.loss_fn(model, batch)
            left["evaluation"] = entry.loss_fn(model.eval(), batch)
    left |= {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    left |= {f"buffer {n}": b for n, b in model.named_buffers()}
    left["hooks that fired"] = sorted(getattr(model, "fired", []))
    left |= {f"calls of {n}": m.calls for n, m in model.named_modules() if hasattr(m, "calls")}
    left["torch's stream"] = torch.get_rng_state()
    left["other streams"] = library_state()
    if patch is not None:
        patch.remove()
    return left


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert left.keys() == right.keys()
    return [name for name in right if not is_same(left[name], right[name])]


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return left is right or (not isinstance(left, torch.Tensor) and left == right)
