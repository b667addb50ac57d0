"""What the GPU kernels share: all that is not kernel code."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Kernel = Literal["forward", "dq", "dkv"]
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """query_tile, key_tile: tokens, powers of two that divide a plan's block. num_warps, num_stages: as Triton means them."""

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


def heaviest_first(work: jax.Array) -> jax.Array:
    """i32[n]: the indices of i32[n] by descending value; for the few hundred heads of a launch, without the launches of a sort."""
    index = jnp.arange(work.shape[0])
    before = (work > work[:, None]) | ((work == work[:, None]) & (index < index[:, None]))
    rank = jnp.sum(before, axis=1)
    return jnp.sum(jnp.where(rank == index[:, None], index, 0), axis=1).astype(jnp.int32)


def row_statistics(out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lse2, delta), f32[B, N, T]: tokens are last, since dK/dV reads runs of them in every step.

    lse2 is the log-sum-exp in base 2, +inf where a row sees nothing, which makes its probabilities zero; delta is sum(out * d_out), the
    same as sum(p * dp).
    """
    lse2 = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    return lse2.swapaxes(1, 2), delta.swapaxes(1, 2)
