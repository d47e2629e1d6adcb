"""What the processes of test_sharded_ranks.py run: DTensors and FSDP2 on gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckptplan.state import CheckpointManager, ItemSpec, OptimizerByName

SHAPES = {"wide": (3, 8), "uneven": (5, 7), "tall": (9, 2), "row": (1, 4), "vector": (6,), "none": (0, 3)}


class Small(nn.Module):
    """Uneven everywhere, two parameters that are one, a buffer, a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0, 1.0, 2.0, 1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale
        hidden = hidden + self.frozen(self.down(self.up(hidden).relu()))
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups; only what is trained."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if not name.endswith("bias")]
    rest = [parameter for name, parameter in named if name.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Every rank takes the same batch, so that the mean over ranks is that of one process."""
    for step in steps:
        tokens = torch.arange(step, step + 24).reshape(4, 6) % 11
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % 11).backward()
        optimizer.step()


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 over all ranks, layer by layer; the tied pair stays together in the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.up, model.down, model.frozen):
        assert isinstance(layer, nn.Module)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(value: Any) -> Any:
    """A copy with DTensors as plain tensors, in dicts and lists."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def states_of(location: str) -> CheckpointManager:
    return CheckpointManager(location, items={"rng": ItemSpec(scope="per_rank")}, timeout_s=60)


def train_and_save(location: str, name: str) -> None:
    """Two steps, a save, one more step; rank 0 leaves beside it what both looked like as whole tensors."""
    model = sharded(Small())
    optimizer = make_optimizer(model)
    by_name = OptimizerByName(model, optimizer)
    train(model, optimizer, range(2))
    with states_of(location) as states:
        payload = {"model": model, "optimizer": by_name, "step": 2, "rng": torch.full((4,), dist.get_rank())}
        saved = whole(model.state_dict()), whole(by_name.state_dict())
        states.save(name, payload).result(60)
        train(model, optimizer, range(2, 3))
        after = whole(model.state_dict())
        if dist.get_rank() == 0:
            torch.save((*saved, after), f"{location}/{name}.expected")
        dist.barrier()


def load_and_train(location: str, name: str) -> None:
    """Loads into a fresh model and an optimizer that has not stepped; the values and one more step must agree."""
    model = sharded(Small())
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer = make_optimizer(model)
    by_name = OptimizerByName(model, optimizer)
    with states_of(location) as states:
        assert states.load(name, into={"model": model, "optimizer": by_name, "step": 0})["step"] == 2
    expected = torch.load(f"{location}/{name}.expected", weights_only=True)
    require_equal(whole(model.state_dict()), expected[0], 0.0)
    require_equal(whole(by_name.state_dict()), expected[1], 0.0)
    local = model.get_parameter("head.weight")
    assert local is model.get_parameter("embedding.weight")
    train(model, optimizer, range(2, 3))
    require_equal(whole(model.state_dict()), expected[2], 1e-6)


def require_equal(found: Any, expected: Any, tolerance: float, path: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            require_equal(found[key], expected[key], tolerance, f"{path}.{key}")
    elif isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_equal(one, other, tolerance, f"{path}.{index}")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance, msg=lambda text: f"{path}: {text}")
    else:
        assert found == expected, path


def placements_of_one_mesh() -> dict[str, list[Any]]:
    """The kinds of placement on a mesh of one dimension; the strided one leaves ranks with parts that do not touch."""
    return {
        "rows": [Shard(0)],
        "last": [Shard(-1)],
        "all": [Replicate()],
        "strided": [_StridedShard(0, split_factor=2)],
    }


def full_tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) for name, shape in SHAPES.items()}


def distributed(full: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """As `distribute_tensor`, by cutting alone: it does not cut unevenly by strides."""
    placements = [type(p)(full.dim() - 1) if isinstance(p, Shard) and p.dim == -1 else p for p in placements]
    local, coordinate = full, mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            chunks = [*torch.chunk(local, 2, 0), local[:0]][:2]
            parts = [_chunk(chunk, mesh.size(dim), coordinate[dim], 0) for chunk in chunks]
            local = torch.cat(parts)
        elif isinstance(placement, Shard):
            local = _chunk(local, mesh.size(dim), coordinate[dim], placement.dim)
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _chunk(tensor: torch.Tensor, parts: int, place: int, dim: int) -> torch.Tensor:
    if tensor.shape[dim] == 0:
        return tensor
    chunks = torch.chunk(tensor, parts, dim)
    return chunks[place] if place < len(chunks) else tensor.narrow(dim, 0, 0)


def save_and_load_every_placement(location: str, mesh_shape: tuple[int, ...], kinds: dict[str, list[Any]]) -> int:
    """Saves under each placement, loads into each, into whole tensors, and without a template; how many loads."""
    mesh = init_device_mesh("cpu", mesh_shape)
    full = full_tensors()
    loads = 0
    with CheckpointManager(location, mode="sync", timeout_s=60) as states:
        for source, placements in kinds.items():
            tensors = {name: distributed(tensor, mesh, placements) for name, tensor in full.items()}
            states.save(source, {"item": tensors, "lr": 0.5}).result(60)
            for target in kinds.values():
                into = {name: distributed(torch.zeros_like(tensor), mesh, target) for name, tensor in full.items()}
                places = {name: tensor.to_local().data_ptr() for name, tensor in into.items()}
                states.load(source, into={"item": into})
                for name, tensor in full.items():
                    assert into[name].to_local().data_ptr() == places[name]
                    expected = distributed(tensor, mesh, target).to_local()
                    assert torch.equal(into[name].to_local(), expected), (source, target, name)
                loads += 1
            into_plain = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
            states.load(source, into={"item": into_plain})
            require_equal(into_plain, full, 0.0)
            require_equal(states.load(source)["item"], full, 0.0)
    return loads


def two_dimensional_kinds() -> dict[str, list[Any]]:
    return {
        "rows-rows": [Shard(0), Shard(0)],
        "rows-last": [Shard(0), Shard(-1)],
        "all-rows": [Replicate(), Shard(0)],
        "last-all": [Shard(-1), Replicate()],
        "strided": [_StridedShard(0, split_factor=2), Shard(0)],
    }


class Block(nn.Module):
    """For tensor parallelism: one layer cut by columns, one by rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.down(self.up(x).relu()))
        return out


def two_dimensional(model: Block) -> Block:
    """FSDP2 over "dp" and tensor parallelism over "tp": 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def train_block(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 24).reshape(3, 8)).square().mean().backward()
    optimizer.step()
