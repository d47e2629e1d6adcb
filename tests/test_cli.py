"""The command line: what a stranger types, right or wrong. Runs are replaced by a stub; the real ones are elsewhere."""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptplan
from ckptplan import cli
from ckptplan.command_line import overrides_together
from ckptplan.errors import CkptplanError, ConfigError, InfeasibleTargetError
from ckptplan.hydra_folders import fresh_folder
from ckptplan.plan import CheckpointPlan

REPOSITORY = Path(cli.__file__).resolve().parent.parent
Call = dict[str, Any]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """``run_job`` replaced: calls are recorded; a call ends with 0, or with what ``answer`` raises or returns."""
    calls: list[Call] = []

    def run_job(config: Any, *, resolved: Any, folder: Path, overrides: list[str], on_begin: Any) -> int:
        on_begin()
        calls.append(
            {"config": config, "resolved": resolved, "folder": folder, "overrides": overrides, "cwd": Path.cwd()}
        )
        answer = getattr(stub, "answer", None)
        return answer() if answer else 0

    stub = types.ModuleType("ckptplan.run")
    stub.run_job = run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ckptplan.run", stub)
    return calls


def answer_with(reply: Callable[[], int]) -> None:
    sys.modules["ckptplan.run"].answer = reply  # type: ignore[attr-defined]


# --- a wrong word on the command line ---------------------------------------------------------------------------------

# What is typed -> what the message says; each ends with exit code 2 before a folder exists.
TYPOS: list[tuple[list[str], list[str]]] = [
    (["logger.tags=x"], ["logger.tags=x: not valid; expected a list such as [first, second]", "type: logger.tags=[]"]),
    (["stpes=5"], ["stpes=5", "did you mean: steps", "allowed: name, seed", "type: steps=5"]),
    (["optimizer.lrr=1"], ["optimizer.lrr=1", "did you mean: optimizer.lr", "optimizer.betas"]),
    (["steps=abc"], ["steps=abc", "a whole number", "type: steps=60"]),
    (["budget_frac="], ["budget_frac=", "empty", "a number"]),
    (["budget_frac=0"], ["budget_frac=0.0", "0 < f <= 1"]),
    (["runtime.threads=1000000"], ["runtime.threads=1000000", "out of range; expected 1 to", "4 for each"]),
    (["budget_frac=2"], ["budget_frac=2.0", "0 < f <= 1"]),
    (["budget_frac=0.5", "budget_bytes=6GiB"], ["budget_frac=0.5 and budget_bytes=6GiB", "two budgets"]),
    (
        ["planner=dpp"],
        ["planner=dpp", "did you mean: dp", "allowed: all, compile, dp, file", "type: planner=dp"],
    ),
    (["modle=gpt"], ["modle=gpt", "did you mean: model", "type: model=gpt"]),
    (["model=gtp"], ["model=gtp", "did you mean: gpt", "resnet"]),
    (["experiment=redme"], ["experiment=redme", "did you mean: readme"]),
    (["lr=0.1"], ["lr=0.1", "did you mean: optimizer.lr", "type: optimizer.lr=0.1"]),
    (["model.widht=3"], ["model.widht=3", "did you mean: model.width"]),
    (["+model.widht=3"], ["model.widht=3", "gpt.GPT (from model/gpt.yaml)", "did you mean: model.width"]),
    (["model.layers=abc"], ["model.layers=abc", "expects int, got str"]),
    (["model._target_=ckptplan.models.gpt.GTP"], ["ckptplan.models.gpt has no GTP", "model/gpt.yaml", "gpt.GPT"]),
    (["model._target_=nowhere.Net"], ["model._target_=nowhere.Net", "no module named 'nowhere'", "model/gpt.yaml"]),
    (["runtim.device=cpu"], ["runtim.device=cpu", "did you mean: runtime.device", "type: runtime.device=cpu"]),
    (["runtime.dtype=bf17"], ["runtime.dtype=bf17", "bf16_mixed"]),
    (["plan_only=maybe"], ["plan_only=maybe", "true or false"]),
    (["name=a{b"], ["name=a{b", "quotes", "type: 'name=\"a{b\"'"]),
    (["name=#1"], ["name=#1", "type: 'name=\"#1\"'"]),
    (["name=~/runs"], ["type: 'name=\"~/runs\"'"]),
    (["name=a=b"], ["type: 'name=\"a=b\"'"]),
    (["planner=dp,greedy"], ["planner=dp,greedy", "-m planner=dp,greedy"]),
    (["steps"], ["steps: expected key=value"]),
    (["=3"], ["=3"]),
    (["--steps=5"], ["--steps=5", "no such flag", "type: steps=5"]),
    (["+experiment=readme"], ["has a value already", "type: experiment=readme"]),
    (["planner=text", "planner.text='K0 X1'"], ["planner.text=K0 X1", "found 'X1'", "expected K<block>"]),
    (["profile.offload=yes"], ["profile.offload=yes", "auto, always, never"]),
    (["planner=text", "planner.text='C0[0.5] K1'", "cost=flops"], ["cost=flops", "compiles (C0[0.5])", "cost=time"]),
    (["planner=text", "planner.text='C0-3[1]'", "cost=flops"], ["cost=flops", "compiles (C0-3[1.0])", "cost=time"]),
    (["planner=file", "planner.path=nowhere.json"], ["planner.path=nowhere.json", "no such file"]),
    (["experiment=null"], ["experiment=null", "Config group override"]),
    (["--cfg", "job", "experiment=null"], ["experiment=null", "Config group override"]),
    (
        ["steps=3", "scheduler.warmup_steps=5"],
        ["scheduler.warmup_steps=5", "more than steps=3", "type: scheduler.warmup_steps=0"],
    ),
    (["scheduler.final_factor=2"], ["scheduler.final_factor=2.0", "0 to 1"]),
    (["-m", "planner=dp,dpp"], ["planner=dpp", "did you mean: dp"]),
    (["-m", "seed=1,2", "stpes=5"], ["stpes=5", "did you mean: steps"]),
    (["-m", "seed=1,x"], ["seed=1,x", "a whole number"]),
    (["-m", "budget_frac=0.5,2"], ["budget_frac=2.0"]),
    (["-m", "model=resnet,vit", "data.imge_size=64"], ["data.imge_size=64", "did you mean: data.image_size"]),
    (["--cfg", "job", "stpes=5"], ["did you mean: steps"]),
]


