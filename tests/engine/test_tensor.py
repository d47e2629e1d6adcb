"""Which matrices of a model are cut, and what is refused by name before any process is started."""

from __future__ import annotations

import pytest
from torch import nn

from ckptplan.engine.tensor import styles_of
from ckptplan.errors import ConfigError
from ckptplan.models.gpt import GPT
from ckptplan.models.vit import ViT


def gpt(**changes: object) -> GPT:
    sizes = {"layers": 2, "width": 16, "heads": 4, "sequence_length": 8, "vocab_size": 32, "separate_qkv": True}
    return GPT(**{**sizes, **changes})  # type: ignore[arg-type]


def test_of_our_blocks_heads_and_hidden_features_are_shared() -> None:
    vit = ViT(layers=1, width=16, heads=2, patch_size=4, image_size=8, channels=1, classes=2, separate_qkv=True)
    for model, layers in ((gpt(), 2), (vit, 1)):
        expected = {
            f"layers.{layer}.{name}": style
            for layer in range(layers)
            for style, names in (("colwise", "q k v fc"), ("rowwise", "proj out"))
            for name in names.split()
        }
        assert styles_of(model, None, 2) == expected


def test_of_a_llama_the_plan_that_its_configuration_carries() -> None:
    pytest.importorskip("transformers")
    from ckptplan.models.hf import HFModel

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    llama = HFModel(model_type="llama", config={**sizes, "num_key_value_heads": 2}, vocab_size=32)
    styles = styles_of(llama, None, 2)
    assert styles["model.model.layers.0.self_attn.q_proj"] == "colwise"
    assert styles["model.model.layers.0.mlp.down_proj"] == "rowwise"
    assert len(styles) == 7
    with pytest.raises(ConfigError, match="num_key_value_heads=2 do not split evenly over 4 ranks"):
        styles_of(llama, None, 4)
    gpt2 = HFModel(model_type="gpt2", config={"n_layer": 1, "n_embd": 16, "n_head": 2}, vocab_size=32)
    with pytest.raises(ConfigError, match="GPT2Config carries no base_model_tp_plan"):
        styles_of(gpt2, None, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.fc": "col"}, "'layers.*.fc' is to be cut as 'col'; there are colwise, rowwise,"),
        ({"nope": "colwise"}, "engine.tp_plan: 'nope' matches no module of the model"),
        ({"layers.*.norm1": "colwise"}, "layers.0.norm1 is a LayerNorm; PyTorch cuts nn.Linear and nn.Embedding"),
        ({"tokens": "rowwise"}, "tokens is an embedding, whose input is whole"),
        ({"positions": "rowwise_rep"}, "positions.weight: 8 rows are not shared evenly by 3 ranks"),
    ],
)
def test_a_plan_that_fits_no_model_is_told(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        styles_of(gpt(), plan, 3)
    assert message in str(raised.value)


def test_what_cannot_be_cut_is_told() -> None:
    for model, message in (
        (gpt(separate_qkv=False), "one matrix for queries, keys and values, which cannot be cut by heads"),
        (gpt(heads=1), "heads=1 do not split evenly over 2 ranks"),
        (nn.Linear(2, 2), "Linear does not say which of its matrices are cut"),
    ):
        with pytest.raises(ConfigError) as raised:
            styles_of(model, None, 2)
        assert message in str(raised.value)
    with pytest.raises(ConfigError, match="head and tokens share a weight, which a cut would part"):
        styles_of(gpt(tie_weights=True), {"head": "colwise_rep"}, 2)
