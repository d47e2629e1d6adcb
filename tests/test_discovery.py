"""Blocks that nobody has named: which lists of a model are taken, and which are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.discovery import find_blocks
from ckptplan.errors import BlockDeclarationError
from tests.flow_models import CASES, Decoder, Feed, NormBetween, Stack, square_loss, token_loss

CPU = torch.device("cpu")


def found(name: str) -> list[str]:
    torch.manual_seed(0)
    case = CASES[name]()
    return [block.block_id for block in find_blocks(case.model, case.batch, case.loss, CPU).blocks]


@pytest.mark.parametrize("name", ["Residual", "Scaled", "DeepSupervision", "Decoder", "Rotary", "HoldsTuple", "Shared"])
def test_a_list_is_found_whatever_the_model_runs_around_its_members(name: str) -> None:
    assert found(name) == ["layers.0", "layers.1", "layers.2"]


def test_the_list_of_a_layer_that_is_called_again_and_again_is_found() -> None:
    assert found("OneLayer") == ["layers.0"]


def test_encoder_and_decoder_are_both_taken() -> None:
    assert found("EncoderDecoder") == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_both_ways_of_a_u_net_are_taken_and_its_single_layers_are_not() -> None:
    assert found("UNet") == ["down.0", "down.1", "up.0", "up.1"]


def test_lists_of_single_layers_are_left_and_named() -> None:
    torch.manual_seed(0)
    selection = find_blocks(NormBetween(), torch.randn(8, 8), square_loss, CPU)
    assert [block.block_id for block in selection.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert "not norms (smaller, of another kind)" in selection.source


def test_a_small_head_of_composed_members_is_left() -> None:
    class Headed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.tops = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for top in self.tops:
                x = top(x)
            return x

    selection = find_blocks(Headed(), torch.randn(8, 8), square_loss, CPU)
    assert [block.block_id for block in selection.blocks] == ["layers.0", "layers.1", "layers.2"]


def test_a_list_of_which_a_member_does_not_run_is_left_and_named() -> None:
    class Half(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.ModuleList(Feed(900) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.spare[0](self.embed(ids)).sum()

    selection = find_blocks(Half(), torch.randint(0, 48, (2, 6)), token_loss, CPU)
    assert [block.block_id for block in selection.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert "spare (spare.1 does not run)" in selection.source


def test_a_model_without_a_list_is_told_how_to_name_blocks() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Feed(8)

        def forward(self, x: Any) -> Any:
            return self.body(x)

    with pytest.raises(BlockDeclarationError, match=r"holds no list of blocks.*blocks.paths=\[body\.\*\]"):
        find_blocks(Bare(), torch.randn(2, 32), square_loss, CPU)


def test_lists_that_do_not_run_are_told_with_the_reason() -> None:
    class Never(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    with pytest.raises(BlockDeclarationError, match=r"no list of Never runs as blocks: layers \(does not run\)"):
        find_blocks(Never(), torch.randn(2, 8), square_loss, CPU)


class Stages(nn.Module):
    """A list of lists, as of a network in stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Feed(16 * (i + 1)) for _ in range(2)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


def test_lists_of_lists_are_looked_into() -> None:
    blocks = find_blocks(Stages(), torch.randn(4, 32), square_loss, CPU).blocks
    assert [block.block_id for block in blocks] == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]


class Stage(nn.Module):
    """A few equal blocks behind a layer that changes the width."""

    def __init__(self, incoming: int, width: int, depth: int) -> None:
        super().__init__()
        self.widen = nn.Linear(incoming, width)
        self.blocks = nn.ModuleList(Feed(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for block in self.blocks:
            x = block(x)
        return x


class Branches(Stage):
    """Equal blocks again, side by side: each takes what came in."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Staged(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def test_of_stages_the_blocks_inside_are_taken() -> None:
    model = Staged(Stage(32, 16, 2), Stage(16, 32, 1), Stage(32, 16, 2))
    selection = find_blocks(model, torch.randn(4, 32), square_loss, CPU)
    within = [f"stages.{i}.blocks.{j}" for i, depth in enumerate((2, 1, 2)) for j in range(depth)]
    assert [block.block_id for block in selection.blocks] == within
    assert selection.source == "the lists stages (the blocks inside their stages)"


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((Branches(32, 32, 2), Branches(32, 32, 2)), id="parts that run side by side"),
        pytest.param((Stage(32, 32, 1), Stage(32, 32, 1)), id="one part in each"),
        pytest.param((Stage(256, 256, 2), nn.Linear(256, 256)), id="a member without parts"),
    ],
)
def test_members_that_are_no_stages_stay_whole(stages: tuple[nn.Module, ...]) -> None:
    width = next(stages[0].parameters()).shape[1]
    selection = find_blocks(Staged(*stages), torch.randn(4, width), square_loss, CPU)
    assert [block.block_id for block in selection.blocks] == ["stages.0", "stages.1"]
