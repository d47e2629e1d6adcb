"""The config files and their checks: everything shipped composes and converts, everything wrong is told in full."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from ckptplan import config as config_module
from ckptplan.config import BUDGET_KINDS, DType, RunConfig
from ckptplan.config.loading import config_hash, config_yaml, job_folder_name, load_config, resolve
from ckptplan.config.wording import expected_words, nearest, shell_override
from ckptplan.devices import DEVICES
from ckptplan.errors import ConfigError
from ckptplan.hydra_folders import config_folder
from ckptplan.targets import check_targets

Compose = Callable[..., DictConfig]
CONF = config_folder()
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name not in ("hydra", "local"))
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
# What an option needs beside its name.
NEEDS = {
    ("planner", "text"): ['planner.text="K0 R(1)"'],
    ("planner", "file"): ["planner.path=plan.json"],
    ("data", "files"): ["data.paths=[notes.txt]"],
    ("data", "digits"): ["model=resnet"],
    ("data", "labelled_images"): ["model=resnet"],
    ("model", "custom"): ["model._target_=torch.nn.Identity"],
    **{("runtime", device): ["plan_only=true"] for device in DEVICES},
}

AWKWARD = [
    "a=b",
    "#1",
    "x,y",
    "two words",
    "{braces}",
    "(parens)",
    "[list]",
    "a@b",
    "100%",
    "~/runs",
    "1e-3",
    "007",
    "null",
    "true",
    "größe",
    "it's",
    'say "hi"',
    "back\\slash",
    "end\\",
    "${seed}",
    "$HOME",
    "a:b",
    "*",
    "!x",
    "",
]


def test_there_is_a_file_for_every_group_of_the_contents() -> None:
    assert {"data", "model", "blocks", "runtime", "planner", "optimizer", "scheduler", "logger"} <= set(GROUPS)


@pytest.mark.parametrize("multirun", [False, True], ids=["alone", "multirun"])
@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_every_option_of_every_group_composes_and_converts(
    compose: Compose, group: str, option: str, multirun: bool
) -> None:
    composed = compose(f"{group}={option}", *NEEDS.get((group, option), ()), multirun=multirun)
    loaded = load_config(composed)
    assert isinstance(loaded, RunConfig)
    if option != "file":  # there is no plan.json here
        check_targets(loaded, composed.hydra.runtime.choices)
    # the folder names resolve too, in both modes
    assert "/" in composed.hydra.run.dir
    assert re.fullmatch(r"000_[\w.-]+_[0-9a-f]{8}", composed.hydra.sweep.subdir)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_config_file_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name != "train.yaml" and "hydra" not in path.parts:
        assert 2 <= len(lines) <= 16
    assert any(line.lstrip().startswith("#") and "@package" not in line for line in lines)


def test_a_planner_whose_solver_is_missing_is_refused_before_anything_is_built(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="planner=ilp needs scipy") as caught:
        load_config(compose("planner=ilp"))
    assert "pip install -e '.[solvers]'" in str(caught.value)
    assert load_config(compose("planner=optimal")).planner.name == "optimal"


def test_the_plain_run_is_dp_at_half_the_memory(compose: Compose) -> None:
    loaded = load_config(compose())
    assert loaded.planner.name == "dp"
    assert loaded.target == config_module.Budget("budget_frac", 0.5)
    assert loaded.target.target_kind == "activation_budget_fraction"


def test_a_model_names_its_own_data_and_the_command_line_wins(compose: Compose) -> None:
    assert load_config(compose("model=resnet")).data["_target_"].endswith("labelled_images")
    assert load_config(compose("model=resnet", "data=digits")).data["_target_"].endswith("handwritten_digits")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("budget_frac=0.25", "budget_frac", 0.25),
        ("budget_bytes=6GiB", "budget_bytes", 6 * 2**30),
        ("budget_bytes=1000", "budget_bytes", 1000),
        ('budget_bytes="1.5 GB"', "budget_bytes", 1_500_000_000),
        ("device_budget_bytes=24GiB", "device_budget_bytes", 24 * 2**30),
        ("saving_frac=0.3", "saving_frac", 0.3),
        ("max_slowdown=1.2", "max_slowdown", 1.2),
        ("budget=auto", "auto", None),
    ],
)
def test_each_kind_of_budget_arrives_with_its_number(
    compose: Compose, override: str, key: str, value: float | None
) -> None:
    target = load_config(compose(override)).target
    assert (target.key, target.value) == (key, value)
    assert target.target_kind == BUDGET_KINDS.get(key, "auto")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["budget_frac=0"], ["budget_frac=0.0", "0 < f <= 1", "budget_frac=0.5"]),
        (["budget_frac=2"], ["budget_frac=2.0", "0 < f <= 1"]),
        (["budget_frac=nan"], ["budget_frac=nan"]),
        (["saving_frac=1"], ["saving_frac=1.0", "0 < f < 1"]),
        (["saving_frac=0"], ["saving_frac=0.0", "0 < f < 1"]),
        (["max_slowdown=0.9"], ["max_slowdown=0.9", "1 or more"]),
        (["budget_bytes="], ["budget_bytes=", "empty", "6GiB"]),
        (["budget_bytes=0"], ["budget_bytes=0", "above 0"]),
        (["budget_bytes=6GX"], ["budget_bytes=6GX", "6GiB"]),
        (["budget=automatic"], ["budget=automatic", "did you mean: auto"]),
        (
            ["budget_frac=0.5", "budget_bytes=6GiB"],
            ["budget_frac=0.5", "budget_bytes=6GiB", "two budgets", "budget_bytes=null"],
        ),
        (["max_slowdown=1.1", "budget=auto"], ["max_slowdown=1.1", "budget=auto", "two budgets"]),
        (["steps=0"], ["steps=0", "1 or more", "steps=60"]),
        (["accumulate=0"], ["accumulate=0"]),
        (["clip_norm=-1"], ["clip_norm=-1.0", "null"]),
        (["seed=-1"], ["seed=-1"]),
        (["cost=tiem"], ["cost=tiem", "did you mean: time", "flops"]),
        (["runtime.device=cdua"], ["runtime.device=cdua", "did you mean: cuda"]),
        (["scheduler.kind=cosin"], ["did you mean: cosine"]),
        (["logger.mode=offlin"], ["did you mean: offline"]),
        (["planner.name=dpp"], ["did you mean: dp", "greedy"]),
        (["planner=text"], ["planner.text=null", "planner=text needs it", "K0 R(1)"]),
        (["planner=dp", 'planner.text="K0"'], ["planner.text=K0", "only planner=text reads it"]),
        (["planner=compile", "cost=flops"], ["cost=flops", "measured time", "cost=time"]),
        (["planner=compile", "max_slowdown=1.1"], ["max_slowdown=1.1", "budget_frac=0.5"]),
        (["blocks.paths=[]"], ["blocks.paths=[]", "'blocks.paths=[layers.*]'"]),
        (["model._target_=null"], ["model._target_=null", "dotted name"]),
        (["model=vit", "data=stdlib_text"], ["stdlib_text", "ViT", "does not fit", "image_size"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_wrong_value_is_told_with_key_value_and_remedy(
    compose: Compose, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(compose(*overrides))
    for word in words:
        assert word in str(caught.value)


def test_one_block_path_needs_no_brackets(compose: Compose) -> None:
    assert load_config(compose("blocks.paths=layers.*")).blocks.paths == ["layers.*"]
    assert load_config(compose("blocks.paths=[layers.*,head]")).blocks.paths == ["layers.*", "head"]
    assert load_config(compose()).blocks.paths == "auto"


@pytest.mark.parametrize("text", AWKWARD)
def test_an_awkward_value_in_the_documented_form_arrives_as_the_same_text(compose: Compose, text: str) -> None:
    [argument] = shlex.split(shell_override("name", text))
    assert load_config(compose(argument)).name == text


@pytest.mark.parametrize("shell", [shell for shell in ("bash", "zsh") if shutil.which(shell)])
def test_the_documented_form_means_the_same_to_a_real_shell(shell: str) -> None:
    forms = [shell_override("name", text) for text in AWKWARD]
    done = subprocess.run(
        [shell, "-c", f"printf '%s\\0' {' '.join(forms)}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[:-1] == [shlex.split(form)[0] for form in forms]


def test_numbers_and_text_keep_their_types(compose: Compose) -> None:
    loaded = load_config(compose("optimizer.lr=1e-3", "name=007", "runtime.dtype=bf16_mixed"))
    assert loaded.optimizer["lr"] == 0.001
    assert loaded.name == "007"
    assert loaded.runtime.dtype is DType.bf16_mixed
    assert f"{loaded.runtime.dtype}" == "bf16_mixed"


def test_the_resolved_config_is_plain_data_and_loads_to_the_same_run(compose: Compose) -> None:
    composed = compose("budget_frac=0.7", "runtime.dtype=bf16_mixed")
    resolved = resolve(composed)
    assert "hydra" not in resolved
    assert resolved["runtime"]["dtype"] == "bf16_mixed"
    assert resolved["model"]["sequence_length"] == resolved["data"]["sequence_length"]
    assert load_config(resolved) == load_config(composed)


@pytest.mark.parametrize("text", AWKWARD)
def test_the_saved_config_reads_back_to_the_same_run(compose: Compose, text: str) -> None:
    resolved = {**resolve(compose()), "name": text}
    assert load_config(OmegaConf.create(config_yaml(resolved))).name == text


def test_the_hash_sees_what_is_computed_and_nothing_else(compose: Compose) -> None:
    def hash_of(*overrides: str) -> str:
        return config_hash(resolve(compose(*overrides)))

    plain = hash_of()
    assert re.fullmatch("[0-9a-f]{64}", plain)
    same = ["name=x", "logger=none", "output_dir=elsewhere", "sweep.timeout_s=5", "budget_frac=0.5", "log_every=3"]
    assert {hash_of(override) for override in same} == {plain}
    other = ["seed=1", "planner=greedy", "budget_frac=0.6", "model.layers=2", "data.batch_size=4", "steps=7"]
    assert len({plain, *(hash_of(override) for override in other)}) == len(other) + 1


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["planner=greedy", "budget_frac=0.3"], "007_greedy_0.3_"),
        (["budget_bytes=6GiB"], "007_dp_6442450944_"),
        (["device_budget_bytes=100"], "007_dp_device100_"),
        (["saving_frac=0.25"], "007_dp_save0.25_"),
        (["max_slowdown=1.1"], "007_dp_max-slowdown1.1_"),
        (["budget=auto"], "007_dp_auto_"),
        (["planner=text", "planner.text='K0 R(1 2)'"], "007_text_0.5_"),
    ],
    ids=lambda value: "",
)
def test_a_job_folder_has_a_name_that_no_shell_wants_quoted(compose: Compose, overrides: list[str], start: str) -> None:
    composed = compose(*overrides)
    name = job_folder_name(7, load_config(composed), resolve(composed))
    assert name.startswith(start)
    assert shlex.quote(name) == name


def test_the_nearest_word_is_found_or_none() -> None:
    assert nearest("widht", ["width", "depth"]) == "width"
    assert nearest("WIDTH", ["width"]) == "width"
    assert nearest("qqq", ["width"]) is None


def test_every_value_of_the_schema_can_be_described() -> None:
    open_fields = {"data", "model", "optimizer"}
    for field in dataclasses.fields(RunConfig):
        if field.name not in open_fields and not dataclasses.is_dataclass(field.default_factory):
            assert expected_words(field.name), field.name
    assert expected_words("runtime.dtype") == "one of float32, bfloat16, bf16_mixed, fp16_mixed"
    assert expected_words("nonsense") is None


def test_the_planner_names_are_those_of_the_config_files() -> None:
    shipped = {path.stem for path in (CONF / "planner").glob("*.yaml")}
    assert shipped == {*config_module.PLANNER_NAMES, *config_module.PLAN_SOURCES}


def test_the_planner_names_are_those_of_the_planners() -> None:
    from ckptplan.planners import PLANNERS

    assert set(config_module.PLANNER_NAMES.values()) <= set(PLANNERS)


@pytest.mark.parametrize("kind", ["tensorboard", "trackio"])
def test_a_logger_whose_package_is_missing_names_the_extra_before_anything_runs(
    compose, monkeypatch, kind: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=rf"package {kind} is not installed\n +type: pip install -e '\.\[{kind}\]'"):
        load_config(compose(f"logger={kind}"))
