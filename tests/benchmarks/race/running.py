"""One model's race: every configuration of every rival measured, and what came of it as plain data for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptplan.measure import profile_model
from ckptplan.profiles import ChainProfile
from tests.benchmarks.race import compiled, eager
from tests.benchmarks.race.eager import Entrant
from tests.benchmarks.race.judging import OURS, champions, judge, our_curve_faults
from tests.benchmarks.race.measuring import (
    Step,
    StepFigures,
    bitwise_equal,
    interleaved_times,
    max_relative_difference,
    measure,
)
from tests.benchmarks.race.predecessor import RIVAL as PREDECESSOR
from tests.benchmarks.race.predecessor import predecessor
from tests.benchmarks.race.subjects import Subject, loss_of, make_subject
from tests.benchmarks.race.torch_milp import RIVAL as TORCH_MILP
from tests.benchmarks.race.torch_milp import is_installed, torch_milp

BELOW_FULL = (0.9, 0.8)  # budgets below the peak of checkpointing every block, as shares of it
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a race is made of.

    Attributes:
        budgets: shares of the unplanned peak.
        timed: those of them at which the eager league is timed, beside the first budget below full checkpointing.
        rounds: of the interleaved times; 0: no times.
        leagues: "eager", "compiled".
        predecessor: the folder that holds the predecessor's package, or None.
    """

    budgets: tuple[float, ...]
    rounds: int
    leagues: tuple[str, ...]
    timed: tuple[float, ...] = ()
    predecessor: Path | None = None


