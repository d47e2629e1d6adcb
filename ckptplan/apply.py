"""A plan becomes a running module; nothing is decided here.

``apply_plan`` builds a container of its own and touches no block. ``checkpointed`` patches a whole model,
reversibly. Both run the tree of the plan: a kept block is called; a recomputed node runs under
``recompute.run_recomputed``, nested as in the tree; a block of which part is kept runs under
``replay.run_replayed``. With gradients off everything is called plainly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import nn

from ckptplan.blocks import CheckpointableBlock, call_block, declare_blocks
from ckptplan.errors import PlanIncompatibleError
from ckptplan.graph import Output
from ckptplan.plan import CheckpointPlan, Keep, PlanNode, Recompute, Selective, blocks_of
from ckptplan.recompute import BufferSlot, Guards, buffer_slots, run_recomputed
from ckptplan.replay import run_replayed
from ckptplan.validate import validate_plan

CallBlock = Callable[[int, Any], Any]  # (block number, what the previous one returned) -> output


def apply_plan(
    blocks: Sequence[CheckpointableBlock],
    plan: CheckpointPlan,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
) -> CheckpointedSequential:
    """The blocks as one module that runs ``plan``: the same module instances, the same parameters.

    Other shapes and batch sizes than the examples' run too.

    Raises:
        PlanIncompatibleError: the plan is not one for these blocks (every fault at once).
    """
    validate_plan(plan, blocks, example_inputs, example_kwargs)
    return CheckpointedSequential(blocks, plan)


class CheckpointedSequential(nn.Module):
    """Blocks run one after the other under a plan.

    A tuple or list that a block returns is spread over the next one's positional arguments, a dict
    over its keyword arguments. Keyword arguments of the call reach every block that takes them by name.
    """

    def __init__(self, blocks: Sequence[CheckpointableBlock], plan: CheckpointPlan) -> None:
        super().__init__()
        self.plan = plan
        self.blocks = nn.ModuleList(block.module for block in blocks)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        modules = list(self.blocks)
        how = _how_to_run(self.plan, modules)
        value: Any = inputs
        for node in self.plan.nodes:
            value = run_node(node, value, lambda i, v: call_block(modules[i], v, kwargs), how)
        return value


@dataclass(frozen=True)
class HowToRun:
    """Per block what a recomputation restores, and what inside it is kept (of Selective nodes)."""

    guards: tuple[Guards, ...]
    kept: tuple[tuple[Output, ...], ...]


def run_node(node: PlanNode, value: Any, call: CallBlock, how: HowToRun) -> Any:
    """Run one node of a plan on ``value``, which the blocks before it returned.

    Raises:
        PlanIncompatibleError: a node that this executor does not know.
    """
    if isinstance(node, Keep):
        return call(node.block, value)
    if isinstance(node, Selective):
        return run_replayed(call, how.kept[node.block], node.block, value)
    if not isinstance(node, Recompute):
        raise PlanIncompatibleError(f"{node!r} is a kind of node that this executor does not run")

    def children(given: Any) -> Any:
        for child in node.children:
            given = run_node(child, given, call, how)
        return given

    return run_recomputed(children, _joined(how.guards[i] for i in blocks_of([node])), value)


def _joined(guards: Any) -> Guards:
    every = list(guards)
    slots: list[BufferSlot] = [slot for g in every for slot in g.buffers]
    return Guards(any(g.preserve_rng_state for g in every), tuple(slots))


def _how_to_run(plan: CheckpointPlan, modules: Sequence[nn.Module]) -> HowToRun:
    guards = tuple(
        Guards(decision.preserve_rng_state, buffer_slots(module, decision.mutated_buffers))
        for decision, module in zip(plan.decisions, modules, strict=True)
    )
    return HowToRun(guards, tuple(tuple(map(Output.of, d.saved_ops or ())) for d in plan.decisions))


class checkpointed:
    """Patch ``model`` so that its blocks run under ``plan``: inside a ``with``, or for good.

        with checkpointed(model, plan):
            train(model)

        patch = checkpointed(model, plan).permanent()
        ...
        patch.remove()

    The blocks are the submodules that the plan names. ``state_dict`` keys, parameters and hooks stay
    as they are; only the ``forward`` of each recomputed block is exchanged. A segment of several blocks runs when
    the model calls its first block; the other blocks of it then hand their input through, so the model must
    call each block on exactly what the previous one returned (profiling checks that).

    Raises:
        PlanIncompatibleError: a plan that does not belong to the model, or a model that is patched already.
    """

    def __init__(self, model: nn.Module, plan: CheckpointPlan) -> None:
        self.blocks = _named_blocks(model, plan)
        validate_plan(plan, self.blocks)
        patched = [b.block_id for b in self.blocks if "forward" in vars(b.module)]
        if patched:
            raise PlanIncompatibleError(
                f"the forward of {patched[0]!r} is exchanged already (a plan is active?); call remove() on it first"
            )
        self.plan = plan
        self._originals = [block.module.forward for block in self.blocks]
        self._how = _how_to_run(plan, [block.module for block in self.blocks])

    def __enter__(self) -> checkpointed:
        for node in self.plan.nodes:
            members = blocks_of([node])
            if isinstance(node, Keep):
                continue
            segment = _Segment([self.blocks[member].block_id for member in members])
            self._exchange(members[0], self._first_forward(node, segment))
            for member in members[1:]:
                self._exchange(member, segment.later_forward(self.blocks[member].block_id))
        return self

    permanent = __enter__

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Give every block its own ``forward`` back."""
        for block in self.blocks:
            vars(block.module).pop("forward", None)

    def _exchange(self, index: int, forward: Callable[..., Any]) -> None:
        # code that asks for a block's signature gets the original's
        self.blocks[index].module.forward = functools.update_wrapper(forward, self._originals[index])

    def _first_forward(self, node: PlanNode, segment: _Segment) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = run_node(node, _Arguments(args, kwargs), self._call, self._how)
            segment.start(output)
            return output

        return forward

    def _call(self, index: int, value: Any) -> Any:
        original = self._originals[index]
        if isinstance(value, _Arguments):
            return original(*value.args, **value.kwargs)
        if isinstance(value, (tuple, list)):
            return original(*value)
        if isinstance(value, dict):
            return original(**value)
        return original(value)


