"""The tables that kernels walk, against the dense block mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.plan import BlockMask, HeadPlan, visible_blocks
from pallas_kernels.call import Call
from pallas_kernels.visits import Visits, key_visits, query_visits

BLOCK = 16


def walk(visits: Visits, blocks: int, offset: int) -> np.ndarray:
    """bool[B, h, R, blocks] from the tables, by the words of `Visits`' docstring; order and diagonal are asserted. offset: of row 0."""
    runs = np.asarray(visits.runs)
    words = None if visits.words is None else np.asarray(visits.words)
    dense = np.zeros((*runs.shape[:3], blocks), bool)
    for index in np.ndindex(runs.shape[:3]):
        start, length, second, count, diagonal = runs[index]
        if length == -1:
            found = [16 * (int(w) >> 16) + i for w in words[index] for i in range(16) if int(w) >> i & 1]
            assert len(found) == count
        else:
            found = [start + s if s < length else second + s - length for s in range(count)]
        assert found == sorted(set(found))
        assert diagonal == (index[2] + offset in found)
        dense[index][found] = True
    return dense


@st.composite
def cases(draw):
    """Few shapes, so that little is compiled; what varies is data."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, blocks = 2, 3, 70
    bitmap_heads, queries = draw(st.sampled_from([(0, 70), (3, 70), (6, 41), (6, 1)]))
    begins = np.sort(np.append(0, rng.choice(np.arange(1, blocks), draw(st.integers(0, 4)), replace=False)))
    document = np.searchsorted(begins, np.arange(blocks), side="right") - 1
    mode = rng.integers(0, 3, (batch, len(begins), kv_heads))[:, document]
    density = draw(st.sampled_from([0.05, 0.5]))
    bitmap = BlockMask.from_dense(rng.random((batch, bitmap_heads, blocks, blocks)) < density) if bitmap_heads else None
    sink, local = draw(st.sampled_from([(0, 1), (1, 4), (3, 2)]))
    plan = HeadPlan(mode=jnp.asarray(mode, jnp.int8), blocks=bitmap, sink_blocks=sink, local_blocks=local, block_size=BLOCK)
    lengths = jnp.asarray(rng.integers(1, blocks * BLOCK + 1, batch), jnp.int32)
    return plan, lengths, jnp.asarray(np.broadcast_to(begins[document], (batch, blocks)), jnp.int32), queries


def call_of(plan, lengths, first, queries):
    """queries: blocks of them."""
    q = jnp.zeros((first.shape[0], queries * plan.block_size, 1, 1))
    return Call(q=q, k=None, v=None, plan=plan, lengths=lengths, first_block=first, scale=1.0)


@functools.partial(jax.jit, static_argnums=3)
def tables(plan, lengths, first, queries):
    call = call_of(plan, lengths, first, queries)
    return query_visits(call), key_visits(call), visible_blocks(plan, queries, first.shape[1], first)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_both_sides_agree_with_the_dense_mask(case):
    plan, lengths, first, queries = case
    blocks = first.shape[1]
    by_query, by_key, expected = tables(plan, lengths, first, queries)
    rows = np.arange(blocks - queries, blocks)
    expected = np.asarray(expected) & (rows * BLOCK < np.asarray(lengths)[:, None, None])[..., None]
    np.testing.assert_array_equal(walk(by_query, blocks, blocks - queries), expected)
    np.testing.assert_array_equal(walk(by_key, queries, queries - blocks).swapaxes(2, 3), expected)


def test_tables_stay_small_at_256k():
    plan = HeadPlan(mode=jnp.zeros((1, 2048, 8), jnp.int8), sink_blocks=1, local_blocks=16, block_size=128)
    plan = dataclasses.replace(plan, blocks=BlockMask(bitmap=jnp.zeros((1, 8, 2048, 64), jnp.uint32)))
    shapes = jax.eval_shape(lambda p: query_visits(call_of(p, jnp.array([2**18]), jnp.zeros((1, 2048), jnp.int32), 2048)), plan)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 9 * 2**20
