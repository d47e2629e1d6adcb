"""Finding the chain of blocks of a model that declares none: one real forward shows which lists run as a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import BlockSelection, block_lists, declare_blocks, left_out, member_paths, no_list_message
from ckptplan.errors import BlockDeclarationError
from ckptplan.randomness import random_state_restored
from ckptplan.subject import private_batch
from ckptplan.trace import exchanged_forwards
from ckptplan.trees import tensors_in
from ckptplan.twin import WriteGuard, make_twin


@dataclass(frozen=True)
class _Call:
    """One call of a list's member; the tensors are held, so that identities stay unique."""

    path: str
    taken: list[torch.Tensor]
    given: list[torch.Tensor]


@dataclass(frozen=True)
class _Found:
    """A list whose members form a chain, at the place in the forward where it runs."""

    path: str
    start: int
    members: tuple[str, ...]
    parameters: int


def find_blocks(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Any], device: torch.device
) -> BlockSelection:
    """The members of every ModuleList or Sequential that run once, in order, each on what the one before returned.

    Lists that follow each other without anything between are joined; of lists that do not, the one with
    the most parameters is taken. ``source`` of the result says what was taken and why others were left.

    Raises:
        BlockDeclarationError: the model has no list, or none that runs as a chain (with the reason for each).
    """
    lists = block_lists(model)
    if not lists:
        raise BlockDeclarationError(no_list_message(model))
    calls = _record(
        model,
        [member for path, holder in lists for member in member_paths(path, holder)],
        batch,
        loss_fn,
        device,
    )
    found, refused = [], []
    for path, holder in lists:
        members = member_paths(path, holder)
        reason = _why_no_chain(members, calls)
        if reason:
            refused.append(f"{path or 'the model itself'} ({reason})")
            continue
        start = [call.path for call in calls].index(members[0])
        found.append(_Found(path, start, members, sum(p.numel() for p in holder.parameters())))
    if not found:
        raise BlockDeclarationError(
            f"no list of {type(model).__name__} runs as a chain of blocks: {'; '.join(refused)}. "
            "Name the blocks: 'blocks.paths=[path.*]'"
        )
    taken = _best_run(found, calls)
    names = [member for item in taken for member in item.members]
    blocks = declare_blocks(model, [(name, model.get_submodule(name)) for name in names])
    others = [f"{f.path} (does not follow directly)" for f in found if f not in taken] + refused
    source = f"the lists {', '.join(item.path or 'of the model itself' for item in taken)}"
    return BlockSelection(blocks, source + (f", not {', '.join(others)}" if others else ""), left_out(model, blocks))


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
        with random_state_restored(device), torch.no_grad(), exchanged_forwards(modules, stands), guard:
            loss_fn(twin, private_batch(batch))
    finally:
        guard.restore()
    return calls


def _why_no_chain(members: tuple[str, ...], calls: list[_Call]) -> str | None:
    ran = [call for call in calls if call.path in members]
    if not ran:
        return "does not run"
    if [call.path for call in ran] != list(members):
        twice = len({call.path for call in ran}) < len(ran)
        return "a member runs more than once" if twice else "its members do not run each once, in order"
    for before, after in pairwise(ran):
        if not _follows(before, after):
            return f"the model computes something between {before.path} and {after.path}"
    return None


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
