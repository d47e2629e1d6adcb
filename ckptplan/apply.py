"""A plan becomes a running module; nothing is decided here.

``apply_plan`` builds a container of its own and touches no block. ``checkpointed`` patches a whole model,
reversibly. Both run the tree of the plan: a kept block is called; a recomputed node runs under
``recompute.run_segment``, nested as in the tree; a block of which part is kept runs under
``replay.run_replayed``, one whose activations go to the host under ``offload.run_offloaded``,
a compiled one as ``compiling.CompiledBlock``. With gradients off everything is called plainly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import CheckpointableBlock, call_block, declare_blocks, hooks_between, is_called_with
from ckptplan.compiling import CompiledBlock, called_as
from ckptplan.errors import PlanIncompatibleError
from ckptplan.graph import Output
from ckptplan.larger_inputs import LargestInputs
from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, PlanNode, Recompute, Selective, blocks_of
from ckptplan.offload import run_offloaded
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import modules_of
from ckptplan.recompute import Guards, buffer_slots, run_block, run_segment
from ckptplan.replay import run_replayed
from ckptplan.validate import require_plan, validate_plan
from ckptplan.wrappers import is_compiled, plainness_faults

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
    if plan.compiled_model is not None:
        raise PlanIncompatibleError("the plan compiles a whole model; only checkpointed(model, plan) runs it")
    if len(plan.decisions) > len(blocks):
        raise PlanIncompatibleError(
            "the plan is for a model that calls blocks more than once; only checkpointed(model, plan) runs it"
        )
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

        def call(index: int, given: Any) -> Any:
            with called_as(how.compiled.get(index)):
                return call_block(modules[index], given, kwargs)

        for node in self.plan.nodes:
            value = run_node(node, value, call, how)
        return value


@dataclass(frozen=True)
class HowToRun:
    """Per block what a recomputation restores, and what inside it is kept (of Selective nodes); Compiled blocks."""

    guards: tuple[Guards, ...]
    kept: tuple[tuple[Output, ...], ...]
    compiled: Mapping[int, CompiledBlock]


def run_node(node: PlanNode, value: Any, call: CallBlock, how: HowToRun) -> Any:
    """Run one node of a plan on ``value``, which the blocks before it returned.

    Raises:
        PlanIncompatibleError: a node that this executor does not know.
    """
    if isinstance(node, (Keep, Compiled)):  # a compiled block has its other forward already
        return run_block(call, how.guards[node.block], node.block, value)
    if isinstance(node, Offload):
        (module,) = how.guards[node.block].modules
        return run_offloaded(call, module, node.block, value)
    if isinstance(node, Selective):
        return run_replayed(call, how.kept[node.block], node.block, value)
    if not isinstance(node, Recompute):
        raise PlanIncompatibleError(f"{node!r} is a kind of node that this executor does not run")

    def children(given: Any) -> Any:
        for child in node.children:
            given = run_node(child, given, call, how)
        return given

    return run_segment(children, _joined(how.guards[i] for i in blocks_of([node])), value)


def _joined(guards: Iterable[Guards]) -> Guards:
    every = list(guards)
    return Guards(
        buffers=tuple(slot for g in every for slot in g.buffers),
        modules=tuple(module for g in every for module in g.modules),
    )


def _how_to_run(plan: CheckpointPlan, modules: Sequence[nn.Module]) -> HowToRun:
    guards = tuple(
        Guards(buffer_slots(module, decision.mutated_buffers), (module,))
        for decision, module in zip(plan.decisions, modules, strict=True)
    )
    kept = tuple(tuple(map(Output.of, d.saved_ops or ())) for d in plan.decisions)
    compiled = {n.block: CompiledBlock(modules[n.block], n.budget) for n in plan.nodes if isinstance(n, Compiled)}
    return HowToRun(guards, kept, compiled)


class checkpointed:
    """Patch ``model`` so that its blocks run under ``plan``: inside a ``with``, or for good.

        with checkpointed(model, plan):
            train(model)

        patch = checkpointed(model, plan).permanent()
        ...
        patch.remove()

    The blocks are the submodules that the plan names. ``state_dict`` keys, parameters and hooks stay
    as they are; only the ``forward`` of each recomputed block is exchanged, and the model's own where it calls a block
    more than once: then each call of a forward runs as planned for it, in their order, and calls beyond those planned
    are kept. A segment of several blocks runs when
    the model calls its first block; the other blocks of it then hand their input through, so the model must
    call each block on exactly what the previous one returned (profiling checks that). Training forwards on more than
    was measured are told by a ``LargerBatchWarning``.

    Raises:
        PlanIncompatibleError: a plan that does not belong to the model, or a model that is patched already.
    """

    def __init__(self, model: nn.Module, plan: CheckpointPlan) -> None:
        require_plan(plan)
        faults = plainness_faults(model)
        if faults:
            raise PlanIncompatibleError(faults)
        self.model = model
        self.blocks = _named_blocks(model, plan)
        self._require_own_forwards()
        validate_plan(plan, self.blocks)
        self.plan = plan
        by_id = {block.block_id: block.module for block in self.blocks}
        self._modules = [by_id[name] for name in modules_of(plan.block_ids)]  # one per call
        self._how = _how_to_run(plan, self._modules)
        whole = plan.compiled_model
        self._compiled_model = None if whole is None else _CompiledForward(model, CompiledBlock(model, whole.budget))
        self._tells_larger: Any = None

    def __enter__(self) -> checkpointed:
        self._require_own_forwards()
        forwards = self._forwards()
        turns: list[_InTurn] = []
        for block in self.blocks:
            own = [forwards.get(i) for i, module in enumerate(self._modules) if module is block.module]
            planned: Any = own[0]
            if len(own) > 1 and any(forward is not None for forward in own):
                planned = _InTurn(block.module, own)
                turns.append(planned)
            if planned is not None:
                block.module.forward = planned
        if turns:
            self.model.forward = _NewForward(self.model, turns)
        if self._compiled_model is not None:
            self.model.forward = self._compiled_model
        largest = LargestInputs(self.plan.environment)
        if largest.shapes is not None and self._tells_larger is None:
            self._tells_larger = self.model.register_forward_pre_hook(largest, with_kwargs=True)
        return self

    def _forwards(self) -> dict[int, _PlannedForward]:
        """What stands for each call that is not kept."""
        found: dict[int, _PlannedForward] = {}
        for node in self.plan.nodes:
            if isinstance(node, (Keep, CompiledModel)):
                continue
            members = blocks_of([node])
            segment = _Segment([self.plan.block_ids[member] for member in members])
            found[members[0]] = _FirstForward(self, node, segment)
            for member in members[1:]:
                found[member] = _LaterForward(self._modules[member], segment, self.plan.block_ids[member])
        return found

    permanent = __enter__

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Give every block its own ``forward`` back."""
        for module in (*(block.module for block in self.blocks), self.model):
            if isinstance(vars(module).get("forward"), _PlannedForward):
                del module.forward
        if self._tells_larger is not None:
            self._tells_larger.remove()
            self._tells_larger = None

    def _require_own_forwards(self) -> None:
        if isinstance(vars(self.model).get("forward"), _PlannedForward):
            raise PlanIncompatibleError("a plan is active on the model already; call remove() on it first")
        for block in self.blocks:
            forward = vars(block.module).get("forward")
            if isinstance(forward, _PlannedForward):
                raise PlanIncompatibleError(
                    f"a plan is active on {block.block_id!r} already; call remove() on it first"
                )
            if forward is not None or is_compiled(block.module):
                raise PlanIncompatibleError(
                    f"the forward of {block.block_id!r} was exchanged by something else (torch.compile, a wrapper); "
                    "apply the plan first, and that afterwards"
                )

    def run(self, node: PlanNode, arguments: _Arguments) -> Any:
        """Run a node of the plan on what the model called its first block with."""
        return run_node(node, arguments, self._call, self._how)

    def _call(self, index: int, value: Any) -> Any:
        module = self._modules[index]
        # what the class says; the instance has ours
        original = self._how.compiled.get(index) or type(module).forward.__get__(module)
        if isinstance(value, _Arguments):
            return original(*value.args, **value.kwargs)
        if isinstance(value, (tuple, list)):
            return original(*value)
        if isinstance(value, dict):
            return original(**value)
        return original(value)


