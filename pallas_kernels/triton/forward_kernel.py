"""The forward kernel: one program per tile of queries of one head."""

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
from pallas_kernels.triton.walk import Row
from pallas_kernels.visits import query_visits


def attend(call: Call, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, H], lse f32[B, T, N])."""
    config, visits = configs.choose("forward", call), query_visits(call)
    batch, queries, heads, _ = call.q.shape
    kv_heads = call.k.shape[2]
    kernel = functools.partial(
        _kernel, scale=call.scale, block_size=call.plan.block_size, query_tile=config.query_tile, key_tile=config.key_tile
    )
    tables = [
        call.lengths,
        heaviest_first(visits.runs[..., 3].reshape(batch * kv_heads, -1).sum(1)),
        visits.runs,
        *([] if visits.words is None else [visits.words]),
    ]
    return pl.pallas_call(
        kernel,
        grid=(queries // config.query_tile * (heads // kv_heads), batch * kv_heads),
        out_shape=(jax.ShapeDtypeStruct(call.q.shape, call.q.dtype), jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32)),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="mixed_head_attention_forward",
    )(call.q, call.k, call.v, *tables)


def _kernel(q, k, v, lengths, order, runs, *rest, scale: float, block_size: int, query_tile: int, key_tile: int):
    *words, out, lse = rest
    program = QueryProgram(q, k, order, runs, block_size, query_tile)
    row = Row.of(runs, words[0] if words else None, program.row, block_size // key_tile)
    factor = scale * LOG2_E
    query = q[program.queries]

    def step(block: Any, part: Any, carry: Any, masked: bool) -> Any:
        peak, total, acc = carry
        at = program.keys(block * block_size + part * key_tile, key_tile)
        scores = dot(query, k[at], (1, 1))
        if masked:
            scores = program.mask(scores, block * block_size + part * key_tile)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * factor)
        p = jnp.exp2(scores * factor - new_peak[:, None])
        decay = jnp.exp2(peak - new_peak)
        acc = acc * decay[:, None] + dot(p.astype(v.dtype), v[at], (1, 0))
        return new_peak, total * decay + jnp.sum(p, axis=1), acc

    start = (jnp.full((query_tile,), -jnp.inf, jnp.float32), jnp.zeros((query_tile,), jnp.float32), jnp.zeros(query.shape, jnp.float32))
    peak, total, acc = program.walk(row, step, start, key_tile)
    # Rows beyond the length and rows that see nothing: outputs are uninitialised memory until written.
    seen = (total > 0) & (program.position() < lengths[program.entry])
    total = jnp.where(seen, total, 1.0)
    out[program.queries] = jnp.where(seen[:, None], acc / total[:, None], 0.0).astype(out.dtype)
    lse[program.queries[:3]] = jnp.where(seen, peak / LOG2_E + jnp.log(total), -jnp.inf)


class QueryProgram:
    """Which tile of queries a program of the forward or the dQ kernel has, and its walk over key tiles.

    The grid is (query tiles * G, B * K). Programs start in the order of the grid, so heads with the most work come first, and within a
    head the last queries, which see the most; the G heads that read the same keys are neighbours.
    """

    def __init__(self, q: Any, k: Any, order: Any, runs: Any, block_size: int, query_tile: int):
        heads, kv_heads = q.shape[2], k.shape[2]
        group = heads // kv_heads
        tile = q.shape[1] // query_tile - 1 - jax.lax.div(pl.program_id(0), jnp.int32(group))
        head_of_entry = order[pl.program_id(1)]
        self.entry = jax.lax.div(head_of_entry, jnp.int32(kv_heads))
        self.kv_head = jax.lax.rem(head_of_entry, jnp.int32(kv_heads))
        self.head = self.kv_head * group + jax.lax.rem(pl.program_id(0), jnp.int32(group))
        self.block_size, self.query_tile = block_size, query_tile
        self.first_query = tile * query_tile
        self.queries = (self.entry, pl.ds(self.first_query, query_tile), self.head, slice(None))
        block = jax.lax.div(self.first_query, jnp.int32(block_size))
        self.row = (self.entry, self.kv_head if runs.shape[1] == kv_heads else self.head, block)
        offset = k.shape[1] - q.shape[1]
        self.diagonal = block + offset // block_size
        self.first_position = self.first_query + offset

    def position(self) -> jax.Array:
        return self.first_position + jnp.arange(self.query_tile, dtype=jnp.int32)

    def keys(self, first: Any, key_tile: int) -> tuple[Any, ...]:
        return self.entry, pl.ds(first, key_tile), self.kv_head, slice(None)

    def mask(self, scores: jax.Array, first_key: Any) -> jax.Array:
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        return jnp.where(key <= self.position()[:, None], scores, -jnp.inf)

    def walk(self, row: Row, step: Any, carry: Any, key_tile: int) -> Any:
        """`carry = step(block, part, carry, masked)` over all tiles. Blocks ascend, so only a row's last can be the diagonal."""
        last = jnp.maximum(row.count - 1, 0)
        carry, cursor = row.loop(0, last, functools.partial(step, masked=False), carry, row.begin())
        block = row.block(last, cursor)
        # Of the diagonal block only the tiles that begin at or before the last query.
        offset = self.first_position & (self.block_size - 1)
        reached = jax.lax.div(offset + self.query_tile + key_tile - 1, jnp.int32(key_tile))
        parts = jnp.where(block == self.diagonal, reached, self.block_size // key_tile)
        parts = jnp.where(row.count > 0, parts, 0)
        return jax.lax.fori_loop(0, parts, lambda part, carry: step(block, part, carry, masked=True), carry)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a and b contracted over the given axes, summed in float32. float32 is multiplied as such, not as TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
