"""Every error class has an example here, raised the way a user meets it; docs/troubleshooting.md shows its message.

The page is held to these: a section for each class, whose message (with "..." for what varies) is the one raised here.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptplan
from ckptplan import errors
from ckptplan.record import STATUS_EXIT_CODES
from ckptplan.state import CheckpointManager
from ckptplan.stopping import StopFlag
from tests.planners.conftest import random_chain
from tests.state.test_damage import with_digest
from tests.test_equality import Noise
from tests.test_training import ListData, Poisoned, TrainSettings, make_batches, train_plainly

REPOSITORY = Path(ckptplan.__file__).parent.parent
PAGE = REPOSITORY / "docs" / "troubleshooting.md"

ERRORS = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, (errors.CkptplanError, Warning))
}


class Net(nn.Module):
    """Four equal blocks; what a subclass does between them is its own."""

    def __init__(self, odd: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        if odd is not None:
            self.layers[1].append(odd)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Decides(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.layers[0](x).sum() > 0 else x


class FixedSize(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(64, 32))


class ChangesOutputs(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        self.layers[2](first)
        return self.layers[3](second)


BATCH = torch.randn(64, 32)
NAMES = [f"layers.{i}" for i in range(4)]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def plan_of(text: str) -> ckptplan.CheckpointPlan:
    return ckptplan.CheckpointPlan.from_text(text, NAMES)


def ends_by_signal(_: Path) -> None:
    stop = StopFlag()
    stop.request(signal.SIGTERM)
    stop.check()


def other_rank_fails(_: Path) -> None:
    from ckptplan.engine.ranks import Ranks, as_seen_elsewhere

    assert Ranks().together(lambda: 1) == 1
    raise as_seen_elsewhere(ValueError("the data ended early"), rank=1)


def unknown_key(_: Path) -> None:
    from hydra import compose, initialize_config_dir

    from ckptplan import cli
    from ckptplan.config.loading import load_config

    cli.prepare_hydra(reserve_folders=False)
    with initialize_config_dir(version_base="1.3", config_dir=str(cli.config_folder())):
        load_config(compose("train", overrides=["budget_frac=1.5"]))


def broken_target(folder: Path) -> None:
    from ckptplan.targets import locate

    (folder / "net_of_mine.py").write_text("import no_such_package\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        locate("net_of_mine.Net", "model._target_")
    finally:
        sys.path.remove(str(folder))


def no_compiler(_: Path) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/nonexistent/c++",)}):
        ckptplan.profile_model(Net(), NAMES, BATCH, loss_fn, compiled_budgets=(1.0,))


def only_times(_: Path) -> None:
    blocks = ckptplan.declare_blocks(net := Net(), list(zip(NAMES, net.layers, strict=True)))
    profile = ckptplan.profile_blocks(blocks, (BATCH,), device="cpu", memory="off", num_warmup=1, num_trials=1)
    ckptplan.plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=0.5)


def other_model(_: Path) -> None:
    ckptplan.checkpointed(nn.Sequential(nn.Linear(4, 4)), plan_of("R(0) K1 K2 K3")).permanent()


def edited_version(_: Path) -> None:
    text = plan_of("R(0) K1 K2 K3").to_json()
    ckptplan.CheckpointPlan.from_json(re.sub(r"(ckptplan\.plan/)\d+", r"\g<1>99", text))


def beyond_scale(_: Path) -> None:
    from ckptplan.planners import nested

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nested, "MOST_CORNERS", 1)
        ckptplan.plan_curve(random_chain(3))


def diverges(_: Path) -> None:
    train_plainly(Poisoned(bad_calls=range(1, 100)), ListData(make_batches([4])), TrainSettings(steps=50))


def larger_batch(_: Path) -> None:
    model = Net()
    ckptplan.fit(model, BATCH, loss_fn, 0.9, say=None, check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.LargerBatchWarning)
        loss_fn(model, torch.randn(65, 32)).backward()


def saved(folder: Path, value: Any = None) -> CheckpointManager:
    states = CheckpointManager(folder / "state", mode="sync")
    states.save("step-1", {"model": {"weight": torch.ones(2, 3)} if value is None else value})
    return states


def damage(folder: Path) -> None:
    with saved(folder) as states:
        (path,) = (folder / "state" / "step-1").glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        states.load("step-1")


def newer_format(folder: Path) -> None:
    with saved(folder) as states:
        path = folder / "state" / "step-1" / "manifest.json"
        body = path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0]
        path.write_bytes(with_digest(re.sub(rb'"version": ?1\b', b'"version":99', body)))
        states.load("step-1")


def other_shape(folder: Path) -> None:
    with saved(folder) as states:
        states.load("step-1", into={"model": {"weight": torch.ones(3, 3)}})


def full_disk(folder: Path) -> None:
    (folder / "state").write_text("a file, not a folder", encoding="utf-8")
    with CheckpointManager(folder / "state", mode="sync") as states:
        states.save("step-1", {"x": 1})


def dead_writer(folder: Path) -> None:
    with CheckpointManager(folder / "state") as states:
        states.save("step-1", {"x": 1}).result()
        assert states.writer_pid is not None
        os.kill(states.writer_pid, signal.SIGSTOP)
        pending = states.save("step-2", {"x": 2})
        os.kill(states.writer_pid, signal.SIGKILL)
        pending.result()


def two_managers(folder: Path) -> None:
    with saved(folder), CheckpointManager(folder / "state", mode="sync") as second:
        second.save("step-2", {"x": 2})


def frozen(_: Path) -> None:
    ckptplan.profile_model(Net().requires_grad_(False), NAMES, BATCH, loss_fn)


def closed(folder: Path) -> None:
    states = saved(folder)
    states.close()
    states.load("latest")


def duplicate(folder: Path) -> None:
    with saved(folder) as states:
        states.save("step-1", {"x": 2})


def nothing_there(folder: Path) -> None:
    with saved(folder) as states:
        states.load("step-2")


def no_form(folder: Path) -> None:
    with CheckpointManager(folder / "state", mode="sync") as states:
        states.save("step-1", {"model": {"schedule": lambda step: 1.0}}).result()


EXAMPLES: dict[str, Callable[[Path], object]] = {
    "ConfigError": unknown_key,
    "TargetImportError": broken_target,
    "BlockDeclarationError": lambda _: ckptplan.declare_blocks(
        net := Net(), [("a", net.layers[0]), ("a", net.layers[1])]
    ),
    "UnsupportedBoundaryError": lambda _: ckptplan.profile_model(ChangesOutputs(), NAMES, BATCH, loss_fn),
    "NoDifferentiableOutputError": frozen,
    "CompilerMissingError": no_compiler,
    "TimingOnlyProfileError": only_times,
    "InfeasibleTargetError": lambda _: ckptplan.fit(Net(), BATCH, loss_fn, 0.01, say=None),
    "PlanIncompatibleError": other_model,
    "StepMismatchError": lambda _: ckptplan.check_equality(Net(Noise()), plan_of("K0 K1 K2 K3"), BATCH, loss_fn),
    "SizeRefusedError": lambda _: ckptplan.maximize(FixedSize(), BATCH, loss_fn, 0.5, say=None),
    "DryRunError": lambda _: ckptplan.verify_plan(Decides(), plan_of("K0 K1 K2 K3"), BATCH, loss_fn),
    "LargerBatchWarning": larger_batch,
    "UnsupportedPlanVersionError": edited_version,
    "PlannerScaleError": beyond_scale,
    "NonFiniteError": diverges,
    "RankFailedError": other_rank_fails,
    "RunInterruptedError": ends_by_signal,
    "StateError": closed,
    "UnsaveableValueError": no_form,
    "DuplicateCheckpointError": duplicate,
    "CheckpointNotFoundError": nothing_there,
    "DamagedCheckpointError": damage,
    "UnsupportedStateVersionError": newer_format,
    "StateMismatchError": other_shape,
    "SaveFailedError": full_disk,
    "WriterDiedError": dead_writer,
    "FolderInUseError": two_managers,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_is_raised_and_the_page_shows_its_message(name: str, tmp_path: Path) -> None:
    with pytest.raises(ERRORS[name]) as caught:
        EXAMPLES[name](tmp_path)
    assert type(caught.value) is ERRORS[name], "the class itself, not one derived from it"
    (shown,) = re.findall(r"^```text\n(.*?)\n```$", sections()[name], re.MULTILINE | re.DOTALL)
    pattern = ".*".join(re.escape(part) for part in shown.split("..."))
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL), (
        f"{caught.value}\n--- is not what the page shows:\n{shown}"
    )


def test_every_class_of_error_has_an_example_and_a_section_with_cause_and_remedy() -> None:
    assert set(EXAMPLES) == set(ERRORS) - {"CkptplanError"}
    assert set(sections()) == set(EXAMPLES)
    for name, text in sections().items():
        assert "**Cause.** " in text, name
        assert "**Remedy.** " in text, name


def test_the_page_lists_every_status_with_its_exit_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {status: int(code) for status, code in rows} == {**STATUS_EXIT_CODES, "interrupted": 130}


def sections() -> dict[str, str]:
    """The sections of the page by the class that they are about."""
    parts = re.split(r"^### `(\w+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
