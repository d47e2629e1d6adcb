"""What a user is told when a run ends with an error, and the exit code. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from ckptplan.console import DISK_FULL
from ckptplan.errors import CkptplanError, ConfigError
from ckptplan.jobs import EXIT_BAD_CONFIG

EXIT_FAILED = 1

log = logging.getLogger(__name__)


def exit_code_of(run: Callable[[], int], folder: Path, *, tell: Callable[[], bool] = lambda: True) -> int:
    """The exit code of ``run``; what it raises is one message on the terminal, the traceback in ``train.log``.

    ``tell``: whether this process is the one that speaks of errors which all ranks share.
    """
    try:
        return run()
    except ConfigError as error:
        return report(error, EXIT_BAD_CONFIG, folder) if tell() else EXIT_BAD_CONFIG
    except CkptplanError as error:
        return report(error, EXIT_FAILED, folder) if tell() else EXIT_FAILED
    except OSError as error:
        if error.errno in DISK_FULL:
            return report(CkptplanError(file_message(error)), EXIT_FAILED, folder)
        log.exception("the run failed on an unexpected error")
        return EXIT_FAILED
    except Exception:
        log.exception("the run failed on an unexpected error")
        return EXIT_FAILED


def report(error: CkptplanError, exit_code: int, folder: Path) -> int:
    """The message on the terminal, the whole traceback in the log file only."""
    print(f"error: {error}", file=sys.stderr)
    with contextlib.suppress(OSError), (folder / "train.log").open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return exit_code


def file_message(error: OSError) -> str:
    """A file that could not be made, read or written, and what to do."""
    name = error.filename or "a file of the run"
    if error.errno in DISK_FULL:
        return f"{name} could not be written: {error.strerror}. Free some space, or set output_dir"
    return f"{name} could not be made or read: {error.strerror or error}"
