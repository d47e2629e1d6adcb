"""The program of a rank that ``launch.py`` starts: ``python -m ckptplan.engine.worker job.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ckptplan.config import register_schema
from ckptplan.console import lasting_output
from ckptplan.engine.launch import RankJob, join, run_rank
from ckptplan.jobs import end_with_launcher


def main(path: str) -> int:
    """Run one rank of the job that ``path`` describes; its exit code."""
    end_with_launcher()
    register_schema()
    job = RankJob(**json.loads(Path(path).read_text(encoding="utf-8")))
    with lasting_output():
        return run_rank(job, join(job.config()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
