"""What a block computes, as plain data: operator calls, what they read and make, names of results. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_NAME = re.compile(r"(?:[^\s,\[\]]+\.)?(?P<operator>[\w:]+)#(?P<nth>[0-9]+):(?P<position>[0-9]+)")


class Output(NamedTuple):
    """One output of one operator call of a block: the ``nth`` call of ``operator``, counted over the block.

    ``operator`` is the name without overload, with its namespace unless that is aten: ``addmm``, ``mine::scan``.
    """

    operator: str
    nth: int
    position: int = 0

    def __str__(self) -> str:
        return f"{self.operator}#{self.nth}:{self.position}"

    @staticmethod
    def is_name(name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    @staticmethod
    def of(name: str) -> Output:
        """From ``<submodule path>.<operator>#<n-th call>:<output>``; the path is for the reader.

        Raises ``ValueError`` for a name of another form.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no output; expected <submodule path>.<operator>#<n-th call>:<output>")
        return Output(match["operator"], int(match["nth"]), int(match["position"]))


@dataclass(frozen=True)
class Value:
    """What one operator call put into one storage.

    Attributes:
        operator: the number of the call that made it.
        keepable: False where later writes change it, or nobody filled all of it.
    """

    output: Output
    size_bytes: int
    operator: int
    keepable: bool


@dataclass(frozen=True)
class OperatorCall:
    """One operator call; ``reads`` and ``makes`` are numbers of values. What is at hand anyway is not among them."""

    name: str
    nth: int
    path: str  # of the submodule that ran it; "" for the block itself
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    time_ms: float


@dataclass(frozen=True)
class BlockOperators:
    """One run of a block. ``needed`` are the values that autograd saved; inputs and weights are at hand."""

    calls: tuple[OperatorCall, ...]
    values: tuple[Value, ...]
    needed: tuple[int, ...]
    sequence_hash: str

    def name_of(self, value: int) -> str:
        """``<submodule path>.<operator>#<n-th call>:<output>``, the call counted over the block."""
        made = self.values[value]
        path = self.calls[made.operator].path
        return f"{path}.{made.output}" if path else str(made.output)
