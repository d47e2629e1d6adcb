"""What recording and replaying cost per operator, beside PyTorch's checkpoint and selective checkpointing.

    python -m pytest tests/benchmarks/test_replay_cost.py -m slow -s

Tiny tensors, so that next to nothing but the machinery is timed: extra microseconds per dispatched operator over
plain autograd, the minimum of 60 interleaved rounds, one thread. It ends in one JSON line.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ckptplan.replay import run_replayed
from tests.block_kinds import make_block
from tests.test_replay import MATRIX_PRODUCTS, outputs_of

ROUNDS = 60
MOST_FORWARD_US, MOST_BACKWARD_US = 15.0, 10.0

Step = Callable[[Tensor], Tensor]


class Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator._schema.name.removeprefix("aten::") in MATRIX_PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def one_step(step: Step, source: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    x = source.clone().requires_grad_()
    start_s = time.perf_counter()
    output = step(x)
    middle_s = time.perf_counter()
    output.backward(gradient)
    return middle_s - start_s, time.perf_counter() - middle_s


def least_times(steps: dict[str, Step], source: Tensor) -> dict[str, tuple[float, float]]:
    """Seconds, the minimum over interleaved rounds."""
    gradient = torch.ones_like(steps["plain"](source))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            taken[name].append(one_step(step, source, gradient))
    return {name: (min(f for f, _ in times), min(b for _, b in times)) for name, times in taken.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_replay_costs_at_most_15_us_forward_and_10_us_backward_per_operator(kind: str) -> None:
    block, inputs = make_block(kind)
    source = inputs[0][:1] if kind == "llama" else inputs[0][:1, :4]
    with Count() as operators:
        block(source.clone().requires_grad_())
    everything = outputs_of(block, source)
    products = [name for name in everything if name.operator in MATRIX_PRODUCTS]
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps_products)
    steps: dict[str, Step] = {
        "plain": block,
        "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False),
        "selective checkpointing, products kept": lambda x: checkpoint(
            block, x, use_reentrant=False, context_fn=contexts
        ),
        "replay, nothing kept": lambda x: run_replayed(block, (), x),
        "replay, products kept": lambda x: run_replayed(block, products, x),
        "replay, everything kept": lambda x: run_replayed(block, everything, x),
    }
    times = least_times(steps, source)
    plain_forward_s, plain_backward_s = times["plain"]
    extra = {
        name: {
            "forward_us": round((forward_s - plain_forward_s) / operators.count * 1e6, 1),
            "backward_us": round((backward_s - plain_backward_s) / operators.count * 1e6, 1),
        }
        for name, (forward_s, backward_s) in times.items()
    }
    print(f"\n{kind}: {operators.count} operators")
    for name, figures in extra.items():
        print(f"  {name:40} forward {figures['forward_us']:5.1f} us, backward {figures['backward_us']:5.1f} us")
    print(json.dumps({"block": kind, "operators": operators.count, "extra": extra}))
    for name, figures in extra.items():
        if name.startswith("replay"):
            assert figures["forward_us"] <= MOST_FORWARD_US, name
            assert figures["backward_us"] <= MOST_BACKWARD_US, name
