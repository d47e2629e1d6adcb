"""A file imports only what stands above it, and the planning core runs without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptplan

PACKAGE = Path(ckptplan.__file__).parent

# Every file, from the ground up; "planners" is planners/__init__.py.
ORDER = """
errors units processes console strict_json
clock costs profiles devices
config config.wording config.checks config.explaining config.loading record graph options
randomness runtime trees optim fakes wrappers blocks kernels memory footprint compiling recompute replay offload twin
subject selective
stages work
signatures operators larger_inputs
trace discovery observe attributes kinds choices offload_choices compiled_choices compiled_model regions tied assembly
skeleton later_uses flow
measure
repeats
nodes plan gaps scaling targets recompute_cost in_replay simulate check
planners.tables planners.heuristic planners.fixed planners.flat planners.options
planners.stairs planners.stretches planners.nested planners.milp planners.compiled
planners.budgets planners.reasons planners
curve explanation certificate
estimate
validate apply dry_run proof equality benchmark budget autofit batch_size smaller_batches sequence_length
data.spec data.checks data.order data data.loading data.dataset data.digits data.images data.text data.tokens
models.chain models.transformer models.gpt models.mlp models.resnet models.unet models.vit models.hf models
profile_cache other_trackers tracking stopping launched
engine engine.ranks engine.shares engine.worst engine.gathered engine.parallel engine.tensor engine.planning
training largest_shapes peak_watch recovery runs resuming jobs sweep_table sweep_tracking
dashboards sweeps cluster
report report.tables report.records report.steps report.figures report.vega report.tradeoff report.charts
report.page report.export report.text report.__main__
larger_batches calibrate
run.records run.profiling run.estimate run.batch run.progress run.preparing run.planning run.ending
run.proving run.trained run
telling hydra_folders command_line engine.launch cli engine.worker __main__
""".split()

# What plans, checks and reports without a model at hand.
TORCH_FREE = """
clock devices
errors units processes console strict_json config config.wording config.checks config.explaining config.loading
targets record graph options costs profiles selective nodes plan gaps
recompute_cost in_replay simulate check planners planners.tables planners.heuristic planners.fixed planners.flat
planners.options planners.stairs planners.stretches
planners.nested planners.milp planners.compiled planners.budgets planners.reasons curve explanation certificate
data.spec runs jobs sweep_table sweeps cluster report report.tables report.records report.steps report.figures
report.vega report.tradeoff report.charts report.page report.export report.text report.__main__ cli
engine engine.worst engine.gathered launched telling hydra_folders command_line
""".split()


def files() -> dict[str, Path]:
    """Module name below ckptplan -> file. The package's own __init__ (lazy), Hydra's plugin and state/ stand apart."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ("plugins", "state") and parts != ("__init__",):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str) -> set[str]:
    """Modules of ckptplan that a source imports, at any depth; what only type checkers read does not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("ckptplan.") for name in found if name.startswith("ckptplan.")} & files().keys()


def test_every_file_has_its_place() -> None:
    assert sorted(files()) == sorted(ORDER)


@pytest.mark.parametrize("module", sorted(files()))
def test_a_file_imports_only_what_stands_above_it(module: str) -> None:
    above = set(ORDER[: ORDER.index(module)])
    assert imports_of(files()[module].read_text(encoding="utf-8")) <= above


def test_the_state_half_can_be_lifted_out() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE / "state").glob("*.py")]
    assert len(sources) > 20
    assert set().union(*map(imports_of, sources)) <= {"errors", "units"}
    users = {
        n for n, p in files().items() if re.search(r"(from|import) ckptplan\.state", p.read_text(encoding="utf-8"))
    }
    assert users == {"resuming"}


def test_the_check_sees_an_import_in_any_form() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ckptplan import cli\n"
    assert imports_of(source) == set()
    for line in ("from ckptplan import cli", "import ckptplan.cli", "from ckptplan.cli import main"):
        assert imports_of(f"def f():\n    {line}\n") == {"cli"}


def load_without_torch(modules: list[str]) -> subprocess.CompletedProcess[str]:
    names = [f"ckptplan.{module}" for module in modules]
    program = (
        f"import sys, importlib; sys.modules['torch'] = None\nfor name in {names!r}: importlib.import_module(name)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)


def test_the_planning_core_loads_where_there_is_no_torch() -> None:
    done = load_without_torch(TORCH_FREE)
    assert done.returncode == 0, done.stderr


def test_the_test_without_torch_fails_on_a_module_that_needs_it() -> None:
    done = load_without_torch(["blocks"])
    assert done.returncode != 0
    assert "torch" in done.stderr


def test_no_module_breaks_the_standard_library_or_hides_a_function() -> None:
    names = {module.rpartition(".")[2] for module in files()}
    assert "profile" not in names
    assert not names & set(ckptplan.__all__)
