"""Whether blocks form a chain, seen in one real forward; and what the chain's boundaries are measured as."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.blocks import declare_blocks
from ckptplan.errors import BlockDeclarationError, UnsupportedBoundaryError
from ckptplan.measure import profile_blocks, profile_model
from ckptplan.profiles import ChainProfile
from tests.chains import declared, mean_square


class Model(nn.Module):
    """Three layers; subclasses say how they are run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def profile(model: nn.Module, batch: Any = None) -> ChainProfile:
    blocks = declare_blocks(model, [(f"layers.{i}", layer) for i, layer in enumerate(model.layers)])
    batch = torch.randn(4, 8) if batch is None else batch
    return profile_model(
        model, blocks, batch, lambda m, b: mean_square(m(b)), num_warmup=0, num_trials=1, memory="live"
    )


def test_blocks_declared_in_another_order_than_they_run_are_told() -> None:
    model = Model()
    blocks = declare_blocks(model, [("one", model.layers[1]), ("zero", model.layers[0]), ("two", model.layers[2])])
    with pytest.raises(BlockDeclarationError, match="block 'zero' runs before 'one'; declare the blocks in the order"):
        profile_model(model, blocks, torch.randn(4, 8), lambda m, b: mean_square(m(b)), num_trials=1, memory="live")


def test_a_block_that_runs_twice_is_told() -> None:
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](super().forward(x))

    with pytest.raises(BlockDeclarationError, match=r"block 'layers.1' runs again after 'layers.2'"):
        profile(Twice())


def test_a_block_that_does_not_run_is_told() -> None:
    class Skips(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    with pytest.raises(BlockDeclarationError, match=r"block 'layers.2' is declared but does not run"):
        profile(Skips())


@pytest.mark.parametrize("between", [lambda x: x * 2, lambda x: x + 1, torch.tanh, torch.clone])
def test_code_of_the_model_between_two_blocks_is_told(between) -> None:
    class Between(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](between(self.layers[1](self.layers[0](x))))

    with pytest.raises(UnsupportedBoundaryError, match=r"'layers.2' is called with a tensor of shape \(4, 8\)"):
        profile(Between())


def test_a_skip_around_a_block_that_the_model_adds_is_told() -> None:
    class Skip(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            return self.layers[2](x + self.layers[1](x))

    with pytest.raises(UnsupportedBoundaryError, match="computes something between"):
        profile(Skip())


def test_what_stands_before_the_step_may_enter_any_block() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) * mask

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Masked() for _ in range(3))
            self.register_buffer("mask", torch.ones(8))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            x = batch["x"]
            for layer in self.layers:
                x = layer(x, batch["mask"])
            return x

    found = profile(Net(), {"x": torch.randn(4, 8), "mask": torch.ones(4, 8)})
    assert len(found) == 3
    assert found.pre is None
    assert found[0].keep.keeps_input == ()  # both stand before the step


def test_a_model_whose_blocks_start_after_code_of_its_own_has_a_region_before_them() -> None:
    class Embeds(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 1)

    found = profile(Embeds())
    assert found.pre is not None
    assert found.pre.output_bytes == (4 * 8 * 4,)
    assert profile(Model()).pre is None


def test_views_of_one_storage_count_it_once_for_both_sides() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = self.linear(x).chunk(2, dim=1)
            return left, right

    class Join(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left * right

    blocks = declared([nn.Linear(8, 8), Split(), Join()])
    found = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1)
    assert found[1].output_bytes == (4 * 16 * 4,)
    assert found[1].output_gradient_bytes == 4 * 16 * 4
    assert found[2].keep.keeps_input == (True,)
    assert found[2].keep.saved_bytes == 0


def test_a_value_handed_through_is_known_as_the_same_memory() -> None:
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), skip

    class Start(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

    blocks = declared([nn.Linear(8, 8), Start(), Pass(), Pass()])
    found = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1)
    assert found[1].output_is_input == (None, None)
    assert found[2].output_is_input == (None, 1)
    assert found[2].output_bytes == (4 * 8 * 4, 0)
    assert found[2].kind == found[3].kind


def test_dicts_are_taken_apart_too() -> None:
    class Entry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor, scale: float = 1.0) -> dict[str, Any]:
            return OrderedDict(hidden=self.linear(hidden) * scale, scale=2.0)

    blocks = declared([Entry(), Entry(), Entry()])
    found = profile_blocks(blocks, (torch.randn(4, 8),), device="cpu", num_warmup=0, num_trials=1)
    assert [b.output_bytes for b in found] == [(128,)] * 3
    assert "hidden" in found[1].output_shape_signature
    assert "float32[4,8]" in found[1].output_shape_signature


def test_the_callers_forwards_are_untouched_after_an_error_midway() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("midway")

    model = Model()
    model.layers[1] = Fails()
    with pytest.raises(RuntimeError, match="midway"):
        profile(model)
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_a_forward_that_was_set_on_an_instance_is_run_and_put_back() -> None:
    model = Model()
    original = model.layers[1].forward

    def doubled(x: Tensor) -> Tensor:
        return original(x) * 2

    model.layers[1].forward = doubled
    found = profile(model)
    assert vars(model.layers[1])["forward"] is doubled
    assert found[1].kind != found[2].kind
