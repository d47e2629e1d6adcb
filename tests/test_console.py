"""Output that nobody reads any more, and disks that are full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptplan.console import lasting_output
from ckptplan.record import RunRecorder, write_atomic
from ckptplan.strict_json import write_text_whole

PROGRAM = """
import logging, sys
from pathlib import Path
from ckptplan.console import lasting_output

with lasting_output():
    logging.basicConfig(stream=sys.stdout, level="INFO")
    for i in range(20_000):
        print("line", i)
        logging.info("line %d", i)
    sys.stdout.flush()
    Path(sys.argv[1]).write_text("the end")
"""


@pytest.mark.parametrize("reader", ["leaves", "is full"])
def test_a_run_goes_on_to_its_end_without_anybody_to_read_it(tmp_path: Path, reader: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    with Path("/dev/full").open("w") as full:
        out = subprocess.PIPE if reader == "leaves" else full
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
        if process.stdout is not None:
            assert process.stdout.readline() == "line 0\n"
            process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "the end"


@pytest.mark.parametrize("closed", ["1", "2", "12"])
def test_a_run_goes_on_to_its_end_where_the_shell_has_closed_its_output(tmp_path: Path, closed: str) -> None:
    script = 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", script, "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "end").read_text() == "the end"


def test_what_can_be_written_is_and_the_streams_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("out")
        print("err", file=sys.stderr)
        assert sys.stdout.isatty() is False
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out\n", "err\n")


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"), RunRecorder(tmp_path) as recorder:
        recorder.log({"step": 1})
    for write in (write_atomic, write_text_whole):
        whole = tmp_path / "result.json"
        suffix = "" if write is write_atomic else ".tmp"
        beside = tmp_path / f".result.json.{os.getpid()}{suffix}"
        beside.symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: '.*/result.json'") as caught:
            write(whole, "x" * 100_000)
        assert caught.value.errno == errno.ENOSPC
        assert not whole.exists()
        assert not beside.is_symlink()
