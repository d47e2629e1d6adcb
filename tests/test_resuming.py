"""Runs that are cut and go on, in this process: they are the run that was never cut, to the bit (case C14)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ckptplan import resuming
from ckptplan.config.loading import load_config, resolve
from ckptplan.errors import ConfigError, SaveFailedError
from ckptplan.record import StateRecord, load_metrics, load_result
from ckptplan.run import planning, preparing, profiling, proving, run_job, trained
from ckptplan.state import CheckpointManager
from ckptplan.training import Position
from tests import run_models

NOISY = (
    "~model",
    "+model._target_=tests.run_models.NoisyNet",
    "~data",
    "+data._target_=tests.run_models.noisy_samples",
    "+data.batch_size=4",
    "runtime=cpu",
    "runtime.threads=1",
    "logger=none",
    "cost=flops",
    "budget_frac=0.95",
    "steps=40",
    "accumulate=2",
    "scheduler.warmup_steps=5",
    "clip_norm=0.5",
    "eval_every=3",
    "profile.num_warmup=0",
    "profile.num_trials=1",
    "proof.latency_trials=0",
    "state=async",
)
SAMPLES = 103
SHORT = ("steps=4", "scheduler.warmup_steps=1")


@dataclass
class Ran:
    """One call of ``run_job``: its exit code, what it left, and the weights and sample numbers of its training."""

    code: int
    folder: Path
    weights: dict[str, torch.Tensor]
    seen: list[int]

    @property
    def result(self) -> dict[str, Any]:
        return load_result(self.folder)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        keys = ("step", "epoch", "train/loss", "lr", "grad_norm")
        return [tuple(row[key] for key in keys) for row in load_metrics(self.folder) if "train/loss" in row]

    def state(self, step: int) -> dict[str, Any]:
        with CheckpointManager(self.folder / "state", mode="sync") as states:
            return states.load(f"step-{step}")


Run = Callable[..., Ran]


@pytest.fixture
def run(compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """``run("steps=4", stop_at=2)``; with ``resume=ran.folder`` it goes on. The streams are spoilt before each."""
    numbers = iter(range(100))
    whole, after_step = trained.train, resuming.RunStates.after_step
    made: dict[str, Any] = {}

    def train(model: Any, *arguments: Any, **options: Any) -> Any:
        run_models.SEEN.clear()
        try:
            return whole(model, *arguments, **options)
        finally:
            made["weights"] = {name: value.clone() for name, value in model.model.state_dict().items()}

    def stopping(self: Any, position: Any, figures: Any) -> None:
        after_step(self, position, figures)
        if position.step == made["stop_at"]:
            os.kill(os.getpid(), made["signal"])

    monkeypatch.setattr(trained, "train", train)
    monkeypatch.setattr(resuming.RunStates, "after_step", stopping)

    def call(
        *overrides: str, resume: Path | str | None = None, folder: Path | None = None, stop_at: int | None = None,
        sent: int = signal.SIGTERM, base: tuple[str, ...] = NOISY,
    ) -> Ran:  # fmt: skip
        if folder is None:
            folder = Path(resume) if isinstance(resume, Path) else tmp_path / f"run{next(numbers)}"
        folder.mkdir(exist_ok=True)
        typed = [*base, *overrides, *([] if resume is None else [f"resume='{resume}'"])]
        config = compose(*typed)
        made.update(weights={}, stop_at=stop_at, signal=sent)
        random.seed(99)
        np.random.seed(99)  # noqa: NPY002
        torch.manual_seed(99)
        code = run_job(load_config(config), resolved=resolve(config), folder=folder, overrides=typed)
        return Ran(code, folder, made["weights"], [n for n in run_models.SEEN if n < SAMPLES])

    yield call
    run_models.SEEN.clear()


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Equal to the bit, types included."""
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), path
    elif isinstance(left, np.ndarray):
        assert left.tobytes() == right.tobytes(), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}.{index}")
    else:
        assert left == right, path


TRAINED = ("model", "optimizer", "random", "position")


