"""Which run ``resume=`` means, and with what it goes on: by folder, name, "latest" and "auto" (case C21)."""

from __future__ import annotations

import os
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptplan import cli, sweeps
from ckptplan.config.loading import config_yaml, resolve
from ckptplan.config.wording import hydra_text, shell_override
from ckptplan.errors import ConfigError
from ckptplan.runs import find_run, latest_folder, merge_typed, remember_typed, typed_value

AWKWARD = ["a=b, {c}", "#1", "it's (d) [e]", "@home 100%", "~/runs", "1e-3", "007", "null", "größe", 'say "hi"']
Call = dict[str, Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """``run_job`` and ``run_jobs`` replaced: what they were called with."""
    found: list[Call] = []

    def run_job(config: Any, *, folder: Path, overrides: list[str], **_: Any) -> int:
        found.append({"config": config, "folder": folder, "overrides": overrides})
        return 0

    def run_jobs(jobs: Any, *_: Any, **__: Any) -> None:
        found.extend({"folder": job.folder, "overrides": list(job.overrides), "command": job.command} for job in jobs)

    stub = types.ModuleType("ckptplan.run")
    stub.run_job = run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ckptplan.run", stub)
    monkeypatch.setattr(sweeps, "run_jobs", run_jobs)
    return found


@pytest.fixture
def make_run(compose: Callable[..., Any]) -> Callable[..., Path]:
    """``make_run(folder, "steps=5", ...)``: what a run leaves that can be resumed."""
    ages = iter(range(1_000_000, 2_000_000))

    def make(folder: Path, *typed: str, holds_state: bool = True) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config_yaml(resolve(compose(*typed))), encoding="utf-8")
        age_s = next(ages)
        os.utime(folder / "config.yaml", (age_s, age_s))
        remember_typed(folder, typed)
        if holds_state:
            (folder / "state" / "step-5").mkdir(parents=True)
            (folder / "state" / "step-5" / "manifest.json").touch()
        return folder

    return make


def words(*typed: str) -> list[str]:
    """What a shell makes of a command line in the documented form."""
    return shlex.split(" ".join(typed))


@pytest.mark.parametrize("text", AWKWARD)
def test_an_awkward_folder_and_name_are_resumed_in_the_documented_form(
    start_folder: Path, calls: list[Call], make_run: Callable[..., Path], text: str
) -> None:
    """With and without -m, whatever hydra.job.chdir says: each form of each text in one of the four ways, in turn."""
    folder = make_run(start_folder / "outputs" / text, "steps=7", f"name={hydra_text(text)}")
    (start_folder / "outputs" / "latest").symlink_to(folder, target_is_directory=True)
    ways = ([], ["hydra.job.chdir=true"], ["-m"], ["-m", "hydra.job.chdir=true"])
    forms = (str(folder), os.path.join("outputs", text), text, "latest")  # noqa: PTH118 ("~" is no home here)
    for number, given in enumerate(forms):
        more = ways[(AWKWARD.index(text) + number) % len(ways)]
        calls.clear()
        code = cli.main([*more, *words(shell_override("resume", given))])
        assert (code, len(calls)) == (0, 1)
        assert calls[0]["folder"] == folder
        assert "steps=7" in calls[0]["overrides"]
        if more[:1] != ["-m"]:
            assert (calls[0]["config"].steps, calls[0]["config"].name) == (7, text)
            assert calls[0]["config"].resume == str(folder)
            assert calls[0]["config"].state.mode == "async"
    assert sorted(path.name for path in start_folder.iterdir()) == ["outputs"]


def test_what_is_typed_now_changes_what_was_typed_before(
    start_folder: Path, calls: list[Call], make_run: Callable[..., Path]
) -> None:
    folder = make_run(start_folder / "outputs" / "run", "model=vit", "model.layers=2", "steps=7", "budget_frac=0.6")
    assert cli.main(["resume=outputs/run", "steps=9", "budget_bytes=6MiB", "planner=greedy"]) == 0
    config = calls[0]["config"]
    assert (config.steps, config.model["layers"], config.planner.name) == (9, 2, "greedy")
    assert (config.budget_frac, config.budget_bytes) == (None, "6MiB")
    assert not (folder / ".hydra" / "hydra.yaml").exists()  # a run that is refused leaves its folder as it was
    assert cli.main(["resume=outputs/run", "model=gpt"]) == 0  # a group chosen anew takes its old keys away
    assert calls[1]["config"].model["layers"] == 8


