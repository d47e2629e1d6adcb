"""Vega takes every chart, and draws it as PNG and SVG with the figures in it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import vl_convert

from ckptplan.errors import CkptplanError
from ckptplan.report import export
from ckptplan.report.__main__ import main
from ckptplan.report.charts import charts_of
from ckptplan.report.export import export_pictures, picture
from ckptplan.report.figures import Figures, make_figures
from ckptplan.report.page import library_javascript
from ckptplan.report.records import read_records
from ckptplan.report.vega import PAGE_THEME, PRINT_THEME, with_data
from tests.report_folders import write_run, write_sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Figures:
    write_sweep(tmp_path)
    return make_figures(read_records(tmp_path))


def test_every_variant_of_every_chart_is_a_chart_to_vega_without_a_warning(
    sweep: Figures, capfd: pytest.CaptureFixture[str]
) -> None:
    for theme, legend in ((PAGE_THEME, False), (PRINT_THEME, True)):
        for chart in charts_of(sweep, theme, legend=legend):
            for spec in chart.variants.values():
                datasets = {name: sweep.datasets.get(name, [{"budget_bytes": 1}]) for name in chart.datasets}
                vega = vl_convert.vegalite_to_vega(with_data(spec, datasets), show_warnings=True)
                assert {source["name"] for source in vega["data"]} >= set(chart.datasets)
    assert capfd.readouterr().err == ""


def test_a_point_in_the_picture_carries_the_figures_of_its_run(sweep: Figures) -> None:
    charts = {chart.name: chart for chart in charts_of(sweep, PRINT_THEME, legend=True)}
    svg = picture(charts["tradeoff"], sweep, 0, "svg").decode()
    for row in sweep.datasets["runs"]:
        if row["is_drawn"]:
            assert f"run: {row['job']}; status: {row['status']}" in svg
            assert f"measured peak: {row['measured_peak_bytes']:,} bytes" in svg
        elif row["place_bytes"] is not None:
            assert f"run: {row['job']}; status: {row['status']}" in svg
    assert "undefined" not in svg
    assert "NaN" not in svg


def test_pictures_of_a_run_lie_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--pictures", "both"]) == 0
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert names == {f"{name}.{form}" for name in ("tradeoff", "memory", "strips", "loss") for form in ("png", "svg")}
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(names)
    head = (tmp_path / "run" / "figures" / "tradeoff.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", head[16:20])[0] > 1800  # 620 points and the axis at 220 pixels an inch


def test_each_workload_of_a_sweep_has_pictures_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").write_text("")
    for index, layers in enumerate((6, 4)):
        config = f"model:\n  _target_: m.GPT\n  layers: {layers}\n"
        write_run(tmp_path / f"00{index}_dp", count=layers, config=config)
    written = {path.name for path in export_pictures(tmp_path, ["svg"])}
    assert {"memory_0.svg", "memory_1.svg"} <= written
    first, second = ((tmp_path / "figures" / f"memory_{number}.svg").read_text() for number in (0, 1))
    assert "stage: layers.5" in first
    assert "stage: layers.5" not in second


def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setattr(export, "has_library", lambda: False)
    with pytest.raises(CkptplanError, match="pip install vl-convert-python"):
        export_pictures(tmp_path / "run")


def test_the_library_gives_vega_to_the_page_and_is_small_enough() -> None:
    script = library_javascript()
    assert script is not None
    assert "vegaEmbed" in script
    assert len(script.encode()) < 950_000