class TestTheSameRun:
    """C14."""

    def test_wherever_it_is_cut_it_goes_on_to_the_bit(self, run: Run) -> None:
        whole = run()
        assert whole.code == 0
        assert whole.result["plan"]["recomputed"] > 0
        for epoch in range(3):
            assert sorted(whole.seen[epoch * SAMPLES :][:SAMPLES]) == list(range(SAMPLES))
        assert whole.seen[:SAMPLES] != whole.seen[SAMPLES : 2 * SAMPLES]
        for cuts in ((1,), (7,), (13,), (5, 9, 20)):
            part = run(stop_at=cuts[0])
            seen = list(part.seen)
            for cut in (*cuts[1:], None):
                assert part.code == 143
                part = run(resume=part.folder, stop_at=cut)
                seen += part.seen
            assert part.code == 0
            assert part.rows == whole.rows
            assert seen == whole.seen
            assert_same(part.weights, whole.weights)
            mine, right = part.state(40), whole.state(40)
            for item in TRAINED:
                assert_same(mine[item], right[item], item)
            assert part.result["state"]["resumed_step"] == cuts[-1]
            assert part.result["training"]["first_loss"] == whole.result["training"]["first_loss"]
            assert part.result["training"]["last_loss"] == whole.result["training"]["last_loss"]

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_other_processes_may_read_the_data_and_their_number_may_change(self, run: Run) -> None:
        whole = run("steps=20")
        part = run("steps=20", "data_workers=2", stop_at=7)
        assert part.seen == []  # nothing of the training was read by this process
        digest = part.result["plan"]["digest"]
        part = run("steps=20", "data_workers=0", resume=part.folder, stop_at=9)
        assert part.result["plan"]["digest"] == digest
        part = run("steps=20", "data_workers=1", resume=part.folder)
        assert (part.code, part.rows) == (0, whole.rows)
        assert_same(part.weights, whole.weights)
        mine, right = part.state(20), whole.state(20)
        for item in TRAINED:
            assert_same(mine[item], right[item], item)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_data_that_starts_processes_of_its_own_goes_on_to_the_bit(self, run: Run) -> None:
        own = tuple(text.replace("noisy_samples", "OwnLoader") for text in NOISY)
        whole = run("steps=20", base=own)
        part = run("steps=20", base=own, stop_at=7)
        part = run("steps=20", base=own, resume=part.folder, stop_at=14)
        part = run("steps=20", base=own, resume=part.folder)
        assert (part.code, part.rows) == (0, whole.rows)
        assert_same(part.weights, whole.weights)
        with pytest.raises(ConfigError, match=r"data_workers=2: OwnLoader reads its batches by itself"):
            run("steps=20", "data_workers=2", base=own)

    @pytest.mark.parametrize(
        "changed",
        [("eval_every=7", "log_every=1"), ("state=off",), ("state.every=1", "state=sync"), ("state.every=3",)],
    )
    def test_how_often_one_evaluates_logs_or_saves_changes_nothing(self, run: Run, changed: tuple[str, ...]) -> None:
        whole, other = run("steps=16"), run("steps=16", *changed)
        assert other.rows == whole.rows
        assert_same(other.weights, whole.weights)


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything that a refused resume must leave as it was."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "train.log")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refuse(name: str) -> Callable[..., Any]:
    return lambda *_, **__: pytest.fail(f"{name} was called")


