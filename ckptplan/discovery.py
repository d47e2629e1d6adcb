"""Finding the blocks of a model that declares none: one real forward shows which lists run, and which as a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import (
    BlockSelection,
    block_lists,
    declare_blocks,
    left_out,
    member_paths,
    no_hooks_on_all_modules,
    no_list_message,
)
from ckptplan.errors import BlockDeclarationError
from ckptplan.randomness import random_state_restored
from ckptplan.subject import private_batch
from ckptplan.trace import exchanged_forwards
from ckptplan.trees import tensors_in
from ckptplan.twin import WriteGuard, make_twin, missing_hooks_told
from ckptplan.wrappers import no_foreign_calls, no_parallel_calls

_SMALLEST_SHARE = 0.1  # of the main list's parameters, of a list beside it
_LEAST_SHARE_INSIDE = 0.5  # of a stage's parameters, of the blocks inside it


@dataclass(frozen=True)
class _Call:
    """One call of a list's member; the tensors are held, so that identities stay unique."""

    path: str
    taken: list[torch.Tensor]
    given: list[torch.Tensor]


@dataclass(frozen=True)
class _Found:
    """A list whose members all run, at the place in the forward where the first of them does."""

    path: str
    start: int
    members: tuple[str, ...]
    parameters: int
    is_chain: bool


def find_blocks(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], device: torch.device
) -> BlockSelection:
    """The members of the ModuleLists and Sequentials that make up the model.

    That is the list with the most parameters, of those that run as a chain if there are such (each member once, in
    order, on what the one before returned); lists that follow it directly; and lists with members of the same classes
    as its own, or as composed and alike and not much smaller (decoder beside encoder, the way up of a U-Net). Where the
    members are stages, each with a chain of equal blocks inside (ResNet, Swin, ConvNeXt), those blocks are taken.
    ``source`` of the result says what was taken and why others were left.

    Raises:
        BlockDeclarationError: the model has no list, or none whose members all run (with the reason for each).
    """
    lists = block_lists(model) or block_lists(model, least=1)
    if not lists:
        raise BlockDeclarationError(no_list_message(model))
    members_of = {path: member_paths(path, holder) for path, holder in lists}
    inner = {member: _inner_list(model, member) for members in members_of.values() for member in members}
    deeper = [path for paths in inner.values() for path in paths]
    calls = _record(model, [*inner, *deeper], batch, loss_fn, device)
    found, refused = [], []
    for path, holder in lists:
        members = members_of[path]
        missing = [member for member in members if not any(call.path == member for call in calls)]
        if missing:
            what = "does not run" if len(missing) == len(members) else f"{missing[0]} does not run"
            refused.append(f"{path or 'the model itself'} ({what})")
            continue
        start = next(number for number, call in enumerate(calls) if call.path in members)
        size = _num_parameters(holder)
        found.append(_Found(path, start, members, size, _is_chain(members, calls)))
    if not found:
        raise BlockDeclarationError(
            f"no list of {type(model).__name__} runs as blocks: {'; '.join(refused)}. "
            "Name the blocks ('blocks.paths=[path.*]'), or have the loss call the model that it is given"
        )
    taken = _taken(model, found, calls)
    names = [name for item in taken for name in _opened(model, item, inner, calls)]
    blocks = declare_blocks(model, [(name, model.get_submodule(name)) for name in names])
    others = [f"{f.path} (smaller, of another kind)" for f in found if f not in taken] + refused
    source = f"the lists {', '.join(item.path or 'of the model itself' for item in taken)}"
    if len(names) > sum(len(item.members) for item in taken):
        source += " (the blocks inside their stages)"
    return BlockSelection(blocks, source + (f", not {', '.join(others)}" if others else ""), left_out(model, blocks))


