"""What a model expects and what a data source gives, and why the two do not fit (no torch here)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["tokens", "images"]

# The shipped choices of conf/data and conf/model, for messages that say what to type.
DATA_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "tokens": ("stdlib_text", "files", "synthetic_tokens"),
    "images": ("labelled_images", "digits"),
}
MODELS_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "tokens": ("gpt", "gpt_1b"),
    "images": ("resnet", "vit", "unet", "mlp"),
}


@dataclass(frozen=True)
class DataSpec:
    """The form of a batch.

    Attributes:
        kind: "tokens": int64 inputs (B, T) and one target per position; "images": float32 inputs (B, C, H, W) and one
            target per image.
        vocab_size: tokens are 0 .. vocab_size - 1.
        sequence_length: T of the data; the longest T that the model takes.
        channels: C.
        image_size: H and W in pixels; None in a model that takes any size.
        classes: targets of images are 0 .. classes - 1.
    """

    kind: Kind
    vocab_size: int | None = None
    sequence_length: int | None = None
    channels: int | None = None
    image_size: int | None = None
    classes: int | None = None

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"token sequences ({self.vocab_size} tokens, sequence_length {self.sequence_length})"
        size = "any size" if self.image_size is None else f"{self.image_size} x {self.image_size} pixels"
        return f"images ({self.channels} channels, {size}, {self.classes} classes)"


def explain_mismatch(model_name: str, model_spec: DataSpec, data_name: str, data_spec: DataSpec) -> str | None:
    """None if the model can be trained on the data, else one message: both names, what each wants, what to type."""
    head = f"model={model_name} expects {model_spec}, but data={data_name} gives {data_spec}"
    if model_spec.kind != data_spec.kind:
        return f"{head}; {_other_choices(model_spec.kind, data_spec.kind)}"
    remedies = [
        remedy
        for name in ("vocab_size", "sequence_length", "classes")
        if (remedy := _too_large(name, getattr(model_spec, name), getattr(data_spec, name)))
    ] + [
        remedy
        for name in ("channels", "image_size")
        if (remedy := _unequal(name, getattr(model_spec, name), getattr(data_spec, name)))
    ]
    return f"{head}; {'; '.join(remedies)}" if remedies else None


def explain_missing_data_keys(
    model_name: str, model_node: Mapping[str, object], data_name: str, data_node: Mapping[str, object]
) -> str | None:
    """The same before anything is built: the model's config takes a ``${data.KEY}`` that the data does not have.

    Both nodes are plain mappings with interpolations left as text (``OmegaConf.to_container(node, resolve=False)``).
    """
    wanted = set(re.findall(r"\$\{data\.(\w+)\}", repr(dict(model_node))))
    missing = sorted(wanted - set(data_node))
    if not missing:
        return None
    keys = ", ".join(f"data.{key}" for key in missing)
    head = f"model={model_name} takes {keys} from its data, but data={data_name} has no such key"
    model_kind, data_kind = _kind_of(model_name, MODELS_OF_KIND), _kind_of(data_name, DATA_OF_KIND)
    if model_kind is None or data_kind is None or model_kind == data_kind:
        return f"{head}; add it there (+data.{missing[0]}=...), or set the model's own arguments"
    choices = _other_choices(model_kind, data_kind)
    return f"{head}: the model expects {model_kind}, the data gives {data_kind}; {choices}"


def _kind_of(name: str, names_of_kind: Mapping[Kind, tuple[str, ...]]) -> Kind | None:
    return next((kind for kind, names in names_of_kind.items() if name in names), None)


def _other_choices(model_kind: Kind, data_kind: Kind) -> str:
    data, *more_data = DATA_OF_KIND[model_kind]
    model, *more_models = MODELS_OF_KIND[data_kind]
    return f"type data={data} (or {', '.join(more_data)}), or model={model} (or {', '.join(more_models)})"


def _too_large(name: str, of_model: int | None, of_data: int | None) -> str | None:
    if of_model is None or of_data is None or of_data <= of_model:
        return None
    remedy = f"type model.{name}={of_data}, or data.{name}={of_model} or less"
    return f"the data's {name} {of_data} is above the model's {of_model}: {remedy}"


def _unequal(name: str, of_model: int | None, of_data: int | None) -> str | None:
    if of_model is None or of_data is None or of_data == of_model:
        return None
    return (
        f"{name} must be equal, model {of_model}, data {of_data}: type model.{name}={of_data} or data.{name}={of_model}"
    )
