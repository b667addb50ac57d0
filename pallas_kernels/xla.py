"""Block-wise attention in plain JAX: the CPU's implementation, and a portable one for any device.

Online softmax over key tiles, so no T x S array exists. A tile is several blocks; key tiles of which a query tile sees no block are
not visited, neither forward nor backward: the inner loop's trip count is the number of visited tiles. Inside a visited tile the mask
is applied by element. The G query heads of a KV head are rows of one matrix product, so K and V are never expanded.

Work is split in units (one batch entry, `_Tiling.heads` of its KV heads) that run one after another; inside a unit a scan over query
tiles. The heads of a unit walk the same key tiles, the union of what they see: on a CPU a unit is one KV head, and every head skips by
itself; elsewhere a unit is all heads of an entry, because few launches count for more there. A unit reads nothing of the others, so a
batch entry's result does not depend, to the bit, on the entries beside it.

The backward pass walks the same tiles once: p is computed again from the log-sum-exp, dq is summed over a query tile's key tiles, dk
and dv are summed in place in float32 buffers of one unit. No atomics, hence two runs give the same bits.

Letters beside those of `api`: u KV heads of a unit, X = G where the bitmap is per query head and 1 otherwise, r rows of a query tile
(G times its tokens), c columns of a key tile, R blocks of a query tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from elastic_jax.plan import BlockMask, see_blocks
from pallas_kernels import device
from pallas_kernels.call import Call

# Tokens of a tile. CPU: of 128, 256 and 512, 256 was the fastest forward + backward, full and streaming (2 EPYC cores, 8K tokens, 9/3
# heads, H=64, float32); forward alone full heads were 1.3 times faster with 512. Elsewhere a step is several kernel launches, so steps
# are few and large; 1024 is reasoned, not measured.
_CPU_TILE, _DEVICE_TILE = 256, 1024


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Statics. rows, cols: tokens of a query and of a key tile, whole blocks. heads: KV heads of a unit. dtype: of matrix operands."""

    rows: int
    cols: int
    heads: int
    group: int
    num_queries: int
    num_keys: int
    block: int
    sink_blocks: int
    local_blocks: int
    dtype: Any

    @classmethod
    def of(cls, call: Call) -> _Tiling:
        q, k, plan = call.q, call.k, call.plan
        # A CPU multiplies float32 as fast as bfloat16 and walks heads one by one, each with its own tiles. Elsewhere the operands stay
        # narrow for the tensor cores, and all KV heads of an entry share a step.
        cpu = device.platform() == "cpu"
        tile = _CPU_TILE if cpu else _DEVICE_TILE
        rows, cols = (max(plan.block_size, min(tile, x.shape[1]) // plan.block_size * plan.block_size) for x in (q, k))
        return cls(
            rows=rows,
            cols=cols,
            heads=1 if cpu else k.shape[2],
            group=q.shape[2] // k.shape[2],
            num_queries=q.shape[1],
            num_keys=k.shape[1],
            block=plan.block_size,
            sink_blocks=plan.sink_blocks,
            local_blocks=plan.local_blocks,
            dtype=jnp.float32 if cpu else q.dtype,
        )

    def dot(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        precision = "highest" if self.dtype == jnp.float32 else None  # a GPU's default for float32 is TF32
        return jnp.einsum(spec, a.astype(self.dtype), b.astype(self.dtype), precision=precision, preferred_element_type=jnp.float32)

    def key_tile(self, x: jax.Array, c: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, c * self.cols, self.cols, axis=1)

    def add_key_tile(self, x: jax.Array, c: jax.Array, update: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, self.key_tile(x, c) + update, c * self.cols, axis=1)


class _Unit(NamedTuple):
    """What a unit's query tiles read. `_units` gives every array a leading axis of units."""

    k: Any  # [u, S, H], S rounded up to key tiles
    v: Any
    mode: Any  # i8[u, 1, J]
    words: Any  # u32[u, X, J, W] or None
    first: Any  # i32[J]
    length: Any  # i32[]


class _Visits(NamedTuple):
    """The key tiles order[:num] that a query tile visits, and mask(scores [u, r, c], tile) -> scores, -inf where a key is not seen."""

    order: jax.Array
    num: jax.Array
    mask: Callable[[jax.Array, jax.Array], jax.Array]


def forward(call: Call) -> tuple[jax.Array, jax.Array]:
    t = _Tiling.of(call)

    def attend_unit(inputs):
        unit, queries = inputs

        def attend_tile(_, inputs):
            index, query = inputs
            visits = _visits(unit, index, t)

            def step(i, carry):
                peak, total, acc = carry
                c = visits.order[i]
                scores = visits.mask(t.dot("urH,ucH->urc", query, t.key_tile(unit.k, c)) * call.scale, c)
                new_peak = jnp.maximum(peak, scores.max(-1))
                shift = _finite(new_peak)
                p = jnp.exp(scores - shift[..., None])
                decay = jnp.exp(peak - shift)
                acc = acc * decay[..., None] + t.dot("urc,ucH->urH", p, t.key_tile(unit.v, c))
                return new_peak, total * decay + p.sum(-1), acc

            rows = query.shape[:2]
            start = (jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(query.shape, jnp.float32))
            peak, total, acc = jax.lax.fori_loop(0, visits.num, step, start)
            seen = total != 0  # NaN stays NaN
            total = jnp.where(seen, total, 1.0)
            return None, ((acc / total[..., None]).astype(call.q.dtype), jnp.where(seen, peak + jnp.log(total), -jnp.inf))

        return jax.lax.scan(attend_tile, None, (jnp.arange(queries.shape[0]), queries))[1]

    out, lse = jax.lax.map(attend_unit, (_units(call, t), _to_tiles(call.q.astype(t.dtype), t)))
    return _from_tiles(out, t, call.q.shape[0]), _from_tiles(lse, t, call.q.shape[0])


def backward(call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, scale = call.q, call.k, call.v, call.scale
    t = _Tiling.of(call)

    def unit_gradients(inputs):
        unit, tiles = inputs

        def tile_gradients(carry, inputs):
            index, query, out, lse, d_out = inputs
            visits = _visits(unit, index, t)
            shift = _finite(lse)[..., None]
            delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1, keepdims=True)
            d_out = d_out.astype(t.dtype)

            def step(i, carry):
                dq, dk, dv = carry
                c = visits.order[i]
                key, value = t.key_tile(unit.k, c), t.key_tile(unit.v, c)
                p = jnp.exp(visits.mask(t.dot("urH,ucH->urc", query, key) * scale, c) - shift)
                ds = p * (t.dot("urH,ucH->urc", d_out, value) - delta) * scale
                dq = dq + t.dot("urc,ucH->urH", ds, key)
                dk = t.add_key_tile(dk, c, t.dot("urc,urH->ucH", ds, query))
                dv = t.add_key_tile(dv, c, t.dot("urc,urH->ucH", p, d_out))
                return dq, dk, dv

            start = (jnp.zeros(query.shape, jnp.float32), *carry)
            dq, dk, dv = jax.lax.fori_loop(0, visits.num, step, start)
            return (dk, dv), dq.astype(q.dtype)

        zeros = jnp.zeros(unit.k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(tile_gradients, (zeros, zeros), (jnp.arange(tiles[0].shape[0]), *tiles))
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    tiles = tuple(_to_tiles(x, t) for x in (q.astype(t.dtype), out, lse, d_out))
    dq, dk, dv = jax.lax.map(unit_gradients, (_units(call, t), tiles))
    return _from_tiles(dq, t, q.shape[0]), _from_units(dk, k.shape), _from_units(dv, v.shape)


def _finite(x: jax.Array) -> jax.Array:
    """0 for -inf: the maximum or log-sum-exp of rows that see nothing (yet), where -inf - -inf would be NaN."""
    return jnp.where(jnp.isneginf(x), 0.0, x)


def _visits(unit: _Unit, index: jax.Array, t: _Tiling) -> _Visits:
    """Of the query tile number `index`."""
    tile_blocks = t.cols // t.block
    num_tiles = unit.k.shape[1] // t.cols
    row = (t.num_keys - t.num_queries + index * t.rows) // t.block + jnp.arange(t.rows // t.block)
    table = jnp.minimum(row, unit.first.shape[0] - 1)  # rows past the tables pad the last query tile and lie beyond every length
    words = None if unit.words is None else unit.words[:, :, table]
    visible = see_blocks(unit.mode[:, :, table], row, unit.first[table], words, num_tiles * tile_blocks, t.sink_blocks, t.local_blocks)
    visible &= (row * t.block < unit.length)[:, None]  # [u, X, R, J]
    visited = visible.reshape(-1, num_tiles, tile_blocks).any(axis=(0, 2))

    position = row[:, None] * t.block + jnp.arange(t.block)
    last_key = jnp.where(position < unit.length, position, -1)[..., None, None]

    def mask(scores: jax.Array, c: jax.Array) -> jax.Array:
        blocks = jax.lax.dynamic_slice_in_dim(visible, c * tile_blocks, tile_blocks, axis=3)
        key = (c * t.cols + jnp.arange(t.cols)).reshape(tile_blocks, t.block)
        seen = blocks[:, :, :, None, :, None] & (key <= last_key)
        split = scores.reshape(t.heads, t.group, t.rows // t.block, t.block, tile_blocks, t.block)
        return jnp.where(seen, split, -jnp.inf).reshape(scores.shape)

    return _Visits(jnp.nonzero(visited, size=num_tiles)[0], jnp.sum(visited, dtype=jnp.int32), mask)


def _units(call: Call, t: _Tiling) -> _Unit:
    batch, length, kv_heads, dim = call.k.shape
    per_entry = kv_heads // t.heads
    pad = -length % t.cols

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(t.dtype), ((0, 0), (0, pad), (0, 0), (0, 0))).swapaxes(1, 2)
        return x.reshape(batch * per_entry, t.heads, length + pad, dim)

    words = None
    if call.plan.blocks is not None:
        words = call.plan.blocks.bitmap  # u32[B, K or N, J, W]
        more = -(-(length + pad) // (t.block * BlockMask.WORD)) - words.shape[-1]
        words = jnp.pad(words, ((0, 0), (0, 0), (0, 0), (0, more)))
        words = words.reshape(batch * per_entry, t.heads, -1, *words.shape[2:])
    return _Unit(
        k=split(call.k),
        v=split(call.v),
        mode=call.plan.mode.swapaxes(1, 2).reshape(batch * per_entry, t.heads, 1, -1),
        words=words,
        first=jnp.repeat(call.first_block, per_entry, axis=0),
        length=jnp.repeat(call.lengths, per_entry),
    )


def _from_units(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[units, u, S rounded up to tiles, H] to `shape` = [B, S, K, H]."""
    batch, length, kv_heads, dim = shape
    return x.reshape(batch, kv_heads, -1, dim).swapaxes(1, 2)[:, :length]


def _to_tiles(x: jax.Array, t: _Tiling) -> jax.Array:
    """[B, T, N, ...] to [units, query tiles, u, r, ...]."""
    batch, length, heads, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -length % t.rows)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, -1, t.rows, heads // (t.heads * t.group), t.heads, t.group, *rest)
    x = jnp.moveaxis(x, (1, 2, 3, 4, 5), (2, 5, 1, 3, 4))
    return x.reshape(-1, x.shape[2], t.heads, t.group * t.rows, *rest)


def _from_tiles(x: jax.Array, t: _Tiling, batch: int) -> jax.Array:
    """The inverse of `_to_tiles`."""
    _, tiles, _, _, *rest = x.shape
    x = x.reshape(batch, -1, tiles, t.heads, t.group, t.rows, *rest)
    x = jnp.moveaxis(x, (2, 5, 1, 3, 4), (1, 2, 3, 4, 5))
    return x.reshape(batch, tiles * t.rows, -1, *rest)[:, : t.num_queries]
