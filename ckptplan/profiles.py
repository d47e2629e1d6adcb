"""What each block of a chain costs: plain data, saved and loaded as JSON. Torch-free.

``measure.py`` makes profiles from a live model; they can be written by hand too. All byte figures
are those of section 4 of the design (docs/design.md), measured relative to what was alive before
the stage ran.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from ckptplan.costs import (
    CompiledModelOption,
    CompiledOption,
    CompiledStep,
    OffloadOption,
    SelectiveOption,
    StageCost,
    normalise_numbers,
)
from ckptplan.errors import TimingOnlyProfileError
from ckptplan.strict_json import canonical_json, decode_dataclass, parse_json_object, require_schema, write_text_whole

MemoryModel = Literal["peak", "additive"]
CostKind = Literal["time", "flops"]

PROFILE_SCHEMA = "ckptplan.profile/5"
INPUTS_KEY = "model_inputs"  # of environments: the shapes of the tensors that the model was called with
NOT_REPLAYED = "not replayed: "  # begins the warning of a block that cannot be kept in part, and says why


@dataclass(frozen=True)
class BlockProfile:
    """What one block costs. Times are medians over trials unless the name says mean.

    Attributes:
        kind: blocks of equal kind are the same computation on the same shapes and share all figures.
        output_bytes: bytes of each distinct storage that the block hands on, in order of first
            appearance; the next block's input storages are these, in this order.
        output_is_input: per output storage, the index of the input storage that it is (a value
            passed through, or a view of it), or None for memory of its own.
        output_gradient_bytes: bytes of the gradients of all differentiable outputs.
        keep, recompute: the bytes of the two ways to run the block; None: not measured, or
            the block cannot be recomputed.
        activation_bytes_estimate: distinct storages that autograd saves for this block, parameters
            and the block's own inputs excluded.
        recompute_time_ms: what PyTorch's checkpoint around the block adds to a step, its early stop included.
        mutated_buffers: buffers that the forward changes; a recomputation runs on copies of them.
        guard_bytes: copies of those buffers; inside ``recompute.saved_bytes``. Of a segment the outermost node keeps
            those of all its blocks, and each run in backward makes one more for a while.
        replay_copy_bytes: the part of such copies that autograd saves when the block is kept inside a replay.
        random_state_bytes: where the random streams stood, kept where the block draws; inside
            ``recompute.saved_bytes``. A segment keeps it once.
        stopped_forward_peak_bytes: most bytes of a run in backward that ends as soon as all is there that backward
            needs, above what was alive before it, copies of buffers not counted; None: known only to be no more than
            the forward's and what ``recompute.backward_peak_bytes`` leaves beside the gradient.
        replayed_backward_peak_bytes: backward peak of the block kept inside a replay, which lets go of what autograd
            saved a moment earlier than a plain backward; None: taken to be that of ``keep``.
        selective: ways to run the block under replay, fewest bytes first: keeping nothing inside, which is the other
            way to recompute the whole block and is measured where replay is exact, and, if asked for, keeping parts.
        compiled: ways to run the block compiled, by memory budget; empty unless they were asked for.
        offload: the block with its activations on the host; empty unless that was measured, else one.
        before: what the model itself runs between the block before and this one, where that is anything.

    Built by hand, a single number or flag stands for a tuple of one (``output_bytes=5`` is ``(5,)``) and
    integers of numpy are taken. Raises ``ValueError`` or ``TypeError`` naming the block and the field.
    """

    block_id: str
    order: int = 0
    kind: str = ""
    # memory
    activation_bytes_estimate: int | None = None
    activation_bytes_method: str | None = None
    timing_only: bool = False
    output_bytes: tuple[int, ...] = ()
    output_is_input: tuple[int | None, ...] = ()
    output_gradient_bytes: int | None = None
    keep: StageCost | None = None
    recompute: StageCost | None = None
    guard_bytes: int = 0
    replay_copy_bytes: int = 0
    random_state_bytes: int = 0
    stopped_forward_peak_bytes: int | None = None
    replayed_backward_peak_bytes: int | None = None
    # time and work
    forward_time_ms: float | None = None
    forward_time_ms_mean: float | None = None
    forward_time_ms_std: float | None = None
    backward_time_ms: float | None = None
    recompute_time_ms: float | None = None
    recompute_time_upper_bound_ms_mean: float | None = None
    recompute_time_ms_std: float | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None
    recompute_flops: int | None = None
    # what it is
    eligible_for_checkpoint: bool = True
    exclusion_reason: str | None = None
    is_stochastic: bool | None = None
    is_stateful: bool | None = None
    mutated_buffers: tuple[str, ...] = ()
    module_class: str = ""
    device: str = ""
    dtype: str = ""
    input_shape_signature: str = ""
    output_shape_signature: str = ""
    param_count: int | None = None
    trainable_param_count: int | None = None
    num_warmup: int | None = None
    num_trials: int | None = None
    warnings: tuple[str, ...] = ()
    selective: tuple[SelectiveOption, ...] = ()
    compiled: tuple[CompiledOption, ...] = ()
    offload: tuple[OffloadOption, ...] = ()
    before: RegionProfile | None = None

    def __post_init__(self) -> None:
        normalise_numbers(self, f"block {self.block_id!r}")
        _normalise_outputs(self, f"block {self.block_id!r}")


@dataclass(frozen=True)
class RegionProfile:
    """What the model itself runs: before the first block (``pre``), between two blocks, after the last one (``post``).

    ``post`` has the loss in it.

    Attributes:
        head_backward_peak_bytes: of ``post``, the backward peak from when the gradient of what the model returns is
            there, behind the loss's own backward; None: not measured, or no output of the model was seen.
    """

    name: str
    cost: StageCost
    output_bytes: tuple[int, ...] = ()
    output_is_input: tuple[int | None, ...] = ()
    forward_time_ms: float | None = None
    backward_time_ms: float | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None
    head_backward_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        normalise_numbers(self, f"region {self.name!r}")
        _normalise_outputs(self, f"region {self.name!r}")


@dataclass(frozen=True)
class ChainProfile(Sequence[BlockProfile]):
    """A chain of measured blocks, with what runs before and after it.

    Attributes:
        input_bytes: storages of the batch that enter the first block or ``pre``; they stand before
            the step, so they count nothing, but give the first stage its input indices.
        loss_region: "measured" where ``post`` was run, "assumed" where only the gradient of the last
            output is counted.
        loss_bytes: the loss and its gradient, alive throughout the backward and inside every backward peak.
        compiled_model: ways to run the model compiled as one graph, by memory budget; empty unless they were asked for.
        compiled_blocks_step_ms: of a step with each block run in its fastest measured way, kept or compiled; None
            where the compiled model was not timed beside it.
        compiled_steps: whole steps with every block compiled with one budget, timed beside those.
        warnings: why what was asked for was not measured.
        meter: "cuda", "cpu", "live" or "off".
        fingerprint: of the model (classes, shapes, dtypes, requires_grad, train mode, autocast, order).
    """

    blocks: tuple[BlockProfile, ...]
    pre: RegionProfile | None = None
    post: RegionProfile | None = None
    input_bytes: tuple[int, ...] = (0,)
    loss_region: Literal["measured", "assumed"] = "assumed"
    loss_bytes: int = 0
    meter: str = "off"
    fingerprint: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    compiled_model: tuple[CompiledModelOption, ...] = ()
    compiled_blocks_step_ms: float | None = None
    compiled_steps: tuple[CompiledStep, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        normalise_numbers(self, "the chain")
        if not self.blocks:
            raise ValueError("the chain has no blocks; a profile needs at least one")
        seen: set[str] = set()
        for block in self.blocks:
            if block.block_id in seen:
                raise ValueError(f"block id {block.block_id!r} stands twice in the chain; ids are unique")
            seen.add(block.block_id)
        if self.blocks[0].before is not None:
            raise ValueError(f"block {self.blocks[0].block_id!r} is the first; what runs before it is pre, not before")

    @property
    def block_ids(self) -> tuple[str, ...]:
        return tuple(block.block_id for block in self.blocks)

    @property
    def regions(self) -> tuple[RegionProfile, ...]:
        """All that the model itself runs around its blocks."""
        found = (self.pre, *(block.before for block in self.blocks), self.post)
        return tuple(region for region in found if region is not None)

    def to_json(self) -> str:
        """Canonical text: equal profiles give equal text, and :meth:`from_json` gives an equal profile."""
        return canonical_json({"schema": PROFILE_SCHEMA, **dataclasses.asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the profile") -> ChainProfile:
        """Reads strictly. Raises ``ValueError`` (what, where, what was expected), ``UnsupportedPlanVersionError``."""
        data = parse_json_object(text, source)
        require_schema(data, PROFILE_SCHEMA, source)
        return decode_dataclass(cls, data, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON; the file is whole or not there."""
        write_text_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ChainProfile:
        """Reads what :meth:`save` wrote; raises as :meth:`from_json` does, naming the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not JSON: it is not even text ({error})") from None
        return cls.from_json(text, source=str(path))

    @overload
    def __getitem__(self, index: int) -> BlockProfile: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockProfile, ...]: ...
    def __getitem__(self, index: int | slice) -> BlockProfile | tuple[BlockProfile, ...]:
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[BlockProfile]:
        return iter(self.blocks)


# What a planner may rely on ------------------------------------------------------------------------------------------


def as_chain(profiles: ChainProfile | Sequence[BlockProfile]) -> ChainProfile:
    """A plain sequence of block profiles as a chain (no regions before and after); a chain as it is.

    Raises ``ValueError`` for an empty sequence and ``TypeError`` for anything that is no block profile.
    """
    if isinstance(profiles, ChainProfile):
        return profiles
    blocks = tuple(profiles)
    for position, block in enumerate(blocks):
        if not isinstance(block, BlockProfile):
            raise TypeError(f"profiles[{position}] is a {type(block).__name__}; expected a BlockProfile")
    return ChainProfile(blocks)


def require_memory(profile: ChainProfile, memory_model: MemoryModel | str) -> None:
    """Raises unless every figure that ``memory_model`` reads is there: no number is ever invented.

    Raises ``TimingOnlyProfileError`` for a profile made with ``memory="off"`` and ``ValueError`` naming the
    missing fields and their blocks for one made by hand.
    """
    if memory_model not in ("peak", "additive"):
        raise ValueError(f"memory_model={memory_model!r}; expected 'peak' or 'additive'")
    timing_only = [block.block_id for block in profile if block.timing_only]
    if timing_only:
        raise TimingOnlyProfileError(
            f"the profile holds times only (timing_only=True) for {name_some(timing_only)}; "
            'profile again with memory="auto", which works on CPU too',
            timing_only,
        )
    missing: dict[str, list[str]] = {}
    for position, block in enumerate(profile):
        for name in _missing_memory_fields(block, memory_model, last=position == len(profile) - 1 and not profile.post):
            missing.setdefault(name, []).append(block.block_id)
    if missing:
        listed = "; ".join(f"{name} of {name_some(ids)}" for name, ids in missing.items())
        other = "; or plan with memory_model='additive'" if memory_model == "peak" else ""
        raise ValueError(
            f"memory_model={memory_model!r} needs figures that the profile does not hold: {listed}. "
            f"profile_blocks measures them{other}"
        )
    if memory_model == "peak":
        _require_matching_flags(profile)


def _missing_memory_fields(block: BlockProfile, memory_model: str, *, last: bool) -> list[str]:
    if memory_model == "additive":
        return ["activation_bytes_estimate"] if block.activation_bytes_estimate is None else []
    missing = []
    if block.keep is None:
        missing.append("keep")
    if block.recompute is None and block.eligible_for_checkpoint:
        missing.append("recompute")
    if not block.output_bytes:
        missing.append("output_bytes")
    if last and block.output_gradient_bytes is None:
        missing.append("output_gradient_bytes")
    return missing


def _require_matching_flags(profile: ChainProfile) -> None:
    """Each stage has one keep flag per storage; a single flag stands for all."""
    stages: list[tuple[str, tuple[StageCost | None, ...], tuple[int | None, ...]]] = []
    if profile.pre is not None:
        stages.append((f"region {profile.pre.name!r}", (profile.pre.cost,), profile.pre.output_is_input))
    for block in profile:
        if block.before is not None:
            stages.append((f"region {block.before.name!r}", (block.before.cost,), block.before.output_is_input))
        options: list[Any] = [*block.selective, *block.compiled, *block.offload]
        in_part = [option.cost for option in options]
        costs = (block.keep, block.recompute, *in_part)
        stages.append((f"block {block.block_id!r}", costs, block.output_is_input))
    if profile.post is not None:
        stages.append((f"region {profile.post.name!r}", (profile.post.cost,), profile.post.output_is_input))
    num_inputs = len(profile.input_bytes)
    for where, costs, passed in stages:
        for index in passed:
            if index is not None and index >= num_inputs:
                raise ValueError(f"{where}: output_is_input={passed} points beyond its {num_inputs} input storages")
        for cost in costs:
            if cost is None:
                continue
            for name, flags, count in (
                ("keeps_input", cost.keeps_input, num_inputs),
                ("keeps_output", cost.keeps_output, len(passed)),
            ):
                if len(flags) not in (1, count):
                    raise ValueError(f"{where}: {name} has {len(flags)} flags for {count} storages; expected {count}")
            let_go = [i for letting in cost.inputs_let_go for i in letting.inputs]
            if len(set(let_go)) < len(let_go) or any(i >= num_inputs for i in let_go):
                raise ValueError(
                    f"{where}: inputs_let_go names the inputs {let_go}; expected each of its {num_inputs} input "
                    "storages once at most, counted from 0"
                )
        num_inputs = len(passed)


def modules_of(block_ids: Sequence[str]) -> tuple[str, ...]:
    """Per block the id of its module: a module's calls beyond its first are named ``layer@2``, ``layer@3``."""
    known = set(block_ids)
    split = [(block_id, *block_id.rpartition("@")[::2]) for block_id in block_ids]
    return tuple(base if number.isdecimal() and base in known else whole for whole, base, number in split)


