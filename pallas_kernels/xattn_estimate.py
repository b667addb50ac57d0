"""XAttention's estimate and selection as two Pallas-Triton kernels. The definition is `elastic_jax.sparsity.xattention` (Xu et al.
2025, arXiv 2503.16428).

Letters: B batch, T tokens, N query heads, K KV heads, G = N / K, H head dim, Q/J query/key blocks, s stride, c = block / s cells per
block, A = T / s cells of the whole sequence, R cells of the rows held at once, I cells of a row tile, U blocks of a key tile.

1. `_sum_kernel`, one program per tile of row cells x key cells of a query head: the product of the cell matrices (contracted over s H,
   read from q and k with strides, so nothing is copied), then without leaving registers the mask, each row's largest score inside the
   tile, exponentials relative to it and their sums over each key block. It leaves sums f32[B, N, R, J / U, U], peaks f32[B, N, R, J / U].
2. `_select_kernel`, one program per query block: brings the sums to the row's largest score, normalises each cell's row, adds the c
   cells, selects, and writes the bitmap's words.

Selection is in integers, so a sum does not depend on its order: a block's mass is counted in units of c 2^-30, rounded down; kept are
the two forced blocks and the fewest others, largest first and the lower column first among equals, whose units reach
min(total, ceil(threshold total)). `smallest_set` finds the least kept value by bisection, with no sort.

At T = 128K, 32/8 heads, H = 128, s = 16, blocks of 128: the products are 2 (8192^2 / 2) 2048 32 = 4.4 TFLOP, done once; a tile of
128 x 256 cells reads 1.5 MiB, mostly from L2, for 134 MFLOP. Sums are 1/8 of the scores, 0.5 GiB written and read once, in runs of rows
that take 256 MiB. That holds at any length: at 1M tokens a run is 256 row cells.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from elastic_jax.plan import BlockMask
from pallas_kernels import device
from pallas_kernels.common import LOG2_E
from pallas_kernels.triton._compat import CompilerParams, load

_SUM_BYTES = 2**28  # of float32 sums held at once
_ONE = 2**30  # units of a query block's whole mass: its c rows sum to c


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """Of the first kernel. row_tile, key_tile: cells, powers of two. depth: head dims per step of the product."""

    row_tile: int
    key_tile: int
    depth: int
    num_warps: int
    num_stages: int


def choose(dtype: Any, capability: tuple[int, int] | None) -> EstimateConfig:
    """capability: such as (9, 0), None where it is unknown."""
    if dtype == jnp.float32:
        return EstimateConfig(64, 64, 32, 4, 2)  # exact products do not run on tensor cores
    if capability == (9, 0):
        return EstimateConfig(128, 256, 64, 8, 3)
    return EstimateConfig(128, 128, 64, 8, 3)  # 96 KiB of shared memory: every GPU from Ampere on has it


def estimate(
    q: jax.Array,
    k: jax.Array,
    first_block: jax.Array,
    valid: jax.Array | None,
    needed: jax.Array,
    *,
    block_size: int,
    stride: int,
    threshold: float,
    interpret: bool = False,
) -> jax.Array:
    """The bitmap of `estimate_blocks`, u32[B, N, Q, ceil(Q / 32)]; zeros for heads that are not needed.

    Args:
      q: [B, T, N, H], k: [B, T, K, H], one of bfloat16, float16, float32 (whose products are exact).
      block_size, stride: powers of two, with at most 256 cells per block.
      first_block: i32[B, Q], non-decreasing. valid: bool[B, T], None: all are. needed: bool[B, K].
      threshold: in (0, 1).
      interpret: run the kernels' operations as JAX's, on any device, for tests.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    blocks, cells = first_block.shape[1], block_size // stride
    config = _fit(choose(q.dtype, device.compute_capability()), blocks * cells, cells, head_dim)
    tile = max(config.row_tile, config.key_tile)
    total_cells = _round_up(blocks * cells, tile)

    def to_cells(x: jax.Array) -> jax.Array:
        """[B, A, s, heads, H], H a power of two from 16; a view where tokens fill the tiles and all are valid."""
        if valid is not None:
            x = jnp.where(valid[..., None, None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, total_cells * stride - tokens), (0, 0), (0, _power_of_two(head_dim, 16) - head_dim)))
        return x.reshape(batch, total_cells, stride, *x.shape[2:])

    # A row counts if its cell's first token does.
    counts = jnp.ones((batch, tokens), bool) if valid is None else valid
    counts = jnp.pad(counts, ((0, 0), (0, total_cells * stride - tokens)))[:, ::stride].astype(jnp.float32)
    first_block = jnp.pad(first_block.astype(jnp.int32), ((0, 0), (0, total_cells // cells - blocks)), mode="edge")
    q, k, needed = to_cells(q), to_cells(k), needed.astype(jnp.int32)

    per_tile = config.key_tile // cells
    key_tiles = _power_of_two(total_cells // config.key_tile, -(-BlockMask.WORD // per_tile))
    unit = max(config.row_tile, cells)
    rows = max(unit, _SUM_BYTES // (4 * batch * heads * key_tiles * per_tile) // unit * unit)
    runs = -(-total_cells // rows)
    rows = _round_up(-(-total_cells // runs), unit)
    sum_grid = (total_cells // config.key_tile * (rows // config.row_tile) * (heads // kv_heads), batch * kv_heads)
    select_warps = min(8, max(1, key_tiles * per_tile // 512))

    def run(index: jax.Array) -> jax.Array:
        """i32[B, N, rows / c, J / 32]: the words of one run of rows."""
        offset = (index * rows)[None]
        sums, peaks = pl.pallas_call(
            functools.partial(_sum_kernel, factor=head_dim**-0.5 / stride * LOG2_E, cells=cells, config=config),
            grid=sum_grid,
            out_shape=(
                jax.ShapeDtypeStruct((batch, heads, rows, key_tiles, per_tile), jnp.float32),
                jax.ShapeDtypeStruct((batch, heads, rows, key_tiles), jnp.float32),
            ),
            compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
            interpret=interpret,
            name="xattn_estimate_sums",
        )(q, k, first_block, needed, offset)
        return pl.pallas_call(
            functools.partial(_select_kernel, cells=cells, threshold=threshold),
            grid=(rows // cells, heads, batch),
            out_shape=jax.ShapeDtypeStruct((batch, heads, rows // cells, key_tiles * per_tile // BlockMask.WORD), jnp.int32),
            compiler_params=CompilerParams(num_warps=select_warps, num_stages=1),
            interpret=interpret,
            name="xattn_select",
        )(sums, peaks, first_block, counts, needed, offset)

    words = jax.lax.map(run, jnp.arange(runs, dtype=jnp.int32))
    words = jnp.moveaxis(words, 0, 2).reshape(batch, heads, -1, words.shape[-1])
    return jax.lax.bitcast_convert_type(words[:, :, :blocks, : -(-blocks // BlockMask.WORD)], jnp.uint32)


def _sum_kernel(q, k, first_block, needed, offset, sums, peaks, *, factor: float, cells: int, config: EstimateConfig):
    """Programs in the order of the grid: the G heads that read the same keys, then row tiles, then key tiles, so that what runs at one
    time reads few key tiles."""
    stride, head_dim = q.shape[2], q.shape[4]
    group, kv_heads = q.shape[3] // k.shape[3], k.shape[3]
    index, in_group = _divide(pl.program_id(0), group)
    key_tile, row_tile = _divide(index, sums.shape[2] // config.row_tile)
    entry, kv_head = _divide(pl.program_id(1), kv_heads)
    head = kv_head * group + in_group
    row, key = offset[0] + row_tile * config.row_tile, key_tile * config.key_tile
    first_row_block = jnp.minimum(_divide(row, cells)[0], first_block.shape[1] - 1)
    # The last run may end beyond the sequence; documents begin no earlier than that of the tile's first row.
    seen = (row < q.shape[1]) & (key < row + config.row_tile) & (key + config.key_tile > first_block[entry, first_row_block] * cells)

    @pl.when(seen & (needed[entry, kv_head] != 0))
    def _():
        depths = head_dim // config.depth

        def step(i: Any, scores: jax.Array) -> jax.Array:
            token, part = _divide(i, depths)
            at = pl.ds(part * config.depth, config.depth)
            a = q[entry, pl.ds(row, config.row_tile), stride - 1 - token, head, at]
            b = k[entry, pl.ds(key, config.key_tile), token, kv_head, at]
            # Triton would multiply float32 as TF32.
            precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
            return scores + jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

        scores = jax.lax.fori_loop(0, stride * depths, step, jnp.zeros((config.row_tile, config.key_tile), jnp.float32))
        cell = row + jnp.arange(config.row_tile, dtype=jnp.int32)
        begin = first_block[entry, jax.lax.div(cell, jnp.int32(cells))] * cells
        column = key + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where((column <= cell[:, None]) & (column >= begin[:, None]), scores * factor, -jnp.inf)
        peak = jnp.max(scores, axis=1)
        # Rows that see nothing of this tile: their peak is never read.
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)
        p = jnp.exp2(scores - peak[:, None])
        rows = pl.ds(row_tile * config.row_tile, config.row_tile)
        sums[entry, head, rows, key_tile, :] = jnp.sum(p.reshape(config.row_tile, -1, cells), axis=2)
        peaks[entry, head, rows, key_tile] = peak


def _select_kernel(sums, peaks, first_block, counts, needed, offset, words, *, cells: int, threshold: float):
    local, head, entry = (pl.program_id(axis) for axis in range(3))
    key_tiles, per_tile = sums.shape[3:]
    row = jax.lax.div(offset[0], jnp.int32(cells)) + local
    kv_head = _divide(head, sums.shape[1] // needed.shape[1])[0]
    wanted = (row < first_block.shape[1]) & (needed[entry, kv_head] != 0)

    @pl.when(wanted)
    def _():
        first = first_block[entry, row]
        tile = jax.lax.broadcasted_iota(jnp.int32, (key_tiles, per_tile), 0)
        column = tile * per_tile + jax.lax.broadcasted_iota(jnp.int32, (key_tiles, per_tile), 1)
        allowed = (column >= first) & (column <= row)  # what lies outside was never written
        first_key = jnp.arange(key_tiles, dtype=jnp.int32) * per_tile
        visible_tile = (first_key <= row) & (first_key + per_tile > first)

        def add_cell(i: Any, mass: jax.Array) -> jax.Array:
            at = (entry, head, local * cells + i)
            peak = load(peaks.at[at], mask=visible_tile, other=-jnp.inf)
            p = load(sums.at[at], mask=allowed, other=0.0)
            factor = jnp.exp2(peak - jnp.max(peak))
            factor = factor * (counts[entry, row * cells + i] / jnp.sum(jnp.sum(p, axis=1) * factor))
            return mass + p * factor[:, None]

        mass = jax.lax.fori_loop(0, cells, add_cell, jnp.zeros((key_tiles, per_tile), jnp.float32))
        units = (mass * (_ONE / cells)).astype(jnp.int32).reshape(key_tiles * per_tile)
        kept = smallest_set(units, row, first, threshold).astype(jnp.int32)
        kept = kept.reshape(words.shape[3], BlockMask.WORD)
        bits = kept << jax.lax.broadcasted_iota(jnp.int32, kept.shape, 1)
        words[entry, head, local, :] = jnp.sum(bits, axis=1, dtype=jnp.int32)

    @pl.when(jnp.logical_not(wanted))
    def _():
        words[entry, head, local, :] = jnp.zeros((words.shape[3],), jnp.int32)


def smallest_set(units: jax.Array, row: jax.Array, first: jax.Array, threshold: float) -> jax.Array:
    """bool[J]: the blocks of a row to keep, by the rule at the top of this file.

    Args:
      units: i32[J], masses; at least 0, and 0 outside first .. row; together at most 2^31 - 1.
      row, first: i32[], the row's own block and the first block of its document, both kept.
    """
    add = functools.partial(jnp.sum, dtype=jnp.int32)
    column = jnp.arange(units.shape[0], dtype=jnp.int32)
    forced = (column == first) | (column == row)
    total = add(units)
    target = jnp.minimum(total, jnp.ceil(total.astype(jnp.float32) * threshold).astype(jnp.int32))
    need = target - add(jnp.where(forced, units, 0))
    free = jnp.where(forced, 0, units)

    # The largest value such that the blocks at or above it reach `need`. Where need > 0, it is at least 1.
    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + jax.lax.div(high - low, jnp.int32(2))
        enough = add(jnp.where(free >= middle, free, 0)) >= need
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    level, _ = jax.lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, halve, (jnp.int32(0), jnp.max(free) + 1))
    missing = need - add(jnp.where(free > level, free, 0))
    divisor = jnp.maximum(level, 1)
    equals = jax.lax.div(missing + divisor - 1, divisor)  # as many of the blocks at that value as it takes
    equal = free == level
    reaching = (free > level) | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= equals))
    return forced | ((need > 0) & reaching)


def _fit(config: EstimateConfig, sequence_cells: int, cells: int, head_dim: int) -> EstimateConfig:
    """Smaller tiles for short sequences, whole blocks in a key tile."""
    longest = _power_of_two(sequence_cells, 16)
    return dataclasses.replace(
        config,
        row_tile=min(config.row_tile, longest),
        key_tile=max(min(config.key_tile, longest), cells),
        depth=min(config.depth, _power_of_two(head_dim, 16)),
    )


def _divide(x: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative."""
    return jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _power_of_two(x: int, at_least: int) -> int:
    return 1 << (max(x, at_least) - 1).bit_length()
