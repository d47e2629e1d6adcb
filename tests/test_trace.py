"""Whether blocks form a chain, seen in one real forward; and what the chain's boundaries are measured as."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ckptplan.apply import checkpointed
from ckptplan.blocks import declare_blocks
from ckptplan.errors import BlockDeclarationError
from ckptplan.measure import profile_blocks, profile_model
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.trees import map_tensors, tensors_anywhere, tensors_in
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


def test_a_block_that_does_not_run_is_told() -> None:
    class Skips(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    with pytest.raises(BlockDeclarationError, match=r"block 'layers.2' is declared but does not run"):
        profile(Skips())


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


# --- what the model does with a block's output besides calling the next block ---


def test_values_held_or_looked_at_without_a_gradient_are_no_obstacle() -> None:
    class Held(Model):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            self.largest = float(first.detach().abs().max())
            second = self.layers[1](first)
            return self.layers[2](second)  # first is still held by the frame

    assert len(profile(Held())) == 3


# --- the caller's model stays as it is ---


def test_weights_that_a_block_writes_to_are_put_back_and_the_block_is_excluded() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    model = Model()
    model.layers[1] = Clamps(8, 8)
    before = model.layers[1].weight.detach().clone()
    found = profile(model)
    assert torch.equal(model.layers[1].weight, before)
    assert "writes to its parameter 'layers.1.weight'" in (found[1].exclusion_reason or "")
    assert found[0].exclusion_reason is None


def test_an_embedding_with_a_norm_bound_before_the_blocks_leaves_the_callers_weights() -> None:
    class Embeds(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 8, max_norm=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.embed(x))

    model = Embeds()
    before = model.embed.weight.detach().clone()
    assert profile(model, torch.arange(5)).pre is not None
    assert torch.equal(model.embed.weight, before)


class Reaches(nn.Module):
    """Its function holds the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.function = lambda x: self.norm(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_a_lambda_over_the_module_computes_with_the_twin() -> None:
    model = Model()
    model.layers[1] = Reaches()
    found = profile(model)
    assert all(p.grad is None for p in model.parameters())
    assert model.layers[1].norm.num_batches_tracked == 0
    assert found[1].mutated_buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def test_a_module_that_the_twin_cannot_exchange_is_told_before_it_gets_a_gradient() -> None:
    class Holder:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __deepcopy__(self, memo: dict[int, Any]) -> Holder:
            return self

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.of_linear, self.of_norm = Holder(self.linear), Holder(self.norm)
            self.which = "linear"

        def forward(self, x: Tensor) -> Tensor:
            module = self.of_linear.module if self.which == "linear" else self.of_norm.module
            return self.linear(x) + module(x).detach() if self.which == "norm" else module(x)

    model = Model()
    model.layers[1] = Elsewhere()
    with pytest.raises(BlockDeclarationError, match=r"'layers.1' computes with the parameter 'layers.1.linear"):
        profile(model)
    model.layers[1].which = "norm"
    with pytest.raises(BlockDeclarationError, match=r"changes the buffer 'layers.1.norm"):
        profile(model)
    assert all(p.grad is None for p in model.parameters())
    assert model.layers[1].norm.num_batches_tracked == 0
    assert torch.equal(model.layers[1].norm.running_mean, torch.zeros(8))


def test_a_model_under_a_plan_is_refused() -> None:
    model = Model()
    plan = CheckpointPlan.from_text("K0 R(1) K2", profile(model))
    with (
        checkpointed(model, plan),
        pytest.raises(ValueError, match=r"a plan is active on block 'layers.1'.*call remove\(\)"),
    ):
        profile(model)
    assert len(profile(model)) == 3


# --- batches and values of other kinds ---


@pytest.mark.parametrize("kind", [lambda **held: SimpleNamespace(**held), lambda **held: UserDict(held)])
def test_a_batch_object_is_looked_into_and_stays_the_callers(kind: Any) -> None:
    class Net(Model):
        def forward(self, batch: Any) -> Tensor:
            held = batch.data if isinstance(batch, UserDict) else vars(batch)
            held["calls"].append(1)
            return super().forward(held["x"])

    batch = kind(x=torch.randn(4, 8), calls=[])
    assert profile(Net(), batch).pre is None
    assert (batch.data if isinstance(batch, UserDict) else vars(batch))["calls"] == []
    assert len(tensors_anywhere(batch)) == 1


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(8).to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_tensors_that_are_not_dense_are_told_by_name(tensor: Tensor, word: str) -> None:
    with pytest.raises(TypeError, match=f"an example input is a tensor that is {word}"):
        profile(Model(), {"x": tensor})
    model = Model()
    model.layers[1].register_buffer("table", tensor)
    with pytest.raises(TypeError, match=rf"layers\.1\.table is a tensor that is {word}"):
        profile(model)


@pytest.mark.parametrize("path", ["layers.1", "layers.1.0"])
def test_a_scripted_module_in_a_block_is_told(path: str) -> None:
    with warnings.catch_warnings():
        # a DeprecationWarning until torch 2.13, a FutureWarning since
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script", category=Warning)
        scripted = torch.jit.script(nn.Linear(8, 8))
    model = Model()
    model.layers[1] = scripted if path == "layers.1" else nn.Sequential(scripted)
    with pytest.raises(BlockDeclarationError, match=rf"'{path}' is a torch.jit.ScriptModule"):
        profile(model)


def test_a_model_without_parameters_runs_where_its_batch_is() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * 2)

    model = nn.Sequential(Scales(), Scales())
    blocks = declare_blocks(model, [("0", model[0]), ("1", model[1])])
    x = torch.randn(4, 8, requires_grad=True)
    found = profile_model(model, blocks, x, lambda m, b: mean_square(m(b)), num_warmup=0, num_trials=1)
    assert found[0].device == "cpu"
    assert x.grad is None


class Sized(list):
    def __init__(self, size: int, items: list[Tensor]) -> None:
        super().__init__(items)
        self.size = size


class Pair(tuple):
    def __new__(cls, left: Tensor, right: Tensor) -> Pair:
        return super().__new__(cls, (left, right))


def test_sequences_with_constructors_of_their_own_are_rebuilt() -> None:
    one = torch.ones(2)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    doubled = map_tensors(packed, lambda t: t * 2)
    assert isinstance(doubled, PackedSequence)
    assert doubled.batch_sizes.tolist() == [4, 4, 2]
    assert len(tensors_in(packed)) == 2
    pair, sized = map_tensors((Pair(one, one), Sized(1, [one])), lambda t: t * 3)
    assert type(pair) is Pair
    assert pair[1].tolist() == [3, 3]
    assert (type(sized), sized.size, sized[0].tolist()) == (Sized, 1, [3, 3])
    assert map_tensors(torch.max(torch.ones(2, 3), 0), lambda t: t + 1).indices.tolist() == [1, 1, 1]
    assert map_tensors(torch.Size([2, 3]), lambda t: t) == torch.Size([2, 3])
