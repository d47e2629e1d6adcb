"""A chain as planners with options see it: per block a list of ways to run it, all costs as integers.

A way ("option") is a ``StageCost``, what it costs beside keeping, and the plan node that stands for it. Everything a
stage does to the storages at its boundary is in :func:`passed_on`; it is exact, as the simulator and the referee are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from ckptplan.costs import StageCost
from ckptplan.in_replay import kept_in_replay, recomputed_in_replay, recomputed_peaks, stopped_forward_peak
from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, PlanNode, Recompute, Selective
from ckptplan.planners.flat import Stages
from ckptplan.planners.tables import Transition
from ckptplan.profiles import BlockProfile, ChainProfile, CostKind, recompute_costs
from ckptplan.recompute_cost import recompute_time_ms
from ckptplan.selective import short_names

# Bytes of each storage at hand that nobody holds until backward (0 where it stands outside), or HELD.
Loads = tuple[int, ...]
HELD = -1
Outputs = tuple[tuple[int, int | None], ...]  # bytes, and which input storage it is (None: memory of its own)

NOTHING = StageCost(0, 0, 0, (False,), (False,))
MOST_RUNS = 16  # per block: what the integer costs leave room for; a plan that runs blocks more often is never built
LARGEST_VALUE = 2**61
TIME_STEPS = 1_000_000  # of all measured time together, where time breaks ties between equal FLOPs


class Option(NamedTuple):
    """One way to run a block at the top of a plan."""

    cost: StageCost
    value: int
    node: Callable[[int], PlanNode]


class Block(NamedTuple):
    """One block: what it hands on, its options, and what a recomputed segment needs to know of it.

    Attributes:
        inside_keep, inside_again: its bytes inside a replay, kept and recomputed there; None: it may stand in no
            recomputed segment.
        bare_forward: most bytes of its first forward in a segment at the top, beside ``guard``.
        guard: copies of its buffers, which such a segment holds.
        random: where the random streams stood, of which a segment holds the largest of its blocks.
        shortcut: most bytes of its forward where that ends a replay: it stops when all that backward needs is there.
        recomputed: inside a replay, backward peaks while it runs again and behind that; None: told apart in nothing.
        lets_go: per input storage, whether that is held for running it again but not by the block when it has run.
        gradient: bytes of its outputs' gradients; None: it may not end a segment of several blocks.
        full, last: value of running it inside a replay, and of running it as the replay's last block.
    """

    outputs: Outputs
    options: tuple[Option, ...]
    inside_keep: StageCost
    inside_again: StageCost | None
    gradient: int | None
    full: int
    last: int
    bare_forward: int = 0
    guard: int = 0
    random: int = 0
    shortcut: int = 0
    recomputed: tuple[int, int] | None = None
    lets_go: tuple[bool, ...] = (False,)

    @property
    def least(self) -> int:
        """The least value of any recomputation of the block."""
        return min(self.full, self.last)


@dataclass(frozen=True)
class OptionChain:
    """Blocks with options between two fixed stages.

    Attributes:
        kinds: per block a number; blocks of equal number are equal in everything.
        loss_bytes: alive throughout the backward.
        unit: one unit of cost is ``unit`` ms or FLOPs; a value is units x ``runs_scale`` + what breaks ties: the number
            of block runs, or (``timed_option_chain``) that and measured time in steps of a millionth of the whole.
    """

    blocks: tuple[Block, ...]
    kinds: tuple[int, ...]
    pre: tuple[StageCost, Outputs] | None
    post: StageCost
    num_inputs: int
    unit: Fraction
    runs_scale: int
    loss_bytes: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def inputs(self) -> Loads:
        return (0,) * self.num_inputs

    def cost_of(self, value: float) -> float:
        """A value as ms or FLOPs."""
        return float(value / self.runs_scale * self.unit)

    def value_of(self, nodes: Sequence[PlanNode]) -> int:
        """The value of a plan over this chain's options."""
        return sum(self._value(node) for node in nodes)

    def _value(self, node: PlanNode) -> int:
        if isinstance(node, Recompute):
            return self._replay(node)
        assert not isinstance(node, CompiledModel)  # no option of a block
        return next(o.value for o in self.blocks[node.block].options if o.node(node.block) == node)

    def _replay(self, node: Recompute) -> int:
        *leading, last = node.children
        total = sum(self._full(child) for child in leading)
        if isinstance(last, Keep):
            total += self.blocks[last.block].last
        return total + sum(self._replay(child) for child in node.children if isinstance(child, Recompute))

    def _full(self, node: PlanNode) -> int:
        if isinstance(node, Keep):
            return self.blocks[node.block].full
        assert isinstance(node, Recompute)
        return sum(self._full(child) for child in node.children)


