"""One command: run the race, print its table, write JSON, table and picture.

    pip install -e '.[dev,race]'
    python -m pip install --no-deps --target FOLDER ckptplan==0.1.0rc1
    python -m tests.benchmarks.race --predecessor FOLDER

All of it takes half an hour to two hours; it can be run in parts, each model in each league being one:

    python -m tests.benchmarks.race --predecessor FOLDER --no-time                        # bytes, FLOPs, gradients
    python -m tests.benchmarks.race --predecessor FOLDER --models gpt12 --leagues eager   # and the times of one part
    python -m tests.benchmarks.race --merge                                               # one table of all parts

Each part is written to the folder when it is done. ``--resume`` takes those of the same settings as they are. What does
not depend on what else the machine does (bytes, FLOPs, gradients) is taken from a part of the same machine and versions
that is there already, unless ``--afresh``. Times need a machine that does nothing else. Exits with 1 where a rival won
anywhere, a budget was overstepped, a peak mispredicted, or a gradient differed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.race import report
from tests.benchmarks.race.judging import is_won
from tests.benchmarks.race.running import Settings, merged, race
from tests.benchmarks.race.subjects import MODELS, QUICK, SEED

BUDGETS = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2)
TIMED = (0.75, 0.5, 0.3)
ROUNDS = 8


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    start_s = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [_part(name, league, options) for name in options.models for league in options.leagues]
    parts = [part for part in parts if part is not None]
    if not parts:
        print(f"{options.out} holds no parts of {', '.join(options.models)} to merge", file=sys.stderr)
        return 2
    whole = _whole(parts) | {"note": options.note}
    (options.out / "race.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    has_pictures = importlib.util.find_spec("matplotlib") is not None
    table = report.markdown(whole, has_pictures=has_pictures)
    (options.out / "race.md").write_text(table, encoding="utf-8")
    written = ["race.json", "race.md"]
    for record in whole["models"] if has_pictures else ():
        written.append(f"race-{record['model']}.svg")
        report.plot([record], options.out / written[-1])
    print(table)
    print(f"{', '.join(written)} in {options.out}; {time.perf_counter() - start_s:.0f} s")
    return 0 if all(is_won(record["verdict"]) for record in whole["models"]) else 1


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts' records, those of a model as one; all that made them."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        by_model.setdefault(part["record"]["model"], []).append(part["record"])
    rounds = {part["settings"]["rounds"] for part in parts} - {0}
    return {
        "schema": "ckptplan.race/2",
        "commands": list(dict.fromkeys(part["command"] for part in parts)),
        "seed": SEED,
        "rounds": min(rounds, default=0),
        "machine": parts[0]["machine"],
        "models": [merged(records) for records in by_model.values()],
        "race_s": sum(part["record"]["race_s"] for part in parts),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [*MODELS, *QUICK]
    parser.add_argument("--models", nargs="+", choices=known, default=None, help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="shares of the unplanned peak")
    parser.add_argument("--timed", nargs="*", type=float, default=TIMED, help="budgets at which steps are timed")
    parser.add_argument("--leagues", nargs="+", choices=("eager", "compiled"), default=("eager", "compiled"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"steps timed of each kind (default {ROUNDS})")
    parser.add_argument("--no-time", action="store_true", help="leave the times out")
    parser.add_argument("--quick", action="store_true", help="small models, eager, no times: under a minute")
    parser.add_argument("--predecessor", type=Path, help="the folder into which ckptplan==0.1.0rc1 was installed")
    parser.add_argument("--resume", action="store_true", help="take the parts of the same settings that are there")
    parser.add_argument("--afresh", action="store_true", help="measure bytes, FLOPs and gradients again, too")
    parser.add_argument("--merge", action="store_true", help="run nothing: one table of all parts that are there")
    parser.add_argument("--note", default="", help="a sentence for the head of the table (what else the machine did)")
    parser.add_argument("--out", type=Path, default=Path("outputs/race"), help="default: outputs/race")
    options = parser.parse_args(arguments)
    if options.quick:
        options.no_time, options.leagues = True, ("eager",)
    if options.models is None:
        options.models = list(QUICK if options.quick else MODELS)
    if options.predecessor is not None and not (options.predecessor / "ckptplan").is_dir():
        parser.error(
            f"--predecessor {options.predecessor} holds no package ckptplan; make it with: "
            f"python -m pip install --no-deps --target {options.predecessor} ckptplan==0.1.0rc1"
        )
    if not all(0 < share <= 1 for share in options.budgets):
        parser.error(f"--budgets {options.budgets}; expected shares of the unplanned peak, 0 < share <= 1")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}; expected at least 1 (--no-time leaves the times out)")
    return options


def _command(options: argparse.Namespace) -> str:
    """What made the tables, without the names of this machine's folders."""
    words = ["python -m tests.benchmarks.race", "--models", *options.models, "--leagues", *options.leagues]
    words += (
        ["--no-time"] if options.no_time else ["--timed", *map(str, options.timed), "--rounds", str(options.rounds)]
    )
    return " ".join([*words, *(["--predecessor FOLDER"] if options.predecessor else [])])


def _as_data(settings: Settings) -> dict[str, Any]:
    data = {**dataclasses.asdict(settings), "predecessor": settings.predecessor is not None}
    return json.loads(json.dumps(data))


def _part(name: str, league: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """A model's race in one league: run now, or taken from the folder; None where there is none to be merged."""
    path = options.out / f"race-{name}-{league}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if options.merge:
        return found
    settings = Settings(
        budgets=tuple(options.budgets),
        rounds=0 if options.no_time else options.rounds,
        league=league,
        timed=tuple(options.timed),
        predecessor=options.predecessor if league == "eager" else None,
    )
    made = {"settings": _as_data(settings), "machine": _machine()}
    if options.resume and found is not None:
        if {key: found[key] for key in made} == made:
            return found
        _say(f"{path} is of other settings or another machine: {name} runs again")
    is_same = found is not None and found["machine"] == made["machine"] and not options.afresh
    known = found["record"]["configurations"] if found is not None and is_same else ()
    record = race(name, settings, _say, known)
    part = {**made, "command": _command(options), "record": record}
    path.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
    return part


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    packages = ("numpy", "scipy", "pulp", "pwlf", "matplotlib")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build: CPU or CUDA
        **{name: _version(name) for name in packages},
        "threads": 1,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
