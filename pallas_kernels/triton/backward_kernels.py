"""The backward kernels: dQ by tiles of queries, dK and dV by tiles of keys. Every sum stays inside one program, so there are no atomics
and two runs give the same bits.

Both compute the probabilities again from q, k and the log-sum-exp, p = exp2(scale log2(e) q k - lse2), and need lse2 and delta
of `common.row_statistics`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.call import Call
from pallas_kernels.common import LOG2_E, heaviest_first
from pallas_kernels.triton import configs
from pallas_kernels.triton._compat import CompilerParams
from pallas_kernels.triton.forward_kernel import QueryProgram, dot
from pallas_kernels.triton.walk import Row
from pallas_kernels.visits import key_visits, query_visits


def query_gradient(call: Call, d_out: jax.Array, lse2: jax.Array, delta: jax.Array, interpret: bool) -> jax.Array:
    """dq [B, T, N, H]; d_out is in q's dtype."""
    config, visits = configs.choose("dq", call), query_visits(call)
    batch, queries, heads, _ = call.q.shape
    kv_heads = call.k.shape[2]
    kernel = functools.partial(
        _dq_kernel, scale=call.scale, block_size=call.plan.block_size, query_tile=config.query_tile, key_tile=config.key_tile
    )
    tables = [
        heaviest_first(visits.runs[..., 3].reshape(batch * kv_heads, -1).sum(1)),
        visits.runs,
        *([] if visits.words is None else [visits.words]),
    ]
    return pl.pallas_call(
        kernel,
        grid=(queries // config.query_tile * (heads // kv_heads), batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct(call.q.shape, call.q.dtype),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="mixed_head_attention_dq",
    )(call.q, call.k, call.v, d_out, lse2, delta, *tables)


def _dq_kernel(q, k, v, d_out, lse2, delta, order, runs, *rest, scale: float, block_size: int, query_tile: int, key_tile: int):
    *words, dq = rest
    program = QueryProgram(q, k, order, runs, block_size, query_tile)
    row = Row.of(runs, words[0] if words else None, program.row, block_size // key_tile)
    factor = scale * LOG2_E
    query, d_output = q[program.queries], d_out[program.queries]
    per_row = (program.entry, program.head, pl.ds(program.first_query, query_tile))
    row_lse, row_delta = lse2[per_row][:, None], delta[per_row][:, None]

    def step(block: Any, part: Any, acc: Any, masked: bool) -> Any:
        at = program.keys(block * block_size + part * key_tile, key_tile)
        key = k[at]
        scores = dot(query, key, (1, 1)) * factor - row_lse
        if masked:
            scores = program.mask(scores, block * block_size + part * key_tile)
        dp = dot(d_output, v[at], (1, 1))
        ds = jnp.exp2(scores) * (dp - row_delta)
        return acc + dot(ds.astype(k.dtype), key, (1, 0))

    acc = program.walk(row, step, jnp.zeros(query.shape, jnp.float32), key_tile)
    dq[program.queries] = (acc * scale).astype(dq.dtype)


def key_gradients(call: Call, d_out: jax.Array, lse2: jax.Array, delta: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(dk, dv), both [B, S, K, H]; d_out is in q's dtype."""
    config, visits = configs.choose("dkv", call), key_visits(call)
    batch, keys, kv_heads, _ = call.k.shape
    kernel = functools.partial(
        _dkv_kernel, scale=call.scale, block_size=call.plan.block_size, query_tile=config.query_tile, key_tile=config.key_tile
    )
    tables = [
        heaviest_first(visits.runs[..., 3].reshape(batch * kv_heads, -1).sum(1)),
        visits.runs,
        *([] if visits.words is None else [visits.words]),
    ]
    return pl.pallas_call(
        kernel,
        # The first keys are seen by the most queries, those of a streaming head's sink by as many as a full head's: they start first,
        # of all heads, or one such program would outlast all others.
        grid=(batch * kv_heads, keys // config.key_tile),
        out_shape=(jax.ShapeDtypeStruct(call.k.shape, call.k.dtype), jax.ShapeDtypeStruct(call.v.shape, call.v.dtype)),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="mixed_head_attention_dkv",
    )(call.q, call.k, call.v, d_out, lse2, delta, *tables)


def _dkv_kernel(q, k, v, d_out, lse2, delta, order, runs, *rest, scale: float, block_size: int, query_tile: int, key_tile: int):
    *words, dk, dv = rest
    heads, kv_heads = q.shape[2], k.shape[2]
    group = heads // kv_heads
    head_of_entry = order[pl.program_id(0)]
    entry, kv_head = jax.lax.div(head_of_entry, jnp.int32(kv_heads)), jax.lax.rem(head_of_entry, jnp.int32(kv_heads))
    first_key = pl.program_id(1) * key_tile
    key_block = jax.lax.div(first_key, jnp.int32(block_size))
    offset = k.shape[1] - q.shape[1]  # tokens before the first query
    diagonal = key_block - offset // block_size
    keys = (entry, pl.ds(first_key, key_tile), kv_head, slice(None))
    key, value = k[keys], v[keys]
    factor = scale * LOG2_E

    def add_head(g: Any, carry: Any) -> Any:
        head = kv_head * group + g
        row = Row.of(runs, words[0] if words else None, (entry, kv_head if runs.shape[1] == kv_heads else head, key_block), parts)

        def step(block: Any, part: Any, carry: Any, masked: bool) -> Any:
            dk, dv = carry
            first_query = block * block_size + part * query_tile
            queries = (entry, pl.ds(first_query, query_tile), head, slice(None))
            per_row = (entry, head, pl.ds(first_query, query_tile))
            query, d_output = q[queries], d_out[queries]
            scores = dot(key, query, (1, 1)) * factor - lse2[per_row][None, :]
            if masked:
                position = first_query + offset + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                scores = jnp.where(first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) <= position, scores, -jnp.inf)
            p = jnp.exp2(scores)
            dv = dv + dot(p.astype(d_out.dtype), d_output, (1, 0))
            ds = p * (dot(value, d_output, (1, 1)) - delta[per_row][None, :])
            return dk + dot(ds.astype(q.dtype), query, (1, 0)), dv

        # Blocks ascend, so only a row's first can be the diagonal; of that one, only the tiles that end at or after the first key.
        cursor = row.begin()
        block = row.block(0, cursor)
        begin = jnp.where(block == diagonal, jax.lax.div(first_key & (block_size - 1), jnp.int32(query_tile)), 0)
        end = jnp.minimum(row.count, 1) * parts
        carry = jax.lax.fori_loop(begin, end, lambda part, carry: step(block, part, carry, masked=True), carry)
        return row.loop(1, row.count, functools.partial(step, masked=False), carry, row.advance(cursor))[0]

    parts = block_size // query_tile
    zeros = jnp.zeros(key.shape, jnp.float32)
    dk_sum, dv_sum = jax.lax.fori_loop(0, group, add_head, (zeros, zeros))
    dk[keys] = (dk_sum * scale).astype(dk.dtype)
    dv[keys] = dv_sum.astype(dv.dtype)
