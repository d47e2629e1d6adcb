"""Every exception that ckptplan raises on purpose; each carries its numbers as attributes.

A bad single value (wrong type, out of range) raises ``ValueError`` or ``TypeError`` naming the
argument. Everything that a caller may want to catch as "ckptplan said no" derives from
``CkptplanError``.
"""

from __future__ import annotations

from collections.abc import Sequence

# What the forward of a model raises on an input that does not fit it.
MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError)


class CkptplanError(Exception):
    """Base of all errors of this package."""


class ConfigError(CkptplanError):
    """The run description is wrong: the message names key, value, what is allowed and the remedy."""


class TargetImportError(ConfigError):
    """``_target_`` names something in a module that cannot be imported: it raises, or needs what is missing."""


class BlockDeclarationError(CkptplanError):
    """The declared blocks do not form a chain of distinct submodules of the model."""


class UnsupportedBoundaryError(CkptplanError):
    """What one block hands to the next cannot be followed (the message says which and why)."""


class NoDifferentiableOutputError(CkptplanError):
    """No block has an output that a gradient can flow through."""

    def __init__(self, message: str, block_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.block_ids = tuple(block_ids)


class CompilerMissingError(CkptplanError):
    """Blocks cannot be compiled on this machine: what is missing, and how to get it."""


class TimingOnlyProfileError(CkptplanError):
    """The profile holds no memory figures, so no plan can be made from it."""

    def __init__(self, message: str, block_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.block_ids = tuple(block_ids)


class InfeasibleTargetError(CkptplanError):
    """No plan of this kind meets the target.

    Attributes:
        budget_bytes: the budget asked for, in bytes (None where the target is not one in bytes).
        smallest_reachable_bytes: least peak of any plan of the planner's own kind.
        smallest_reachable_any_bytes: least peak of any plan over the same profile (None: not computed).
        limited_by: the block or region that sets ``smallest_reachable_bytes``, and in which phase.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int | None = None,
        smallest_reachable_bytes: int | None = None,
        smallest_reachable_any_bytes: int | None = None,
        limited_by: str | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_reachable_bytes = smallest_reachable_bytes
        self.smallest_reachable_any_bytes = smallest_reachable_any_bytes
        self.limited_by = limited_by


class PlanIncompatibleError(CkptplanError):
    """The plan does not belong to this model, these inputs or itself.

    Attributes:
        faults: every fault found, one sentence each.
    """

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        head = "" if len(self.faults) == 1 else f"{len(self.faults)} faults:\n- "
        super().__init__(head + "\n- ".join(self.faults))


class StepMismatchError(CkptplanError):
    """A planned training step does not give what the unplanned one gives.

    Attributes:
        faults: every difference, by parameter or buffer.
        block_id: the block in which they begin (None: outside the blocks).
        is_deterministic: whether two unplanned steps are equal there.
    """

    def __init__(
        self, message: str, *, faults: Sequence[str] = (), block_id: str | None = None, is_deterministic: bool = True
    ) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
        self.block_id = block_id
        self.is_deterministic = is_deterministic


class DryRunError(CkptplanError):
    """A step cannot be run on fake tensors: it decides by values, or has an operator that knows no fake tensors."""


class SizeRefusedError(CkptplanError):
    """The model fails on a batch of a size that was made up to look at it: the message has the size and its error."""


class LargerBatchWarning(UserWarning):
    """A training forward is given more than what was measured, so the predicted peak does not hold for it."""


class UnsupportedPlanVersionError(CkptplanError):
    """The plan or profile file was written in a format that this version does not read."""


class PlannerScaleError(CkptplanError):
    """The instance is beyond the bound that this planner states for itself."""


class NonFiniteError(CkptplanError):
    """Training met NaN or infinite losses or gradients too many times in a row.

    Attributes:
        step: the optimizer step (from 1) at which the run gave up.
        consecutive: how many updates in a row were not finite.
    """

    def __init__(self, message: str, *, step: int, consecutive: int) -> None:
        super().__init__(message)
        self.step = step
        self.consecutive = consecutive


class RankFailedError(CkptplanError):
    """Another process of the same run failed, so this one ends too.

    Attributes:
        rank: the one that failed.
    """

    def __init__(self, message: str, *, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class RunInterruptedError(CkptplanError):
    """A signal asked the run to end in a phase that has no partial result, such as profiling.

    Attributes:
        signal_number, signal_name: which one, e.g. 15 and "SIGTERM".
    """

    def __init__(self, signal_number: int, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.signal_number = signal_number
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[type[RunInterruptedError], tuple[int, str]]:
        return RunInterruptedError, (self.signal_number, self.signal_name)


class StateError(CkptplanError):
    """Base of what `ckptplan.state` raises on purpose.

    Attributes:
        faults: every fault found, one sentence each (one for most errors).
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        self.faults = tuple(faults) or (message,)
        super().__init__(message + "".join(f"\n- {fault}" for fault in faults))


class UnsaveableValueError(StateError, TypeError):
    """Some values of the payload have no exact form in a checkpoint; every one is named by path and type."""


class DuplicateCheckpointError(StateError):
    """The id is taken by a finished checkpoint, which is left as it is."""


class CheckpointNotFoundError(StateError):
    """There is no such checkpoint, or none at all."""


class DamagedCheckpointError(StateError):
    """What is stored is not what was written.

    Attributes:
        checkpoint_id: the damaged one.
        next_good: id of the newest older checkpoint that passes every check (None: there is none, or not looked for).
    """

    def __init__(
        self, message: str, faults: Sequence[str] = (), *, checkpoint_id: str = "", next_good: str | None = None
    ) -> None:
        super().__init__(message, faults)
        self.checkpoint_id = checkpoint_id
        self.next_good = next_good


class UnsupportedStateVersionError(StateError):
    """The checkpoint was written in a format that this version does not read."""


class StateMismatchError(StateError):
    """What is stored does not fit what it should be loaded into; nothing was changed."""


class SaveFailedError(StateError, OSError):
    """A save did not become a checkpoint; the earlier ones are untouched and the next save can work.

    Attributes:
        errno, strerror, filename: as of any OSError, where the system gave a reason (a full disk is ENOSPC).
    """

    def __init__(self, message: str, *, errno: int | None = None, filename: str | None = None) -> None:
        StateError.__init__(self, message)
        self.errno = errno
        self.strerror = message
        self.filename = filename

    def __str__(self) -> str:
        return str(self.strerror)


class WriterDiedError(SaveFailedError):
    """The process that writes ended before it had written everything."""


class FolderInUseError(StateError):
    """Another process (or another manager here) writes checkpoints into the same folder."""