@pytest.mark.parametrize(
    ("earlier", "now", "merged"),
    [
        (["steps=3", "resume=x"], [], ["steps=3"]),
        (["steps=3", "seed=1"], ["steps=4"], ["seed=1", "steps=4"]),
        (["planner=text", "planner.text='K0'"], ["planner=dp"], ["planner=dp"]),
        (["~model", "+model._target_=a.B", "+model.c=1"], ["model=gpt"], ["model=gpt"]),
        (["+model.c=1", "+model.d=2"], ["model.c=3"], ["+model.d=2", "+model.c=3"]),
        (["budget_frac=0.5", "steps=3"], ["max_slowdown=1.2"], ["steps=3", "max_slowdown=1.2"]),
        (["+data.batch_size=4", "steps=3"], ["data.batch_size=3"], ["steps=3", "+data.batch_size=3"]),
        (["++data.batch_size=4"], ["~data.batch_size"], ["~data.batch_size"]),
        (["hydra.run.dir=x", "hydra/launcher=basic", "steps=3"], ["seed=2"], ["steps=3", "seed=2"]),
    ],
)
def test_overrides_merge_key_by_key(earlier: list[str], now: list[str], merged: list[str]) -> None:
    assert merge_typed(earlier, now) == merged


def test_auto_is_the_folder_named_else_the_newest_run_of_the_same_configuration(
    start_folder: Path, calls: list[Call], make_run: Callable[..., Path]
) -> None:
    same = ("steps=7", "seed=3")
    make_run(start_folder / "outputs" / "train" / "old", *same, "name=a")
    newest = make_run(start_folder / "outputs" / "train" / "new", *same, "log_every=5")
    make_run(start_folder / "outputs" / "train" / "empty", *same, holds_state=False)
    make_run(start_folder / "outputs" / "train" / "other", "steps=8", "seed=3")
    own = make_run(start_folder / "own", "steps=8", "seed=3")

    def taken(*typed: str) -> Path:
        assert cli.main([*typed, "resume=auto"]) == 0
        assert calls[-1]["config"].resume == "auto"
        return calls[-1]["folder"]

    assert taken(*same) == newest
    assert taken(*same, f"hydra.run.dir={own}") == own
    for begun in (start_folder / "fresh", make_run(start_folder / "killed_early", *same, holds_state=False)):
        assert taken(*same, f"hydra.run.dir={begun}") == begun
    fresh = taken("steps=9")
    assert fresh.is_relative_to(start_folder / "outputs" / "train")
    assert not (fresh / "config.yaml").exists()


def test_a_single_run_saves_a_job_of_a_sweep_does_not(start_folder: Path, calls: list[Call]) -> None:
    for typed, mode in (([], "async"), (["hydra.job.num=3"], "off"), (["hydra.job.num=3", "state=sync"], "sync")):
        assert cli.main(typed) == 0
        assert calls[-1]["config"].state.mode == mode
    assert cli.main(["-m", "hydra/launcher=basic", "seed=1,2"]) == 0
    assert [call["config"].state.mode for call in calls[-2:]] == ["off", "off"]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (
            "nowhere",
            ["resume=nowhere", "neither a run folder nor the name of a run", "allowed: first"],
        ),
        ("frist", ["did you mean: first"]),
        ("outputs/bare", ["holds no state", "type: 'resume="]),
        ("second", ["no run of that name holds a state"]),
        ("", ["resume=", "empty"]),
    ],
)
def test_a_wrong_one_is_told_with_what_there_is(
    start_folder: Path, calls: list[Call], make_run: Callable[..., Path], capsys: Any, wanted: str, told: list[str]
) -> None:
    make_run(start_folder / "outputs" / "run", "name=first")
    make_run(start_folder / "outputs" / "bare", "name=second", holds_state=False)
    assert cli.main([f"resume={wanted}"]) == 2
    error = capsys.readouterr().err
    assert [text for text in told if text not in error] == [], error
    assert calls == []


def test_latest_without_any_run_and_as_a_text_file(
    start_folder: Path, make_run: Callable[..., Path], capsys: Any
) -> None:
    assert cli.main(["resume=latest"]) == 2
    assert "there is no run in" in capsys.readouterr().err
    folder = make_run(start_folder / "outputs" / "train" / "one")
    (start_folder / "outputs" / "latest").write_text("train/one\n")
    assert latest_folder(Path("outputs")) == folder
    assert find_run("latest", Path("outputs")).folder == folder


def test_latest_is_the_newest_run_that_holds_a_state_and_tells_which_it_passes_over(
    start_folder: Path, make_run: Callable[..., Path], caplog: Any
) -> None:
    """A run that only planned, or ended before its first state, is the newest; so is what is left of a deleted one."""
    make_run(start_folder / "outputs" / "train" / "older")
    held = make_run(start_folder / "outputs" / "train" / "held", "steps=7")
    bare = make_run(start_folder / "outputs" / "train" / "bare", "steps=8", holds_state=False)
    link = start_folder / "outputs" / "latest"
    for target, told in ((bare, f"{bare} holds no state"), (start_folder / "outputs" / "gone", "gone is no run")):
        link.unlink(missing_ok=True)
        link.symlink_to(target, target_is_directory=True)
        caplog.clear()
        assert find_run("latest", Path("outputs")).folder == held
        assert told in caplog.text
        assert f"the newest run that holds one, {held}" in caplog.text


