"""report.html in a real browser: it draws, hovering tells the figures of result.json, filter, sort and keys work.

Run by hand or nightly, with Chromium installed: ``python -m pytest -m browser``
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptplan.report.figures import make_figures
from ckptplan.report.page import page_html, write_report
from ckptplan.report.records import read_records
from tests.report_folders import write_big_sweep, write_run, write_sweep

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
READY = "html[data-ready=true]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium: the system's where there is one, else Playwright's own."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """``open_page(path)``: the page when all is drawn; afterwards nothing may have been said or asked for."""
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def open_it(path: Path, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(READY)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sweep")
    results = write_sweep(folder)
    return write_report(folder), results


def column(page: Any, head: str) -> list[str]:
    """The cells of a column of the table of runs, from top to bottom."""
    heads = [text.strip() for text in page.locator("#table thead th").all_inner_texts()]
    place = heads.index(head) + 1
    return [text.strip() for text in page.locator(f"#table tbody td:nth-child({place})").all_inner_texts()]


def point(page: Any, job: str, chart: str = "tradeoff") -> Any:
    return page.locator(f"#figure-{chart} svg path[aria-label*='run: {job}']")


def points(page: Any, chart: str = "tradeoff") -> int:
    return int(page.locator(f"#figure-{chart} svg path[aria-label*='run: ']").count())


def wait_for_marks(page: Any, text: str, count: int | None, chart: str = "tradeoff") -> None:
    """Until so many marks of a chart (None: any) carry the text."""
    found = f"document.querySelectorAll(\"#figure-{chart} path[aria-label*='{text}']\").length"
    page.wait_for_function(f"{found} > 0" if count is None else f"{found} === {count}")


def hovered(page: Any, mark: Any) -> dict[str, str]:
    """What the hover text tells: head -> figure."""
    page.mouse.move(0, 0)
    mark.hover(force=True)
    page.wait_for_selector("#vg-tooltip-element.visible")
    rows = page.locator("#vg-tooltip-element tr")
    cells = [row.locator("td").all_inner_texts() for row in rows.all()]
    return {head.strip(): value.strip() for head, value in cells}


def test_it_draws_every_chart_and_says_nothing(open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]) -> None:
    page = open_page(sweep[0])
    for name in ("tradeoff", "memory", "strips", "predicted_peak", "predicted_time", "loss"):
        assert page.locator(f"#figure-{name} svg").count() == 1, name
        box = page.locator(f"#figure-{name} svg").bounding_box()
        assert box["width"] > 300, name
        assert box["height"] > 80, name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator("#no-charts").is_visible()


def test_hovering_a_point_tells_the_figures_of_result_json(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    drawn = [result for result in results if result["status"] in ("ok", "over_budget")]
    assert len(drawn) == 6
    for result in drawn:
        page.locator(f"#planners input[value={result['planner']}]").check()
        for other in {"dp", "greedy", "uniform"} - {result["planner"]}:  # points of equal figures lie on each other
            page.locator(f"#planners input[value={other}]").uncheck()
        wait_for_marks(page, f"planner: {result['planner']}", None)
        told = hovered(page, point(page, result["job"]))
        memory, latency = result["memory"], result["latency"]
        assert told["run"] == result["job"]
        assert told["status"] == result["status"]
        assert told["measured peak"] == f"{memory['measured_peak_bytes']:,} bytes"
        assert told["predicted peak"] == f"{memory['predicted_peak_bytes']:,} bytes"
        assert told["allowed"] == f"{result['budget']['bytes']:,} bytes"
        assert told["step"] == f"{latency['step_ms']['p50']:,.3f} ms"
        assert told["time added, measured"] == f"{latency['overhead_ratio']:+.2%}"
        assert told["plan"] == result["plan"]["text"]


def test_a_budget_without_a_plan_is_a_cross_that_says_why(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    (infeasible,) = [result for result in results if result["status"] == "infeasible"]
    told = hovered(page, point(page, infeasible["job"]))
    assert told["why"] == "no plan fits <b>0.3</b> & more"
    assert told["smallest reachable"] == f"{infeasible['memory']['smallest_reachable_bytes']:,} bytes"
    (failed,) = [result for result in results if result["status"] == "failed"]
    assert point(page, failed["job"]).count() == 0
    assert failed["job"] in page.locator("#notes").inner_text()


def test_the_upright_axis_can_be_chosen(open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]) -> None:
    page = open_page(sweep[0])
    for label, title in (("step time", "step time (ms)"), ("FLOPs added", "FLOPs added to a step")):
        page.locator("#figure-tradeoff select").select_option(label)
        page.wait_for_selector(f"#figure-tradeoff svg [aria-label*='{title}']")
        assert points(page) == 8


def test_planners_and_statuses_filter_charts_and_table_together(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    assert points(page) == 8  # but the one that failed before it had a place
    page.locator("#planners").get_by_label("greedy").uncheck()
    wait_for_marks(page, "planner: greedy", 0)
    assert points(page) == 5
    assert set(column(page, "planner")) == {"dp", "uniform"}
    assert page.locator("#count").inner_text() == "6 of 9 runs"
    page.locator("#planners").get_by_label("greedy").check()
    page.locator("#status").select_option("infeasible")
    assert column(page, "run") == [result["job"] for result in results if result["status"] == "infeasible"]
    wait_for_marks(page, "run: ", 1)


def test_words_filter_the_table(open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]) -> None:
    path, results = sweep
    page = open_page(path)
    page.locator("#search").fill("uniform 0.9")
    expected = [r["job"] for r in results if (r["planner"], r["budget"]["value"]) == ("uniform", 0.9)]
    assert column(page, "run") == expected
    page.locator("#search").fill("nothing like it")
    assert column(page, "run") == []
    assert page.locator("#count").inner_text() == "0 of 9 runs"


def test_every_head_sorts_both_ways_with_the_unknown_last(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    peaks = {r["job"]: r["memory"]["measured_peak_bytes"] for r in results}
    known = sorted(peak for peak in peaks.values() if peak is not None)
    head = page.locator("#table th", has_text="measured peak")
    for direction, expected in (("ascending", known), ("descending", known[::-1])):
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == direction
        found = [peaks[job] for job in column(page, "run")]
        assert found == [*expected, *[None] * (len(found) - len(expected))]
    page.locator("#table th", has_text="planner").get_by_role("button").press("Enter")
    assert column(page, "planner") == sorted(column(page, "planner"))
    assert head.get_attribute("aria-sort") == "none"


def test_a_run_is_chosen_in_the_list_in_the_table_and_by_its_point(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    by_job = {result["job"]: result for result in results}
    first, second, third = [r["job"] for r in results if r["status"] == "ok"][:3]

    def shown() -> tuple[str, str, str]:
        command = page.locator("#command code").inner_text()
        current = page.locator("#table tr[aria-current=true]").get_attribute("data-job")
        return page.locator("#run").input_value(), command, current

    def expected(job: str) -> tuple[str, str, str]:
        result = by_job[job]
        return job, f"python train.py planner={result['planner']} budget_frac={result['budget']['value']}", job

    page.locator("#run").select_option(second)
    assert shown() == expected(second)
    page.get_by_role("button", name=third, exact=True).click()
    assert shown() == expected(third)
    page.locator("#planners").get_by_label("greedy").uncheck()
    page.locator("#planners").get_by_label("uniform").uncheck()
    wait_for_marks(page, "run: ", 3)
    point(page, first).click(force=True)
    assert shown() == expected(first)
    wait_for_marks(page, "with the plan", None, chart="memory")
    levels = page.locator("#figure-memory svg path[aria-label*='case: with the plan']").evaluate_all(
        "marks => marks.map(mark => mark.getAttribute('aria-label'))"
    )
    found = [int(n.replace(",", "")) for n in re.findall(r"most bytes alive: ([\d,]+) bytes", " ".join(levels))]
    assert max(found) == by_job[first]["memory"]["predicted_peak_bytes"]


def test_each_chart_has_its_figures_as_a_table_reached_by_keys(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    path, results = sweep
    page = open_page(path)
    summary = page.locator("#figure-tradeoff summary")
    summary.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#figure-tradeoff tbody tr")
    assert page.locator("#figure-tradeoff tbody tr").count() == len(results)
    cell = page.locator("#figure-tradeoff tbody tr").first.locator("td").nth(3)
    assert cell.get_attribute("title") == f"{results[0]['memory']['measured_peak_bytes']:,} bytes"
    names = page.locator("figure").evaluate_all(
        "all => all.map(one => document.getElementById(one.getAttribute('aria-labelledby')).textContent)"
    )
    assert all(names)
    unnamed = page.locator("button, select, input").evaluate_all(
        "all => all.filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).length"
    )
    assert unnamed == 0


def test_the_command_is_copied(open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]) -> None:
    page = open_page(sweep[0], permissions=["clipboard-read", "clipboard-write"])
    page.locator("#table tbody tr").nth(1).get_by_role("button", name="copy").click()
    page.wait_for_function("document.getElementById('said').textContent !== ''")
    assert page.evaluate("navigator.clipboard.readText()") == "python train.py planner=dp budget_frac=0.5"


def test_dark_light_and_print_have_colours_of_their_own(
    open_page: Open, sweep: tuple[Path, list[dict[str, Any]]]
) -> None:
    page = open_page(sweep[0], color_scheme="dark")

    def colours() -> tuple[str, str]:
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        label = page.locator("#figure-tradeoff svg .role-axis-label text").first
        return paper, label.evaluate("text => getComputedStyle(text).fill")

    dark = colours()
    assert dark[0] == "rgb(20, 23, 28)"
    page.locator("#theme").select_option("light")
    light = colours()
    assert light[0] == "rgb(255, 255, 255)"
    assert light[1] != dark[1]
    page.locator("#theme").select_option("auto")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert colours() == light
    assert not page.locator(".controls").is_visible()
    assert not page.locator("button.copy").first.is_visible()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_it_fits_the_window(open_page: Open, sweep: tuple[Path, list[dict[str, Any]]], width: int) -> None:
    page = open_page(sweep[0])
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function(f"innerWidth === {width}")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_of_a_run_draws(open_page: Open, tmp_path: Path) -> None:
    result = write_run(tmp_path / "run")
    page = open_page(write_report(tmp_path / "run"))
    assert page.locator("figure svg").count() >= 4
    assert not page.locator("#table").is_visible()
    assert page.locator("#blocks tbody tr").count() == 6
    assert f"{result['memory']['measured_peak_bytes'] / 2**20:.2f} MiB" in page.locator("#cards").inner_text()


@pytest.mark.parametrize("status", ["failed", "infeasible", "oom"])
def test_the_page_of_a_run_that_ended_badly_says_why(open_page: Open, tmp_path: Path, status: str) -> None:
    write_run(tmp_path / "run", status=status, error="because of <this>")
    page = open_page(write_report(tmp_path / "run"))
    assert page.locator("#error").inner_text() == "because of <this>"


def test_without_the_library_there_are_tables_in_place_of_charts(open_page: Open, tmp_path: Path) -> None:
    write_sweep(tmp_path)
    path = tmp_path / "report.html"
    path.write_text(page_html(make_figures(read_records(tmp_path)), None, tmp_path), encoding="utf-8")
    page = open_page(path)
    assert "pip install vl-convert-python" in page.locator("#no-charts").inner_text()
    assert page.locator("#figure-tradeoff tbody tr").count() == 9
    assert page.locator("#figure-loss tbody tr").count() == 6 * 21


def test_500_points_stay_responsive(open_page: Open, tmp_path: Path) -> None:
    write_big_sweep(tmp_path)
    path = write_report(tmp_path)
    assert path.stat().st_size <= 1_500_000
    start = time.monotonic()
    page = open_page(path)
    opened_s = time.monotonic() - start
    assert points(page) == 500
    assert page.locator("#table tbody tr").count() == 500
    took: dict[str, float] = {}
    for name, act in {
        "filter": "document.querySelector('#planners input[value=greedy]').click()",
        "sort": "document.querySelector('#table th button').click()",
    }.items():
        took[name] = page.evaluate(
            f"new Promise(done => {{ const start = performance.now(); {act};"
            " requestAnimationFrame(() => setTimeout(() => done(performance.now() - start))); })"
        )
    wait_for_marks(page, "run: ", 375)
    print(f"opened in {opened_s:.2f} s; {took}")
    assert opened_s < 10
    assert max(took.values()) < 1000, took