class _PlannedForward:
    """Stands as ``forward`` on a block; an object, not a closure, so that a patched model copies and pickles whole.

    Code that asks for a block's signature gets the original's.
    """

    module: nn.Module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _FirstForward(_PlannedForward):
    """Runs a whole node of the plan."""

    def __init__(self, patch: checkpointed, node: PlanNode, segment: _Segment) -> None:
        self.module = patch._modules[blocks_of([node])[0]]
        self.patch, self.node, self.segment = patch, node, segment

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.segment.require_no_hooks([self.patch._modules[member] for member in blocks_of([self.node])])
        output = self.patch.run(self.node, _Arguments(args, kwargs))
        self.segment.start(output)
        return output


class _LaterForward(_PlannedForward):
    """Hands through what the first block of its segment computed."""

    def __init__(self, module: nn.Module, segment: _Segment, name: str) -> None:
        self.module, self.segment, self.name = module, segment, name

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.segment.hand_through(self.name, args, kwargs)


class _InTurn(_PlannedForward):
    """A block that the model calls more than once in a forward: its calls run as planned for each, in turn."""

    def __init__(self, module: nn.Module, forwards: Sequence[_PlannedForward | None]) -> None:
        self.module, self.forwards, self.calls = module, tuple(forwards), 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's has no types
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        planned = self.forwards[self.calls] if self.calls < len(self.forwards) else None
        self.calls += 1
        if planned is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return planned(*args, **kwargs)


