"""Bytes kept when no matrix product runs again, per kind of block: replay, selective checkpointing, the compiler.

    python -m pytest tests/benchmarks/test_replay_bytes.py -m slow -s

What counts as a matrix product is what PyTorch's FLOP counter counts (products, convolutions, attention). Replay
keeps what the exact search says; selective checkpointing the results of those operators; the compiler's
partitioner is tried at eleven memory budgets, the fewest bytes at unchanged FLOPs taken (eager backend, so
that its operators are counted). Bytes of tensors, measured alike. It ends in one JSON line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import default_decompositions, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ckptplan.graph import Output
from ckptplan.memory import CpuAllocatorMeter, LiveStorageMeter
from ckptplan.operators import trace_operators
from ckptplan.options import propose_keep_sets
from ckptplan.replay import run_replayed
from ckptplan.stages import Mark, StageRun, count_flops, own_copies, stage_bytes, stage_flops, time_stage
from ckptplan.trees import tensors_in
from tests.block_kinds import KINDS, make_block

MIB = 2**20
BUDGETS = [1.0 - i / 10 for i in range(11)]


class Figures(NamedTuple):
    kept_bytes: int  # alive after the forward, the input left out
    backward_peak_bytes: int
    flops: int  # of forward and backward


def measure(call: Callable[..., Any], inputs: list[Tensor]) -> Figures:
    def forward(mark: Mark) -> StageRun:
        torch.manual_seed(2)
        mark("start")
        copies = own_copies(inputs)
        mark("ready")
        return StageRun(copies, call(*copies))

    flops = sum(stage_flops(forward))
    cost = stage_bytes(forward, LiveStorageMeter())
    output_bytes = sum(t.untyped_storage().nbytes() for t in tensors_in(forward(lambda name: None).output))
    kept_bytes = cost.saved_bytes + (output_bytes if any(cost.keeps_output) else 0)
    return Figures(kept_bytes, cost.backward_peak_bytes, flops)


def by_replay(block: nn.Module, inputs: list[Tensor]) -> tuple[Figures, list[Output]]:
    def run(call: Callable[..., Any]) -> Any:
        torch.manual_seed(2)
        return call(*own_copies(inputs))

    operators = trace_operators(block, run)
    nothing, *others = propose_keep_sets(operators)
    free = min((s for s in (nothing, *others) if s.flops == 0), key=lambda s: (s.kept_bytes, s.time_ms))
    keep = [operators.values[v].output for v in free.kept]
    figures = measure(functools.partial(run_replayed, block, keep), inputs)
    # the products that selective checkpointing's recomputation, which stops early, would come to
    reached = [operators.calls[o] for o in nothing.run_again]
    return figures, [Output(c.name, c.nth) for c in reached if c.flops]


def by_selective_checkpointing(block: nn.Module, inputs: list[Tensor], counted: list[Output]) -> Figures | None:
    """None where it refuses the block (operators in place)."""
    keys = {(output.operator, output.nth) for output in counted}

    def contexts() -> Any:
        calls: dict[tuple[bool, str], int] = {}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = operator._schema.name.removeprefix("aten::")
            nth = calls.get((context.is_recompute, name), 0)
            calls[context.is_recompute, name] = nth + 1
            return CheckpointPolicy.MUST_SAVE if (name, nth) in keys else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    try:
        return measure(lambda *args: checkpoint(block, *args, use_reentrant=False, context_fn=contexts), inputs)
    except RuntimeError:
        return None


def by_compiler(block: nn.Module, inputs: list[Tensor], flops: int) -> Figures | None:
    """The fewest bytes over its budgets at FLOPs no higher than plain autograd's.

    A budget at which it breaks the graph, or its own backward fails, has no figure; None where no budget has one.

    A compiled module runs eagerly under a dispatch mode, so its bytes are those of the tensors that its graph saves
    (the backward's peak is the CPU allocator's), and its FLOPs are counted inside its graphs.
    """
    found = []
    for budget in BUDGETS:
        with contextlib.suppress(RuntimeError):  # what dynamo raises is one too
            found.append(_compiled_at(budget, block, inputs))
    torch._dynamo.reset()
    return min((f for f in found if f.flops <= flops), key=lambda f: f.kept_bytes, default=None)


def _compiled_at(budget: float, block: nn.Module, inputs: list[Tensor]) -> Figures:
    total = 0

    def counted(graph: nn.Module, examples: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal total
            # the counter's module hooks want a graph behind every tensor that requires a gradient
            plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
            with torch.no_grad(), count_flops() as counter:
                out = graph(*plain)
            total += counter.get_total_flops()
            return out

        return make_boxed_func(run)

    def forward(mark: Mark) -> StageRun:
        torch.manual_seed(2)
        mark("start")
        copies = own_copies(inputs)
        mark("ready")
        return StageRun(copies, compiled(*copies))

    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._functorch.config.patch(activation_memory_budget=budget):
        warnings.simplefilter("ignore")
        backend = aot_autograd(
            fw_compiler=counted,
            bw_compiler=counted,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=default_decompositions,
        )
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        time_stage(forward, lambda: None)  # compiles
        total = 0
        time_stage(forward, lambda: None)
        flops = total
        cost = stage_bytes(forward, CpuAllocatorMeter())
        run = forward(lambda name: None)
        kept_bytes = _saved_bytes(run, block)
    return Figures(kept_bytes, cost.backward_peak_bytes, flops)


def _saved_bytes(run: StageRun, block: nn.Module) -> int:
    """Distinct storages that the graph of a compiled module saves; its input and its weights left out."""
    outside = {id(t.untyped_storage()) for t in (*run.inputs, *block.parameters(), *block.buffers())}
    saved: dict[int, int] = {}
    pending, seen = [t.grad_fn for t in tensors_in(run.output)], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or "OwnedCopies" in node.name():
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            saved[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
    return sum(size for key, size in saved.items() if key not in outside)


def text(figures: Figures | None) -> str:
    return "-" if figures is None else f"{figures.kept_bytes / MIB:.2f} / {figures.backward_peak_bytes / MIB:.1f}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_product_run_twice_replay_keeps_no_more_than_its_peers(kind: str) -> None:
    block, inputs = make_block(kind, scale=4)
    given = [t.requires_grad_() for t in inputs]
    plain = measure(block, given)
    replay, counted = by_replay(block, given)
    selective = by_selective_checkpointing(block, given, counted)
    compiled = by_compiler(block, given, plain.flops)
    print(
        f"\n{kind}: kept / backward peak MiB: everything kept {text(plain)}, replay {text(replay)}, "
        f"selective checkpointing {text(selective)}, compiler {text(compiled)}"
    )
    record = {"plain": plain, "replay": replay, "selective_checkpointing": selective, "compiler": compiled}
    print(json.dumps({"block": kind, **{name: f and f._asdict() for name, f in record.items()}}))
    assert replay.flops == plain.flops
    assert replay.backward_peak_bytes <= plain.backward_peak_bytes
    if selective is not None and selective.flops <= plain.flops:
        # copies of running statistics, with which BatchNorm is replayed; selective checkpointing updates them twice
        copies_bytes = sum(b.numel() * b.element_size() for b in block.buffers() if "BatchNorm" in repr(block))
        assert replay.kept_bytes <= selective.kept_bytes + copies_bytes
        assert replay.backward_peak_bytes <= selective.backward_peak_bytes
    if compiled is not None:
        assert replay.kept_bytes <= compiled.kept_bytes * 1.001
