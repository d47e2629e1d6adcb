"""The plan: a tree of nodes (``nodes.py``), what was decided for each block, and its JSON. Torch-free.

Planners make it, the simulator walks it, the referee checks it, ``apply.py`` runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptplan.errors import PlanIncompatibleError
from ckptplan.nodes import (
    Compiled,
    CompiledModel,
    Offload,
    PlanNode,
    Recompute,
    Selective,
    blocks_of,
    compiled_model,
    executors_of,
    nodes_text,
    parse_plan_text,
    recomputed_blocks,
    saved_faults,
    tree_faults,
    wholly_again,
)
from ckptplan.profiles import BlockProfile, ChainProfile, as_chain
from ckptplan.selective import find_option
from ckptplan.strict_json import (
    canonical_json,
    decode_dataclass,
    decode_value,
    parse_json_object,
    require_schema,
    write_text_whole,
)

PLAN_SCHEMA = "ckptplan.plan/2"
_FORMER_SCHEMA = "ckptplan.plan/1"  # without executors; ``S3[]`` did not count as recomputed


@dataclass(frozen=True)
class CheckpointDecision:
    """What the plan does with one block, and why. Bytes are what the block retains until its backward.

    ``checkpointed``: all of the block is made again in backward. ``executor``: what does that, or runs the block
    otherwise: "checkpoint" (PyTorch's, for Recompute nodes), "replay" (for Selective ones), "offload", "compiler";
    None: nothing does, as the block is kept. A plan fills in what its tree says.
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
        executors = executors_of(self.nodes)
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
        executors = executors_of(self.nodes)
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
            faults += [f"{where}: {fault}" for fault in saved_faults(selective.get(block), decision.saved_ops)]
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
        Raises ``ValueError`` showing the place in the text, ``PlanIncompatibleError`` for a tree that is no plan or
        has segments that the profiled model cannot run. Without a profile nobody can know that: the model fails then.
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
        faults = segment_faults(chain, nodes)
        if faults:
            raise PlanIncompatibleError(faults)
        decisions = tuple(decision_for(block, i in again, saved_ops=names.get(i)) for i, block in enumerate(chain))
        return cls(nodes, decisions, fingerprint=chain.fingerprint, environment=dict(chain.environment))

    @property
    def text(self) -> str:
        """``"K0 R(1) R(2 R(3 4))"``; :func:`parse_plan_text` reads it back."""
        return nodes_text(self.nodes)

    @property
    def kept(self) -> int:
        """Number of blocks whose activations are kept, all of them."""
        return len(self.decisions) - self.recomputed - self.selective - self.offloaded - self.compiled

    @property
    def selective(self) -> int:
        """Number of blocks of which part is kept."""
        return sum(isinstance(node, Selective) and bool(node.saved_ops) for node in self.nodes)

    @property
    def offloaded(self) -> int:
        """Number of blocks whose activations are on the host until their backward."""
        return sum(isinstance(node, Offload) for node in self.nodes)

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


def segment_faults(chain: ChainProfile, nodes: Sequence[PlanNode]) -> list[str]:
    """What keeps segments of ``nodes`` from running: code of the model's own between two of their blocks."""
    return [
        f"a segment goes over what the model runs {before.name}, which it cannot recompute"
        for node in nodes
        for i in (blocks_of((node,))[1:] if isinstance(node, Recompute) else ())
        if (before := chain[i].before) is not None
    ]


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
