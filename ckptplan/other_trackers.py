"""``logger=tensorboard`` and ``logger=trackio``: views of a run in other tools, each of which has to be installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.record import flatten, write_atomic

log = logging.getLogger(__name__)

Cell = str | float | int | bool | None
Points = Sequence[tuple[float, float]]
TRACKIO_NAME_FILE = "trackio_run.txt"


def tracked_names(row: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """Metrics under their names in a tracker: all of a step below ``train/``, an evaluation's below ``eval/``."""
    if "eval/loss" in row:
        return {"train/step": row["step"], "eval/loss": row["eval/loss"], "eval/seconds": row.get("eval_s")}
    return {key if "/" in key else f"train/{key}": value for key, value in row.items()}


class TensorBoardTracker:
    """Scalars of every step below ``<run folder>/tensorboard``, the result's as ``result/...``, tables as text.

    ``tensorboard --logdir outputs`` shows all runs. A figure that is unknown has no scalar.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._writer: Any = None

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(self.folder))
        about = {"name": name, "group": group, "config": config}
        self._text("config", f"```json\n{json.dumps(about, indent=2, default=str)}\n```")

    def log(self, row: Mapping[str, float | int | None]) -> None:
        for key, value in tracked_names(row).items():
            if key != "train/step":
                self._scalar(key, value, int(row["step"] or 0))

    def summary(self, result: Mapping[str, Any]) -> None:
        flat = flatten(result)
        for key, value in flat.items():
            if isinstance(value, (bool, int, float)):
                self._scalar(f"result/{key}", value, 0)
        self.table("result", ("figure", "value"), [(key, str(value)) for key, value in flat.items()])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._text(name, "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        self.table(name, columns, points)

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        self.table(name, ("line", *columns), [(line, *point) for line, points in series.items() for point in points])

    def finish(self, status: str) -> None:
        self._text("status", status)
        self._writer.close()

    def _scalar(self, name: str, value: float | int | None, step: int) -> None:
        if value is not None:  # in double precision: bytes are exact
            self._writer.add_scalar(name, float(value), step, new_style=True, double_precision=True)

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, 0)


class TrackioTracker:
    """One run in trackio's local store: scalars of every step, the result's as ``result/...``, tables as tables.

    The store is trackio's own, one for all runs (``TRACKIO_DIR``, else its default), so that ``trackio show`` compares
    them. There a name is an identity: ours ends in random letters, which are kept in the run folder, so that equal
    configurations are runs of their own and a resumed one goes on in its own. A figure that is unknown has no scalar.
    """

    def __init__(self, folder: str | Path, project: str = "ckptplan") -> None:
        self.folder, self.project = Path(folder), project
        self._run: Any = None
        self._trackio: Any = None
        self._step = 0

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        self._trackio = importlib.import_module("trackio")
        path = self.folder / TRACKIO_NAME_FILE
        if not path.exists():
            write_atomic(path, f"{name or self.folder.name}-{secrets.token_hex(4)}\n")
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            self._run = self._trackio.init(
                project=self.project,
                name=path.read_text(encoding="utf-8").strip(),
                group=group,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, row: Mapping[str, float | int | None]) -> None:
        self._step = int(row["step"] or 0)
        self._log({key: value for key, value in tracked_names(row).items() if key != "train/step"})

    def summary(self, result: Mapping[str, Any]) -> None:
        flat = flatten(result)
        self._log({f"result/{key}": value for key, value in flat.items() if isinstance(value, (bool, int, float))})
        self.table("result", ("figure", "value"), [(key, str(value)) for key, value in flat.items()])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._log({name: self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])})

    def curve(self, name: str, columns: tuple[str, str], points: Points) -> None:
        self.table(name, columns, points)

    def curves(self, name: str, columns: tuple[str, str], series: Mapping[str, Points]) -> None:
        self.table(name, ("line", *columns), [(line, *point) for line, points in series.items() for point in points])

    def finish(self, status: str) -> None:
        self._run.log({"status": status}, step=self._step)
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # not the run's own: this also keeps trackio from ending it again at exit
        log.info("to see this run: trackio show --project %s", self.project)

    def _log(self, figures: Mapping[str, Any]) -> None:
        self._run.log({key: value for key, value in figures.items() if value is not None}, step=self._step)


def _cell(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", "\\|")
