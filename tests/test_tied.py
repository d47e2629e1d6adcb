"""Weights that several stages use: predicted peaks are those of real steps, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.benchmark import run_benchmark
from ckptplan.measure import profile_blocks, profile_model
from ckptplan.models import GPT
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.proof import prove_model
from ckptplan.simulate import simulate_plan
from ckptplan.subject import Trials
from tests.chains import declared, mean_square

CPU = torch.device("cpu")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1], dtype=torch.long).flatten())


def profile(model: nn.Module, tokens: Tensor, **options: Any) -> ChainProfile:
    return profile_model(model, "layers.*", tokens, loss_of, num_warmup=0, num_trials=1, **options)


def peaks(model: nn.Module, tokens: Tensor, text: str) -> tuple[int, int | None]:
    """(predicted, measured)"""
    found = profile(model, tokens)
    plan = CheckpointPlan.from_text(text, found)
    proof = prove_model(model, plan, tokens, loss_of, device=CPU, trials=Trials(0, 1), time_steps=False)
    assert proof.gradients is not None
    assert proof.gradients.passed
    return simulate_plan(found, plan).peak_bytes, proof.peak_bytes


@pytest.mark.parametrize("text", ["K0-2", "R(0) R(1) R(2)", "K0 R(1) K2", "R(0) R(1 2)"])
@pytest.mark.parametrize(("width", "vocabulary"), [(512, 256), (32, 2000), (64, 64)])
def test_a_gpt_whose_head_is_its_embedding(text: str, width: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    sizes: dict[str, int] = {"layers": 3, "width": width, "heads": 2, "sequence_length": 16, "vocab_size": vocabulary}
    model = GPT(**sizes, tie_weights=True)
    predicted, measured = peaks(model, torch.randint(vocabulary, (2, 16)), text)
    assert predicted == pytest.approx(measured, rel=0.001 if "R(1 2)" in text else 0)


class Shares(nn.Module):
    """Blocks of two linear layers on embedded tokens; the first layer of blocks 0 and 2 has one weight."""

    def __init__(self, sharing: tuple[int, ...], head: bool, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 2000, bias=False)
        for i in sharing:
            self.layers[i][0].weight = self.layers[sharing[0]][0].weight
        if head:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("text", ["K0-3", "R(0) R(1) R(2) R(3)", "K0 R(1) R(2) K3", "R(0 1) K2 R(3)", "K0 R(1 2 3)"])
@pytest.mark.parametrize(
    ("sharing", "head"), [((), True), ((0, 2), False), ((0, 3), False), ((1, 2, 3), False), ((0, 1, 2, 3), True)]
)
def test_an_embedding_tied_to_the_head_and_blocks_that_share_a_weight(
    sharing: tuple[int, ...], head: bool, text: str
) -> None:
    torch.manual_seed(0)
    predicted, measured = peaks(Shares(sharing, head), torch.randint(2000, (3,)), text)
    assert predicted == measured


def test_a_waiting_gradient_stands_beside_every_backward_between_its_parts() -> None:
    """4 * 64 * 64 float32 wait from block 2 to block 0; the kinds' own figures are those without sharing."""
    tokens = torch.randint(2000, (3,))
    apart, shared = profile(Shares((), False), tokens), profile(Shares((0, 2), False), tokens)
    waits = 4 * 64 * 64 * 4
    for option in ("keep", "recompute"):
        added = [
            getattr(a, option).backward_peak_bytes - getattr(b, option).backward_peak_bytes
            for a, b in zip(shared, apart, strict=True)
        ]
        assert (added[1], added[3]) == (waits, 0)
        assert waits <= added[0] <= 2 * waits  # the sum of both parts is a third tensor
        assert 0 <= added[2] <= waits
    incoming = [
        (a.output_gradient_bytes or 0, b.output_gradient_bytes or 0) for a, b in zip(shared, apart, strict=True)
    ]
    assert [a - b for a, b in incoming] == [waits, waits, 0, 0]
    assert (shared.pre.cost, shared.post.cost) == (apart.pre.cost, apart.post.cost)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + torch.tanh(memory)


@pytest.mark.parametrize("text", ["K0-2", "R(0) R(1) R(2)", "R(0) K1 K2"])
def test_a_tensor_of_the_batch_that_every_block_reads_and_that_wants_a_gradient(text: str) -> None:
    blocks = declared([Remembers() for _ in range(3)])
    inputs, memory = (torch.randn(64, 32),), {"memory": torch.randn(64, 32, requires_grad=True)}
    options: dict[str, Any] = {"device": "cpu", "num_warmup": 0, "num_trials": 1}
    found = profile_blocks(blocks, inputs, memory, make_target=mean_square, **options)
    plan = CheckpointPlan.from_text(text, found)
    result = run_benchmark(blocks, plan, inputs, memory, mean_square, **options)
    assert result.correctness_passed
    assert simulate_plan(found, plan).peak_bytes == result.activation_peak_bytes
