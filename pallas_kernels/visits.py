"""What a plan means to a kernel: which blocks each row of blocks walks, in ascending order, from either side.

The forward pass and dQ walk the key blocks of each query block; dK/dV walks the query blocks of each key block. FULL and STREAMING rows
are at most two runs of consecutive blocks; BLOCK_SPARSE rows are lists of set bits. A kernel needs no more than the tables below, so
modes, packed documents and lengths are unknown to it, except for the mask inside the diagonal block.

Letters: B batch, h heads of the tables (K, or N where the bitmap is per query head), R rows, Q/J query/key blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask
from pallas_kernels.call import Call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visits:
    """The walk of every row: step s = 0 .. count - 1 visits

        start + s               while s < length,
        second + s - length     from there on,
        the s-th set bit        of a row whose length is -1.

    Set bits come as words that hold 16 of them: a word w stands for the blocks 16 (w >> 16) + i, i < 16 a set bit of w; words without
    set bits are left out, so that one look at the next word always finds a block.

    Attributes:
      runs: i32[B, h, R, 5], (start, length, second, count, diagonal); diagonal is 1 where the row's own block is among them.
      words: i32[B, h, R, ceil(blocks / 32) * 2], a row's words in ascending order, then zeros. None: no row has length -1. Signed
        because kernels compute so; the sign bit stays clear below half a million blocks.
    """

    runs: Any
    words: Any = None


def query_visits(call: Call) -> Visits:
    """The key blocks of each query block. Rows that lie beyond `lengths` walk nothing."""
    plan, blocks = call.plan, call.first_block.shape[1]
    row = jnp.arange(blocks - call.q.shape[1] // plan.block_size, blocks)
    mode, first = plan.mode[:, row].swapaxes(1, 2), call.first_block[:, None, row]  # [B, K, Q], [B, 1, Q]
    streaming = mode == HeadMode.STREAMING
    sink_end = jnp.minimum(first + plan.sink_blocks, row + 1)
    second = jnp.where(streaming, jnp.maximum(sink_end, row - plan.local_blocks + 1), first)
    length = jnp.where(streaming, sink_end - first, 0)
    inside = row * plan.block_size < call.lengths[:, None, None]
    count = jnp.where(inside, length + row + 1 - second, 0)
    bitmap = None
    if plan.blocks is not None:
        bitmap = plan.blocks.bitmap[:, :, row] & _between(first, jnp.where(inside, row, -1), blocks)
    return _visits(mode, row, first, length, second, count, bitmap)


def key_visits(call: Call) -> Visits:
    """The query blocks of each key block, counted from the first query block."""
    plan, first_block, blocks = call.plan, call.first_block, call.first_block.shape[1]
    num_query_blocks = call.q.shape[1] // plan.block_size
    offset = blocks - num_query_blocks
    key = jnp.arange(blocks)
    mode, first = plan.mode.swapaxes(1, 2), first_block[:, None]  # [B, K, J], [B, 1, J]: the queries of a key have its document's mode
    end = jnp.sum(first_block[:, None, :] <= key[:, None], axis=-1)[:, None] - 1  # last block of the document
    end = jnp.minimum(end, (call.lengths[:, None, None] - 1) // plan.block_size) - offset
    start = jnp.broadcast_to(jnp.maximum(key - offset, 0), end.shape)
    local = (mode == HeadMode.STREAMING) & (key >= first + plan.sink_blocks)
    last = jnp.where(local, jnp.minimum(end, key + plan.local_blocks - 1 - offset), end)
    bitmap = None
    if plan.blocks is not None:
        bitmap = _transpose(plan.blocks.bitmap[:, :, offset:])[:, :, :blocks] & _between(start, end, num_query_blocks)
    return _visits(mode, key - offset, start, 0, start, last - start + 1, bitmap)


def _visits(
    mode: jax.Array, own: jax.Array, start: jax.Array, length: Any, second: jax.Array, count: jax.Array, bitmap: jax.Array | None
) -> Visits:
    """Of runs as given, and of `bitmap` where the mode is BLOCK_SPARSE. All broadcast to mode i8[B, K, R]; own: i32[R]."""
    listed = mode == HeadMode.BLOCK_SPARSE
    count = jnp.where(listed, 0, jnp.maximum(count, 0))
    fields = [start, jnp.where(listed, 0 if bitmap is None else -1, length), second, count, (count > 0) & (own >= 0)]
    fields = [jnp.broadcast_to(x, mode.shape).astype(jnp.int32) for x in fields]
    words = None
    if bitmap is not None:
        fields = [jnp.repeat(x, bitmap.shape[1] // mode.shape[1], axis=1) for x in fields]
        listed = fields[1] < 0
        fields[3] = jnp.where(listed, jnp.sum(jax.lax.population_count(bitmap), axis=-1).astype(jnp.int32), fields[3])
        diagonal = jnp.where(own >= 0, jnp.sum(bitmap & _between(own, own, bitmap.shape[-1] * BlockMask.WORD), axis=-1), 0) != 0
        fields[4] = jnp.where(listed, diagonal.astype(jnp.int32), fields[4])
        words = _compact(bitmap)
    return Visits(runs=jnp.stack(fields, axis=-1), words=words)


def _between(low: jax.Array, high: jax.Array, blocks: int) -> jax.Array:
    """u32[..., W]: the bits low .. high, both inclusive."""
    bits = jnp.arange(-(-blocks // BlockMask.WORD) * BlockMask.WORD)
    inside = (bits >= low[..., None]) & (bits <= high[..., None])
    return BlockMask.from_dense(inside).bitmap


def _compact(bitmap: jax.Array) -> jax.Array:
    """u32[..., W] of 32 bits to the words of `Visits`, i32[..., 2 W]."""
    halves = jnp.stack([bitmap & 0xFFFF, bitmap >> 16], axis=-1).reshape(*bitmap.shape[:-1], -1)
    index = jnp.arange(halves.shape[-1], dtype=jnp.uint32)
    # The words carry their index above their bits, so they are in order once empty ones compare as larger than all others.
    words = jnp.where(halves == 0, jnp.uint32(0xFFFFFFFF), halves | (index << 16))
    words = jnp.sort(words, axis=-1)
    return jnp.where(words == jnp.uint32(0xFFFFFFFF), 0, words).astype(jnp.int32)


def _transpose(bitmap: jax.Array) -> jax.Array:
    """Bits u32[B, h, Q, W] seen from the other side, u32[B, h, 32 W, ceil(Q / 32)], without unpacking them."""
    batch, heads, rows, width = bitmap.shape
    word = BlockMask.WORD
    tiles = jnp.pad(bitmap, ((0, 0), (0, 0), (0, -rows % word), (0, 0))).reshape(batch, heads, -1, word, width)
    # A 32 x 32 bit matrix is transposed by exchanging, at each scale, the off-diagonal quarters of its blocks.
    for size in (16, 8, 4, 2, 1):
        split = tiles.reshape(*tiles.shape[:3], word // (2 * size), 2, size, width)
        mask = jnp.uint32(sum(1 << i for i in range(word) if not i & size))
        upper, lower = split[:, :, :, :, 0], split[:, :, :, :, 1]
        upper, lower = (upper & mask) | ((lower & mask) << size), (lower & ~mask) | ((upper & ~mask) >> size)
        tiles = jnp.stack([upper, lower], axis=4).reshape(tiles.shape)
    return jnp.moveaxis(tiles, 2, -1).swapaxes(2, 3).reshape(batch, heads, width * word, -1)
