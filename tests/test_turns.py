"""Blocks that the model calls more than once: each call is a stage of its own."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ckptplan.apply import apply_plan, checkpointed
from ckptplan.blocks import declare_blocks
from ckptplan.dry_run import verify_plan
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import ChainProfile, modules_of
from ckptplan.simulate import simulate_plan
from tests.flow_models import CASES, OneLayer, token_loss


class Adapter(nn.Module):
    """tanh(frozen linear + a trainable path of low rank)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    """C04: three adapter blocks, the second one used twice, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, shared, last = self.blocks
        return last(shared(shared(first(x))))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adapted() -> tuple[Adapted, Tensor, ChainProfile]:
    torch.manual_seed(0)
    model, x = Adapted(), torch.randn(8, 16)
    return model, x, profile_model(model, "blocks.*", x, loss_of, num_warmup=0, num_trials=1)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss_of(model, x).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> bool:
    pairs = ((left[name], right[name]) for name in left)
    return left.keys() == right.keys() and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
    )


def text(choice: tuple[bool, ...]) -> str:
    return " ".join(f"R({i})" if again else f"K{i}" for i, again in enumerate(choice))


def test_frozen_bases_and_a_block_used_twice_have_the_plain_gradients_under_every_plan() -> None:
    """C04 (1): six gradients, none for what is frozen or unused, hooks fire as often as without a plan."""
    model, x, profile = adapted()
    assert profile.block_ids == ("blocks.0", "blocks.1", "blocks.1@2", "blocks.2")
    fired: list[str] = []
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda gradient: fired.append("hook"))
    plain, times = gradients(model, x), len(fired)
    assert sum(gradient is not None for gradient in plain.values()) == 6
    for choice in itertools.product([False, True], repeat=4):
        fired.clear()
        with checkpointed(model, CheckpointPlan.from_text(text(choice), profile)):
            assert same(gradients(model, x), plain), choice
        assert len(fired) == times


def _two_ranks(rank: int, store: str, plan_text: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        model, x, profile = adapted()
        plain = gradients(model, x)
        model.zero_grad(set_to_none=True)
        checkpointed(model, CheckpointPlan.from_text(plan_text, profile)).permanent()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            parallel.zero_grad(set_to_none=True)
            loss_of(parallel, x.chunk(2)[rank]).backward()
        for name, parameter in model.named_parameters():
            if plain[name] is not None:
                assert torch.allclose(parameter.grad, plain[name], rtol=0, atol=1e-6), name
        dist.barrier()  # waits without the interpreter's lock, which gloo's threads need to let go of their last work
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_block_used_twice_trains_under_data_parallel(tmp_path: Path) -> None:
    """C04 (2)."""
    mp.spawn(_two_ranks, (str(tmp_path / "store"), "R(0) R(1) R(2) R(3)"), nprocs=2)


def test_calls_are_planned_one_by_one() -> None:
    torch.manual_seed(0)
    model, ids = OneLayer(), torch.randint(0, 48, (3, 20))
    profile = profile_model(model, "layers.*", ids, token_loss, num_warmup=0, num_trials=1)
    assert profile.block_ids == ("layers.0", "layers.0@2", "layers.0@3")
    assert modules_of(profile.block_ids) == ("layers.0",) * 3
    plan = plan_checkpoints(
        profile,
        declare_blocks(model, [("layers.0", model.layers[0])]),
        target_kind="activation_budget_fraction",
        target_value=0.8,
    )
    assert 0 < plan.recomputed < 3
    assert CheckpointPlan.from_json(plan.to_json()) == plan


def test_every_forward_begins_anew_also_after_one_that_was_broken_off() -> None:
    model, x, profile = adapted()
    plain = gradients(model, x)
    ran: list[int] = []
    model.blocks[1].down.register_forward_hook(lambda *_: ran.append(len(ran)))
    with checkpointed(model, CheckpointPlan.from_text("K0 K1 R(2) K3", profile)):
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 5))
        model.blocks[1](x)  # called by itself: it takes the first call's turn
        with torch.no_grad():
            model(x)
        ran.clear()
        assert same(gradients(model, x), plain)
    assert len(ran) == 3  # twice in the forward, the second call once more in the backward


def test_a_dry_run_counts_every_call() -> None:
    """Live storages, here on fake tensors and in the profile on real ones."""
    torch.manual_seed(0)
    case = CASES["Shared"]()
    profile = profile_model(case.model, case.paths, case.batch, case.loss, num_warmup=0, num_trials=1, memory="live")
    for plan_text in ("K0 K1 K2 K3 K4", "R(0) R(1) R(2) R(3) R(4)", "K0 R(1) R(2) K3 K4"):
        plan = CheckpointPlan.from_text(plan_text, profile)
        found = verify_plan(case.model, plan, case.batch, case.loss)
        assert found.peak_bytes == simulate_plan(profile, plan).peak_bytes


def test_calls_beyond_those_planned_are_kept() -> None:
    class Loop(Adapted):
        rounds = 2

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.rounds):
                x = self.blocks[1](x)
            return self.blocks[2](self.blocks[0](x))

    torch.manual_seed(0)
    model, x = Loop(), torch.randn(8, 16)
    profile = profile_model(model, "blocks.*", x, loss_of, num_warmup=0, num_trials=1)
    plan = CheckpointPlan.from_text("R(0) R(1) K2 K3", profile)
    for rounds in (1, 4):
        model.rounds = rounds
        plain = gradients(model, x)
        with checkpointed(model, plan):
            assert same(gradients(model, x), plain)
        model.rounds = 2


def test_a_patched_model_copies_and_pickles_and_is_given_back() -> None:
    model, x, profile = adapted()
    plain, keys = gradients(model, x), list(model.state_dict())
    patch = checkpointed(model, CheckpointPlan.from_text("R(0) K1 R(2) K3", profile)).permanent()
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(twin, x), plain)
    patch.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert same(gradients(model, x), plain)


def test_a_container_of_blocks_cannot_run_such_a_plan() -> None:
    model, x, profile = adapted()
    blocks = declare_blocks(model, [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)])
    with pytest.raises(PlanIncompatibleError, match="more than once"):
        apply_plan(blocks, CheckpointPlan.from_text("K0 R(1) K2 K3", profile), (x,))
