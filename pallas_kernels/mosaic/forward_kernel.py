"""The forward kernel for Hopper.

One CUDA block per query head and query block. Warpgroup w of two owns 64 of the 128 rows and keeps their output in registers; the third
copies K and V blocks into a ring of shared memory, in the order of the row's walk. The two take turns at the tensor cores: in its turn
a warpgroup starts the product P V of the block before and Q K^T of the next, and while both run the other one does its softmax (the
ping-pong of FlashAttention-3, Shah et al. 2024, arXiv 2407.08608). Starting Q K^T first, so that the softmax also overlaps its own
warpgroup's P V, made ptxas serialise the products and took 1.6 times as long (H200, jax 0.11.2).

Where two query heads walk the same blocks, their CUDA blocks form a cluster: each copies half of every K and V block into the shared
memory of both. That halves the reads from L2 and is worth 3 to 4 % at 64K and more at 256K (H200).

Only the last block of a walk can be the diagonal one, so only it is masked. Rows of the whole launch go heads with most work first,
long rows first, so that full heads do not trail; a persistent launch and one sorted row by row were slower.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.call import Call
from pallas_kernels.common import LOG2_E, heaviest_first
from pallas_kernels.mosaic import tiles
from pallas_kernels.mosaic.tiles import BLOCK, ROWS, WARPGROUPS, Walk, div, over_columns, rem
from pallas_kernels.visits import query_visits

STAGES = 2  # K and V blocks in flight: at H=128 a third does not fit beside Q


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, H] in q's dtype, lse f32[B, N, T]) of bfloat16 or float16 arrays."""
    q, k, visits = call.q, call.k, query_visits(call)
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    blocks, offset = tokens // BLOCK, k.shape[1] - tokens
    tables = visits.runs.shape[1]
    per_table, group = heads // tables, heads // kv_heads
    order = heaviest_first(visits.runs[..., 3].sum(-1).reshape(-1))
    factor = call.scale * LOG2_E
    has_words = visits.words is not None
    pairs = per_table % 2 == 0  # neighbours below are query heads of one table, which is what makes their walks the same

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, lengths_ref, order_ref, runs_ref, *rest = refs
        words_ref = rest.pop(0) if has_words else None
        out_ref, lse_ref, q_smem, k_smem, v_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free, turn = rest
        warpgroup, index = lax.axis_index("warpgroup"), lax.axis_index("block")
        if pairs:
            index = 2 * index + lax.axis_index("pair")
        row = blocks - 1 - rem(div(index, per_table), blocks)
        table = order_ref[div(index, per_table * blocks)]
        entry, table = div(table, tables), rem(table, tables)
        head = table * per_table + rem(index, per_table)
        walk = Walk(runs_ref, words_ref, (entry, table, row))
        # A row that sees nothing still visits one block, so that the loops below need no special case; its output is zeroed at the end.
        count = jnp.maximum(walk.count, 1)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(tiles.COMPUTE_REGISTERS, action="increase")
            own_q = q_smem.at[warpgroup]
            begin = row * BLOCK + warpgroup * ROWS
            diagonal = jnp.where(walk.diagonal > 0, warpgroup * ROWS, BLOCK)

            def softmax(scores: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
                """(P, the new maximum), in base 2."""
                peak = jnp.maximum(peak, scores.max(axis=1) * factor)
                return jnp.exp2(scores * factor - over_columns(peak, BLOCK)), peak

            def products(acc: jax.Array, p: jax.Array, value_slot: jax.Array, key_slot: jax.Array) -> tuple[jax.Array, ...]:
                """(acc + P V, Q K^T)."""

                def run(acc_ref: Any, scores_ref: Any) -> None:
                    plgpu.barrier_wait(turn.at[warpgroup])
                    plgpu.wgmma(acc_ref, p, v_smem.at[value_slot])
                    plgpu.wgmma(scores_ref, own_q, k_smem.at[key_slot].transpose((1, 0)))
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(v_free.at[value_slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_free.at[key_slot])

                return tiles.accumulate(run, acc, tiles.zeros(ROWS, BLOCK))

            def step(s: jax.Array, carry: Any, limit: jax.Array | None = None) -> Any:
                acc, peak, total, p = carry
                before, slot = rem(s - 1, STAGES), rem(s, STAGES)
                plgpu.barrier_wait(v_ready.at[before])
                plgpu.barrier_wait(k_ready.at[slot])
                acc, scores = products(acc, p, before, slot)
                if limit is not None:
                    scores = tiles.mask(scores, limit)
                p, new_peak = softmax(scores, peak)
                decay = jnp.exp2(peak - new_peak)
                return acc * over_columns(decay, dim), new_peak, total * decay + p.sum(axis=1), p.astype(q.dtype)

            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))  # warpgroup 0 has the first turn
            plgpu.barrier_wait(q_ready.at[warpgroup])
            plgpu.barrier_wait(k_ready.at[0])

            def first(scores_ref: Any) -> None:
                plgpu.barrier_wait(turn.at[warpgroup])
                plgpu.wgmma(scores_ref, own_q, k_smem.at[0].transpose((1, 0)))
                plgpu.barrier_arrive(turn.at[1 - warpgroup])
                plgpu.wgmma_wait(0)

            (scores,) = tiles.accumulate(first, tiles.zeros(ROWS, BLOCK))
            plgpu.barrier_arrive(k_free.at[0])
            lowest = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), tiles.PER_ROW)
            p, peak = softmax(tiles.mask(scores, jnp.where(count == 1, diagonal, BLOCK)), lowest)
            carry = tiles.zeros(ROWS, dim), peak, p.sum(axis=1), p.astype(q.dtype)
            last = jnp.maximum(count - 1, 1)
            carry = lax.fori_loop(1, last, step, carry)
            acc, peak, total, p = lax.fori_loop(last, count, lambda s, c: step(s, c, limit=diagonal), carry)

            slot = rem(count - 1, STAGES)
            plgpu.barrier_wait(v_ready.at[slot])

            def last_values(acc_ref: Any) -> None:
                plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                plgpu.wgmma_wait(0)

            (acc,) = tiles.accumulate(last_values, acc)
            plgpu.barrier_arrive(v_free.at[slot])
            seen = jnp.where(walk.count > 0, lengths_ref[entry] - offset - begin, 0)  # rows of this warpgroup that have a query
            inside = plgpu.broadcasted_iota(jnp.int32, (ROWS, dim), 0, layout=tiles.WGMMA) < seen
            own_q[...] = jnp.where(inside, acc * over_columns(1.0 / total, dim), 0.0).astype(q.dtype)
            inside = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tiles.PER_ROW) < seen
            lse_smem[warpgroup] = jnp.where(inside, peak * (1 / LOG2_E) + jnp.log(total), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, out_ref.at[entry, pl.ds(begin, ROWS), head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[entry, head, pl.ds(begin, ROWS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))  # the turn that warpgroup 1 gave away last

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(tiles.COPY_REGISTERS, action="decrease")
            for w in range(WARPGROUPS):
                rows = pl.ds(row * BLOCK + w * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[entry, rows, head], q_smem.at[w], q_ready.at[w])

            def step(s: jax.Array, state: Any) -> Any:
                block, state = walk.step(s, state)
                slot = rem(s, STAGES)
                at = (entry, pl.ds(block * BLOCK, BLOCK), div(head, group))
                for ref, smem, ready, free in ((k_ref, k_smem, k_ready, k_free), (v_ref, v_smem, v_ready, v_free)):
                    pl.when(s >= STAGES)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], ready.at[slot], collective_axes="pair" if pairs else None)
                return state

            lax.fori_loop(0, count, step, walk.start())
            tiles.drain(count, STAGES, k_free, v_free)

    launch = tiles.kernel(
        body,
        name="mixed_head_attention_forward",
        blocks=batch * heads * blocks,
        pairs=pairs,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)),
        scratch=[
            tiles.tile(WARPGROUPS, ROWS, dim, dtype=q.dtype),
            tiles.tile(STAGES, BLOCK, dim, dtype=q.dtype),
            tiles.tile(STAGES, BLOCK, dim, dtype=q.dtype),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            tiles.barriers(WARPGROUPS),
            tiles.barriers(STAGES),
            tiles.barriers(STAGES),
            tiles.barriers(STAGES, arrivals=WARPGROUPS, pair=pairs),
            tiles.barriers(STAGES, arrivals=WARPGROUPS, pair=pairs),
            tiles.barriers(2),
        ],
    )
    return launch(q, k, call.v, call.lengths, order, *tiles.tables(visits))
