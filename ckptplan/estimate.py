"""What blocks would cost on a device that is not there.

The blocks are run as ``profile_model`` runs them, but on fake CPU tensors, which have shapes and no memory, so that a
model of any size can be looked at. Bytes are those of the tensors that the device would hold (``kernels.py``), times
are computed operator by operator (``work.py``) from the rates of a data sheet or a calibration (``devices.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ckptplan import clock
from ckptplan.blocks import CheckpointableBlock, model_fingerprint
from ckptplan.costs import OffloadOption
from ckptplan.devices import DEVICES, Calibration, Device, Rates, device_named
from ckptplan.errors import CkptplanError, DryRunError
from ckptplan.fakes import UNFIT, KnownValues, quiet_fake_kernels, why_unfit, with_fakes
from ckptplan.kernels import cuda_kernels
from ckptplan.measure import profile_model, resolve_blocks
from ckptplan.memory import AS_ON_CUDA
from ckptplan.plan import CheckpointPlan
from ckptplan.planners.budgets import step_cost
from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
from ckptplan.randomness import random_state_restored
from ckptplan.repeats import cut_short, find_repeats, made_long
from ckptplan.simulate import simulate_plan
from ckptplan.subject import LossFn
from ckptplan.twin import make_twin
from ckptplan.work import ComputedClock

ESTIMATED = "estimated"  # key of ChainProfile.environment, and the method of the figures

# What kernels may reach of the matrix rate and of the bandwidth: the ends of the range of times.
_CASES = {"fast": "high", "slow": "low"}


@dataclass(frozen=True)
class Estimating:
    """How profiles are estimated.

    Attributes:
        ranged: also the fastest and the slowest case; needed by ``estimated_range``.
        offload: also what blocks cost with their activations on the host, by the rate of the link to it.
    """

    device: Device | None
    calibration: Calibration | None = None
    check_stop: Callable[[], None] = lambda: None
    ranged: bool = True
    offload: bool = False

    def profile(
        self,
        model: nn.Module,
        blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
        batch: Any,
        loss_fn: LossFn,
    ) -> ChainProfile:
        """As ``estimate_profile``."""
        with _on_shapes(Rates(self.device, self.calibration)) as subject_of:
            subject = subject_of(model, blocks, batch, loss_fn, self.check_stop)
            subject.offload = self.offload and self.device is not None
            likely = subject.profile("mid")
            subject.offload = False  # the cases are of what all plans do
            cases = _CASES if self.ranged else {}
            times = {name: _times_of(subject.profile(share)) for name, share in cases.items()}
        if self.device is not None:
            likely = _with_transfers(likely, self.device)
        return _as_estimate(likely, times, self.device, self.calibration)


def estimated_blocks(
    model: nn.Module, blocks: Sequence[str] | str | None, batch: Any, loss_fn: LossFn
) -> tuple[CheckpointableBlock, ...]:
    """The blocks of a model, found by a forward without memory where they are not named."""
    with _on_shapes(Rates(DEVICES["h100"])) as subject_of:  # which device makes no difference
        found = subject_of(model, blocks, batch, loss_fn, lambda: None).blocks
    return tuple(replace(block, module=model.get_submodule(block.block_id)) for block in found)


def estimate_profile(
    model: nn.Module,
    blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | Device,
    calibration: Calibration | None = None,
    check_stop: Callable[[], None] = lambda: None,
    offload: bool = False,
) -> ChainProfile:
    """What each block of ``model`` would cost on ``device``, which need not be there.

    Nothing is computed and no activation is allocated: the model may be larger than this machine's memory, built under
    ``torch.device("meta")``. The result is a profile like a measured one; ``estimated_range`` tells its times' range.

    Args:
        model: on the CPU or on the meta device; its values are not looked at.
        blocks, batch, loss_fn: as in ``profile_model``. Autocast, if any, is entered for "cpu" in ``loss_fn``.
        device: a name in ``devices.DEVICES`` such as "h100", or "cpu" (tensors as they are, times of ``calibration``).
        calibration: measured on the device; replaces the data sheet's rates.
        offload: also what each block costs with its activations on the host, by the data sheet's link to it.

    Raises:
        DryRunError: the model decides by values, which fake tensors do not have, or runs an operator whose bytes only
            a real run tells.
        ValueError: an unknown device; "cpu" without a calibration.
        Others as ``profile_model``.
    """
    where = device if isinstance(device, Device) or device == "cpu" else device_named(device)
    if where == "cpu" and calibration is None:
        raise ValueError('device="cpu" has no data sheet; give calibration=Calibration.load(FILE)')
    sheet = where if isinstance(where, Device) else None

    return Estimating(sheet, calibration, check_stop, offload=offload).profile(model, blocks, batch, loss_fn)


@contextmanager
def _on_shapes(rates: Rates) -> Iterator[Callable[..., _Subject]]:
    """Fake tensors, the device's kernels and its clock; gives how to make the subject there.

    Raises ``DryRunError`` for what fake tensors cannot do.
    """
    on_cuda = rates.device is not None
    fake = KnownValues(torch.float32 if on_cuda else None)
    computed = ComputedClock(rates)
    with ExitStack() as stack:
        stack.enter_context(random_state_restored(torch.device("cpu")))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(quiet_fake_kernels())
        warnings.filterwarnings("ignore", message=".*fake tensor.*")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        try:
            with fake, computed, cuda_kernels() if on_cuda else nullcontext(), clock.reading(computed.now_s):
                yield lambda *given: _Subject(computed, fake, *given)
        except CkptplanError:
            raise
        except UNFIT as error:
            raise DryRunError(
                f"the model cannot be estimated without running it: {why_unfit(error)}. Profile it where it runs: "
                "profile_model, or train.py with runtime=cpu or runtime=cuda"
            ) from error


class _Subject:
    """The model as fake tensors, profiled once for each assumption of what kernels reach."""

    def __init__(
        self,
        computed: ComputedClock,
        fake: KnownValues,
        model: nn.Module,
        blocks: Sequence[CheckpointableBlock] | Sequence[str] | str | None,
        batch: Any,
        loss_fn: LossFn,
        check_stop: Callable[[], None],
    ) -> None:
        self.computed, self.loss_fn, self.check_stop, self.offload = computed, loss_fn, check_stop, False
        given = [] if blocks is None or isinstance(blocks, str) else list(blocks)
        declared = [block for block in given if isinstance(block, CheckpointableBlock)]
        self.model, *modules = make_twin([model, *(block.module for block in declared)])
        self.batch = with_fakes(self.model, batch, fake)
        for original, own in zip(model.modules(), self.model.modules(), strict=True):  # they decide about segments
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                vars(own)[name] = vars(original)[name].copy()
        own_blocks: Any = blocks
        if declared:
            own_blocks = [replace(block, module=module) for block, module in zip(declared, modules, strict=True)]
        self.blocks = resolve_blocks(self.model, own_blocks, self.batch, loss_fn, torch.device("cpu"))
        self.repeats = find_repeats(self.model, self.blocks)
        self.fingerprint = model_fingerprint(self.blocks)

    def profile(self, share: str) -> ChainProfile:
        """With kernels that reach "low", "mid" or "high" shares of the device's rates."""
        self.computed.rates = replace(self.computed.rates, share=share)
        if self.repeats:
            try:
                with cut_short(self.blocks, self.repeats) as kept:
                    long = made_long(self._profile(kept), self.blocks, self.repeats)
            except (*UNFIT, CkptplanError, LookupError, ValueError):  # it misses the blocks that are left out
                long = None
            if long is not None:
                return replace(long, fingerprint=self.fingerprint)
            self.repeats = []
        return self._profile(self.blocks)

    def _profile(self, blocks: Sequence[CheckpointableBlock]) -> ChainProfile:
        return profile_model(
            self.model,
            blocks,
            self.batch,
            self.loss_fn,
            device="cpu",
            num_warmup=0,
            num_trials=1,
            memory="live" if self.computed.rates.device is None else AS_ON_CUDA,
            check_stop=self.check_stop,
            offload=self.offload,
        )


