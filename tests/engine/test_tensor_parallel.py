"""Plans under tensor parallelism that a user's own loop makes with PyTorch: four ranks, two ways of sharing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tensor_parallel_program import MODELS, go_on, plans_of

REPOSITORY = Path(__file__).parents[2]


def found_by(num_ranks: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.tensor_parallel_program"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]
    told = [process.communicate(timeout=400)[1] for process in started]
    assert [process.returncode for process in started] == [0] * num_ranks, "\n".join(told)
    found: dict[str, Any] = json.loads((folder / f"found-{num_ranks}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)  # six processes, each of which imports torch and transformers
def test_gradients_are_those_of_one_process_and_the_state_goes_on_under_other_meshes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for model in MODELS:
        (tmp_path / model).mkdir()
    on_four = found_by(4, tmp_path)
    for model in MODELS:
        for kind in plans_of(model):
            case = on_four[f"{model} {kind}"]
            assert case["difference"] <= 1e-12, (model, kind, case)
            assert case["cut_parameters"] >= 4 * 3, case
        assert "R(" in on_four[f"{model} dp"]["plan"]
        assert "S" in on_four[f"{model} selective"]["plan"]
    on_two = found_by(2, tmp_path)
    for model in MODELS:
        for saved, after_a_step in (on_two[model], go_on(model, str(tmp_path / model), parts=1)):
            assert saved == 0.0
            assert after_a_step <= 1e-9
