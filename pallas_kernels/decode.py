"""Attention of one new token per sequence over a paged cache in which every KV head keeps pages of its own.

Axis letters: B sequences, N query heads, K KV heads, G = N / K, H head dim, P pages of the pool, M slots of a row of the page table.
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import device
from pallas_kernels.checks import BLOCK_SIZES, DTYPES, expect, expect_array

Implementation = Literal["reference", "xla", "triton"]

# Tokens per step of the plain implementation, whatever M is, so that a row's sums do not depend on M.
_CHUNK = 1024


def paged_decode_attention(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    used: jax.Array,
    newest: jax.Array,
    newest_tokens: jax.Array,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention of query head n of a sequence over the pages of KV head n // G, softmax in float32.

    The pages of a row may be in any order: keys carry their positions. What no row sees may hold anything, NaN included.
    "xla" and "triton" give a row the same bits whatever M and the other rows are, on one device.

    Args:
      q: [B, N, H] in bfloat16, float16 or float32.
      key_pages, value_pages: [P, page, H] in q's dtype; page is a power of two from 16 to 4096.
      table: i32[B, K, M], the page of each slot. Slots from `used` on are not read.
      used: i32[B, K], how many leading slots of a row hold pages, 0 to M. Rows of 0 give 0.
      newest: i32[B, K], the slot, below `used`, of the page that is being filled.
      newest_tokens: i32[B], tokens in that page, 1 to page, the new one included; all other used slots are full.
      scale: factor of the scores, None: H ** -0.5.
      implementation: None is "triton" where it can run, else "xla". "triton" needs a CUDA GPU of compute capability 8.0 (Ampere) or
        newer, H of 64 or 128, and at most 64 query heads per KV head. "reference" gathers all M pages of every row at once.

    Returns:
      [B, N, H] in q's dtype.

    Raises:
      ValueError: an argument does not fit the others; the text names it, its value and what is accepted. Values inside table, used,
        newest and newest_tokens are checked where they are known, which under jit they are not.
      NotImplementedError: the implementation asked for cannot run the call on this device; the text says why.
    """
    _check(q, key_pages, value_pages, table, used, newest, newest_tokens, scale)
    name = _choose(q, table, implementation)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    table, used, newest, newest_tokens = (jnp.asarray(x, jnp.int32) for x in (table, used, newest, newest_tokens))
    if name == "triton":
        from pallas_kernels.decode_triton import attend  # not at the top: JAX will drop what it is written in
    else:
        attend = {"reference": _reference, "xla": _xla}[name]
    return attend(q, key_pages, value_pages, table, used, newest, newest_tokens, scale=factor)


def _choose(q: jax.Array, table: jax.Array, implementation: Implementation | None) -> str:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation={implementation!r}: accepted are None, {', '.join(get_args(Implementation))}")
    obstacle = _triton_obstacle(q, table)
    if implementation == "triton" and obstacle is not None:
        raise NotImplementedError(f"implementation='triton' needs {obstacle}; accepted for this call are None, reference, xla")
    return implementation or ("xla" if obstacle else "triton")


