"""What is said when a model and its data do not fit, and that it is said without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptplan.data import DataSpec, explain_mismatch, explain_missing_data_keys

TOKENS = DataSpec("tokens", vocab_size=256, sequence_length=128)
IMAGES = DataSpec("images", channels=3, image_size=32, classes=10)
ANY_SIZE = DataSpec("images", channels=3, classes=10)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (TOKENS, TOKENS),
        (TOKENS, DataSpec("tokens", vocab_size=100, sequence_length=64)),
        (IMAGES, IMAGES),
        (IMAGES, DataSpec("images", channels=3, image_size=32, classes=2)),
        (ANY_SIZE, IMAGES),
    ],
)
def test_what_fits_is_not_explained(model: DataSpec, data: DataSpec) -> None:
    assert explain_mismatch("m", model, "d", data) is None


def test_another_kind_of_data_names_both_and_what_to_type() -> None:
    assert explain_mismatch("gpt", TOKENS, "labelled_images", IMAGES) == (
        "model=gpt expects token sequences (256 tokens, sequence_length 128), but data=labelled_images gives images "
        "(3 channels, 32 x 32 pixels, 10 classes); type data=stdlib_text (or files, synthetic_tokens), "
        "or model=resnet (or vit, unet, mlp)"
    )
    assert explain_mismatch("resnet", ANY_SIZE, "files", TOKENS) == (
        "model=resnet expects images (3 channels, any size, 10 classes), but data=files gives token sequences "
        "(256 tokens, sequence_length 128); type data=labelled_images (or digits), or model=gpt (or gpt_1b)"
    )


@pytest.mark.parametrize(
    ("model", "data", "remedy"),
    [
        (
            TOKENS,
            DataSpec("tokens", vocab_size=300, sequence_length=128),
            "the data's vocab_size 300 is above the model's 256: "
            "type model.vocab_size=300, or data.vocab_size=256 or less",
        ),
        (
            TOKENS,
            DataSpec("tokens", vocab_size=256, sequence_length=129),
            "the data's sequence_length 129 is above the model's 128: "
            "type model.sequence_length=129, or data.sequence_length=128 or less",
        ),
        (
            IMAGES,
            DataSpec("images", channels=1, image_size=16, classes=11),
            "the data's classes 11 is above the model's 10: type model.classes=11, or data.classes=10 or less; "
            "channels must be equal, model 3, data 1: type model.channels=1 or data.channels=3; "
            "image_size must be equal, model 32, data 16: type model.image_size=16 or data.image_size=32",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_all_told_with_both_numbers(model: DataSpec, data: DataSpec, remedy: str) -> None:
    message = explain_mismatch("m", model, "d", data)
    assert message == f"model=m expects {model}, but data=d gives {data}; {remedy}"


def test_keys_that_the_data_lacks_are_told_before_anything_is_built() -> None:
    model = {"_target_": "x", "image_size": "${data.image_size}", "sizes": [{"classes": "${data.classes}"}]}
    text = {"_target_": "y", "sequence_length": 128}
    assert explain_missing_data_keys("resnet", model, "stdlib_text", text) == (
        "model=resnet takes data.classes, data.image_size from its data, but data=stdlib_text has no such key: "
        "the model expects images, the data gives tokens; type data=labelled_images (or digits), "
        "or model=gpt (or gpt_1b)"
    )
    assert explain_missing_data_keys("resnet", model, "labelled_images", {"image_size": 1, "classes": 2}) is None


def test_keys_of_a_model_of_ones_own_are_told_without_guessing_its_kind() -> None:
    model = {"colours": "${data.colours}", "vocab_size": "${oc.select:data.vocab_size,256}"}
    assert explain_missing_data_keys("mine", model, "digits", {}) == (
        "model=mine takes data.colours from its data, but data=digits has no such key; "
        "add it there (+data.colours=...), or set the model's own arguments"
    )


def test_the_messages_need_no_torch() -> None:
    code = "import sys, ckptplan.data, ckptplan.data.spec, ckptplan.data.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("model", "data", "remedy"),
    [
        ("resnet", "stdlib_text", "type data=labelled_images (or digits), or model=gpt (or gpt_1b)"),
        ("gpt_1b", "digits", "type data=stdlib_text (or files, synthetic_tokens), or model=resnet (or vit, unet, mlp)"),
    ],
)
def test_a_run_of_two_that_do_not_fit_ends_at_once_naming_both(model: str, data: str, remedy: str) -> None:
    train = Path(__file__).parents[2] / "train.py"
    command = [sys.executable, str(train), f"model={model}", f"data={data}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert f"error: model={model} takes data." in run.stderr
    assert f"data={data} has no such key" in run.stderr
    assert remedy in run.stderr
    assert "Traceback" not in run.stderr
