"""The backward kernels for Hopper: dQ by query rows, dK and dV by key rows, hence no atomics and the same bits in every run.

Each computes P again from the log-sum-exp. The two together do 7 products per pair of blocks where one kernel with atomics would do 5.
Warpgroups do not take turns here: with three and four products a step the tensor cores are busy without, and turns cost 2 to 3 % (H200,
jax 0.11.2). Starting the last product of a step together with the first ones of the next, as the forward kernel does, needed more
registers than there are.
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
from pallas_kernels.mosaic.tiles import BLOCK, ROWS, WARPGROUPS, Walk, div, rem
from pallas_kernels.visits import key_visits, query_visits

DQ_STAGES = 2  # K and V blocks in flight
DKV_STAGES = 3  # half blocks of Q and dO in flight


def query_gradient(call: Call, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """dq [B, T, N, H]; d_out is in q's dtype, lse and delta are from `common.row_statistics`."""
    q, k, v, scale, visits = call.q, call.k, call.v, call.scale, query_visits(call)
    batch, tokens, heads, dim = q.shape
    group, blocks = heads // k.shape[2], tokens // BLOCK
    tables = visits.runs.shape[1]
    per_table = heads // tables
    order = heaviest_first(visits.runs[..., 3].sum(-1).reshape(-1))
    has_words = visits.words is not None

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, order_ref, runs_ref, *rest = refs
        words_ref = rest.pop(0) if has_words else None
        dq_ref, q_smem, d_out_smem, k_smem, v_smem, lse_smem, delta_smem, rows_ready, k_ready, v_ready, k_free, v_free = rest
        warpgroup, index = lax.axis_index("warpgroup"), lax.axis_index("block")
        row = blocks - 1 - rem(div(index, per_table), blocks)
        table = order_ref[div(index, per_table * blocks)]
        entry, table = div(table, tables), rem(table, tables)
        head = table * per_table + rem(index, per_table)
        walk = Walk(runs_ref, words_ref, (entry, table, row))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(tiles.COMPUTE_REGISTERS, action="increase")
            own_q, own_d_out = q_smem.at[warpgroup], d_out_smem.at[warpgroup]
            plgpu.barrier_wait(rows_ready.at[warpgroup])
            lse = tiles.load(lse_smem.at[warpgroup], tiles.PER_ROW)
            delta = tiles.load(delta_smem.at[warpgroup], tiles.PER_ROW)

            def step(s: jax.Array, dq: jax.Array, limit: jax.Array | None = None) -> jax.Array:
                slot = rem(s, DQ_STAGES)
                plgpu.barrier_wait(k_ready.at[slot])
                plgpu.barrier_wait(v_ready.at[slot])

                def products(scores_ref: Any, dp_ref: Any) -> None:
                    plgpu.wgmma(scores_ref, own_q, k_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dp_ref, own_d_out, v_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_free.at[slot])

                scores, dp = tiles.accumulate(products, tiles.zeros(ROWS, BLOCK), tiles.zeros(ROWS, BLOCK))
                if limit is not None:
                    scores = tiles.mask(scores, limit)
                p = jnp.exp2(scores * (scale * LOG2_E) - tiles.over_columns(lse, BLOCK))
                ds = (p * (dp - tiles.over_columns(delta, BLOCK))).astype(q.dtype)

                def add(dq_ref: Any) -> None:
                    plgpu.wgmma(dq_ref, ds, k_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_free.at[slot])

                return tiles.accumulate(add, dq)[0]

            # Only the last block of a walk can be the diagonal one.
            plain = jnp.maximum(walk.count - 1, 0)
            limit = jnp.where(walk.diagonal > 0, warpgroup * ROWS, BLOCK)
            dq = lax.fori_loop(0, plain, step, tiles.zeros(ROWS, dim))
            dq = lax.fori_loop(plain, walk.count, lambda s, dq: step(s, dq, limit), dq)
            own_q[...] = (dq * scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, dq_ref.at[entry, pl.ds(row * BLOCK + warpgroup * ROWS, ROWS), head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(tiles.COPY_REGISTERS, action="decrease")
            for w in range(WARPGROUPS):
                rows = pl.ds(row * BLOCK + w * ROWS, ROWS)
                for ref, smem in ((q_ref.at[entry, rows, head], q_smem), (d_out_ref.at[entry, rows, head], d_out_smem)):
                    plgpu.copy_gmem_to_smem(ref, smem.at[w], rows_ready.at[w])
                for ref, smem in ((lse_ref.at[entry, head, rows], lse_smem), (delta_ref.at[entry, head, rows], delta_smem)):
                    plgpu.copy_gmem_to_smem(ref, smem.at[w], rows_ready.at[w])

            def step(s: jax.Array, state: Any) -> Any:
                block, state = walk.step(s, state)
                slot = rem(s, DQ_STAGES)
                at = (entry, pl.ds(block * BLOCK, BLOCK), div(head, group))
                for ref, smem, ready, free in ((k_ref, k_smem, k_ready, k_free), (v_ref, v_smem, v_ready, v_free)):
                    pl.when(s >= DQ_STAGES)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], ready.at[slot])
                return state

            lax.fori_loop(0, walk.count, step, walk.start())
            tiles.drain(walk.count, DQ_STAGES, k_free, v_free)

    rows, ring = tiles.tile(WARPGROUPS, ROWS, dim, dtype=q.dtype), tiles.tile(DQ_STAGES, BLOCK, dim, dtype=q.dtype)
    statistics = plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)
    ready, free = tiles.barriers(DQ_STAGES), tiles.barriers(DQ_STAGES, arrivals=WARPGROUPS)
    launch = tiles.kernel(
        body,
        name="mixed_head_attention_dq",
        blocks=batch * heads * blocks,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch=[rows, rows, ring, ring, statistics, statistics, tiles.barriers(WARPGROUPS, arrivals=4), ready, ready, free, free],
    )
    return launch(q, k, v, d_out, lse, delta, order, *tiles.tables(visits))


