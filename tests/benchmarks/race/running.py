"""One model's race in one league: every configuration measured, and what came of it as plain data for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        timed: those of them at which steps are timed, beside the first budget below full checkpointing.
        rounds: of the interleaved times; 0: no times.
        league: "eager" or "compiled".
        predecessor: the folder that holds the predecessor's package, or None.
    """

    budgets: tuple[float, ...]
    rounds: int
    league: str = "eager"
    timed: tuple[float, ...] = ()
    predecessor: Path | None = None


Key = tuple[str, str]  # a rival, its plan


def race(
    name: str,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    known: Sequence[Record] = (),
) -> Record:
    """Run one model's race in one league. Steps are of one thread; weights, batch and gradients stand before each.

    ``known``: configurations of an earlier race of the model in this league, whose bytes, FLOPs and gradients are taken
    from there instead of measured again.
    """
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    subject = make_subject(name)
    plain = measure(subject.step, subject.model, is_eager=True)
    full = measure(next(eager.every_kth(subject)).step, subject.model, is_eager=True)
    budgets = _budgets(settings, plain.peak_bytes, full.peak_bytes)
    absent: dict[str, str] = {}
    enter = _eager if settings.league == "eager" else _compiled
    entered = enter(subject, budgets, settings, absent, say)
    configurations, steps = _measured(settings.league, entered, plain, {(c["rival"], c["plan"]): c for c in known}, say)
    record: Record = {
        "model": name,
        "blocks": len(subject.blocks),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "profile_s": entered.profile_s,
        "no_checkpointing": {"peak_bytes": plain.peak_bytes, "kept_bytes": plain.kept_bytes, "flops": plain.flops},
        "budgets": budgets,
        "not_installed": absent,
        "configurations": configurations,
    }
    if settings.rounds:
        _add_times(record, settings.league, steps, subject.step, settings.rounds, say)
    record["below_our_curve"] = our_curve_faults(record, lambda peak_bytes: _our_flops(entered.profile, peak_bytes))
    record["verdict"] = judge(record)
    record["race_s"] = time.perf_counter() - start_s
    return record


def merged(parts: Sequence[Record]) -> Record:
    """The races of one model in several leagues as one record."""
    first = parts[0]
    for part in parts[1:]:
        for key in ("model", "budgets"):
            names = [
                [(b["name"], b["bytes"]) for b in p["budgets"]] if key == "budgets" else p[key] for p in (first, part)
            ]
            if names[0] != names[1]:
                raise ValueError(f"parts of {first['model']} differ in their {key}: {names[0]} and {names[1]}")
    record = {**first, "configurations": [c for part in parts for c in part["configurations"]]}
    record["not_installed"] = {rival: why for part in parts for rival, why in part["not_installed"].items()}
    record["race_s"] = sum(part["race_s"] for part in parts)
    record["below_our_curve"] = [fault for part in parts for fault in part["below_our_curve"]]
    record["budgets"] = [
        {**budgets[0], "timed": [league for budget in budgets for league in budget["timed"]]}
        for budgets in zip(*(part["budgets"] for part in parts), strict=True)
    ]
    times = next((t for part in parts if (t := part["no_checkpointing"].get("time"))), None)
    record["no_checkpointing"] = first["no_checkpointing"] | ({} if times is None else {"time": times})
    record["verdict"] = judge(record)
    return record


# Who runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entered:
    """The entrants, each with the model that its step runs; our profile for plans by FLOPs."""

    entrants: list[tuple[Subject, Entrant]]
    profile: ChainProfile | None
    profile_s: float


def _eager(
    subject: Subject, budgets: Sequence[Record], settings: Settings, absent: dict[str, str], say: Callable[[str], None]
) -> _Entered:
    start_s = time.perf_counter()
    trials = {"num_warmup": 1, "num_trials": 5} if settings.rounds else {"num_warmup": 0, "num_trials": 1}
    profile = profile_model(subject.model, None, subject.batch, loss_of, selective=True, **trials)
    profile_s = time.perf_counter() - start_s
    say(f"{subject.name}: {len(profile)} blocks profiled in {profile_s:.1f} s")
    budgets_bytes = [budget["bytes"] for budget in budgets]
    found = [entrant for rival in eager.WITHOUT_BUDGET for entrant in rival(subject)]
    found += eager.ours(subject, profile, budgets_bytes, "flops")
    if settings.rounds:
        timed = [budget["bytes"] for budget in budgets if budget["timed"]]
        found += eager.ours(subject, profile, timed, "time")
    found += _others(subject, profile, budgets_bytes, settings.predecessor, absent)
    return _Entered([(subject, entrant) for entrant in found], profile, profile_s)


