"""Text as bytes: samples against plain slices, the standard library, the user's files, and what goes wrong."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from ckptplan.data.dataset import Dataset
from ckptplan.data.text import stdlib_text, text_files

TEXT = bytes(range(256)) * 2  # every byte, 512 in all


def samples_of(data: Dataset) -> tuple[set[bytes], list[bytes]]:
    """All training samples (inputs and the last target) as bytes, and the evaluation samples in order."""
    epoch, evaluation = (
        [
            bytes([*inputs.tolist(), targets[-1].item()])
            for batch in batches
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
        ]
        for batches in (data.epoch_batches(0), data.eval_batches())
    )
    assert len(epoch) == data.num_train_samples
    return set(epoch), evaluation


def test_samples_are_the_non_overlapping_slices_of_the_text_and_the_last_part_is_for_evaluation(tmp_path: Path) -> None:
    text = b"".join(b"%05d" % number for number in range(103))  # 515 bytes: 51 slices of 10, and 5 bytes left
    (tmp_path / "a.txt").write_bytes(text)
    data = text_files(paths="a.txt", sequence_length=9, batch_size=4, eval_fraction=0.2, base_folder=tmp_path)
    slices = [text[first : first + 10] for first in range(0, 510, 10)]
    assert samples_of(data) == (set(slices[:41]), slices[41:])


def test_targets_are_the_inputs_one_byte_later(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    data = text_files(paths=["a.txt"], sequence_length=7, batch_size=64, base_folder=tmp_path)
    for batch in data.epoch_batches(0):
        assert ((batch.inputs + 1) % 256).equal(batch.targets)


def test_at_most_the_given_number_of_samples_is_evaluated_and_training_does_not_get_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    data = text_files(
        paths="a.txt", sequence_length=7, batch_size=4, eval_fraction=0.5, max_eval_samples=3, base_folder=tmp_path
    )
    assert (data.num_train_samples, data.num_eval_samples) == (32, 3)
    assert samples_of(data)[1] == [TEXT[256 + 8 * index :][:8] for index in range(3)]


@pytest.mark.parametrize("limit", [100, "100", "100B"])
def test_no_more_than_max_bytes_is_read(tmp_path: Path, limit: int | str) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT[:60])
    (tmp_path / "b.txt").write_bytes(TEXT[60:])
    data = text_files(
        paths="*.txt", sequence_length=9, batch_size=4, max_bytes=limit, eval_fraction=0, base_folder=tmp_path
    )
    assert samples_of(data) == ({TEXT[first : first + 10] for first in range(0, 100, 10)}, [])


def test_files_come_in_the_order_of_the_patterns_each_sorted_and_each_file_once(tmp_path: Path) -> None:
    for name, content in {"b.md": b"2", "a.md": b"1", "sub/deep/c.txt": b"4", "x.txt": b"3"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.md").mkdir()
    paths = ["*.md", "x.txt", "**/*.txt", str(tmp_path / "a.md")]
    data = text_files(paths=paths, sequence_length=3, batch_size=1, eval_fraction=0, base_folder=tmp_path)
    assert samples_of(data)[0] == {b"1234"}


def test_a_file_named_with_brackets_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes[1].txt").write_bytes(b"brackets")
    (tmp_path / "notes1.txt").write_bytes(b"pattern.")
    data = text_files(paths="notes[1].txt", sequence_length=7, batch_size=1, base_folder=tmp_path)
    assert samples_of(data)[0] == {b"brackets"}


def test_relative_paths_start_at_the_folder_that_was_current_when_the_data_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"here")
    monkeypatch.chdir(tmp_path)
    data = text_files(paths="a.txt", sequence_length=3, batch_size=1)
    monkeypatch.chdir("/")
    assert samples_of(data)[0] == {b"here"}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "data.paths is empty; expected files or patterns"),
        (["a.txt", "missing/*.txt"], "data.paths: no file matches 'missing/*.txt' (relative paths start at "),
        ("sub/", "it is a folder, type sub/**/*.txt"),
    ],
)
def test_paths_without_files_are_refused_with_the_pattern_and_the_folder(
    tmp_path: Path, paths: list[str] | str, message: str
) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "sub").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        text_files(paths=paths, sequence_length=3, batch_size=1, base_folder=tmp_path)


def test_text_shorter_than_one_sample_is_refused_with_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"12345")
    assert text_files(paths="a.txt", sequence_length=4, batch_size=1, base_folder=tmp_path).num_train_samples == 1
    with pytest.raises(ValueError, match=r"data=files holds 5 bytes, less than one sample of .* = 6"):
        text_files(paths="a.txt", sequence_length=5, batch_size=1, base_folder=tmp_path)


def test_the_standard_library_is_the_sorted_sources_of_this_python() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    start = (folder / "__future__.py").read_bytes()  # first in the alphabet
    data = stdlib_text(sequence_length=15, batch_size=64, max_bytes=4096, eval_fraction=0)
    samples = samples_of(data)[0]
    assert {start[first : first + 16] for first in range(0, 4096, 16)} == samples


def test_the_shipped_amount_of_text_is_there_and_holds_modules_of_the_library_only() -> None:
    data = stdlib_text(sequence_length=127, batch_size=8)
    assert data.num_train_samples == 15_625 - 1_562  # 2 MB in samples of 128 bytes, less a tenth
    assert data.num_eval_samples == 64


def test_a_python_without_sources_is_told_what_to_use_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("# not part of the library\n" * 100)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(f"in {tmp_path}: this Python was installed without them")):
        stdlib_text(sequence_length=15, batch_size=8)
