"""Every model of the zoo trains under plans as it does without one, or is refused by name before it trains.

Each is planned by ``dynamic_programming`` and ``optimal`` at the most, the middle and the least budget; losses,
gradients, parameters, buffers, counters and random streams have to be the same bits, and peaks predicted to 1 %.
"""

from __future__ import annotations

import re

import pytest

from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.examine import examine

MOST_ERROR = 0.01


@pytest.mark.parametrize(
    "entry", [pytest.param(e, id=e.name, marks=[pytest.mark.slow] if e.is_slow else []) for e in ENTRIES]
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
    assert len(ENTRIES) >= 40
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert sum(entry.refused is None for entry in ENTRIES) >= 25


def test_a_plan_that_trained_otherwise_would_be_seen() -> None:
    from ckptplan.plan import CheckpointPlan
    from tests.zoo.examine import differences, trained

    entry = next(entry for entry in ENTRIES if entry.name == "call counter")
    plan = CheckpointPlan.from_text("R(0) K1 K2", [f"layers.{i}" for i in range(3)])
    assert differences(trained(entry, plan), trained(entry, None)) == ["calls of layers.0"]