def race(name: str, settings: Settings, say: Callable[[str], None] = lambda line: None) -> Record:
    """Run one model's race. Steps are those of one thread; weights, batch and gradients stand before each."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    subject = make_subject(name)
    costs = ("flops", "time") if settings.rounds else ("flops",)
    trials = {"num_warmup": 1, "num_trials": 5} if settings.rounds else {"num_warmup": 0, "num_trials": 1}
    profile = profile_model(subject.model, None, subject.batch, loss_of, selective=True, **trials)
    profile_s = time.perf_counter() - start_s
    say(f"{name}: {len(profile)} blocks profiled in {profile_s:.1f} s")
    plain = measure(subject.step, subject.model, is_eager=True)
    full = measure(next(eager.every_kth(subject)).step, subject.model, is_eager=True)
    budgets = _budgets(settings, plain.peak_bytes, full.peak_bytes)
    budgets_bytes = [budget["bytes"] for budget in budgets]

    absent: dict[str, str] = {}
    entrants: list[tuple[str, Subject, Entrant]] = []
    if "eager" in settings.leagues:
        found = [entrant for rival in eager.WITHOUT_BUDGET for entrant in rival(subject)]
        found += eager.ours(subject, profile, budgets_bytes, costs)
        found += _others(subject, profile, budgets_bytes, settings.predecessor, absent)
        entrants += [("eager", subject, entrant) for entrant in found]
    if "compiled" in settings.leagues:
        compiled.allow_many_graphs()
        other = make_subject(name)  # the same model once more: compiling leaves marks on its modules
        entrants += [("compiled", other, entrant) for rival in compiled.RIVALS for entrant in rival(other)]
        own = make_subject(name)
        entrants += [("compiled", own, entrant) for entrant in compiled.ours(own, budgets_bytes)]

    configurations, steps = _measured(entrants, plain, say)
    record: Record = {
        "model": name,
        "blocks": len(profile),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "profile_s": profile_s,
        "no_checkpointing": {"peak_bytes": plain.peak_bytes, "kept_bytes": plain.kept_bytes, "flops": plain.flops},
        "budgets": budgets,
        "not_installed": absent,
        "configurations": configurations,
    }
    if settings.rounds:
        _add_times(record, steps, subject.step, settings.rounds, say)
    record["below_our_curve"] = our_curve_faults(record, lambda peak_bytes: _our_flops(profile, peak_bytes))
    record["verdict"] = judge(record)
    record["race_s"] = time.perf_counter() - start_s
    return record


def _budgets(settings: Settings, plain_bytes: int, full_bytes: int) -> list[Record]:
    found = [
        {"name": f"{share:.0%}", "bytes": int(plain_bytes * share), "is_timed": share in settings.timed}
        for share in settings.budgets
    ]
    return found + [
        {"name": f"{share:.0%} of every block", "bytes": int(full_bytes * share), "is_timed": share == BELOW_FULL[0]}
        for share in BELOW_FULL
    ]


def _others(
    subject: Subject,
    profile: ChainProfile,
    budgets_bytes: Sequence[int],
    folder: Path | None,
    absent: dict[str, str],
) -> Iterator[Entrant]:
    """The rivals that are packages of their own; ``absent`` tells which could not run, and why."""
    if folder is None:
        absent[PREDECESSOR] = "not installed (--predecessor)"
    else:
        yield from predecessor(subject, profile, budgets_bytes, folder)
    if is_installed():
        yield from torch_milp(subject, budgets_bytes)
    else:
        absent[TORCH_MILP] = "not installed (pulp, pwlf)"


def _our_flops(profile: ChainProfile, budget_bytes: int) -> int | None:
    plan = eager.plan_for(profile, "optimal", "flops", budget_bytes)
    return None if plan is None or plan.predicted_cost is None else int(plan.predicted_cost)


# Measuring -----------------------------------------------------------------------------------------------------------


def _measured(
    entrants: Iterable[tuple[str, Subject, Entrant]], plain: StepFigures, say: Callable[[str], None]
) -> tuple[list[Record], list[Step]]:
    """Each distinct configuration once, with all the budgets that it was made for; and how to run it."""
    configurations: dict[tuple[str, str, str], Record] = {}
    measured: dict[tuple[str, str, str], tuple[Step, StepFigures]] = {}
    steps: list[Step] = []
    for league, subject, entrant in entrants:
        key = (league, entrant.rival, entrant.plan)
        if key not in configurations:
            same = (league, "ours" if entrant.rival.startswith(OURS) else entrant.rival, entrant.plan)
            if same not in measured:
                start_s = time.perf_counter()
                figures = measure(entrant.step, subject.model, is_eager=league == "eager")
                measured[same] = entrant.step, figures
                told = f"{figures.peak_bytes / 2**20:.2f} MiB ({time.perf_counter() - start_s:.1f} s)"
                say(f"  {entrant.rival}: {_brief(entrant.plan)}: {told}")
            step, figures = measured[same]
            configurations[key] = _configuration(league, entrant, figures, plain)
            steps.append(step)
        record = configurations[key]
        if entrant.asked_bytes is not None and entrant.asked_bytes not in record["asked_bytes"]:
            record["asked_bytes"].append(entrant.asked_bytes)
        if entrant.solve_s is not None:
            record["solve_s"] = max(entrant.solve_s, record["solve_s"] or 0.0)
    return list(configurations.values()), steps


def _configuration(league: str, entrant: Entrant, figures: StepFigures, plain: StepFigures) -> Record:
    return {
        "league": league,
        "rival": entrant.rival,
        "plan": entrant.plan,
        "asked_bytes": [],
        "predicted_peak_bytes": entrant.predicted_peak_bytes,
        "peak_bytes": figures.peak_bytes,
        "kept_bytes": figures.kept_bytes,
        "predicted_added_flops": entrant.added_flops,
        "flops": figures.flops,
        "flops_ratio": None if figures.flops is None or not plain.flops else figures.flops / plain.flops,
        "solve_s": entrant.solve_s,
        "gradients_bitwise_equal": bitwise_equal(figures.gradients, plain.gradients),
        "gradients_max_rel_diff": max_relative_difference(figures.gradients, plain.gradients),
        "time": None,
    }


def _brief(plan: str) -> str:
    return plan if len(plan) <= 60 else plan[:57] + "..."


def _add_times(record: Record, steps: Sequence[Step], plain: Step, rounds: int, say: Callable[[str], None]) -> None:
    """Times of the configurations that the verdict looks at, all interleaved, beside the plain step."""
    timed = champions(record)
    distinct = list(dict.fromkeys(steps[index] for index in timed))  # planners of ours may agree
    say(f"  timing {len(distinct)} steps, {rounds} rounds")
    times = interleaved_times([plain, *distinct], rounds)
    of_step = dict(zip(distinct, times[1:], strict=True))
    for index in timed:
        found = of_step[steps[index]]
        record["configurations"][index]["time"] = {
            "minimum_s": found.minimum_s,
            "ratio": found.minimum_s / times[0].minimum_s,
            "spread": found.spread,
            "rounds": found.rounds,
        }
    record["no_checkpointing"]["time"] = {"minimum_s": times[0].minimum_s, "spread": times[0].spread}
