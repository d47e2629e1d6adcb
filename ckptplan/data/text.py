"""Byte-level text: Python's own standard library, or the user's files. A token is one byte, 0 .. 255."""

from __future__ import annotations

import glob
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ckptplan.data import Batch
from ckptplan.data.checks import require_int, require_number
from ckptplan.data.dataset import Dataset
from ckptplan.data.spec import DataSpec
from ckptplan.units import parse_bytes

VOCAB_SIZE = 256


def stdlib_text(
    *,
    sequence_length: int,
    batch_size: int,
    max_bytes: int | str = "2MB",
    eval_fraction: float = 0.1,
    max_eval_samples: int = 64,
    seed: int = 0,
) -> Dataset:
    """The sources of this Python's standard library (its top-level ``.py`` modules in alphabetical order), as bytes.

    Real text that every machine has; the same Python version gives the same bytes. Arguments as in ``text_files``.
    Raises ``FileNotFoundError`` where Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    # Only modules of the library itself: distributions put generated files beside them that differ by machine.
    paths = [path for path in sorted(folder.glob("*.py")) if path.stem in sys.stdlib_module_names]
    if not paths:
        raise FileNotFoundError(
            f"data=stdlib_text found no .py sources of Python's standard library in {folder}: this Python was "
            "installed without them; type data=synthetic_tokens, or data=files 'data.paths=[FOLDER/*.txt]'"
        )
    text = read_bytes(paths, parse_bytes(max_bytes, "max_bytes"))
    return text_windows(text, "data=stdlib_text", sequence_length, batch_size, eval_fraction, max_eval_samples, seed)


def text_files(
    *,
    paths: str | Sequence[str],
    sequence_length: int,
    batch_size: int,
    max_bytes: int | str = "100MB",
    eval_fraction: float = 0.1,
    max_eval_samples: int = 64,
    seed: int = 0,
    base_folder: str | Path | None = None,
) -> Dataset:
    """The user's own files as bytes, one after the other.

    Args:
        paths: files or glob patterns (``**`` goes into subfolders); the files of a pattern are taken in alphabetical
            order, and a file that two patterns match is read once.
        sequence_length: tokens a sample feeds to the model; a sample is sequence_length + 1 bytes, as targets are
            the inputs shifted by one. Samples do not overlap; bytes after the last whole one are not used.
        batch_size: samples per micro-batch.
        max_bytes: read no more than this ("2MB").
        eval_fraction: the last part of the text, by position, is kept for evaluation.
        max_eval_samples: evaluate on the first so many samples of that part.
        seed: with the epoch, decides the order of the training samples.
        base_folder: where relative paths start; the current folder at the time of the call if not given.

    Raises ``FileNotFoundError`` for a pattern without a file, ``ValueError`` for too little text.
    """
    base = Path.cwd() if base_folder is None else Path(base_folder)
    files = find_files([paths] if isinstance(paths, str) else list(paths), base)
    text = read_bytes(files, parse_bytes(max_bytes, "max_bytes"))
    return text_windows(text, "data=files", sequence_length, batch_size, eval_fraction, max_eval_samples, seed)


def find_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """The files that the patterns name, in their order, each once."""
    if not patterns:
        raise ValueError("data.paths is empty; expected files or patterns, such as 'data.paths=[notes/*.txt]'")
    found: dict[Path, None] = {}
    for pattern in patterns:
        named = base / Path(pattern).expanduser()
        # a file of exactly this name comes before the pattern, as brackets may stand in file names
        matches = [named] if named.is_file() else [base / name for name in sorted(_glob(pattern, base))]
        files = [path.resolve() for path in matches if path.is_file()]
        if not files:
            hint = f"; it is a folder, type {pattern.rstrip('/')}/**/*.txt for its text files" if named.is_dir() else ""
            raise FileNotFoundError(f"data.paths: no file matches {pattern!r} (relative paths start at {base}){hint}")
        found.update(dict.fromkeys(files))
    return list(found)


def _glob(pattern: str, base: Path) -> list[str]:
    # Path.glob refuses absolute patterns
    return glob.glob(str(Path(pattern).expanduser()), root_dir=base, recursive=True)  # noqa: PTH207


def read_bytes(paths: Sequence[Path], max_bytes: int) -> Tensor:
    """The first ``max_bytes`` bytes of the files put together, uint8 (N,)."""
    parts: list[bytes] = []
    left = max_bytes
    for path in paths:
        if left == 0:
            break
        with path.open("rb") as file:
            parts.append(file.read(left))
        left -= len(parts[-1])
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8))


def text_windows(
    text: Tensor,
    source: str,
    sequence_length: int,
    batch_size: int,
    eval_fraction: float,
    max_eval_samples: int,
    seed: int,
) -> Dataset:
    """Cut text (uint8 (N,)) into samples of sequence_length + 1 bytes; the last ``eval_fraction`` is for evaluation."""
    window = require_int("sequence_length", sequence_length) + 1
    num_windows = len(text) // window
    num_eval = int(num_windows * require_number("eval_fraction", eval_fraction, below=1))
    if num_windows == 0:
        raise ValueError(
            f"{source} holds {len(text)} bytes, less than one sample of data.sequence_length + 1 = {window}; "
            "give more text (data.paths, data.max_bytes) or a smaller data.sequence_length"
        )
    samples = text[: num_windows * window].view(num_windows, window)

    def read(numbers: Tensor) -> Batch:
        tokens = samples[numbers].long()  # (B, T + 1)
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())

    return Dataset(
        spec=DataSpec("tokens", vocab_size=VOCAB_SIZE, sequence_length=sequence_length),
        read=read,
        num_train_samples=num_windows - num_eval,
        num_eval_samples=min(num_eval, require_int("max_eval_samples", max_eval_samples, minimum=0)),
        batch_size=batch_size,
        seed=seed,
        one_shape=True,
    )
