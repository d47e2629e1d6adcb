"""One rank of the tests: plans and steps under DDP, FSDP2 and tensor parallelism; rank 0 writes JSON of all ranks.

``python -m tests.engine.ranks_program <rank> <number of ranks> <folder>``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.apply import checkpointed
from ckptplan.budget import PlannedRun
from ckptplan.data import IGNORE_INDEX, Batch
from ckptplan.engine.gathered import with_gathered
from ckptplan.engine.parallel import alone as alone_in
from ckptplan.engine.parallel import (
    gradient_order,
    make_parallel,
    measured_under,
    sharding_of,
    sharding_units,
    shards,
)
from ckptplan.engine.planning import block_by_block, plan_sharded, same_plan
from ckptplan.engine.ranks import Ranks
from ckptplan.engine.shares import SharedData, bounds
from ckptplan.engine.tensor import cut_model, require_same, with_meshes
from ckptplan.engine.worst import worst_profile
from ckptplan.errors import ConfigError
from ckptplan.measure import profile_model
from ckptplan.models.gpt import GPT
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.proof import prove_model
from ckptplan.stopping import StopFlag
from ckptplan.subject import Trials
from ckptplan.training import TrainSettings, accumulate_gradients, clip, evaluate, loss_of
from ckptplan.trees import whole

CPU = torch.device("cpu")
SETTINGS = TrainSettings(steps=1)
VOCABULARY, LENGTH, SAMPLES = 64, 32, 8
NUM_BLOCKS = 4
# name -> (planner, share of the peak without a plan) or a plan as text
PLANS: dict[str, tuple[str, float] | str] = {
    "dp": ("dynamic_programming", 0.6),
    "selective": ("optimal", 0.55),
    "nested": ("optimal", 0.0),  # the least that any plan reaches
    "segment": "K0 R(1 2) K3",
    "nest": "R(0 R(1 2)) R(3)",
}

PLANS_OF_CUT_MODELS = ("dp", "segment", "nest")


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    ranks = Ranks(rank, size, rank)
    found: dict[str, Any] = {"ranks": size, "agreement": agreement(ranks), "shares": shares(ranks)}
    for engine in ("ddp", "fsdp2"):
        found[engine] = {name: under(engine, plan, ranks) for name, plan in PLANS.items()}
    found["buffers"] = buffers(ranks)
    cutting = with_meshes(Ranks(rank, size, rank, tensor_size=2), "cpu")
    found["tensor"] = {name: under("fsdp2", PLANS[name], cutting) for name in PLANS_OF_CUT_MODELS}
    found["clipping"] = clipping(cutting)
    found["another"] = [refusal(model, cutting) for model in (Squeezed(), Normed())]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def model() -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "sequence_length": LENGTH, "layers": NUM_BLOCKS, "width": 32, "heads": 2}
    return GPT(**sizes, separate_qkv=True)


def whole_batch() -> Batch:
    """Targets that are to be ignored lie unevenly, so that a mean of means would be another loss."""
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[: SAMPLES // 2, : LENGTH // 2] = IGNORE_INDEX
    return Batch(tokens, targets)


def share_of(batch: Batch, ranks: Ranks) -> Batch:
    first, end = bounds(len(batch.targets), ranks.data_rank, ranks.data_size)
    return Batch(batch.inputs[first:end], batch.targets[first:end])


def under(engine: str, wanted: tuple[str, float] | str, ranks: Ranks) -> dict[str, Any]:
    subject, batch = model(), share_of(whole_batch(), ranks)
    is_sharded = shards(engine, ranks)
    to_measure: nn.Module = subject
    if ranks.mesh is not None:
        cut = cut_model(subject, None, ranks, batch, loss_of)
        require_same(subject, cut, ranks, 1e-5)
        to_measure = cut.silent
    measured = profile_model(
        to_measure, None, batch, loss_of, num_warmup=0, num_trials=1, selective=True, gradients_stand=not is_sharded
    )
    plain = worst_profile([ChainProfile.from_json(text) for text in ranks.gather(measured.to_json())])
    order = gradient_order(to_measure, lambda twin: loss_of(twin, batch), CPU)
    names = tuple(dict.fromkeys(modules_of(plain.block_ids)))
    sharding = sharding_of(subject, names, order, ranks.data_size)
    flat = plain if not is_sharded else with_gathered(plain, sharding, block_by_block(plain))
    budget_bytes = budget_for(flat, wanted)

    def make(seen: ChainProfile, reserve_bytes: int) -> PlannedRun:
        options: dict[str, Any] = {"planner": "text", "text": wanted, "on_infeasible": "best_effort"}
        if not isinstance(wanted, str):
            options = {"planner": wanted[0], "cost": "flops"}
        target = {"target_kind": "activation_budget_bytes", "target_value": budget_bytes - reserve_bytes}
        plan = plan_checkpoints(seen, **target, **options)
        return PlannedRun(plan, plan.budget_bytes, reserve_bytes, 0, 0.0)

    def planned() -> PlannedRun:
        return make(plain, 0) if not is_sharded else plan_sharded(plain, sharding, make)[0]

    plan = same_plan(ranks, planned).plan
    proof = prove_model(
        subject, plan, batch, loss_of, device=CPU, trials=Trials(0, 1), time_steps=False,
        under=measured_under(lambda twin: make_parallel(engine, twin, plan, ranks, ())),
    )  # fmt: skip
    assert proof.gradients is not None
    return {
        "text": plan.text,
        "units": [list(unit) for unit in sharding_units(plan)],
        "digests": ranks.gather(plan.digest),
        "budget_bytes": None if isinstance(wanted, str) else plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "predicted_at": plan.predicted_peak_at,
        "measured_bytes": ranks.gather(proof.peak_bytes),
        "bitwise_equal": ranks.gather(proof.gradients.bitwise_equal),
        "from_plain": ranks.gather(proof.gradients.max_rel_diff),
        "from_one_process": ranks.gather(difference_from_one_process(engine, subject, plan, ranks)),
    }


def budget_for(profile: ChainProfile, wanted: tuple[str, float] | str) -> int:
    everything = CheckpointPlan.from_text(" ".join(f"K{i}" for i in range(NUM_BLOCKS)), profile)
    peak = plan_checkpoints(
        profile, target_kind="activation_budget_fraction", target_value=1.0, planner="text", text=everything.text
    ).predicted_peak_bytes
    assert peak is not None
    if isinstance(wanted, str):
        return peak
    if wanted[1]:
        return int(wanted[1] * peak)
    from ckptplan.planners import smallest_reachable

    return int(smallest_reachable(profile)[0])


def difference_from_one_process(engine: str, subject: nn.Module, plan: CheckpointPlan, ranks: Ranks) -> float:
    """The largest difference of a gradient from that of one process, over the largest element of its parameter.

    A cut matrix adds up in another order, so such models are compared in float64, where what is left is no rounding.
    """
    alone, batch = model(), share_of(whole_batch(), ranks)
    if ranks.mesh is not None:
        alone, subject = alone.double(), model().double()
        plan = CheckpointPlan.from_text(plan.text, plan.block_ids)  # the plan itself is one of a float32 model
        cut_model(subject, None, ranks, batch, loss_of)
    accumulate_gradients(alone, [whole_batch()], SETTINGS)
    patch = checkpointed(subject, plan).permanent()
    parallel = make_parallel(engine, subject, plan, ranks, ())
    accumulate_gradients(parallel, [batch], SETTINGS)
    patch.remove()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    largest = 0.0
    for name, parameter in subject.named_parameters():
        assert parameter.grad is not None
        if name.endswith(".k.bias"):
            continue  # it moves all scores of a query alike: its gradient is zero, and what is left is rounding
        right = expected[name]
        assert right is not None
        largest = max(largest, float((whole(parameter.grad) - right).abs().max() / right.abs().max()))
    return largest


def clipping(ranks: Ranks) -> dict[str, Any]:
    """Norms and weights of two clipped steps of a cut model, and those of one process on the whole batch."""
    subject, alone = model(), model()
    cut_model(subject, None, ranks, share_of(whole_batch(), ranks), loss_of)
    plan = CheckpointPlan.from_text("K0 R(1) K2 K3", [f"layers.{order}" for order in range(NUM_BLOCKS)])
    parallel = make_parallel("fsdp2", subject, plan, ranks, ())
    norms: dict[str, list[float]] = {"cut": [], "alone": []}
    for name, trained, batch in (
        ("cut", parallel, share_of(whole_batch(), ranks)),
        ("alone", alone_in(alone), whole_batch()),
    ):
        optimizer = torch.optim.SGD(trained.model.parameters(), lr=1.0)
        for _ in range(2):
            accumulate_gradients(trained, [batch], SETTINGS)
            norms[name].append(clip(optimizer, 0.1))
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(alone.named_parameters())
    apart = [float((whole(p.detach()) - expected[name].detach()).abs().max()) for name, p in subject.named_parameters()]
    return {**norms, "apart": ranks.gather(max(apart)), "of_ranks": ranks.gather(norms["cut"])}


class Squeezed(nn.Module):
    """Between its cut matrices the features are made of length one: of a part of them that is another length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.fc, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def tensor_parallel_plan(self, num_ranks: int) -> dict[str, str]:
        return {"fc": "colwise", "out": "rowwise"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.between(self.fc(self.tokens(inputs))))
        return logits

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


