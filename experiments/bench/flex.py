"""PyTorch's FlexAttention: the plan's block mask in its form, its compiled program, and the options that are tried."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# Every row sees its diagonal, so no row needs the check for an empty one.
_SAFE = {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True}
# BLOCK_N, num_warps, num_stages. The device's own default is tried too: on an H200, at head dim 128, BLOCK_N 64 with 8 warps and 3 stages.
_FORWARD = ((128, 8, 2), (128, 8, 3), (64, 4, 3), (64, 4, 2))
# BLOCK_M1 = BLOCK_N2 and BLOCK_N1 = BLOCK_M2 (the kernel wants N1 a multiple of M1 and M2 of N2), num_warps, num_stages. The default of an
# H200 is 64, 128 with 8 warps and 3 stages.
_BACKWARD = ((64, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2))


def candidates(block_size: int, *, backward: bool) -> list[dict[str, Any]]:
    """`kernel_options` to choose from for a mask in blocks of `block_size`, which every tile divides. Each costs a compilation."""
    tile = {"fwd_BLOCK_M": min(128, block_size), "fwd_BLOCK_N": min(64, block_size)}
    found: list[dict[str, Any]] = [_SAFE]
    if backward:
        for inner, outer, warps, stages in _BACKWARD:
            if block_size % outer == 0:
                blocks = {"bwd_BLOCK_M1": inner, "bwd_BLOCK_N1": outer, "bwd_BLOCK_M2": outer, "bwd_BLOCK_N2": inner}
                found.append(_SAFE | tile | blocks | {"bwd_num_warps": warps, "bwd_num_stages": stages})
        return found
    for columns, warps, stages in _FORWARD:
        if block_size % columns == 0:
            found.append(_SAFE | tile | {"fwd_BLOCK_N": columns, "fwd_num_warps": warps, "fwd_num_stages": stages})
    if block_size % 128 == 0:
        found.append(_SAFE | tile | {"fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2, "USE_TMA": True})
    return found


def attend(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> Any:
    """q [1, N, T, H], k and v [1, K, T, H]. On a CPU it runs uncompiled, and `options` (its `kernel_options`) do nothing."""
    function = _compiled() if q.is_cuda else _eager()
    return function(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=dict(options))


def block_mask(visible: np.ndarray, block_size: int, device: Any) -> Any:
    """FlexAttention's BlockMask of bool[N, Q, J], from block lists: a mask by element would be evaluated T x T times.

    Blocks below the diagonal are whole, so the kernel applies the causal mask in the diagonal block only, as ours does.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    seen = torch.from_numpy(np.ascontiguousarray(visible)).to(device)
    diagonal = torch.eye(seen.shape[-1], dtype=torch.bool, device=device)

    def lists(blocks: Any) -> tuple[Any, Any]:
        """Counts i32[1, N, Q] and indices i32[1, N, Q, J], those that are set first and in ascending order."""
        order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
        return blocks.sum(-1).to(torch.int32)[None].contiguous(), order.to(torch.int32)[None].contiguous()

    def by_element(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen[head % seen.shape[0], query // block_size, key // block_size] & (query >= key)

    # Uncompiled, FlexAttention ignores the lists and computes every score, so there the function has to hold the whole mask.
    mask_mod = _causal if seen.is_cuda else by_element
    return BlockMask.from_kv_blocks(*lists(seen & diagonal), *lists(seen & ~diagonal), BLOCK_SIZE=block_size, mask_mod=mask_mod)


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    del batch, head
    return query >= key


@functools.cache
def _compiled() -> Callable[..., Any]:
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths, head counts and options are a program each; beyond the default of 8 the rest would fail.
    torch._dynamo.config.recompile_limit = 256
    # Timing the backward pass alone keeps the graph, which buffers handed over for reuse would forbid.
    torch._functorch.config.donated_buffer = False
    # Static shapes: with dynamic ones the kernel cannot know that the length is whole blocks and checks every load.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def _eager() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention
