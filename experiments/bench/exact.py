"""Exact attention in float32, what every result is held against: some rows of it at any length, and gradients of short sequences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROWS = 128  # query blocks that are checked
_ROWS_TIMES_TOKENS = 2**23  # and this at most, so that from 64K tokens on a check costs the same
_TILE = 8192  # keys whose scores are held at once


def checked_rows(tokens: int, block_size: int) -> np.ndarray:
    """i32[R], the query blocks that are checked, evenly spread from the first to the last: all up to 16K tokens in blocks of 128, 128 up
    to 64K, 8 at 1M."""
    blocks = tokens // block_size
    count = min(blocks, _ROWS, max(2, _ROWS_TIMES_TOKENS // tokens))
    return np.unique(np.linspace(0, blocks - 1, count).astype(np.int32))


@functools.partial(jax.jit, static_argnames="block_size")
def take_rows(x: jax.Array, rows: jax.Array, *, block_size: int) -> jax.Array:
    """f32[R, block_size, N, H] of x [1, T, N, H]. Jitted, since a reshape by itself would copy x."""
    return x.reshape(-1, block_size, *x.shape[2:])[rows].astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="block_size")
def forward_rows(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, rows: jax.Array, *, block_size: int) -> jax.Array:
    """f32[R, block_size, N, H]: the query blocks `rows`, one block and KV head at a time, in tiles of keys: memory does not grow with T.

    Args:
      q: [1, T, N, H], k and v: [1, T, K, H]. visible: bool[N, R, J], of each of the rows; the diagonal block is always seen.
    """
    tokens, kv_heads, dim = k.shape[1:]
    group, count = q.shape[2] // kv_heads, rows.shape[0]
    tile = min(tokens, max(1, _TILE // block_size) * block_size)
    queries = take_rows(q, rows, block_size=block_size).reshape(count, block_size, kv_heads, group, dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(-1, group, block_size, dim)  # [R K, G, size, H]
    seen = visible.reshape(kv_heads, group, count, -1).transpose(2, 0, 1, 3).reshape(-1, group, visible.shape[2])  # [R K, G, J]

    def one(inputs: Any) -> jax.Array:
        row, head, query, blocks = inputs
        position = row * block_size + jnp.arange(block_size)[:, None]

        def step(i: jax.Array, sums: Any) -> Any:
            peak, total, acc = sums
            start = jnp.minimum(i * tile, tokens - tile)  # the last tile overlaps the one before, whose keys are masked
            cut = lambda x: jax.lax.dynamic_slice(x, (0, start, head, 0), (1, tile, 1, dim))[0, :, 0].astype(jnp.float32)
            key = start + jnp.arange(tile)
            listed = jax.lax.dynamic_slice_in_dim(blocks, start // block_size, tile // block_size, axis=1)
            mask = jnp.repeat(listed, block_size, axis=1)[:, None] & (key <= position) & (key >= i * tile)
            scores = jnp.einsum("GTH,SH->GTS", query, cut(k), precision="highest") * dim**-0.5
            scores = jnp.where(mask, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(-1))
            shift = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
            p, decay = jnp.exp(scores - shift[..., None]), jnp.exp(peak - shift)
            acc = acc * decay[..., None] + jnp.einsum("GTS,SH->GTH", p, cut(v), precision="highest")
            return new_peak, total * decay + p.sum(-1), acc

        start = (jnp.full(query.shape[:2], -jnp.inf), jnp.zeros(query.shape[:2]), jnp.zeros(query.shape))
        _, total, acc = jax.lax.fori_loop(0, row * block_size // tile + 1, step, start)
        return acc / total[..., None]

    out = jax.lax.map(one, (jnp.repeat(rows, kv_heads), jnp.tile(jnp.arange(kv_heads), count), queries, seen))
    return out.reshape(count, -1, block_size, dim).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames="block_size")
def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, visible: jax.Array, *, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 (dq, dk, dv), one query block and KV head at a time with all of its keys; visible bool[K, Q, J]."""
    kv_heads = k.shape[2]
    # [1, T, N, H] to [K, Q, size, G, H]
    split = lambda x: x.reshape(-1, block_size, kv_heads, x.shape[2] // kv_heads, x.shape[3]).transpose(2, 0, 1, 3, 4)
    q_blocks, d_blocks = split(q), split(d_out)

    def one_head(head: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        k_head, v_head = (x[0, :, head].astype(jnp.float32) for x in (k, v))

        def one_block(sums: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            attend = functools.partial(_attend_block, row=row, visible=visible[head, row])
            _, pullback = jax.vjp(attend, q_blocks[head, row].astype(jnp.float32), k_head, v_head)
            dq, dk, dv = pullback(d_blocks[head, row].astype(jnp.float32))
            return (sums[0] + dk, sums[1] + dv), dq

        nothing = jnp.zeros_like(k_head)
        (dk, dv), dq = jax.lax.scan(one_block, (nothing, nothing), jnp.arange(q_blocks.shape[1]))
        return dq, dk, dv

    dq, dk, dv = jax.lax.map(one_head, jnp.arange(kv_heads))  # [K, Q, size, G, H], [K, S, H] twice
    return dq.transpose(1, 2, 0, 3, 4).reshape(q.shape), dk.swapaxes(0, 1)[None], dv.swapaxes(0, 1)[None]


def relative_error(actual: jax.Array, exact: jax.Array) -> float:
    """|actual - exact| / |exact|, by the norms of all elements."""
    actual = actual.astype(jnp.float32)
    return float(jnp.linalg.norm((actual - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def _attend_block(q: jax.Array, k: jax.Array, v: jax.Array, row: Any, visible: jax.Array) -> jax.Array:
    """f32[size, G, H] of one query block and KV head. q f32[size, G, H], k and v f32[S, H], visible bool[J]: the row of the block mask."""
    size = q.shape[0]
    query, key = row * size + jnp.arange(size)[:, None], jnp.arange(k.shape[0])
    mask = jnp.repeat(visible, size) & (key <= query)
    scores = jnp.einsum("TGH,SH->GTS", q, k, precision="highest") * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("GTS,SH->TGH", p, v, precision="highest")