def _compiled(
    subject: Subject, budgets: Sequence[Record], settings: Settings, absent: dict[str, str], say: Callable[[str], None]
) -> _Entered:
    compiled.allow_many_graphs()
    other, own = make_subject(subject.name), make_subject(subject.name)  # compiling leaves marks on a model's modules
    entrants = [(other, entrant) for rival in compiled.RIVALS for entrant in rival(other)]
    start_s = time.perf_counter()
    profile = compiled.our_profile(own)
    profile_s = time.perf_counter() - start_s
    say(f"{subject.name}: {len(profile)} blocks compiled and profiled in {profile_s:.1f} s")
    timed = [budget["bytes"] for budget in budgets if budget["timed"] or not settings.rounds]
    entrants += [(own, entrant) for entrant in compiled.ours(own, profile, timed)]
    return _Entered(entrants, None, profile_s)


def _budgets(settings: Settings, plain_bytes: int, full_bytes: int) -> list[Record]:
    league = [settings.league] if settings.rounds else []  # where, if at all
    found = [
        {"name": f"{share:.0%}", "bytes": int(plain_bytes * share), "timed": league if share in settings.timed else []}
        for share in settings.budgets
    ]
    return found + [
        {
            "name": f"{share:.0%} of every block",
            "bytes": int(full_bytes * share),
            "timed": league if share == BELOW_FULL[0] else [],
        }
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


def _our_flops(profile: ChainProfile | None, budget_bytes: int) -> int | None:
    assert profile is not None  # only eager configurations have FLOPs
    plan = eager.plan_for(profile, "optimal", "flops", budget_bytes)
    return None if plan is None or plan.predicted_cost is None else int(plan.predicted_cost)


# Measuring -----------------------------------------------------------------------------------------------------------


def _measured(
    league: str, entered: _Entered, plain: StepFigures, known: Mapping[Key, Record], say: Callable[[str], None]
) -> tuple[list[Record], list[Step]]:
    """Each distinct configuration once, with all the budgets that it was made for; and how to run it."""
    configurations: dict[Key, Record] = {}
    measured: dict[Key, tuple[Step, Record]] = {}
    steps: list[Step] = []
    for subject, entrant in entered.entrants:
        key = (entrant.rival, entrant.plan)
        if key not in configurations:
            same = ("ours" if entrant.rival.startswith(OURS) else entrant.rival, entrant.plan)
            if same not in measured and key in known:
                measured[same] = entrant.step, {name: known[key][name] for name in _FIGURES}
            if same not in measured:
                start_s = time.perf_counter()
                figures = measure(entrant.step, subject.model, is_eager=league == "eager")
                measured[same] = entrant.step, _figures(figures, plain)
                told = f"{figures.peak_bytes / 2**20:.2f} MiB ({time.perf_counter() - start_s:.1f} s)"
                say(f"  {entrant.rival}: {_brief(entrant.plan)}: {told}")
            step, figures_of = measured[same]
            configurations[key] = _configuration(league, entrant, figures_of)
            steps.append(step)
        record = configurations[key]
        if entrant.asked_bytes is not None and entrant.asked_bytes not in record["asked_bytes"]:
            record["asked_bytes"].append(entrant.asked_bytes)
        if entrant.solve_s is not None:
            record["solve_s"] = max(entrant.solve_s, record["solve_s"] or 0.0)
    return list(configurations.values()), steps


_FIGURES = ("peak_bytes", "kept_bytes", "flops", "flops_ratio", "gradients_bitwise_equal", "gradients_max_rel_diff")


def _figures(figures: StepFigures, plain: StepFigures) -> Record:
    """What depends on nothing else that the machine does."""
    return {
        "peak_bytes": figures.peak_bytes,
        "kept_bytes": figures.kept_bytes,
        "flops": figures.flops,
        "flops_ratio": None if figures.flops is None or not plain.flops else figures.flops / plain.flops,
        "gradients_bitwise_equal": bitwise_equal(figures.gradients, plain.gradients),
        "gradients_max_rel_diff": max_relative_difference(figures.gradients, plain.gradients),
    }


def _configuration(league: str, entrant: Entrant, figures: Record) -> Record:
    return {
        "league": league,
        "rival": entrant.rival,
        "plan": entrant.plan,
        "asked_bytes": [],
        "predicted_peak_bytes": entrant.predicted_peak_bytes,
        "predicted_added_flops": entrant.added_flops,
        "solve_s": entrant.solve_s,
        **figures,
        "time": None,
    }


def _brief(plan: str) -> str:
    return plan if len(plan) <= 60 else plan[:57] + "..."


def _add_times(
    record: Record, league: str, steps: Sequence[Step], plain: Step, rounds: int, say: Callable[[str], None]
) -> None:
    """Times of the configurations that the verdict looks at, all interleaved, beside the plain step."""
    timed = champions(record, league)
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
