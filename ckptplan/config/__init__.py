"""The typed run description: its schema; ``loading`` converts Hydra's config to it, ``checks`` says what else it needs.

Checks come cheapest first: Hydra composes against the schema below (keys and types), ``load_config`` checks ranges
and what belongs together; ``targets.py`` then compares the open nodes with what they name. Every fault of the user
ends as a ``ConfigError`` that gives the key, the value, the nearest right one, what is allowed and what to type.
Torch-free, and without a model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ckptplan.units import parse_bytes

# Config name -> name in plan_checkpoints. "text" and "file" read a plan instead of making one.
PLANNER_NAMES = {
    "none": "no_checkpoint",
    "all": "checkpoint_all",
    "uniform": "uniform",
    "greedy": "greedy",
    "dp": "dynamic_programming",
    "optimal": "optimal",
    "ilp": "ilp",
    "compile": "compile_budget",
}
PLAN_SOURCES = ("text", "file")

# Config key -> target_kind of plan_checkpoints; `budget=auto` stands beside them.
BUDGET_KINDS = {
    "budget_frac": "activation_budget_fraction",
    "budget_bytes": "activation_budget_bytes",
    "device_budget_bytes": "device_budget_bytes",
    "saving_frac": "activation_saving_fraction",
    "max_slowdown": "max_slowdown",
}
BUDGET_KEYS = (*BUDGET_KINDS, "budget")
DEFAULT_BUDGET_FRAC = 0.5

# Keys that do not change what a run computes: they stay out of the config hash.
UNHASHED_KEYS = tuple(
    "hydra logger resume state name output_dir sweep log_every data_workers report push_dashboard "
    "watch_peak_every".split()
)
UNHASHED_PROFILE_KEYS = ("cache", "options")

FREE = "cuda:free"  # of runtime.device: one that no other run has taken

ENGINES = ("single", "ddp", "fsdp2")

# Groups that leave no key of their own in the composed config.
WHOLE_RUN_GROUPS = ("experiment", "debug")


class DType(str, enum.Enum):
    """Number format of the training step; ``*_mixed`` is autocast over float32 weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    bf16_mixed = "bf16_mixed"
    fp16_mixed = "fp16_mixed"

    def __str__(self) -> str:
        return self.value


PLANNERS_FOR_ANY_SIZE = ("dp", "dynamic_programming", "optimal", "ilp", "greedy", "uniform")  # that batch=auto can ask


@dataclass(frozen=True)
class BlocksConfig:
    """``paths`` is "auto", or a list of module paths and globs such as ``[layers.*]``."""

    paths: Any = "auto"


@dataclass(frozen=True)
class RuntimeConfig:
    """``device``: auto, cpu, cuda, cuda:N, cuda:free (one that no other run has taken), or one of the
    table of devices, which is planned for without being there.

    ``threads``: CPU threads, None leaves torch's own choice. For a device that is not there: ``calibration``, a file of
    ``python -m ckptplan.calibrate`` that replaces the data sheet, and ``shards``, processes over which FSDP shards.
    """

    device: str = "auto"
    dtype: DType = DType.float32
    deterministic: bool = True
    threads: int | None = None
    calibration: str | None = None
    shards: int = 1


@dataclass(frozen=True)
class PlannerConfig:
    """``text`` and ``path`` belong to the planners of those names (text, file); ``options`` go to the planner."""

    name: str = "dp"
    text: str | None = None
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerConfig:
    """``kind``: constant, cosine or linear. ``final_factor``: last learning rate as a share of the highest.

    ``warmup_steps``: optimizer steps; None: a tenth of ``steps``.
    """

    kind: str = "cosine"
    warmup_steps: int | None = None
    final_factor: float = 0.1


@dataclass(frozen=True)
class LoggerConfig:
    """``kind``: none, csv, tensorboard, trackio or wandb.

    ``mode`` (W&B): offline, auto (online where a key is found), online, disabled.
    """

    kind: str = "wandb"
    project: str = "ckptplan"
    mode: str = "offline"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ProfileConfig:
    """Untimed and timed runs of each kind of block.

    ``cache``: folder of profiles that runs share; None: every run measures. ``options``: measure options inside blocks
    whatever the planner; None: for planners that choose them. ``offload``: measure blocks with their activations on the
    host, which planners then may choose: auto (where the device has memory of its own), always, never.
    """

    num_warmup: int = 2
    num_trials: int = 5
    cache: str | None = None
    options: bool | None = None
    offload: str = "auto"


@dataclass(frozen=True)
class ProofConfig:
    """``latency_trials``: timed pairs of a planned and an unplanned step, interleaved (0: none)."""

    latency_trials: int = 5
    latency_warmup: int = 1
    check_gradients: bool = True


