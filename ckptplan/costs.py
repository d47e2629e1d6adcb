"""What a stage costs under one way of running it, and the ways to run a block that are measured. Torch-free.

A profile (``profiles.py``) holds these for the blocks of a chain.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class InputsLetGo:
    """Inputs that a stage lets go of in the midst of its backward.

    Attributes:
        inputs: which of its input storages.
        backward_peak_bytes: as of ``StageCost``, from then until it lets go of others or ends, where somebody else
            holds these inputs and those it let go of before, so that nothing was freed.
    """

    inputs: tuple[int, ...]
    backward_peak_bytes: int

    def __post_init__(self) -> None:
        normalise_numbers(self, "inputs let go")


@dataclass(frozen=True)
class StageCost:
    """Bytes of one stage under one way of running it (kept, or recomputed).

    A *boundary storage* is memory that the stage hands to the next one; boundaries are accounted
    for between stages, so that two stages that hold the same tensor count it once.

    Attributes:
        saved_bytes: alive after the forward because of this stage, its input and output storages
            excluded (``k`` of the theory).
        forward_peak_bytes: most bytes alive during the forward, above what was alive before it;
            contains the output, not the input (``F``; for a recomputed stage ``n``).
        backward_peak_bytes: most bytes alive during the backward of this stage, above what the
            earlier stages retain; contains the saved bytes, the incoming and the produced gradient and,
            for a recomputed stage, the recomputation; not the input (``Q``).
        keeps_input: per input storage, whether this stage holds it until its backward.
        keeps_output: per output storage, whether this stage itself holds it until its backward.
        inputs_let_go: inputs that this stage lets go of in the midst of its backward, in that order; where an earlier
            stage holds one too nothing is freed, and the backward may peak higher (``backward_peak_beside``).
        weight_copies_bytes: of all that this stage holds until its backward, the copies of weights in a narrower type,
            as autocast makes them; None: not measured.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    keeps_input: tuple[bool, ...] = (True,)
    keeps_output: tuple[bool, ...] = (False,)
    weight_copies_bytes: int | None = None
    inputs_let_go: tuple[InputsLetGo, ...] = ()

    def __post_init__(self) -> None:
        normalise_numbers(self, "a stage cost")

    def backward_peak_beside(self, alone_bytes: Sequence[int]) -> int:
        """``backward_peak_bytes`` where of each input storage so many bytes are held by this stage alone.

        They are 0 for a storage that an earlier stage holds too.
        """
        peak, freed = self.backward_peak_bytes, 0
        for letting in self.inputs_let_go:
            freed += sum(alone_bytes[i] for i in letting.inputs)
            peak = max(peak, letting.backward_peak_bytes - freed)
        return peak

    def with_backward_peaks(self, changed: Callable[[int], int]) -> StageCost:
        """The same stage with all its backward peaks changed."""
        lettings = tuple(
            replace(letting, backward_peak_bytes=changed(letting.backward_peak_bytes)) for letting in self.inputs_let_go
        )
        return replace(self, backward_peak_bytes=changed(self.backward_peak_bytes), inputs_let_go=lettings)


@dataclass(frozen=True)
class SelectiveOption:
    """One way to keep part of a block: the outputs of some operators stay, the others are made again in backward.

    Attributes:
        saved_ops: what stays, in full: ``<submodule path>.<operator>#<n-th call>:<output>``; empty: nothing.
        cost: its bytes.
        time_ms: what it adds to a step, the recording in the forward included.
        flops: what it adds to a step.
        sequence_hash: of the operators that the block ran when the option was made.
    """

    saved_ops: tuple[str, ...]
    cost: StageCost
    time_ms: float | None = None
    flops: int | None = None
    sequence_hash: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved_ops", tuple(self.saved_ops))
        normalise_numbers(self, "a selective option")


@dataclass(frozen=True)
class OffloadOption:
    """A block whose activations are on the host between its forward and its backward.

    Attributes:
        cost: its bytes on the device.
        host_bytes: what lies on the host meanwhile.
        time_ms: what it adds to a step: the part of the transfers that nothing hides; None where no times were taken.
    """

    cost: StageCost
    host_bytes: int = 0
    time_ms: float | None = None

    def __post_init__(self) -> None:
        normalise_numbers(self, "an offloaded block")


