"""What the kernels of a CUDA device save and need, where they differ from those of the CPU that shapes are traced with.

A step is traced with fake CPU tensors. Operators whose CUDA kernel keeps other tensors for the backward are exchanged
for the one that the device would run; what a kernel takes for itself while it runs stands in a table. Sources, all of
PyTorch: ``sdp_utils.cpp`` (which attention is chosen), ``flash_attn/flash_api.cpp`` and ``mem_eff_attention`` (their
workspaces), ``autocast_mode.h`` (which operators run in float32), ``CUDACachingAllocator`` (rounding).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ckptplan.trees import map_tensors

ALLOCATOR_ROUNDING_BYTES = 512  # kMinBlockSize of PyTorch's CUDA caching allocator

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH_WIDTH = 256  # features per head


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """While it lasts, attention, dropout and autocast's float32 on CPU tensors are those of CUDA, in the whole process.

    Registered with the dispatcher, so that it holds however an operator is come to, in a backward too.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        for name in _FLOAT32_UNDER_AUTOCAST:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, functools.partial(_in_float32, _overload(name)), "AutocastCPU")
        yield


# Operators that CUDA's autocast runs in float32 and CPU's does not, of those that networks are made of.
_FLOAT32_UNDER_AUTOCAST = (
    *("layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "logsumexp", "cumsum", "sum"),
    *("sum.dim_IntList", "exp", "log", "log1p", "expm1", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt"),
    *("reciprocal", "softplus", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("kl_div", "binary_cross_entropy_with_logits", "linalg_vector_norm", "prod", "norm.Scalar", "cosine_similarity"),
)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _in_float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_tensors((args, kwargs), _float32)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's fused kernel keeps a mask of one byte an element, the CPU's a factor of the input's dtype."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros_like(input)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The first of PyTorch's kernels that takes these inputs: flash, memory-efficient, plain products."""
    width = query.shape[-1]
    is_dense = query.dim() == 4 and query.dtype == key.dtype == value.dtype
    is_flash = is_dense and attn_mask is None and query.dtype in _HALF and width <= _MOST_FLASH_WIDTH
    if is_flash and width == value.shape[-1]:
        scale = scale or 1 / math.sqrt(width)
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        return found[0][..., :width] if width % 8 else found[0]
    has_equal_heads = is_dense and query.shape[-3] == key.shape[-3]
    if has_equal_heads and query.dtype in (*_HALF, torch.float32):
        bias = _bias(attn_mask, query, key)
        needs_gradient = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )
        return found[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """The mask as a term of the scores; a Boolean one is turned into that, in the query's dtype."""
    if mask is None:
        return None
    shape = (*query.shape[:-1], key.shape[-2])
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    length, aligned = mask.shape[-1], 16
    if length % aligned:  # rows of the bias start at multiples of 16 elements
        mask = F.pad(mask, (0, -length % aligned))[..., :length]
    return mask.expand(shape)


# Workspaces ----------------------------------------------------------------------------------------------------------


def workspace_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes that the CUDA kernel of an operator holds beside its inputs and outputs while it runs; 0 where unknown."""
    found = _WORKSPACES.get(func.overloadpacket)
    return 0 if found is None else found(args, out)


def _flash_backward(args: Any, out: Any) -> int:
    """Float32 sums of the query's gradient and of its products, in rows of 128; with fewer key heads also theirs."""
    _, query, key = args[:3]
    batch, heads, length, width = query.shape
    rows = _round_up(length, 128)
    sums = batch * heads * rows * 4
    accumulated = batch * heads * rows * (_round_up(width, 32) if width <= 192 else 256) * 4
    if torch.are_deterministic_algorithms_enabled():
        accumulated *= max(1, -(-_MULTIPROCESSORS // (batch * heads)))
    expanded = 0
    if key.shape[1] != heads:
        expanded = 2 * batch * key.shape[2] * heads * width * key.element_size()
    return sums + accumulated + expanded


_MULTIPROCESSORS = 132  # of an H100; decides only how much the deterministic backward takes at small batches


def _efficient_backward(args: Any, out: Any) -> int:
    """The products' sums, and for half precision the query's gradient in float32."""
    _, query = args[:2]
    batch, heads, length, width = query.shape
    accumulated = 0 if query.dtype is torch.float32 else batch * heads * length * width * 4
    return int(batch * heads * length * 4 + accumulated)


def _embedding_backward(args: Any, out: Any) -> int:
    """Indices sorted with their places: two copies of both, as 64-bit integers."""
    return int(4 * 8 * args[1].numel())


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


_WORKSPACES: dict[Any, Callable[[Any, Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten.embedding_dense_backward: _embedding_backward,
}
