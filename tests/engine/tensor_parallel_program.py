"""One rank of a loop of one's own: a plan, then tensor parallelism over two ranks, then FSDP2 over two.

``python -m tests.engine.tensor_parallel_program <rank> <number of ranks> <folder>``: four ranks train, save and train
on; two go on from what the four have saved, sharded over both and without tensor parallelism.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptplan.apply import checkpointed
from ckptplan.data import Batch
from ckptplan.engine.parallel import sharding_units
from ckptplan.measure import profile_model
from ckptplan.models.gpt import GPT
from ckptplan.models.hf import HFModel
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.state import CheckpointManager, OptimizerByName
from ckptplan.training import loss_of
from ckptplan.trees import whole

VOCABULARY, LENGTH, SAMPLES = 64, 32, 8
PLANS: dict[str, tuple[str, float] | str] = {
    "dp": ("dynamic_programming", 0.7),
    "selective": ("optimal", 0.7),
    "nest": "R(0 R(1 2)) R(3)",
}
MODELS = ("gpt", "llama")


def plans_of(name: str) -> dict[str, tuple[str, float] | str]:
    """Segments hand on one value; the layers of Llama take more than that."""
    return {kind: wanted for kind, wanted in PLANS.items() if name == "gpt" or not isinstance(wanted, str)}


def make_model(name: str) -> nn.Module:
    """In float64, so that what is left of a difference is rounding and nothing else."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(vocab_size=VOCABULARY, sequence_length=LENGTH, layers=4, width=32, heads=4).double()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return HFModel(model_type="llama", config={"num_hidden_layers": 4, **sizes}, vocab_size=VOCABULARY).double()


def styles_of(name: str, model: nn.Module) -> dict[str, Any]:
    """Of Llama the plan that transformers ships; of the GPT its MLP (its one matrix for q, k and v is not cut)."""
    if name == "gpt":
        return {"layers.*.fc": ColwiseParallel(), "layers.*.out": RowwiseParallel()}
    shipped = model.model.config.base_model_tp_plan  # type: ignore[union-attr]  # transformers' own
    known = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    return {f"model.model.{path}": known[style]() for path, style in shipped.items() if style in known}


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [part for path, part in model.named_modules() if path.rpartition(".")[0].endswith("layers")]


def batch(step: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    return Batch(tokens, tokens.roll(-1, 1))


def share(of: Batch, part: int, parts: int) -> Batch:
    size = SAMPLES // parts
    return Batch(of.inputs[part * size : (part + 1) * size], of.targets[part * size : (part + 1) * size])


def plan_for(model: nn.Module, wanted: tuple[str, float] | str, parts: int) -> CheckpointPlan:
    """By figures that do not depend on the machine's noise, so that every rank makes the same."""
    profile = profile_model(model, None, share(batch(0), 0, parts), loss_of, num_warmup=0, num_trials=1, selective=True)
    if isinstance(wanted, str):
        return CheckpointPlan.from_text(wanted, profile)
    target: dict[str, Any] = {"target_kind": "activation_budget_fraction", "target_value": wanted[1]}
    return plan_checkpoints(profile, planner=wanted[0], cost="flops", **target)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, part: int, parts: int) -> None:
    """Every sample has as many targets, so FSDP2's mean over its ranks is the mean over all samples."""
    optimizer.zero_grad()
    loss_of(model, share(batch(number), part, parts)).backward()
    optimizer.step()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # parameters lie on two kinds of meshes


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


def on_four(name: str, wanted: tuple[str, float] | str, location: str | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model(name)
    plan = plan_for(model, wanted, parts=2)
    checkpointed(model, plan).permanent()
    parallelize_module(model, mesh["tp"], styles_of(name, model))
    for unit in sharding_units(plan):  # a segment runs as a whole
        fully_shard([model.get_submodule(path) for path in unit], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    part = mesh["dp"].get_local_rank()
    loss_of(model, share(batch(0), part, 2)).backward()
    alone = make_model(name)
    loss_of(alone, batch(0)).backward()
    expected = {key: parameter.grad for key, parameter in alone.named_parameters()}
    worst = 0.0
    for key, parameter in model.named_parameters():
        right = expected[key]
        assert parameter.grad is not None
        assert right is not None
        worst = max(worst, float((whole(parameter.grad) - right).abs().max() / right.abs().max()))
    cut = sum(len(getattr(p, "placements", ())) == 2 for p in model.parameters())
    if location is not None:
        optimizer = make_optimizer(model)
        step(model, optimizer, 1, part, 2)
        with CheckpointManager(location, mode="sync") as states:
            states.save("a", {"model": model, "optimizer": OptimizerByName(model, optimizer)}).result(60)
        before = values(model)
        step(model, optimizer, 2, part, 2)
        if dist.get_rank() == 0:
            torch.save((before, values(model)), f"{location}/expected")
        else:
            values(model)  # all ranks have a part in it
    return {"plan": plan.text, "difference": worst, "cut_parameters": cut}


def go_on(name: str, location: str, parts: int) -> list[float]:
    """Differences of the weights from those that were saved, and after one more step."""
    model = make_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if parts > 1:
        mesh = init_device_mesh("cpu", (parts,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    with CheckpointManager(location, mode="sync") as states:
        states.load("a", into={"model": model, "optimizer": OptimizerByName(model, optimizer)})
    found = [values(model)]
    step(model, optimizer, 2, dist.get_rank() if parts > 1 else 0, parts)
    found.append(values(model))
    right = torch.load(f"{location}/expected", weights_only=True)
    return [
        max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) for mine, theirs in zip(found, right, strict=True)
    ]


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name in MODELS:
        if size == 4:
            for kind, wanted in plans_of(name).items():
                location = f"{folder}/{name}" if kind == "dp" else None
                found[f"{name} {kind}"] = on_four(name, wanted, location)
        else:
            found[name] = go_on(name, f"{folder}/{name}", parts=size)
    if rank == 0:
        Path(folder, f"found-{size}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
