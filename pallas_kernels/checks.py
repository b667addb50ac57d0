"""What `mixed_head_attention` refuses: every message names the argument, its value and what is accepted."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask, HeadPlan

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def expect(name: str, shape: tuple[int, ...], accepted: Sequence[tuple[int, ...]]) -> None:
    if shape not in accepted:
        raise ValueError(f"{name} has shape {shape}: accepted is {' or '.join(map(str, accepted))}")


def check(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, lengths: jax.Array | None, first_block: jax.Array | None, scale: float | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}: accepted are arrays of rank 4, [batch, tokens, heads, head dim]")
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            accepted = ", ".join(jnp.dtype(d).name for d in _DTYPES)
            raise ValueError(f"{name} has dtype {x.dtype}: accepted are {accepted}, the same for q, k and v")
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if k.shape != (batch, keys, kv_heads, dim) or keys < queries or not queries or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"k has shape {k.shape}: for q of shape {q.shape} accepted is (B, S, K, H) with B={batch}, S >= {queries} >= 1, "
            f"K a divisor of {heads}, H={dim}"
        )
    expect("v", v.shape, [k.shape])
    if scale is not None and not (isinstance(scale, numbers.Real) and scale > 0):
        raise ValueError(f"scale={scale}: accepted are None and Python numbers above 0")
    if plan.block_size < 16 or plan.block_size & (plan.block_size - 1):
        raise ValueError(f"plan.block_size={plan.block_size}: accepted are powers of two from 16")
    if plan.sink_blocks < 0 or plan.local_blocks < 1:
        raise ValueError(
            f"plan.sink_blocks={plan.sink_blocks}, plan.local_blocks={plan.local_blocks}: accepted are 0 and more, and 1 and more"
        )
    blocks = -(-keys // plan.block_size)
    expect("plan.mode", plan.mode.shape, [(batch, kv_heads), (batch, blocks, kv_heads)])
    _expect_integers("plan.mode", plan.mode)
    if plan.blocks is not None:
        words = -(-blocks // BlockMask.WORD)
        expect("plan.blocks.bitmap", plan.blocks.bitmap.shape, [(batch, h, blocks, words) for h in (kv_heads, heads)])
        if plan.blocks.bitmap.dtype != jnp.uint32:
            raise ValueError(f"plan.blocks.bitmap has dtype {plan.blocks.bitmap.dtype}: accepted is uint32")
    for name, x, shape in (("lengths", lengths, (batch,)), ("first_block", first_block, (batch, blocks))):
        if x is not None:
            expect(name, x.shape, [shape])
            _expect_integers(name, x)
    _check_values(plan, lengths, first_block, keys)


def _check_values(plan: HeadPlan, lengths: jax.Array | None, first_block: jax.Array | None, keys: int) -> None:
    """Of those arrays whose values are known now, which those of a jitted function are not."""
    mode, valid, first = (_known(x) for x in (plan.mode, lengths, first_block))
    if mode is not None and not np.isin(mode, list(HeadMode)).all():
        raise ValueError(
            f"plan.mode holds {sorted(set(mode.ravel().tolist()) - set(HeadMode))}: accepted are the values of HeadMode, 0 to 2"
        )
    if valid is not None and not ((valid >= 0) & (valid <= keys)).all():
        raise ValueError(f"lengths={valid.tolist()}: accepted are 0 to {keys}, the number of keys")
    if first is not None:
        begins = np.take_along_axis(first, np.clip(first, 0, first.shape[1] - 1), axis=1)
        if (first < 0).any() or (first > np.arange(first.shape[1])).any() or (begins != first).any() or (np.diff(first) < 0).any():
            raise ValueError(
                f"first_block={first.tolist()}: accepted are blocks of documents that follow each other, each with the index of its "
                "document's first block (padding blocks with their own)"
            )
    if mode is not None and mode.ndim == 3 and (first is not None or first_block is None):
        begins = np.zeros(mode.shape[:2], int) if first is None else first
        if (np.take_along_axis(mode, begins[:, :, None], axis=1) != mode).any():
            raise ValueError(f"plan.mode={mode.tolist()}: accepted is one mode per head for all blocks of a document")


def _known(x: Any) -> np.ndarray | None:
    return None if x is None or isinstance(x, Tracer) else np.asarray(x)


def _expect_integers(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: accepted are integers")
