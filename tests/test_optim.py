"""Schedules against their formula and against torch's; optimizer state against a real step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ckptplan.optim import learning_rate_schedule, optimizer_state_bytes, set_learning_rate


def test_each_rate_is_the_documented_one() -> None:
    linear = learning_rate_schedule("linear", 1.0, 7, warmup_steps=3, final_factor=0.2)
    assert [linear(step) for step in range(1, 8)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2])
    constant = learning_rate_schedule("constant", 0.5, 4, warmup_steps=2)
    assert [constant(step) for step in range(1, 5)] == [0.25, 0.5, 0.5, 0.5]
    cosine = learning_rate_schedule("cosine", 2.0, 5, final_factor=0.0)
    assert [cosine(step) for step in range(1, 6)] == pytest.approx([1 + math.cos(math.pi * i / 4) for i in range(5)])


def test_the_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=19, eta_min=0.03)
    rate_at = learning_rate_schedule("cosine", 0.3, 20, final_factor=0.1)
    for step in range(1, 21):
        assert rate_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_ends_are_exact_and_the_last_rate_holds(kind: str) -> None:
    rate_at = learning_rate_schedule(kind, 0.1, 50, warmup_steps=5, final_factor=0.25)  # type: ignore[arg-type]
    assert rate_at(1) == 0.1 / 5
    assert rate_at(5) == 0.1
    assert rate_at(50) == rate_at(51) == pytest.approx(0.1 if kind == "constant" else 0.025)
    with pytest.raises(ValueError, match="step=0; optimizer steps are counted from 1"):
        rate_at(0)


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
def test_a_run_of_one_step_or_of_warm_up_only_has_rates(warmup_steps: int) -> None:
    steps = max(1, warmup_steps)
    rate_at = learning_rate_schedule("cosine", 0.1, steps, warmup_steps=warmup_steps, final_factor=0.0)
    assert rate_at(steps) == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "cosin"}, "scheduler.kind='cosin' is unknown; expected constant, cosine or linear"),
        ({"base_rate": math.nan}, "the learning rate is nan"),
        ({"steps": 0}, "steps=0; expected at least 1"),
        ({"warmup_steps": 11}, "scheduler.warmup_steps=11; expected 0 to steps=10"),
        ({"final_factor": 1.5}, "scheduler.final_factor=1.5; expected 0 to 1"),
    ],
)
def test_bad_schedules_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(**{"kind": "cosine", "base_rate": 0.1, "steps": 10, **arguments})  # type: ignore[arg-type]


def test_groups_with_rates_of_their_own_keep_their_ratio() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.01}], lr=0.1)
    for rate in (0.05, 0.2):
        set_learning_rate(optimizer, rate)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, rate / 10])


def test_a_tensor_rate_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
    set_learning_rate(optimizer, 0.05)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_predicted_state_is_what_a_real_step_makes(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3).to(torch.bfloat16))
    model[0].bias.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    predicted = optimizer_state_bytes(optimizer)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert predicted == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert optimizer_state_bytes(optimizer) == predicted


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_reads_its_numbers_has_an_unknown_state(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    assert optimizer_state_bytes(kind([nn.Parameter(torch.zeros(2))])) is None
    assert f"the state of {kind.__name__} is unknown before its first step" in caplog.text
