"""Earlier runs: found by folder, name, "latest" or their configuration, and what was typed for them. Torch-free.

A run can be resumed when its folder holds a state: a folder below ``state/`` with a manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckptplan.config import BUDGET_KEYS, UNHASHED_KEYS
from ckptplan.config.loading import config_hash
from ckptplan.config.wording import config_error, hydra_text, nearest, shell_override
from ckptplan.record import flatten, write_atomic

log = logging.getLogger(__name__)

STATE_FOLDER = "state"
_STATE_ELSEWHERE = re.compile(r"^state:\n(?:  .*\n)*?  location: (?!null$)", re.MULTILINE)
AUTO = "auto"
_SUPERSEDED = "superseded"  # where the state engine sets newer states aside, inside the folder of states
LATEST = "latest"
_DEEPEST = (
    5  # folders between output_dir and a run: train/<date>/<time>, or multirun/<date>/<time>/<job>, or a user's own
)
_LISTED = 8  # runs, or changes, that a message names


@dataclass(frozen=True)
class FoundRun:
    """A run that can be resumed; ``checkpoint_id`` is the state that was asked for, None: the newest."""

    folder: Path
    checkpoint_id: str | None = None

    @property
    def path(self) -> str:
        """What ``resume=`` is given for it."""
        folder = self.folder
        return str(folder if self.checkpoint_id is None else folder / STATE_FOLDER / self.checkpoint_id)

    def typed(self) -> list[str] | None:
        """The overrides that the run was made with, as typed; None where the file that tells is gone."""
        try:
            found = yaml.safe_load((self.folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise config_error("resume", self.path, f"its .hydra/overrides.yaml cannot be read: {error}") from error
        if not isinstance(found or [], list):
            raise config_error("resume", self.path, "its .hydra/overrides.yaml is not a list of overrides")
        return [str(text) for text in found or []]


def remember_typed(folder: Path, overrides: Sequence[str]) -> None:
    """What a run that goes on is made with from now on."""
    (folder / ".hydra").mkdir(exist_ok=True)
    write_atomic(folder / ".hydra" / "overrides.yaml", yaml.safe_dump(list(overrides), allow_unicode=True, width=10**6))


def holds_state(folder: Path) -> bool:
    """Whether there is anything to resume, good or damaged; a run that saves somewhere else may have it there."""
    if next((folder / STATE_FOLDER).glob("*/manifest.json"), None) is not None:
        return True
    try:
        return _STATE_ELSEWHERE.search((folder / "config.yaml").read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def typed_value(key: str, overrides: Sequence[str]) -> str | None:
    """The text that the last override of ``key`` gives it; None where there is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found = [text for text in overrides if _key(text) == key]
    if not found:
        return None
    value = OverridesParser.create().parse_override(found[-1]).value()
    return None if value is None else str(value).replace("\\${", "${")  # what `hydra_text` has escaped


