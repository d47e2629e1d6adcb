"""All plans of a small chain, and a judge of them that shares no code with the package.

The judge runs a step tensor by tensor: every boundary storage is an object with the set of those who hold it, every
stage books what it saves, and a recomputed node replays its children in the backward of the outer walk.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptplan.costs import InputsLetGo, SelectiveOption, StageCost
from ckptplan.planners.options import Option, OptionChain
from ckptplan.profiles import BlockProfile, ChainProfile

Tree = int | tuple[Any, ...]  # block number: kept; tuple: recomputed children; (i,): block i by itself


def all_forests(first: int, count: int) -> Iterator[tuple[Tree, ...]]:
    """Every way to cover blocks ``first`` .. ``first + count - 1``."""
    if count == 0:
        yield ()
    for size in range(1, count + 1):
        for tree in _trees(first, size):
            for rest in all_forests(first + size, count - size):
                yield (tree, *rest)


def _trees(first: int, size: int) -> Iterator[Tree]:
    if size == 1:
        yield first
        yield (first,)
        return
    for length in range(1, size):  # the first child ends before the last block: no node wraps just one other
        for tree in _trees(first, length):
            for rest in all_forests(first + length, size - length):
                yield (tree, *rest)


def text(forest: Sequence[Tree], *, inner: bool = False) -> str:
    keep = "" if inner else "K"
    return " ".join(f"{keep}{t}" if isinstance(t, int) else f"R({text(t, inner=True)})" for t in forest)


@dataclass(eq=False)
class _Storage:
    size: int
    holders: set[int] = field(default_factory=set)


def peak(chain: ChainProfile, forest: Sequence[Tree]) -> int | None:
    """Most bytes alive in a step; None where a block is recomputed that cannot be."""
    stages: list[Any] = [] if chain.pre is None else [(chain.pre.cost, chain.pre)]
    for tree in forest:
        stage = _stage(chain, tree)
        if stage is None:
            return None
        stages.append(stage)
    if chain.post is None:
        stages.append((StageCost(0, 0, chain[-1].output_gradient_bytes or 0, (False,), (False,)), None))
    else:
        stages.append((chain.post.cost, chain.post))
    forward, backward = _step(stages, len(chain.input_bytes))
    return max(*forward, *backward)


def cost(chain: ChainProfile, forest: Sequence[Tree]) -> float:
    """Milliseconds of all replays, from a list of what each replay runs."""
    return sum(_replay_ms(chain, tree) for tree in forest if not isinstance(tree, int))


def _replay_ms(chain: ChainProfile, tree: tuple[Any, ...]) -> float:
    total = sum(chain[i].forward_time_ms or 0.0 for child in tree[:-1] for i in _leaves(child))
    if isinstance(tree[-1], int):
        total += chain[tree[-1]].recompute_time_ms or 0.0
    return total + sum(_replay_ms(chain, child) for child in tree if not isinstance(child, int))


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [i for child in tree for i in _leaves(child)]


def _stage(chain: ChainProfile, tree: Tree, *, replayed: bool = False) -> tuple[StageCost, Any] | None:
    """Figures of a node as one stage, and whatever knows its outputs; ``replayed``: inside a running replay."""
    if isinstance(tree, int):
        cost = chain[tree].keep
        assert cost is not None
        return (_on_copies(chain[tree], cost) if replayed else cost), chain[tree]
    members = [chain[i] for i in _leaves(tree)]
    if any(m.recompute is None or not m.eligible_for_checkpoint for m in members):
        return None
    if len(members) == 1:
        handed_on = _Outputs(members, len(members[0].keep.keeps_input))  # type: ignore[union-attr]
        if replayed:
            handed_on.shrunk = lambda own: _alone_letting_go(chain, members[0], own)
        return _alone(members[0], replayed), handed_on if replayed else members[0]
    gradient = members[-1].output_gradient_bytes
    children = [_stage(chain, child, replayed=True) for child in tree]
    if gradient is None or any(child is None for child in children):
        return None
    count = len(members[0].recompute.keeps_input)  # type: ignore[union-attr]
    noted = max(m.random_state_bytes for m in members)
    copied = 0 if replayed else sum(m.guard_bytes for m in members)
    bare = [(_retaining_nothing(m, 0 if replayed else copied - m.guard_bytes), m) for m in members]
    first_forward, _ = _step(bare, count)
    last_cost, last_outputs = children[-1]  # type: ignore[misc]
    runs = 0
    if isinstance(tree[-1], int):
        runs = min(last_cost.forward_peak_bytes, _until_stopped(chain, members[-1], gradient))
    children[-1] = (replace(last_cost, forward_peak_bytes=runs), last_outputs)
    keeps = members[0].recompute.keeps_input  # type: ignore[union-attr]

    def most(own: Sequence[int]) -> int:
        replay, backward = _step(children, count, own)  # type: ignore[arg-type]
        gone = _gone(members[0], own) if isinstance(tree[0], int) else 0
        return copied + noted + max(gradient + noted + chain.loss_bytes + max(replay), max(backward) - gone)

    whole = StageCost(copied + noted, max(first_forward), most([0] * count), keeps, (False,))
    handed_on = _Outputs(members, count)
    handed_on.shrunk = most if replayed else None
    return whole, handed_on


def _gone(block: BlockProfile, own: Sequence[int]) -> int:
    """Bytes of inputs that only the node around the block held, and that are free when the block has run."""
    keep = block.keep
    assert keep is not None
    flags = keep.keeps_input * len(own) if len(keep.keeps_input) == 1 else keep.keeps_input
    return sum(s for i, s in enumerate(own) if not flags[i] and i not in block.output_is_input)


def _alone_letting_go(chain: ChainProfile, block: BlockProfile, own: Sequence[int]) -> int:
    cost, gone = _alone(block, True), _gone(block, own)
    back, stopped = block.replayed_backward_peak_bytes, block.stopped_forward_peak_bytes
    if back is None or stopped is None or gone == 0:
        return cost.backward_peak_bytes
    beside = (block.output_gradient_bytes or 0) + chain.loss_bytes + block.random_state_bytes + block.guard_bytes
    running = min(cost.backward_peak_bytes, cost.saved_bytes + beside + stopped)
    return max(running, cost.saved_bytes + back - gone)


def _retaining_nothing(block: BlockProfile, beside: int) -> StageCost:
    assert block.recompute is not None
    return StageCost(0, block.recompute.forward_peak_bytes + beside, 0, (False,), (False,))


def _on_copies(block: BlockProfile, cost: StageCost) -> StageCost:
    backward = block.replayed_backward_peak_bytes
    return StageCost(
        cost.saved_bytes + block.replay_copy_bytes,
        cost.forward_peak_bytes + block.guard_bytes,
        cost.backward_peak_bytes + block.replay_copy_bytes if backward is None else backward,
        cost.keeps_input,
        cost.keeps_output,
    )


def _alone(block: BlockProfile, replayed: bool) -> StageCost:
    cost = block.recompute
    assert cost is not None
    less = block.guard_bytes if replayed else 0
    return replace(
        cost,
        saved_bytes=max(0, cost.saved_bytes - less),
        backward_peak_bytes=max(0, cost.backward_peak_bytes - less),
        inputs_let_go=() if replayed else cost.inputs_let_go,
    )


def _until_stopped(chain: ChainProfile, block: BlockProfile, gradient: int) -> int:
    known = block.stopped_forward_peak_bytes
    if known is not None:
        return known + block.guard_bytes
    assert block.recompute is not None
    alone = block.recompute.backward_peak_bytes - gradient - chain.loss_bytes
    return max(0, alone - 2 * (block.guard_bytes + block.random_state_bytes)) + block.guard_bytes


class _Outputs:
    """A segment's outputs, traced back through its members to its inputs."""

    def __init__(self, members: Sequence[BlockProfile], count: int) -> None:
        self.shrunk: Callable[[Sequence[int]], int] | None = None
        at_hand: list[tuple[int, int | None]] = [(0, i) for i in range(count)]
        for member in members:
            sources = zip(member.output_bytes, member.output_is_input, strict=True)
            at_hand = [(size, None) if source is None else at_hand[source] for size, source in sources]
        self.output_bytes = tuple(size for size, _ in at_hand)
        self.output_is_input = tuple(source for _, source in at_hand)