class Normed(Squeezed):
    """Between them stands a weight for every feature of a head, which both ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(-1, (-1, 8)) * self.scale).flatten(-2)


def refusal(subject: nn.Module, ranks: Ranks) -> str:
    cut = cut_model(subject, None, ranks, share_of(whole_batch(), ranks), loss_of)
    try:
        require_same(subject, cut, ranks, 1e-5)
    except ConfigError as error:
        return str(error)
    return "nothing"


def agreement(ranks: Ranks) -> dict[str, Any]:
    """An error of one rank is raised by all; a signal to the last one stops all."""

    def fails_on_last() -> None:
        if ranks.rank == ranks.size - 1:
            raise ConfigError("only here")

    try:
        ranks.together(fails_on_last)
        raised = "nothing"
    except ConfigError as error:
        raised = str(error)
    own = StopFlag()
    agreed = ranks.agreed(own)
    before = agreed()
    if ranks.rank == ranks.size - 1:
        own.request(15)
    return {"raised": ranks.gather(raised), "before": ranks.gather(before), "after": ranks.gather(agreed())}


def shares(ranks: Ranks) -> dict[str, Any]:
    """What the ranks read of an epoch whose last batch is short, together, and their evaluation."""
    from ckptplan.data.tokens import synthetic_tokens

    data = synthetic_tokens(
        vocab_size=VOCABULARY, sequence_length=LENGTH, batch_size=SAMPLES, num_samples=SAMPLES + 1, num_eval_samples=3
    )
    own = SharedData(data, ranks)
    read = [[batch.inputs.tolist() for batch in own.epoch_batches(0)]]
    expected = [batch.inputs.tolist() for batch in data.epoch_batches(0)]
    gathered = ranks.gather(read[0])
    counts = [[len(part[number]) for part in gathered] for number in range(len(expected))]
    together = [[row for part in gathered for row in part[number]] for number in range(len(expected))]
    subject = model()
    parallel = make_parallel("ddp", subject, CheckpointPlan.from_text("K0 K1 K2 K3"), ranks, ())
    return {
        "whole_batches_equal": together[:-1] == expected[:-1],
        "short_batch_begins_equal": together[-1][:1] == expected[-1],
        "counts": counts,
        "evaluation": ranks.gather(evaluate(parallel, own, SETTINGS)),
        "evaluation_of_one_process": evaluate(model(), data, SETTINGS),
    }


def buffers(ranks: Ranks) -> list[bool]:
    """Whether statistics of a norm are those of rank 0 everywhere, after a step on other samples each."""
    torch.manual_seed(0)
    subject = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plan = CheckpointPlan.from_text("K0 K1", ["0", "1"])
    parallel = make_parallel("fsdp2", subject, plan, ranks, ())
    torch.manual_seed(1 + ranks.rank)
    parallel.module(torch.randn(8, 4)).sum().backward()
    norm = subject[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    own = ranks.gather(norm.running_mean.tolist())
    parallel.share_buffers()
    shared = ranks.gather(norm.running_mean.tolist())
    return [own[0] != own[-1], all(mean == own[0] for mean in shared)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
