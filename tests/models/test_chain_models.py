"""What all five models promise: a pure chain of blocks, exact sizes, the same weights for the same seed."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.data import DataSpec
from ckptplan.models import GPT, MLP, ChainModel, ResNet, UNet, ViT

IMAGES = {"channels": 3, "classes": 10}
MAKE: dict[str, Callable[[], ChainModel]] = {
    "gpt": lambda: GPT(layers=3, width=16, heads=2, sequence_length=12),
    "vit": lambda: ViT(layers=3, width=16, heads=2, patch_size=4, image_size=16, **IMAGES),
    "resnet": lambda: ResNet(blocks=[1, 2], widths=[8, 16], **IMAGES),
    "unet": lambda: UNet(widths=[4, 8, 12], image_size=16, **IMAGES),
    "mlp": lambda: MLP(width=16, hidden_widths=[8, 64, 24], image_size=16, **IMAGES),
}
every_model = pytest.mark.parametrize("name", MAKE)


def batch_for(model: ChainModel, batch: int = 2) -> Tensor:
    spec = model.expects
    if spec.kind == "tokens":
        return torch.randint(spec.vocab_size, (batch, spec.sequence_length))
    size = spec.image_size or 16
    return torch.randn(batch, spec.channels, size, size)


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@every_model
def test_the_blocks_are_named_by_their_module_path_in_the_order_of_the_layers(name: str) -> None:
    model = MAKE[name]()
    blocks = model.declared_blocks()
    assert [block_id for block_id, _ in blocks] == [f"layers.{index}" for index in range(len(model.layers))]
    assert all(model.get_submodule(block_id) is block for block_id, block in blocks)


@every_model
def test_each_block_runs_once_on_exactly_what_the_block_before_returned(name: str) -> None:
    model = MAKE[name]()
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    for _, block in model.declared_blocks():
        block.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((module, args, kwargs, output)), with_kwargs=True
        )
    model(batch_for(model))
    assert [module for module, *_ in calls] == list(model.layers)
    for (_, _, _, output), (_, args, kwargs, _) in pairwise(calls):
        assert not kwargs
        assert len(args) == len(as_tuple(output))
        assert all(got is given for got, given in zip(args, as_tuple(output), strict=True))


@every_model
def test_no_handle_on_a_boundary_outlives_the_block_that_reads_it(name: str) -> None:
    model = MAKE[name]()
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        alive.append(sum(all(ref() is not arg for arg in args) for ref in seen if ref() is not None))
        seen.extend(weakref.ref(arg) for arg in args)

    for _, block in model.declared_blocks():
        block.register_forward_pre_hook(before)
    with torch.no_grad():
        model(batch_for(model))
    assert alive == [0] * len(model.layers)
    assert all(ref() is None for ref in seen)


@every_model
def test_no_block_writes_into_its_input(name: str) -> None:
    model = MAKE[name]()
    before: list[Tensor] = []

    def copy_inputs(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        before[:] = [arg.clone() for arg in args]

    def compare_inputs(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        assert all(torch.equal(arg, copy) for arg, copy in zip(args, before, strict=True))

    for _, block in model.declared_blocks():
        block.register_forward_pre_hook(copy_inputs)
        block.register_forward_hook(compare_inputs)
    inputs = batch_for(model)
    inputs_before = inputs.clone()
    model(inputs)
    assert torch.equal(inputs, inputs_before)


@every_model
def test_logits_have_the_classes_last_and_every_parameter_gets_a_gradient(name: str) -> None:
    model = MAKE[name]()
    logits = model(batch_for(model))
    assert tuple(logits.shape) == ((2, 12, 256) if name == "gpt" else (2, 10))
    assert logits.dtype == torch.float32
    logits.logsumexp(-1).sum().backward()
    without = [path for path, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


# Counted by hand from the layer shapes.
def transformer_parameters(layers: int, width: int) -> int:
    return layers * ((2 * width) * 2 + width * 3 * width + 3 * width + width**2 + width + 2 * 4 * width**2 + 5 * width)


def conv_pair_parameters(width_in: int, width_out: int) -> int:
    return 9 * width_in * width_out + 9 * width_out**2 + 2 * width_in + 4 * width_out


PARAMETERS = {
    "gpt": 256 * 16 + 12 * 16 + transformer_parameters(3, 16) + 32 + 16 * 256,
    "vit": 3 * 16 * 16 + 16 + 16 * 16 + transformer_parameters(3, 16) + 32 + 16 * 10 + 10,
    "resnet": (27 * 8 + 16)
    + (2 * 9 * 64 + 2 * 16)
    + (9 * 8 * 16 + 9 * 256 + 2 * 32 + 8 * 16 + 32)
    + (2 * 9 * 256 + 2 * 32)
    + (16 * 10 + 10),
    "unet": (27 * 4 + 4)
    + conv_pair_parameters(4, 4)
    + conv_pair_parameters(4, 8)
    + conv_pair_parameters(8, 12)
    + (4 * 12 * 8 + 8 + conv_pair_parameters(16, 8))
    + (4 * 8 * 4 + 4 + conv_pair_parameters(8, 4))
    + (4 * 10 + 10),
    "mlp": (768 * 16 + 16) + sum(32 + 2 * 16 * hidden + hidden + 16 for hidden in (8, 64, 24)) + 32 + (160 + 10),
}


@every_model
def test_the_number_of_parameters_is_the_one_counted_by_hand(name: str) -> None:
    assert sum(parameter.numel() for parameter in MAKE[name]().parameters()) == PARAMETERS[name]


@every_model
def test_the_global_seed_decides_the_weights(name: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return MAKE[name]().state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@every_model
def test_a_model_says_what_it_expects(name: str) -> None:
    size = None if name == "resnet" else 16
    images = DataSpec("images", channels=3, image_size=size, classes=10)
    tokens = DataSpec("tokens", vocab_size=256, sequence_length=12)
    assert MAKE[name]().expects == (tokens if name == "gpt" else images)


@every_model
def test_a_model_in_bfloat16_or_under_autocast_takes_the_same_batches(name: str) -> None:
    torch.manual_seed(0)
    model = MAKE[name]()
    inputs = batch_for(model)
    logits = model(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(inputs)
    low = model.to(torch.bfloat16)(inputs)
    assert mixed.dtype == low.dtype == torch.bfloat16
    for other in (mixed, low):
        torch.testing.assert_close(other.float(), logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("gpt", torch.zeros(2, 13, dtype=torch.long), "shape (2, 13)"),
        ("gpt", torch.zeros(2, 13, dtype=torch.long), "time at most sequence_length=12"),
        ("gpt", torch.zeros(12, dtype=torch.long), "int64 tokens (batch, time)"),
        ("gpt", torch.zeros(2, 12), "torch.float32"),
        ("vit", torch.zeros(2, 3, 12, 16), "expected floating-point images (batch, channels=3, 16, 16)"),
        ("resnet", torch.zeros(2, 1, 16, 16), "expected floating-point images (batch, channels=3, height, width)"),
        ("unet", torch.zeros(2, 3, 32, 32), "shape (2, 3, 32, 32)"),
        ("mlp", torch.zeros(2, 768), "channels=3, 16, 16"),
        ("mlp", torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "torch.uint8"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_shape(name: str, inputs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MAKE[name]()(inputs)


GPT_SIZES = {"layers": 2, "width": 16, "heads": 2, "sequence_length": 8}
VIT_SIZES = {"layers": 2, "width": 16, "heads": 2, "patch_size": 4, "image_size": 16, **IMAGES}
UNET_SIZES = {"widths": [4, 8], "image_size": 16, **IMAGES}
MLP_SIZES = {"width": 8, "hidden_widths": [8], "image_size": 8, **IMAGES}
RESNET_SIZES = {"blocks": [1, 1], "widths": [8, 8], **IMAGES}


@pytest.mark.parametrize(
    ("model", "sizes", "wrong", "message"),
    [
        (GPT, GPT_SIZES, {"layers": 0}, "layers=0 is too small; expected a whole number >= 1"),
        (GPT, GPT_SIZES, {"heads": 3}, "width=16 does not split evenly over heads=3; expected a multiple of heads"),
        (GPT, GPT_SIZES, {"dropout": 1}, "dropout=1; expected a finite number with 0 <= dropout < 1"),
        (GPT, GPT_SIZES, {"vocab_size": 1}, "vocab_size=1 is too small"),
        (GPT, GPT_SIZES, {"sequence_length": -4}, "sequence_length=-4"),
        (ViT, VIT_SIZES, {"patch_size": 5}, "patch_size=5 does not divide image_size=16"),
        (ViT, VIT_SIZES, {"classes": 1}, "classes=1"),
        (ResNet, RESNET_SIZES, {"blocks": [1]}, "blocks=[1] and widths=[8, 8]; expected one number per stage in both"),
        (ResNet, RESNET_SIZES, {"widths": [8, 0]}, "widths[1]=0"),
        (UNet, UNET_SIZES, {"widths": [6, 8]}, "widths=[6, 8]; expected at least two multiples of 4"),
        (UNet, UNET_SIZES, {"widths": [8]}, "widths=[8]; expected at least two multiples of 4"),
        (UNet, UNET_SIZES, {"image_size": 15}, "image_size=15; 2 levels halve it 1 times, expected a multiple of 2"),
        (MLP, MLP_SIZES, {"hidden_widths": []}, "hidden_widths=[]; expected a list of at least one whole number"),
        (MLP, MLP_SIZES, {"hidden_widths": "64"}, "hidden_widths='64'; expected a list"),
    ],
)
def test_impossible_sizes_are_refused_naming_argument_value_and_what_is_expected(
    model: type[ChainModel], sizes: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    model(**sizes)
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**{**sizes, **wrong})


@pytest.mark.parametrize("value", ["8", 8.0, True, None])
def test_a_size_of_the_wrong_type_is_a_type_error_naming_it(value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"width={value!r} is a {type(value).__name__}")):
        GPT(**{**GPT_SIZES, "width": value})
