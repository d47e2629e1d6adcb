"""The U-Net chain against the U-Net as one usually writes it: encoder loop, list of skips, decoder loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ckptplan.models import UNet
from ckptplan.models.unet import ConvPair


def conv_pair(x: Tensor, convs: ConvPair) -> Tensor:
    branches = []
    for conv, norm in ((convs.conv1, convs.norm1), (convs.conv2, convs.norm2)):
        groups = x.unflatten(1, (4, -1))
        mean, variance = groups.mean((2, 3, 4), keepdim=True), groups.var((2, 3, 4), unbiased=False, keepdim=True)
        y = ((groups - mean) / (variance + norm.eps).sqrt()).flatten(1, 2)
        y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = F.conv2d(y * y.sigmoid(), conv.weight, conv.bias, padding=1)
        branches.append(x)
    return branches[0] + branches[1]


def usual_unet(model: UNet, images: Tensor, levels: int) -> Tensor:
    encoder, middle, decoder = model.layers[: levels - 1], model.layers[levels - 1], model.layers[levels:]
    x = F.conv2d(images, model.stem.weight, model.stem.bias, padding=1)
    skips: list[Tensor] = []
    for down in encoder:
        x = conv_pair(x, down.convs)
        skips.append(x)
        x = (x[:, :, 0::2, 0::2] + x[:, :, 0::2, 1::2] + x[:, :, 1::2, 0::2] + x[:, :, 1::2, 1::2]) / 4
    x = conv_pair(x, middle.convs)
    for up in decoder:
        x = F.conv_transpose2d(x, up.up.weight, up.up.bias, stride=2)
        x = conv_pair(torch.cat([x, skips.pop()], dim=1), up.convs)
    return x.flatten(2).mean(2) @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize("widths", [[4, 8], [4, 12, 8], [8, 4, 12, 16]])
def test_logits_equal_those_of_a_unet_with_a_list_of_skips(widths: list[int]) -> None:
    torch.manual_seed(0)
    model = UNet(widths=widths, image_size=16, channels=3, classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms start at one and zero
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), usual_unet(model, images, len(widths)), rtol=1e-4, atol=1e-4)


def test_the_blocks_hand_on_the_newest_skip_first_and_the_same_tensors_all_the_way() -> None:
    model = UNet(widths=[4, 8, 12], image_size=16, channels=3, classes=5)
    outputs: list[Tensor | tuple[Tensor, ...]] = []
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(torch.randn(2, 3, 16, 16))
    shapes = [
        [tuple(part.shape[1:]) for part in (output if isinstance(output, tuple) else (output,))] for output in outputs
    ]
    assert shapes == [
        [(4, 8, 8), (4, 16, 16)],
        [(8, 4, 4), (8, 8, 8), (4, 16, 16)],
        [(12, 4, 4), (8, 8, 8), (4, 16, 16)],
        [(8, 8, 8), (4, 16, 16)],
        [(4, 16, 16)],
    ]
    assert isinstance(outputs[-1], Tensor)
    assert outputs[0][1] is outputs[1][2] is outputs[2][2] is outputs[3][1]
    assert outputs[1][1] is outputs[2][1]
