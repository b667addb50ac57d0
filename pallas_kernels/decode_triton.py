"""Decode attention as two Pallas-Triton kernels, for every CUDA GPU from Ampere on (flash-decoding: split over the keys).

1. `_attend_kernel`, grid (B * K, splits): one program per run of slots of one row of the page table. Its G query heads are the rows of
   one matrix, padded to the 16 that tensor cores take, so each key is read once. It leaves the output, largest score and sum of
   exponentials of its run, in float32.
2. `_merge_kernel`, grid (G * column tiles, B * K): brings the runs of one query head together.

How a row is split depends on its own `used` alone: in at most `splits` runs, each of at least `tokens` tokens. Programs beyond leave at
once and the merge ignores them. So one long row among short ones fills the GPU as well, and a row's bits depend on nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common import LOG2_E
from pallas_kernels.triton._compat import CompilerParams, load
from pallas_kernels.triton.forward_kernel import dot

_COLUMNS = 32  # of the output, per program of the merge: at 32 heads and H = 128 the programs of one sequence fill 128 SMs


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """tile: tokens per step, a power of two; a page where that is less. tokens: the fewest of a run. splits: the most runs of a row, a
    power of two. num_warps, num_stages: as Triton means them."""

    tile: int
    tokens: int
    splits: int
    num_warps: int
    num_stages: int


def choose(dtype: Any) -> DecodeConfig:
    """At most 88 KiB of shared memory on Ampere, where every GPU has 99, and no spilled registers.

    Of 20 configurations this was the fastest or within 3 % of it everywhere on an H200 (jax 0.11.2, bfloat16, 32/8 heads of 128, 8K to 1M
    tokens, all heads full or a few): 140 us at 128K with every head full, 3.8 TB/s where reading alone reaches 4.1. Three stages took
    1 to 7 % more, 8 warps 3 %; 64 runs at most instead of 256 took half as long again where one head of eight is full.
    """
    return DecodeConfig(tile=32 if dtype == jnp.float32 else 64, tokens=256, splits=256, num_warps=4, num_stages=2)


def attend(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    table: jax.Array,
    used: jax.Array,
    newest: jax.Array,
    newest_tokens: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """As `paged_decode_attention`; all tables i32. interpret: run the kernels' operations as JAX's, on any device, for tests."""
    batch, heads, head_dim = q.shape
    kv_heads, slots = table.shape[1:]
    rows, group, page = batch * kv_heads, heads // kv_heads, key_pages.shape[1]
    config = choose(q.dtype)
    config = dataclasses.replace(config, tile=min(config.tile, page))
    least = max(1, config.tokens // page)
    splits = min(config.splits, -(-slots // least))
    statics = {"least": least, "most": config.splits}
    partial_out, peaks, sums = pl.pallas_call(
        functools.partial(_attend_kernel, factor=scale * LOG2_E, tile=config.tile, **statics),
        grid=(rows, splits),  # a row's first runs start first, the programs that have none last
        out_shape=(
            jax.ShapeDtypeStruct((rows, splits, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, group, splits), jnp.float32),
            jax.ShapeDtypeStruct((rows, group, splits), jnp.float32),
        ),
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode_attention",
    )(q, key_pages, value_pages, table, used, newest, newest_tokens)
    return pl.pallas_call(
        functools.partial(_merge_kernel, **statics),
        grid=(group * (head_dim // _COLUMNS), rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(partial_out, peaks, sums, used)


def _attend_kernel(
    q, key_pages, value_pages, table, used, newest, newest_tokens, out, peaks, sums, *, factor: float, tile: int, least: int, most: int
):
    row, split = pl.program_id(0), pl.program_id(1)
    entry, kv_head = _divide(row, table.shape[1])
    page, head_dim, group = key_pages.shape[1], q.shape[2], out.shape[2]
    count = used[entry, kv_head]
    run = _run(count, least, most)
    first = split * run

    @pl.when(first < count)
    def _():
        current, current_tokens = newest[entry, kv_head], newest_tokens[entry]
        # What fills the matrix up repeats the last query head, and stores the same again.
        head = jnp.minimum(jnp.arange(_power_of_two(group, 16), dtype=jnp.int32), group - 1)
        query = q[entry, kv_head * group + head, :]
        parts = page // tile
        shift = parts.bit_length() - 1

        def physical_page(i: Any) -> Any:
            return table[entry, kv_head, jnp.minimum(first + (i >> shift), count - 1)]

        # Triton's pipeline gives each level of loads that wait for other loads a stage. Read a step ahead, the page's number takes none.
        def step(i: Any, carry: Any) -> Any:
            physical, peak, total, acc = carry
            slot, part = first + (i >> shift), i & (parts - 1)
            at = (physical, pl.ds(part * tile, tile), slice(None))
            visible = part * tile + jnp.arange(tile, dtype=jnp.int32) < jnp.where(slot == current, current_tokens, page)
            scores = jnp.where(visible[None, :], dot(query, key_pages[at], (1, 1)) * factor, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
            p = jnp.exp2(scores - new_peak[:, None])
            decay = jnp.exp2(peak - new_peak)
            # A probability of 0 times NaN is NaN.
            value = load(value_pages.at[at], mask=jnp.broadcast_to(visible[:, None], (tile, head_dim)), other=0.0)
            acc = acc * decay[:, None] + dot(p.astype(value.dtype), value, (1, 0))
            return physical_page(i + 1), new_peak, total * decay + jnp.sum(p, axis=1), acc

        lowest = jnp.full(head.shape, jnp.finfo(jnp.float32).min)  # not -inf, of which the difference to itself is NaN
        start = (physical_page(0), lowest, jnp.zeros(head.shape, jnp.float32), jnp.zeros(query.shape, jnp.float32))
        _, peak, total, acc = jax.lax.fori_loop(0, jnp.minimum(run, count - first) * parts, step, start)
        out[row, split, head, :] = acc
        peaks[row, head, split] = peak
        sums[row, head, split] = total


def _merge_kernel(partial_out, peaks, sums, used, out, *, least: int, most: int):
    row = pl.program_id(1)
    group = partial_out.shape[2]
    entry, kv_head = _divide(row, used.shape[1])
    column_tile, head = _divide(pl.program_id(0), group)
    columns = pl.ds(column_tile * _COLUMNS, _COLUMNS)
    count = used[entry, kv_head]
    run = _run(count, least, most)
    # As many as there may ever be, so that sums have the same order whatever M is; beyond the last run it is read again and left out.
    split = jnp.arange(most, dtype=jnp.int32)
    runs = jax.lax.div(count + run - 1, run)
    written, at = split < runs, jnp.maximum(jnp.minimum(split, runs - 1), 0)
    peak = jnp.where(written, peaks[row, head, at], jnp.finfo(jnp.float32).min)
    weight = jnp.where(written, jnp.exp2(peak - jnp.max(peak)), 0.0)
    total = jnp.sum(jnp.where(written, sums[row, head, at], 0.0) * weight)
    part = jnp.where(written[:, None], partial_out[row, at, head, columns], 0.0)
    result = jnp.sum(part * weight[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    out[entry, kv_head * group + head, columns] = result.astype(out.dtype)


def _run(count: Any, least: int, most: int) -> Any:
    """Slots of one program, of a row of `count`: at least `least`, so many that at most `most` programs have all."""
    return jnp.maximum(jax.lax.div(count + (most - 1), jnp.int32(most)), least)


def _divide(x: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative."""
    return jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by))


def _power_of_two(x: int, at_least: int) -> int:
    return 1 << (max(x, at_least) - 1).bit_length()