@pytest.mark.parametrize("more", [[], ["-m"]])
def test_a_run_whose_overrides_are_gone_goes_on_under_the_same_command_only(
    start_folder: Path, calls: list[Call], make_run: Callable[..., Path], capsys: Any, more: list[str]
) -> None:
    run = make_run(start_folder / "here", "model=vit", "model.layers=2", "steps=7")
    (run / ".hydra" / "overrides.yaml").unlink()
    assert cli.main([*more, "resume=here"]) == 2
    told = capsys.readouterr().err
    assert "its .hydra/overrides.yaml is gone" in told
    assert "model._target_: ckptplan.models.vit.ViT -> ckptplan.models.gpt.GPT" in told
    assert f"type: 'resume=\"{run}\"' and beside it what was typed for the run" in told
    assert calls == []
    assert cli.main([*more, "resume=here", "model=vit", "model.layers=2", "steps=9", "log_every=1"]) == 0
    assert (calls[0]["folder"], "steps=9" in calls[0]["overrides"]) == (run, True)


@pytest.mark.parametrize("key", ["output_dir", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"])
@pytest.mark.parametrize("empty", ["", "''", '" "'])
@pytest.mark.parametrize("more", [[], ["-m"]])
def test_an_empty_folder_name_is_refused(
    start_folder: Path, calls: list[Call], capsys: Any, key: str, empty: str, more: list[str]
) -> None:
    """``output_dir=`` used to be the root of the disk, ``hydra.run.dir=`` and ``hydra.sweep.dir=`` the start folder."""
    assert cli.main([*more, f"{key}={empty}"]) == 2
    told = capsys.readouterr().err
    assert f"{key}=: empty; expected a folder\n  type: {key}=" in told
    assert (calls, list(start_folder.iterdir())) == ([], [])


def test_a_state_is_named_by_its_folder(start_folder: Path, make_run: Callable[..., Path]) -> None:
    folder = make_run(start_folder / "run")
    found = find_run("run/state/step-5", Path("outputs"))
    assert (found.folder, found.checkpoint_id, found.path) == (folder, "step-5", str(folder / "state" / "step-5"))


def test_the_last_of_several_values_counts() -> None:
    assert typed_value("resume", ["resume=a", "steps=3", 'resume="b, c"']) == "b, c"
    assert typed_value("resume", ["resume=null"]) is None
    assert typed_value("resume", ["name=a"]) is None


def test_a_state_that_was_set_aside_says_how_to_go_on_from_it(
    start_folder: Path, make_run: Callable[..., Path]
) -> None:
    run = make_run(start_folder / "here")
    aside = run / "state" / "superseded" / "step-5"
    aside.parent.mkdir()
    (run / "state" / "step-5").rename(aside)
    with pytest.raises(ConfigError, match=r"was set aside .* move it back, to .*/here/state/step-5\n.*resume=.*step-5"):
        find_run(str(aside), start_folder / "outputs")


@pytest.mark.parametrize("inside", ["state", "state/step-99", "state/superseded"])
def test_what_is_no_state_of_a_run_is_told_with_the_states_there_are(
    start_folder: Path, make_run: Callable[..., Path], inside: str
) -> None:
    run = make_run(start_folder / "here")
    with pytest.raises(ConfigError, match=r"no state of the run .*here; it holds step-5\n.*resume=.*here"):
        find_run(str(run / inside), start_folder / "outputs")


def test_a_run_that_has_lost_its_configuration_is_found_by_its_states(
    start_folder: Path, make_run: Callable[..., Path]
) -> None:
    run = make_run(start_folder / "here", "steps=7")
    (run / "config.yaml").unlink()
    found = find_run("here", start_folder / "outputs")
    assert (found.folder, found.typed()) == (run, ["steps=7"])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"5", b"{a: 1}", b"["])
def test_damaged_words_of_an_earlier_run_are_told(
    start_folder: Path, make_run: Callable[..., Path], content: bytes
) -> None:
    run = make_run(start_folder / "here")
    (run / ".hydra" / "overrides.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"its \.hydra/overrides\.yaml"):
        find_run(str(run), start_folder / "outputs").typed()


def test_the_folder_of_a_sweep_is_told_apart(start_folder: Path) -> None:
    (start_folder / "sw").mkdir()
    (start_folder / "sw" / "multirun.yaml").touch()
    with pytest.raises(ConfigError, match=r"the folder of a sweep(?s:.*)sweep\.resume=.*sw"):
        find_run("sw", start_folder / "outputs")
