"""Chains for planner tests, and an oracle of peaks that shares no code with the package."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptplan.costs import StageCost
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile

Choice = tuple[bool, ...]


def flat_peak(chain: ChainProfile, choice: Choice) -> int:
    """The peak of a flat plan by simulating every tensor: who holds it, and until when."""
    stages: list[Any] = [] if chain.pre is None else [(chain.pre, chain.pre.cost)]
    for block, again in zip(chain, choice, strict=True):
        if block.before is not None:
            stages.append((block.before, block.before.cost))
        stages.append((block, block.recompute if again else block.keep))
    if chain.post is not None:
        stages.append((chain.post, chain.post.cost))
    boundary = [{"bytes": 0, "keepers": set()} for _ in chain.input_bytes]
    retained, peak = 0, 0
    backward = []
    for index, (stage, cost) in enumerate(stages):
        outputs = []
        for size, source in zip(stage.output_bytes, stage.output_is_input, strict=True):
            outputs.append({"bytes": size, "keepers": set()} if source is None else boundary[source])
        handed = sum(t["bytes"] for t in boundary if not t["keepers"])
        peak = max(peak, retained + handed + cost.forward_peak_bytes)
        taken = 0
        made_and_kept = 0
        for tensors, flags in ((boundary, cost.keeps_input), (outputs, cost.keeps_output)):
            for tensor, kept in zip(tensors, flags, strict=True):
                if kept and not tensor["keepers"]:
                    if any(tensor is other for other in boundary):
                        taken += tensor["bytes"]
                    else:
                        made_and_kept += tensor["bytes"]
                if kept:
                    tensor["keepers"].add(index)
        backward.append(retained + taken + cost.backward_peak_bytes)
        retained += taken + made_and_kept + cost.saved_bytes
        boundary = outputs
    if chain.post is None:
        handed = sum(t["bytes"] for t in boundary if not t["keepers"])
        peak = max(peak, retained + handed)
        backward.append(retained + (chain[-1].output_gradient_bytes or 0))
    return max(peak, *backward)


def flat_sum(chain: ChainProfile, choice: Choice) -> int:
    """The additive model: the estimates of kept blocks."""
    return sum(b.activation_bytes_estimate or 0 for b, again in zip(chain, choice, strict=True) if not again)


def all_plans(chain: ChainProfile, memory_model: str) -> list[tuple[float, int, int, Choice]]:
    """(cost, recomputed blocks, peak, choice) of every flat plan, cheapest first, then fewest, then lowest."""
    judge = flat_peak if memory_model == "peak" else flat_sum
    options = [(False, True) if block.eligible_for_checkpoint else (False,) for block in chain]
    plans = []
    for choice in itertools.product(*options):
        cost = sum(b.recompute_time_ms or 0.0 for b, again in zip(chain, choice, strict=True) if again)
        plans.append((cost, sum(choice), judge(chain, choice), choice))
    return sorted(plans)


def random_chain(seed: int, most_blocks: int = 10, *, plain: bool = False) -> ChainProfile:
    """3 to ``most_blocks`` blocks of 1 to 12 MiB and costs of 0.5 to 5 ms in exact steps.

    Not ``plain``: several storages at a boundary, storages passed through, any keep flags, ineligible blocks,
    free blocks, regions before and after.
    """
    rng = random.Random(seed)
    mib = 2**20
    count = 1 if plain else rng.choice([1, 1, 2])
    inputs = count
    pre = None
    if not plain and rng.random() < 0.4:
        pre = RegionProfile("pre", _stage(rng, count, 1), output_bytes=(rng.randint(0, 2 * mib),))
        count = 1
    blocks = []
    for index in range(rng.randint(3, most_blocks)):
        width = 1 if plain else rng.choice([1, 1, 1, 2])
        free = list(range(count))
        rng.shuffle(free)
        passed = tuple(free.pop() if not plain and free and rng.random() < 0.3 else None for _ in range(width))
        eligible = plain or rng.random() < 0.85
        keep = _stage(rng, count, width)
        blocks.append(
            BlockProfile(
                f"b{index}",
                index,
                activation_bytes_estimate=rng.randint(1 * mib, 12 * mib),
                output_bytes=tuple(rng.randint(0, 2 * mib) for _ in range(width)),
                output_is_input=passed,
                output_gradient_bytes=rng.randint(0, 2 * mib),
                keep=keep,
                recompute=_stage(rng, count, width, at_least=keep, plain=plain),
                recompute_time_ms=rng.randint(16, 160) / 32 if plain or rng.random() < 0.9 else 0.0,
                eligible_for_checkpoint=eligible,
                exclusion_reason=None if eligible else "says the test",
            )
        )
        count = width
    post = None if rng.random() < 0.5 else RegionProfile("post", _stage(rng, count, 0))
    return ChainProfile(tuple(blocks), pre=pre, post=post, input_bytes=(0,) * inputs)


def with_gaps(chain: ChainProfile) -> ChainProfile:
    """Every third block, from the second on, is turned into what the model runs before the next one."""
    blocks: list[BlockProfile] = []
    before: RegionProfile | None = None
    for index, block in enumerate(chain):
        if index % 3 == 1 and index + 1 < len(chain) and block.keep is not None:
            name = f"between {chain[index - 1].block_id} and {chain[index + 1].block_id}"
            before = RegionProfile(name, block.keep, block.output_bytes, block.output_is_input)
        else:
            blocks.append(replace(block, order=len(blocks), before=before))
            before = None
    return replace(chain, blocks=tuple(blocks))


def _stage(
    rng: random.Random, inputs: int, outputs: int, *, at_least: StageCost | None = None, plain: bool = False
) -> StageCost:
    mib = 2**20
    saved = 0 if at_least is not None else rng.randint(1 * mib, 12 * mib)
    base = at_least.backward_peak_bytes if at_least is not None else saved
    share = 1.0 if at_least is not None else 0.6
    return StageCost(
        saved,
        saved + rng.randint(0, 4 * mib),
        base + rng.randint(0, 4 * mib),
        tuple(plain or rng.random() < share for _ in range(inputs)),
        tuple(at_least is None and rng.random() < 0.3 for _ in range(outputs)),
    )


def equal_chain(
    count: int, saved: int, *, boundary: int = 0, transient: int = 0, cost: float = 1.0, **changes: Any
) -> ChainProfile:
    """``count`` equal blocks that keep their input, save ``saved`` and need ``transient`` more in backward."""
    known: dict[str, Any] = {
        "kind": "same",
        "activation_bytes_estimate": saved,
        "output_bytes": (boundary,),
        "output_gradient_bytes": boundary,
        "keep": StageCost(saved, saved + boundary, saved + transient),
        "recompute": StageCost(0, saved + boundary, saved + transient),
        "recompute_time_ms": cost,
        "forward_time_ms": cost,
        "backward_time_ms": 2 * cost,
    }
    return ChainProfile(tuple(BlockProfile(f"b{i}", i, **(known | changes)) for i in range(count)))


@pytest.fixture(scope="session")
def oracle() -> Callable[[ChainProfile, str], list[tuple[float, int, int, Choice]]]:
    return all_plans


@pytest.fixture(scope="session")
def make_random() -> Callable[..., ChainProfile]:
    return random_chain


@pytest.fixture(scope="session")
def make_equal() -> Callable[..., ChainProfile]:
    return equal_chain