def _step(stages: Sequence[Any], num_inputs: int, own: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Bytes alive in the forward and in the backward of each stage; inputs stand outside and count nothing.

    ``own``: bytes of the inputs of a replay that nobody outside holds when it has run.
    """
    at_hand = [_Storage(0) for _ in range(num_inputs)]
    real = {id(storage): size for storage, size in zip(at_hand, own, strict=False)}
    found = []
    everything = list(at_hand)
    forward, saved, made_by = [], [], []
    for index, (cost, outputs) in enumerate(stages):
        found.append(at_hand)
        held = [s for s in everything if s.holders or any(s is other for other in at_hand)]
        forward.append(sum(saved) + sum(s.size for s in held) + cost.forward_peak_bytes)
        handed, made = [], []
        passing = zip(outputs.output_bytes, outputs.output_is_input, strict=True) if outputs is not None else ()
        for size, source in passing:
            handed.append(_Storage(size) if source is None else at_hand[source])
            if source is None:
                made.append(handed[-1])
        for storages, flags in ((at_hand, cost.keeps_input), (handed, cost.keeps_output)):
            for storage, kept in zip(storages, flags * len(storages) if len(flags) == 1 else flags, strict=True):
                if kept:
                    storage.holders.add(index)
        everything += made
        made_by.append(made)
        saved.append(cost.saved_bytes)
        at_hand = handed
    backward = [0] * len(stages)
    for index in reversed(range(len(stages))):
        made_here = made_by[index]
        older = [s for s in everything if s.holders and not any(s is mine for mine in made_here)]
        own_peak = stages[index][0].backward_peak_bytes
        sole = [real.get(id(s), s.size) if s.holders == {index} else 0 for s in found[index]]
        let_go: list[int] = []
        for letting in stages[index][0].inputs_let_go:
            let_go += letting.inputs
            own_peak = max(own_peak, letting.backward_peak_bytes - sum(sole[i] for i in let_go))
        shrunk = getattr(stages[index][1], "shrunk", None)
        if shrunk is not None:
            own_peak = shrunk(sole)
        backward[index] = sum(saved[:index]) + sum(s.size for s in older) + own_peak
        for storage in everything:
            storage.holders.discard(index)
    return forward, backward


def uneven(chain: ChainProfile, seed: int) -> ChainProfile:
    """The chain with forward times, and recomputations that save, hold and pass on whatever they like."""
    rng = random.Random(f"uneven {seed}")
    blocks = []
    for block in chain:
        again = block.recompute
        assert again is not None
        if seed % 2:
            again = replace(
                again,
                saved_bytes=rng.choice([0, 0, 1000]),
                backward_peak_bytes=rng.randint(0, 2**23),
                keeps_input=tuple(rng.random() < 0.6 for _ in again.keeps_input),
                keeps_output=tuple(rng.random() < 0.3 for _ in again.keeps_output),
            )
        gradient = block.output_gradient_bytes
        if seed % 3 == 0 and block is not chain[-1]:
            gradient = rng.choice([None, 0, gradient])
        forward_ms = rng.randint(16, 160) / 32
        keep = block.keep
        assert keep is not None
        if seed % 5 > 2:
            keep, again = (replace(cost, inputs_let_go=_lettings(cost, rng)) for cost in (keep, again))
        changed = replace(block, keep=keep, recompute=again, output_gradient_bytes=gradient, forward_time_ms=forward_ms)
        blocks.append(guarded(changed, rng) if seed % 4 > 1 else changed)
    post = chain.post
    if post is not None and seed % 5 > 2:
        post = replace(post, cost=replace(post.cost, inputs_let_go=_lettings(post.cost, rng)))
    return replace(chain, blocks=tuple(blocks), post=post, loss_bytes=rng.choice([0, 8, 2**19]))


def guarded(block: BlockProfile, rng: random.Random) -> BlockProfile:
    """The block with buffers that it changes and random draws, or some of that, large enough to decide plans."""
    mib = 2**20
    guard, noted = rng.choice([0, mib // 2, 2 * mib]), rng.choice([0, 0, mib])
    again = block.recompute
    assert again is not None
    return replace(
        block,
        recompute=replace(
            again,
            saved_bytes=again.saved_bytes + guard + noted,
            forward_peak_bytes=again.forward_peak_bytes + guard + mib,
            backward_peak_bytes=again.backward_peak_bytes + 2 * (guard + noted),
        ),
        guard_bytes=guard,
        replay_copy_bytes=rng.choice([0, guard]),
        random_state_bytes=noted,
        stopped_forward_peak_bytes=rng.choice([None, again.forward_peak_bytes // 2]),
        replayed_backward_peak_bytes=rng.choice([None, again.backward_peak_bytes]),
    )


def with_parts(chain: ChainProfile, seed: int, most: int = 3) -> ChainProfile:
    """The chain with up to ``most`` ways to keep part of each block, of every sort; some cost nothing in FLOPs."""
    rng = random.Random(f"parts {seed}")
    blocks = []
    for block in chain:
        keep = block.keep
        assert keep is not None
        found = []
        for number in range(rng.randint(0, most)):
            share = rng.random()
            backward = int(keep.backward_peak_bytes * rng.uniform(0.7, 1.2))
            cost = StageCost(
                int(keep.saved_bytes * share),
                int(keep.forward_peak_bytes * rng.uniform(0.4, 1.0)),
                backward,
                tuple(rng.random() < 0.6 for _ in keep.keeps_input),
                tuple(rng.random() < 0.4 for _ in keep.keeps_output),
            )
            cost = replace(cost, inputs_let_go=_lettings(cost, rng) if rng.random() < 0.6 else ())
            names = tuple(f"part{number}.mm#{nth}:0" for nth in range(rng.randint(0 if number == 0 else 1, 2)))
            found.append(SelectiveOption(names, cost, rng.randint(0, 128) / 32, rng.choice([0, 7, 100]), "hash"))
        blocks.append(replace(block, selective=tuple(found), recompute_flops=100, forward_flops=120))
    return replace(chain, blocks=tuple(blocks))


def _lettings(cost: StageCost, rng: random.Random) -> tuple[InputsLetGo, ...]:
    """The inputs that it keeps, let go one by one or together, with peaks in between that may matter."""
    kept = [i for i, keeps in enumerate(cost.keeps_input) if keeps]
    rng.shuffle(kept)
    found = []
    while kept:
        together = [kept.pop() for _ in range(rng.randint(1, len(kept)))]
        found.append(InputsLetGo(tuple(together), cost.backward_peak_bytes + rng.randint(-(2**19), 2**23)))
    return tuple(replace(letting, backward_peak_bytes=max(0, letting.backward_peak_bytes)) for letting in found)


def all_plans_with_parts(
    chain: ChainProfile, *, flat: bool = False
) -> Iterator[tuple[float, int, tuple[Tree, ...], tuple[int, ...]]]:
    """(ms, peak, forest, per block the number of its part kept or -1) of every plan that can be run."""
    for forest in all_forests(0, len(chain)):
        if flat and not all(isinstance(tree, int) or len(_leaves(tree)) == 1 for tree in forest):
            continue
        kept = [tree for tree in forest if isinstance(tree, int)]
        for ways in itertools.product(*(range(-1, len(chain[i].selective)) for i in kept)):
            parts, blocks, total = [-1] * len(chain), list(chain.blocks), cost(chain, forest)
            for i, way in zip(kept, ways, strict=True):
                if way >= 0:
                    parts[i] = way
                    blocks[i] = replace(chain[i], keep=chain[i].selective[way].cost)
                    total += chain[i].selective[way].time_ms or 0.0
            most = peak(replace(chain, blocks=tuple(blocks)), forest)
            if most is not None:
                yield total, most, forest, tuple(parts)


def five_options(chain: OptionChain, seed: int) -> tuple[OptionChain, dict[tuple[int, int], StageCost]]:
    """Three more ways to run each block, between keeping all and nothing; nodes are stand-ins with a number."""
    rng = random.Random(seed)
    blocks, figures = [], {}
    for i, block in enumerate(chain.blocks):
        options = list(block.options)
        for number in range(3):
            share = (number + 1) / 4 + rng.random() / 8
            keep = block.options[0].cost
            cost = replace(keep, saved_bytes=int(keep.saved_bytes * share))
            value = int((1 - share) ** 2 * block.last) // chain.runs_scale * chain.runs_scale + 1
            options.append(Option(cost, value, _StandIn(number)))
            figures[i, number] = cost
        blocks.append(block._replace(options=tuple(options)))
    kinds = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
    return replace(chain, blocks=tuple(blocks), kinds=tuple(kinds[block] for block in blocks)), figures


@dataclass(frozen=True)
class _StandIn:
    """A node maker: ``Selective`` in miniature."""

    number: int

    def __call__(self, block: int) -> Any:
        return _StandInNode(block, self.number)


@dataclass(frozen=True)
class _StandInNode:
    block: int
    number: int
