"""Weights & Biases, CSV files or nothing, behind one small protocol. No tracker ever stops a run.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from ckptplan.record import METRIC_KEYS, flatten

log = logging.getLogger(__name__)

Cell = str | float | int | bool | None
WandbMode = Literal["offline", "auto", "online", "disabled"]


class Tracker(Protocol):
    """The lifetime is start, then any number of calls, then finish. No method raises because of the tracker."""

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None:
        """Begin the run; ``config`` is the resolved, plain configuration."""

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """One line of metrics, as in metrics.jsonl."""

    def summary(self, result: Mapping[str, Any]) -> None:
        """The final figures: the object of result.json; nested keys are joined with ``/``."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table, e.g. the plan block by block."""

    def curve(self, name: str, columns: tuple[str, str], points: Sequence[tuple[float, float]]) -> None:
        """A line plot of (x, y) points, e.g. the memory over one step."""

    def finish(self, status: str) -> None:
        """End the run; ``status`` is that of the result, anything but "ok" marks it failed."""


class NoTracker:
    """``logger=none``."""

    def start(self, config: Mapping[str, Any], name: str | None = None, group: str | None = None) -> None: ...
    def log(self, row: Mapping[str, float | int | None]) -> None: ...
    def summary(self, result: Mapping[str, Any]) -> None: ...
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None: ...
    def curve(self, name: str, columns: tuple[str, str], points: Sequence[tuple[float, float]]) -> None: ...
    def finish(self, status: str) -> None: ...