# The range -----------------------------------------------------------------------------------------------------------


def _times_of(profile: ChainProfile) -> list[list[float | None]]:
    """Per block forward, backward and recomputation in ms, then per region forward and backward."""
    of_blocks = [[b.forward_time_ms, b.backward_time_ms, b.recompute_time_ms] for b in profile]
    return of_blocks + [[region.forward_time_ms, region.backward_time_ms] for region in profile.regions]


def _with_times(profile: ChainProfile, times: Sequence[Sequence[float | None]]) -> ChainProfile:
    left = iter(times[len(profile) :])

    def region(found: RegionProfile | None) -> RegionProfile | None:
        if found is None:
            return None
        forward_ms, backward_ms = next(left)
        return replace(found, forward_time_ms=forward_ms, backward_time_ms=backward_ms)

    pre = region(profile.pre)
    blocks = [
        replace(block, forward_time_ms=f, backward_time_ms=b, recompute_time_ms=r, before=region(block.before))
        for block, (f, b, r) in zip(profile, times, strict=False)
    ]
    return replace(profile, pre=pre, blocks=tuple(blocks), post=region(profile.post))


def _with_transfers(profile: ChainProfile, device: Device) -> ChainProfile:
    """Of each block on the host: the part of both transfers that its own forward and backward do not hide."""

    def added_ms(option: OffloadOption, block: BlockProfile) -> float:
        transfer_ms = device.transfer_s(option.host_bytes) * 1e3
        return sum(max(0.0, transfer_ms - (ms or 0.0)) for ms in (block.forward_time_ms, block.backward_time_ms))

    blocks = (
        replace(block, offload=tuple(replace(o, time_ms=added_ms(o, block)) for o in block.offload))
        for block in profile
    )
    return replace(profile, blocks=tuple(blocks))