@dataclass(frozen=True)
class StateConfig:
    """Saving the training state.

    Attributes:
        mode: "async" (in the background), "sync", "off", or "auto": async in a single run, off in the jobs of a sweep.
        every: optimizer steps between saves; None: only when the run ends. It always saves then.
        keep_last: how many of the newest stay; None: all.
        keep_best: so many of the best stay too, by ``best_metric``, the least or the greatest (``best_mode``).
        location: where they lie, a folder or a URL (s3://bucket/run); None: ``state/`` in the run's folder.
        cache: folder for copies of what is read from a URL.
    """

    mode: str = "auto"
    every: int | None = None
    keep_last: int | None = 2
    keep_best: int | None = None
    best_metric: str = "eval/loss"
    best_mode: str = "min"
    location: str | None = None
    cache: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How many processes train one model. ``kind``: single, ddp or fsdp2.

    ``nproc``: processes to start on this machine; None: one for each CUDA device. Where torchrun or srun has started
    the ranks it stays None. ``tp``: ranks that share each matrix product, and read the same samples; ``dp``: ranks, or
    such groups of them, among which a batch is shared; None: all that there are. ``tp_plan``: how matrices are cut
    (colwise, rowwise, colwise_rep, rowwise_rep), by module path or pattern; None: as the model says.
    """

    kind: str = "single"
    nproc: int | None = None
    dp: int | None = None
    tp: int = 1
    tp_plan: Any = None  # dict[str, str] | None

    @property
    def num_processes(self) -> int | None:
        """How many are to be started on this machine; None: one for each CUDA device."""
        return self.nproc if self.nproc is not None or self.dp is None else self.dp * self.tp


@dataclass(frozen=True)
class SweepConfig:
    """How the jobs of a multirun are run.

    ``fail_fast``: start no more jobs after one that failed. ``timeout_s``: seconds a job may take, None for no limit.
    ``parallel``: jobs at once. ``devices``: CUDA devices for jobs to take in turn, one job on each.
    ``resume``: true, or a sweep's folder: run only what is missing or failed there.
    """

    fail_fast: bool = False
    timeout_s: float | None = None
    parallel: int = 1
    devices: list[int] = field(default_factory=list)
    resume: Any = False


@dataclass(frozen=True)
class Budget:
    """The one budget of a run: ``key`` as in the config ("budget_frac", ..., "auto"), sizes in bytes."""

    key: str
    value: int | float | None

    @property
    def target_kind(self) -> str:
        """The ``target_kind`` of ``plan_checkpoints`` ("auto" stays "auto")."""
        return BUDGET_KINDS.get(self.key, self.key)


@dataclass(frozen=True)
class RunConfig:
    """One run. ``data``, ``model`` and ``optimizer`` are open: ``_target_`` and the arguments of what it names.

    Attributes:
        steps: optimizer steps, of ``accumulate`` micro-batches each.
        batch: "fixed": micro-batches of ``data.batch_size``; "auto": the fastest that fits, "largest": the largest;
            a step has ``data.batch_size`` times ``accumulate`` samples with all three.
        clip_norm: largest norm of the gradient, None for no clipping.
        oom_retries: how many tighter plans a step may try after running out of memory; 0: the run ends at once.
        eval_every, log_every: in optimizer steps; ``eval_every`` None evaluates at the end only.
        data_workers: processes that read batches ahead, 0: none.
        watch_peak_every: training steps of which one is measured, 0: none; None: each on CUDA, one of 100 on a CPU.
        shape_scan_s: seconds for which batches are read to find the largest, 0: the first is taken.
        margin_frac: share of the budget that is not planned for; None: 0 on a CPU, 0.01 on CUDA.
        report: write report.html at the end.
        cost: what the planner minimises, "time" (measured) or "flops" (exact counts).
        resume: a run folder, a state in one, the name of a run, "latest" or "auto"; None begins a new run.
    """

    name: str | None = None
    seed: int = 0
    output_dir: str = "outputs"
    steps: int = 60
    accumulate: int = 1
    batch: str = "fixed"
    clip_norm: float | None = 1.0
    oom_retries: int = 5
    eval_every: int | None = None
    log_every: int = 10
    data_workers: int = 0
    shape_scan_s: float = 10.0
    watch_peak_every: int | None = None
    budget: str | None = None
    budget_frac: float | None = None
    budget_bytes: int | float | str | None = None
    device_budget_bytes: int | float | str | None = None
    saving_frac: float | None = None
    max_slowdown: float | None = None
    margin_frac: float | None = None
    cost: str = "time"
    plan_only: bool = False
    report: bool = True
    resume: str | None = None
    push_dashboard: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    state: StateConfig = field(default_factory=StateConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def target(self) -> Budget:
        """The budget of the run."""
        if self.budget is not None:
            return Budget("auto", None)
        for key in BUDGET_KINDS:
            value = getattr(self, key)
            if value is not None:
                return Budget(key, parse_bytes(value, key) if key.endswith("_bytes") else value)
        return Budget("budget_frac", DEFAULT_BUDGET_FRAC)


def schema() -> DictConfig:
    """``RunConfig`` as a config node that overrides can still change (OmegaConf locks frozen dataclasses)."""
    node: DictConfig = OmegaConf.structured(RunConfig)
    _unlock(node)
    return node


def _unlock(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _unlock(child)


def register_schema() -> None:
    """Make the schema known to Hydra as ``run_schema``, the first entry of the defaults list."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="run_schema", node=schema(), provider="ckptplan")
