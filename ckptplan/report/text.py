"""The plan and the memory of a step in a terminal, for people on ssh: any width, colour or not. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptplan.nodes import Keep, parse_plan_text
from ckptplan.report.figures import budget_words
from ckptplan.report.records import Records, RunRecords
from ckptplan.report.steps import DECISIONS, Row, decisions_of, timeline_of
from ckptplan.units import format_bytes, format_percent

_STYLES = {"K": "dim", "S": "cyan", "O": "blue", "C": "green", "R": "magenta", "N": "bold magenta"}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
CHART_HEIGHT = 12
MOST_CHART_WIDTH = 96


def print_records(records: Records, console: Console | None = None) -> None:
    """A run: its strip and its memory over one step. A sweep: a line a job, with the strip of its plan."""
    console = console or Console()
    if records.is_sweep:
        console.print(_runs_table(records.runs, console))
        console.print(Text(legend()))
    for run in () if records.is_sweep else records.runs:
        print_run(run, console)
    for fault in records.faults:
        console.print(Text(f"note: {fault}"))


def legend() -> str:
    return "  ".join(f"{letter} {word}" for word, letter in DECISIONS.items())


def strip(plan_text: str) -> Text:
    """A letter a block, in chain order: ``RRRRRKKK``."""
    text = Text()
    for word in decisions_of(parse_plan_text(plan_text)):
        text.append(DECISIONS[word], style=_STYLES[DECISIONS[word]])
    return text


def _runs_table(runs: Sequence[RunRecords], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    wide = console.width >= 72
    table.add_column("planner", no_wrap=True)
    table.add_column("budget", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=wide)
    table.add_column("time", justify="right", no_wrap=wide)
    table.add_column("plan", overflow="fold")
    for run in runs:
        plan, ratio = run.figure("plan/text"), run.figure("latency/overhead_ratio")
        peak = run.figure("memory/measured_peak_bytes")
        budget = budget_words({"budget_kind": run.figure("budget/kind"), "budget_value": run.figure("budget/value")})
        style = "green" if run.figure("status") == "ok" else "yellow"
        table.add_row(
            Text(str(run.figure("planner"))),
            Text(budget.removeprefix("budget_frac=")),
            Text(str(run.figure("status")), style=style),
            "-" if peak is None else format_bytes(peak),
            "-" if ratio is None else format_percent(ratio),
            Text("-") if plan is None else strip(plan),
        )
    return table


def print_run(run: RunRecords, console: Console) -> None:
    """The strip of a run's plan, and a chart of the memory over one step where its profile is there."""
    head = f"{run.figure('status')}: planner {run.figure('planner')}, {run.figure('model')} on {run.figure('data')}"
    console.print(Text(head), soft_wrap=True)
    if run.figure("plan/text") is None:
        console.print(Text(run.figure("error/message") or "no plan was made"))
        return
    console.print(Text.assemble("plan  ", strip(run.figure("plan/text"))))
    console.print(Text(legend(), style="dim"))
    if run.profile is None or run.plan is None:
        console.print(Text("no profile.json and plan.json here, so no memory over one step"))
        return
    kept = timeline_of(run.profile, [Keep(i) for i in range(len(run.profile))])
    planned = timeline_of(run.profile, run.plan.nodes)
    budget_bytes = run.figure("budget/bytes")
    is_unicode = (console.encoding or "").lower().startswith("utf")
    console.print()
    for line in memory_chart(kept, planned, budget_bytes, console.width, is_unicode):
        console.print(line, soft_wrap=True)
    peak = max(planned, key=lambda row: row["level_bytes"])
    words = f"peak {format_bytes(peak['level_bytes'])} in {peak['stage']} {peak['phase']}"
    whole = format_bytes(max(row["level_bytes"] for row in kept))
    console.print(Text(f"{words}; {whole} with nothing recomputed (dots)"))
    if budget_bytes is not None:
        console.print(Text(f"the budget allows {format_bytes(budget_bytes)} (dashes)"))


def memory_chart(
    kept: Sequence[Row], planned: Sequence[Row], budget_bytes: int | None, width: int, is_unicode: bool
) -> Iterable[Text]:
    """Lines no wider than ``width``: a column a stage of the step, or the largest of several where there are more.

    Bars are the planned step, dots the one with nothing recomputed, dashes the budget.
    """
    most = max([row["level_bytes"] for row in (*kept, *planned)] + [budget_bytes or 0, 1])
    margin = len(format_bytes(most)) + 1
    columns = max(2, min(MOST_CHART_WIDTH, width - margin - 2))
    whole = max(row["end"] for row in kept)
    repeat = max(1, columns // whole) if columns >= whole else 1
    columns = min(columns, whole * repeat)
    bars, dots = (_columns(rows, whole, columns) for rows in (planned, kept))
    budget_line = None if budget_bytes is None else _line(budget_bytes, most)
    for line in reversed(range(CHART_HEIGHT)):
        label = format_bytes(most) if line == CHART_HEIGHT - 1 else "0" if line == 0 else ""
        text = Text(f"{label:>{margin - 1}} |")
        for bar, dot in zip(bars, dots, strict=True):
            cell, style = _cell(bar, line, most, is_unicode), "magenta"
            if cell == " " and budget_line == line:
                cell, style = "-", "yellow"
            if cell == " " and _line(dot, most) == line:
                cell, style = "." if not is_unicode else "·", "dim"
            text.append(cell, style=style)
        yield text
    half = columns // 2
    yield Text(f"{'':>{margin - 1}} +{'-' * columns}")
    if columns >= 16:
        yield Text(f"{'':>{margin - 1}}  {'forward':<{half}}{'backward':<{columns - half}}".rstrip(), style="dim")


def _columns(rows: Sequence[Row], whole: int, columns: int) -> list[int]:
    """The most bytes of the stages that each column covers."""
    found = [0] * columns
    for row in rows:
        first, last = row["start"] * columns // whole, -(-row["end"] * columns // whole)
        for column in range(first, max(last, first + 1)):
            found[column] = max(found[column], row["level_bytes"])
    return found


def _line(level_bytes: int, most: int) -> int:
    """The line of the chart, from 0 at its foot, in which a level ends."""
    return min(CHART_HEIGHT - 1, level_bytes * CHART_HEIGHT // most)


def _cell(level_bytes: int, line: int, most: int, is_unicode: bool) -> str:
    eighths = round(8 * (level_bytes * CHART_HEIGHT / most - line))
    if is_unicode:
        return _EIGHTHS[max(0, min(8, eighths))]
    return "#" if eighths >= 4 else " "
