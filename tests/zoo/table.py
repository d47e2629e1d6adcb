"""Writes docs/zoo.md: ``python -m tests.zoo.table`` (a minute or two)."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.examine import Verdict, examine
from tests.zoo.transformers_models import TRANSFORMERS

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# The zoo

Models with what makes recomputation hard, each planned by `dp` and `optimal` at the most, the middle and the least
budget. Where one runs, losses, gradients, parameters, buffers, counters and random streams after two training steps, a
training forward without gradients and an evaluation are the same bits as without a plan (CPU, float32), and the error
is the largest difference between predicted and measured peak over all its plans. What is refused is refused while it
is profiled, before anything trains. `tests/zoo/test_zoo.py` holds every row true; `python -m tests.zoo.table` wrote
this page.

| model | what is hard about it | outcome | plans | largest error |
| --- | --- | --- | --- | --- |
"""


def row(entry: Entry, verdict: Verdict) -> str:
    outcome = verdict.outcome
    if verdict.refused is not None:
        outcome += f": {first_clause(verdict.refused)}"
    elif verdict.kept:
        count, reason = len(verdict.kept), next(iter(verdict.kept.values()))
        outcome = f"runs; {count} {'block is' if count == 1 else 'blocks are'} never recomputed: {first_clause(reason)}"
    error = f"{max(map(abs, verdict.errors)):.2%}" if verdict.errors else "-"
    return f"| {entry.name} | {entry.feature} | {outcome} | {len(verdict.texts) or '-'} | {error} |"


def first_clause(text: str) -> str:
    return text.split(";")[0].split(", so ")[0].replace("|", "\\|").replace("\n", " ")


def main() -> None:
    rows = []
    for entry in [*ENTRIES, *TRANSFORMERS]:
        rows.append(row(entry, examine(entry)))
        print(rows[-1], file=sys.stderr, flush=True)
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
