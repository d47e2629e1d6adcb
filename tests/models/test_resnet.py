"""The ResNet's block against one written with matrix products and the formula of BatchNorm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.models import ResNet
from ckptplan.models.resnet import BasicBlock


def convolution(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The convolution as a matrix product over unfolded patches."""
    size, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    columns = F.unfold(x, size, padding=padding, stride=stride)  # (B, C * size^2, positions)
    side = (x.shape[-1] + 2 * padding - size) // stride + 1
    return (conv.weight.flatten(1) @ columns).unflatten(2, (side, side))


def batch_norm(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """With the statistics of this batch."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    scale, shift = norm.weight[:, None, None], norm.bias[:, None, None]
    return (x - mean) / (variance + norm.eps).sqrt() * scale + shift


def reference(x: Tensor, block: BasicBlock) -> Tensor:
    y = batch_norm(convolution(x, block.conv1), block.norm1).clamp(min=0)
    y = batch_norm(convolution(y, block.conv2), block.norm2)
    if isinstance(block.shortcut, nn.Sequential):
        x = batch_norm(convolution(x, block.shortcut[0]), block.shortcut[1])
    return (x + y).clamp(min=0)


@pytest.mark.parametrize(("width_out", "stride"), [(6, 1), (8, 1), (6, 2), (8, 2)])
def test_a_block_and_its_input_gradient_equal_the_hand_written_one(width_out: int, stride: int) -> None:
    torch.manual_seed(0)
    block = BasicBlock(6, width_out, stride)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(4, 6, 8, 8)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = block(ours), reference(theirs, block)
    assert y.shape == (4, width_out, 8 // stride, 8 // stride)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(y)
    gradient = torch.autograd.grad((y * weights).sum(), ours)[0]
    expected_gradient = torch.autograd.grad((expected * weights).sum(), theirs)[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-3)


def test_all_stages_stand_in_one_flat_list_and_each_but_the_first_halves_the_image() -> None:
    model = ResNet(blocks=[2, 1, 2], widths=[4, 8, 16], channels=3, classes=5)
    shapes: list[tuple[int, ...]] = []
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[1:])))
    model(torch.randn(2, 3, 16, 16))
    assert shapes == [(4, 16, 16), (4, 16, 16), (8, 8, 8), (16, 4, 4), (16, 4, 4)]


def test_images_of_another_size_work() -> None:
    model = ResNet(blocks=[1, 1], widths=[4, 8], channels=3, classes=5)
    assert model(torch.randn(2, 3, 20, 12)).shape == (2, 5)


def test_batch_norm_counts_each_training_batch_once() -> None:
    model = ResNet(blocks=[1, 1], widths=[4, 8], channels=3, classes=5)
    model(torch.randn(2, 3, 8, 8))
    model(torch.randn(2, 3, 8, 8))
    model.eval()(torch.randn(2, 3, 8, 8))
    counts = [module.num_batches_tracked.item() for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert counts == [2] * 6
