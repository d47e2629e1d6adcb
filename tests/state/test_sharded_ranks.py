"""Sharded state of real processes (gloo): DTensors of every placement, FSDP2 with tensor parallelism, AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptplan.state import CheckpointManager, OptimizerByName
from tests.state.sharded_program import Block, Small, make_optimizer, require_equal, states_of, train, train_block
from tests.state.test_ranks import run_ranks

IMPORTS = "import warnings; warnings.simplefilter('ignore')\nfrom tests.state.sharded_program import *\nmeet()\n"


def continue_alone(location: Path, name: str) -> None:
    """One process loads what several saved, and goes on as they did."""
    model = Small()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer = make_optimizer(model)
    with states_of(str(location)) as states:
        template = {"model": model, "optimizer": OptimizerByName(model, optimizer), "step": 0}
        assert states.load(name, into=template)["step"] == 2
        assert states.verify(name) == []
    expected = torch.load(location / f"{name}.expected", weights_only=True)
    require_equal(dict(model.state_dict()), expected[0], 0.0)
    require_equal(OptimizerByName(model, optimizer).state_dict(), expected[1], 0.0)
    train(model, optimizer, range(2, 3))
    require_equal(dict(model.state_dict()), expected[2], 1e-6)


def test_two_ranks_save_every_placement_and_fsdp2_and_one_goes_on(tmp_path: Path) -> None:
    code = """
loads = save_and_load_every_placement(location + "/kinds", (world,), placements_of_one_mesh())
train_and_save(location, "two")
load_and_train(location, "two")
tell(loads=loads)
dist.destroy_process_group()
"""
    assert run_ranks(tmp_path, IMPORTS + code) == [{"loads": 16}] * 2
    continue_alone(tmp_path / "s", "two")
    files = {path.name for path in (tmp_path / "s" / "two").iterdir()}
    assert {"model.0.safetensors", "model.1.safetensors", "optimizer.0.safetensors", "rng.1.safetensors"} <= files
    sizes = [path.stat().st_size - 4096 for path in (tmp_path / "s" / "two").glob("model.*.safetensors")]
    assert sum(sizes) == sum(t.nbytes for n, t in Small().state_dict().items() if n != "head.weight"), "tied: once"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty processes, each of which imports torch
def test_every_number_of_ranks_loads_what_every_other_saved(tmp_path: Path) -> None:
    for world in (1, 2, 3, 4):
        code = f"train_and_save(location, 'from-{world}')\ntell()\ndist.destroy_process_group()\n"
        run_ranks(tmp_path, IMPORTS + code, world=world)
    for world in (1, 2, 3, 4):
        code = (
            "for n in (1, 2, 3, 4):\n    load_and_train(location, f'from-{n}')\ntell()\ndist.destroy_process_group()\n"
        )
        run_ranks(tmp_path, IMPORTS + code, world=world)
    for world in (1, 2, 3, 4):
        continue_alone(tmp_path / "s", f"from-{world}")


FOUR = """
loads = save_and_load_every_placement(location + "/kinds", (2, 2), two_dimensional_kinds())
loads += save_and_load_every_placement(location + "/line", (4,), placements_of_one_mesh())
model = two_dimensional(Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
by_name = OptimizerByName(model, optimizer)
train_block(model, optimizer)
with CheckpointManager(location) as states:
    states.save("block", {"model": model, "optimizer": by_name}).result(60)
kinds = sorted({str(parameter.placements) for parameter in model.parameters()})
expected = whole(model.state_dict()), whole(by_name.state_dict())
train_block(model, optimizer)
expected += (whole(model.state_dict()),)
if rank == 0:
    torch.save(expected, location + "/block.expected")
tell(loads=loads, kinds=kinds)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_four_ranks_on_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    """FSDP2 with tensor parallelism as PyTorch makes it, `_StridedShard` and all."""
    told = run_ranks(tmp_path, IMPORTS + FOUR, world=4)
    assert [facts["loads"] for facts in told] == [25 + 16] * 4
    assert any("_S" in kind or "Strided" in kind for kind in told[0]["kinds"])
    model = Block()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    by_name = OptimizerByName(model, optimizer)
    with CheckpointManager(tmp_path / "s") as states:
        states.load("block", into={"model": model, "optimizer": by_name})
    expected = torch.load(tmp_path / "s" / "block.expected", weights_only=True)
    require_equal(dict(model.state_dict()), expected[0], 0.0)
    require_equal(by_name.state_dict(), expected[1], 0.0)
    train_block(model, optimizer)
    require_equal(dict(model.state_dict()), expected[2], 1e-6)
