"""What a configuration must fulfil beside its types: ranges, and what belongs together."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable
from typing import Any

from ckptplan.config import (
    BUDGET_KEYS,
    ENGINES,
    FREE,
    PLAN_SOURCES,
    PLANNER_NAMES,
    PLANNERS_FOR_ANY_SIZE,
    EngineConfig,
    RunConfig,
    SweepConfig,
)
from ckptplan.config.wording import NOT_GIVEN, check_choice, config_error, expected_words, shell_override
from ckptplan.devices import DEVICES
from ckptplan.errors import ConfigError
from ckptplan.units import parse_bytes


def check_budget(config: RunConfig) -> None:
    given = {key: getattr(config, key) for key in BUDGET_KEYS if getattr(config, key) is not None}
    if len(given) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in given.items())
        keep = next(iter(given))
        unset = " ".join(f"{key}=null" for key in list(given)[1:])
        raise ConfigError(
            f"{shown}: two budgets; a run has exactly one\n  allowed: one of {', '.join(BUDGET_KEYS)}\n"
            f"  type: {keep}={given[keep]} {unset}"
        )
    if config.budget is not None:
        check_choice("budget", config.budget, ("auto",))
    for key in ("budget_bytes", "device_budget_bytes"):
        value = getattr(config, key)
        if value is not None:
            _check_size(key, value)


def _check_size(key: str, value: object) -> None:
    try:
        fits = value != "" and parse_bytes(value, key) > 0  # type: ignore[arg-type]  # it refuses others
    except (ValueError, TypeError):
        fits = False
    if not fits:
        problem = "empty" if value == "" else "not a size above 0"
        raise config_error(key, value, f"{problem}; expected {expected_words(key)}", remedy=f"{key}=6GiB")


_MOST_THREADS = 4 * (os.cpu_count() or 1)  # more only get into each other's way, until the system refuses them

# Dotted key -> (fits, what is expected in words, an example). None always fits: it switches the thing off.
RANGES: dict[str, tuple[Callable[[Any], bool], str, object]] = {
    "budget_frac": (lambda f: 0 < f <= 1, "0 < f <= 1, a share of the peak without checkpointing", 0.5),
    "saving_frac": (lambda f: 0 < f < 1, "0 < f < 1, the share of the peak without checkpointing to save", 0.5),
    "margin_frac": (lambda f: 0 <= f < 1, "0 <= f < 1, a share of the budget, or null", 0.05),
    "max_slowdown": (lambda ratio: ratio >= 1, "a ratio of 1 or more", 1.2),
    "seed": (lambda n: 0 <= n < 2**32, "0 to 2**32 - 1", 0),
    "steps": (lambda n: n >= 1, "1 or more", 60),
    "accumulate": (lambda n: n >= 1, "1 or more", 1),
    "oom_retries": (lambda n: n >= 0, "0 or more", 5),
    "log_every": (lambda n: n >= 1, "1 or more", 10),
    "data_workers": (lambda n: 0 <= n <= _MOST_THREADS, f"0 to {_MOST_THREADS}", 2),
    "watch_peak_every": (lambda n: n >= 0, "0 or more, or null", 100),
    "shape_scan_s": (lambda s: 0 <= s < float("inf"), "seconds, 0 or more", 10),
    "eval_every": (lambda n: n >= 1, "1 or more, or null", 20),
    "clip_norm": (lambda norm: norm > 0, "a norm above 0, or null for no clipping", 1.0),
    "runtime.threads": (
        lambda n: 1 <= n <= _MOST_THREADS,
        f"1 to {_MOST_THREADS} (4 for each of the machine's cores), or null",
        os.cpu_count() or 1,
    ),
    "runtime.shards": (lambda n: n >= 1, "1 or more", 8),
    "scheduler.warmup_steps": (lambda n: n >= 0, "0 or more, or null", 10),
    "scheduler.final_factor": (lambda factor: 0 <= factor <= 1, "0 to 1, a share of the highest rate", 0.1),
    "profile.num_warmup": (lambda n: n >= 0, "0 or more", 2),
    "profile.num_trials": (lambda n: n >= 1, "1 or more", 5),
    "proof.latency_trials": (lambda n: n >= 0, "0 or more", 5),
    "proof.latency_warmup": (lambda n: n >= 0, "0 or more", 1),
    "engine.nproc": (lambda n: n >= 1, "1 or more, or null", 2),
    "engine.dp": (lambda n: n >= 1, "1 or more, or null", 2),
    "engine.tp": (lambda n: n >= 1, "1 or more", 2),
    "sweep.parallel": (lambda n: n >= 1, "1 or more", 1),
    "state.every": (lambda n: n >= 1, "1 or more, or null", 100),
    "state.keep_last": (lambda n: n >= 1, "1 or more, or null for all", 2),
    "state.keep_best": (lambda n: n >= 1, "1 or more, or null", 1),
    "sweep.timeout_s": (lambda seconds: seconds > 0, "seconds above 0, or null for no limit", 600),
}


def check_ranges(config: RunConfig) -> None:
    for key, (fits, expected, example) in RANGES.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not (math.isfinite(value) and fits(value)):
            raise config_error(key, value, f"out of range; expected {expected}", remedy=f"{key}={example}")
    warmup = config.scheduler.warmup_steps
    if warmup is not None and warmup > config.steps:
        remedy = f"scheduler.warmup_steps={config.steps // 10}"
        raise config_error("scheduler.warmup_steps", warmup, f"more than steps={config.steps}", remedy=remedy)


def check_choices(config: RunConfig) -> None:
    if not config.output_dir.strip():
        raise config_error("output_dir", config.output_dir, "empty; expected a folder", remedy="output_dir=outputs")
    _check_device(config)
    check_choice("cost", config.cost, ("time", "flops"))
    check_choice("profile.offload", config.profile.offload, ("auto", "always", "never"))
    _check_batch(config)
    check_choice("scheduler.kind", config.scheduler.kind, ("constant", "cosine", "linear"))
    check_choice("logger.kind", config.logger.kind, ("none", "csv", "tensorboard", "trackio", "wandb"))
    if config.logger.kind in ("tensorboard", "trackio") and importlib.util.find_spec(config.logger.kind) is None:
        problem = f"the package {config.logger.kind} is not installed"
        remedy = f"pip install -e '.[{config.logger.kind}]', or logger=csv"
        raise config_error("logger", config.logger.kind, problem, remedy=remedy)
    _check_engine(config)
    _check_sweep(config.sweep)
    check_choice("logger.mode", config.logger.mode, ("offline", "auto", "online", "disabled"))
    check_choice("state.mode", config.state.mode, ("auto", "async", "sync", "off"))
    check_choice("state.best_metric", config.state.best_metric, ("eval/loss", "train/loss"))
    check_choice("state.best_mode", config.state.best_mode, ("min", "max"))
    if re.search(r"://[^/]*:[^/]*@", config.state.location or ""):  # it would stand in config.yaml and in every log
        problem = "a URL with a password in it"
        raise config_error("state.location", NOT_GIVEN, problem, remedy="the URL alone; credentials in the environment")
    if config.resume == "":
        raise config_error("resume", "", "empty; expected a run folder, a name, latest or auto", remedy="resume=latest")
    planner = config.planner
    check_choice("planner.name", planner.name, (*PLANNER_NAMES, *PLAN_SOURCES))
    if planner.name == "ilp" and importlib.util.find_spec("scipy") is None:
        problem = "planner=ilp needs scipy, which is not installed; dp and optimal need none"
        raise config_error("planner", "ilp", problem, remedy="pip install -e '.[solvers]'")
    if planner.name == "compile" and config.cost == "flops":
        problem = "planner=compile goes by measured time: nobody counts the FLOPs of compiled code"
        raise config_error("cost", "flops", problem, remedy="planner=compile cost=time")
    if planner.name == "compile" and config.max_slowdown is not None:
        problem = "planner=compile counts time beside its own fastest step, not beside the eager one"
        raise config_error("max_slowdown", config.max_slowdown, problem, remedy="planner=compile budget_frac=0.5")
    for name, key, value, example in (
        ("text", "planner.text", planner.text, shell_override("planner.text", "K0 R(1)")),
        ("file", "planner.path", planner.path, "planner.path=plan.json"),
    ):
        if planner.name == name and not value:
            raise config_error(key, value, f"planner={name} needs it", remedy=f"planner={name} {example}")
        if planner.name != name and value:
            raise config_error(key, value, f"only planner={name} reads it", remedy=f"planner={name} {example}")


def _check_batch(config: RunConfig) -> None:
    check_choice("batch", config.batch, ("fixed", "auto", "largest"))
    if config.batch == "fixed":
        return
    if config.runtime.device in DEVICES:
        problem = "the largest batch of a device that is not there is told with budget=auto; none is chosen"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed budget=auto")
    if config.engine.kind != "single":
        problem = "the micro-batch is chosen for one process"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed, or engine=single")
    if config.planner.name not in PLANNERS_FOR_ANY_SIZE:
        problem = f"planner={config.planner.name} does not plan for a budget at each size"
        raise config_error("batch", config.batch, problem, remedy="planner=dp, or batch=fixed")
    if not isinstance(config.data.get("batch_size"), int):
        problem = "the data has no data.batch_size, samples in a step, of which micro-batches are parts"
        raise config_error("batch", config.batch, problem, remedy="batch=fixed")


def _check_engine(config: RunConfig) -> None:
    engine, batch_size = config.engine, config.data.get("batch_size")
    check_choice("engine.kind", engine.kind, ENGINES)
    if engine.tp > 1 or engine.tp_plan is not None:
        _check_tensor_parallel(config)
    if engine.kind == "single":
        if engine.num_processes not in (None, 1):
            problem = "engine=single is one process"
            raise config_error(
                "engine.nproc", engine.num_processes, problem, remedy=f"engine=ddp engine.nproc={engine.num_processes}"
            )
        return
    if engine.num_processes is not None:
        check_mesh(engine, engine.num_processes)
        if isinstance(batch_size, int):
            check_batch_divides(batch_size, engine.num_processes // engine.tp)
    if engine.kind == "fsdp2" and str(config.runtime.dtype) == "fp16_mixed":
        problem = "engine=fsdp2 has no loss scaling over shards"
        raise config_error("runtime.dtype", "fp16_mixed", problem, remedy="runtime.dtype=bf16_mixed, or engine=ddp")
    if not re.fullmatch(r"auto|cpu|cuda", config.runtime.device):
        problem = "each rank takes the device of its number"
        raise config_error("runtime.device", config.runtime.device, problem, remedy="runtime.device=cuda")


def _check_tensor_parallel(config: RunConfig) -> None:
    engine = config.engine
    if engine.tp > 1 and engine.kind != "fsdp2":
        problem = "cut matrices are trained by engine=fsdp2 (which shards nothing where all ranks share them); "
        problem += "PyTorch's DDP takes them apart, so that their state cannot be saved"
        raise config_error("engine.tp", engine.tp, problem, remedy=f"engine=fsdp2 engine.tp={engine.tp}")
    plan = engine.tp_plan
    if plan is not None:
        good = isinstance(plan, dict) and plan and all(isinstance(text, str) for pair in plan.items() for text in pair)
        if not good:
            problem = "expected module paths or patterns, and how each is cut"
            raise config_error(
                "engine.tp_plan", plan, problem, remedy="'engine.tp_plan={layers.*.fc: colwise, layers.*.out: rowwise}'"
            )
        if engine.tp == 1:
            raise config_error("engine.tp_plan", plan, "nothing is cut with engine.tp=1", remedy="engine.tp=2")
    for key in ("foreach", "fused"):
        if config.optimizer.get(key):
            problem = "engine.tp spreads weights over different meshes, which no kernel goes over at once"
            raise config_error(f"optimizer.{key}", True, problem, remedy=f"optimizer.{key}=false")


def check_mesh(engine: EngineConfig, num_ranks: int) -> None:
    """Raise ``ConfigError`` unless ``num_ranks`` are as many as ``engine.dp`` times ``engine.tp``."""
    if num_ranks % engine.tp:
        fits = engine.tp * (num_ranks // engine.tp + 1)
        problem = f"{num_ranks} ranks are no multiple of it"
        raise config_error("engine.tp", engine.tp, problem, remedy=f"engine.nproc={fits}")
    shares = num_ranks // engine.tp
    if engine.dp not in (None, shares):
        problem = f"{num_ranks} ranks, {engine.tp} to each matrix product, share a batch among {shares}"
        raise config_error("engine.dp", engine.dp, problem, remedy="leave engine.dp or engine.nproc out")


def check_batch_divides(batch_size: int, num_ranks: int) -> None:
    """Raise ``ConfigError`` unless every rank gets as many samples of a batch."""
    if batch_size % num_ranks:
        fits = max(1, round(batch_size / num_ranks)) * num_ranks
        problem = f"it is the size over all ranks, and {num_ranks} ranks do not share it evenly"
        raise config_error("data.batch_size", batch_size, problem, remedy=f"data.batch_size={fits}")


def _check_device(config: RunConfig) -> None:
    runtime = config.runtime
    if runtime.device in DEVICES:
        if not config.plan_only:
            problem = "this device is planned for by its data sheet; nothing can be trained on it here"
            remedy = f"runtime={runtime.device} plan_only=true, or runtime=cuda where there is one"
            raise config_error("runtime.device", runtime.device, problem, remedy=remedy)
        if config.planner.name == "compile":
            problem = "what a compiled block takes is only known by compiling it on the device"
            raise config_error("planner", "compile", problem, remedy="planner=optimal")
        return
    if not re.fullmatch(r"auto|cpu|cuda(:\d+|:free)?", runtime.device):
        check_choice("runtime.device", runtime.device, ("auto", "cpu", "cuda", FREE, *DEVICES))
    for key, given in (("calibration", runtime.calibration), ("shards", runtime.shards > 1)):
        if given:
            problem = f"only for a device that is not there ({', '.join(DEVICES)}); here the blocks are measured"
            raise config_error(f"runtime.{key}", getattr(runtime, key), problem, remedy="runtime=h100 plan_only=true")


def _check_sweep(sweep: SweepConfig) -> None:
    if not (sweep.resume is None or (isinstance(sweep.resume, (bool, str)) and sweep.resume != "")):
        problem = "expected true, false or the folder of a sweep"
        raise config_error("sweep.resume", sweep.resume, problem, remedy="sweep.resume=true")
    if len(set(sweep.devices)) < len(sweep.devices) or any(number < 0 for number in sweep.devices):
        problem = "expected numbers of CUDA devices, each once"
        raise config_error("sweep.devices", sweep.devices, problem, remedy="'sweep.devices=[0,1]'")
    if sweep.devices and sweep.parallel not in (1, len(sweep.devices)):
        problem = f"{len(sweep.devices)} devices run {len(sweep.devices)} jobs at once"
        raise config_error("sweep.parallel", sweep.parallel, problem, remedy="leave sweep.parallel out")


def check_nodes(config: RunConfig) -> None:
    paths = config.blocks.paths
    good = paths == "auto" or (isinstance(paths, list) and paths and all(isinstance(p, str) and p for p in paths))
    if not good:
        problem = "expected auto or a list of module paths and globs"
        raise config_error("blocks.paths", paths, problem, remedy="'blocks.paths=[layers.*]'")
    for key in ("data", "model", "optimizer"):
        target = getattr(config, key).get("_target_")
        if not isinstance(target, str) or not target:
            raise config_error(f"{key}._target_", target, "expected the dotted name of a class or function")
