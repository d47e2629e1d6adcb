"""The names that the package promises, in data-path order, without torch until one is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckptplan
from tests.test_import_order import ORDER

INIT = Path(ckptplan.__file__)
REPOSITORY = INIT.parent.parent

# Section 6 of the design, what exists so far, and the errors.
PROMISED = """
declare_blocks CheckpointableBlock profile_blocks BlockProfile ChainProfile plan_checkpoints CheckpointPlan
CheckpointDecision simulate_plan PlanCost check_plan plan_curve PlanCurve
certify Certificate explain PlanExplanation validate_plan apply_plan CheckpointedSequential checkpointed
run_benchmark BenchmarkResult compare_results check_equality EqualityCheck fit Fitted
CkptplanError BlockDeclarationError UnsupportedBoundaryError
NoDifferentiableOutputError TimingOnlyProfileError InfeasibleTargetError PlanIncompatibleError
UnsupportedPlanVersionError PlannerScaleError StepMismatchError LargerBatchWarning ConfigError __version__
""".split()


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_is_there_and_documented(name: str) -> None:
    assert name in ckptplan.__all__
    value = getattr(ckptplan, name)
    assert value is getattr(ckptplan, name)
    assert isinstance(value, str) or value.__doc__


def test_the_three_lists_of_names_agree() -> None:
    """``__all__``, the lazy table and the imports that type checkers read."""
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    typed = {
        (alias.name, node.module)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {(name, f"ckptplan.{module}") for name, module in ckptplan._MODULE_OF_NAME.items()}
    assert typed == lazy
    assert [*ckptplan._MODULE_OF_NAME, "__version__"] == ckptplan.__all__
    assert set(ckptplan.__all__) <= set(dir(ckptplan))


def test_the_names_stand_in_data_path_order() -> None:
    path = [
        "blocks",
        "measure",
        "estimate",
        "devices",
        "costs",
        "profiles",
        "planners",
        "nodes",
        "plan",
        "simulate",
        "check",
        "curve",
        "certificate",
        "explanation",
        "validate",
        "apply",
        "dry_run",
        "equality",
        "benchmark",
        "autofit",
        "batch_size",
        "sequence_length",
        "errors",
    ]
    modules = list(dict.fromkeys(ckptplan._MODULE_OF_NAME.values()))
    assert modules == path
    assert set(modules) <= set(ORDER)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'plan_checkpoint'; public names: .*plan_checkpoints"):
        _ = ckptplan.plan_checkpoint


def modules_loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_torch() -> None:
    loaded = modules_loaded_by("import ckptplan; ckptplan.ChainProfile; ckptplan.ConfigError")
    assert not loaded & {"torch", "numpy", "wandb", "hydra"}


def test_the_test_for_torch_sees_torch() -> None:
    assert "torch" in modules_loaded_by("import ckptplan; ckptplan.declare_blocks")


def test_the_version_is_that_of_the_project_file() -> None:
    assert f'\nversion = "{ckptplan.__version__}"\n' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