def without(keys: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """The overrides of all other keys."""
    left_out = set(keys)
    return [text for text in overrides if _key(text) not in left_out]


def find_run(wanted: str, output_dir: Path) -> FoundRun:
    """The run of ``resume=<wanted>``: a folder, a state in it, a name, or "latest".

    Raises ``ConfigError`` that says what is there instead.
    """
    folder = (latest_folder(output_dir) if wanted == LATEST else Path(wanted)).absolute()
    if (folder / "manifest.json").is_file() and folder.parent.name == STATE_FOLDER:
        return FoundRun(folder.parent.parent, folder.name)
    if holds_state(folder):
        return FoundRun(folder)
    if (folder / "manifest.json").is_file() and folder.parent.name == _SUPERSEDED:
        back = folder.parent.parent / folder.name
        problem = f"a state that was set aside when its run went on from an older one; move it back, to {back}"
        raise config_error("resume", wanted, problem, remedy=f"{shell_override('resume', str(back))} after that")
    run = _run_round(folder)
    if run is not None:
        there = ", ".join(path.parent.name for path in sorted((run / STATE_FOLDER).glob("*/manifest.json")))
        raise config_error(
            "resume", wanted, f"no state of the run {run}; it holds {there}", remedy=shell_override("resume", str(run))
        )
    if (folder / "multirun.yaml").is_file():
        remedy = f"the sweep's command with {shell_override('sweep.resume', str(folder))}, or resume=<one of its jobs>"
        raise config_error("resume", wanted, "the folder of a sweep, not of a run", remedy=remedy)
    newest = next(resumable(output_dir), None) if wanted == LATEST else None
    if newest is not None:
        what = "holds no state" if (folder / "config.yaml").is_file() else "is no run"
        log.warning("resume=latest: %s %s; going on with the newest run that holds one, %s", folder, what, newest)
        return FoundRun(newest)
    if (folder / "config.yaml").is_file():
        raise config_error("resume", wanted, f"the run {folder} holds no state", remedy=_remedy(output_dir))
    named = [run for run in runs_below(output_dir) if _name_of(run) == wanted]
    for run in named:
        if holds_state(run):
            log.info("resume=%s: the newest run of that name that holds a state is %s", wanted, run)
            return FoundRun(run)
    if named:
        raise config_error(
            "resume", wanted, f"no run of that name holds a state: {named[0]}", remedy=_remedy(output_dir)
        )
    if wanted == LATEST:
        problem = f"there is no run in {output_dir.absolute()}"
        raise config_error("resume", wanted, problem, remedy="resume=<a run folder>, or output_dir=<where it is>")
    names = list(dict.fromkeys(name for run in resumable(output_dir) if (name := _name_of(run)) is not None))
    meant = nearest(wanted, names)
    problem = f"neither a run folder nor the name of a run in {output_dir.absolute()}"
    remedy = shell_override("resume", meant) if meant else _remedy(output_dir)
    raise config_error("resume", wanted, problem, meant=meant, allowed=names[:_LISTED], remedy=remedy)


def _run_round(folder: Path) -> Path | None:
    """The run whose folder of states, or something in it that is none, was given in place of the run."""
    states = folder if folder.name == STATE_FOLDER else folder.parent
    return states.parent if states.name == STATE_FOLDER and holds_state(states.parent) else None


def find_same(resolved: dict[str, Any], output_dir: Path, own_folder: Path | None) -> FoundRun | None:
    """The run of ``resume=auto``: that in ``own_folder``, else the newest run of this configuration.

    Whoever names a folder wants the run in it, also where that was killed before its first state and begins anew:
    with another run taken, of the same configuration and perhaps finished, the one asked for would never be trained.
    """
    if own_folder is not None:
        return FoundRun(own_folder) if holds_state(own_folder) else None
    wanted = config_hash(resolved)
    for run in resumable(output_dir):
        if _hash_of(run) == wanted:
            return FoundRun(run)
    return None


def latest_folder(output_dir: Path) -> Path:
    """Where ``<output_dir>/latest`` leads, a link or a text file."""
    latest = output_dir.absolute() / LATEST
    if latest.is_file():
        return latest.parent / os.fsdecode(latest.read_bytes()).strip()
    return Path(os.path.realpath(latest))


def resumable(output_dir: Path) -> Iterator[Path]:
    """The runs that hold a state, newest first."""
    return (run for run in runs_below(output_dir) if holds_state(run))


def runs_below(output_dir: Path) -> list[Path]:
    """Folders of all runs, that begun or resumed last first."""
    found: list[tuple[float, Path]] = []
    for folder, inner, files in os.walk(output_dir.absolute()):
        path = Path(folder)
        if "config.yaml" in files and path.name != ".hydra":
            with contextlib.suppress(FileNotFoundError):  # moved aside or deleted meanwhile
                found.append(((path / "config.yaml").stat().st_mtime_ns, path))
            inner.clear()
        elif len(path.relative_to(output_dir.absolute()).parts) >= _DEEPEST:
            inner.clear()
    return [path for _, path in sorted(found, reverse=True)]


def merge_typed(earlier: Sequence[str], now: Sequence[str]) -> list[str]:
    """The overrides of a run that goes on: those of before, changed by what is typed now.

    A key typed anew replaces the old value, a group chosen anew also the old keys below it, a budget any other budget.
    What belongs to one start (``resume``, hydra's own keys) is not taken over. A key that was added (``+key=``) is
    none of the configuration's own: typed anew without the ``+`` it is added again.
    """
    added = {_key(text): text[: -len(text.lstrip("+"))] for text in earlier if text.startswith("+")}
    now = [text if text.startswith(("+", "~")) else added.get(_key(text), "") + text for text in now]
    replaced = {_key(text) for text in now}
    if replaced & set(BUDGET_KEYS):
        replaced |= set(BUDGET_KEYS)
    groups = {key for key in replaced if "." not in key}
    kept = [
        text
        for text in earlier
        if (key := _key(text)) not in replaced
        and key.partition(".")[0] not in groups
        and key != "resume"
        and not key.startswith(("hydra.", "hydra/"))
    ]
    return [*kept, *now]


def overrides_to_resume(
    found: FoundRun, now: Sequence[str], resolved_for: Callable[[list[str]], Mapping[str, Any]]
) -> list[str]:
    """The overrides with which ``found`` goes on under those that are typed ``now``, ``resume=`` among them.

    ``resolved_for`` gives the resolved configuration of overrides. Raises ``ConfigError`` where it is not known any
    more what was typed for the run, and ``now`` alone would make another run of it.
    """
    earlier = found.typed()
    if earlier is None:
        _require_same(found, resolved_for(list(now)), now)
    return [*merge_typed(earlier or (), now), f"resume={hydra_text(found.path)}"]


def _require_same(found: FoundRun, resolved: Mapping[str, Any], now: Iterable[str]) -> None:
    typed = tuple(_key(text).replace("/", ".") for text in now)
    stored = _stored(found.folder)
    known = {key.replace("/", ".") for key in flatten(stored)}  # a later version of this package may have more keys
    changed = [
        line
        for line in describe_changes(stored, resolved)
        if (key := line.partition(":")[0]) in known
        and key.partition(".")[0] not in UNHASHED_KEYS
        and not any(key == name or key.startswith(f"{name}.") for name in typed)
    ]
    if changed:
        changed.sort(key=lambda line: "._target_:" not in line)  # another model or data set explains the rest
        more = f"; and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
        problem = (
            "its .hydra/overrides.yaml is gone, so what was typed for it is not known, and this command differs from "
            f"the run in what is not typed: {'; '.join(changed[:_LISTED])}{more}"
        )
        remedy = f"{shell_override('resume', found.path)} and beside it what was typed for the run"
        raise config_error("resume", found.path, problem, remedy=remedy)


def describe_changes(then: Mapping[str, Any], now: Mapping[str, Any], sections: Iterable[str] = ()) -> list[str]:
    """``steps: 60 -> 120`` for every key of two resolved configurations that differs, in all or in these sections."""
    before, after = flatten(then), flatten(now)
    wanted = tuple(f"{section}/" for section in sections)
    return [
        f"{key.replace('/', '.')}: {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and (not wanted or key.startswith(wanted))
    ]


def _key(override: str) -> str:
    """``planner`` for ``planner=dp``, ``++planner=dp``, ``planner@there=dp`` and ``~planner``."""
    return re.sub(r"@.*", "", override.partition("=")[0].lstrip("+~"))


def _remedy(output_dir: Path) -> str:
    run = next(resumable(output_dir), None)
    return shell_override("resume", str(run)) if run else "the command without resume="


def _stored(folder: Path) -> dict[str, Any]:
    """The resolved configuration of a run; empty where it cannot be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        log.debug("%s is left out: %s", folder, error)
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _name_of(folder: Path) -> str | None:
    name = _stored(folder).get("name")
    return name if isinstance(name, str) else None


def _hash_of(folder: Path) -> str | None:
    stored = _stored(folder)
    return config_hash(stored) if stored else None


def point_latest_at(folder: Path, output_dir: Path) -> None:
    """Make ``<output_dir>/latest`` point to ``folder``: a link, or a text file where links cannot be made."""
    latest = output_dir.absolute() / "latest"
    if not folder.is_relative_to(latest.parent):
        return  # a run folder given by hand, somewhere else
    aside = latest.with_name(f".latest-{os.getpid()}")
    target = os.path.relpath(folder, latest.parent)
    try:
        aside.symlink_to(target, target_is_directory=True)
    except OSError:
        aside.write_text(target + "\n", encoding="utf-8")
    with contextlib.suppress(OSError):  # a folder of that name is the user's own
        aside.replace(latest)
    aside.unlink(missing_ok=True)