class TestThePlan:
    def test_the_stored_one_is_used_and_nothing_is_measured_again(self, run: Run, monkeypatch) -> None:
        part = run("steps=6", stop_at=2)
        before = part.result["plan"]
        monkeypatch.setattr(profiling, "profile_model", refuse("profile_model"))
        monkeypatch.setattr(planning, "plan_for_budget", refuse("plan_for_budget"))
        part = run("steps=6", resume=part.folder)
        assert part.result["plan"] == before
        assert part.result["profile"]["source"] == "resumed"

    def test_a_micro_batch_that_was_chosen_stays(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        chosen = ("steps=6", "state.every=2", "batch=largest", "budget_frac=0.9")
        whole = run(*chosen)
        part = run(*chosen, stop_at=3)
        monkeypatch.setattr(preparing, "choose_batch", None)
        part = run(*chosen, resume=part.folder)
        assert part.result["batch"]["size"] == whole.result["batch"]["size"]
        assert part.result["profile"]["source"] == "resumed"
        assert (part.code, part.rows) == (0, whole.rows)
        assert_same(part.weights, whole.weights)

    @pytest.mark.parametrize("change", ["planner=greedy", "budget_frac=1", "cost=time", "runtime.dtype=bf16_mixed"])
    def test_another_is_made_when_what_it_depends_on_has_changed(self, run: Run, monkeypatch, change: str) -> None:
        part = run("steps=6", stop_at=2)
        planned: list[Any] = []
        original = planning.plan_for_budget
        monkeypatch.setattr(planning, "plan_for_budget", lambda *a: planned.append(original(*a)) or planned[-1])
        part = run("steps=6", change, resume=part.folder)
        assert (part.code in (0, 4), len(planned), len(part.rows)) == (True, 1, 6)

    def test_another_plan_trains_the_same(self, run: Run) -> None:
        whole, part = run("steps=8"), run("steps=8", stop_at=3)
        for stop, plan in ((5, "K0 R(1) K2 R(3)"), (6, "R(0) R(1) K2 K3")):
            part = run("steps=8", "planner=text", f"planner.text='{plan}'", resume=part.folder, stop_at=stop)
        part = run("steps=8", "planner=none", resume=part.folder)
        assert part.rows == whole.rows
        assert_same(part.weights, whole.weights)


class TestOtherSettings:
    @pytest.mark.parametrize(("size", "accumulate"), [(8, 1), (4, 3), (5, 1), (3, 2)])
    def test_each_sample_is_still_seen_once_in_other_micro_batches(self, run: Run, size: int, accumulate: int) -> None:
        part = run(stop_at=2)
        seen = list(part.seen)
        other = (f"+data.batch_size={size}", f"accumulate={accumulate}", "budget_frac=1")
        base = tuple(text for text in NOISY if not text.startswith(("+data.batch_size", "accumulate")))
        part = run(*other, base=base, resume=part.folder, stop_at=4)
        seen += part.seen
        part = run(*other, base=base, resume=part.folder)
        seen += part.seen
        assert part.code in (0, 4)
        assert sorted(seen[:SAMPLES]) == list(range(SAMPLES))
        assert len(part.rows) == 40

    def test_another_model_is_refused_with_every_name_and_nothing_changes(self, run: Run) -> None:
        part = run("steps=6", stop_at=2)
        before = files_of(part.folder)
        with pytest.raises(ConfigError) as refused:
            run("steps=6", "+model.depth=5", "+model.width=16", resume=part.folder)
        told = str(refused.value)
        assert "nothing has been changed" in told
        assert "model.width: None -> 16" in told
        for name in ("layers.4.0.weight", "stem.weight", "layers.0.0.weight", "head.weight"):
            assert name in told, told
        after = files_of(part.folder)
        assert {name for name in before if before[name] != after[name]} == set()

    def test_an_argument_of_the_optimizer_typed_now_holds(self, run: Run) -> None:
        part = run(*SHORT, "optimizer.weight_decay=0.0", stop_at=2)
        run(*SHORT, "optimizer.weight_decay=0.25", "optimizer.lr=0.5", resume=part.folder)
        (group,) = part.state(4)["optimizer"]["param_groups"]
        assert (group["weight_decay"], list(group["betas"])) == (0.25, [0.9, 0.95])
        assert [lr for _, _, _, lr, _ in part.rows[2:]] != [lr for _, _, _, lr, _ in run(*SHORT).rows[2:]]
        with pytest.raises(ConfigError, match=r"optimizer\._target_: .*AdamW -> .*SGD"):
            run("steps=6", "optimizer=sgd", resume=part.folder)

    @pytest.mark.parametrize("content", ["", "[1]", '{"schema": "ckptplan.profile/0"}', None, "[" * 100_000])
    def test_a_profile_that_cannot_be_read_any_more_is_measured_again(self, run: Run, caplog, content) -> None:
        """It is damaged, or another version of this package has written it: None, with a key missing."""
        part = run(*SHORT, "cost=time", stop_at=2)  # of which no two measurements are the same
        path = part.folder / "profile.json"
        if content is None:
            profile = json.loads(path.read_text())
            del profile["blocks"][0]["kind"]
            content = json.dumps(profile)
        path.write_text(content)
        again = run(*SHORT, "cost=time", resume=part.folder)
        assert again.code == 0
        assert "the blocks are measured again and the plan is made anew: " in caplog.text
        assert [row[0] for row in again.rows] == [1, 2, 3, 4]

    def test_a_finished_run_says_so_and_goes_on_to_more_steps(self, run: Run, caplog) -> None:
        whole = run("steps=4", "scheduler=constant", "scheduler.warmup_steps=0")
        before = files_of(whole.folder)
        caplog.set_level("INFO")
        assert run("steps=4", "scheduler=constant", "scheduler.warmup_steps=0", resume=whole.folder).code == 0
        assert "is finished: step 4" in caplog.text
        assert files_of(whole.folder) == before
        assert "without effect: model.width" not in caplog.text
        assert (
            run(
                "steps=4", "scheduler=constant", "scheduler.warmup_steps=0", "+model.width=48", resume=whole.folder
            ).code
            == 0
        )
        assert re.search("without effect: model.width: None -> 48", caplog.text)
        assert files_of(whole.folder) == before
        more = run("steps=9", "scheduler=constant", "scheduler.warmup_steps=0", resume=whole.folder)
        assert more.rows == run("steps=9", "scheduler=constant", "scheduler.warmup_steps=0").rows
        with pytest.raises(ConfigError, match=r"steps=3: the state to go on from is that of step 9"):
            run("steps=3", "scheduler.warmup_steps=0", resume=whole.folder)

    def test_the_loss_scale_is_part_of_the_state(self, tmp_path: Path, compose) -> None:
        def made() -> resuming.Trained:
            model = torch.nn.Linear(2, 2)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            return resuming.Trained(model, torch.optim.SGD(model.parameters(), 0.1), scaler, [], torch.device("cpu"))

        config = load_config(compose("state=sync"))
        first, second = made(), made()
        for _ in range(4):
            first.optimizer.zero_grad()
            first.scaler.scale(first.model(torch.ones(1, 2)).sum()).backward()
            first.scaler.step(first.optimizer)
            first.scaler.update()
        with resuming.RunStates(tmp_path, config.state, StateRecord(), []) as states:
            states.begin(first, {"made_for": {}}, {"optimizer": config.optimizer})
            states.at_end(Position(4))
        with resuming.RunStates(tmp_path, config.state, StateRecord(), []) as states:
            stored = states.find(str(tmp_path))
            states.restore(stored, second, config)
        assert second.scaler.state_dict() == first.scaler.state_dict()
        assert second.scaler.state_dict()["scale"] == 16.0


class TestFaults:
    def damage(self, folder: Path, step: int) -> None:
        path = next((folder / "state" / f"step-{step}").glob("model*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(bytes(content))

    def test_auto_takes_the_newest_good_state_and_says_so_others_name_it(self, run: Run) -> None:
        whole = run("steps=6")
        part = run("steps=6", "state.every=1", "state.keep_last=3", stop_at=5)
        self.damage(part.folder, 5)
        before = files_of(part.folder)
        with pytest.raises(ConfigError, match=r"(?s)step-5: damaged: model.*type: 'resume=\S*step-4") as refused:
            run("steps=6", resume=part.folder)
        assert files_of(part.folder) == before
        part = run("steps=6", resume="auto", folder=part.folder)
        assert (part.code, part.result["state"]["resumed_step"]) == (0, 4)
        assert "went on from step-4, because step-5 is damaged" in part.result["notes"][0]
        assert part.rows == whole.rows
        assert "resume=auto" in str(refused.value)

    def test_a_damaged_last_state_is_no_finished_run(self, run: Run) -> None:
        part = run(*SHORT, "state.every=2")
        self.damage(part.folder, 4)
        part = run(*SHORT, resume="auto", folder=part.folder)
        assert part.result["state"]["resumed_step"] == 2
        assert [row[0] for row in part.rows] == [1, 2, 3, 4]

    def test_an_older_state_can_be_named_and_later_lines_are_set_aside(self, run: Run) -> None:
        whole = run("steps=6", "state.every=2", "state.keep_last=3")
        rows = whole.rows
        with (whole.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "tr')  # a kill in the middle of a line
        part = run("steps=6", resume=str(whole.folder / "state" / "step-2"), folder=whole.folder)
        assert part.rows == rows
        set_aside = load_metrics(whole.folder / "metrics.discarded.jsonl")
        assert [row["step"] for row in set_aside if "train/loss" in row] == [3, 4, 5, 6]
        assert (whole.folder / "result.earlier.json").exists()
        assert sorted(p.name for p in (whole.folder / "state" / "superseded").iterdir()) == ["step-4", "step-6"]

    @pytest.mark.parametrize(("failing", "code"), [(1, 0), (2, None)])
    def test_a_save_that_fails_costs_a_note_unless_it_is_the_last(self, run: Run, monkeypatch, failing, code) -> None:
        class Failing(CheckpointManager):
            def save(self, checkpoint_id: Any, payload: Any, **options: Any) -> Any:
                if checkpoint_id == f"step-{2 * failing}":
                    payload = {**payload, "model": {"no form": lambda: None}}
                return super().save(checkpoint_id, payload, **options)

        monkeypatch.setattr(resuming, "CheckpointManager", Failing)
        if code is None:
            with pytest.raises(SaveFailedError, match="the last state could not be saved: step-4"):
                run(*SHORT, "state.every=2")
            return
        part = run(*SHORT, "state.every=2")
        assert (part.code, part.result["state"]["saved"]) == (code, 1)
        assert "step-2 was not saved: one value has no exact form" in part.result["notes"][0]

    def test_two_runs_do_not_go_on_in_one_folder(self, run: Run) -> None:
        part = run(*SHORT, stop_at=2)
        with CheckpointManager(part.folder / "state", mode="sync") as other:
            other.claim()
            with pytest.raises(ConfigError, match="is being written by this process"):
                run(*SHORT, resume=part.folder)
        assert run(*SHORT, resume=part.folder).code == 0

    @pytest.mark.parametrize("resume", [None, "auto"])
    def test_a_new_run_in_a_folder_that_another_has_begun_in_changes_nothing_there(
        self, run: Run, tmp_path: Path, resume: str | None
    ) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("of the other run\n")
        with CheckpointManager(folder / "state", mode="sync") as other:
            other.claim()
            with pytest.raises(ConfigError, match="is being written by this process") as refused:
                run(*SHORT, folder=folder, resume=resume)
            assert "hydra.run.dir=<a new folder>" in str(refused.value)
            other.save("step-7", {"step": 7})
        if resume is None:
            with pytest.raises(ConfigError, match="the states of a run lie there already, the newest is step-7"):
                run(*SHORT, folder=folder)
        assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "state"}
        assert (folder / "metrics.jsonl").read_text() == "of the other run\n"

    def test_retention_keeps_the_newest_and_the_best(self, run: Run) -> None:
        settings = ("steps=8", "state.every=1", "eval_every=1", "state.keep_last=1", "state.keep_best=1")
        part = run(*settings)
        losses = {row["step"]: row["eval/loss"] for row in load_metrics(part.folder) if "eval/loss" in row}
        best = min(losses, key=lambda step: (losses[step], -step))
        kept = {path.name for path in (part.folder / "state").glob("step-*")}
        assert kept == {f"step-{best}", "step-8"}


class TestSignals:
    """C25, one process."""

    @pytest.mark.parametrize(("module", "phase"), [(profiling, "profile_model"), (proving, "prove_model")])
    def test_before_the_first_update_there_is_nothing_to_save(
        self, run: Run, monkeypatch, caplog, module: ModuleType, phase: str
    ) -> None:
        original = getattr(module, phase)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments, **options)

        monkeypatch.setattr(module, phase, interrupted)
        caplog.set_level("INFO")
        part = run("steps=6")
        assert (part.code, part.result["state"]["path"]) == (143, None)
        assert "there was no update: nothing to save" in caplog.text
        assert not list(part.folder.glob("state/step-*"))

    @pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_in_evaluation_saves_that_step_and_the_evaluation_is_made_up(
        self, run: Run, monkeypatch, sent: int, code: int
    ) -> None:
        whole = run("steps=6")
        from ckptplan.data.dataset import Dataset

        original = Dataset.eval_batches

        def interrupted(self: Any) -> Any:
            os.kill(os.getpid(), sent)
            return original(self)

        with monkeypatch.context() as patched:
            patched.setattr(Dataset, "eval_batches", interrupted)
            part = run("steps=6")
        assert (part.code, part.result["state"]["step"]) == (code, 3)
        part = run("steps=6", resume=part.folder)
        assert part.rows == whole.rows
        lines = [(row["step"], row["eval/loss"]) for row in load_metrics(part.folder) if "eval/loss" in row]
        assert lines == [(row["step"], row["eval/loss"]) for row in load_metrics(whole.folder) if "eval/loss" in row]

    @pytest.mark.parametrize("mode", ["async", "sync"])
    @pytest.mark.parametrize("times", [1, 2])
    def test_ctrl_c_while_saving_loses_nothing_that_was_committed(
        self, run: Run, monkeypatch, mode: str, times: int
    ) -> None:
        whole = run("steps=6")

        class Interrupted(CheckpointManager):
            def _save(self, *arguments: Any) -> None:
                if arguments[2] == "step-3":
                    for _ in range(times):
                        os.kill(os.getpid(), signal.SIGINT)
                super()._save(*arguments)

        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patched:
            patched.setattr(resuming, "CheckpointManager", Interrupted)
            part = run("steps=6", "state.every=1", f"state={mode}")
        assert (part.code, part.result["state"]["step"]) == (130, 3 if times == 1 else 2)
        assert signal.getsignal(signal.SIGINT) is handler
        part = run("steps=6", resume=part.folder)
        assert part.result["state"]["resumed_step"] == (3 if times == 1 else 2)
        assert part.rows == whole.rows
        assert_same(part.weights, whole.weights)

    def test_an_earlier_handler_of_the_users_is_called(self, run: Run) -> None:
        called: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        try:
            part = run("steps=6", stop_at=2)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert (part.code, called, part.result["state"]["step"]) == (143, [signal.SIGTERM], 2)
