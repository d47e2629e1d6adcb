"""The records of a run folder or a sweep folder, read back for looking at: what is there, and what is not. Torch-free.

A folder of yesterday's version, of a sweep that still runs, or with a torn file in it can be looked at too: what cannot
be read is named in ``faults`` and left out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckptplan.curve import PlanCurve
from ckptplan.errors import CkptplanError
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import ChainProfile
from ckptplan.record import RESULT_SCHEMA, load_metrics

_T = TypeVar("_T")
Unreadable = dict[tuple[str, str], list[str]]  # (file, why) -> names of the runs
# Overrides that say where a run stands among others; the command that repeats it alone is without them.
_OF_A_SWEEP = ("sweep=", "sweep.", "logger.group=", "profile.cache=", "profile.options=", "hydra.", "hydra/")


@dataclass(frozen=True)
class RunRecords:
    """One run. What it did not write is None or empty.

    Attributes:
        name: of its folder; in a sweep ``003_dp_0.5_1f3a9c2e``.
        result: the object of ``result.json``.
        command: what runs it again; None where nothing says what was typed.
    """

    name: str
    index: int
    result: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    profile: ChainProfile | None = None
    plan: CheckpointPlan | None = None
    curve: PlanCurve | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()

    def figure(self, path: str) -> Any:
        """``figure("memory/measured_peak_bytes")``; None where it is unknown."""
        value: Any = self.result
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Records:
    """All runs of a folder, in the order of their numbers, and what could not be read."""

    folder: Path
    is_sweep: bool
    runs: tuple[RunRecords, ...]
    faults: tuple[str, ...] = ()


def is_job_of_sweep(folder: Path) -> bool:
    """Whether the run folder belongs to a multirun, by the file that Hydra writes beside its jobs."""
    return (folder.parent / "multirun.yaml").exists()


def read_records(folder: str | Path) -> Records:
    """The records of a run folder or of a sweep folder.

    Raises ``CkptplanError`` naming the folder where it is none of them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CkptplanError(f"{folder} is no folder; expected that of a run or of a sweep, such as outputs/latest")
    faults: list[str] = []
    unreadable: Unreadable = {}
    if (folder / "result.json").exists():
        result = _read_result(folder / "result.json", faults)
        runs = [] if result is None else [_run(folder, folder.resolve().name, 0, result, unreadable)]
        if not runs:
            raise CkptplanError("; ".join(faults))
        return Records(folder, False, tuple(runs), (*faults, *_told(unreadable)))
    found = _jobs(folder, faults)
    if not found:
        told = f" ({'; '.join(faults)})" if faults else ""
        raise CkptplanError(f"{folder} holds no result.json and no jobs with one{told}; expected a run or sweep folder")
    runs = [_run(folder / name, name, index, result, unreadable) for name, (index, result) in found.items()]
    return Records(
        folder, True, tuple(sorted(runs, key=lambda run: (run.index, run.name))), (*faults, *_told(unreadable))
    )


def _told(unreadable: Unreadable) -> list[str]:
    """A line for each file and reason, however many runs share them: an old sweep has one reason for all its jobs."""
    return [f"{file} of {some(names)} could not be read ({why})" for (file, why), names in unreadable.items()]


def some(names: Sequence[str], most: int = 4) -> str:
    """``a, b, c, d and 16 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _jobs(folder: Path, faults: list[str]) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Job -> (number, result): the lines of ``results.jsonl``, and on top what the jobs' own folders say."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    table = folder / "results.jsonl"
    if table.exists():
        for line in table.read_bytes().splitlines():
            try:
                row = json.loads(line, parse_constant=lambda constant: None)
                found[str(row["job"])] = (int(row["index"]), row)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                faults.append(f"{table.name}: a line that is none ({error}) was left out")
    for number, job in enumerate(sorted(path for path in folder.iterdir() if (path / ".hydra").is_dir())):
        if (job / "result.json").exists():
            result = _read_result(job / "result.json", faults)
            if result is not None:
                head = job.name.partition("_")[0]
                found[job.name] = (int(head) if head.isdigit() else number, result)
        elif job.name not in found:
            faults.append(f"{job.name}: no result.json; it still runs, or was killed with its sweep")
    for path in sorted(folder.glob("*/result.json")):  # jobs that died before Hydra wrote anything
        if path.parent.name not in found:
            result = _read_result(path, faults)
            head = path.parent.name.partition("_")[0]
            if result is not None:
                found[path.parent.name] = (int(head) if head.isdigit() else len(found), result)
    return found


def _read_result(path: Path, faults: list[str]) -> Mapping[str, Any] | None:
    """The object of a ``result.json``; other keys than this version's are no fault here, another schema is."""
    where = f"{path.parent.name}/{path.name}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda constant: None)
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{where} could not be read ({error})")
        return None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != RESULT_SCHEMA:
        faults.append(f"{where} has schema {schema!r}; this version reads {RESULT_SCHEMA!r}")
        return None
    return dict(found)


def _run(folder: Path, name: str, index: int, result: Mapping[str, Any], unreadable: Unreadable) -> RunRecords:
    def read(file: str, load: Callable[[Path], _T]) -> _T | None:
        path = folder / file
        if not path.exists():
            return None
        try:
            return load(path)
        except (OSError, ValueError, RecursionError, CkptplanError, OmegaConfBaseException) as error:
            why = str(error).partition("\n")[0].removeprefix(f"{path}: ")
            unreadable.setdefault((file, why), []).append(name)
            return None

    overrides = read(".hydra/overrides.yaml", _plain)
    return RunRecords(
        name,
        index,
        result,
        config=read("config.yaml", _plain) or {},
        command=_command(overrides, (result.get("environment") or {}).get("overrides")),
        profile=read("profile.json", ChainProfile.load),
        plan=read("plan.json", CheckpointPlan.load),
        curve=read("curve.json", PlanCurve.load),
        metrics=tuple(read("metrics.jsonl", load_metrics) or ()),
    )


def _plain(path: Path) -> Any:
    """A YAML file as it stands, references not followed; raises ``ValueError`` where it is none."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # the YAML parser's own errors have no base that is ours to import
        raise ValueError(str(error)) from error


def _command(overrides: Any, joined: str | None) -> str | None:
    """``python train.py`` with what was typed, each word quoted for the shell where it has to be."""
    if isinstance(overrides, list):
        words = [str(word) for word in overrides]
    elif joined is not None:  # of a folder without .hydra/: words with spaces in them cannot be told apart any more
        words = joined.split()
    else:
        return None
    own = [word for word in words if not word.lstrip("+~").startswith(_OF_A_SWEEP)]
    return shlex.join(["python", "train.py", *own])
