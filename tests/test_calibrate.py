"""Calibration files: measured here, read back, and what their curves say between the points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptplan.calibrate as calibrate_module
from ckptplan.calibrate import calibrate, main
from ckptplan.devices import BY_BYTES, BY_FLOPS, DEVICES, Calibration, Curve, Rates, device_named


def test_a_curve_goes_through_its_points_and_is_a_power_between_them() -> None:
    curve = Curve((10.0, 1000.0), (2.0, 8.0))
    assert [curve.at(size) for size in (1.0, 10.0, 100.0, 1000.0, 4000.0)] == pytest.approx([2.0, 2.0, 4.0, 8.0, 32.0])


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (0.0,)), ((1.0,), (1.0, 2.0))]
)
def test_a_curve_that_is_none_is_refused(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a curve needs"):
        Curve(sizes, seconds)


def test_measuring_this_cpu_gives_a_curve_for_every_kind_of_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate_module, "LEAST_BATCH_S", 1e-5)
    monkeypatch.setattr(calibrate_module, "NUM_REPETITIONS", 2)
    said: list[str] = []
    found = calibrate(torch.device("cpu"), largest=0.02, say=said.append)
    kinds = [*BY_FLOPS, *BY_BYTES]
    assert sorted(found.curves) == sorted(f"{kind} {dtype}" for kind in kinds for dtype in ("float32", "bfloat16"))
    assert all(seconds > 0 for curve in found.curves.values() for seconds in curve.seconds)
    assert len(said) == len(found.curves)
    assert found.memory_bytes > 2**28
    found.save(tmp_path / "cpu.json")
    assert Calibration.load(tmp_path / "cpu.json") == found


def test_a_file_that_is_no_calibration_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema": "ckptplan.calibration/1", "curves": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="curves"):
        Calibration.load(path)


def test_a_device_that_is_not_there_ends_with_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "x.json"), "--device", "mps"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_measured_rates_replace_those_of_the_data_sheet() -> None:
    calibration = Calibration("x", "cuda", {"matrix bfloat16": Curve((1e9, 1e12), (1e-5, 1e-2))}, 0.1, 1)
    h100 = DEVICES["h100"]
    assert Rates(h100, calibration).seconds("matrix", "bfloat16", 1e12, 0) == 1e-2
    assert Rates(h100, calibration, "low").seconds("matrix", "bfloat16", 1e12, 0) == pytest.approx(1.1e-2)
    by_sheet = Rates(h100).seconds("pointwise", "bfloat16", 0, 1e9)
    assert Rates(h100, calibration).seconds("pointwise", "bfloat16", 0, 1e9) == by_sheet


def test_the_table_of_devices_is_sane_and_says_where_it_is_from() -> None:
    for name, device in DEVICES.items():
        assert device_named(name.upper()) is device
        assert "NVIDIA" in device.source
        assert device.flops_per_s["bfloat16"] >= device.flops_per_s["float32"]
        for share in (device.matrix, device.attention, device.bandwidth):
            assert 0 < share.low < share.mid < share.high < 1
        sold = int(device.title.rsplit(" ", 2)[-2]) * 10**9
        assert 0.9 * sold < device.memory_bytes < 1.08 * sold