def option_chain(profile: ChainProfile, cost: CostKind | None) -> OptionChain:
    """The chain under the peak model: keep, recompute where eligible, and the profile's selective options.

    Without ``cost`` each run of a block costs 1, for questions that are not about cost.
    """
    if cost is None:
        last_costs: tuple[float | None, ...] = tuple(
            1.0 if block.eligible_for_checkpoint else None for block in profile
        )
        works = [(1.0, 1.0)] * len(profile)
    else:
        last_costs = recompute_costs(profile, cost)
        works = [(_full_cost(block, last, cost), last or 0.0) for block, last in zip(profile, last_costs, strict=True)]
    is_untimed = cost is None or (cost == "time" and recompute_time_ms(profile, ()) is None)
    parts = [_part_costs(block, cost, is_untimed=is_untimed) for block in profile]
    offloads = [_offload_cost(block, cost, is_untimed=is_untimed) for block in profile]
    figures = [*(figure for known in parts for figure in known.values()), *(f for f in offloads if f is not None)]
    unit, runs_scale = _scale([*works, *((figure, 0.0) for figure in figures)])
    part_values = [
        {number: round(Fraction(str(figure)) / unit) * runs_scale + 1 for number, figure in known.items()}
        for known in parts
    ]
    values = [tuple(round(Fraction(str(figure)) / unit) * runs_scale + 1 for figure in pair) for pair in works]
    offload_values = [None if f is None else round(Fraction(str(f)) / unit) * runs_scale + 1 for f in offloads]
    blocks = tuple(
        _block(profile, block, full, last, of_parts, offload, eligible=known is not None)
        for block, (full, last), of_parts, offload, known in zip(
            profile, values, part_values, offload_values, last_costs, strict=True
        )
    )
    numbers: dict[Block, int] = {}
    pre, post = profile.pre, profile.post
    gradient = profile[-1].output_gradient_bytes or 0
    return OptionChain(
        blocks=blocks,
        kinds=tuple(numbers.setdefault(block, len(numbers)) for block in blocks),
        pre=None if pre is None else (pre.cost, tuple(zip(pre.output_bytes, pre.output_is_input, strict=True))),
        post=StageCost(0, 0, gradient, (False,), (False,)) if post is None else post.cost,
        num_inputs=len(profile.input_bytes),
        unit=unit,
        runs_scale=runs_scale,
        loss_bytes=profile.loss_bytes,
    )


def timed_option_chain(profile: ChainProfile) -> OptionChain | None:
    """The chain under ``cost="flops"`` where of equal FLOPs less measured time has the lower value.

    None where times are missing, or where FLOPs and times do not fit into one integer. For flat plans: the values of
    recomputed segments hold no times.
    """
    chain = option_chain(profile, "flops")
    on_device = tuple(replace(block, offload=()) for block in profile)  # as FLOPs choose among
    timed = option_chain(replace(profile, blocks=on_device), "time")
    times = [[float(timed.cost_of(option.value)) for option in block.options] for block in timed.blocks]
    alike = all(len(a.options) == len(b.options) for a, b in zip(chain.blocks, timed.blocks, strict=True))
    total_ms = sum(sum(of_block) for of_block in times)
    if not alike or recompute_time_ms(profile, ()) is None or not total_ms:
        return None
    scale = 2 * (TIME_STEPS + sum(len(of_block) for of_block in times))
    most = sum(max(option.value for option in block.options) for block in chain.blocks)
    if most // chain.runs_scale * scale > LARGEST_VALUE:
        return None

    def value(option: Option, time_ms: float) -> int:
        if not option.value:
            return 0
        return option.value // chain.runs_scale * scale + 1 + round(time_ms / total_ms * TIME_STEPS)

    blocks = []
    for block, of_block in zip(chain.blocks, times, strict=True):
        options = tuple(o._replace(value=value(o, t)) for o, t in zip(block.options, of_block, strict=True))
        again = next((o.value for o in options if o.node is recompute_one), 0)
        blocks.append(block._replace(options=options, full=again, last=again))
    return replace(chain, blocks=tuple(blocks), runs_scale=scale)


