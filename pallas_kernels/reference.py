"""The definition of correct: float32, one dense mask, O(T S) memory. Gradients by JAX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from elastic_jax.plan import visible_blocks
from pallas_kernels.call import Call


def element_mask(call: Call) -> jax.Array:
    """bool[B, N, T, S]: which keys each query sees."""
    _, num_queries, num_heads, _ = call.q.shape
    num_keys, size = call.k.shape[1], call.plan.block_size
    blocks = visible_blocks(call.plan, num_queries // size, num_keys // size, call.first_block)  # [B, K or N, Q, J]
    blocks = jnp.repeat(blocks, num_heads // blocks.shape[1], axis=1)
    tokens = jnp.repeat(jnp.repeat(blocks, size, axis=2), size, axis=3)
    query = jnp.arange(num_keys - num_queries, num_keys)[:, None]
    causal = (jnp.arange(num_keys) <= query) & (query < call.lengths[:, None, None, None])
    return tokens & causal


def forward(call: Call) -> tuple[jax.Array, jax.Array]:
    q, mask = call.q, element_mask(call)
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (call.k, call.v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q.astype(jnp.float32), k, precision="highest") * call.scale
    scores = jnp.where(mask, scores, -jnp.inf)
    # Rows that see nothing have lse -inf; subtracting 0 there keeps exp(-inf) = 0 instead of NaN, forward and backward.
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True, where=mask)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))
    out = jnp.einsum("BNTS,BSNH->BTNH", p, v, precision="highest")
    return out.astype(q.dtype), lse[..., 0].swapaxes(1, 2)


def backward(call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    del out, lse  # the reference recomputes everything
    inputs = (call.q, call.k, call.v)
    primals = (x.astype(jnp.float32) for x in inputs)
    _, pullback = jax.vjp(lambda q, k, v: forward(dataclasses.replace(call, q=q, k=k, v=v))[0], *primals)
    dq, dk, dv = (dx.astype(x.dtype) for dx, x in zip(pullback(d_out.astype(jnp.float32)), inputs))
    return dq, dk, dv