class _NewForward(_PlannedForward):
    """Stands on the model: every forward begins with the first call of each block."""

    def __init__(self, module: nn.Module, turns: Sequence[_InTurn]) -> None:
        self.module, self.turns = module, tuple(turns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for turn in self.turns:
            turn.calls = 0
        return type(self.module).forward(self.module, *args, **kwargs)


class _CompiledForward(_PlannedForward):
    """Stands on a model that runs compiled as one graph."""

    def __init__(self, module: nn.Module, compiled: CompiledBlock) -> None:
        self.module, self.compiled = module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


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

    def require_no_hooks(self, modules: Sequence[nn.Module]) -> None:
        for position in range(1, len(modules)):
            if hooks_between(*modules[position - 1 : position + 1]):
                raise PlanIncompatibleError(
                    f"hooks look at what {self.names[position - 1]!r} hands to {self.names[position]!r}, which runs "
                    f"inside the segment from {self.names[0]!r} to {self.names[-1]!r}, where they would see something "
                    "else: register them before profiling (then no segment is planned there), or use a plan that "
                    "recomputes block by block"
                )

    def start(self, output: Any) -> None:
        if len(self.names) == 1:
            return
        if self.output is not None:
            self.output = None
            raise PlanIncompatibleError(
                f"the forward before this one did not call every block from {self.names[0]!r} to {self.names[-1]!r} "
                "(an early exit, a skipped layer, or an error in between), but their segment computed all of them; use "
                "a plan that recomputes block by block"
            )
        self.output = output

    def hand_through(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.output
        if not is_called_with(output, args, kwargs):
            self.output = None
            raise PlanIncompatibleError(
                f"block {name!r} is not called with exactly what the block before it returned, so it cannot run in "
                f"the segment from {self.names[0]!r} to {self.names[-1]!r}, which saw no other arguments; use a "
                "plan that recomputes block by block"
            )
        if name == self.names[-1]:
            self.output = None
        return output


def _named_blocks(model: nn.Module, plan: CheckpointPlan) -> tuple[CheckpointableBlock, ...]:
    modules = dict(model.named_modules())
    names = list(dict.fromkeys(modules_of(plan.block_ids)))
    missing = [name for name in names if name not in modules]
    if missing:
        raise PlanIncompatibleError(
            [f"the plan's block {name!r} is no submodule of {type(model).__name__}" for name in missing]
        )
    return declare_blocks(model, [(name, modules[name]) for name in names])
