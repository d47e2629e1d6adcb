"""The plan: a tree over the chain of blocks, its text and its JSON. Torch-free.

Planners make it, the simulator walks it, the referee checks it, ``apply.py`` runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptplan.errors import PlanIncompatibleError
from ckptplan.graph import Output
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
    as_chain,
    canonical_json,
    decode_dataclass,
    decode_value,
    parse_json_object,
    require_schema,
    write_text_whole,
)
from ckptplan.selective import find_option, names_outputs

PLAN_SCHEMA = "ckptplan.plan/2"
_FORMER_SCHEMA = "ckptplan.plan/1"  # without executors; ``S3[]`` did not count as recomputed

# What runs a node, and the nodes that it runs.
CHECKPOINT, REPLAY, COMPILER = "checkpoint", "replay", "compiler"


@dataclass(frozen=True)
class Keep:
    """Run block ``block`` and keep what autograd saves. Text: ``K3``."""

    block: int


@dataclass(frozen=True)
class Recompute:
    """Keep the first child's input only; run the children again in backward. Text: ``R(4 5)``, ``R(4 R(5 6))``.

    PyTorch's non-reentrant checkpoint runs it. Children are Keep or Recompute nodes over consecutive blocks; one
    written as a bare number is ``Keep``.
    """

    children: tuple[PlanNode, ...]


@dataclass(frozen=True)
class Selective:
    """Keep the named outputs inside block ``block``; the others are made again. Text: ``S3[qkv,attention,fc]``.

    At the top level only. ``saved_ops`` are names as in ``selective.py``; none: ``S3[]`` keeps nothing inside, which
    is the other way to recompute a whole block.
    """

    block: int
    saved_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved_ops", tuple(self.saved_ops))


@dataclass(frozen=True)
class Compiled:
    """Run block ``block`` compiled by torch.compile with this memory budget of its partitioner. Text: ``C3[0.5]``.

    At the top level only. ``budget`` is 0 to 1.
    """

    block: int
    budget: float


@dataclass(frozen=True)
class CompiledModel:
    """Run the model compiled as one graph with this memory budget: its blocks, 0 to ``blocks`` - 1, and what it runs
    around them. Text: ``C0-11[0.5]``.

    It stands alone in a plan. ``budget`` is 0 to 1.
    """

    blocks: int
    budget: float


PlanNode = Keep | Recompute | Selective | Compiled | CompiledModel


@dataclass(frozen=True)
class CheckpointDecision:
    """What the plan does with one block, and why. Bytes are what the block retains until its backward.

    ``checkpointed``: all of the block is made again in backward. ``executor``: what does that, or runs the block
    otherwise: "checkpoint" (PyTorch's, for Recompute nodes), "replay" (for Selective ones), "compiler"; None: nothing
    does, as the block is kept. A plan fills in what its tree says.
    """

    block_id: str
    checkpointed: bool
    eligible_for_checkpoint: bool = True
    exclusion_reason: str | None = None
    retained_bytes: int | None = None
    recompute_time_ms: float | None = None
    recompute_flops: int | None = None
    preserve_rng_state: bool = True
    mutated_buffers: tuple[str, ...] | None = None  # None: unknown, so every buffer is guarded
    saved_ops: tuple[str, ...] | None = None  # of a Selective node, in full; None: the node is another one
    sequence_hash: str | None = None  # of the operators that the block ran when it was profiled
    executor: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class CheckpointPlan:
    """An immutable plan with what it promises; made by ``plan_checkpoints`` or ``from_text``.

    Attributes:
        nodes: the tree, left to right over all blocks.
        decisions: one per block, in chain order.
        budget_bytes: the most bytes that the predicted peak may have; None where no budget was given.
        predicted_cost: ms or FLOPs (by ``cost_kind``) that recomputation adds to a step.
        optimality_gap: relative; 0.0 proved optimal among plans of the planner's kind; None: nothing is known.
        feasible: whether the predicted peak keeps to the budget.
        fingerprint: of the model that was profiled; ``validate_plan`` compares it.
        environment: where the profile was measured; for the reader, no part of the digest.

    Raises ``PlanIncompatibleError`` naming every fault where nodes and decisions do not form a plan.
    """

    nodes: tuple[PlanNode, ...]
    decisions: tuple[CheckpointDecision, ...]
    planner: str = "text"
    target_kind: str | None = None
    target_value: float | int | None = None
    budget_bytes: int | None = None
    memory_model: str = "peak"
    cost_kind: str = "time"
    predicted_peak_bytes: int | None = None
    predicted_peak_at: str | None = None
    no_checkpoint_peak_bytes: int | None = None
    predicted_cost: float | int | None = None
    optimality_gap: float | None = None
    feasible: bool = True
    fingerprint: str = ""
    environment: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "decisions", tuple(self.decisions))
        faults = tree_faults(self.nodes, len(self.decisions))
        if not faults:
            faults = [*self._decision_faults(), *self._number_faults()]
        if faults:
            raise PlanIncompatibleError(faults)
        executors = _executors_of(self.nodes)
        filled = tuple(
            decision if decision.executor else replace(decision, executor=executors.get(block))
            for block, decision in enumerate(self.decisions)
        )
        object.__setattr__(self, "decisions", filled)

    def _number_faults(self) -> list[str]:
        named = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        for decision in self.decisions:
            named += [(f"block {decision.block_id!r}: {f.name}", getattr(decision, f.name)) for f in _DECISION_FIELDS]
        words = (("memory_model", ("peak", "additive")), ("cost_kind", ("time", "flops")))
        return [
            f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}"
            for name, allowed in words
            if getattr(self, name) not in allowed
        ] + [
            f"{name} is {value!r}; expected a finite number that is not negative"
            for name, value in named
            if type(value) in (int, float) and not (math.isfinite(value) and value >= 0)
        ]

    def _decision_faults(self) -> list[str]:
        faults = []
        again, recomputed = wholly_again(self.nodes), recomputed_blocks(self.nodes)
        selective = {node.block: node for node in self.nodes if isinstance(node, Selective)}
        executors = _executors_of(self.nodes)
        ids = [decision.block_id for decision in self.decisions]
        faults += [f"block id {name!r} stands twice" for name in sorted({i for i in ids if ids.count(i) > 1})]
        for block, decision in enumerate(self.decisions):
            where = f"block {decision.block_id!r}"
            if decision.checkpointed != (block in again):
                planned = "recomputes" if block in again else "keeps"
                faults.append(f"{where}: checkpointed={decision.checkpointed} but the tree {planned} it ({self.text})")
            if (decision.saved_ops is not None) != (block in selective):
                planned = "keeps part of" if block in selective else "does not keep part of"
                faults.append(f"{where}: saved_ops={decision.saved_ops} but the tree {planned} it ({self.text})")
            faults += [f"{where}: {fault}" for fault in _saved_faults(selective.get(block), decision.saved_ops)]
            if decision.executor not in (None, executors.get(block)):
                runs = executors.get(block) or "nothing: the block is kept"
                faults.append(f"{where}: executor={decision.executor!r} but what runs its node is {runs} ({self.text})")
            if block in recomputed and not decision.eligible_for_checkpoint:
                faults.append(f"{where}: is recomputed but not eligible: {decision.exclusion_reason}")
            if decision.eligible_for_checkpoint and decision.exclusion_reason is not None:
                faults.append(f"{where}: is eligible and excluded at once: {decision.exclusion_reason}")
        return faults

    @classmethod
    def from_text(
        cls, text: str, profiles_or_block_ids: ChainProfile | Sequence[BlockProfile] | Sequence[str] | None = None
    ) -> CheckpointPlan:
        """A forced plan: ``CheckpointPlan.from_text("K0 R(1) R(2 R(3 4))", profile)``.

        With a profile the decisions carry its eligibility and costs and the plan its fingerprint; with block ids
        only those; with neither the blocks are called by their numbers. Predictions stay None:
        ``plan_checkpoints(profile, planner="text", text=...)`` fills them in.
        Raises ``ValueError`` showing the place in the text, ``PlanIncompatibleError`` for a tree that is no plan.
        """
        nodes = parse_plan_text(text)
        given = None if profiles_or_block_ids is None else tuple(profiles_or_block_ids)
        if given is None:
            given = tuple(str(block) for block in range(1 + max(blocks_of(nodes), default=-1)))
        faults = tree_faults(nodes, len(given))
        if faults:
            raise PlanIncompatibleError(faults)
        again = wholly_again(nodes)
        names = {node.block: node.saved_ops for node in nodes if isinstance(node, Selective)}
        if all(isinstance(item, str) for item in given):
            decisions = tuple(
                CheckpointDecision(str(name), i in again, saved_ops=names.get(i)) for i, name in enumerate(given)
            )
            return cls(nodes, decisions)
        source = profiles_or_block_ids if isinstance(profiles_or_block_ids, ChainProfile) else given
        chain = as_chain(source)  # type: ignore[arg-type]
        decisions = tuple(decision_for(block, i in again, saved_ops=names.get(i)) for i, block in enumerate(chain))
        return cls(nodes, decisions, fingerprint=chain.fingerprint, environment=dict(chain.environment))

    @property
    def text(self) -> str:
        """``"K0 R(1) R(2 R(3 4))"``; :func:`parse_plan_text` reads it back."""
        return nodes_text(self.nodes)

    @property
    def kept(self) -> int:
        """Number of blocks whose activations are kept, all of them."""
        return len(self.decisions) - self.recomputed - self.selective - self.compiled

    @property
    def selective(self) -> int:
        """Number of blocks of which part is kept."""
        return sum(isinstance(node, Selective) and bool(node.saved_ops) for node in self.nodes)

    @property
    def compiled(self) -> int:
        """Number of blocks that run compiled."""
        return sum(len(blocks_of((node,))) for node in self.nodes if isinstance(node, (Compiled, CompiledModel)))

    @property
    def compiled_model(self) -> CompiledModel | None:
        """The node that compiles the model as one graph, where the plan does that."""
        return compiled_model(self.nodes)

    @property
    def recomputed(self) -> int:
        """Number of blocks all of which is made again in backward, by whichever executor."""
        return len(wholly_again(self.nodes))

    @property
    def block_ids(self) -> tuple[str, ...]:
        return tuple(decision.block_id for decision in self.decisions)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides behaviour: all but ``environment``."""
        return _digest(self._sections())

    def _sections(self) -> dict[str, Any]:
        """The plan's JSON form without digests, in the parts that are told apart when one was changed."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sections: dict[str, Any] = {
            name: {field: fields[field] for field in members} for name, members in _SECTIONS.items()
        }
        sections["tree"] = {"text": self.text, "use_reentrant": False}
        sections["decisions"] = [dataclasses.asdict(decision) for decision in self.decisions]
        return sections

    def to_json(self) -> str:
        """Canonical text: equal plans give equal bytes; nothing in it depends on when or where it is written."""
        sections = self._sections()
        return (
            canonical_json(
                {
                    "schema": PLAN_SCHEMA,
                    **sections,
                    "environment": self.environment,
                    "digest": _digest(sections),
                    "section_digests": {name: _digest(part)[:16] for name, part in sections.items()},
                }
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> CheckpointPlan:
        """Reads strictly what :meth:`to_json` wrote.

        What the version before wrote is read too, as a plan of this one (its digest is another then).
        Raises ``UnsupportedPlanVersionError`` for any other format and ``PlanIncompatibleError`` listing every fault
        for a wrong type, an unknown or missing key, or anything changed since it was written.
        """
        try:
            data = parse_json_object(text, source)
            former = data.get("schema") == _FORMER_SCHEMA
            if former:
                data["schema"] = PLAN_SCHEMA
            require_schema(data, PLAN_SCHEMA, source)
            plan, sections = _plan_from_sections(cls, data, source, former=former)
        except ValueError as error:
            raise PlanIncompatibleError(str(error)) from None
        stored = data["section_digests"]
        changed = [name for name, part in sections.items() if stored.get(name) != _digest(part)[:16]]
        faults = [f"{source}: section {name!r} is not what was written: {_short(sections[name])}" for name in changed]
        digest = _digest(sections) if former else plan.digest
        if not faults and data["digest"] != digest:
            faults = [f"{source}: digest is {data['digest']!r}; the contents give {digest!r}"]
        if faults:
            raise PlanIncompatibleError(faults)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is whole or not there."""
        write_text_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CheckpointPlan:
        """Reads what :meth:`save` wrote; raises as :meth:`from_json` does, naming the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanIncompatibleError(f"{path}: is not JSON: it is not even text ({error})") from None
        return cls.from_json(text, source=str(path))

    def diff(self, other: CheckpointPlan) -> list[str]:
        """One line per thing in which ``other`` differs from this plan; empty when their digests are equal."""
        lines = [] if self.text == other.text else [f"text: {self.text} -> {other.text}"]
        for members in _SECTIONS.values():
            for name in members:
                mine, theirs = getattr(self, name), getattr(other, name)
                if mine != theirs:
                    lines.append(f"{name}: {mine!r} -> {theirs!r}")
        if len(self.decisions) != len(other.decisions):
            return [*lines, f"number of blocks: {len(self.decisions)} -> {len(other.decisions)}"]
        for mine, theirs in zip(self.decisions, other.decisions, strict=True):
            for field in dataclasses.fields(mine):
                a, b = getattr(mine, field.name), getattr(theirs, field.name)
                if a != b:
                    lines.append(f"block {mine.block_id!r} {field.name}: {a!r} -> {b!r}")
        return lines


_DECISION_FIELDS = dataclasses.fields(CheckpointDecision)
_SECTIONS = {
    "target": ("planner", "target_kind", "target_value", "budget_bytes", "memory_model", "cost_kind"),
    "prediction": (
        "predicted_peak_bytes",
        "predicted_peak_at",
        "no_checkpoint_peak_bytes",
        "predicted_cost",
        "optimality_gap",
        "feasible",
    ),
    "model": ("fingerprint",),
}


def decision_for(
    block: BlockProfile,
    checkpointed: bool,
    reason: str = "",
    retained: int | None = None,
    saved_ops: Sequence[str] | None = None,
) -> CheckpointDecision:
    """The decision on one profiled block. RNG state is kept unless the block is known not to draw.

    ``saved_ops`` (of a Selective node, in full or in short) must name one of the block's options, else
    ``PlanIncompatibleError``.
    """
    option = None if saved_ops is None else find_option(block, saved_ops)
    return CheckpointDecision(
        block_id=block.block_id,
        checkpointed=checkpointed,
        eligible_for_checkpoint=block.eligible_for_checkpoint,
        exclusion_reason=None if block.eligible_for_checkpoint else block.exclusion_reason or "not eligible",
        retained_bytes=retained,
        recompute_time_ms=block.recompute_time_ms if option is None else option.time_ms,
        recompute_flops=block.recompute_flops if option is None else option.flops,
        preserve_rng_state=block.is_stochastic is not False,
        mutated_buffers=None if block.is_stateful is None and not block.mutated_buffers else block.mutated_buffers,
        saved_ops=None if option is None else option.saved_ops,
        sequence_hash=None if option is None else option.sequence_hash,
        reason=reason,
    )


# The tree ------------------------------------------------------------------------------------------------------------


def blocks_of(nodes: Sequence[PlanNode]) -> tuple[int, ...]:
    """Block numbers under the nodes, left to right."""
    found: list[int] = []
    for node in nodes:
        if isinstance(node, Recompute):
            found.extend(blocks_of(node.children))
        elif isinstance(node, CompiledModel):
            found.extend(range(node.blocks))
        else:
            found.append(node.block)
    return tuple(found)


def compiled_model(nodes: Sequence[PlanNode]) -> CompiledModel | None:
    """The node that compiles the model as one graph; it stands alone."""
    return next((node for node in nodes if isinstance(node, CompiledModel)), None)


def recomputed_blocks(nodes: Sequence[PlanNode]) -> frozenset[int]:
    """Numbers of the blocks under a Recompute node: their code runs again in backward."""
    return frozenset(block for node in nodes if isinstance(node, Recompute) for block in blocks_of((node,)))


def wholly_again(nodes: Sequence[PlanNode]) -> frozenset[int]:
    """Numbers of the blocks all of which is made again in backward: recomputed ones, and ``S3[]``."""
    emptied = {node.block for node in nodes if isinstance(node, Selective) and not node.saved_ops}
    return recomputed_blocks(nodes) | emptied


def flat_nodes(recomputed: Sequence[bool]) -> tuple[PlanNode, ...]:
    """A flat plan: block i on its own, recomputed where ``recomputed[i]``."""
    return tuple(Recompute((Keep(i),)) if chosen else Keep(i) for i, chosen in enumerate(recomputed))


def tree_faults(nodes: Sequence[PlanNode], num_blocks: int) -> list[str]:
    """Everything that keeps ``nodes`` from being a plan over blocks 0 .. ``num_blocks`` - 1, one sentence each."""
    faults: list[str] = []
    _collect_node_faults(nodes, faults)
    whole = compiled_model(nodes)
    if whole is not None and (len(nodes) > 1 or whole.blocks != num_blocks):
        faults.append(
            f"{_node_text(whole)} compiles the model as one graph: it stands alone and names all its blocks, "
            f"0-{num_blocks - 1}"
        )
    if faults:
        return faults
    expected = 0
    for block in blocks_of(nodes):
        if block >= num_blocks:
            faults.append(f"block {block} is out of range: there are {num_blocks} blocks, 0 to {num_blocks - 1}")
        elif block < expected:
            faults.append(f"block {block} comes again or out of order; block {expected} was due")
        elif block > expected:
            faults.append(f"blocks {expected} to {block - 1} are missing before block {block}")
        expected = max(expected, block + 1)
    if expected < num_blocks:
        faults.append(f"blocks {expected} to {num_blocks - 1} are missing at the end")
    return faults


def _collect_node_faults(nodes: Sequence[PlanNode], faults: list[str]) -> None:
    for node in nodes:
        if isinstance(node, (Keep, Selective, Compiled)):
            if type(node.block) is not int or node.block < 0:
                faults.append(f"{type(node).__name__}({node.block!r}): expected a block number from 0 on")
            elif isinstance(node, Selective):
                faults += _selective_faults(node)
            elif isinstance(node, Compiled) and not _is_share(node.budget):
                faults.append(f"Compiled({node.block}, {node.budget!r}): expected a budget from 0.0 to 1.0")
        elif isinstance(node, CompiledModel):
            if type(node.blocks) is not int or node.blocks < 1 or not _is_share(node.budget):
                faults.append(f"{node!r}: expected a number of blocks from 1 on and a budget from 0.0 to 1.0")
        elif isinstance(node, Recompute):
            if not node.children:
                faults.append("R() recomputes nothing; it needs at least one block")
            elif len(node.children) == 1 and isinstance(node.children[0], Recompute):
                faults.append(
                    f"{_node_text(node)} wraps a recomputation in another; write {_node_text(node.children[0])}"
                )
            inside = [child for child in node.children if isinstance(child, (Selective, Compiled, CompiledModel))]
            faults += [f"{_node_text(child)} stands inside a recomputation; it may at the top only" for child in inside]
            _collect_node_faults(node.children, faults)
        else:
            faults.append(
                f"{node!r} is no node that this version knows; expected Keep, Recompute, Selective, Compiled or "
                "CompiledModel"
            )


def _is_share(budget: object) -> bool:
    return isinstance(budget, float) and 0 <= budget <= 1


def _selective_faults(node: Selective) -> list[str]:
    wrong = [n for n in node.saved_ops if not isinstance(n, str) or not n or set(n) & set(",[] \t\n")]
    faults = [f"S{node.block}: {name!r} is no name of an output" for name in wrong]
    if len(set(node.saved_ops)) < len(node.saved_ops):
        faults.append(f"S{node.block}[{','.join(node.saved_ops)}]: a name stands twice")
    return faults


def _executors_of(nodes: Sequence[PlanNode]) -> dict[int, str]:
    """What runs each block that is not kept."""
    found: dict[int, str] = {}
    for node in nodes:
        if isinstance(node, Recompute):
            found |= dict.fromkeys(blocks_of((node,)), CHECKPOINT)
        elif isinstance(node, Selective):
            found[node.block] = REPLAY
        elif isinstance(node, (Compiled, CompiledModel)):
            found |= dict.fromkeys(blocks_of((node,)), COMPILER)
    return found


def _saved_faults(node: Selective | None, saved_ops: Sequence[str] | None) -> list[str]:
    """Each name of the node must stand for outputs that the decision saves, and for all of them together."""
    if node is None or saved_ops is None:
        return []
    unclear = [name for name in saved_ops if not Output.is_name(name)]
    if unclear:
        return [
            f"{name!r} is no full name of an output (<submodule path>.<operator>#<n-th call>:<output>); make the plan "
            "with a profile that knows the short ones"
            for name in unclear
        ]
    if names_outputs(node.saved_ops, saved_ops):
        return []
    return [f"the tree keeps [{', '.join(node.saved_ops)}] but saved_ops is [{', '.join(saved_ops)}]"]


# Text ----------------------------------------------------------------------------------------------------------------


def nodes_text(nodes: Sequence[PlanNode]) -> str:
    """The text of a plan: ``K0 R(1) R(2 R(3 4))``."""
    return " ".join(_node_text(node) for node in nodes)


def _node_text(node: PlanNode) -> str:
    if isinstance(node, Keep):
        return f"K{node.block}"
    if isinstance(node, Selective):
        return f"S{node.block}[{','.join(node.saved_ops)}]"
    if isinstance(node, Compiled):
        return f"C{node.block}[{node.budget!r}]"
    if isinstance(node, CompiledModel):
        return f"C0-{node.blocks - 1}[{node.budget!r}]"
    inner = (str(child.block) if isinstance(child, Keep) else _node_text(child) for child in node.children)
    return f"R({' '.join(inner)})"


_TOKEN = re.compile(
    r"\s*(?:(?P<keep>K)?(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?(?=[\s()]|$)|(?P<open>R\()|(?P<close>\)))"
    r"|\s*S(?P<selective>[0-9]+)\[(?P<names>[^\s\[\]]*)\](?=[\s()]|$)"
    r"|\s*C(?P<compiled>[0-9]+)(?:-(?P<last_compiled>[0-9]+))?\[(?P<budget>[0-9]+(?:\.[0-9]*)?(?:e-[0-9]+)?)\](?=[\s()]|$)"
)
_LATER_NODES = {"O": "Offload"}
_MAX_RANGE = 1_000_000


def parse_plan_text(text: str) -> tuple[PlanNode, ...]:
    """Nodes from text. ``K0`` keeps block 0, ``K0-3`` keeps four; ``R(1)`` recomputes one, ``R(4-7)`` a segment.

    ``S2[qkv,fc]`` keeps two outputs inside block 2, ``C3[0.5]`` runs block 3 compiled, ``C0-11[0.5]`` the whole model
    of 12 blocks as one graph. Inside ``R(...)`` a bare number is a block of the segment and another ``R(...)`` a nested
    recomputation.
    Raises ``ValueError`` that shows the place, what was found there and what is allowed.
    """
    if not isinstance(text, str):
        raise TypeError(f"plan text is a {type(text).__name__}; expected text such as 'K0 R(1) R(2 3)'")
    levels: list[list[PlanNode]] = [[]]
    opened_at: list[int] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _text_error(text, position, depth=len(opened_at))
        if match["first"] is not None:
            if match["keep"] is None and not opened_at:
                raise _text_error(text, position, depth=0)
            levels[-1].extend(_keep_range(text, match))
        elif match["selective"] is not None:
            names = tuple(match["names"].split(",")) if match["names"] else ()
            levels[-1].append(Selective(int(match["selective"]), names))
        elif match["compiled"] is not None:
            levels[-1].append(_compiled_node(text, match))
        elif match["open"]:
            opened_at.append(match.start("open"))
            levels.append([])
        elif not opened_at:
            raise _text_error(text, position, depth=0)
        else:
            opened_at.pop()
            children = tuple(levels.pop())
            levels[-1].append(Recompute(children))
        position = match.end()
    if opened_at:
        raise ValueError(f"plan text: 'R(' is not closed\n{_pointer(text, opened_at[-1])}")
    if not levels[0]:
        raise ValueError("plan text is empty; expected nodes such as 'K0 R(1) R(2 3)'")
    return tuple(levels[0])


def _compiled_node(text: str, match: re.Match[str]) -> PlanNode:
    first, budget = int(match["compiled"]), float(match["budget"])
    if match["last_compiled"] is None:
        return Compiled(first, budget)
    if first > 0:
        raise ValueError(
            "plan text: a range stands for the whole model compiled as one graph, so it begins at block 0\n"
            f"{_pointer(text, match.start('compiled'))}"
        )
    return CompiledModel(int(match["last_compiled"]) + 1, budget)


def _keep_range(text: str, match: re.Match[str]) -> list[PlanNode]:
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if last < first:
        raise ValueError(f"plan text: range {first}-{last} does not ascend\n{_pointer(text, match.start('first'))}")
    if last - first >= _MAX_RANGE:
        where = _pointer(text, match.start("first"))
        raise ValueError(f"plan text: range {first}-{last} is too large; at most {_MAX_RANGE:,} blocks\n{where}")
    return [Keep(block) for block in range(first, last + 1)]


def _text_error(text: str, position: int, *, depth: int) -> ValueError:
    position += len(text[position:]) - len(text[position:].lstrip())
    word = text[position:].split(maxsplit=1)[0]
    if word[0] in _LATER_NODES and depth == 0:
        found = f"a {_LATER_NODES[word[0]]} node ({word!r}), which this version does not know"
    else:
        found = repr(word)
    allowed = (
        "a block number, a range like 4-7, 'R(' or ')'"
        if depth
        else "K<block>, K<first>-<last>, R(...), S<block>[...] or C<block>[<budget>]"
    )
    return ValueError(
        f"plan text: found {found} at position {position}; expected {allowed}\n{_pointer(text, position)}"
    )


def _pointer(text: str, position: int) -> str:
    start = max(0, position - 40)
    return f"  {text[start : position + 40]}\n  {' ' * (position - start)}^"


# JSON ----------------------------------------------------------------------------------------------------------------


def _digest(data: Any) -> str:
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def _short(data: Any, limit: int = 200) -> str:
    text = " ".join(canonical_json(data).split())
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _plan_from_sections(
    cls: type[CheckpointPlan], data: dict[str, Any], source: str, *, former: bool
) -> tuple[CheckpointPlan, dict[str, Any]]:
    """The plan and its sections as they stand in the file; raises ``ValueError`` at the first thing out of form."""
    expected = {*_SECTIONS, "tree", "decisions", "environment", "digest", "section_digests"}
    _require_keys(data, expected, source)
    tree = data["tree"]
    _require_keys(tree, {"text", "use_reentrant"}, f"{source}: tree")
    if tree["use_reentrant"] is not False:
        raise ValueError(
            f"{source}: use_reentrant is {tree['use_reentrant']!r}; only false is run "
            "(reentrant checkpointing breaks frozen inputs, hooks and autograd.grad)"
        )
    if not isinstance(data["decisions"], list):
        raise ValueError(f"{source}: decisions is {_short(data['decisions'])}; expected a list")
    if not isinstance(data["section_digests"], dict):
        raise ValueError(f"{source}: section_digests is {_short(data['section_digests'])}; expected an object")
    items = [_from_former(item) for item in data["decisions"]] if former else data["decisions"]
    decisions = [
        decode_dataclass(CheckpointDecision, item, f"{source}: decisions[{i}]") for i, item in enumerate(items)
    ]
    fields: dict[str, Any] = {"environment": data["environment"]}
    for name, members in _SECTIONS.items():
        _require_keys(data[name], set(members), f"{source}: {name}")
        fields |= data[name]
    hints = typing.get_type_hints(cls)
    fields = {name: decode_value(hints[name], value, f"{source}: {name}") for name, value in fields.items()}
    plan = cls(parse_plan_text(tree["text"]), tuple(decisions), **fields)
    if plan.text != tree["text"]:
        raise ValueError(f"{source}: text is {tree['text']!r}; its canonical form is {plan.text!r}")
    return plan, {name: data[name] for name in (*_SECTIONS, "tree", "decisions")}


def _from_former(decision: Any) -> Any:
    """A decision as the version before wrote it, in today's form; anything else as it is, which is then refused."""
    if not isinstance(decision, dict) or "executor" in decision:
        return decision
    emptied = decision.get("saved_ops") == []
    return decision | {"executor": None} | ({"checkpointed": True} if emptied else {})


def _require_keys(data: Any, expected: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: is {_short(data)}; expected an object")
    unknown, missing = sorted(data.keys() - expected), sorted(expected - data.keys())
    if unknown or missing:
        parts = [f"{what} {', '.join(keys)}" for what, keys in (("unknown", unknown), ("missing", missing)) if keys]
        raise ValueError(f"{where}: keys {'; '.join(parts)}")
