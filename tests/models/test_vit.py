"""ViT against torch's own transformer layers on patches cut by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.models import ViT


def test_logits_equal_those_of_torchs_own_encoder_layers_on_patches_cut_by_hand() -> None:
    torch.manual_seed(0)
    model = ViT(layers=2, width=24, heads=3, patch_size=4, image_size=12, channels=3, classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases start at zero
    images = torch.randn(2, 3, 12, 12)

    patches = torch.stack(
        [images[:, :, row : row + 4, column : column + 4].flatten(1) for row in (0, 4, 8) for column in (0, 4, 8)],
        dim=1,
    )
    x: Tensor = patches @ model.patches.weight.flatten(1).T + model.patches.bias + model.positions
    for block in model.layers:
        attention = nn.MultiheadAttention(24, 3, batch_first=True)
        attention.load_state_dict(
            {
                "in_proj_weight": block.qkv.weight,
                "in_proj_bias": block.qkv.bias,
                "out_proj.weight": block.proj.weight,
                "out_proj.bias": block.proj.bias,
            }
        )
        y = F.layer_norm(x, (24,), block.norm1.weight, block.norm1.bias)
        x = x + attention(y, y, y)[0]
        y = F.layer_norm(x, (24,), block.norm2.weight, block.norm2.bias)
        x = x + F.gelu(y @ block.fc.weight.T + block.fc.bias) @ block.out.weight.T + block.out.bias
    x = F.layer_norm(x, (24,), model.norm.weight, model.norm.bias).mean(dim=1)
    reference = x @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), reference, rtol=1e-5, atol=1e-5)


def test_places_are_told_apart() -> None:
    torch.manual_seed(0)
    model = ViT(layers=2, width=24, heads=3, patch_size=4, image_size=12, channels=3, classes=5)
    images = torch.randn(1, 3, 12, 12)
    assert not torch.allclose(model(images), model(images.roll(4, dims=2)), atol=1e-4)
    nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(images), model(images.roll(4, dims=2)), rtol=1e-4, atol=1e-5)