@dataclass(frozen=True)
class _Arguments:
    """How the model called the first block of a node."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Segment:
    """The later blocks of a segment, whose first block ran all of it: each hands its output through.

    The output is held until the last of them was called, as the model itself holds it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.output: Any = None

    def start(self, output: Any) -> None:
        if len(self.names) > 1:
            self.output = output

    def later_forward(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = self.output
            if not _is_called_with(output, args, kwargs):
                raise PlanIncompatibleError(
                    f"block {name!r} is not called with exactly what the block before it returned, so it cannot run in "
                    f"the segment from {self.names[0]!r} to {self.names[-1]!r}, which saw no other arguments; use a "
                    "plan that recomputes block by block"
                )
            if name == self.names[-1]:
                self.output = None
            return output

        return forward


def _is_called_with(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call's arguments are ``output``, spread as between the blocks of a plain chain."""
    if isinstance(output, dict):
        return not args and kwargs.keys() == output.keys() and all(kwargs[key] is output[key] for key in output)
    given = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    return not kwargs and len(args) == len(given) and all(a is b for a, b in zip(args, given, strict=True))


def _named_blocks(model: nn.Module, plan: CheckpointPlan) -> tuple[CheckpointableBlock, ...]:
    modules = dict(model.named_modules())
    missing = [d.block_id for d in plan.decisions if d.block_id not in modules]
    if missing:
        raise PlanIncompatibleError(
            [f"the plan's block {name!r} is no submodule of {type(model).__name__}" for name in missing]
        )
    return declare_blocks(model, [(d.block_id, modules[d.block_id]) for d in plan.decisions])
