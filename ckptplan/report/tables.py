"""The two tables of a run: what the plan does to each block, and what came of it.

Both fit 80 columns, and a console that is no terminal prints them without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptplan.costs import StageCost
from ckptplan.nodes import OFFLOAD, Compiled, CompiledModel, Keep, Offload, PlanNode, Selective
from ckptplan.plan import CheckpointDecision, CheckpointPlan
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.selective import find_compiled, find_offload, find_option
from ckptplan.units import format_bytes, format_ms, format_percent


@dataclass(frozen=True)
class PlanRow:
    """What the plan does with one block.

    Attributes:
        retained_bytes: what the block holds from its forward to its backward.
        added_time_ms: what recomputing it adds to a step; 0 for a kept block; for a compiled one, what its budget adds
            beside its fastest; None: not measured.
    """

    block_id: str
    decision: str
    retained_bytes: int | None
    added_time_ms: float | None
    reason: str


PLAN_COLUMNS = ("block", "decision", "retained_bytes", "added_time_ms", "reason")


_WHOLE = "compiled as one"


def plan_rows(profile: ChainProfile, plan: CheckpointPlan) -> tuple[PlanRow, ...]:
    """One row per block, in chain order."""
    words = dict(_decision_words(plan.nodes))
    compiled = {node.block: node for node in plan.nodes if isinstance(node, Compiled)}
    return tuple(
        _plan_row(block, decision, words.get(index, "keep"), compiled.get(index))
        for index, (block, decision) in enumerate(zip(profile, plan.decisions, strict=True))
    )


def _plan_row(block: BlockProfile, decision: CheckpointDecision, words: str, compiled: Compiled | None) -> PlanRow:
    added_time_ms: float | None
    cost: StageCost | None
    if words.startswith(_WHOLE):
        return PlanRow(decision.block_id, words, None, None, decision.reason)  # the graph's, no block's
    if compiled is not None:
        option = find_compiled(block, compiled.budget)
        added_time_ms, cost = option.time_ms, option.cost
    elif decision.executor == OFFLOAD:
        added_time_ms, cost = find_offload(block).time_ms, find_offload(block).cost
    elif decision.saved_ops is not None:
        added_time_ms, cost = decision.recompute_time_ms, find_option(block, decision.saved_ops).cost
    elif not decision.checkpointed:
        added_time_ms, cost = 0.0, block.keep
    else:
        added_time_ms = block.recompute_time_ms if decision.recompute_time_ms is None else decision.recompute_time_ms
        cost = block.recompute
    retained_bytes = decision.retained_bytes
    if retained_bytes is None and cost is not None:
        retained_bytes = cost.saved_bytes
    reason = decision.reason or decision.exclusion_reason or ""
    return PlanRow(decision.block_id, words, retained_bytes, added_time_ms, reason)


def _decision_words(nodes: Iterable[PlanNode], segments: tuple[str, ...] = ()) -> Iterable[tuple[int, str]]:
    """``keep``, ``keep part`` (the reason says which), ``on the host``, ``recompute`` (alone), ``replay`` (alone too,
    operator by operator), ``recompute in 1-4`` (a segment), ``recompute in 1-4, 3-4`` (a nest).
    """
    for node in nodes:
        if isinstance(node, Keep):
            yield node.block, f"recompute in {', '.join(segments)}" if segments else "keep"
            continue
        if isinstance(node, Selective):
            yield node.block, "keep part" if node.saved_ops else "replay"
            continue
        if isinstance(node, Offload):
            yield node.block, "on the host"
            continue
        if isinstance(node, Compiled):
            yield node.block, f"compiled [{node.budget:g}]"
            continue
        if isinstance(node, CompiledModel):
            yield from ((block, f"{_WHOLE} [{node.budget:g}]") for block in range(node.blocks))
            continue
        blocks = [block for block, _ in _decision_words(node.children)]
        if len(blocks) == 1 and not segments:
            yield blocks[0], "recompute"
        else:
            yield from _decision_words(node.children, (*segments, f"{blocks[0]}-{blocks[-1]}"))


def _plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)


def plan_table(
    profile: ChainProfile, plan: CheckpointPlan, console: Console | None = None, *, planner: str | None = None
) -> None:
    """Print the plan block by block; consecutive blocks with the same figures share a row.

    ``planner``: the name to print, where that is not the one in the plan ("dp" for what the API calls otherwise).
    """
    console = console or Console()
    table = _plain_table()
    runs = list(_runs(plan_rows(profile, plan)))
    names = [_range_name(same[0].block_id, same[-1].block_id) for same in runs]
    table.add_column("block", overflow="fold", min_width=min(32, max(map(len, names), default=0)))
    table.add_column("decision", max_width=18)
    for name in ("keeps", "adds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    for name, same in zip(names, runs, strict=True):
        table.add_row(*_cells(name, same))
    rows = [row for same in runs for row in same]
    table.add_section()
    table.add_row(f"{len(rows)} blocks", _counts(plan), _total_bytes(rows), _total_time(rows), "")
    console.print(Text(_plan_title(plan, planner)))
    console.print(table)


def _counts(plan: CheckpointPlan) -> str:
    in_part = f"{plan.selective} in part" if plan.selective else ""
    compiled = f"{plan.compiled} compiled" if plan.compiled else ""
    offloaded = f"{plan.offloaded} on the host" if plan.offloaded else ""
    others = [count for count in (in_part, offloaded, compiled) if count]
    return ", ".join([f"{plan.recomputed} recomputed", *others] if plan.recomputed or not others else others)


def _runs(rows: tuple[PlanRow, ...]) -> Iterable[list[PlanRow]]:
    for _, same in groupby(rows, key=lambda row: (row.decision, row.retained_bytes, row.added_time_ms, row.reason)):
        yield list(same)


def _cells(name: str, same: list[PlanRow]) -> tuple[Text, Text, str, str, Text]:
    first = same[0]
    times = "" if len(same) == 1 else f" x{len(same)}"
    added = "-" if first.added_time_ms == 0 else format_ms(first.added_time_ms)
    style = "" if first.decision == "keep" else "yellow"
    return (
        Text(name),  # Text, not str: block paths may hold [brackets], which rich reads as markup
        Text(first.decision + times, style=style),
        format_bytes(first.retained_bytes),
        added,
        Text(first.reason),
    )


def _range_name(first: str, last: str) -> str:
    """``layers.3`` to ``layers.7`` as ``layers.3-7``."""
    if first == last:
        return first
    prefix, dot, number = last.rpartition(".")
    return f"{first}-{number}" if dot and first.startswith(prefix + dot) else f"{first} - {last}"


def _total_bytes(rows: list[PlanRow]) -> str:
    known = [row.retained_bytes for row in rows if row.retained_bytes is not None]
    return format_bytes(sum(known)) if len(known) == len(rows) else format_bytes(None)


def _total_time(rows: list[PlanRow]) -> str:
    known = [row.added_time_ms for row in rows if row.added_time_ms is not None]
    return format_ms(sum(known)) if len(known) == len(rows) else format_ms(None)


def _plan_title(plan: CheckpointPlan, planner: str | None) -> str:
    peak = f"predicted peak {format_bytes(plan.predicted_peak_bytes)}"
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)} allowed"
    return f"plan by {planner or plan.planner}: {peak}{budget}"


def footprint_table(title: str, rows: Sequence[tuple[str, int, str]], console: Console | None = None) -> None:
    """Print all of a device's memory at a plan's peak: (name, bytes, where from); the rows add up to all of it."""
    console = console or Console()
    table = _plain_table()
    table.add_column(title, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    for name, size_bytes, note in rows:
        if name == "left" and size_bytes < 0:
            name, size_bytes = "missing", -size_bytes
        table.add_row(Text(name), Text(format_bytes(size_bytes)), Text(note))
    table.add_row(Text("all"), Text(format_bytes(sum(size_bytes for _, size_bytes, _ in rows))), Text(""))
    console.print(table)


def result_table(
    result: Mapping[str, Any], console: Console | None = None, paths: Mapping[str, str] | None = None
) -> None:
    """Print the figures of ``result.json`` with what was predicted beside what was measured.

    ``paths`` are further lines: what each file is, and where it lies.
    """
    console = console or Console()
    table = _plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    for row in _result_rows(result):
        table.add_row(*(Text(cell) for cell in row))
    console.print(_headline(result), soft_wrap=True)
    console.print(table)
    for line in _closing_lines(result, paths or {}):
        # one line each, whatever the width: a path that is broken cannot be copied
        console.print(Text(line), soft_wrap=True)


def _headline(result: Mapping[str, Any]) -> Text:
    status = str(result["status"])
    text = Text(f"{status}", style="bold green" if status == "ok" else "bold red")
    plan = result["plan"]
    where = f"{_ranks_words(result.get('engine') or {})}{result['device']} {result['dtype']}"
    what = f": {result['model']} on {result['data']}, {where}, planner {result['planner']}"
    text.append(what, style="not bold default")
    if plan["kept"] is not None:
        part = f", {plan['selective']} kept in part" if plan["selective"] else ""
        part += f", {plan['offloaded']} on the host" if plan.get("offloaded") else ""
        part += f", {plan['compiled']} compiled" if plan.get("compiled") else ""
        text.append(f", {plan['kept']} blocks kept{part}, {plan['recomputed']} recomputed", style="not bold default")
    return text


def _ranks_words(engine: Mapping[str, Any]) -> str:
    if engine.get("kind") in (None, "single"):
        return ""
    count = engine["ranks"]
    return f"{engine['kind']} on {count} {'rank' if count == 1 else 'ranks'}, "


def _result_rows(result: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    memory, latency, budget = result["memory"], result["latency"], result["budget"]
    yield "budget", "", "none" if budget["bytes"] is None else format_bytes(budget["bytes"]), _budget_words(budget)
    yield (
        "peak with the plan",
        format_bytes(memory["predicted_peak_bytes"]),
        format_bytes(memory["measured_peak_bytes"]),
        _peak_words(memory),
    )
    yield (
        "peak without",
        format_bytes(memory["no_checkpoint_predicted_peak_bytes"]),
        format_bytes(memory["no_checkpoint_measured_peak_bytes"]),
        "",
    )
    least = format_bytes(memory["smallest_reachable_bytes"])
    yield "smallest reachable", least, "", f"by plans of planner {result['planner']}"
    if memory["device_peak_bytes"] is not None:
        allocated, reserved = format_bytes(memory["device_peak_bytes"]), format_bytes(memory["device_reserved_bytes"])
        yield "whole device", "", allocated, f"allocated, with weights and gradients; {reserved} reserved"
    yield "step with the plan", "", format_ms(latency["step_ms"]["p50"]), _spread(latency["step_ms"])
    yield (
        "step without",
        "",
        format_ms(latency["no_checkpoint_step_ms"]["p50"]),
        _spread(latency["no_checkpoint_step_ms"]),
    )
    yield (
        "time added",
        format_percent(latency["predicted_overhead_ratio"]),
        format_percent(latency["overhead_ratio"]),
        "" if latency["overhead_ratio"] is None else "of a step; median over pairs of steps, with and without",
    )
    yield "gradients", "", _gradient_words(result["gradients"]), _gradient_detail(result["gradients"])
    yield "loss", "", _loss_words(result["training"]), _throughput(result["training"])


def _budget_words(budget: Mapping[str, Any]) -> str:
    kind, value = budget["kind"], budget["value"]
    words = "" if kind is None else "budget = auto" if kind == "auto" else f"{kind} = {value}"
    return f"{words}, margin {format_bytes(budget['margin_bytes'])}" if budget["margin_bytes"] else words


def _peak_words(memory: Mapping[str, Any]) -> str:
    error = memory["prediction_error"]
    within = {True: "within budget", False: "OVER BUDGET", None: ""}[memory["within_budget"]]
    off = "" if error is None else f"prediction off by {error * 100:+.2f} %"
    at = "" if memory["peak_at"] is None else f"set by {memory['peak_at']}"
    return "; ".join(words for words in (within, off, at) if words)


def _spread(times: Mapping[str, Any]) -> str:
    return "" if times["n"] is None else f"median of {times['n']}, p95 {format_ms(times['p95'])}"


def _gradient_words(gradients: Mapping[str, Any]) -> str:
    if not gradients["checked"]:
        return "not checked"
    if gradients["bitwise_equal"]:
        return "bitwise equal"
    return "equal within tolerance" if gradients["passed"] else "DIFFERENT"


def _gradient_detail(gradients: Mapping[str, Any]) -> str:
    if gradients["checked"] and not gradients["bitwise_equal"] and gradients["max_rel_diff"] is not None:
        return f"largest relative difference {gradients['max_rel_diff']:.3g}"
    return "" if gradients["reference"] is None else str(gradients["reference"])


def _loss_words(training: Mapping[str, Any]) -> str:
    first, last = training["first_loss"], training["last_loss"]
    return "not trained" if first is None or last is None else f"{first:.4f} -> {last:.4f}"


def _throughput(training: Mapping[str, Any]) -> str:
    rates = ((training["samples_per_s"], "samples/s"), (training["tokens_per_s"], "tokens/s"))
    words = [f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}" for rate, unit in rates if rate is not None]
    return "; ".join([f"{training['steps']} steps", *words]) if training["steps"] is not None else ""


def _closing_lines(result: Mapping[str, Any], paths: Mapping[str, str]) -> Iterable[str]:
    if result["error"] is not None:
        yield f"{result['error']['type']}: {result['error']['message']}"
    yield from (f"note: {note}" for note in result["notes"])
    width = max((len(name) for name in paths), default=0)
    yield from (f"{name:<{width}}  {path}" for name, path in paths.items())
