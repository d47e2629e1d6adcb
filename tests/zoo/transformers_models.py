"""Rows of the zoo from Hugging Face's transformers: tiny configurations, random weights, called as users call them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.entries import Entry, Make

VOCABULARY, LENGTH, WIDTH = 64, 32, 32
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model itself computes from ``labels``; its output is a dataclass."""
    return model(**batch).loss


def hidden_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in distillation: every hidden state counts; transformers collects them by hooks that it puts on the layers."""
    output = model(**batch, output_hidden_states=True)
    return output.loss + torch.stack([state.square().mean() for state in output.hidden_states]).sum()


def tokens(padded: bool = False) -> dict[str, Tensor]:
    inputs = torch.randint(1, VOCABULARY, (4, LENGTH))
    batch = {"input_ids": inputs, "labels": inputs}
    if padded:
        mask = torch.ones_like(inputs)
        mask[1, LENGTH // 2 :] = 0
        batch["attention_mask"] = mask
    return batch


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}


def segmented() -> dict[str, Tensor]:
    return images() | {"labels": torch.randint(5, (4, 16, 16))}


def of(class_name: str, batch: Any, **config: Any) -> Make:
    def make() -> tuple[nn.Module, Any]:
        kind = getattr(transformers, class_name)
        return kind(kind.config_class(**config)).train(), batch()

    return make


LLAMA = SIZES | {"intermediate_size": 64, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "use_cache": False}
GPT2 = {"n_embd": WIDTH, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64, "use_cache": False}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
BERT = SIZES | {"intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
VIT = SIZES | {"intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": 5}
T5 = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
T5 |= {"use_cache": False, "decoder_start_token_id": 0}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": 5}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
SEGFORMER |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGFORMER |= {"decoder_hidden_size": 16, "num_labels": 5}
MIXTRAL = LLAMA | {"intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}

TRANSFORMERS = [
    Entry(
        "transformers Llama", "rotary tables to every block", of("LlamaForCausalLM", tokens, **LLAMA), own_loss, None
    ),
    Entry(
        "transformers Llama, use_cache on",
        "a cache object to every block, filled in the forward",
        of("LlamaForCausalLM", tokens, **(LLAMA | {"use_cache": True})),
        own_loss,
        None,
        refused="leaves tensors with their graph in its argument",
    ),
    Entry(
        "transformers Llama, hidden states in the loss",
        "hooks on the blocks collect what the loss needs",
        of("LlamaForCausalLM", tokens, **LLAMA),
        hidden_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers GPT-2",
        "dropout, tied embeddings",
        of("GPT2LMHeadModel", tokens, **GPT2),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers BERT",
        "a padding mask, dropout",
        of("BertForMaskedLM", lambda: tokens(True), **BERT),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry("transformers ViT", "images", of("ViTForImageClassification", images, **VIT), own_loss, None),
    Entry(
        "transformers Swin",
        "blocks inside stages, paths dropped at random",
        of("SwinForImageClassification", images, **(SWIN | {"num_labels": 5, "drop_path_rate": 0.3})),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers SegFormer",
        "blocks inside stages, of which hooks collect what the head needs",
        of(
            "SegformerForSemanticSegmentation",
            lambda: images() | {"labels": torch.randint(5, (4, 16, 16))},
            **SEGFORMER,
        ),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers ResNet",
        "blocks inside stages, running statistics",
        of("ResNetForImageClassification", images, **RESNET),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers T5",
        "encoder and decoder",
        of("T5ForConditionalGeneration", tokens, **T5),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry(
        "transformers DeBERTa",
        "one table of relative positions, a weight, to every block",
        of("DebertaV2ForMaskedLM", lambda: tokens(True), **DEBERTA),
        own_loss,
        None,
        is_slow=True,
    ),
    Entry("transformers Mixtral", "experts", of("MixtralForCausalLM", tokens, **MIXTRAL), own_loss, None, is_slow=True),
    Entry(
        "transformers Mixtral, router's loss",
        "hooks inside the blocks collect what the loss needs",
        of("MixtralForCausalLM", tokens, **(MIXTRAL | {"output_router_logits": True})),
        own_loss,
        None,
        refused="it reads what a block leaves beside its output",
    ),
]
