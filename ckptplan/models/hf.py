"""Any model of Hugging Face's transformers as a model of the harness: tokens or images in, logits out.

Random weights from a configuration, or a local folder; nothing is downloaded.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ckptplan.data.spec import DataSpec
from ckptplan.wrappers import foreign_checkpoints, switched_off

if importlib.util.find_spec("transformers") is None:
    raise ImportError("model=hf needs transformers; type: pip install -e '.[hf]'")

log = logging.getLogger(__name__)

# What a run decides itself, and why it is not to be set in the configuration.
_NOT_TO_SET = {
    "use_cache": "a key-value cache is for generation; in training it only holds memory, so it is off",
    "gradient_checkpointing": "the plan says what is recomputed",
}


class HFModel(nn.Module):
    """A transformers model behind the harness's contract: ``forward(inputs)`` gives logits, classes last.

    Token models take int64 tokens (B, T), image models float32 images (B, C, H, W). An encoder-decoder gets the same
    tokens on both sides. The sizes of the data go into a configuration with random weights where it has such a size;
    a local folder keeps its own, and data that does not fit it is refused.

    Args:
        model_type: such as ``"llama"``, ``"gpt2"``, ``"vit"``; not needed with ``architecture`` or ``path``.
        architecture: a class of transformers, such as ``"BertForMaskedLM"``; None: the one with a head for image
            classification, language modelling or, in models that see both ways, masked language modelling.
        path: a local folder that ``save_pretrained`` wrote; its weights are loaded.
        config: what to change in the configuration, such as ``{"num_hidden_layers": 2}``; a name that it does not have
            is refused.
        vocab_size, sequence_length, image_size, channels, classes: of the data. ``sequence_length`` raises the number
            of positions where there are too few; the others replace what the configuration has, unless ``config`` says
            another.

    Raises:
        ValueError: no such model type, class, folder or configuration key; a key that the run decides.
    """

    def __init__(
        self,
        *,
        model_type: str | None = None,
        architecture: str | None = None,
        path: str | None = None,
        config: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        image_size: int | None = None,
        channels: int | None = None,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        changes = dict(config or {})
        for name, reason in _NOT_TO_SET.items():
            if changes.get(name):
                raise ValueError(f"config.{name}={changes[name]!r} cannot be set: {reason}")
        made = _configuration(model_type, architecture, path, changes)
        if path is None:
            sizes = {
                "vocab_size": vocab_size,
                "image_size": image_size,
                "num_channels": channels,
                "num_labels": classes,
            }
            known = {name: size for name, size in sizes.items() if size is not None and name not in changes}
            _fit_to_data(made, known, sequence_length)
        if getattr(made, "use_cache", False):
            log.info("model: use_cache=False: a key-value cache is for generation")
            made.use_cache = False
        kind = _class_for(made, architecture)
        self.model: nn.Module = kind(made) if path is None else _loaded(kind, path, made)
        self.model.train()
        if foreign_checkpoints(self.model):
            switched_off(self.model)
            log.info("model: its own gradient checkpointing is switched off: the plan takes its place")
        self.title = kind.__name__
        self.takes = str(getattr(self.model, "main_input_name", "input_ids"))
        self.is_two_sided = bool(getattr(made, "is_encoder_decoder", False))
        self.expects = _spec_of(made, self.takes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens (B, T) or images (B, C, H, W) -> logits (B, T, vocab_size) or (B, classes)."""
        given = {self.takes: inputs}
        if self.is_two_sided:
            given["decoder_input_ids"] = inputs
        logits: Tensor = self.model(**given).logits
        return logits

    def tensor_parallel_plan(self, num_ranks: int) -> dict[str, str]:
        """Which matrices ``num_ranks`` share, and how: the plan that the configuration carries.

        Raises ``ValueError`` where it carries none, or one of more than matrices, or heads do not split evenly.
        """
        config: Any = self.model.config
        shipped: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        if not shipped:
            raise ValueError(
                f"{type(config).__name__} carries no base_model_tp_plan; engine.tp_plan={{pattern: colwise, ...}} can "
                "say how its matrices are cut"
            )
        for path, style in shipped.items():
            if style not in ("colwise", "rowwise"):
                raise ValueError(f"its plan has {path}: {style}, and only matrices are cut, colwise and rowwise")
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % num_ranks:
                raise ValueError(f"{name}={heads} do not split evenly over {num_ranks} ranks")
        base = f"model.{self.model.base_model_prefix}"
        return {f"{base}.{path}": style for path, style in shipped.items()}


