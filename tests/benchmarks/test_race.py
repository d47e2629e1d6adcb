"""The quick part of the race: small models, eager, FLOPs and bytes only; and the judge's own judgement.

The whole race: ``python -m tests.benchmarks.race --help``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.race.__main__ import main
from tests.benchmarks.race.eager import every_kth, no_checkpointing
from tests.benchmarks.race.judging import BY_FLOPS, BY_TIME, best_within, champions, is_won, judge, our_curve_faults
from tests.benchmarks.race.measuring import flop_counter, measure
from tests.benchmarks.race.report import markdown
from tests.benchmarks.race.running import Settings, merged, race
from tests.benchmarks.race.subjects import QUICK, make_subject
from tests.tracker import LiveBytes


@pytest.mark.parametrize("name", list(QUICK))
def test_no_rival_is_cheaper_within_any_budget_and_ours_do_as_predicted(name: str) -> None:
    record = race(name, Settings(budgets=(0.85, 0.6, 0.4), rounds=0))
    verdict = record["verdict"]
    assert is_won(verdict), json.dumps(verdict, indent=1)
    assert verdict["worst_prediction_error"] <= 0.01
    ours = [c for c in record["configurations"] if c["rival"] == BY_FLOPS]
    assert len(ours) >= 2, "too few budgets were feasible for this to show anything"
    assert any(c["plan"].count("S") for c in ours)
    assert all(c["gradients_bitwise_equal"] for c in record["configurations"])  # rivals too: all run the same kernels


def test_the_meters_peak_is_that_of_the_tests_own_tracker() -> None:
    subject = make_subject("gpt-quick")
    random_states_bytes = len(subject.blocks) * torch.get_rng_state().nbytes  # kept by checkpoint, made by no operator
    for entrant, unseen_bytes in ((*no_checkpointing(subject), 0), (next(every_kth(subject)), random_states_bytes)):
        figures = measure(entrant.step, subject.model, is_eager=True)
        with LiveBytes() as tracker:
            entrant.step().backward()
        assert figures.peak_bytes == pytest.approx(tracker.peak + unseen_bytes, abs=16)


def test_the_counter_counts_attention() -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    with flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    product = 2 * 2 * 3 * 8 * 8 * 4
    assert counter.get_total_flops() == (2 + 5) * product


def _configuration(rival: str, peak: int, flops: int, asked: int | None = None, **changed: Any) -> dict[str, Any]:
    return {
        "league": "eager",
        "rival": rival,
        "plan": f"{rival} {peak}",
        "asked_bytes": [] if asked is None else [asked],
        "predicted_peak_bytes": peak,
        "peak_bytes": peak,
        "kept_bytes": peak,
        "predicted_added_flops": None,
        "flops": flops,
        "flops_ratio": flops / 100,
        "solve_s": None,
        "gradients_bitwise_equal": True,
        "gradients_max_rel_diff": 0.0,
        "time": None,
    } | changed


def _record(*configurations: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "made up",
        "blocks": 3,
        "profile_s": 0.1,
        "no_checkpointing": {"peak_bytes": 1000, "kept_bytes": 900, "flops": 100},
        "budgets": [{"name": "50%", "bytes": 500, "timed": ["eager", "compiled"]}],
        "not_installed": {},
        "configurations": list(configurations),
        "below_our_curve": [],
    }


def _time(minimum_s: float, spread: float = 0.02) -> dict[str, float]:
    return {"minimum_s": minimum_s, "ratio": minimum_s, "spread": spread, "rounds": 8}


def test_a_rivals_best_configuration_within_the_budget_counts_and_of_ours_the_one_asked_for() -> None:
    record = _record(
        _configuration("r", 490, 130),
        _configuration("r", 480, 120),
        _configuration("r", 501, 101),
        _configuration(BY_FLOPS, 400, 110, asked=450),
        _configuration(BY_FLOPS, 499, 115, asked=500),
    )
    assert best_within(record, "eager", "r", 500) == 1
    assert best_within(record, "eager", BY_FLOPS, 500) == 4
    assert best_within(record, "eager", "r", 100) is None
    assert is_won(judge(record))


def test_whoever_fits_and_is_cheaper_has_won_whoever_oversteps_has_not() -> None:
    ours = _configuration(BY_FLOPS, 450, 110, asked=500)
    assert judge(_record(ours, _configuration("r", 490, 109)))["lost_by_flops"] == ["50%: r r 490"]
    assert judge(_record(ours, _configuration("r", 440, 109)))["lost_by_flops"] == ["50%: r r 440 (smaller, too)"]
    assert is_won(judge(_record(ours, _configuration("r", 501, 109), _configuration("r", 440, 110))))
    other = _configuration(BY_FLOPS, 90, 200, asked=100)  # none for 500 bytes
    assert judge(_record(other, _configuration("r", 490, 900)))["lost_by_flops"]


def test_times_within_the_spread_of_either_are_no_loss() -> None:
    ours = _configuration(BY_TIME, 450, 110, asked=500, time=_time(1.0, 0.05))
    close = _configuration("r", 450, 110, time=_time(0.96, 0.01))
    far = _configuration("r", 450, 110, time=_time(0.9, 0.01))
    assert judge(_record(ours, close))["lost_by_time"] == []
    assert len(judge(_record(ours, far))["lost_by_time"]) == 1


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"peak_bytes": 501, "predicted_peak_bytes": 501}, "violations"),
        ({"predicted_peak_bytes": 440}, "mispredicted"),
        ({"predicted_added_flops": 9}, "other_flops_than_predicted"),
        ({"gradients_bitwise_equal": False}, "unequal_gradients"),
    ],
)
def test_what_is_broken_is_told_where(changed: dict[str, Any], where: str) -> None:
    verdict = judge(_record(_configuration(BY_FLOPS, 450, 110, asked=500, **changed)))
    assert len(verdict[where]) == 1
    assert not is_won(verdict)


def test_a_rival_below_our_curve_between_the_budgets_is_told() -> None:
    record = _record(_configuration("r", 470, 109))
    assert our_curve_faults(record, lambda budget: 9 if budget >= 470 else None) == []
    assert len(our_curve_faults(record, lambda budget: 10)) == 1
    assert len(our_curve_faults(record, lambda budget: None)) == 1


def test_the_command_writes_what_it_prints_and_its_exit_code_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--quick", "--models", "gpt-quick", "--budgets", "0.7", "--out", str(tmp_path)]
    assert main(arguments) == 0
    whole = json.loads((tmp_path / "race.json").read_text())
    table = (tmp_path / "race.md").read_text()
    assert table in capsys.readouterr().out
    has_pictures = (tmp_path / "race-gpt-quick.svg").exists()
    assert table == markdown(whole, has_pictures=has_pictures)
    assert whole["machine"]["torch"] == torch.__version__
    part = tmp_path / "race-gpt-quick-eager.json"
    broken = json.loads(part.read_text())
    ours = next(c for c in broken["record"]["configurations"] if c["rival"] == BY_FLOPS)
    ours["gradients_bitwise_equal"] = False
    part.write_text(json.dumps(broken))
    assert main([*arguments, "--resume"]) == 1
    assert main([*arguments, "--merge"]) == 1
    assert main([*arguments, "--afresh"]) == 0
    assert main([*arguments, "--resume", "--budgets", "0.8"]) == 0  # of other settings: run again
    told = capsys.readouterr().err
    assert "runs again" in told
    again = told.partition("runs again")[2]
    assert "ckptplan optimal" in again
    assert "every block" not in again  # its figures are taken from the part that was there


def _compiled(rival: str, peak: int, asked: int | None = None, **changed: Any) -> dict[str, Any]:
    return _configuration(rival, peak, 0, asked) | {"league": "compiled", "flops": None, **changed}


def test_parts_of_two_leagues_are_one_record_that_is_judged_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    eager = _record(_configuration(BY_TIME, 450, 110, asked=500)) | {"race_s": 2.0}
    eager["budgets"][0]["timed"] = []
    ours = _compiled("ckptplan compile", 450, asked=500, time=_time(1.0))
    compiled = _record(ours, _compiled("r", 440, time=_time(0.5))) | {"race_s": 3.0}
    whole = merged([eager, compiled])
    assert [c["league"] for c in whole["configurations"]] == ["eager", "compiled", "compiled"]
    assert (whole["race_s"], whole["budgets"][0]["timed"]) == (5.0, ["eager", "compiled"])
    lost = "50%: r r 440 (smaller, too), 0.500 against 1.000 of ckptplan compile 450"
    assert whole["verdict"]["lost_compiled"] == [lost]
    compiled["budgets"][0]["bytes"] = 501
    with pytest.raises(ValueError, match="differ in their budgets"):
        merged([eager, compiled])
    assert main(["--merge", "--out", str(tmp_path)]) == 2
    assert "holds no parts of gpt12" in capsys.readouterr().err


def test_what_was_not_run_stands_beside_the_outcome() -> None:
    eager = _record(_configuration(BY_FLOPS, 450, 110, asked=500))
    eager["budgets"][0]["timed"] = []
    table = markdown(_report(eager))
    assert (
        "Won, in all that was run. Not run: times of the eager league of made up; the compiled league of made up."
        in (table)
    )
    assert "not timed" in table
    lost = _configuration("r", 440, 100)
    eager["configurations"].append(lost)
    eager["verdict"] = judge(eager)
    assert "Not won. Not run: " in markdown(_report(eager))


def _report(record: dict[str, Any]) -> dict[str, Any]:
    machine = {"processor": "a processor", "torch": "2", "python": "3"}
    whole = {"commands": ["command"], "race_s": 60.0, "machine": machine, "seed": 0, "rounds": 0, "note": "A note."}
    return whole | {"models": [{"verdict": judge(record), **record}]}


def test_only_what_may_win_at_a_timed_budget_is_timed() -> None:
    record = _record(
        _configuration("r", 490, 130),
        _configuration("r", 480, 120),
        _configuration(BY_TIME, 450, 110, asked=500),
        _configuration(BY_FLOPS, 450, 110, asked=500),
        _compiled("c", 501),
        _compiled("c", 400),
        _compiled("ckptplan compile", 300, asked=300),
    )
    assert champions(record, "eager") == [1, 2]
    assert champions(record, "compiled") == [5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predecessor", "nowhere"], "pip install --no-deps --target nowhere ckptplan==0.1.0rc1"),
        (["--budgets", "1.5"], "0 < share <= 1"),
        (["--rounds", "0"], "--no-time"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
