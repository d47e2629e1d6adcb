"""Every model of the zoo trains under plans as it does without one, or is refused by name before it trains.

Each is planned by ``dynamic_programming`` and ``optimal`` at the most, the middle and the least budget; losses,
gradients, parameters, buffers, counters and random streams have to be the same bits, and peaks predicted to 1 %.
"""

from __future__ import annotations

import re

import pytest

from ckptplan.plan import CheckpointPlan
from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.examine import differences, examine, trained
from tests.zoo.table import PAGE
from tests.zoo.transformers_models import TRANSFORMERS

MOST_ERROR = 0.01
ALL = [*ENTRIES, *TRANSFORMERS]


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=[pytest.mark.slow] * e.is_slow) for e in ALL],
)
def test_it_trains_as_without_a_plan_or_is_refused_by_name(entry: Entry) -> None:
    verdict = examine(entry)
    if entry.refused is not None:
        assert verdict.refused is not None
        assert re.search(entry.refused, verdict.refused), verdict.refused
        return
    assert verdict.refused is None
    assert verdict.faults == []
    assert len(verdict.texts) >= 2 or entry.kept
    assert max(map(abs, verdict.errors)) <= MOST_ERROR, list(zip(verdict.texts, verdict.errors, strict=True))
    if entry.kept is None:
        assert verdict.kept == {}
    else:
        assert any(re.search(entry.kept, reason) for reason in verdict.kept.values()), verdict.kept


def test_there_are_enough_of_them_each_with_a_name_of_its_own() -> None:
    assert len(ALL) >= 50
    assert len({entry.name for entry in ALL}) == len(ALL)
    assert sum(entry.refused is None for entry in ALL) >= 40


def test_a_plan_that_trained_otherwise_would_be_seen() -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "call counter")
    plan = CheckpointPlan.from_text("R(0) K1 K2", [f"layers.{i}" for i in range(3)])
    assert differences(trained(entry, plan), trained(entry, None)) == ["calls of layers.0"]


def test_the_page_has_a_row_for_each_with_its_outcome() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    told = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")][2:]
    assert [(row[0], row[1]) for row in told] == [(entry.name, entry.feature) for entry in ALL]
    for entry, row in zip(ALL, told, strict=True):
        wanted = "refused" if entry.refused else "never recomputed" if entry.kept else "runs"
        assert wanted in row[2], entry.name
