"""GPT against torch's own transformer layers with the same weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.models import GPT
from ckptplan.models.transformer import TransformerBlock


def torch_layer(block: TransformerBlock) -> nn.TransformerEncoderLayer:
    """torch's pre-norm encoder layer with the weights of our block."""
    width = block.proj.out_features
    layer = nn.TransformerEncoderLayer(
        width, block.heads, 4 * width, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
    )
    pairs = {
        "self_attn.in_proj_": block.qkv,
        "self_attn.out_proj.": block.proj,
        "linear1.": block.fc,
        "linear2.": block.out,
        "norm1.": block.norm1,
        "norm2.": block.norm2,
    }
    layer.load_state_dict(
        {f"{name}{part}": getattr(ours, part) for name, ours in pairs.items() for part in ("weight", "bias")}
    )
    return layer


def small_gpt(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"layers": 3, "width": 24, "heads": 3, "sequence_length": 10, "vocab_size": 17, **changes})


def random_biases(model: nn.Module) -> None:
    """Biases start at zero, which would hide one that is not used."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)


@pytest.mark.parametrize("length", [1, 7, 10])
def test_logits_and_gradients_equal_those_of_torchs_own_encoder_layers(length: int) -> None:
    model = small_gpt()
    random_biases(model)
    layers = [torch_layer(block) for block in model.layers]
    tokens = torch.randint(17, (2, length))
    mask = nn.Transformer.generate_square_subsequent_mask(length)

    x: Tensor = model.tokens.weight[tokens] + model.positions.weight[:length]
    for layer in layers:
        x = layer(x, src_mask=mask, is_causal=True)
    reference = F.layer_norm(x, (24,), model.norm.weight, model.norm.bias) @ model.head.weight.T
    torch.testing.assert_close(model(tokens), reference, rtol=1e-5, atol=1e-5)

    weights = torch.randn_like(reference)
    (reference * weights).sum().backward()
    qkv_gradient = layers[0].self_attn.in_proj_weight.grad
    model.zero_grad()
    (model(tokens) * weights).sum().backward()
    torch.testing.assert_close(model.layers[0].qkv.weight.grad, qkv_gradient, rtol=1e-4, atol=1e-5)


def test_a_later_token_changes_no_earlier_logit() -> None:
    model = small_gpt()
    tokens = torch.randint(17, (1, 10))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 17
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-6)
    assert (before[:, 6:] - after[:, 6:]).abs().amax(dim=-1).min() > 1e-4


def test_tied_weights_are_one_matrix_that_gets_both_gradients() -> None:
    model, untied = small_gpt(tie_weights=True), small_gpt()
    assert model.head.weight is model.tokens.weight
    count = sum(parameter.numel() for parameter in untied.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == count - 17 * 24

    untied.load_state_dict(model.state_dict())  # holds the matrix under both names
    tokens = torch.randint(17, (2, 10))
    for each in (model, untied):
        each(tokens).logsumexp(-1).sum().backward()
    both = untied.head.weight.grad + untied.tokens.weight.grad
    torch.testing.assert_close(model.head.weight.grad, both, rtol=1e-4, atol=1e-5)


def test_dropout_acts_in_training_only_and_in_attention_too() -> None:
    model = small_gpt(dropout=0.5)
    tokens = torch.randint(17, (2, 10))
    assert not torch.equal(model(tokens), model(tokens))
    plain = small_gpt()
    model.eval()
    assert torch.equal(model(tokens), plain(tokens))

    block = TransformerBlock(24, 3, dropout=0.5, causal=True)
    heads = block.heads_of(torch.randn(1, 10, 24))
    assert not torch.equal(block.attend(*heads), block.attend(*heads))


def test_the_first_loss_is_near_that_of_a_guess() -> None:
    torch.manual_seed(0)
    model = GPT(layers=8, width=128, heads=4, sequence_length=128)
    tokens = torch.randint(256, (2, 128))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(5.545 + 0.2, abs=0.2)  # ln 256, and half the variance 0.4 of the logits