def _configuration(
    model_type: str | None, architecture: str | None, path: str | None, changes: Mapping[str, Any]
) -> Any:
    """The configuration with ``changes`` made to it."""
    import transformers

    if path is not None:
        if not (Path(path) / "config.json").is_file():
            raise ValueError(
                f"path={path!r} is no folder that save_pretrained wrote: there is no config.json in it (relative paths "
                f"start at {Path.cwd()}; nothing is downloaded)"
            )
        try:
            made = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"path={path!r}: {_first_line(error)}") from error
    elif architecture is not None:
        made = _named_class(architecture).config_class()
    elif model_type is not None:
        known = list(transformers.CONFIG_MAPPING.keys())
        if model_type not in known:
            raise ValueError(f"model_type={model_type!r} is none that transformers has{_nearest(model_type, known)}")
        made = transformers.AutoConfig.for_model(model_type)
    else:
        raise ValueError("model=hf needs model_type (such as gpt2), architecture (such as BertForMaskedLM) or path")
    known = sorted({*vars(made), *made.attribute_map})
    unknown = sorted(name for name in changes if not hasattr(made, name))
    if unknown:
        raise ValueError(f"config.{unknown[0]}: {type(made).__name__} has no such key{_nearest(unknown[0], known)}")
    try:  # made anew rather than changed, so that the class checks values and what depends on them
        return type(made)(**{**made.to_diff_dict(), **changes}) if changes else made
    except Exception as error:  # each version of transformers has exceptions of its own for a bad value
        raise ValueError(f"config={dict(changes)}: {type(made).__name__} refuses it: {_first_line(error)}") from error


def _fit_to_data(config: Any, sizes: Mapping[str, int], sequence_length: int | None) -> None:
    for name, value in sizes.items():
        if name == "num_labels" or hasattr(config, name):
            setattr(config, name, value)
    positions = getattr(config, "max_position_embeddings", None)
    if sequence_length is not None and isinstance(positions, int) and positions < sequence_length:
        config.max_position_embeddings = sequence_length


def _class_for(config: Any, architecture: str | None) -> Any:
    """The class with a head that gives logits."""
    import transformers

    if architecture is not None:
        return _named_class(architecture)
    masked = transformers.MODEL_FOR_MASKED_LM_MAPPING
    mappings = [transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING, masked]
    if getattr(config, "is_encoder_decoder", False):
        mappings.insert(0, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    elif not getattr(config, "is_decoder", False):
        mappings.insert(0, masked)  # such as BERT, which has a head for causal language modelling too
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"{type(config).__name__} has no head for language modelling or image classification in transformers; "
        "give architecture=<a class whose output has logits>"
    )


def _loaded(kind: Any, path: str, config: Any) -> nn.Module:
    try:
        model: nn.Module = kind.from_pretrained(path, config=config, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"path={path!r}: its weights cannot be loaded: {_first_line(error)}") from error
    return model


def _named_class(name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not hasattr(found, "config_class"):
        close = _nearest(name, [known for known in dir(transformers) if "For" in known or known.endswith("Model")])
        raise ValueError(f"architecture={name!r} is no model class of transformers{close}")
    return found


def _spec_of(config: Any, takes: str) -> DataSpec:
    if takes == "pixel_values":
        size = getattr(config, "image_size", None)
        channels = getattr(config, "num_channels", None)
        size = size if isinstance(size, int) else None
        return DataSpec("images", channels=channels, image_size=size, classes=config.num_labels)
    positions = getattr(config, "max_position_embeddings", None)
    length = positions if isinstance(positions, int) and positions > 0 else None
    return DataSpec("tokens", vocab_size=config.vocab_size, sequence_length=length)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
