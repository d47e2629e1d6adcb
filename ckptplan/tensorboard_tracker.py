"""``logger=tensorboard``: the run as TensorBoard event files. Needs tensorboard."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptplan.record import flatten

Cell = str | float | int | bool | None
Points = Sequence[tuple[float, float]]


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


def _cell(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", "\\|")
