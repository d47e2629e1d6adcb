"""Who wins: the best configuration of each rival within each budget against ours. Works on the records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks.race.eager import our_name

Record = dict[str, Any]

OURS = "ckptplan "
BY_FLOPS, BY_TIME = our_name("optimal", "flops"), our_name("optimal", "time")
DP_BY_TIME = our_name("dp", "time")
OUR_COMPILED = "ckptplan compile"
MOST_ERROR = 0.01  # of the prediction


def best_within(record: Record, league: str, rival: str, budget_bytes: int) -> int | None:
    """The number of the rival's cheapest configuration whose measured peak keeps to the budget.

    Cheapest by measured time where its league has no FLOPs, else by FLOPs, then by peak; of ours only what was
    planned for this budget counts.
    """
    fitting = [
        (_order(c), number)
        for number, c in enumerate(record["configurations"])
        if (c["league"], c["rival"]) == (league, rival)
        and c["peak_bytes"] <= budget_bytes
        and (not rival.startswith(OURS) or budget_bytes in c["asked_bytes"])
    ]
    return min(fitting)[1] if fitting else None


def _order(configuration: Record) -> tuple[float, int]:
    if configuration["flops"] is not None:
        return configuration["flops"], configuration["peak_bytes"]
    time = configuration["time"]
    return (time["minimum_s"] if time else math.inf), configuration["peak_bytes"]


def rivals(record: Record, league: str) -> list[str]:
    return list(dict.fromkeys(c["rival"] for c in record["configurations"] if c["league"] == league))


def timed_budgets(record: Record, league: str) -> list[Record]:
    """Those at which steps of the league were timed."""
    return [budget for budget in record["budgets"] if league in budget["timed"]]


def champions(record: Record, league: str) -> list[int]:
    """The configurations to time: the best of each eager rival within each timed budget, every compiled one in any.

    Our plans by FLOPs are none of them: they are not made to be fast.
    """
    timed = [budget["bytes"] for budget in timed_budgets(record, league)]
    if league == "compiled":
        return [
            number
            for number, c in enumerate(record["configurations"])
            if c["league"] == league
            and any(c["peak_bytes"] <= size and (not c["asked_bytes"] or size in c["asked_bytes"]) for size in timed)
        ]
    names = [rival for rival in rivals(record, league) if not (rival.startswith(OURS) and rival.endswith("=flops"))]
    found = {best_within(record, league, rival, size) for rival in names for size in timed}
    return sorted(number for number in found if number is not None)


def our_curve_faults(record: Record, our_added_flops: Callable[[int], int | None]) -> list[str]:
    """Eager configurations, at any peak, that run fewer FLOPs than our plan for just that peak.

    Args:
        our_added_flops: budget in bytes -> what our plan for it adds, None where it has none.
    """
    plain = record["no_checkpointing"]["flops"]
    faults = []
    for c in record["configurations"]:
        if c["flops"] is None or c["rival"].startswith(OURS):
            continue
        added, ours = c["flops"] - plain, our_added_flops(c["peak_bytes"])
        if ours is None or added < ours:
            faults.append(f"{c['rival']} {c['plan']}: {c['peak_bytes']} bytes, +{added} FLOPs; ours: +{ours}")
    return faults


def judge(record: Record) -> Record:
    """What was lost and what was broken, each as a sentence; empty lists are what we want."""
    ours = [c for c in record["configurations"] if c["rival"].startswith(OURS)]
    errors = [abs(c["predicted_peak_bytes"] / c["peak_bytes"] - 1) for c in ours]
    return {
        "lost_by_flops": _lost(record, "eager", BY_FLOPS, _fewer_flops, record["budgets"]),
        "lost_by_time": _lost(record, "eager", BY_TIME, _faster, timed_budgets(record, "eager")),
        "slower_than_dp": _slower_than_dp(record),
        "lost_compiled": _lost(record, "compiled", OUR_COMPILED, _faster, timed_budgets(record, "compiled")),
        "below_our_curve": record["below_our_curve"],
        "violations": [
            f"{c['rival']} {c['plan']}: {c['peak_bytes']} bytes, budget {min(c['asked_bytes'])}"
            for c in ours
            if c["peak_bytes"] > min(c["asked_bytes"])
        ],
        "worst_prediction_error": max(errors, default=None),
        "mispredicted": [
            f"{c['rival']} {c['plan']}: predicted {c['predicted_peak_bytes']}, measured {c['peak_bytes']} bytes"
            for c, error in zip(ours, errors, strict=True)
            if error > MOST_ERROR
        ],
        "other_flops_than_predicted": [
            f"{c['rival']} {c['plan']}: predicted +{c['predicted_added_flops']}, measured +{added}"
            for c in ours
            if c["predicted_added_flops"] is not None
            and c["predicted_added_flops"] != (added := c["flops"] - record["no_checkpointing"]["flops"])
        ],
        "unequal_gradients": [
            f"{c['rival']} {c['plan']}" for c in ours if c["league"] == "eager" and not c["gradients_bitwise_equal"]
        ],
        "violations_of_rivals": _violations_of_rivals(record),
    }


def is_won(verdict: Record) -> bool:
    """Nothing lost, nothing broken; how often rivals overstep their budgets is told, but is not ours to lose by."""
    return not any(value for key, value in verdict.items() if isinstance(value, list) and key != "violations_of_rivals")


Cheaper = Callable[[Record, Record], bool]


def _fewer_flops(rival: Record, our: Record) -> bool:
    return rival["flops"] < our["flops"]


def _faster(rival: Record, our: Record) -> bool:
    """Beyond the spread of both."""
    if rival["time"] is None or our["time"] is None:
        return False
    slack = max(rival["time"]["spread"], our["time"]["spread"])
    return rival["time"]["minimum_s"] * (1 + slack) < our["time"]["minimum_s"]


def _lost(record: Record, league: str, our_rival: str, is_cheaper: Cheaper, budgets: Sequence[Record]) -> list[str]:
    """Budgets at which a rival keeps to the budget at less cost than ours, or at all where ours has no plan.

    Stricter than "smaller and cheaper": whoever fits and is cheaper has won.
    """
    if our_rival not in rivals(record, league):
        return []
    lost = []
    for budget in budgets:
        number = best_within(record, league, our_rival, budget["bytes"])
        our = None if number is None else record["configurations"][number]
        for rival in rivals(record, league):
            number = best_within(record, league, rival, budget["bytes"])
            if rival.startswith(OURS) or number is None:
                continue
            found = record["configurations"][number]
            if our is None or is_cheaper(found, our):
                smaller = our is not None and found["peak_bytes"] <= our["peak_bytes"]
                lost.append(
                    f"{budget['name']}: {rival} {found['plan']}{' (smaller, too)' if smaller else ''}"
                    f"{_by_how_much(found, our)}"
                )
    return lost


def _by_how_much(rival: Record, our: Record | None) -> str:
    if our is None or rival["time"] is None or our["time"] is None:
        return ""
    ours, theirs = our["time"], rival["time"]
    return f", {theirs['ratio']:.3f} against {ours['ratio']:.3f} of {our['plan']}"


def _slower_than_dp(record: Record) -> list[str]:
    slower = []
    for budget in record["budgets"]:
        numbers = [best_within(record, "eager", rival, budget["bytes"]) for rival in (DP_BY_TIME, BY_TIME)]
        if None not in numbers:
            dp, our = (record["configurations"][number] for number in numbers)
            if _faster(dp, our):
                slower.append(f"{budget['name']}: {our['plan']} against {dp['plan']}")
    return slower


def _violations_of_rivals(record: Record) -> dict[str, int]:
    """How many of the budgets that a rival was asked for its plan oversteps."""
    found: dict[str, int] = {}
    for c in record["configurations"]:
        if not c["rival"].startswith(OURS) and c["asked_bytes"]:
            over = sum(c["peak_bytes"] > budget_bytes for budget_bytes in c["asked_bytes"])
            found[c["rival"]] = found.get(c["rival"], 0) + over
    return found