@dataclass(frozen=True)
class CompiledOption:
    """A block compiled by torch.compile with one memory budget for its partitioner.

    Attributes:
        budget: 0 to 1; the share of what would be saved that the partitioner may save.
        cost: its bytes, measured on the compiled block.
        forward_time_ms, backward_time_ms: of the compiled block; None where no times were taken.
        time_ms: what it adds to a step beside the fastest measured way to keep or compile the block.
    """

    budget: float
    cost: StageCost
    forward_time_ms: float | None = None
    backward_time_ms: float | None = None
    time_ms: float | None = None

    def __post_init__(self) -> None:
        normalise_numbers(self, "a compiled option")
        if self.budget > 1:
            raise ValueError(f"a compiled option: budget={self.budget!r}; expected 0 to 1")


@dataclass(frozen=True)
class CompiledModelOption:
    """The model compiled by torch.compile as one graph with one memory budget for its partitioner.

    Attributes:
        budget: as of ``CompiledOption``.
        cost: of the whole step, loss included; nothing comes in and nothing goes out.
        step_time_ms: of forward, loss and backward, the least of twice the trials; None where no times were taken.
    """

    budget: float
    cost: StageCost
    step_time_ms: float | None = None

    def __post_init__(self) -> None:
        normalise_numbers(self, "an option of the compiled model")
        if self.budget > 1:
            raise ValueError(f"an option of the compiled model: budget={self.budget!r}; expected 0 to 1")


@dataclass(frozen=True)
class CompiledStep:
    """A whole step with every block compiled with one memory budget: what neighbours do to each other is in its time.

    Attributes:
        budget: as of ``CompiledOption``.
        step_time_ms: of forward, loss and backward, the least of twice the trials.
    """

    budget: float
    step_time_ms: float

    def __post_init__(self) -> None:
        normalise_numbers(self, "a step of compiled blocks")
        if self.budget > 1:
            raise ValueError(f"a step of compiled blocks: budget={self.budget!r}; expected 0 to 1")


# Figures as they come in ----------------------------------------------------------------------------------------------


def normalise_numbers(record: Any, where: str) -> None:
    """Brings the numbers and flags of a frozen dataclass to the declared types, or says which one is wrong."""
    for name, (is_tuple, kind) in _numeric_fields(type(record)).items():
        value = getattr(record, name)
        if is_tuple:
            single = value is None or isinstance(value, (bool, int, float)) or not hasattr(value, "__iter__")
            value = tuple(_number(v, kind, where, name) for v in ((value,) if single else value))
        else:
            value = _number(value, kind, where, name)
        object.__setattr__(record, name, value)


_NUMERIC_FIELDS: dict[type, dict[str, tuple[bool, str]]] = {}


def _numeric_fields(cls: type) -> dict[str, tuple[bool, str]]:
    """Field name -> (is it a tuple, "int" | "float" | "bool" with "?" where None is allowed)."""
    if cls not in _NUMERIC_FIELDS:
        found = {}
        for f in dataclasses.fields(cls):
            text = str(f.type)
            is_tuple = text.startswith("tuple[")
            core = text.removeprefix("tuple[").removesuffix(", ...]")
            kind = core.removesuffix(" | None")
            if kind in ("int", "float", "bool"):
                found[f.name] = (is_tuple, kind + ("?" if core != kind else ""))
        _NUMERIC_FIELDS[cls] = found
    return _NUMERIC_FIELDS[cls]


def _number(value: Any, kind: str, where: str, name: str) -> int | float | bool | None:
    if value is None and kind.endswith("?"):
        return None
    base = kind.removesuffix("?")
    if base == "bool":
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        raise TypeError(f"{where}: {name}={value!r} is a {type(value).__name__}; expected True or False")
    if isinstance(value, (bool, str, bytes)) or value is None or type(value).__name__ == "bool":
        raise TypeError(f"{where}: {name}={value!r} is a {type(value).__name__}; expected a number")
    try:
        number: int | float = operator.index(value) if base == "int" else float(value)
    except TypeError:
        raise TypeError(f"{where}: {name}={value!r} is a {type(value).__name__}; expected a whole number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{where}: {name}={value!r}; expected a finite number that is not negative")
    return number