def _inner_list(model: nn.Module, member: str) -> tuple[str, ...]:
    """Paths of the members of the largest list inside a member, where they are composed and of one class."""
    lists = block_lists(model.get_submodule(member), least=1)
    lists = [(path, holder) for path, holder in lists if path]
    if not lists:
        return ()
    path, holder = max(lists, key=lambda pair: _num_parameters(pair[1]))
    kinds = {type(part) for part in holder.children()}
    is_composed = all(any(True for _ in part.children()) for part in holder.children())
    return member_paths(f"{member}.{path}", holder) if len(kinds) == 1 and is_composed else ()


def _opened(
    model: nn.Module, item: _Found, inner: Mapping[str, tuple[str, ...]], calls: list[_Call]
) -> tuple[str, ...]:
    """The members of a list, or the blocks inside them where these are its stages: most of each, more, and a chain."""
    stages = [inner[member] for member in item.members]
    names = [name for stage in stages for name in stage]
    if len(names) <= len(stages) or not all(stage and _is_chain(stage, calls) for stage in stages):
        return item.members
    if len({type(model.get_submodule(name)) for name in names}) > 1:
        return item.members
    inside = sum(_num_parameters(model.get_submodule(name)) for name in names)
    return tuple(names) if inside >= _LEAST_SHARE_INSIDE * item.parameters else item.members


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _record(
    model: nn.Module, paths: list[str], batch: Any, loss_fn: Callable[[nn.Module, Any], Any], device: torch.device
) -> list[_Call]:
    (twin,) = make_twin([model])
    modules = [twin.get_submodule(path) for path in paths]
    calls: list[_Call] = []

    def stand_for(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            calls.append(_Call(path, tensors_in((args, kwargs)), tensors_in(output)))
            return output

        return stand

    stands = [stand_for(path, module.forward) for path, module in zip(paths, modules, strict=True)]
    guard = WriteGuard(dict(model.named_parameters()))
    try:
        with (
            no_foreign_calls(twin),
            no_parallel_calls(),
            no_hooks_on_all_modules(),
            random_state_restored(device),
            torch.no_grad(),
            exchanged_forwards(modules, stands),
            guard,
            missing_hooks_told(model),
        ):
            loss_fn(twin, private_batch(batch))
    finally:
        guard.restore()
    return calls


def _is_chain(members: tuple[str, ...], calls: list[_Call]) -> bool:
    ran = [call for call in calls if call.path in members]
    return [call.path for call in ran] == list(members) and all(_follows(*pair) for pair in pairwise(ran))


def _taken(model: nn.Module, found: list[_Found], calls: list[_Call]) -> list[_Found]:
    """The main lists, and those like them, in the order in which they run."""
    main = _best_run([item for item in found if item.is_chain] or [_largest(found)], calls)
    least = sum(item.parameters for item in main) * _SMALLEST_SHARE
    kinds = {type(model.get_submodule(member)) for item in main for member in item.members}

    def is_like_them(item: _Found) -> bool:
        members = [model.get_submodule(member) for member in item.members]
        own = {type(member) for member in members}
        is_composed = len(own) == 1 and any(True for _ in members[0].children())
        return bool(own & kinds) or (is_composed and item.parameters >= least)

    return sorted((item for item in found if item in main or is_like_them(item)), key=lambda item: item.start)


def _largest(found: list[_Found]) -> _Found:
    return max(found, key=lambda item: item.parameters)


def _follows(before: _Call, after: _Call) -> bool:
    """Whether what ``after`` took first is what ``before`` returned, untouched."""
    given = {id(t) for t in before.given}
    return bool(after.taken) and id(after.taken[0]) in given


def _best_run(found: list[_Found], calls: list[_Call]) -> list[_Found]:
    """Of the runs of lists that follow each other directly, the one with the most parameters."""
    by_path = {call.path: call for call in calls}
    runs: list[list[_Found]] = []
    for item in sorted(found, key=lambda f: f.start):
        if runs and _follows(by_path[runs[-1][-1].members[-1]], by_path[item.members[0]]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return max(runs, key=lambda run: sum(item.parameters for item in run))
