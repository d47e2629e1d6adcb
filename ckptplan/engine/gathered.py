"""What FSDP2 holds beside activations while a step runs, added to a profile stage by stage. Torch-free.

``fully_shard`` gathers the weights of a unit before it runs and lets go of them behind it. Per unit j, in bytes: W the
weights, padded so that every rank has as many; G their gradients, whole; R the same padded. On every stage stand the
weights of the root (whatever is in no unit), which stay gathered from the first forward to the end of the backward.

    forward of j    W_j, and the buffer W_j that they were gathered into; while they are gathered, that of j - 1 too
    backward of j   W_j; the buffer W_(j-1) gathered ahead; the buffer R_(j+1) that gradients were scattered from;
                    gradients of j as they come (the profile has to be measured with gradients that do not stand
                    before the step); gradients of the root that have come
    then            gradients G_j, the buffer R_j that they are copied to, W_(j-1)

With one rank, releases of torch from 2.9 on communicate nothing: weights are copied, without a buffer and not ahead.

Measured on gloo with torch 2.13 (tests/engine); other releases are held to it by ``prediction_error`` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptplan.costs import StageCost
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile, modules_of


@dataclass(frozen=True)
class UnitBytes:
    """Of the weights that are gathered together: gathered and padded; their gradients; those padded."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    scattered_bytes: int = 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(
            self.weights_bytes + other.weights_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.scattered_bytes + other.scattered_bytes,
        )


@dataclass(frozen=True)
class Sharding:
    """The bytes of a model under FSDP2.

    Attributes:
        of_module: per block, by the name of its module.
        root: of all that lies in no block.
        root_gradients_before: per block, by the name of its module, bytes of the root's gradients that have come when
            its backward begins.
        communicates: whether weights come through a buffer, and in the backward ahead of their block.
    """

    of_module: Mapping[str, UnitBytes]
    root: UnitBytes
    root_gradients_before: Mapping[str, int]
    communicates: bool = True

    def most_gathered_bytes(self, units: Sequence[Sequence[str]]) -> int:
        """The most that weights and the buffers they are gathered into take at once: in a forward."""
        own = [self.of_unit(unit).weights_bytes for unit in units]
        if not self.communicates:
            return self.root.weights_bytes + max(own, default=0)
        pairs = zip([self.root.weights_bytes, *own], own, strict=False)
        return self.root.weights_bytes + max((earlier + 2 * now for earlier, now in pairs), default=0)

    def of_unit(self, names: Sequence[str]) -> UnitBytes:
        """The bytes of blocks that are gathered together."""
        return sum((self.of_module[name] for name in names), UnitBytes())


@dataclass(frozen=True)
class _Around:
    """A unit with its neighbours in the chain, and the gradients of it that come before those of one block."""

    own: UnitBytes
    before: UnitBytes
    behind: UnitBytes
    root: UnitBytes
    root_gradients_bytes: int
    later_gradients_bytes: int
    is_first_of_unit: bool
    gathered_earlier_bytes: int
    communicates: bool

    def forward(self, peak_bytes: int) -> int:
        if not self.communicates:
            return peak_bytes + self.own.weights_bytes + self.root.weights_bytes
        gathered = 2 * self.own.weights_bytes
        return max(peak_bytes, self.gathered_earlier_bytes) + gathered + self.root.weights_bytes

    def backward(self, peak_bytes: int, incoming_bytes: int, outgoing_bytes: int) -> int:
        """``incoming_bytes``: alive when the weights are gathered; ``outgoing_bytes``: when gradients are scattered."""
        beside = self.root.weights_bytes + self.root_gradients_bytes
        ahead, scattered = self.ahead_bytes, self.behind.scattered_bytes
        levels = [peak_bytes + self.later_gradients_bytes + self.own.weights_bytes + ahead + scattered]
        levels.append(incoming_bytes + (1 + self.communicates) * self.own.weights_bytes + scattered)
        if self.is_first_of_unit:
            levels.append(outgoing_bytes + self.own.gradients_bytes + self.own.scattered_bytes + ahead)
        return max(levels) + beside

    def running_again_bytes(self) -> int:
        """Beside a block that runs again in the backward."""
        beside = self.root.weights_bytes + self.root_gradients_bytes
        return self.own.weights_bytes + self.ahead_bytes + self.behind.scattered_bytes + beside

    @property
    def ahead_bytes(self) -> int:
        """Gathered in the backward for the unit that comes next."""
        return self.before.weights_bytes if self.communicates else 0


