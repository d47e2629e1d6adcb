"""Two (slow: four) gloo ranks: plans and steps under DDP, FSDP2 and tensor parallelism; see ranks_program.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks_program import PLANS, PLANS_OF_CUT_MODELS

REPOSITORY = Path(__file__).parents[2]


def found_by(num_ranks: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.ranks_program"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]
    told = [process.communicate(timeout=400)[1] for process in started]
    assert [process.returncode for process in started] == [0] * num_ranks, "\n".join(told)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(request.param, tmp_path_factory.mktemp("ranks"))


ENGINES = {"ddp": tuple(PLANS), "fsdp2": tuple(PLANS), "tensor": PLANS_OF_CUT_MODELS}
EVERY = pytest.mark.parametrize(("engine", "plan"), [(e, p) for e, plans in ENGINES.items() for p in plans])


@EVERY
def test_the_peak_of_every_rank_is_as_predicted(found: dict[str, Any], engine: str, plan: str) -> None:
    case = found[engine][plan]
    for measured in case["measured_bytes"]:
        assert abs(case["predicted_bytes"] - measured) <= 0.02 * measured, case


@EVERY
def test_no_rank_exceeds_the_budget(found: dict[str, Any], engine: str, plan: str) -> None:
    case = found[engine][plan]
    if case["budget_bytes"] is not None:
        assert case["predicted_bytes"] <= case["budget_bytes"], case
        assert max(case["measured_bytes"]) <= 1.02 * case["budget_bytes"], case


@EVERY
def test_gradients_are_those_without_the_plan_and_those_of_one_process(
    found: dict[str, Any], engine: str, plan: str
) -> None:
    """DDP adds up buckets in the order in which gradients come, which plans change: four addends may round apart."""
    case = found[engine][plan]
    if engine != "ddp" or found["ranks"] == 2:
        assert case["bitwise_equal"] == [True] * found["ranks"]
    assert max(case["from_plain"]) <= 1e-6, case
    assert max(case["from_one_process"]) <= 1e-6, case


@EVERY
def test_all_ranks_hold_the_same_plan(found: dict[str, Any], engine: str, plan: str) -> None:
    assert len(set(found[engine][plan]["digests"])) == 1


def test_the_plans_are_of_the_kinds_that_they_are_called(found: dict[str, Any]) -> None:
    for engine in ("ddp", "fsdp2"):
        assert "S" in found[engine]["selective"]["text"]
        assert found[engine]["nest"]["text"] == "R(0 R(1 2)) R(3)"
        assert "R(" in found[engine]["dp"]["text"]


def test_a_segment_is_gathered_as_a_whole(found: dict[str, Any]) -> None:
    assert found["fsdp2"]["segment"]["units"] == [["layers.0"], ["layers.1", "layers.2"], ["layers.3"]]


def test_the_norm_of_a_cut_model_is_clipped_as_that_of_one_process(found: dict[str, Any]) -> None:
    """Of its gradients some are spread over all ranks, some over those that share a batch, and some over none."""
    clipping = found["clipping"]
    assert clipping["cut"] == pytest.approx(clipping["alone"], rel=1e-6)
    assert clipping["of_ranks"] == [clipping["cut"]] * found["ranks"]
    assert max(clipping["apart"]) <= 1e-5


def test_a_cut_that_makes_another_model_is_refused(found: dict[str, Any]) -> None:
    squeezed, normed = found["another"]
    assert "engine.tp=2: the model as it is cut is another one: its loss is" in squeezed
    assert "gradients of scale, which every rank holds whole, differ from rank to rank" in normed


def test_an_error_or_a_signal_of_one_rank_reaches_all(found: dict[str, Any]) -> None:
    agreement, size = found["agreement"], found["ranks"]
    assert agreement["raised"] == ["only here"] * size
    assert agreement["before"] == [False] * size
    assert agreement["after"] == [True] * size


def test_the_ranks_together_read_the_batches_of_one_process(found: dict[str, Any]) -> None:
    shares, size = found["shares"], found["ranks"]
    assert shares["whole_batches_equal"]
    assert shares["short_batch_begins_equal"]
    assert shares["counts"] == [[8 // size] * size, [1] * size]  # of the last sample rank 0 has it, others a filler
    for loss in shares["evaluation"]:
        assert loss == pytest.approx(shares["evaluation_of_one_process"], rel=1e-6)


def test_after_a_step_all_ranks_have_the_statistics_of_rank_0(found: dict[str, Any]) -> None:
    differed, agree = found["buffers"]
    assert differed
    assert agree
