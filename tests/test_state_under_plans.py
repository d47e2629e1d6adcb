"""Case C16: a state saved under one plan, loaded under another, in a wrapper, or compiled; tensors of odd kinds."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from ckptplan.apply import checkpointed
from ckptplan.errors import StateMismatchError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.randomness import streams_to_save
from ckptplan.state import CheckpointManager
from tests.test_resuming import assert_same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Odd(nn.Module):
    """An embedding tied to the head, a parameter stored transposed, a buffer that is ten elements of a million."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.slanted = nn.Parameter(torch.randn(16, 16).t())
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("few", torch.randn(1_000_000)[500:510])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x @ self.slanted + self.few.sum())


TOKENS = torch.arange(24).reshape(4, 6) % 20


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, TOKENS)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.fixture
def profile() -> ChainProfile:
    model = Odd()
    return profile_model(model, "layers.*", TOKENS, loss_of, num_warmup=0, num_trials=1)


def under(text: str) -> Callable[[nn.Module, ChainProfile], nn.Module]:
    def apply(model: nn.Module, profile: ChainProfile) -> nn.Module:
        checkpointed(model, CheckpointPlan.from_text(text, profile)).permanent()
        return model

    return apply


LOADED_AS: dict[str, Callable[[nn.Module, ChainProfile], nn.Module]] = {
    "no plan": lambda model, profile: model,
    "another plan": under("K0 R(1) K2 R(3)"),
    "a nest": under("R(0 R(1)) K2 K3"),
    "data parallel": lambda model, profile: nn.DataParallel(under("K0 R(1) K2 K3")(model, profile)),
    "compiled": lambda model, profile: torch.compile(model, backend="eager"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("name", LOADED_AS)
def test_what_is_saved_under_one_plan_loads_under_any(tmp_path: Path, profile: ChainProfile, name: str) -> None:
    plain_names = list(Odd().state_dict())
    torch.manual_seed(0)
    model = under("R(0) K1 R(2) K3")(Odd(), profile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        update(model, optimizer)
    config = {"model": {"width": 16, "note": None}, "lr": 1e-2, "seeds": [0, 1]}
    streams = streams_to_save(torch.device("cpu"))
    with CheckpointManager(tmp_path / "state") as states:
        payload = {"model": model, "optimizer": optimizer, "random": streams, "config": config}
        info = states.save("a", payload).result()
        distinct = {t.untyped_storage().data_ptr(): t.nbytes for t in model.state_dict().values()}
        distinct_bytes = sum(distinct.values()) + 2 * sum(p.nbytes for p in model.parameters())
        assert info.size_bytes <= 1.05 * distinct_bytes + 100_000
        (file,) = (tmp_path / "state" / "a").glob("model*.safetensors")
        with safe_open(file, "pt") as opened:
            assert set(opened.keys()) <= set(plain_names)

        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        plain = Odd()
        wrapped = LOADED_AS[name](plain, profile)
        its_optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.5)
        into: dict[str, Any] = {"model": wrapped, "optimizer": its_optimizer, "random": None, "config": None}
        loaded = states.load("a", into=into)
        assert list(states.load("a")["model"]) == plain_names
    assert_same(dict(plain.state_dict()), {name: t.clone() for name, t in model.state_dict().items()})
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())
    assert (loaded["config"], loaded["random"]["python"]) == (config, streams["python"])
    assert torch.equal(loaded["random"]["torch"], streams["torch"])
    assert update(wrapped, its_optimizer) == update(model, optimizer)
    assert plain.head.weight is plain.embed.weight
    assert_same(
        {k: t.clone() for k, t in plain.state_dict().items()}, {k: t.clone() for k, t in model.state_dict().items()}
    )


@pytest.mark.parametrize("fault", ["renamed", "shape", "missing"])
def test_what_does_not_fit_is_named_before_anything_is_changed(
    tmp_path: Path, profile: ChainProfile, fault: str
) -> None:
    stored = copy.deepcopy(Odd().state_dict())
    if fault == "renamed":
        stored = type(stored)((name.replace("layers.2.up", "layers.2.rise"), t) for name, t in stored.items())
    elif fault == "shape":
        stored["layers.1.down.bias"] = torch.zeros(17)
    else:
        del stored["slanted"]
    model = under("R(0) K1 R(2) K3")(Odd(), profile)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CheckpointManager(tmp_path) as states:
        states.save("a", {"model": dict(stored)}).result()
        with pytest.raises(StateMismatchError) as refused:
            states.load("a", into={"model": model})
    told = {
        "renamed": ["model.layers.2.up.weight: missing", "model.layers.2.rise.bias: unexpected"],
        "shape": ["model.layers.1.down.bias: expected float32 [16], stored is float32 [17]"],
        "missing": ["model.slanted: missing"],
    }[fault]
    assert [text for text in told if text not in str(refused.value)] == []
    assert_same({name: tensor.clone() for name, tensor in model.state_dict().items()}, before)
