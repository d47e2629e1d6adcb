"""The terminal view: strips, a chart within any width, with and without colour and Unicode."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ckptplan.nodes import Keep
from ckptplan.plan import CheckpointPlan
from ckptplan.report.__main__ import main
from ckptplan.report.records import read_records
from ckptplan.report.steps import timeline_of
from ckptplan.report.text import CHART_HEIGHT, memory_chart, print_records, strip
from tests.report_folders import MIB, make_profile, write_run, write_sweep


def shown(folder: Path, width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as stream:
        print_records(read_records(folder), Console(file=stream, width=width))
        return raw.getvalue().decode(encoding).splitlines()


def test_a_strip_has_a_letter_a_block() -> None:
    assert strip("K0 S1[a,b] R(2 3) R(4 R(5 6))").plain == "KSRRRNN"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_run_fits_any_width(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "run")
    lines = shown(tmp_path / "run", width)
    chart = [line for line in lines if "|" in line or "+--" in line]
    assert len(chart) == CHART_HEIGHT + 1
    assert max(map(len, chart)) <= width
    assert any("RKRKRK" in line for line in lines)


def test_the_chart_shows_the_levels_of_the_step() -> None:
    profile = make_profile(2)
    kept = timeline_of(profile, [Keep(0), Keep(1)])
    planned = timeline_of(profile, CheckpointPlan.from_text("R(0) K1", profile).nodes)
    lines = [line.plain for line in memory_chart(kept, planned, 10 * MIB, 30, is_unicode=False)]
    most = max(row["level_bytes"] for row in kept)
    columns = len(lines[-2].partition("+")[2])
    assert columns % 8 == 0  # 8 stages, each as wide as the others
    for number, (plain, row) in enumerate(zip(kept, planned, strict=True)):
        column = len(lines[0].partition("|")[0]) + 1 + number * columns // 8
        bars = sum(line[column] == "#" for line in lines[:CHART_HEIGHT])
        assert bars == pytest.approx(CHART_HEIGHT * row["level_bytes"] / most, abs=0.5)
        dots = [CHART_HEIGHT - 1 - i for i, line in enumerate(lines[:CHART_HEIGHT]) if line[column] == "."]
        if plain["level_bytes"] - row["level_bytes"] > 2 * most / CHART_HEIGHT:
            assert dots == [min(CHART_HEIGHT - 1, plain["level_bytes"] * CHART_HEIGHT // most)]
    budget_line = lines[CHART_HEIGHT - 1 - 10 * MIB * CHART_HEIGHT // most]
    assert "-" in budget_line


def test_a_chain_of_more_stages_than_columns_shows_the_largest_of_each_column() -> None:
    profile = make_profile(60)
    kept = timeline_of(profile, [Keep(i) for i in range(60)])
    lines = [line.plain for line in memory_chart(kept, kept, None, 40, is_unicode=True)]
    assert max(map(len, lines)) <= 40
    assert "█" in lines[0] or "▇" in lines[0]


def test_a_terminal_without_unicode_gets_plain_characters(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    lines = shown(tmp_path / "run", 80, "ascii")
    assert any("##" in line for line in lines)


@pytest.mark.parametrize("width", [50, 80])
def test_a_sweep_is_a_line_a_job(tmp_path: Path, width: int) -> None:
    results = write_sweep(tmp_path)
    text = "\n".join(shown(tmp_path, width))
    for result in results:
        assert result["status"] in text
    assert max(map(len, text.splitlines())) <= max(width, 60)
    assert ("RKRKRK" in text) is (width == 80)


@pytest.mark.parametrize("status", ["failed", "infeasible"])
def test_a_run_without_a_plan_says_why(tmp_path: Path, status: str) -> None:
    write_run(tmp_path / "run", status=status, error="no plan fits")
    assert "no plan fits" in "\n".join(shown(tmp_path / "run", 60))


def test_the_command_shows_it_and_says_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--text"]) == 0
    assert "RKRKRK" in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.html").exists()
    assert main([str(tmp_path), "--text"]) == 0  # a folder of runs is looked at as a sweep
    assert main([str(tmp_path / "nothing")]) == 1
    expected = "is no folder; expected that of a run or of a sweep, such as outputs/latest"
    assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'} {expected}\n"