@pytest.mark.parametrize(("arguments", "words"), TYPOS, ids=[" ".join(arguments) for arguments, _ in TYPOS])
def test_a_typo_ends_with_one_message_and_nothing_on_disk(
    start_folder: Path, runs: list[Call], capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.main(arguments) == 2
    message = capfd.readouterr().err
    for word in words:
        assert word in message
    assert "Traceback" not in message
    assert "HYDRA_FULL_ERROR" not in message
    assert runs == []
    assert [path for path in start_folder.rglob("*") if path.is_file()] == []


def test_a_faulty_file_of_the_users_own_is_told_like_a_typo(
    start_folder: Path, runs: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    mine = start_folder / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "bad.yaml").write_text("# @package _global_\nstpes: 5\n")
    (mine / "good.yaml").write_text("# @package _global_\nsteps: 7\n")
    assert cli.main(["--config-dir", "mine", "experiment=bad"]) == 2
    assert "did you mean: steps" in capsys.readouterr().err
    assert cli.main(["--config-dir", "mine", "experiment=good"]) == 0
    assert runs[0]["config"].steps == 7


# --- answers without a run --------------------------------------------------------------------------------------------

TORCH_FREE = [
    ["--help"],
    ["--cfg", "job"],
    ["--cfg", "job", "--resolve"],
    ["--cfg", "hydra"],
    ["--info", "defaults-tree"],
    ["-sc", "install=bash"],
    ["stpes=5"],
    ["planner=dpp"],
    ["steps=abc"],
    ["budget_frac=0"],
    ["-m", "planner=dp,dpp"],
]
_RUN_AND_TELL = """
import sys, time
from ckptplan.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("MODULES", "torch" in sys.modules, "wandb" in sys.modules, time.process_time())
"""


def ask(arguments: list[str], folder: Path, program: str = _RUN_AND_TELL) -> tuple[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    lines = done.stdout.splitlines()
    return done.stdout, lines[-1].split()[1:]


@pytest.mark.parametrize("arguments", TORCH_FREE, ids=" ".join)
def test_questions_and_typos_are_answered_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    _, (torch_loaded, wandb_loaded, _) = ask(arguments, tmp_path)
    assert (torch_loaded, wandb_loaded) == ("False", "False")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_test_for_torch_sees_torch(tmp_path: Path) -> None:
    _, (torch_loaded, *_) = ask(["--help"], tmp_path, "import torch\n" + _RUN_AND_TELL)
    assert torch_loaded == "True"


@pytest.mark.slow  # a clock, though it counts this process's own seconds only
@pytest.mark.parametrize(("argument", "limit_s"), [("--help", 1.0), ("--cfg=job", 1.0), ("stpes=5", 2.0)])
def test_questions_and_typos_are_answered_at_once(tmp_path: Path, argument: str, limit_s: float) -> None:
    assert min(float(ask([argument], tmp_path)[1][2]) for _ in range(3)) < limit_s


def test_help_shows_commands_that_work_and_every_group(tmp_path: Path) -> None:
    text, _ = ask(["--help"], tmp_path)
    commands = [line.strip() for line in text.splitlines() if line.startswith("  python train.py")]
    assert len(commands) == 3
    for group in (
        "data: ",
        "model: ",
        "planner: all, compile, dp, file, greedy, ilp, none, optimal, text, uniform",
        "experiment: ",
        "logger: ",
    ):
        assert f"\n{group}" in text
    assert 'eval "$(python train.py -sc install=bash)"' in text


def test_tab_completion_offers_the_planners(tmp_path: Path) -> None:
    program = "import os; os.environ['COMP_LINE'] = 'train.py planner='; os.environ['COMP_POINT'] = '17'\n"
    text, _ = ask(["-sc", "query=bash"], tmp_path, program + _RUN_AND_TELL)
    assert "planner=dp" in text.split()


# --- one run ----------------------------------------------------------------------------------------------------------


def test_a_run_gets_its_config_its_folder_and_its_overrides(start_folder: Path, runs: list[Call]) -> None:
    assert cli.main(["planner=greedy", "budget_frac=0.3", 'name="a=b, {c}"', "hydra.verbose=false"]) == 0
    [call] = runs
    assert call["config"].planner.name == "greedy"
    assert call["config"].name == "a=b, {c}"
    assert call["resolved"]["budget_frac"] == 0.3
    assert call["overrides"] == ["planner=greedy", "budget_frac=0.3", 'name="a=b, {c}"']
    folder = call["folder"]
    assert folder.is_absolute()
    assert folder.parent.parent == start_folder / "outputs" / "train"
    assert {"train.log", ".hydra"} <= {path.name for path in folder.iterdir()}
    latest = start_folder / "outputs" / "latest"
    assert latest.resolve() == folder
    assert not latest.readlink().is_absolute()


@pytest.mark.parametrize("chdir", ["true", "false"])
@pytest.mark.parametrize("multirun", [["-m", "hydra/launcher=basic"], []], ids=["multirun", "alone"])
def test_inputs_are_relative_to_the_start_folder_and_outputs_stay_below_output_dir(
    start_folder: Path, runs: list[Call], multirun: list[str], chdir: str
) -> None:
    assert cli.main([*multirun, f"hydra.job.chdir={chdir}", "output_dir=runs/here"]) == 0
    [call] = runs
    assert call["cwd"] == start_folder
    assert call["folder"].is_relative_to(start_folder / "runs" / "here")
    assert {path.name for path in start_folder.iterdir()} == {"runs"}
    assert Path.cwd() == start_folder


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x80PNG", b"text", b"[]"])
def test_a_plan_file_that_is_none_is_an_error_of_the_configuration(
    start_folder: Path, runs: list[Call], capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    (start_folder / "plan.json").write_bytes(content)
    assert cli.main(["planner=file", "planner.path=plan.json"]) == 2
    message = capfd.readouterr().err
    assert message.startswith("error: planner.path=plan.json: ")
    assert "Traceback" not in message
    assert runs == []


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5, 6, 129, 130, 143])
def test_the_exit_code_of_the_run_is_that_of_the_command(start_folder: Path, runs: list[Call], code: int) -> None:
    answer_with(lambda: code)
    assert cli.main([]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("blocks.paths=x: no such block"), 2),
        (InfeasibleTargetError("nothing fits"), 1),
        (CkptplanError("no"), 1),
    ],
    ids=["config", "infeasible", "other"],
)
def test_an_error_of_ours_is_one_message_with_its_traceback_in_the_log(
    start_folder: Path, runs: list[Call], capfd: pytest.CaptureFixture[str], error: CkptplanError, code: int
) -> None:
    def fail() -> int:
        raise error

    answer_with(fail)
    assert cli.main([]) == code
    message = capfd.readouterr().err
    assert message.count(str(error)) == 1
    assert "Traceback" not in message
    log = (runs[0]["folder"] / "train.log").read_text()
    assert "Traceback" in log
    assert str(error) in log


