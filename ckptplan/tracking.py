"""Weights & Biases, TensorBoard, trackio, CSV files or nothing, behind one small protocol. No tracker ever stops a run.

``metrics.jsonl`` and ``result.json`` are the record; a tracker is a view of them.
"""

from __future__ import annotations

import csv
import importlib
import logging
import netrc
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlparse

from ckptplan.other_trackers import Cell, Points, TensorBoardTracker, TrackioTracker, tracked_names
from ckptplan.record import METRIC_KEYS, flatten, load_metrics, write_atomic

log = logging.getLogger(__name__)

WandbMode = Literal["offline", "auto", "online", "disabled"]

# What WANDB_MODE may say, and which of our modes that is: the last two are W&B's older words.
_MODES_OF_WANDB = {name: name for name in ("online", "offline", "disabled")} | {"dryrun": "offline", "run": "online"}

RUN_ID_FILE = Path("wandb", "run_id.txt")
MOST_TAG_LENGTH = 64  # W&B refuses longer ones
ONLINE_TIMEOUT_S = 20.0  # W&B's own is 90: long after anybody has stopped to wait


class Tracker(Protocol):
    """The lifetime is start, then any number of calls, then finish."""

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        """Begin the run; ``config`` is the resolved, plain configuration."""

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """One line of metrics, as in metrics.jsonl."""

    def summary(self, result: Mapping[str, Any]) -> None:
        """The final figures: the object of result.json; nested keys are joined with ``/``."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table, e.g. the plan block by block."""

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        """A line plot of (x, y) points, e.g. the memory over one step."""

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        """Several named lines in one plot, e.g. step time against peak of each planner."""

    def finish(self, status: str) -> None:
        """End the run; ``status`` is that of the result, anything but "ok" marks it failed."""


class NoTracker:
    """``logger=none``."""

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None: ...
    def log(self, row: Mapping[str, float | int | None]) -> None: ...
    def summary(self, result: Mapping[str, Any]) -> None: ...
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None: ...
    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None: ...
    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None: ...
    def finish(self, status: str) -> None: ...


