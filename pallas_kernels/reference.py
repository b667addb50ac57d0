"""The definition of correct: float32, one dense mask, O(T S) memory. Gradients by JAX.

Like every implementation it is called by `api` with padded arrays and checked arguments, see `api._Kernel`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from elastic_jax.plan import HeadPlan, visible_blocks


def element_mask(plan: HeadPlan, lengths: jax.Array, first_block: jax.Array, num_queries: int, num_keys: int, num_heads: int) -> jax.Array:
    """bool[B, N, T, S]: which keys each query sees."""
    size = plan.block_size
    blocks = visible_blocks(plan, num_queries // size, num_keys // size, first_block)  # [B, K or N, Q, J]
    blocks = jnp.repeat(blocks, num_heads // blocks.shape[1], axis=1)
    tokens = jnp.repeat(jnp.repeat(blocks, size, axis=2), size, axis=3)
    query = jnp.arange(num_keys - num_queries, num_keys)[:, None]
    causal = (jnp.arange(num_keys) <= query) & (query < lengths[:, None, None, None])
    return tokens & causal


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, lengths: jax.Array, first_block: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    heads = q.shape[2]
    mask = element_mask(plan, lengths, first_block, q.shape[1], k.shape[1], heads)
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q.astype(jnp.float32), k, precision="highest") * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    # Rows that see nothing have lse -inf; subtracting 0 there keeps exp(-inf) = 0 instead of NaN, forward and backward.
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True, where=mask)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))
    out = jnp.einsum("BNTS,BSNH->BTNH", p, v, precision="highest")
    return out.astype(q.dtype), lse[..., 0].swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    plan: HeadPlan,
    lengths: jax.Array,
    first_block: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del out, lse  # the reference recomputes everything
    primals = tuple(x.astype(jnp.float32) for x in (q, k, v))
    _, pullback = jax.vjp(lambda q, k, v: forward(q, k, v, plan, lengths, first_block, scale=scale)[0], *primals)
    dq, dk, dv = pullback(d_out.astype(jnp.float32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
