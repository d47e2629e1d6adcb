"""C04, B09: frozen bases, a shared block, unused parameters, under every plan (two processes: test_apply.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import checkpointed
from ckptplan.plan import CheckpointPlan

WIDTH, ADAPTERS = 16, 3
IDS = [f"layers.{i}" for i in range(ADAPTERS)]


class Adapter(nn.Module):
    """A frozen layer with a trainable path of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    """The second adapter runs twice; a layer is registered and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(ADAPTERS))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2):
            x = self.layers[index](x)
        return x


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, WIDTH)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def counted(model: Net) -> list[str]:
    fired: list[str] = []
    model.layers[1].up.weight.register_hook(lambda gradient: fired.append("up"))
    return fired


@pytest.mark.parametrize("recomputed", range(2**ADAPTERS))
def test_on_one_process_adapters_get_their_gradients_and_frozen_parts_none(recomputed: int) -> None:
    model, batch = made()
    plain = copy.deepcopy(model)
    counts = [counted(model), counted(plain)]
    text = " ".join(f"R({i})" if recomputed >> i & 1 else f"K{i}" for i in range(ADAPTERS))
    with checkpointed(model, CheckpointPlan.from_text(text, IDS)):
        model(batch).square().mean().backward()
    plain(batch).square().mean().backward()
    found, expected = gradients(model), gradients(plain)
    assert sum(gradient is not None for gradient in found.values()) == 2 * ADAPTERS
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name
    assert counts[0] == counts[1] != []
