"""Running the blocks of a model to find out what they cost.

Every distinct kind of block is measured once, alone (see ``stages.py``), on a twin of the model, so that
parameters, gradients, buffers, random streams, attributes and hooks of the caller's model are left as
they were. Memory and time are taken in separate runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckptplan.assembly import (
    Clock,
    Ways,
    block_profile,
    environment_of,
    find_choices_of_kinds,
    measure_times,
    require_gradient,
    timed_kinds,
    with_choices,
    without_needless_replay,
)
from ckptplan.blocks import (
    CHANGED_SETTINGS,
    SETTLED_FINGERPRINT,
    CheckpointableBlock,
    model_fingerprint,
    no_hooks_on_all_modules,
    require_blocks,
    select_blocks,
)
from ckptplan.choices import KeptParts, Measuring
from ckptplan.compiled_choices import Compiling, measure_compiled, time_compiled, with_compiled
from ckptplan.compiled_model import with_compiled_model
from ckptplan.compiling import require_compiler
from ckptplan.costs import StageCost
from ckptplan.devices import DEVICES
from ckptplan.discovery import find_blocks
from ckptplan.errors import BlockDeclarationError, UnsupportedBoundaryError
from ckptplan.flow import between, holds_more, measure_any
from ckptplan.kinds import (
    Kind,
    examine,
    kind_key,
    measure_bytes_and_flops,
    observe_block,
    time_key,
    with_loss,
)
from ckptplan.larger_inputs import LargestInputs
from ckptplan.memory import make_meter
from ckptplan.offload_choices import measure_offloads, time_offloads, with_offload
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile, modules_of
from ckptplan.randomness import random_state_restored
from ckptplan.regions import loss_bytes, post_forward, pre_forward
from ckptplan.stages import (
    GradientLayout,
    StageForward,
    gradients_handed_back,
    head_backward_peak,
    stage_flops,
    weight_copies,
)
from ckptplan.subject import LossFn, PlainChain, Subject, Trials, default_device, require_placement
from ckptplan.tied import SharedWeights, require_copies_of_their_own
from ckptplan.trace import ChainTrace, trace_subject
from ckptplan.trees import distinct_storages
from ckptplan.wrappers import plainness_faults, sharding_fault


def profile_blocks(
    blocks: Sequence[CheckpointableBlock],
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    num_warmup: int = 3,
    num_trials: int = 10,
    memory: str = "auto",
    make_target: Callable[[Any], torch.Tensor] | None = None,
    selective: bool | KeptParts = False,
    compiled_budgets: Sequence[float] = (),
    offload: bool = False,
) -> ChainProfile:
    """What each block of a plain chain costs, in bytes, milliseconds and FLOPs.

    Args:
        blocks: what ``declare_blocks`` gave.
        example_inputs: positional arguments of the first block; a tensor that requires a gradient gets one.
        example_kwargs: keyword arguments for every block that takes them by name.
        device: where the blocks and inputs are; nothing is moved.
        dtype: if given, the floating-point dtype that every parameter must have.
        num_warmup, num_trials: runs for the times.
        memory: "auto" (the device's allocator), "cpu", "cuda", "live" (tensors only) or "off".
        make_target: output of the chain -> scalar loss. Measured where given, else the loss is assumed to
            cost the gradient of the output only.
        selective: also find and measure ways to keep part of each block (``BlockProfile.selective``); a
            block without any says why in its warnings. Outputs to keep, as a plan names them
            (``(("qkv", "attention"),)``), are measured beside what the search proposes.
        compiled_budgets: also compile each kind of block with these memory budgets (0 to 1) of torch.compile's
            partitioner, and measure it (``BlockProfile.compiled``); a block that cannot be says why in its warnings.
            Compiling takes seconds for each kind and budget.
        offload: also measure each kind of block with its activations on the host (``BlockProfile.offload``).

    Raises:
        ValueError, TypeError: no blocks, wrong device or dtype, bad counts.
        BlockDeclarationError, UnsupportedBoundaryError: the blocks do not form a chain.
        NoDifferentiableOutputError: no block has an output that a gradient flows through.
    """
    require_blocks(blocks)
    if not blocks:
        raise ValueError("blocks is empty; declare at least one block")
    if not isinstance(example_inputs, tuple):
        raise TypeError(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple of arguments")
    kwargs = dict(example_kwargs or {})
    target = make_target

    def step(model: nn.Module, batch: Any) -> Any:
        output = model(*batch[0], **batch[1])
        return output if target is None else target(output)

    chain = PlainChain([b.module for b in blocks])
    return _profile(
        chain,
        blocks,
        (example_inputs, kwargs),
        step,
        device=torch.device(device),
        dtype=dtype,
        trials=Trials(num_warmup, num_trials),
        memory=memory,
        has_loss=make_target is not None,
        selective=selective,
        compiled_budgets=compiled_budgets,
        offload=offload,
    )


def profile_model(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | torch.device | None = None,
    num_warmup: int = 3,
    num_trials: int = 10,
    memory: str = "auto",
    check_stop: Callable[[], None] = lambda: None,
    selective: bool | KeptParts = False,
    compiled_budgets: Sequence[float] = (),
    compiled_model_budgets: Sequence[float] = (),
    gradients_stand: bool = True,
    offload: bool = False,
) -> ChainProfile:
    """What each block of ``model`` costs, and what the model runs before and after them.

    Args:
        model: any module. Blocks may be called with anything that is made in the step (masks, positions, an encoder's
            output), any number of times, with code of the model between them and tensors held across them; a call
            of a block beyond its first is a stage of its own, named as ``layer@2``.
        blocks: declared blocks, or their module paths or globs (``"layers.*"``); None: those that
            ``model.declared_blocks()`` gives, else found by one forward.
        batch: handed to ``loss_fn``; its tensors stand before the step and are not counted.
        loss_fn: ``loss_fn(model, batch)`` -> scalar loss.
        device: default: where the model's parameters are (without any: its buffers, the batch).
        check_stop: called between trials; may raise to end the profiling.
        selective, compiled_budgets, offload: as in ``profile_blocks``.
        compiled_model_budgets: also compile the model as one graph with these memory budgets and measure whole steps
            (``ChainProfile.compiled_model``); needs ``compiled_budgets``, to be compared with. A model that cannot be
            says why in the profile's warnings. Compiling takes up to a minute for each budget of a deep model.
        gradients_stand: parameter gradients stand before the step and count nothing; False: those of a block come
            anew in its backward and stay to its end, as under FSDP2.

    Raises: as ``profile_blocks``.
    """
    if isinstance(device, str) and device in DEVICES:
        raise ValueError(
            f"device={device!r} is planned for without being there: estimate_profile(..., device={device!r}); to "
            "measure on it, device='cuda'"
        )
    faults = [*plainness_faults(model), *filter(None, [sharding_fault(model)])]
    if faults:
        raise BlockDeclarationError("; ".join(faults))
    if isinstance(batch, Iterator):
        raise TypeError(
            f"batch is a {type(batch).__name__}, which is used up by one step, and steps are run many times: give one "
            "batch, such as next(iter(loader))"
        )
    where = torch.device(device) if device is not None else default_device(model, batch)
    declared = resolve_blocks(model, blocks, batch, loss_fn, where)
    if not declared:
        raise ValueError("blocks is empty; declare at least one block")
    largest = LargestInputs()
    profile = _profile(
        model,
        declared,
        batch,
        largest.watching(loss_fn),
        device=where,
        dtype=None,
        trials=Trials(num_warmup, num_trials),
        memory=memory,
        has_loss=True,
        selective=selective,
        compiled_budgets=compiled_budgets,
        compiled_model_budgets=compiled_model_budgets,
        check_stop=check_stop,
        gradients_stand=gradients_stand,
        offload=offload,
    )
    environment = {**profile.environment, **largest.as_environment()}
    if changed := environment.get(CHANGED_SETTINGS):
        environment[SETTLED_FINGERPRINT] = model_fingerprint(_in_running_order(declared, profile), changed)
    return replace(profile, environment=environment)


def resolve_blocks(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
    batch: Any,
    loss_fn: LossFn,
    device: torch.device,
) -> tuple[CheckpointableBlock, ...]:
    """The declared blocks that ``blocks`` of ``profile_model`` stand for; empty where there are none."""
    given = [blocks] if isinstance(blocks, str) else list(blocks or ())
    declared = [block for block in given if isinstance(block, CheckpointableBlock)]
    if declared and len(declared) == len(given):
        return tuple(declared)
    paths = [path for path in given if isinstance(path, str)]
    if len(paths) < len(given):
        raise TypeError(f"blocks={blocks!r}; expected what declare_blocks gave, or module paths, or None")
    selection = None if blocks is not None and not given else select_blocks(model, paths or None)
    if selection is None and blocks is None:
        selection = find_blocks(model, batch, loss_fn, device)
    return selection.blocks if selection else ()


def _profile(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock],
    batch: Any,
    step: Callable[[nn.Module, Any], Any],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    trials: Trials,
    memory: str,
    has_loss: bool,
    selective: bool | KeptParts,
    compiled_budgets: Sequence[float],
    compiled_model_budgets: Sequence[float] = (),
    check_stop: Callable[[], None] = lambda: None,
    gradients_stand: bool = True,
    offload: bool = False,
) -> ChainProfile:
    require_placement(blocks, batch, device, dtype)
    budgets = _checked_budgets("compiled_budgets", compiled_budgets, device, memory)
    model_budgets = _checked_budgets("compiled_model_budgets", compiled_model_budgets, device, memory)
    if model_budgets and not budgets:
        raise ValueError("compiled_model_budgets without compiled_budgets; give both, such as (0.0, 0.5, 1.0) each")
    if memory != "off":
        make_meter(device, memory)  # a wrong meter is told before work is spent
    with ExitStack() as stack:
        stack.enter_context(no_hooks_on_all_modules())
        stack.enter_context(random_state_restored(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        is_measured = memory != "off"
        ways = Ways(selective if is_measured else False, budgets, offload and is_measured)

        def subject() -> Subject:  # on a twin that no forward has run on
            return Subject.of(model, blocks, batch, step, device, has_loss, gradients_stand)

        if not has_loss or isinstance(model, PlainChain):
            chain = subject()
            return _measure(chain, trace_subject(chain), trials, memory, check_stop, ways)
        found = _plain_chain(subject)
        if found is not None:
            profile = _measure(*found, trials, memory, check_stop, ways)
        else:
            profile = measure_any(subject(), trials, memory, check_stop, ways)
            profile = replace(profile, fingerprint=model_fingerprint(_in_running_order(blocks, profile)))
        if model_budgets:
            how = Compiling(model_budgets, device, memory, check_stop=check_stop)
            profile = with_compiled_model(profile, subject(), how, trials)
        return profile


def _checked_budgets(name: str, budgets: Sequence[float], device: torch.device, memory: str) -> tuple[float, ...]:
    """Distinct, rising; none where no bytes are measured."""
    for budget in budgets:
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
            raise ValueError(f"{name} has {budget!r}; expected numbers from 0 to 1")
    if not budgets or memory == "off":
        return ()
    if memory == "live":
        raise ValueError(
            f"{name} with memory='live': a compiled block runs eagerly where tensors are watched; use memory='auto'"
        )
    require_compiler(device)
    return tuple(sorted({float(budget) for budget in budgets}))


def _plain_chain(subject: Callable[[], Subject]) -> tuple[Subject, ChainTrace] | None:
    """The model's trace where its blocks are a plain chain beside which it holds nothing."""
    chain = subject()
    try:
        trace = trace_subject(chain)
    except (BlockDeclarationError, UnsupportedBoundaryError):
        return None
    return None if holds_more(subject()) else (chain, trace)


def _in_running_order(blocks: Sequence[CheckpointableBlock], profile: ChainProfile) -> tuple[CheckpointableBlock, ...]:
    by_id = {block.block_id: block for block in blocks}
    distinct = dict.fromkeys(modules_of(profile.block_ids))
    return tuple(replace(by_id[block_id], order=order) for order, block_id in enumerate(distinct))


def _measure(
    subject: Subject,
    trace: ChainTrace,
    trials: Trials,
    memory: str,
    check_stop: Callable[[], None],
    ways: Ways,
) -> ChainProfile:
    regions: dict[str, StageForward] = {}
    if subject.has_loss:
        regions["post"] = post_forward(subject, trace)
    kinds, keys, handed_back = _examine_backwards(subject, trace, regions.get("post"))
    if trace.has_pre:
        regions["pre"] = pre_forward(subject, len(trace.calls[0].boundary), handed_back)
    require_gradient(kinds, subject.names)
    shared = SharedWeights.of(subject, trace, regions, [kinds[key] for key in keys], memory)
    costs = _measure_bytes(kinds, regions, shared, subject, memory, check_stop)
    require_copies_of_their_own(subject, trace.calls, [kinds[key] for key in keys])
    time_keys = [time_key(m, c) for m, c in zip(subject.modules, trace.calls, strict=True)]
    timed = timed_kinds(kinds, keys, time_keys)
    time_of = dict(zip(keys, time_keys, strict=True))
    held_bytes = 0 if memory == "off" else loss_bytes(regions)
    choices = find_choices_of_kinds(kinds, time_of, timed, subject, memory, held_bytes, parts=ways.parts)
    of_timed = {name: choices[key] for name, kind in timed.items() for key in choices if kinds[key] is kind}
    how = Compiling(ways.budgets, subject.device, memory, held_bytes, check_stop)
    compiled = measure_compiled(kinds, time_of, timed, how) if ways.budgets else {}
    on_host = Measuring(subject.device, memory, subject.synchronize, held_bytes)
    offloads = measure_offloads(kinds, time_of, on_host) if ways.offload else {}

    def also(is_counted: bool) -> None:
        time_compiled(compiled, subject.device, subject.synchronize, is_counted=is_counted)
        time_offloads(offloads, subject.device, subject.synchronize, is_counted=is_counted)

    clocks = measure_times(timed, regions, of_timed, subject, trials, check_stop, also)
    first = trace.calls[0]
    blocks: list[BlockProfile] = []
    for order, key in enumerate(keys):
        block = block_profile(subject, order, key, kinds[key], clocks[time_keys[order]], trials, memory)
        block = with_choices(block, choices.get(key), clocks[time_keys[order]])
        block = with_offload(with_compiled(block, compiled.get(key)), offloads.get(key))
        block = without_needless_replay(shared.block_beside(block, kinds[key], choices.get(key)))
        if order and not _is_link(subject, trace, order):
            block = replace(block, before=_nothing_between(blocks[-1], block))
        blocks.append(block)
    return ChainProfile(
        blocks=tuple(blocks),
        pre=_region_profile("before the blocks", "pre", regions, costs, clocks, first.boundary),
        post=_with_head_peak(
            _region_profile("head and loss", "post", regions, costs, clocks, ()), regions, subject, memory
        ),
        input_bytes=() if trace.has_pre else (0,) * len(first.boundary),
        loss_region="measured" if subject.has_loss else "assumed",
        loss_bytes=held_bytes,
        meter="off" if memory == "off" else make_meter(subject.device, memory).name,
        fingerprint=subject.fingerprint,
        environment=environment_of(subject, first),
    )


def _measure_bytes(
    kinds: dict[str, Kind],
    regions: dict[str, StageForward],
    shared: SharedWeights,
    subject: Subject,
    memory: str,
    check_stop: Callable[[], None],
) -> dict[str, StageCost]:
    """Fill in bytes and FLOPs of every kind; returns the bytes of the regions. The loss stands in every backward."""
    held_bytes = 0 if memory == "off" else loss_bytes(regions)
    for kind in kinds.values():
        check_stop()
        measure_bytes_and_flops(kind, subject.device, memory)
        kind.keep = kind.keep and with_loss(kind.keep, held_bytes)
        kind.recompute = kind.recompute and with_loss(kind.recompute, held_bytes)
        if kind.replayed_backward_peak_bytes is not None:
            kind.replayed_backward_peak_bytes += held_bytes
    costs: dict[str, StageCost] = {}
    for name, forward in regions.items() if memory != "off" else ():
        stage, beside_bytes = (0, held_bytes) if name == "pre" else (len(subject.modules) + 1, 0)
        cost = replace(shared.stage_bytes(forward, stage), weight_copies_bytes=weight_copies(forward).saved_bytes)
        costs[name] = with_loss(cost, beside_bytes + shared.waiting_bytes(stage))
    return costs


def _examine_backwards(
    subject: Subject, trace: ChainTrace, post: StageForward | None
) -> tuple[dict[str, Kind], list[str], GradientLayout | None]:
    """Distinct kinds by key, the key of each block, and how the first block hands back its input's gradients.

    From the last block to the first, as each one's gradients come from the next.
    """
    layout = None if post is None else gradients_handed_back(post) or None
    kinds: dict[str, Kind] = {}
    keys: list[str] = []
    for module, call in zip(reversed(subject.modules), reversed(trace.calls), strict=True):
        observation = observe_block(module, call, subject.device)
        key = kind_key(module, call, layout, observation)
        if key not in kinds:
            kinds[key] = examine(module, call, observation, subject.device, layout)
        keys.insert(0, key)
        layout = kinds[key].handed_back or None
    return kinds, keys, layout


def _is_link(subject: Subject, trace: ChainTrace, order: int) -> bool:
    """Whether a segment may run over a block and the one before it."""
    if isinstance(subject.twin, PlainChain):
        return True
    return trace.calls[order].follows and not subject.hooks_before(order)


def _nothing_between(earlier: BlockProfile, later: BlockProfile) -> RegionProfile:
    """No segment runs over it: the later block takes more than the earlier one returned, or hooks look."""
    count = len(earlier.output_bytes)
    return RegionProfile(
        name=between(earlier.block_id, later.block_id),
        cost=StageCost(0, 0, 0, (False,) * count, (False,) * count, weight_copies_bytes=0),
        output_bytes=earlier.output_bytes,
        output_is_input=tuple(range(count)),
        forward_time_ms=0.0,
        backward_time_ms=0.0,
        forward_flops=0,
        backward_flops=0,
    )


def _with_head_peak(
    post: RegionProfile | None, regions: dict[str, StageForward], subject: Subject, memory: str
) -> RegionProfile | None:
    if post is None:
        return None
    peak = head_backward_peak(regions["post"], make_meter(subject.device, memory), post.cost)
    return replace(post, head_backward_peak_bytes=peak)


def _region_profile(
    title: str,
    name: str,
    regions: dict[str, StageForward],
    costs: dict[str, StageCost],
    clocks: dict[str, Clock],
    boundary: Sequence[torch.Tensor],
) -> RegionProfile | None:
    if name not in regions or name not in costs:
        return None
    forward_flops, backward_flops = stage_flops(regions[name])
    storages = distinct_storages(boundary)
    return RegionProfile(
        name=title,
        cost=costs[name],
        output_bytes=tuple(t.untyped_storage().nbytes() for t in storages),
        output_is_input=(None,) * len(storages),
        forward_time_ms=Clock.p50(clocks[name].forward_ms),
        backward_time_ms=Clock.p50(clocks[name].backward_ms),
        forward_flops=forward_flops,
        backward_flops=backward_flops,
    )
