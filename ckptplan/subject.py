"""What is measured: a twin of a model with a batch of its own, and how to run a step of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import CheckpointableBlock, call_block, hooks_between, model_fingerprint
from ckptplan.errors import BlockDeclarationError
from ckptplan.trees import map_tensors, tensors_anywhere
from ckptplan.twin import CANNOT_COPY, make_twin, missing_hooks_told

LossFn = Callable[[nn.Module, Any], torch.Tensor]


class PlainChain(nn.Module):
    """Blocks run one after the other, all kept."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        value: Any = inputs
        for module in self.blocks:
            value = call_block(module, value, kwargs)
        return value


@dataclass(frozen=True)
class Trials:
    """How often to run for the times: ``num_warmup`` not counted, then ``num_trials``."""

    num_warmup: int = 3
    num_trials: int = 10

    def __post_init__(self) -> None:
        for name, least in (("num_warmup", 0), ("num_trials", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number")
            if value < least:
                raise ValueError(f"{name}={value} is too small; expected at least {least}")


def require_placement(
    blocks: Sequence[CheckpointableBlock], batch: Any, device: torch.device, dtype: torch.dtype | None
) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device='cuda' was asked for, but this PyTorch sees no CUDA device; use device='cpu'")
    for block in blocks:
        if _is_planned(block.module):
            raise ValueError(
                f"a plan is active on block {block.block_id!r} (its forward is exchanged); leave the "
                "'with checkpointed(...)' or call remove() before profiling the model"
            )
        for path, part in block.module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise BlockDeclarationError(
                    f"{f'{block.block_id}.{path}'.rstrip('.')!r} is a torch.jit.ScriptModule: its forward cannot be "
                    "exchanged, and copies of it compute with the weights of the original; use the module that it was "
                    "scripted from"
                )
        for name, tensor in (*block.module.named_parameters(), *block.module.named_buffers()):
            if isinstance(tensor, nn.parameter.UninitializedParameter):
                raise ValueError(f"{block.block_id}.{name} has no shape yet; run the model once before profiling it")
            _require_strided(tensor, f"{block.block_id}.{name}")
            if tensor.device.type != device.type:
                raise ValueError(
                    f"{block.block_id}.{name} is on {tensor.device}, device={str(device)!r} was asked for; "
                    "move the model first (model.to(device))"
                )
            is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            if dtype is not None and is_weight and tensor.dtype != dtype:
                raise ValueError(f"{block.block_id}.{name} is {tensor.dtype}, dtype={dtype} was asked for")
    for tensor in tensors_anywhere(batch):
        _require_strided(tensor, "an example input")
        if tensor.device.type != device.type:
            raise ValueError(
                f"an example input of shape {tuple(tensor.shape)} is on {tensor.device}, "
                f"device={str(device)!r} was asked for; move it first"
            )


def _require_strided(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        found = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a tensor that is {found}; only dense (strided) tensors can be profiled")


def _is_planned(module: nn.Module) -> bool:
    return type(vars(module).get("forward")).__module__ == "ckptplan.apply"


def default_device(model: nn.Module, batch: Any) -> torch.device:
    """Where the parameters are; without any, the buffers; without these, the batch; else the CPU."""
    tensors = itertools.chain(model.parameters(), model.buffers(), tensors_anywhere(batch))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@dataclass
class Subject:
    """The twin that is measured, and how to run it."""

    twin: nn.Module
    callers_parameters: dict[str, nn.Parameter]
    callers_buffers: dict[str, torch.Tensor]
    names: list[str]
    modules: list[nn.Module]
    callers_modules: list[nn.Module]  # of which those are twins, without the hooks that a user put there
    run_step: Callable[[], Any]
    outside: list[torch.Tensor]
    device: torch.device
    has_loss: bool
    fingerprint: str
    changed_settings: set[str] = field(default_factory=set)  # by a forward: state, such as a counter of calls

    @staticmethod
    def of(
        model: nn.Module,
        blocks: Sequence[CheckpointableBlock],
        batch: Any,
        step: Callable[[nn.Module, Any], Any],
        device: torch.device,
        has_loss: bool,
        gradients_stand: bool = True,
    ) -> Subject:
        twin, *modules = make_twin([model, *(b.module for b in blocks)])
        if gradients_stand:
            for parameter in twin.parameters():  # gradients stand before the step, so they count nothing
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        else:
            keep_fresh_gradients(twin)
        own_batch = private_batch(batch)

        def run_step() -> Any:
            with missing_hooks_told(model):
                return step(twin, own_batch)

        return Subject(
            twin=twin,
            callers_parameters=dict(model.named_parameters()),
            callers_buffers=dict(model.named_buffers()),
            names=[b.block_id for b in blocks],
            modules=list(modules),
            callers_modules=[b.module for b in blocks],
            run_step=run_step,
            outside=tensors_anywhere(own_batch),
            device=device,
            has_loss=has_loss,
            fingerprint=model_fingerprint(blocks),
        )

    def standing_tensors(self) -> list[torch.Tensor]:
        """What stands before the step: the batch, and all weights and buffers of the twin."""
        return [*self.outside, *self.twin.parameters(), *self.twin.buffers()]

    def of_calls(self, blocks: Sequence[int]) -> Subject:
        """The same with a name and a module per call, for blocks called more than once: ``layer``, ``layer@2``."""
        names: list[str] = []
        for position, block in enumerate(blocks):
            earlier = list(blocks[:position]).count(block)
            names.append(self.names[block] + (f"@{earlier + 1}" if earlier else ""))
        modules, callers = ([modules[i] for i in blocks] for modules in (self.modules, self.callers_modules))
        return replace(self, names=names, modules=modules, callers_modules=callers)

    def hooks_before(self, order: int) -> bool:
        """Whether hooks of the user look at what the block before this one hands to it."""
        return hooks_between(*self.callers_modules[order - 1 : order + 1])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def keep_fresh_gradients(twin: nn.Module) -> None:
    """Gradients come anew in each backward, stay to its end and go: as those of a gathered FSDP2 unit do."""
    held: list[torch.Tensor] = []

    def take(parameter: torch.Tensor) -> None:
        if not held:
            torch.autograd.Variable._execution_engine.queue_callback(held.clear)
        assert parameter.grad is not None
        held.append(parameter.grad)
        parameter.grad = None

    for parameter in twin.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(take)


def private_batch(batch: Any) -> Any:
    """The batch on memory of its own, so that in-place operations do not reach the caller's."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if own.requires_grad:
            own.grad = torch.zeros_like(own)
        return own

    copies = {id(tensor): copied(tensor) for tensor in tensors_anywhere(batch)}
    try:
        return copy.deepcopy(batch, dict(copies))  # objects of the caller's too: a forward may change them
    except CANNOT_COPY:
        return map_tensors(batch, lambda tensor: copies[id(tensor)])