def _triton_obstacle(q: jax.Array, table: jax.Array) -> str | None:
    if (obstacle := device.cuda_obstacle()) is not None:
        return obstacle
    if q.shape[-1] not in (64, 128):
        return f"H of 64 or 128, and q has {q.shape[-1]}"
    if (group := q.shape[1] // table.shape[1]) > 64:
        return f"at most 64 query heads per KV head, and these are {group}"
    return None


def _reference(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    used: jax.Array,
    newest: jax.Array,
    newest_tokens: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    batch, heads, head_dim = q.shape
    kv_heads = table.shape[1]
    visible = _visible(jnp.arange(table.shape[2]), used[..., None], newest[..., None], newest_tokens[:, None, None], key_pages.shape[1])
    keys, values = (x.at[table].get(mode="clip").astype(jnp.float32) for x in (key_pages, value_pages))  # [B, K, M, page, H]
    values = jnp.where(visible[..., None], values, 0)  # a probability of 0 times NaN is NaN
    query = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("bkgh,bkmth->bkgmt", query, keys, precision="highest") * scale
    p = jax.nn.softmax(scores, axis=(-2, -1), where=visible[:, :, None])
    return jnp.einsum("bkgmt,bkmth->bkgh", p, values, precision="highest").reshape(q.shape).astype(q.dtype)


def _xla(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    used: jax.Array,
    newest: jax.Array,
    newest_tokens: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Online softmax over chunks of a row's used slots. On a CPU rows run one after another, each as long as it is; elsewhere all
    together, because few launches count for more there."""
    batch, heads, head_dim = q.shape
    kv_heads = table.shape[1]
    group, page = heads // kv_heads, key_pages.shape[1]
    slots = max(1, _CHUNK // page)

    def attend_row(row: tuple[jax.Array, ...]) -> jax.Array:
        query, table, used, newest, newest_tokens = row

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, acc = carry
            slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
            visible = _visible(slot, used, newest, newest_tokens, page).reshape(-1)
            # XLA's CPU compiler would convert a whole bfloat16 pool to float32, ahead of the loop (jax 0.10).
            pages, *pools = jax.lax.optimization_barrier((table.at[slot].get(mode="clip"), key_pages, value_pages))
            keys, values = (x.at[pages].get(mode="clip").reshape(-1, head_dim).astype(jnp.float32) for x in pools)
            scores = jnp.where(visible, jnp.einsum("gh,th->gt", query, keys, precision="highest") * scale, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            p = jnp.exp(scores - new_peak[:, None])
            decay = jnp.exp(peak - new_peak)
            values = jnp.where(visible[:, None], values, 0)
            acc = acc * decay[:, None] + jnp.einsum("gt,th->gh", p, values, precision="highest")
            return new_peak, total * decay + jnp.sum(p, axis=1), acc

        lowest = jnp.finfo(jnp.float32).min  # not -inf, of which the difference to itself is NaN
        start = (jnp.full((group,), lowest, jnp.float32), jnp.zeros((group,), jnp.float32), jnp.zeros((group, head_dim), jnp.float32))
        _, total, acc = jax.lax.fori_loop(0, (used + slots - 1) // slots, step, start)
        return acc / jnp.where(total > 0, total, 1)[:, None]

    rows = (
        q.reshape(batch * kv_heads, group, head_dim).astype(jnp.float32),
        table.reshape(batch * kv_heads, -1),
        used.reshape(-1),
        newest.reshape(-1),
        jnp.repeat(newest_tokens, kv_heads),
    )
    out = jax.lax.map(attend_row, rows) if device.platform() == "cpu" else jax.vmap(attend_row)(rows)
    return out.reshape(q.shape).astype(q.dtype)


def _visible(slot: jax.Array, used: jax.Array, newest: jax.Array, newest_tokens: jax.Array, page: int) -> jax.Array:
    """bool[..., slots, page]: the tokens of each slot that the new one sees."""
    tokens = jnp.where(slot == newest, newest_tokens, page)
    return jnp.arange(page) < jnp.where(slot < used, tokens, 0)[..., None]


def _check(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    used: jax.Array,
    newest: jax.Array,
    newest_tokens: jax.Array,
    scale: float | None,
) -> None:
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    tables = {"table": table, "used": used, "newest": newest, "newest_tokens": newest_tokens}
    for name, x in ({"q": q} | pools | tables).items():
        expect_array(name, x)
    for name, x, axes in (
        ("q", q, "[B, N, H]"),
        ("key_pages", key_pages, "[P, page, H]"),
        ("value_pages", value_pages, "[P, page, H]"),
        ("table", table, "[B, K, M]"),
    ):
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: accepted are arrays {axes}, none of the axes empty")
    for name, x in ({"q": q} | pools).items():
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            accepted = ", ".join(jnp.dtype(d).name for d in DTYPES)
            raise ValueError(f"{name} has dtype {x.dtype}: accepted are {accepted}, the same for q, key_pages and value_pages")
    for name, x in tables.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}: accepted are integers")
    batch, heads, head_dim = q.shape
    pages, page, _ = key_pages.shape
    kv_heads, slots = table.shape[1:]
    if page not in BLOCK_SIZES or key_pages.shape[2] != head_dim:
        accepted = f"(P, page, {head_dim}), page a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
        raise ValueError(f"key_pages has shape {key_pages.shape}: for q of shape {q.shape} accepted is {accepted}")
    expect("value_pages", value_pages.shape, [key_pages.shape])
    if table.shape[0] != batch or heads % kv_heads:
        raise ValueError(f"table has shape {table.shape}: for q of shape {q.shape} accepted is ({batch}, K, M), K a divisor of {heads}")
    expect("used", used.shape, [(batch, kv_heads)])
    expect("newest", newest.shape, [(batch, kv_heads)])
    expect("newest_tokens", newest_tokens.shape, [(batch,)])
    if scale is not None and not (isinstance(scale, numbers.Real) and 2.0**-126 <= scale < 2.0**128):
        raise ValueError(f"scale={scale!r}: accepted are None and Python numbers above 0 that float32 can hold")
    _check_values({name: None if isinstance(x, Tracer) else np.asarray(x) for name, x in tables.items()}, pages, page, slots)


def _check_values(known: dict[str, Any], pages: int, page: int, slots: int) -> None:
    """Of those arrays whose values are known now, which those of a jitted function are not."""
    table, used, newest, newest_tokens = (known[name] for name in ("table", "used", "newest", "newest_tokens"))
    if used is None:
        return
    if (wrong := (used < 0) | (used > slots)).any():
        raise ValueError(f"used holds {used[wrong][0]}: accepted are 0 to {slots}, the slots of a row of the table")
    if table is not None and (wrong := (np.arange(slots) < used[..., None]) & ((table < 0) | (table >= pages))).any():
        raise ValueError(f"table holds {table[wrong][0]} in a used slot: accepted are 0 to {pages - 1}, the pages of the pool")
    if newest is not None and (wrong := (used > 0) & ((newest < 0) | (newest >= used))).any():
        raise ValueError(f"newest holds {newest[wrong][0]} where used is {used[wrong][0]}: accepted are 0 to used - 1")
    if newest_tokens is not None and (wrong := (used > 0).any(1) & ((newest_tokens < 1) | (newest_tokens > page))).any():
        raise ValueError(f"newest_tokens holds {newest_tokens[wrong][0]}: accepted are 1 to {page}, the tokens of a page")
