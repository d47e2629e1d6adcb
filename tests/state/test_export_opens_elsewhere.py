"""What ``export`` writes is opened by the loader of ``transformers``, tied weights included."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers

from ckptplan.state import CheckpointManager
from ckptplan.state.cli import main
from tests.state.test_sharded import ROWS, save


def tiny(kind: str) -> torch.nn.Module:
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(**sizes, hidden_size=16, intermediate_size=32, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(("kind", "shard_size"), [("gpt2", "8KiB"), ("llama", "5GB")])
def test_from_pretrained_opens_an_exported_model(tmp_path: Path, kind: str, shard_size: str) -> None:
    model = tiny(kind).eval()
    with CheckpointManager(tmp_path / "state", mode="sync") as states:
        states.save("step-1", {"model": model, "step": 1})
    target = tmp_path / "exported"
    assert main(["export", str(tmp_path / "state"), "step-1", str(target), "--shard-size", shard_size]) == 0
    model.config.save_pretrained(target)
    assert len(list(target.glob("*.safetensors"))) > (1 if shard_size == "8KiB" else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the library's own
        opened = type(model).from_pretrained(target).eval()
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)


def test_from_pretrained_opens_a_model_that_three_ranks_saved(tmp_path: Path) -> None:
    model = tiny("llama").eval()
    save(tmp_path / "state", ROWS[3], dict(model.state_dict()))
    target = tmp_path / "exported"
    assert main(["export", str(tmp_path / "state"), "a", str(target), "--shard-size", "8KiB"]) == 0
    model.config.save_pretrained(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        opened = type(model).from_pretrained(target)
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