def recompute_costs(profile: ChainProfile, cost: CostKind | str) -> tuple[float | None, ...]:
    """What one recomputation of each block costs (ms or FLOPs); None for a block that cannot be recomputed.

    Time is ``recompute_time_ms``, else ``recompute_time_upper_bound_ms_mean``. A profile without any time
    gives every block the cost 1.0, so that plans recompute as few blocks as possible.
    Raises ``ValueError`` naming the blocks where only some have a figure.
    """
    if cost not in ("time", "flops"):
        raise ValueError(f"cost={cost!r}; expected 'time' or 'flops'")
    figures = [_recompute_figure(block, cost) for block in profile]
    if cost == "time" and all(figure is None for figure in figures):
        figures = [1.0] * len(figures)
    missing = [b.block_id for b, f in zip(profile, figures, strict=True) if f is None and b.eligible_for_checkpoint]
    if missing:
        field_name = "recompute_time_ms" if cost == "time" else "recompute_flops"
        raise ValueError(f"cost={cost!r} needs {field_name}, which is missing for {name_some(missing)}")
    return tuple(f if b.eligible_for_checkpoint else None for b, f in zip(profile, figures, strict=True))


def _recompute_figure(block: BlockProfile, cost: str) -> float | None:
    if cost == "flops":
        return block.recompute_flops
    return block.recompute_time_upper_bound_ms_mean if block.recompute_time_ms is None else block.recompute_time_ms


def name_some(names: Sequence[str], limit: int = 8) -> str:
    """``'a', 'b' and 3 more``: names for a message that has to stay readable."""
    listed = ", ".join(repr(name) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def _normalise_outputs(record: BlockProfile | RegionProfile, where: str) -> None:
    """``output_is_input`` may be left out: every output is memory of its own."""
    if not record.output_is_input:
        object.__setattr__(record, "output_is_input", (None,) * len(record.output_bytes))
    if len(record.output_is_input) != len(record.output_bytes):
        raise ValueError(
            f"{where}: output_is_input has {len(record.output_is_input)} entries for "
            f"{len(record.output_bytes)} output_bytes; expected one each"
        )
