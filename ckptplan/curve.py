"""The whole trade-off between memory and recomputation of a chain: every peak that pays, with its plan. Torch-free.

    print(plan_curve(profiles).text)
    memory as a share of 413.2 MiB: 0.9 costs +0.6 %, 0.75 +1.6 %, 0.5 +3.4 %; knee at 0.62; no plan below 0.16

One solve of the recursion in ``planners/stretches.py`` without a budget gives all of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptplan.gaps import contracted, expanded
from ckptplan.nodes import nodes_text
from ckptplan.planners.budgets import step_cost
from ckptplan.planners.nested import tradeoff
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, MemoryModel, as_chain, require_memory
from ckptplan.recompute_cost import plan_recompute_cost
from ckptplan.simulate import no_checkpoint_peak, simulate_plan
from ckptplan.strict_json import canonical_json, decode_dataclass, parse_json_object, require_schema, write_text_whole
from ckptplan.units import format_bytes, format_ms

CURVE_SCHEMA = "ckptplan.curve/1"
_SHARES = (0.9, 0.75, 0.5, 0.35, 0.25)  # that the sentence tells


_SEGMENT = re.compile(r"R\([^()]*[ (]")  # one of more than one block, in a plan's text


@dataclass(frozen=True)
class CurvePoint:
    """One plan: its predicted peak, what recomputation adds to a step in ms or FLOPs, and its text."""

    peak_bytes: int
    cost: float | int
    plan: str


@dataclass(frozen=True)
class PlanCurve:
    """Plans of rising peak and falling cost, from the least peak to nothing recomputed.

    Attributes:
        points: each is a cheapest plan at its peak, within ``epsilon``.
        no_checkpoint_peak_bytes: predicted peak with every block kept.
        step_cost: forward and backward of a whole step, in ms or FLOPs; None where the profile does not hold it.
        epsilon: relative; no plan within a point's peak costs less than (1 - epsilon) x its cost. 0.0: exact; None:
            segments were limited in length, so that nothing is known.
        num_found: points of the whole trade-off, of which ``points`` are a selection where there are too many.
    """

    points: tuple[CurvePoint, ...]
    no_checkpoint_peak_bytes: int
    cost_kind: str = "time"
    memory_model: str = "peak"
    step_cost: float | None = None
    epsilon: float | None = 0.0
    num_found: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))
        if not self.points:
            raise ValueError("the curve has no points; it needs at least one")
        pairs = zip(self.points, self.points[1:], strict=False)
        if any(a.peak_bytes >= b.peak_bytes or a.cost < b.cost for a, b in pairs):
            raise ValueError("the curve's points are not sorted: peaks have to rise and costs not to rise with them")

    @property
    def minimum(self) -> CurvePoint:
        """The plan of least peak."""
        return self.points[0]

    @property
    def knee(self) -> CurvePoint:
        """The point that lies furthest below the straight line from the first point to the last."""
        first, last = self.points[0], self.points[-1]
        width, height = last.peak_bytes - first.peak_bytes, first.cost - last.cost
        if not (width and height):
            return last

        def below_line(point: CurvePoint) -> float:
            return (last.peak_bytes - point.peak_bytes) / width - (point.cost - last.cost) / height

        return max(self.points, key=below_line)

    def at(self, budget_bytes: int) -> CurvePoint | None:
        """The cheapest point within the budget; None below the minimum."""
        position = bisect_right([point.peak_bytes for point in self.points], budget_bytes)
        return self.points[position - 1] if position else None

    @property
    def text(self) -> str:
        """One sentence: what some shares of the memory cost, the knee, and where it ends."""
        whole = self.no_checkpoint_peak_bytes
        told: list[str] = []
        for share in _SHARES:
            point = self.at(int(share * whole))
            if point is not None:
                told.append(f"{share:g}{'' if told else ' costs'} {self._cost_text(point.cost)}")
        parts = [", ".join(told)] if told else []
        parts.append(f"knee at {self._share(self.knee)} ({self._cost_text(self.knee.cost)})")
        nested = any(_SEGMENT.search(point.plan) for point in self.points)
        kind = "no plan, segments and nests included," if nested else "no plan"
        parts.append(f"{kind} below {self._share(self.minimum)} ({format_bytes(self.minimum.peak_bytes)})")
        return f"memory as a share of {format_bytes(whole)}: {'; '.join(parts)}"

    def plot(self, width: int = 64, height: int = 16) -> str:
        """A picture in plain text: memory to the right, added cost upwards; ``K`` marks the knee.

        Where the last bytes are dear the picture ends at three times the knee's cost, and ``^`` stands for more.
        """
        whole = self.no_checkpoint_peak_bytes or 1
        most = min(float(self.minimum.cost), 3 * float(self.knee.cost)) or float(self.minimum.cost) or 1.0
        canvas = [[" "] * (width + 1) for _ in range(height + 1)]
        for column in range(width + 1):
            point = self.at(whole * column // width)
            if point is not None:
                row = height - round(min(1.0, float(point.cost) / most) * height)
                canvas[row][column] = "^" if point.cost > most else "*"
        knee = self.knee
        canvas[height - round(float(knee.cost) / most * height)][min(width, knee.peak_bytes * width // whole)] = "K"
        labels = [self._cost_text(most), *[""] * (height - 1), self._cost_text(0)]
        margin = max(map(len, labels))
        lines = [f"{label:>{margin}} |{''.join(row)}".rstrip() for label, row in zip(labels, canvas, strict=True)]
        end = format_bytes(self.no_checkpoint_peak_bytes)
        return "\n".join([*lines, f"{'':>{margin}} +{'-' * (width + 1)}", f"{'0':>{margin + 3}}{end:>{width}}"])

    def _share(self, point: CurvePoint) -> str:
        return f"{point.peak_bytes / max(self.no_checkpoint_peak_bytes, 1):.2g}"

    def _cost_text(self, cost: float) -> str:
        if self.step_cost:
            return f"{100 * cost / self.step_cost:+.3g} %"
        return f"+{format_ms(cost)}" if self.cost_kind == "time" else f"+{cost:.4g} FLOPs"

    def to_json(self) -> str:
        """Canonical text: equal curves give equal text, and :meth:`from_json` gives an equal curve."""
        return canonical_json({"schema": CURVE_SCHEMA, **dataclasses.asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the curve") -> PlanCurve:
        """Reads strictly. Raises ``ValueError`` (what, where, what was expected), ``UnsupportedPlanVersionError``."""
        data = parse_json_object(text, source)
        require_schema(data, CURVE_SCHEMA, source)
        return decode_dataclass(cls, data, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the curve as JSON; the file is whole or not there."""
        write_text_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlanCurve:
        """Reads what :meth:`save` wrote; raises as :meth:`from_json` does, naming the file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), source=str(path))


def plan_curve(
    profiles: ChainProfile | Sequence[BlockProfile],
    *,
    nested: bool = True,
    memory_model: MemoryModel = "peak",
    cost: CostKind = "time",
    most_points: int = 256,
) -> PlanCurve:
    """The cheapest plan at every peak, from the smallest reachable one to that of nothing recomputed.

    Args:
        nested: with segments and nests, as planner ``optimal``; else flat plans only, as ``dp``.
        most_points: where the trade-off has more, those are taken that suit as many budgets at equal distances.

    Raises ``TimingOnlyProfileError`` or ``ValueError`` for a profile without the figures needed.
    """
    chain = as_chain(profiles)
    if most_points < 2:
        raise ValueError(f"most_points={most_points!r}; expected at least 2: the two ends")
    require_memory(chain, memory_model)
    found = tradeoff(expanded(chain), cost=cost, memory_model=memory_model, nested=nested)
    points = []
    for need in _selected(found.peaks, most_points):
        nodes = contracted(chain, found.nodes(need))
        peak = simulate_plan(chain, nodes, memory_model).peak_bytes
        points.append(CurvePoint(peak, plan_recompute_cost(chain, nodes, cost), nodes_text(nodes)))
    return PlanCurve(
        points=tuple(points),
        no_checkpoint_peak_bytes=no_checkpoint_peak(chain, memory_model),
        cost_kind=cost,
        memory_model=memory_model,
        step_cost=_step_cost(chain, cost),
        epsilon=found.epsilon,
        num_found=len(found.peaks),
    )


def _selected(peaks: Sequence[int], most_points: int) -> list[int]:
    """At most so many of the peaks, both ends among them: the largest within each of equally distant budgets."""
    if len(peaks) <= most_points:
        return list(peaks)
    budgets = np.linspace(peaks[0], peaks[-1], most_points)
    budgets[-1] = peaks[-1]
    positions = np.searchsorted(np.array(peaks), budgets, side="right") - 1
    return [peaks[position] for position in sorted(set(positions.tolist()))]


def _step_cost(chain: ChainProfile, cost: CostKind) -> float | None:
    try:
        return step_cost(chain, cost)
    except ValueError:  # some figure is missing: costs are told without it
        return None
