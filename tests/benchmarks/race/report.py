"""The race as a table, as JSON and as a picture: from the records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.race.judging import BY_TIME, DP_BY_TIME, OURS, best_within, is_won, rivals, timed_budgets

Record = dict[str, Any]

HEAD = "| budget | rival | plan | predicted | measured | kept | FLOPs | time | solve | gradients |"
LOSSES = {
    "lost_by_flops": "budgets at which a rival fits and runs fewer FLOPs",
    "below_our_curve": "configurations below our curve of FLOPs, at any peak",
    "lost_by_time": "budgets at which a rival fits and is faster beyond the spread",
    "slower_than_dp": "budgets at which `optimal` is slower than `dp` beyond the spread",
    "lost_compiled": "budgets at which a compiled rival fits and is faster than our compiled plan beyond the spread",
    "violations": "budgets overstepped by ours",
    "mispredicted": "peaks of ours predicted worse than to 1 %",
    "other_flops_than_predicted": "plans of ours that run other FLOPs than predicted",
    "unequal_gradients": "eager plans of ours whose gradients are not bitwise equal",
}


def markdown(report: Record, *, has_pictures: bool = False) -> str:
    """All tables, and the verdict before them; with a model's picture before its tables."""
    machine = report["machine"]
    lines = [
        "# The race",
        "",
        f"{', '.join(f'`{command}`' for command in report['commands'])}: {report['race_s'] / 60:.0f} minutes on "
        f"{machine['processor']} (one thread), torch {machine['torch']}, Python {machine['python']}, "
        f"seed {report['seed']}.",
        "",
        *([report["note"], ""] if report["note"] else []),
        "To repeat it (all of it half an hour to two hours, or in parts: `python -m tests.benchmarks.race --help`):",
        "",
        "```bash",
        "pip install -e '.[dev,race]'",
        "python -m pip install --no-deps --target FOLDER ckptplan==0.1.0rc1",
        "python -m tests.benchmarks.race --predecessor FOLDER",
        "```",
        "",
        "Peaks are bytes above what stands before a step (weights, gradients, batch), by the events of the CPU "
        "allocator. Each rival is shown with its cheapest configuration whose measured peak keeps to the budget, "
        "whatever budget it was made for; of ours, the plan made for this budget. FLOPs are exact counts, as shares of "
        f"the eager step without checkpointing. {_times_explained(report['rounds'])} A part that is run again takes "
        "bytes, FLOPs and gradients from its run before on the same machine and versions; times it takes anew.",
        "",
        "## Verdict",
        "",
        *_verdict(report["models"]),
    ]
    for record in report["models"]:
        lines += ["", *_model(record, has_pictures=has_pictures)]
    return "\n".join(lines) + "\n"


def _times_explained(rounds: int) -> str:
    compiled = "The compiled league has times only, as a compiler shows no operators to count"
    if not rounds:
        return f"{compiled}; without them each of its rivals is shown with its least peak."
    return (
        f"Times are shares too: the minimum of {rounds} interleaved steps (processor time), with (median - minimum) / "
        f"minimum as the spread. {compiled}; where it was not timed, each rival is shown with its least peak. Only "
        "what may win is timed: each rival's best within a timed budget, and of ours what was planned by time."
    )


def _verdict(records: list[Record]) -> list[str]:
    names = [record["model"] for record in records]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for key, text in LOSSES.items():
        lines.append(f"| {text} | {' | '.join(_count(record, key) for record in records)} |")
    errors = [record["verdict"]["worst_prediction_error"] for record in records]
    lines.append(f"| worst prediction error | {' | '.join('-' if e is None else f'{e:.4%}' for e in errors)} |")
    lines.append("")
    for record in records:
        over = record["verdict"]["violations_of_rivals"]
        if any(over.values()):
            told = ", ".join(f"{rival} {count}" for rival, count in over.items() if count)
            lines.append(f"- {record['model']}: budgets overstepped by rivals' own plans: {told}")
        for key in LOSSES:
            lines += [f"- {record['model']}, {key}: {fault}" for fault in record["verdict"][key]]
    return [*lines, "", _outcome(records)]


def _outcome(records: list[Record]) -> str:
    """Won or not, and what of it was not run."""
    missing = []
    for league in ("eager", "compiled"):
        raced = [record for record in records if rivals(record, league)]
        untimed = [record["model"] for record in raced if not timed_budgets(record, league)]
        absent = [record["model"] for record in records if record not in raced]
        missing += [f"the {league} league of {', '.join(absent)}"] if absent else []
        missing += [f"times of the {league} league of {', '.join(untimed)}"] if untimed else []
    if not all(is_won(record["verdict"]) for record in records):
        won = "Not won."
    else:
        won = "Won, in all that was run." if missing else "Won."
    return f"{won} Not run: {'; '.join(missing)}." if missing else won


