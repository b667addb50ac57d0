"""What the routes to Triton, Pallas and jax-triton, share: all that is not kernel code."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.visits import Visits

Kernel = Literal["forward", "dq", "dkv"]
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """query_tile, key_tile: tokens, powers of two that divide a plan's block. num_warps, num_stages: as Triton means them."""

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


def heavy_first(visits: Visits, batch: int, kv_heads: int) -> jax.Array:
    """i32[B * K], the pairs (entry, KV head) by descending number of visited blocks."""
    work = jnp.sum(visits.runs[..., 3].reshape(batch * kv_heads, -1), axis=1)
    return jnp.argsort(-work).astype(jnp.int32)


def row_statistics(out: jax.Array, lse: jax.Array, d_out: jax.Array, lengths: jax.Array, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """(lse2, delta), f32[B, N, T]: tokens are last, since dK/dV reads runs of them in every step.

    lse2 is the log-sum-exp in base 2, +inf where a row sees nothing, which makes its probabilities zero; delta is sum(out * d_out), the
    same as sum(p * dp).
    """
    queries = lse.shape[1]
    inside = (jnp.arange(num_keys - queries, num_keys) < lengths[:, None])[:, :, None]
    lse2 = jnp.where(inside & ~jnp.isneginf(lse), lse * LOG2_E, jnp.inf)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    return lse2.swapaxes(1, 2), delta.swapaxes(1, 2)