def compiled_chain(profile: ChainProfile) -> OptionChain:
    """The chain with each block compiled under one of its measured budgets.

    A block is kept as it is where that is faster, or where it has no budgets. Budgets of equal bytes are one graph: the
    largest of them stands for all.
    """
    bare = tuple(replace(block, eligible_for_checkpoint=False, selective=(), offload=()) for block in profile)
    chain = option_chain(replace(profile, blocks=bare), None)
    distinct = [list({option.cost: option for option in block.compiled}.values()) for block in profile]
    times = [option.time_ms or 0.0 for options in distinct for option in options]
    unit, runs_scale = _scale([(time_ms, 0.0) for time_ms in times])
    blocks = []
    for block, options in zip(chain.blocks, distinct, strict=True):
        ways = tuple(
            Option(o.cost, round(Fraction(str(o.time_ms or 0.0)) / unit) * runs_scale, RunCompiled(o.budget))
            for o in options
        )
        is_faster_kept = all(way.value > 0 for way in ways)
        blocks.append(block._replace(options=(*block.options, *ways) if is_faster_kept else ways))
    numbers: dict[Block, int] = {}
    kinds = tuple(numbers.setdefault(block, len(numbers)) for block in blocks)
    return replace(chain, blocks=tuple(blocks), kinds=kinds, unit=unit, runs_scale=runs_scale)


def additive_profile(profile: ChainProfile) -> ChainProfile:
    """A chain whose peak is the sum of ``activation_bytes_estimate`` over kept blocks: the additive model."""
    blocks = []
    for block in profile:
        keep = replace(NOTHING, saved_bytes=block.activation_bytes_estimate or 0)
        parts = [replace(o, cost=replace(NOTHING, saved_bytes=_part_bytes(block, o.cost))) for o in block.selective]
        blocks.append(
            replace(
                block,
                selective=tuple(parts),
                offload=tuple(
                    replace(o, cost=replace(NOTHING, saved_bytes=_part_bytes(block, o.cost))) for o in block.offload
                ),
                keep=keep,
                recompute=NOTHING,
                output_bytes=(0,),
                output_is_input=(None,),
                output_gradient_bytes=0,
            )
        )
    return ChainProfile(tuple(blocks))


def recompute_one(block: int) -> PlanNode:
    """The node that recomputes one block by itself."""
    return Recompute((Keep(block),))


def _part_bytes(block: BlockProfile, cost: StageCost) -> int:
    """What stays because of the block, its own outputs included where it holds them itself."""
    flags = spread(cost.keeps_output, len(block.output_bytes))
    outputs = zip(block.output_bytes, block.output_is_input, flags, strict=True)
    return cost.saved_bytes + sum(size for size, passed, kept in outputs if kept and passed is None)


@dataclass(frozen=True)
class KeepPart:
    """Makes the node that keeps some outputs of a block, by their short names; equal blocks get equal ones."""

    saved_ops: tuple[str, ...]

    def __call__(self, block: int) -> PlanNode:
        return Selective(block, self.saved_ops)


@dataclass(frozen=True)
class RunCompiled:
    """Makes the node that runs a block compiled with a budget."""

    budget: float

    def __call__(self, block: int) -> PlanNode:
        return Compiled(block, self.budget)


