"""conf/model and conf/data: every choice composes, is built, fits its data and learns from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ckptplan.data import explain_mismatch, explain_missing_data_keys
from ckptplan.data.spec import DATA_OF_KIND, MODELS_OF_KIND
from ckptplan.models import ChainModel

Compose = Callable[..., DictConfig]  # the fixture of conftest.py
CONF = Path(__file__).parents[2] / "conf"
KIND_OF_MODEL = {model: kind for kind, models in MODELS_OF_KIND.items() for model in models}
PAIRS = [(model, data) for model, kind in KIND_OF_MODEL.items() for data in DATA_OF_KIND[kind]]


def chosen(config: DictConfig) -> tuple[str, str]:
    """The names of the model and of the data that a config holds."""
    return config.hydra.runtime.choices["model"], config.hydra.runtime.choices["data"]


def test_the_lists_of_choices_in_the_messages_are_the_files_of_conf() -> None:
    of_any_kind = ["hf", "custom"]
    names_of_data = [name for kind in DATA_OF_KIND.values() for name in kind]
    for group, names in (("model", [*KIND_OF_MODEL, *of_any_kind]), ("data", names_of_data)):
        assert sorted(path.stem for path in (CONF / group).glob("*.yaml")) == sorted(names)


@pytest.mark.parametrize("model", KIND_OF_MODEL)
def test_a_model_brings_its_default_data_and_the_users_own_choice_wins(compose: Compose, model: str) -> None:
    kind = KIND_OF_MODEL[model]
    assert chosen(compose(f"model={model}")) == (model, {"tokens": "stdlib_text", "images": "labelled_images"}[kind])
    other = {"tokens": "synthetic_tokens", "images": "digits"}[kind]
    for overrides in ([f"model={model}", f"data={other}"], [f"data={other}", f"model={model}"]):
        assert chosen(compose(*overrides)) == (model, other)


@pytest.mark.parametrize(("model", "data"), [pair for pair in PAIRS if pair[0] != "gpt_1b"])
def test_every_model_is_built_for_every_data_of_its_kind_and_fits_it(
    compose: Compose, model: str, data: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    overrides = [f"data.paths=[{tmp_path}/a.txt]"] if data == "files" else []
    config = compose(f"model={model}", f"data={data}", *overrides)
    built, source = instantiate(config.model), instantiate(config.data)
    assert explain_mismatch(model, built.expects, data, source.spec) is None
    logits = built(next(source.epoch_batches(0)).inputs)
    classes = built.expects.vocab_size if KIND_OF_MODEL[model] == "tokens" else 10
    assert logits.shape[-1] == classes


@pytest.mark.parametrize("model", KIND_OF_MODEL)
def test_a_model_with_data_of_the_other_kind_is_told_before_it_is_built(compose: Compose, model: str) -> None:
    data = {"tokens": "digits", "images": "stdlib_text"}[KIND_OF_MODEL[model]]
    config = compose(f"model={model}", f"data={data}")
    nodes = [OmegaConf.to_container(config[group], resolve=False) for group in ("model", "data")]
    message = explain_missing_data_keys(model, nodes[0], data, nodes[1])
    assert message is not None
    assert message.startswith(f"model={model} takes data.")
    assert f"but data={data} has no such key" in message


def test_sizes_of_the_data_flow_into_the_model(compose: Compose) -> None:
    config = compose("data=synthetic_tokens", "data.vocab_size=99", "data.sequence_length=33")
    assert (config.model.vocab_size, config.model.sequence_length) == (99, 33)
    config = compose("model=vit", "data.image_size=64", "data.classes=7", "data.channels=1")
    assert (config.model.image_size, config.model.classes, config.model.channels) == (64, 7, 1)


def test_the_default_gpt_and_the_large_one_have_the_stated_parameters(compose: Compose) -> None:
    def count(*overrides: str) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in instantiate(compose(*overrides).model).parameters())

    # per block 12 width^2 matrices and 13 width of biases and norms; two embeddings; the final norm; the head
    assert count() == 8 * (12 * 128**2 + 13 * 128) + (256 + 128) * 128 + 2 * 128 + 256 * 128
    large = 24 * (12 * 2048**2 + 13 * 2048) + (256 + 2048) * 2048 + 2 * 2048 + 256 * 2048
    assert count("model=gpt_1b", "data.sequence_length=2048") == large == 1_213_845_504


def train(model: ChainModel, config: DictConfig, steps: int, learning_rate: float) -> list[float]:
    source = instantiate(config.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for _, batch in zip(range(steps), source.epoch_batches(0), strict=False):
        loss = F.cross_entropy(model(batch.inputs).flatten(0, -2), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == steps
    return losses


@pytest.mark.parametrize(
    ("model", "overrides", "learning_rate"),
    [
        ("gpt", ["model.layers=2", "model.width=64", "data.sequence_length=64"], 3e-3),
        ("resnet", [], 3e-3),
        ("vit", ["model.layers=3"], 3e-3),
        ("unet", ["model.widths=[16,32]", "data.image_size=16"], 3e-3),
        ("mlp", [], 1e-3),
    ],
)
def test_the_loss_of_every_model_falls_on_its_default_data(
    compose: Compose, model: str, overrides: list[str], learning_rate: float
) -> None:
    config = compose(f"model={model}", "data.batch_size=8", *overrides)
    torch.manual_seed(0)
    losses = train(instantiate(config.model), config, 40, learning_rate)
    # a loss that stays moves by less than a twentieth between means of five
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), losses
