"""What each block of a chain costs: plain data, saved and loaded as JSON. Torch-free.

``measure.py`` makes profiles from a live model; they can be written by hand too. All byte figures
are those of section 4 of the design (docs/design.md), measured relative to what was alive before
the stage ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

MemoryModel = Literal["peak", "additive"]
CostKind = Literal["time", "flops"]


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
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    keeps_input: tuple[bool, ...] = (True,)
    keeps_output: tuple[bool, ...] = (False,)


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
        recompute_time_ms: what recomputing adds to a backward pass, PyTorch's early stop included.
        mutated_buffers: buffers that the forward changes; a recomputation runs on copies of them.
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


@dataclass(frozen=True)
class RegionProfile:
    """What runs before the first block (``pre``) or after the last one with the loss (``post``)."""

    name: str
    cost: StageCost
    output_bytes: tuple[int, ...] = ()
    output_is_input: tuple[int | None, ...] = ()
    forward_time_ms: float | None = None
    backward_time_ms: float | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None


@dataclass(frozen=True)
class ChainProfile(Sequence[BlockProfile]):
    """A chain of measured blocks, with what runs before and after it.

    Attributes:
        input_bytes: storages of the batch that enter the first block or ``pre``; they stand before
            the step, so they count nothing, but give the first stage its input indices.
        loss_region: "measured" where ``post`` was run, "assumed" where only the gradient of the last
            output is counted.
        meter: "cuda", "cpu", "live" or "off".
        fingerprint: of the model (classes, shapes, dtypes, requires_grad, train mode, autocast, order).
    """

    blocks: tuple[BlockProfile, ...]
    pre: RegionProfile | None = None
    post: RegionProfile | None = None
    input_bytes: tuple[int, ...] = (0,)
    loss_region: Literal["measured", "assumed"] = "assumed"
    meter: str = "off"
    fingerprint: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

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
