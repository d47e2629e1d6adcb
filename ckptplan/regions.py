"""What a model runs around its blocks: before the first one, and after the last one with the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptplan.stages import GradientLayout, Mark, StageForward, StageRun, output_gradient_marked, own_copies
from ckptplan.subject import Subject
from ckptplan.trace import BlockCall, ChainTrace, StopAtFirstBlock, boundary_of, exchanged_forwards, forget_graphs
from ckptplan.trees import map_tensors, storage_key, tensors_in


def pre_forward(subject: Subject, count: int, arriving: GradientLayout | None) -> StageForward:
    """Everything until the first block is called; its ``count`` boundary tensors are the output."""
    standing = {storage_key(t) for t in subject.outside}

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise StopAtFirstBlock(boundary_of(args, kwargs, standing)[:count])

    def forward(mark: Mark) -> StageRun:
        mark("start")
        mark("ready")
        try:
            with exchanged_forwards(subject.modules[:1], [stop]):
                subject.run_step()
        except StopAtFirstBlock as reached:
            boundary = reached.boundary
        return StageRun([], boundary, arriving=arriving)

    return forward


def post_forward(subject: Subject, trace: ChainTrace) -> StageForward:
    """Everything after the last block, whose place is taken by copies of its output; the loss is the output."""

    def forward(mark: Mark) -> StageRun:
        made: list[torch.Tensor] = []
        handed_back: GradientLayout = {}
        beside: list[Any] = []
        for module in subject.modules:  # what the stands do not make anew must not be of a step that is over
            forget_graphs(module)

        def last(*args: Any, **kwargs: Any) -> Any:
            beside.append((args, kwargs))
            output = trace.calls[-1].output
            sources = list({id(t): t for t in tensors_in(output)}.values())
            mark("start")
            made.extend(own_copies(sources, handed_back))
            mark("ready")
            by_id = {id(old): new for old, new in zip(sources, made, strict=True)}
            return map_tensors(output, lambda t: by_id[id(t)])

        stands: list[Callable[..., Any]] = [_answer(call, beside) for call in trace.calls[:-1]]
        with output_gradient_marked(subject.twin, mark), exchanged_forwards(subject.modules, [*stands, last]):
            loss = subject.run_step()
        _require_scalar(loss)
        return StageRun(made, loss, is_loss=True, handed_back=handed_back, beside=beside)

    return forward


def _answer(call: BlockCall, beside: list[Any]) -> Callable[..., Any]:
    """Stands for a block; the model may hold what it calls the block with under another name."""

    def stand(*args: Any, **kwargs: Any) -> Any:
        beside.append((args, kwargs))
        return call.output

    return stand


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is {found}; expected a tensor with one element")


def loss_bytes(regions: dict[str, StageForward]) -> int:
    """The loss and its gradient, which stand until the last backward; an assumed loss is one float32.

    ``post`` has them in its own figures; every other stage's backward stands beside them.
    """
    if "post" not in regions:
        return 2 * torch.float32.itemsize
    loss = regions["post"](lambda name: None).output
    return 2 * int(loss.untyped_storage().nbytes())
