"""C04, B09, B11: frozen bases, a shared block, unused parameters; a plan is in force under data parallel too."""

from __future__ import annotations

import copy
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def run_rank(rank: int, port: int, plan_first: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, batch = made()
    fired = counted(model)
    patch = checkpointed(model, CheckpointPlan.from_text("R(0) R(1) R(2)", IDS))
    if plan_first:
        patch.permanent()
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if not plan_first:
        patch.permanent()
    for _ in range(2):
        parallel.zero_grad()
        parallel(batch[rank * 4 : rank * 4 + 4]).square().mean().backward()
    torch.save({"gradients": gradients(model), "fired": len(fired)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("plan_first", [True, False])
def test_on_two_processes_gradients_are_those_of_the_whole_batch(plan_first: bool, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (port, plan_first, str(tmp_path)), nprocs=2)
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model, batch = made()
    model(batch).square().mean().backward()
    for name, expected in gradients(model).items():
        if not name.startswith("layers") or "base" in name:
            continue
        first, second = (rank["gradients"][name] for rank in found)
        assert torch.equal(first, second), name
        assert torch.allclose(first, expected, rtol=0, atol=1e-6), name
    assert [rank["fired"] for rank in found] == [2, 2]
