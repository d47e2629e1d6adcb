"""The MLP chain against its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ckptplan.models import MLP


def test_logits_equal_the_formula() -> None:
    torch.manual_seed(0)
    model = MLP(width=8, hidden_widths=[4, 40, 16], image_size=5, channels=2, classes=3)
    images = torch.randn(4, 2, 5, 5)
    x = images.reshape(4, 50) @ model.embed.weight.T + model.embed.bias
    for block in model.layers:
        mean, variance = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        y = (x - mean) / (variance + 1e-5).sqrt() * block.norm.weight + block.norm.bias
        y = y @ block.fc.weight.T + block.fc.bias
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
        x = x + y @ block.out.weight.T + block.out.bias
    reference = F.layer_norm(x, (8,)) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), reference, rtol=1e-5, atol=1e-5)
    assert [block.fc.out_features for block in model.layers] == [4, 40, 16]


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model = MLP(width=8, hidden_widths=[40], image_size=5, channels=2, classes=3, dropout=0.5)
    images = torch.randn(4, 2, 5, 5)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
