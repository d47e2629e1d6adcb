"""Random modules for the executors: a dozen steps out of many kinds, on a pool of tensors that share memory.

Views of views, writes in place, slices, random draws, running statistics, indices that depend on data: whatever
a module may do between its inputs and its output. A program is a function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
_POOL = 6  # tensors that later steps may use


class Step(NamedTuple):
    kind: str
    first: float  # in [0, 1): which tensor of the pool
    second: float
    choice: float  # anything else that the step may choose


class Triple(torch.autograd.Function):
    """Saves what it computes and what it is given, and computes again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * (y + x * x.cos())


class RandomProgram(nn.Module):
    """(WIDTH, WIDTH) -> (WIDTH, WIDTH); about one program in four is refused by plain autograd too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        stream = random.Random(seed)
        count = stream.randint(4, 16)
        kinds = list(STEPS)
        self.steps = [Step(stream.choice(kinds), *(stream.random() for _ in range(3))) for _ in range(count)]
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3) for _ in range(4)
        )
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.example = torch.randn(WIDTH, WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        pool = [x, x * 1.0]
        for step in self.steps:
            a, b = pool[int(step.first * len(pool))], pool[int(step.second * len(pool))]
            if step.kind in IN_PLACE and (a is x or a is b):
                continue  # the input is the caller's
            made = STEPS[step.kind](self, a, b, step.choice)
            pool.append(made)
            if len(pool) > _POOL:
                pool.pop(1)
        total = pool[-1]
        for tensor in pool[1:-1]:
            total = total + tensor.tanh().mean()
        return total


def _averaged(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    with torch.no_grad():
        program.average.mul_(0.9).add_(a.detach().mean(0), alpha=0.1)
    return b * program.average


def _filled_in_parts(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    made = torch.empty_like(a)
    made[:, : WIDTH // 2].copy_(a[:, : WIDTH // 2])
    made[:, WIDTH // 2 :].copy_(b[:, : WIDTH // 2])
    return made


def _summed_into(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    made = torch.zeros_like(a)
    return made.index_add_(0, torch.arange(WIDTH - 1, -1, -1), a * b)


def _written_through_data(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    made = a * b
    made.data.mul_(0.5)
    return made


def _branch(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    return a.sigmoid() if a.detach().sum().item() > 0 else b.sin()


def _sparse_rows(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    rows = torch.where(b.detach()[:, 0] > 0)[0]
    return a.index_put((rows,), a[rows] * 2)


def _slice_added(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    a[:, : WIDTH // 2].add_(b[:, WIDTH // 2 :])
    return a


def _row_filled(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    a[int(c * WIDTH)] = 0.5
    return a


def _gradient_inside(program: RandomProgram, a: Tensor, b: Tensor, c: float) -> Tensor:
    leaf = a.detach().clone().requires_grad_()
    with torch.enable_grad():
        (inner,) = torch.autograd.grad((leaf.tanh() * leaf).sum(), leaf)
    return b * inner


# All of ``(program, a, b, c) -> tensor``: a and b from the pool, c a number in [0, 1).
STEPS: dict[str, Callable[[RandomProgram, Tensor, Tensor, float], Tensor]] = {
    "linear": lambda p, a, b, c: a @ p.weights[int(c * 4)],
    "linear with bias": lambda p, a, b, c: F.linear(a, p.weights[int(c * 4)], p.weights[0][0]),
    "batched product": lambda p, a, b, c: torch.bmm(a[None], b[None])[0] / WIDTH,
    "sum": lambda p, a, b, c: a + b,
    "difference": lambda p, a, b, c: a - 0.3 * b,
    "product": lambda p, a, b, c: a * b,
    "quotient": lambda p, a, b, c: a / (1 + b * b),
    "tanh": lambda p, a, b, c: torch.tanh(a),
    "exp": lambda p, a, b, c: torch.exp(-a.abs()),
    "sigmoid": lambda p, a, b, c: torch.sigmoid(a),
    "silu": lambda p, a, b, c: F.silu(a),
    "gelu": lambda p, a, b, c: F.gelu(a),
    "softmax": lambda p, a, b, c: torch.softmax(a, -1),
    "logsumexp": lambda p, a, b, c: a - a.logsumexp(-1, keepdim=True),
    "cumulative sum": lambda p, a, b, c: a.cumsum(0) * 0.3,
    "sorted": lambda p, a, b, c: a.sort(0).values,
    "largest": lambda p, a, b, c: a.topk(WIDTH, -1).values,
    "layer norm": lambda p, a, b, c: p.layer_norm(a),
    "batch norm": lambda p, a, b, c: p.batch_norm(a),
    "rms norm": lambda p, a, b, c: F.rms_norm(a, (WIDTH,)),
    "group norm": lambda p, a, b, c: F.group_norm(a[None], 2)[0],
    "max pool": lambda p, a, b, c: F.max_pool1d(a[None], 3, 1, 1)[0],
    "convolution": lambda p, a, b, c: F.conv1d(a[None], p.weights[0][:, :, None])[0],
    "attention": lambda p, a, b, c: F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])[0, 0],
    "where": lambda p, a, b, c: torch.where(a > 0, a, b * 0.1),
    "masked": lambda p, a, b, c: a.masked_fill(b.detach() > 0.5, 0.1),
    "gathered": lambda p, a, b, c: a.gather(0, b.detach().argsort(0)),
    "expanded": lambda p, a, b, c: a.mean(0, keepdim=True).expand_as(a) + 0 * b,
    "einsum": lambda p, a, b, c: torch.einsum("ij,jk->ik", a, b) / WIDTH,
    "spectrum": lambda p, a, b, c: torch.fft.rfft(a).abs().sum(-1, keepdim=True) * 0.1 + b,
    "half precision": lambda p, a, b, c: a.bfloat16().float() * b,
    "custom function": lambda p, a, b, c: Triple.apply(a),
    "detached": lambda p, a, b, c: a.detach() * b,
    "recomputed inside": lambda p, a, b, c: checkpoint(lambda t: F.gelu(t).tanh(), a, use_reentrant=False),
    "gradient inside": _gradient_inside,
    "branch": _branch,
    "rows chosen by data": _sparse_rows,
    # views
    "transposed": lambda p, a, b, c: a.t(),
    "half": lambda p, a, b, c: a.chunk(2, -1)[int(c * 2)].repeat(1, 2),
    "joined": lambda p, a, b, c: torch.cat([a, b], 0)[::2],
    "reshaped": lambda p, a, b, c: a.reshape(-1).view(WIDTH, WIDTH),
    "flipped": lambda p, a, b, c: a.flip(0),
    "same": lambda p, a, b, c: a.view(a.shape),
    # random draws
    "dropout": lambda p, a, b, c: F.dropout(a, 0.3),
    "noise": lambda p, a, b, c: a * torch.rand_like(a),
    "normal noise": lambda p, a, b, c: a + 0.1 * torch.randn(a.shape),
    "permuted": lambda p, a, b, c: a[torch.randperm(WIDTH)],
    "sampled": lambda p, a, b, c: a * torch.bernoulli(torch.sigmoid(b.detach())),
    "leaky noise": lambda p, a, b, c: F.rrelu(a, 0.1, 0.3, training=True),
    # memory written in parts
    "average": _averaged,
    "filled in parts": _filled_in_parts,
    "summed into": _summed_into,
    "written through data": _written_through_data,
    # in place
    "relu in place": lambda p, a, b, c: F.relu_(a),
    "silu in place": lambda p, a, b, c: F.silu(a, inplace=True),
    "dropout in place": lambda p, a, b, c: F.dropout(a, 0.2, inplace=True),
    "sum in place": lambda p, a, b, c: a.add_(b),
    "product in place": lambda p, a, b, c: a.mul_(0.7),
    "clamped in place": lambda p, a, b, c: a.clamp_(-2, 2),
    "copied over": lambda p, a, b, c: a.copy_(b),
    "slice added": _slice_added,
    "row filled": _row_filled,
}
IN_PLACE = {kind for kind in STEPS if kind.endswith("in place") or kind in ("copied over", "slice added", "row filled")}