def _part_costs(block: BlockProfile, cost: CostKind | None, *, is_untimed: bool) -> dict[int, float]:
    """What each selective option adds to a step, by its number; those without a figure cannot be planned.

    ``is_untimed``: nothing in the profile has a time, so each costs 1, as recomputing a block does.
    """
    figures = ((n, o.flops if cost == "flops" else o.time_ms) for n, o in enumerate(block.selective))
    if cost is None:
        figures = ((n, None) for n in range(len(block.selective)))
    known = ((n, 1.0 if figure is None and is_untimed else figure) for n, figure in figures)
    return {number: figure for number, figure in known if figure is not None}


def _offload_cost(block: BlockProfile, cost: CostKind | None, *, is_untimed: bool) -> float | None:
    """What it adds to a step to have the block's activations on the host; None: it is no option.

    It costs no FLOPs, so that under ``cost="flops"`` it would always win, whatever its time: there it is none.
    """
    if not block.offload or cost == "flops":
        return None
    return 1.0 if cost is None or is_untimed else block.offload[0].time_ms


def _block(
    chain: ChainProfile,
    block: BlockProfile,
    full: int,
    last: int,
    parts: dict[int, int],
    offload: int | None,
    *,
    eligible: bool,
) -> Block:
    assert block.keep is not None  # require_memory
    again = block.recompute if eligible else None
    options = [Option(block.keep, 0, Keep)]
    if again is not None:
        options.append(Option(again, last, recompute_one))
    for number, value in parts.items():
        option = block.selective[number]
        options.append(Option(option.cost, value, KeepPart(short_names(block, option))))
    if offload is not None:
        options.append(Option(block.offload[0].cost, offload, Offload))
    outputs = tuple(zip(block.output_bytes, block.output_is_input, strict=True))
    return Block(
        outputs,
        tuple(options),
        kept_in_replay(block),
        None if again is None else recomputed_in_replay(block, again),
        block.output_gradient_bytes,
        full,
        last,
        bare_forward=0 if again is None else again.forward_peak_bytes - block.guard_bytes,
        guard=block.guard_bytes,
        random=block.random_state_bytes,
        shortcut=0 if again is None else stopped_forward_peak(chain, block, again),
        recomputed=None if again is None else recomputed_peaks(chain, block, again),
        lets_go=_lets_go(block, again),
    )


def _lets_go(block: BlockProfile, again: StageCost | None) -> tuple[bool, ...]:
    assert block.keep is not None  # require_memory
    if again is None:
        return (False,)
    count = max(len(again.keeps_input), len(block.keep.keeps_input), *(1 + (i or 0) for i in block.output_is_input), 1)
    held, kept = spread(again.keeps_input, count), spread(block.keep.keeps_input, count)
    if len(held) != count or len(kept) != count:
        return (False,)  # no inputs
    flags = tuple(
        h and not k and i not in block.output_is_input for i, (h, k) in enumerate(zip(held, kept, strict=True))
    )
    return flags if any(flags) else (False,)


def _full_cost(block: BlockProfile, last: float | None, cost: CostKind) -> float:
    figure = block.forward_flops if cost == "flops" else block.forward_time_ms
    return (last or 0.0) if figure is None else figure


def _scale(works: Sequence[tuple[float, float]]) -> tuple[Fraction, int]:
    """Unit of cost (a power of ten), and the factor that leaves room for a count of runs below it."""
    runs_scale = MOST_RUNS * len(works) + 1
    total = sum(Fraction(str(figure)) for pair in works for figure in pair)
    limit = Fraction(LARGEST_VALUE, MOST_RUNS * runs_scale)
    unit = Fraction(1)
    while total / unit > limit:
        unit *= 10
    if any(Fraction(str(figure)).denominator != 1 for pair in works for figure in pair):
        while total * 10 / unit <= limit:
            unit /= 10
    return unit, runs_scale


