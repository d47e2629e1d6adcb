"""``python -m ckptplan.report FOLDER``: the page of a run or a sweep again, its pictures, or a look in the terminal."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ckptplan.console import lasting_output
from ckptplan.errors import CkptplanError
from ckptplan.report.export import FORMATS, export_pictures
from ckptplan.report.page import INSTALL, has_library, write_report
from ckptplan.report.records import read_records
from ckptplan.report.text import print_records


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 where the folder holds nothing to show."""
    parser = ArgumentParser(prog="python -m ckptplan.report", description=__doc__)
    parser.add_argument("folder", help="of a run or of a sweep, such as outputs/latest; a sweep may still be running")
    parser.add_argument("--text", action="store_true", help="show it in the terminal instead of writing the page")
    parser.add_argument("--pictures", choices=(*FORMATS, "both"), help="also write the charts as files, for papers")
    options = parser.parse_args(arguments)
    with lasting_output():
        return _show(options)


def _show(options: Namespace) -> int:
    try:
        if options.text:
            print_records(read_records(options.folder))
        else:
            print(write_report(options.folder))
            if not has_library():
                print(f"it holds tables in place of charts; for the charts: {INSTALL}")
        if options.pictures:
            for path in export_pictures(options.folder, FORMATS if options.pictures == "both" else (options.pictures,)):
                print(path)
    except (CkptplanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
