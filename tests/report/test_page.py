"""report.html without a browser: whole in itself, its figures those of the records, readable without the library."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckptplan.report import page as page_module
from ckptplan.report.figures import make_figures
from ckptplan.report.page import packed, page_html, show_report, try_write_report, write_report
from ckptplan.report.records import read_records
from tests.report_folders import write_big_sweep, write_run, write_sweep

LIBRARY = "window.vegaEmbed = () => '</script>' + '<!--';"


class Page(HTMLParser):
    """Elements with their attributes, ids in order, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data
        elif self.elements and self.elements[-1][0] != "style":
            self.text += data

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]

    def figures(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))


def page_of(folder: Path, library: str | None = LIBRARY) -> Page:
    return Page(page_html(make_figures(read_records(folder)), library, folder))


def unpacked(dataset: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in range(dataset["length"])]
    for name, column in dataset["columns"].items():
        for row, value in zip(rows, column["values"], strict=True):
            row[name] = value if value is None or "words" not in column else column["words"][value]
    return rows


def test_the_figures_in_the_page_are_those_of_result_json(tmp_path: Path) -> None:
    results = write_sweep(tmp_path)
    rows = unpacked(page_of(tmp_path).figures()["datasets"]["runs"])
    assert len(rows) == len(results)
    for row, result in zip(rows, results, strict=True):
        assert row["job"] == result["job"]
        assert row["measured_peak_bytes"] == result["memory"]["measured_peak_bytes"]
        assert row["step_ms"] == result["latency"]["step_ms"]["p50"]
        assert row["overhead_ratio"] == result["latency"]["overhead_ratio"]
        assert row["plan"] == result["plan"]["text"]
        assert row["error"] == (None if result["error"] is None else result["error"]["message"])


def test_packing_loses_nothing() -> None:
    rows = [{"a": "x", "b": 1.5, "c": None}, {"a": None, "b": None, "c": None}, {"a": "x", "b": 2, "c": None}]
    assert unpacked(packed(rows)) == rows
    assert unpacked(packed([])) == []


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    for tag, attributes in page_of(tmp_path).elements:
        assert tag not in ("link", "img", "iframe", "base", "object")
        assert not attributes.keys() & {"src", "href", "action", "srcset"}, tag


def test_text_from_a_run_or_the_library_ends_no_script_and_makes_no_element(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    page = page_of(tmp_path)
    assert len(page.scripts) == 3
    assert page.scripts[1].rstrip().endswith("\\u003c/script>' + '\\u003c!--';")
    assert "boom </script> <!-- x" in [row["error"] for row in unpacked(page.figures()["datasets"]["runs"])]
    assert "b" not in {tag for tag, _ in page.elements}


def test_every_chart_has_a_title_a_caption_and_a_table(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    page = page_of(tmp_path)
    charts = page.figures()["charts"]
    assert [c["name"] for c in charts] == ["tradeoff", "memory", "strips", "predicted_peak", "predicted_time", "loss"]
    ids = page.ids()
    assert len(ids) == len(set(ids))
    figures = [attributes for tag, attributes in page.elements if tag == "figure"]
    assert len(figures) == len(charts)
    for figure in figures:
        assert figure["aria-labelledby"] in ids
    for chart in charts:
        assert chart["caption"]
        rows = unpacked(page.figures()["datasets"][chart["datasets"][0]])
        assert {field for field, _, _ in chart["columns"]} <= rows[0].keys()


def test_all_that_is_referred_to_by_id_is_there(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    page = page_of(tmp_path)
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attributes.get(name) is None or attributes[name] in page.ids()
    controls = [a for tag, a in page.elements if tag in ("select", "input")]
    assert len(controls) == 6  # each stands inside its label


def test_the_columns_of_the_tables_are_columns_of_the_rows(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    figures = page_of(tmp_path).figures()
    for columns, name in (("columns", "runs"), ("block_columns", "blocks")):
        assert {field for field, _, _ in figures[columns]} <= unpacked(figures["datasets"][name])[0].keys()


def test_without_the_library_the_page_says_how_to_get_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = page_of(tmp_path / "run", library=None)
    assert len(page.scripts) == 2
    assert "pip install vl-convert-python" in page.text
    assert unpacked(page.figures()["datasets"]["runs"])[0]["status"] == "ok"


def test_what_could_not_be_read_stands_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text("{")
    assert "plan.json of run could not be read" in page_of(tmp_path / "run").text


@pytest.mark.parametrize("status", ["infeasible", "failed", "oom", "timeout", "interrupted"])
def test_a_run_that_ended_badly_has_a_page(tmp_path: Path, status: str) -> None:
    write_run(tmp_path / "run", status=status, error="for a reason")
    (row,) = unpacked(page_of(tmp_path / "run").figures()["datasets"]["runs"])
    assert (row["status"], row["error"]) == (status, "for a reason")


def test_the_page_of_500_runs_stays_within_its_size_beside_the_library(tmp_path: Path) -> None:
    write_big_sweep(tmp_path)
    text = page_html(make_figures(read_records(tmp_path)), None, tmp_path)
    assert len(unpacked(Page(text).figures()["datasets"]["runs"])) == 500
    assert len(text.encode()) < 600_000  # the library is 0.9 MB, a page at most 1.5 MB


# --- writing it -------------------------------------------------------------------------------------------------------


def test_it_is_written_into_the_folder_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "library_javascript", lambda: LIBRARY)
    write_run(tmp_path / "run")
    path = write_report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    first = path.read_text()
    assert write_report(tmp_path / "run").read_text() == first


def test_a_page_that_fails_is_one_line_in_the_log_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise RuntimeError("no library today")

    monkeypatch.setattr(page_module, "library_javascript", fail)
    write_run(tmp_path / "run")
    assert try_write_report(tmp_path / "run") is None
    assert "no report.html: RuntimeError: no library today" in caplog.text
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_sweep_that_came_to_nothing_has_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "library_javascript", lambda: None)
    show_report(tmp_path)
    assert capsys.readouterr().out == ""
    write_sweep(tmp_path)
    show_report(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


def test_the_command_writes_the_page_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    program = (
        "import sys, runpy; sys.modules['torch'] = None\n"
        "import ckptplan.report.page as page; page.has_library = lambda: False\n"
        "sys.argv = ['report', sys.argv[1]]; runpy.run_module('ckptplan.report', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=Path(page_module.__file__).resolve().parent.parent.parent,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == str(tmp_path / "run" / "report.html")