# Boundaries ----------------------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """What a stage does to the storages at hand.

    Attributes:
        unheld: bytes at hand that nobody holds yet; alive in its forward.
        newly: those of them that it holds; alive in its backward.
        retained: bytes that it adds to what is held until backward.
        loads: what it hands on.
        backward_peak: most bytes of its backward beside all these, which depends on who else holds its inputs.
    """

    unheld: int
    newly: int
    retained: int
    loads: Loads
    backward_peak: int = 0

    def need(self, cost: StageCost) -> int:
        """Bytes that have to be free for its forward and its backward."""
        return max(self.unheld + cost.forward_peak_bytes, self.newly + self.backward_peak)


def passed_on(cost: StageCost, outputs: Outputs, loads: Loads) -> Passage:
    """A stage of this cost over storages at hand."""
    holds = list(spread(cost.keeps_input, len(loads)))
    makes = spread(cost.keeps_output, len(outputs))
    for (_, passed), kept in zip(outputs, makes, strict=True):
        if passed is not None and kept:
            holds[passed] = True
    newly = sum(size for size, held in zip(loads, holds, strict=True) if held and size != HELD)
    made = sum(size for (size, passed), kept in zip(outputs, makes, strict=True) if passed is None and kept)
    following = []
    for (size, passed), kept in zip(outputs, makes, strict=True):
        if passed is None:
            following.append(HELD if kept else size)
        else:
            following.append(HELD if holds[passed] else loads[passed])
    return Passage(
        unheld=sum(unheld(loads)),
        newly=newly,
        retained=newly + made + cost.saved_bytes,
        loads=tuple(following),
        backward_peak=cost.backward_peak_beside(unheld(loads)),
    )


def unheld(loads: Loads) -> Loads:
    """The same bytes at hand where it makes no difference whether somebody holds a storage of none."""
    return tuple(max(size, 0) for size in loads)


def spread(flags: tuple[bool, ...], count: int) -> tuple[bool, ...]:
    """One flag per storage; a single flag stands for all."""
    return flags * count if len(flags) == 1 else flags


# Flat plans over options ---------------------------------------------------------------------------------------------


def flat_peak(chain: OptionChain, choice: Sequence[int]) -> int:
    """Most bytes alive in a step with block i under option ``choice[i]``."""
    stages = [] if chain.pre is None else [chain.pre]
    stages += [(block.options[o].cost, block.outputs) for block, o in zip(chain.blocks, choice, strict=True)]
    retained, peak, loads = 0, 0, chain.inputs
    for cost, outputs in [*stages, (chain.post, ())]:
        passage = passed_on(cost, outputs, loads)
        peak = max(peak, retained + passage.need(cost))
        retained, loads = retained + passage.retained, passage.loads
    return peak


def flat_stages(chain: OptionChain, *, relaxed: bool = False) -> Stages:
    """The state machine of flat plans, for the search of ``flat.py``.

    ``relaxed``: a recomputed block takes no bytes at all and costs the least that any recomputation of it costs. A
    plan of any shape, read as such a flat one, needs no more bytes and costs no more: a lower bound on all plans.
    """
    stages: list[list[tuple[StageCost, int]]] = [[(chain.pre[0], 0)]] if chain.pre else []
    outputs = [chain.pre[1]] if chain.pre else []
    for block in chain.blocks:
        ways = [(option.cost, option.value) for option in block.options]
        if relaxed:
            ways = [(_lowest_backward(cost), value) for cost, value in ways]
            if block.inside_again is not None:
                ways.append((NOTHING, block.least))
        stages.append(ways)
        outputs.append(block.outputs)
    states: list[Loads] = [chain.inputs]
    machine: Stages = []
    for ways, handed_on in zip([*stages, [(chain.post, 0)]], [*outputs, ()], strict=True):
        numbers: dict[Loads, int] = {}
        machine.append([_transitions(ways, handed_on, loads, numbers) for loads in states])
        states = list(numbers)
    return machine


def _lowest_backward(cost: StageCost) -> StageCost:
    """Whoever else holds its inputs: in the plans that a relaxed one stands for it need not be the same stages."""
    return replace(cost, inputs_let_go=())


def _transitions(
    ways: Sequence[tuple[StageCost, int]], outputs: Outputs, loads: Loads, numbers: dict[Loads, int]
) -> list[tuple[Transition, int]]:
    found = []
    for option, (cost, value) in reversed(list(enumerate(ways))):  # of equal labels the first stays: see flat.py
        passage = passed_on(cost, outputs, loads)
        following = numbers.setdefault(passage.loads, len(numbers))
        found.append((Transition(option, passage.need(cost), passage.retained, following, 0.0), value))
    return found