def with_gathered(profile: ChainProfile, sharding: Sharding, units: Sequence[Sequence[str]]) -> ChainProfile:
    """The profile of a step under FSDP2, its units as given: a plan over it is exact for plans with these units.

    Args:
        profile: measured on the plain model with gradients that come fresh in each step.
        units: names of the modules that are gathered together, in the order of the chain.
    """
    names = modules_of(profile.block_ids)
    unit_of = {name: number for number, unit in enumerate(units) for name in unit}
    bytes_of = [sharding.of_unit(unit) for unit in units]
    blocks = []
    for order, block in enumerate(profile):
        number = unit_of[names[order]]
        members = [i for i, name in enumerate(names) if unit_of[name] == number]
        later = {names[i] for i in members if i > order} - {names[order]}
        around = _Around(
            own=bytes_of[number],
            before=bytes_of[number - 1] if number else UnitBytes(),
            behind=bytes_of[number + 1] if number + 1 < len(units) else UnitBytes(),
            root=sharding.root,
            root_gradients_bytes=sharding.root_gradients_before.get(names[order], 0),
            later_gradients_bytes=sum(sharding.of_module[name].gradients_bytes for name in later),
            is_first_of_unit=order == members[0],
            gathered_earlier_bytes=(bytes_of[number - 1] if number else sharding.root).weights_bytes,
            communicates=sharding.communicates,
        )
        blocks.append(_block(profile, order, block, around))
    return replace(
        profile,
        blocks=tuple(blocks),
        pre=_pre(profile.pre, sharding, bytes_of),
        post=_post(profile.post, sharding, bytes_of),
    )


def _block(profile: ChainProfile, order: int, block: BlockProfile, around: _Around) -> BlockProfile:
    incoming = (block.output_gradient_bytes or 0) + profile.loss_bytes
    outgoing = profile.loss_bytes
    if order or profile.pre is not None:
        entering = profile[order - 1].output_gradient_bytes if order else sum(profile.pre.output_bytes)  # type: ignore[union-attr]
        outgoing += entering or 0

    def cost(plain: StageCost) -> StageCost:
        def backward(peak_bytes: int) -> int:
            return around.backward(peak_bytes, plain.saved_bytes + incoming, outgoing)

        beside = replace(plain, forward_peak_bytes=around.forward(plain.forward_peak_bytes))
        return beside.with_backward_peaks(backward)

    stopped, replayed = block.stopped_forward_peak_bytes, block.replayed_backward_peak_bytes
    before = block.before
    if before is not None:
        beside = around.root.weights_bytes + around.ahead_bytes
        before = _beside(before, beside, beside + around.own.scattered_bytes + around.root_gradients_bytes)
    return replace(
        block,
        keep=block.keep and cost(block.keep),
        recompute=block.recompute and cost(block.recompute),
        stopped_forward_peak_bytes=None if stopped is None else stopped + around.running_again_bytes(),
        replayed_backward_peak_bytes=None if replayed is None else around.backward(replayed, incoming, outgoing),
        selective=tuple(replace(option, cost=cost(option.cost)) for option in block.selective),
        compiled=tuple(replace(option, cost=cost(option.cost)) for option in block.compiled),
        offload=tuple(replace(option, cost=cost(option.cost)) for option in block.offload),
        before=before,
    )


def _beside(region: RegionProfile, forward_bytes: int, backward_bytes: int) -> RegionProfile:
    cost = replace(region.cost, forward_peak_bytes=region.cost.forward_peak_bytes + forward_bytes)
    return replace(region, cost=cost.with_backward_peaks(lambda peak_bytes: peak_bytes + backward_bytes))


def _pre(region: RegionProfile | None, sharding: Sharding, units: Sequence[UnitBytes]) -> RegionProfile | None:
    """What runs before the blocks: its backward comes last, and then the root's gradients are scattered."""
    if region is None:
        return None
    root = sharding.root
    come = max(sharding.root_gradients_before.values(), default=0)
    first = units[0].scattered_bytes if units else 0
    found = _beside(region, (1 + sharding.communicates) * root.weights_bytes, root.weights_bytes + first + come)
    scattering = root.gradients_bytes + root.scattered_bytes
    peak = max(found.cost.backward_peak_bytes, scattering)
    return replace(found, cost=replace(found.cost, backward_peak_bytes=peak))


def _post(region: RegionProfile | None, sharding: Sharding, units: Sequence[UnitBytes]) -> RegionProfile | None:
    """Head and loss: behind the loss's own backward the weights of the last unit are gathered ahead of its."""
    if region is None:
        return None
    root = sharding.root.weights_bytes
    last = units[-1].weights_bytes if units and sharding.communicates else 0
    found = _beside(region, root, root + last)
    if region.head_backward_peak_bytes is None:
        return found
    head = region.head_backward_peak_bytes + root + last
    peak = max(region.cost.backward_peak_bytes + root, head)
    return replace(found, cost=replace(found.cost, backward_peak_bytes=peak), head_backward_peak_bytes=head)
