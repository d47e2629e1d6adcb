"""``model=hf``: any transformers configuration behind the harness's contract."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig

from ckptplan.data.spec import DataSpec
from ckptplan.models.hf import HFModel

Compose = Callable[..., DictConfig]

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"intermediate_size": 32, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "bert": _SIZES | {"intermediate_size": 32},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "mixtral": _SIZES | {"intermediate_size": 16, "num_key_value_heads": 1, "num_local_experts": 2},
}
VIT = _SIZES | {"intermediate_size": 32, "patch_size": 4}


def tiny(model_type: str, **more: Any) -> HFModel:
    return HFModel(model_type=model_type, config=TINY[model_type], vocab_size=32, sequence_length=8, **more)


@pytest.mark.parametrize(
    ("model_type", "title"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("mixtral", "MixtralForCausalLM"),
    ],
)
def test_token_models_give_logits_for_each_position(model_type: str, title: str) -> None:
    model = tiny(model_type)
    tokens = torch.randint(32, (3, 8))
    assert model(tokens).shape == (3, 8, 32)
    assert (model.title, model.training, model.expects.kind, model.expects.vocab_size) == (title, True, "tokens", 32)


def test_image_models_give_logits_for_each_image() -> None:
    model = HFModel(model_type="vit", config=VIT, vocab_size=32, image_size=16, channels=1, classes=5)
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 5)
    assert model.expects == DataSpec("images", channels=1, image_size=16, classes=5)


def test_logits_are_those_of_the_class_itself() -> None:
    model = tiny("llama").eval()
    tokens = torch.randint(32, (3, 8))
    assert torch.equal(model(tokens), model.model(input_ids=tokens, use_cache=True).logits)


def test_the_cache_is_off_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = tiny("llama")
    assert model.model.config.use_cache is False
    assert "past_key_values" not in model.model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert "use_cache=False: a key-value cache is for generation" in caplog.text


def test_sizes_of_the_data_are_taken_unless_the_user_says_others() -> None:
    assert tiny("gpt2").model.config.n_positions == 1024
    model = HFModel(model_type="gpt2", config=TINY["gpt2"] | {"vocab_size": 99}, vocab_size=32, sequence_length=2000)
    assert model.model.config.vocab_size == 99
    assert model.model.config.n_positions == model.expects.sequence_length == 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"needs model_type \(such as gpt2\), architecture \(such as BertForMaskedLM\) or path"),
        ({"model_type": "lama"}, r"model_type='lama' is none that transformers has; did you mean 'llama'\?"),
        ({"architecture": "LamaForCausalLM"}, r"no model class of transformers; did you mean 'LlamaForCausalLM'\?"),
        (
            {"path": "nowhere"},
            r"path='nowhere' is no folder that save_pretrained wrote: there is no config\.json in it",
        ),
        (
            {"model_type": "llama", "config": {"hiden_size": 3}},
            r"config\.hiden_size: LlamaConfig has no such key; did you",
        ),
        ({"model_type": "llama", "config": {"use_cache": True}}, r"config\.use_cache=True cannot be set: a key-value"),
        ({"model_type": "llama", "config": {"gradient_checkpointing": True}}, r"the plan says what is recomputed"),
        ({"model_type": "clap"}, "has no head for language modelling or image classification"),
    ],
)
def test_what_is_wrong_is_told_with_the_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HFModel(**arguments)


def test_a_bad_value_in_the_configuration_is_a_value_error_naming_it() -> None:
    with pytest.raises(ValueError, match=r"LlamaConfig refuses it: .*num_attention_heads|hidden_size"):
        HFModel(model_type="llama", config={"hidden_size": "wide"})


class TestALocalFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        torch.manual_seed(5)
        tiny("llama").model.save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    def test_its_weights_are_loaded_and_its_sizes_kept(self, folder: Path) -> None:
        original = transformers.LlamaForCausalLM.from_pretrained(folder)
        model = HFModel(path=str(folder), vocab_size=77, sequence_length=4096)
        assert model.training
        assert model.expects == DataSpec("tokens", vocab_size=32, sequence_length=2048)
        assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), original.parameters(), strict=True))

    def test_gradient_checkpointing_does_not_come_along(self, folder: Path) -> None:
        assert not any(getattr(m, "gradient_checkpointing", False) for m in HFModel(path=str(folder)).modules())


def test_without_transformers_the_message_says_what_to_type() -> None:
    program = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'transformers' else real(name, package)\n"
        "from ckptplan.cli import main; sys.exit(main(['model=hf', 'model.model_type=gpt2', 'logger=none']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "model=hf needs transformers; type: pip install -e '.[hf]'" in done.stderr


@pytest.mark.parametrize("experiment", ["hf_llama", "hf_gpt2", "hf_bert", "hf_vit"])
def test_each_shipped_experiment_builds_a_model_that_fits_its_data(compose: Compose, experiment: str) -> None:
    config = compose(f"experiment={experiment}", "data.batch_size=2")
    model, data = instantiate(config.model, _convert_="all"), instantiate(config.data)
    batch = next(data.epoch_batches(0))
    assert model(batch.inputs).shape[:-1] == batch.targets.shape