class CsvTracker:
    """``logger=csv``: ``metrics.csv``, ``summary.csv`` and one file per table in the run folder, for a spreadsheet.

    A figure that is unknown is an empty cell. A run that goes on has the lines of ``metrics.jsonl`` up to there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metrics = self.folder / "metrics.csv"

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        is_recorded = (self.folder / "metrics.jsonl").exists()
        if is_recorded:
            self._metrics.unlink(missing_ok=True)
        if not self._metrics.exists():
            self._append([METRIC_KEYS])
        for row in load_metrics(self.folder) if is_recorded else ():
            self.log(row)

    def log(self, row: Mapping[str, float | int | None]) -> None:
        self._append([[row.get(key) for key in METRIC_KEYS]])

    def summary(self, result: Mapping[str, Any]) -> None:
        self.table("summary", ("figure", "value"), list(flatten(result).items()))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        with (self.folder / f"{name.replace('/', '_')}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        self.table(name, columns, points)

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        self.table(name, ("line", *columns), [(line, *point) for line, points in series.items() for point in points])

    def finish(self, status: str) -> None: ...

    def _append(self, rows: Sequence[Sequence[Cell]]) -> None:
        with self._metrics.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


class WandbTracker:
    """``logger=wandb``: one W&B run per run, below ``<run folder>/wandb``.

    Modes: "offline" makes no connection; "online" falls back to offline with a warning when the server or the
    key is not there; "auto" is what ``WANDB_MODE`` says, else online where a key is stored, else offline;
    "disabled" records nothing.

    The id is random, never from the seeded streams, and kept in ``wandb/run_id.txt``, so two jobs with equal
    configurations are two runs and a resumed job goes on in its own.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str = "ckptplan",
        mode: WandbMode = "offline",
        entity: str | None = None,
        tags: Sequence[str] = (),
        job_type: str | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self.project, self.mode, self.entity, self.job_type = project, mode, entity, job_type
        self.tags = tuple(dict.fromkeys(tag[:MOST_TAG_LENGTH] for tag in tags if tag))
        self._run: Any = None
        self._wandb: Any = None
        self._environment: dict[str, str | None] = {}

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        mode = resolve_mode(self.mode)
        self._keep_files_inside()
        self._wandb = importlib.import_module("wandb")
        try:
            self._run = self._init(mode, stored_run_id(self.folder), config, name, group)
        except Exception as error:  # no network, a wrong key, a server that refuses: each has its own class
            if mode != "online":
                raise
            log.warning("W&B is not reachable (%s): this run is recorded offline", str(error).strip())
            # W&B's service holds the id of the attempt that failed as "in use" until the process ends
            self._run = self._init("offline", new_run_id(self.folder), config, name, group)
        self._run.define_metric("train/step")
        for pattern in ("train/*", "eval/*"):
            self._run.define_metric(pattern, step_metric="train/step")

    def log(self, row: Mapping[str, float | int | None]) -> None:
        self._run.log(tracked_names(row))

    def summary(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(flatten(result))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._run.log({name: self._table(columns, rows)})

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        self._run.log({name: self._wandb.plot.line(self._table(columns, points), *columns, title=name)})

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        xs, ys = ([[point[axis] for point in points] for points in series.values()] for axis in (0, 1))
        title = f"{name}: {columns[1]}"
        self._run.log({name: self._wandb.plot.line_series(xs, ys, list(series), title=title, xname=columns[0])})

    def finish(self, status: str) -> None:
        try:
            self._run.finish(exit_code=0 if status == "ok" else 1)
        finally:
            self._restore_environment()
        if self._run.offline and not self._run.disabled:
            log.info("to upload this run: wandb sync %s", shlex.quote(str(self._run.settings.sync_dir)))

    def _init(self, mode: str, run_id: str, config: Mapping[str, Any], name: str | None, group: str | None) -> Any:
        settings = self._wandb.Settings(
            quiet=True,
            silent=True,
            console="off",
            init_timeout=ONLINE_TIMEOUT_S,
            finish_timeout=ONLINE_TIMEOUT_S,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # its sampling thread disturbs step times and asks a cloud metadata address
            x_disable_machine_info=True,
        )
        return self._wandb.init(
            entity=self.entity,
            project=self.project,
            tags=self.tags,
            job_type=self.job_type,
            name=name,
            group=group,
            id=run_id,
            resume="allow",
            reinit="finish_previous",  # else a run left open in this process would be handed back
            dir=str(self.folder),
            mode=mode,
            config=dict(config),
            settings=settings,
        )

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Any:
        return self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])

    def _keep_files_inside(self) -> None:
        """W&B stages tables in the home folder; beside the run they are found again when it is synchronised."""
        staging = {name: str(self.folder / "wandb" / "data") for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
        for name, value in {**staging, "WANDB_ERROR_REPORTING": "false"}.items():
            self._environment[name] = os.environ.get(name)
            os.environ.setdefault(name, value)
        if os.environ.get("WANDB_MODE", "online") not in _MODES_OF_WANDB:  # W&B refuses it, whatever mode it is given
            self._environment["WANDB_MODE"] = os.environ.pop("WANDB_MODE")

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment.clear()


class GuardedTracker:
    """Any tracker, made harmless: whatever goes wrong in or behind it costs one warning and no training.

    A tracker that does not start is left alone from then on; one that fails at a call gets the next one.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._is_open = self._has_warned = False

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        self._is_open = self._guard("start", lambda: self._tracker.start(config, name, group))

    def log(self, row: Mapping[str, float | int | None]) -> None:
        self._guard_if_open("log metrics", lambda: self._tracker.log(row))

    def summary(self, result: Mapping[str, Any]) -> None:
        self._guard_if_open("write the summary", lambda: self._tracker.summary(result))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._guard_if_open(f"write the table {name}", lambda: self._tracker.table(name, columns, rows))

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        self._guard_if_open(f"draw {name}", lambda: self._tracker.curve(name, columns, points))

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        self._guard_if_open(f"draw {name}", lambda: self._tracker.curves(name, columns, series))

    def finish(self, status: str) -> None:
        self._guard_if_open("finish", lambda: self._tracker.finish(status))
        self._is_open = False

    def _guard_if_open(self, what: str, action: Callable[[], None]) -> None:
        if self._is_open:
            self._guard(what, action)

    def _guard(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except (Exception, SystemExit) as error:  # any class: nothing behind a tracker can stop a run
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            name, reason = type(self._tracker).__name__, str(error).strip() or type(error).__name__
            log.log(level, "%s could not %s: %s. The run goes on; metrics.jsonl has every figure.", name, what, reason)
            return False
        return True


def stored_run_id(folder: Path) -> str:
    """The W&B id of the run in ``folder``: the one it had, else a new one."""
    path = folder / RUN_ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else new_run_id(folder)


def new_run_id(folder: Path) -> str:
    """A random W&B id, stored in ``folder`` for the next time."""
    run_id = secrets.token_hex(4)
    (folder / RUN_ID_FILE).parent.mkdir(exist_ok=True)
    write_atomic(folder / RUN_ID_FILE, run_id + "\n")
    return run_id


def resolve_mode(mode: WandbMode) -> str:
    """What ``mode`` comes to here: offline, online or disabled; ``online`` without a key is offline, with a warning."""
    is_known = has_key()
    if mode == "auto":
        wanted = os.environ.get("WANDB_MODE", "")
        if wanted and wanted not in _MODES_OF_WANDB:
            told = ", ".join(_MODES_OF_WANDB)
            log.warning("WANDB_MODE=%r is unknown (expected %s): it is taken as not set", wanted, told)
        mode = cast(WandbMode, _MODES_OF_WANDB.get(wanted, "online" if is_known else "offline"))
    if mode == "online" and not is_known:
        log.warning("W&B has no key for %s: this run is recorded offline. To store one: wandb login", host())
        return "offline"
    return mode


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host()) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def host() -> str:
    return urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""


def open_tracker(
    kind: Literal["none", "csv", "tensorboard", "trackio", "wandb"],
    folder: str | Path,
    *,
    project: str = "ckptplan",
    mode: WandbMode = "offline",
    entity: str | None = None,
    tags: Sequence[str] = (),
    job_type: str | None = None,
) -> Tracker:
    """The tracker of ``logger=<kind>`` for the run in ``folder``, guarded: none of its methods raises.

    The options are W&B's; trackio has the project too.
    """
    options: dict[str, Any] = {"project": project, "mode": mode, "entity": entity, "tags": tags, "job_type": job_type}
    trackers: dict[str, Callable[[], Tracker]] = {
        "none": NoTracker,
        "csv": lambda: CsvTracker(folder),
        "tensorboard": lambda: TensorBoardTracker(folder),
        "trackio": lambda: TrackioTracker(folder, project),
        "wandb": lambda: WandbTracker(folder, **options),
    }
    if kind not in trackers:
        raise ValueError(f"logger.kind={kind!r} is unknown; expected {', '.join(trackers)}")
    return GuardedTracker(trackers[kind]())


@contextmanager
def tracking(
    tracker: Tracker, config: Mapping[str, Any], name: str | None = None, group: str | None = None
) -> Iterator[Tracker]:
    """Start ``tracker`` and finish it whatever happens: "failed" if the block raises, else "ok".

    A block that knows better calls ``tracker.finish(status)`` itself; finishing again does nothing.
    """
    tracker.start(config, name, group)
    try:
        yield tracker
    except BaseException:
        tracker.finish("failed")
        raise
    tracker.finish("ok")
