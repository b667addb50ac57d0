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

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
BLOCK_SIZES = tuple(2**power for power in range(4, 13))


def expect(name: str, shape: tuple[int, ...], accepted: Sequence[tuple[int, ...]]) -> None:
    if shape not in accepted:
        raise ValueError(f"{name} has shape {shape}: accepted is {' or '.join(map(str, accepted))}")


def check(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, lengths: jax.Array | None, first_block: jax.Array | None, scale: float | None
) -> None:
    if not isinstance(plan, HeadPlan) or not isinstance(plan.blocks, BlockMask | None):
        raise ValueError(f"plan is {_short(plan)}: accepted is a HeadPlan, its blocks a BlockMask or None")
    optional = {"plan.blocks.bitmap": plan.blocks and plan.blocks.bitmap, "lengths": lengths, "first_block": first_block}
    for name, x in ({"q": q, "k": k, "v": v, "plan.mode": plan.mode} | {n: x for n, x in optional.items() if x is not None}).items():
        expect_array(name, x)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: accepted are arrays of rank 4, [batch, tokens, heads, head dim], none of them 0")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            accepted = ", ".join(jnp.dtype(d).name for d in DTYPES)
            raise ValueError(f"{name} has dtype {x.dtype}: accepted are {accepted}, the same for q, k and v")
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if k.shape != (batch, keys, kv_heads, dim) or keys < queries or heads % kv_heads:
        raise ValueError(
            f"k has shape {k.shape}: for q of shape {q.shape} accepted is (B, S, K, H) with B={batch}, S >= {queries}, "
            f"K a divisor of {heads}, H={dim}"
        )
    expect("v", v.shape, [k.shape])
    if scale is not None and not (isinstance(scale, numbers.Real) and 2.0**-126 <= scale < 2.0**128):
        raise ValueError(f"scale={_short(scale)}: accepted are None and Python numbers above 0 that float32 can hold")
    if plan.block_size not in BLOCK_SIZES:
        raise ValueError(f"plan.block_size={plan.block_size}: accepted are powers of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}")
    for name, value, least in (("sink_blocks", plan.sink_blocks, 0), ("local_blocks", plan.local_blocks, 1)):
        if not isinstance(value, int) or not least <= value < 2**30:
            raise ValueError(f"plan.{name}={_short(value)}: accepted are integers from {least} to 2**30")
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


def check_backward(q: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> None:
    for name, x, shape in (("out", out, q.shape), ("lse", lse, q.shape[:3]), ("d_out", d_out, q.shape)):
        expect_array(name, x)
        expect(name, x.shape, [shape])
        if not jnp.issubdtype(x.dtype, jnp.floating) or (name == "lse" and x.dtype != jnp.float32):
            raise ValueError(f"{name} has dtype {x.dtype}: accepted is {'float32' if name == 'lse' else 'floating point'}")


def _check_values(plan: HeadPlan, lengths: jax.Array | None, first_block: jax.Array | None, keys: int) -> None:
    """Of those arrays whose values are known now, which those of a jitted function are not."""
    mode, valid, first = (_known(x) for x in (plan.mode, lengths, first_block))
    if mode is not None and not np.isin(mode, list(HeadMode)).all():
        raise ValueError(
            f"plan.mode holds {sorted(set(mode.ravel().tolist()) - set(HeadMode))}: accepted are the values of HeadMode, 0 to 2"
        )
    if valid is not None and not ((valid >= 0) & (valid <= keys)).all():
        raise ValueError(f"lengths={_short(valid.tolist())}: accepted are 0 to {keys}, the number of keys")
    if first_block is not None:
        check_documents(first_block)
    if mode is not None and mode.ndim == 3 and (first is not None or first_block is None):
        begins = np.zeros(mode.shape[:2], int) if first is None else first
        if (np.take_along_axis(mode, begins[:, :, None], axis=1) != mode).any():
            raise ValueError(f"plan.mode={_short(mode.tolist())}: accepted is one mode per head for all blocks of a document")


def check_documents(first_block: jax.Array) -> None:
    """Of `first_block` i[B, J] whose values are known."""
    first = _known(first_block)
    if first is None:
        return
    begins = np.take_along_axis(first, np.clip(first, 0, first.shape[1] - 1), axis=1)
    if (first < 0).any() or (first > np.arange(first.shape[1])).any() or (begins != first).any() or (np.diff(first) < 0).any():
        raise ValueError(
            f"first_block={_short(first.tolist())}: accepted are blocks of documents that follow each other, each with the index of its "
            "document's first block (padding blocks with their own)"
        )


def expect_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} is {_short(x)}: accepted are arrays")


def _known(x: Any) -> np.ndarray | None:
    return None if x is None or isinstance(x, Tracer) else np.asarray(x)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _expect_integers(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: accepted are integers")
