"""The model as PyTorch's engines train it. Order: the plan is applied, then blocks are compiled, then this."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.engine.gathered import Sharding, UnitBytes
from ckptplan.engine.ranks import Ranks
from ckptplan.nodes import blocks_of
from ckptplan.plan import CheckpointPlan
from ckptplan.profiles import modules_of
from ckptplan.proof import Engine
from ckptplan.randomness import random_state_restored
from ckptplan.trees import sharded_bytes, sharded_shape, tensors_in
from ckptplan.twin import make_twin

# By name in torch.distributed, of the releases from 2.6 on.
_COLLECTIVES_OF_FSDP2 = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
_ONE_RANK_COMMUNICATES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)  # FSDP2, with itself
_GLOO_LETS_GO_S = 1.0  # the longest that its thread is waited for


@dataclass
class Parallel:
    """A model under an engine.

    Attributes:
        module: what is called; the model itself but for DDP, which wraps it.
        keeps_gradients: whether gradients are set to zero and not dropped between steps: those of DDP are its buckets.
    """

    module: nn.Module
    model: nn.Module
    ranks: Ranks
    keeps_gradients: bool = False
    _shared_versions: list[int] = field(default_factory=list)

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch; only behind the last one gradients are exchanged.

        FSDP2 exchanges them every time: it would have to hold whole gradients instead of shards.
        """
        if is_last or not isinstance(self.module, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, if a forward has changed any since the last time."""
        if self.ranks.size == 1:
            return
        buffers = list(self.model.buffers())
        versions = [buffer._version for buffer in buffers]  # kernels that count no version stand beside one that does
        if versions == self._shared_versions:
            return
        for buffer in buffers:
            dist.broadcast(buffer, src=0)
        self._shared_versions = [buffer._version for buffer in buffers]


def alone(model: nn.Module) -> Parallel:
    """The model of a run of one process."""
    return Parallel(model, model, Ranks())


def shards(kind: str, ranks: Ranks) -> bool:
    """Whether weights are sharded over the ranks that read different samples."""
    return kind == "fsdp2" and (ranks.data_size > 1 or ranks.tensor_size == 1)


def make_parallel(kind: str, model: nn.Module, plan: CheckpointPlan, ranks: Ranks, unused: Sequence[str]) -> Parallel:
    """``model``, to which ``plan`` has been applied, under engine ``kind``; FSDP2 changes the model itself.

    With tensor parallelism the model is cut already; where all ranks share its matrices, nothing is left to shard.

    Args:
        unused: names of parameters that get no gradient in a step.
    """
    if kind == "single":
        return alone(model)
    if kind == "ddp":
        device = next(model.parameters()).device
        takes = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        own_buffers = {"forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers": False}
        options: dict[str, Any] = {
            "device_ids": [device] if device.type == "cuda" else None,
            "gradient_as_bucket_view": True,
            "find_unused_parameters": bool(unused),
            **own_buffers,  # see share_buffers
        }
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        return Parallel(wrapped, model, ranks, keeps_gradients=True)
    if shards(kind, ranks):
        _shard(model, sharding_units(plan), ranks)
    return Parallel(model, model, ranks)


def sharding_units(plan: CheckpointPlan) -> tuple[tuple[str, ...], ...]:
    """Names of the blocks that are gathered and let go of together: those of a top-level node of the plan.

    A segment runs as a whole, in the forward and again in the backward, so its weights have to be there as a whole.
    Units that share a block, which a model calls more than once, are one.
    """
    modules = modules_of(plan.block_ids)
    units: list[set[str]] = []
    for node in plan.nodes:
        names = {modules[member] for member in blocks_of([node])}
        touching = [unit for unit in units if unit & names]
        units = [unit for unit in units if not unit & names]
        units.append(names.union(*touching))
    order = list(dict.fromkeys(modules))
    return tuple(tuple(sorted(unit, key=order.index)) for unit in units)


def _shard(model: nn.Module, units: Sequence[Sequence[str]], ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.size,)) if ranks.mesh is None else ranks.mesh["dp"]
    for unit in units:
        modules = [model.get_submodule(name) for name in unit]
        if any(True for module in modules for _ in module.parameters()):
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def measured_under(make: Callable[[nn.Module], Parallel]) -> Engine:
    """The engine that ``make`` puts a twin under, for the proof of a plan."""
    if "nccl" in dist.get_backend():
        return Engine(lambda twin: make(twin).module)
    return Engine(lambda twin: make(twin).module, settled=_threads_of_gloo_waited_for, peak_trials=12)


@contextlib.contextmanager
def _threads_of_gloo_waited_for() -> Iterator[None]:
    """Each collective of FSDP2 returns when gloo's thread has let go of the tensors too.

    By itself that happens a moment after the collective is done, so that by chance a buffer or two stand in memory
    longer.
    """
    plain = {name: getattr(dist, name) for name in _COLLECTIVES_OF_FSDP2 if hasattr(dist, name)}

    def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = tensors_in((args, kwargs))
            held = [_num_users(tensor) for tensor in tensors]
            work = collective(*args, **kwargs)
            deadline_s = time.monotonic() + _GLOO_LETS_GO_S
            while time.monotonic() < deadline_s and any(
                _num_users(tensor) > before for tensor, before in zip(tensors, held, strict=True)
            ):
                time.sleep(2e-4)
            return work

        return run

    for name, collective in plain.items():
        setattr(dist, name, waiting(collective))
    try:
        yield
    finally:
        for name, collective in plain.items():
            setattr(dist, name, collective)


def _num_users(tensor: torch.Tensor) -> int:
    """How many hold the tensor or its storage, anywhere in the process; 0 where this torch does not tell."""
    of_tensor, of_storage = getattr(tensor, "_use_count", None), getattr(torch._C, "_storage_Use_Count", None)
    if of_tensor is None or of_storage is None:
        return 0
    return int(of_tensor()) + int(of_storage(tensor.untyped_storage()._cdata))


def gradient_order(
    model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], device: torch.device
) -> tuple[str, ...]:
    """Names of the parameters that get a gradient, in the order in which it comes, by one step of a twin."""
    (twin,) = make_twin([model])
    found: list[str] = []
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
    with random_state_restored(device), torch.enable_grad():
        loss_of(twin).backward()
    return tuple(found)


def _own_bytes(parameter: nn.Parameter) -> int:
    return math.prod(sharded_shape(parameter, 1)) * parameter.element_size()


def sharding_of(model: nn.Module, blocks: Sequence[str], order: Sequence[str], num_ranks: int) -> Sharding:
    """What ``model`` takes under FSDP2, its blocks given by path, its gradients coming in ``order``."""
    parameters = dict(model.named_parameters())
    block_of = {name: block for name in parameters for block in blocks if name.startswith(f"{block}.")}

    def bytes_of(names: Sequence[str]) -> UnitBytes:
        found = UnitBytes()
        for name in names:
            parameter = parameters[name]
            padded = sharded_bytes(parameter, num_ranks) * num_ranks
            has_gradient = name in order
            own = _own_bytes(parameter)
            found += UnitBytes(padded, own * has_gradient, padded * has_gradient)
        return found

    rest = [name for name in parameters if name not in block_of]
    of_module = {block: bytes_of([name for name in parameters if block_of.get(name) == block]) for block in blocks}
    before: dict[str, int] = {}
    come = 0
    for name in order:
        if name in block_of:
            before.setdefault(block_of[name], come)
        else:
            come += _own_bytes(parameters[name])
    return Sharding(of_module, bytes_of(rest), before, communicates=num_ranks > 1 or _ONE_RANK_COMMUNICATES)