def _count(record: Record, key: str) -> str:
    league = "compiled" if key == "lost_compiled" else "eager"
    if not rivals(record, league):
        return "not raced"
    if key not in ("lost_by_time", "slower_than_dp", "lost_compiled"):
        return str(len(record["verdict"][key]))
    timed = timed_budgets(record, league)
    return f"{len(record['verdict'][key])} of {len(timed)} timed" if timed else "not timed"


def _model(record: Record, *, has_pictures: bool) -> list[str]:
    plain = record["no_checkpointing"]
    lines = [
        f"## {record['model']}: {record['blocks']} blocks",
        "",
        *([f"![{record['model']}](race-{record['model']}.svg)", ""] if has_pictures else []),
        f"Without checkpointing: peak {_mib(plain['peak_bytes'])}, {plain['flops']:.4g} FLOPs. "
        f"Profiled in {record['profile_s']:.1f} s.",
    ]
    lines += [f"{rival}: {why}." for rival, why in record["not_installed"].items()]
    for league in ("eager", "compiled"):
        if rivals(record, league):
            lines += ["", f"### {league}", "", HEAD, "| --- " * 10 + "|"]
            for budget in record["budgets"]:
                lines += [_row(record, league, rival, budget) for rival in _asked(record, league, budget)]
    return lines


def _asked(record: Record, league: str, budget: Record) -> list[str]:
    """The rivals with a row: where times were taken, nothing is planned or judged by time at other budgets."""
    names = rivals(record, league)
    if league in budget["timed"] or not timed_budgets(record, league):
        return names
    return [] if league == "compiled" else [name for name in names if name not in (BY_TIME, DP_BY_TIME)]


def _row(record: Record, league: str, rival: str, budget: Record) -> str:
    start = f"| {budget['name']} = {_mib(budget['bytes'])} | {rival} |"
    number = best_within(record, league, rival, budget["bytes"])
    if number is None:
        return f"{start} nothing that fits |" + " - |" * 7
    c = record["configurations"][number]
    time = c["time"]
    cells = [
        f"`{c['plan'] if len(c['plan']) <= 48 else c['plan'][:45] + '...'}`",
        "-" if c["predicted_peak_bytes"] is None else _mib(c["predicted_peak_bytes"]),
        _mib(c["peak_bytes"]),
        _mib(c["kept_bytes"]),
        "-" if c["flops_ratio"] is None else f"{c['flops_ratio']:.4f}",
        "-" if time is None else f"{time['ratio']:.3f} ± {time['spread']:.3f}",
        "-" if c["solve_s"] is None else f"{c['solve_s']:.3f} s",
        "bitwise equal" if c["gradients_bitwise_equal"] else f"{c['gradients_max_rel_diff']:.1e} off",
    ]
    return f"{start} {' | '.join(cells)} |"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"


def plot(records: list[Record], path: Path) -> None:
    """Peak against FLOPs (eager) and against time (both leagues), a row of pictures for each model."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "race"  # the same records give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(records), 2, figsize=(13, 4.2 * len(records)), squeeze=False)
    for record, (by_flops, by_time) in zip(records, axes, strict=True):
        _panel(by_flops, record, lambda c: c["flops_ratio"], "FLOPs")
        _panel(by_time, record, lambda c: None if c["time"] is None else c["time"]["ratio"], "time")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _panel(axes: Any, record: Record, ratio: Any, what: str) -> None:
    plain_bytes = record["no_checkpointing"]["peak_bytes"]
    markers = "o^sDvP*Xhd<>"
    numbered = [(league, rival) for league in ("eager", "compiled") for rival in rivals(record, league)]
    for number, (league, rival) in enumerate(numbered):
        points = sorted(
            (c["peak_bytes"] / plain_bytes, ratio(c))
            for c in record["configurations"]
            if (c["league"], c["rival"]) == (league, rival) and ratio(c) is not None
        )
        if not points:
            continue
        is_ours = rival.startswith(OURS)
        axes.plot(
            *zip(*points, strict=True),
            marker=markers[number % len(markers)],
            color=f"C{number % 10}",
            linestyle="-" if is_ours else "",
            markersize=7 if is_ours else 5,
            markerfacecolor=None if league == "eager" else "none",
            label=f"{rival}{'' if league == 'eager' else ' (compiled)'}",
        )
    axes.set_title(f"{record['model']}: {what}")
    axes.set_xlabel("measured peak / peak without checkpointing")
    axes.set_ylabel(f"{what} / eager step without checkpointing")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