def key_gradients(call: Call, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(dk, dv) [B, S, K, H], of arguments as in `query_gradient`.

    One CUDA block per KV head and key block, which walks the query blocks of each of its G query heads in halves; warpgroup w owns 64
    of the 128 keys. Products are of transposed scores, keys by queries, so that P and dS are left operands in registers.
    """
    q, k, v, scale, visits = call.q, call.k, call.v, call.scale, key_visits(call)
    batch, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    group, blocks, tables = heads // kv_heads, k.shape[1] // BLOCK, visits.runs.shape[1]
    per_head = tables // kv_heads  # 1, or G where every query head has its own table
    work = visits.runs[..., 3].reshape(batch, kv_heads, per_head, blocks).sum(2)
    # A real sort: the first blocks of streaming heads are the heaviest of all, and must not be started last.
    order = jnp.argsort(-work.reshape(-1), stable=True).astype(jnp.int32)
    has_words = visits.words is not None

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, order_ref, runs_ref, *rest = refs
        words_ref = rest.pop(0) if has_words else None
        dk_ref, dv_ref, k_smem, v_smem, q_smem, d_out_smem, lse_smem, delta_smem, keys_ready, q_ready, d_out_ready, free = rest
        warpgroup, index = lax.axis_index("warpgroup"), order_ref[lax.axis_index("block")]
        block, kv_head = rem(index, blocks), rem(div(index, blocks), kv_heads)
        entry = div(index, blocks * kv_heads)

        def walk_of(member: jax.Array) -> Walk:
            return Walk(runs_ref, words_ref, (entry, kv_head * per_head + (member if per_head > 1 else 0), block))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(tiles.COMPUTE_REGISTERS, action="increase")
            own_k, own_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            plgpu.barrier_wait(keys_ready.at[warpgroup])

            def step(s: jax.Array, carry: Any, limit: jax.Array | None = None) -> Any:
                slot = rem(s, DKV_STAGES)
                plgpu.barrier_wait(q_ready.at[slot])
                plgpu.barrier_wait(d_out_ready.at[slot])

                def products(scores_ref: Any, dp_ref: Any) -> None:
                    plgpu.wgmma(scores_ref, own_k, q_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dp_ref, own_v, d_out_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)

                scores, dp = tiles.accumulate(products, tiles.zeros(ROWS, ROWS), tiles.zeros(ROWS, ROWS))
                if limit is not None:
                    scores = tiles.mask(scores, limit, keys_axis=0)
                lse = tiles.load(lse_smem.at[slot], tiles.PER_COLUMN)
                delta = tiles.load(delta_smem.at[slot], tiles.PER_COLUMN)
                p = jnp.exp2(scores * (scale * LOG2_E) - tiles.over_rows(lse, ROWS))

                def add(dk_ref: Any, dv_ref: Any) -> None:
                    plgpu.wgmma(dv_ref, p.astype(q.dtype), d_out_smem.at[slot])
                    # Computed while the first product runs: 1 to 2 % of the kernel's time (H200, jax 0.11.2, 64K tokens).
                    ds = (p * (dp - tiles.over_rows(delta, ROWS))).astype(q.dtype)
                    plgpu.wgmma(dk_ref, ds, q_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return tiles.accumulate(add, *carry)

            def member_gradients(member: jax.Array, carry: Any) -> Any:
                done, grads = carry
                walk = walk_of(member)
                # Only the first block of a walk can be the diagonal one; its halves are masked, the rest is seen whole.
                masked = jnp.where(walk.diagonal > 0, WARPGROUPS, 0)
                grads = lax.fori_loop(0, masked, lambda s, g: step(done + s, g, limit=(s - warpgroup) * ROWS), grads)
                grads = lax.fori_loop(masked, walk.count * WARPGROUPS, lambda s, g: step(done + s, g), grads)
                return done + walk.count * WARPGROUPS, grads

            grads = tiles.zeros(ROWS, dim), tiles.zeros(ROWS, dim)
            _, (dk, dv) = lax.fori_loop(0, group, member_gradients, (jnp.int32(0), grads))
            own_k[...], own_v[...] = (dk * scale).astype(k.dtype), dv.astype(v.dtype)
            plgpu.commit_smem()
            at = (entry, pl.ds(block * BLOCK + warpgroup * ROWS, ROWS), kv_head)
            plgpu.copy_smem_to_gmem(own_k, dk_ref.at[at])
            plgpu.copy_smem_to_gmem(own_v, dv_ref.at[at])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(tiles.COPY_REGISTERS, action="decrease")
            for w in range(WARPGROUPS):
                at = (entry, pl.ds(block * BLOCK + w * ROWS, ROWS), kv_head)
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[w], keys_ready.at[w])
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[w], keys_ready.at[w])

            def copy_member(member: jax.Array, done: jax.Array) -> jax.Array:
                walk, head = walk_of(member), kv_head * group + member

                def step(s: jax.Array, state: Any) -> Any:
                    query_block, state = walk.step(s, state)
                    for half in range(WARPGROUPS):
                        i = done + s * WARPGROUPS + half
                        slot = rem(i, DKV_STAGES)
                        rows = pl.ds(query_block * BLOCK + half * ROWS, ROWS)
                        pl.when(i >= DKV_STAGES)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))
                        plgpu.copy_gmem_to_smem(q_ref.at[entry, rows, head], q_smem.at[slot], q_ready.at[slot])
                        plgpu.copy_gmem_to_smem(lse_ref.at[entry, head, rows], lse_smem.at[slot], q_ready.at[slot])
                        plgpu.copy_gmem_to_smem(d_out_ref.at[entry, rows, head], d_out_smem.at[slot], d_out_ready.at[slot])
                        plgpu.copy_gmem_to_smem(delta_ref.at[entry, head, rows], delta_smem.at[slot], d_out_ready.at[slot])
                    return state

                lax.fori_loop(0, walk.count, step, walk.start())
                return done + walk.count * WARPGROUPS

            tiles.drain(lax.fori_loop(0, group, copy_member, jnp.int32(0)), DKV_STAGES, free)

    keys, ring = tiles.tile(WARPGROUPS, ROWS, dim, dtype=q.dtype), tiles.tile(DKV_STAGES, ROWS, dim, dtype=q.dtype)
    statistics = plgpu.SMEM((DKV_STAGES, ROWS), jnp.float32)
    ready = tiles.barriers(DKV_STAGES, arrivals=2)
    launch = tiles.kernel(
        body,
        name="mixed_head_attention_dkv",
        blocks=batch * kv_heads * blocks,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        scratch=[
            *(keys, keys, ring, ring, statistics, statistics),
            tiles.barriers(WARPGROUPS, arrivals=2),
            *(ready, ready, tiles.barriers(DKV_STAGES, arrivals=WARPGROUPS)),
        ],
    )
    return launch(q, k, v, d_out, lse, delta, order, *tiles.tables(visits))
