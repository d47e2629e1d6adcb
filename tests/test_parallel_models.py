"""Models that talk to other processes: measured without them, or refused by name; never a process that waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import ckptplan
from ckptplan.apply import checkpointed
from ckptplan.dry_run import verify_plan
from ckptplan.equality import check_equality
from ckptplan.errors import BlockDeclarationError, PlanIncompatibleError
from ckptplan.measure import profile_model
from ckptplan.plan import CheckpointPlan

PLAN = CheckpointPlan.from_text("R(0) R(1) K2", [f"layers.{i}" for i in range(3)])


class Block(nn.Module):
    """With buffers, which the wrapper sends to the other processes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone: a call that waits for others returns, and the test sees that it was made."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forwards of the wrapper, which is where processes meet."""
    made: list[str] = []
    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append("forward")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DistributedDataParallel, "forward", forward)
    return made


@pytest.mark.usefixtures("group")
class TestDataParallel:
    def test_the_wrapper_is_refused_with_the_remedy_wherever_it_is_given(self, calls: list[str]) -> None:
        model, batch = DistributedDataParallel(Net()), torch.randn(4, 8)
        remedy = r"wrapped in DistributedDataParallel: give model\.module"
        with pytest.raises(BlockDeclarationError, match=remedy):
            ckptplan.fit(model, batch, loss_fn, 0.7)
        with pytest.raises(BlockDeclarationError, match=remedy):
            profile_model(model, "layers.*", batch, loss_fn)
        for refuse in (
            lambda: checkpointed(model, PLAN),
            lambda: check_equality(model, PLAN, batch, loss_fn),
            lambda: verify_plan(model, PLAN, batch, loss_fn),
        ):
            with pytest.raises(PlanIncompatibleError, match=remedy):
                refuse()
        assert calls == []

    def test_one_inside_the_model_is_refused_with_its_path(self, calls: list[str]) -> None:
        model = nn.ModuleDict({"net": DistributedDataParallel(Net())})
        with pytest.raises(BlockDeclarationError, match=r"'net' is wrapped .* plan first, wrap afterwards; or give"):
            profile_model(model, "net.module.layers.*", torch.randn(4, 8), lambda m, b: loss_fn(m["net"], b))
        assert calls == []

    def test_a_loss_that_calls_the_wrapper_is_refused_before_it_waits(self, calls: list[str]) -> None:
        model, batch = Net(), torch.randn(4, 8)
        parallel = DistributedDataParallel(model)

        def of_the_wrapper(_: nn.Module, given: Tensor) -> Tensor:
            return loss_fn(parallel, given)

        refused = "the loss calls a DistributedDataParallel instead of the model that it is given"
        for blocks in (None, "layers.*"):
            with pytest.raises(BlockDeclarationError, match=refused):
                profile_model(model, blocks, batch, of_the_wrapper)
        with pytest.raises(BlockDeclarationError, match=refused):
            check_equality(model, PLAN, batch, of_the_wrapper)
        with pytest.raises(BlockDeclarationError, match=refused):
            verify_plan(model, PLAN, batch, of_the_wrapper)
        assert calls == []
        loss_fn(parallel, batch).backward()  # and it works as before
        assert calls == ["forward"]

    def test_a_model_that_is_wrapped_already_is_fitted_without_a_word_to_others(self, calls: list[str]) -> None:
        torch.manual_seed(0)
        model, batch = Net(), torch.randn(256, 8)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        with ckptplan.fit(parallel.module, batch, loss_fn, 0.8, say=None) as fitted:
            assert calls == []
            assert fitted.plan.recomputed > 0
            loss_fn(parallel, batch).backward()
        assert calls == ["forward"]
        twin = Net()
        twin.load_state_dict(model.state_dict())
        loss_fn(twin, batch).backward()
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert plain.grad is None or torch.equal(mine.grad, plain.grad)

    def test_a_sharded_model_is_refused_with_the_remedy(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, batch = Net(), torch.randn(4, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        remedy = "is a DTensor, a shard of the whole.*measure and plan before sharding"
        with pytest.raises(BlockDeclarationError, match=remedy):
            profile_model(model, "layers.*", batch, loss_fn)
        with pytest.raises(PlanIncompatibleError, match=remedy):
            check_equality(model, PLAN, batch, loss_fn)
        with pytest.raises(PlanIncompatibleError, match=remedy):
            verify_plan(model, PLAN, batch, loss_fn)


def _rank(rank: int, store: str) -> None:
    """Rank 0 measures and plans while the other waits for its plan; then both train."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(512, 8)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()  # of half a batch they give other values than of a whole one
        loss_fn(model, x).backward()
        plain = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        parallel.zero_grad()
        loss_fn(parallel, x.chunk(2)[rank]).backward()  # the wrapper has run already
        told: list[Any] = [None]
        if rank == 0:
            fitted = ckptplan.fit(parallel.module, x[:256], loss_fn, 0.8, say=None)
            fitted.remove()
            told = [fitted.plan.to_json()]
        dist.broadcast_object_list(told, 0)
        with checkpointed(parallel.module, CheckpointPlan.from_json(told[0])):
            for _ in range(2):
                parallel.zero_grad()
                loss_fn(parallel, x.chunk(2)[rank]).backward()
        for name, parameter in model.named_parameters():
            if plain[name] is not None:
                torch.testing.assert_close(parameter.grad, plain[name], rtol=0, atol=1e-6)
        dist.barrier()  # waits without the interpreter's lock, which gloo's threads need to let go of their last work
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_one_process_plans_for_both_while_the_other_waits(tmp_path: Path) -> None:
    spawn(_rank, (str(tmp_path / "store"),), nprocs=2)