def _as_estimate(
    likely: ChainProfile, cases: dict[str, Any], sheet: Device | None, calibration: Calibration | None
) -> ChainProfile:
    title = calibration.device if sheet is None and calibration is not None else sheet.title if sheet else ""
    rates = f"measured on {calibration.device}" if calibration else sheet.source if sheet else ""
    environment = {
        **likely.environment,
        "device": title,
        ESTIMATED: {"device": sheet.name if sheet else "cpu", "rates": rates, "times_ms": cases},
    }
    name = sheet.name if sheet else "cpu"
    blocks: list[BlockProfile] = [
        replace(block, device=name, activation_bytes_method=ESTIMATED, num_warmup=None, num_trials=None)
        for block in likely
    ]
    return replace(likely, blocks=tuple(blocks), environment=environment)


def is_estimated(profile: ChainProfile) -> bool:
    """Whether its figures were computed, not measured."""
    return ESTIMATED in profile.environment


@dataclass(frozen=True)
class EstimatedRange:
    """What a plan may cost, from the fastest to the slowest case; ``likely`` stands between.

    Attributes:
        step_ms: forward, backward and recomputation of one step: (low, likely, high).
        overhead_ratio: time added to a step without recomputation, as a share of it: (low, likely, high).
    """

    step_ms: tuple[float, float, float]
    overhead_ratio: tuple[float, float, float]


def estimated_range(profile: ChainProfile, plan: CheckpointPlan) -> EstimatedRange:
    """How sure the times of a plan are that was made from an estimate. Raises ``ValueError`` for a measured profile."""
    if not is_estimated(profile):
        raise ValueError("the profile is measured; only an estimated one has a range")
    cases = profile.environment[ESTIMATED]["times_ms"].values()
    found = [_step_and_overhead(of, plan) for of in (profile, *(_with_times(profile, times) for times in cases))]
    (step_ms, overhead), steps, overheads = found[0], [s for s, _ in found], [o for _, o in found]
    return EstimatedRange((min(steps), step_ms, max(steps)), (min(overheads), overhead, max(overheads)))


def _step_and_overhead(profile: ChainProfile, plan: CheckpointPlan) -> tuple[float, float]:
    plain_ms = step_cost(profile, "time")
    again_ms = simulate_plan(profile, plan).recompute_time_ms or 0.0
    return plain_ms + again_ms, again_ms / plain_ms