def test_an_unexpected_error_leaves_its_traceback_in_the_log_and_ends_with_1(
    start_folder: Path, runs: list[Call]
) -> None:
    answer_with(lambda: 1 // 0)
    assert cli.main([]) == 1
    assert "ZeroDivisionError" in (runs[0]["folder"] / "train.log").read_text()


def test_ctrl_c_ends_with_130(start_folder: Path, runs: list[Call]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    answer_with(interrupt)
    assert cli.main([]) == 130


@pytest.mark.parametrize("left", ["result.json", "config.yaml"])
def test_a_folder_that_holds_a_run_is_refused_also_one_that_was_killed_or_is_going_on(
    start_folder: Path, runs: list[Call], capsys: pytest.CaptureFixture[str], left: str
) -> None:
    assert cli.main(["hydra.run.dir=mine"]) == 0
    (start_folder / "mine" / left).write_text("{}")
    assert cli.main(["hydra.run.dir=mine"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert len(runs) == 1


def test_folders_made_in_the_same_second_differ(tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.extend(fresh_folder(tmp_path) for _ in range(10))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 40
    assert all(folder.is_dir() for folder in folders)


def test_an_output_root_that_cannot_be_written_is_named(
    start_folder: Path, runs: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    (start_folder / "outputs").write_text("a file in the way")
    assert cli.main([]) == 2
    message = capsys.readouterr().err
    assert "output_dir=" in message
    assert "Traceback" not in message


def test_the_plan_of_the_latest_run_is_that_of_the_run_before(start_folder: Path, runs: list[Call]) -> None:
    assert cli.main([]) == 0
    plan = CheckpointPlan.from_text("K0", ["b0"])
    plan.save(runs[0]["folder"] / "plan.json")
    assert cli.main(["planner=file", "planner.path=outputs/latest/plan.json"]) == 0
    assert Path(runs[1]["config"].planner.path) == (runs[0]["folder"] / "plan.json").resolve()


def test_a_run_that_fails_before_it_begins_leaves_latest_where_it_was(
    start_folder: Path, runs: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([]) == 0
    first = (start_folder / "outputs" / "latest").resolve()

    def refuse(config: Any, *, on_begin: Any, **_: Any) -> int:
        raise ConfigError("model: no such thing")

    monkeypatch.setattr(sys.modules["ckptplan.run"], "run_job", refuse)
    assert cli.main([]) == 2
    assert (start_folder / "outputs" / "latest").resolve() == first


def test_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ckptplan {ckptplan.__version__}\n"


def test_latest_is_a_text_file_where_links_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("links are not allowed here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    for name in ("first", "second"):
        cli.point_latest_at(tmp_path / "train" / name, tmp_path)
    assert (tmp_path / "latest").read_text() == "train/second\n"
    assert {path.name for path in tmp_path.iterdir()} == {"latest"}


def test_a_run_folder_given_by_hand_is_all_that_is_written(start_folder: Path, runs: list[Call]) -> None:
    assert cli.main(["hydra.run.dir=mine"]) == 0
    assert {path.name for path in start_folder.iterdir()} == {"mine"}


def test_a_model_of_the_users_own_is_found_where_they_start(start_folder: Path, runs: list[Call]) -> None:
    (start_folder / "my_net_of_this_test.py").write_text("class Net:\n    def __init__(self, size: int): ...\n")
    arguments = ["~model", "+model._target_=my_net_of_this_test.Net"]
    assert cli.main([*arguments, "+model.size=3"]) == 0
    assert cli.main(arguments) == 2
    assert runs[0]["config"].model == {"_target_": "my_net_of_this_test.Net", "size": 3}


def test_the_scripts_at_the_root_are_these_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for script, name in (("train.py", "train_main"), ("sweep.py", "sweep_main")):
        monkeypatch.setattr(cli, name, lambda name=name: called.append(name))
        runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    assert called == ["train_main", "sweep_main"]


@pytest.mark.parametrize("script", ["train.py", "sweep.py"])
def test_ctrl_c_while_python_still_imports_is_a_quiet_end(tmp_path: Path, script: str) -> None:
    (tmp_path / "hydra.py").write_text("")  # no run can begin
    (tmp_path / "omegaconf.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / script)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["steps=5", "-m", "seed=1,2"], ["-m", "steps=5", "seed=1,2"]),
        (["a=1", "--config-dir", "mine", "b=2", "-m"], ["--config-dir", "mine", "-m", "a=1", "b=2"]),
        (["-m", "seed=1,2"], ["-m", "seed=1,2"]),
        (["seed=1,2", "-m"], ["seed=1,2", "-m"]),
        (["--steps=5", "seed=1"], ["--steps=5", "seed=1"]),
    ],
    ids=" ".join,
)
def test_flags_may_stand_between_overrides(typed: list[str], meant: list[str]) -> None:
    assert overrides_together(typed) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ([], ["-m", "sweep=default"]),
        (["planner=dp,greedy"], ["-m", "sweep=default", "planner=dp,greedy"]),
        (["sweep=mine", "-m"], ["sweep=mine", "-m"]),
        (["--cfg", "job"], ["sweep=default", "--cfg", "job"]),
        (["--help"], ["sweep=default", "--help"]),
    ],
    ids=" ".join,
)
def test_a_sweep_takes_lists_of_values(typed: list[str], meant: list[str]) -> None:
    assert cli.sweep_arguments(typed) == meant


def test_hydras_environment_is_put_back(start_folder: Path, runs: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    cli.main([])
    assert sys.argv == before
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize("filename", ["/data/out/metrics.jsonl", None])
def test_a_full_disk_is_one_message_that_names_the_file(
    start_folder: Path, runs: list[Call], capfd: pytest.CaptureFixture[str], filename: str | None
) -> None:
    def fail() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", filename)

    answer_with(fail)
    assert cli.main([]) == 1
    output = capfd.readouterr()
    assert output.err.startswith(
        f"error: {filename or 'a file of the run'} could not be written: No space left on device"
    )
    assert "Traceback" not in output.err + output.out


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("hydra.run.dir=file", 1, "error: file could not be made or read: File exists"),
        ("hydra.run.dir=file/x", 1, "error: file/x could not be made or read: Not a directory"),
        (f"hydra.run.dir={'a' * 300}", 1, f"error: {'a' * 300}/result.json could not be made or read: File name too"),
        ("hydra.run.dir=log", 1, "error: {here}/log/train.log could not be made or read: Is a directory"),
        ("output_dir=file", 2, "error: output_dir=file/train: the run folder cannot be made: [Errno 20]"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_message_that_names_it(
    start_folder: Path, runs: list[Call], capfd: pytest.CaptureFixture[str], typed: str, code: int, message: str
) -> None:
    (start_folder / "file").touch()
    (start_folder / "log" / "train.log").mkdir(parents=True)
    assert cli.main([typed]) == code
    output = capfd.readouterr()
    assert output.err.startswith(message.format(here=start_folder))
    assert "Traceback" not in output.err + output.out
    assert runs == []


def test_where_every_file_is_too_large_that_is_told(
    start_folder: Path, runs: list[Call], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As under ``ulimit -f``, where the first file that is too large is Hydra's."""
    from hydra.core import utils

    def fail(*_: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(utils, "_save_config", fail)
    assert cli.main([]) == 1
    assert capfd.readouterr().err.startswith("error: a file of the run could not be written: File too large.")
