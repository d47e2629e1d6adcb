"""Rows about one step and the blocks in it: memory alive, decisions, strips. Torch-free.

Each plan on a workload is told once, however many runs came to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptplan.errors import CkptplanError
from ckptplan.gaps import expanded, expanded_nodes
from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, PlanNode, Selective, blocks_of
from ckptplan.profiles import ChainProfile
from ckptplan.report.records import RunRecords, some
from ckptplan.report.tables import plan_rows
from ckptplan.simulate import AFTER, BEFORE, simulate_plan

Row = dict[str, Any]

# What a page may hold at most, so that it opens at once; what is beyond is named in its notes.
MOST_BLOCK_ROWS = 3000
MOST_TIMELINE_ROWS = 6000
MOST_STRIP_CELLS = 2400
REPORT_OF_ONE = "python -m ckptplan.report on a job's own folder shows it"


def stage_names(profile: ChainProfile) -> tuple[str, ...]:
    """All stages of a forward in order, what runs between blocks among them."""
    return (*([BEFORE] if profile.pre is not None else []), *expanded(profile).block_ids, AFTER)


def timeline_of(profile: ChainProfile, nodes: Sequence[PlanNode]) -> list[Row]:
    """The most bytes alive in each stage of a step, in running order.

    ``start`` and ``end`` are places along the step: the stages' forwards count up, their backwards go on from there in
    reverse; a segment is as wide as its blocks, and what runs between blocks is as wide as one.
    """
    of_stages = expanded_nodes(profile, nodes)
    widths = [*([1] if profile.pre is not None else []), *(len(blocks_of((node,))) for node in of_stages), 1]
    places, start = [], 0
    for width in [*widths, *reversed(widths)]:
        places.append((start, start + width))
        start += width
    rows = []
    for (name, phase, level), (start, end) in zip(simulate_plan(profile, nodes).timeline, places, strict=True):
        rows.append({"start": start, "end": end, "stage": name, "phase": phase, "level_bytes": level})
    return rows


def timeline_rows(
    runs: Sequence[RunRecords],
    of_run: Sequence[int],
    plan_ids: Sequence[int | None],
    profiles: Sequence[ChainProfile | None],
    notes: list[str],
) -> list[Row]:
    rows: list[Row] = []
    for workload, profile in enumerate(profiles):
        if profile is not None:
            kept = [Keep(i) for i in range(len(profile))]
            rows += [row | {"workload": workload, "plan_id": 0} for row in _safe_timeline(profile, kept)]
    left: list[str] = []
    for run, workload, plan_id in _first_of_each_plan(runs, of_run, plan_ids):
        if run.profile is None or run.plan is None:
            continue
        found = _safe_timeline(run.profile, run.plan.nodes)
        if len(rows) + len(found) > MOST_TIMELINE_ROWS:
            left.append(run.name)
        else:
            rows += [row | {"workload": workload, "plan_id": plan_id} for row in found]
    if left:
        notes.append(f"the memory over one step is left out for {some(left)}: {REPORT_OF_ONE}")
    return rows


def _safe_timeline(profile: ChainProfile, nodes: Sequence[PlanNode]) -> list[Row]:
    try:
        return timeline_of(profile, nodes)
    except (CkptplanError, ValueError):  # a profile without memory, or a plan that belongs to another one
        return []


def _first_of_each_plan(
    runs: Sequence[RunRecords], of_run: Sequence[int], plan_ids: Sequence[int | None]
) -> Iterable[tuple[RunRecords, int, int]]:
    seen: set[int] = set()
    for run, workload, plan_id in zip(runs, of_run, plan_ids, strict=True):
        if plan_id is not None and plan_id not in seen and run.plan is not None:
            seen.add(plan_id)
            yield run, workload, plan_id


def block_rows(
    runs: Sequence[RunRecords], of_run: Sequence[int], plan_ids: Sequence[int | None], notes: list[str]
) -> list[Row]:
    rows: list[Row] = []
    left: list[str] = []
    for run, workload, plan_id in _first_of_each_plan(runs, of_run, plan_ids):
        if run.profile is None or run.plan is None or len(run.profile) != len(run.plan.decisions):
            continue
        if len(rows) + len(run.profile) > MOST_BLOCK_ROWS:
            left.append(run.name)
            continue
        for found in plan_rows(run.profile, run.plan):
            row = {"workload": workload, "plan_id": plan_id, "block": found.block_id, "decision": found.decision}
            row |= {"retained_bytes": found.retained_bytes, "added_ms": found.added_time_ms, "why": found.reason}
            rows.append(row)
    if left:
        notes.append(f"the decisions block by block are left out for {some(left)}: {REPORT_OF_ONE}")
    return rows


# --- strips -----------------------------------------------------------------------------------------------------------

# From least to most recomputation, with the letter that stands for it in the terminal's strip.
DECISIONS = {
    "keep": "K",
    "keep part": "S",
    "on the host": "O",
    "compiled": "C",
    "recompute": "R",
    "recompute repeatedly": "N",
}


def decisions_of(nodes: Iterable[PlanNode]) -> list[str]:
    """One of ``DECISIONS`` per block, in chain order; a block inside two or more segments runs repeatedly."""
    found: dict[int, str] = {}

    def walk(node: PlanNode, depth: int) -> None:
        if isinstance(node, Keep):
            found[node.block] = ("keep", "recompute", "recompute repeatedly")[min(depth, 2)]
        elif isinstance(node, Selective):
            found[node.block] = "keep part"
        elif isinstance(node, Offload):
            found[node.block] = "on the host"
        elif isinstance(node, (Compiled, CompiledModel)):
            found.update(dict.fromkeys(blocks_of((node,)), "compiled"))
        else:
            for child in node.children:
                walk(child, depth + 1)

    for node in nodes:
        walk(node, 0)
    return [found[block] for block in sorted(found)]


def strip_rows(
    runs: Sequence[RunRecords], of_run: Sequence[int], plan_ids: Sequence[int | None], notes: list[str]
) -> list[Row]:
    """A strip for each planner at each budget; runs that differ in seed only share one."""
    rows: list[Row] = []
    seen: set[tuple[Any, ...]] = set()
    left: list[str] = []
    for run, workload, plan_id in zip(runs, of_run, plan_ids, strict=True):
        label = f"{run.figure('planner')} {run.figure('budget/value') or run.figure('budget/kind') or ''}".strip()
        if run.plan is None or (workload, label, plan_id) in seen:
            continue
        seen.add((workload, label, plan_id))
        decisions = decisions_of(run.plan.nodes)
        if len(rows) + len(decisions) > MOST_STRIP_CELLS:
            left.append(run.name)
            continue
        for number, (decision, block) in enumerate(zip(decisions, run.plan.decisions, strict=True)):
            row = {"workload": workload, "planner": run.figure("planner"), "strip": label, "order": run.index}
            rows.append(row | {"number": number, "block": block.block_id, "decision": decision})
    if left:
        notes.append(f"no strip is drawn for {some(left)}: {REPORT_OF_ONE}")
    return rows
