"""Head plans: visible blocks, bitmaps, plans from decisions, sparsity ratios."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import BlockMask, HeadPlan, effective_sparsity, model_sparsity, routed_plan, uniform_plan, visible_blocks
from tests.kernel_cases import Case, dense_mask, inputs

F, S, B = HeadMode
PACKED = Case(name="packed", queries=560, keys=560, heads=6, kv_heads=3, batch=2, documents=(3, 17, 1, 12))


@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_bitmap_round_trip(count):
    dense = np.random.default_rng(count).random((2, 3, 4, count)) < 0.5
    mask = BlockMask.from_dense(jnp.asarray(dense))
    assert mask.bitmap.shape == (2, 3, 4, -(-count // 32))
    assert mask.bitmap.dtype == jnp.uint32
    np.testing.assert_array_equal(mask.to_dense(count), dense)
    assert bool(mask.bitmap[0, 0, 0, 0] & 1) == dense[0, 0, 0, 0]


def test_visible_blocks_follow_the_house_plan():
    x = inputs(PACKED)
    visible = jax.jit(functools.partial(visible_blocks, num_query_blocks=35, num_key_blocks=35))(x.plan, first_block=x.first_block)
    last_rows = dense_mask(PACKED, x)[:, :, PACKED.block - 1 :: PACKED.block]  # the last query of a block sees its blocks whole
    np.testing.assert_array_equal(visible, last_rows[..., :: PACKED.block])


def test_streaming_window_counts_the_diagonal_block():
    plan = uniform_plan(S, 1, 1, SparsityConfig(block_size=16, sink_tokens=32, local_tokens=48))
    visible = visible_blocks(plan, 2, 9)  # the last 2 of 9 blocks
    np.testing.assert_array_equal(np.flatnonzero(visible[0, 0, 1]), [0, 1, 6, 7, 8])
    np.testing.assert_array_equal(np.flatnonzero(visible[0, 0, 0]), [0, 1, 5, 6, 7])


def test_block_sparse_heads_without_a_bitmap_see_nothing():
    plan = HeadPlan(mode=jnp.full((1, 1), B, jnp.int8), sink_blocks=1, local_blocks=1, block_size=16)
    assert not visible_blocks(plan, 4, 4).any()


def test_routed_plan_per_document():
    is_full = jnp.asarray([[[1.0, 0.0], [0.0, 1.0]]])
    plan = routed_plan(is_full, SparsityConfig(), document=jnp.asarray([[0, 0, 1, -1]]))
    np.testing.assert_array_equal(plan.mode, [[[F, S], [F, S], [S, F], [S, S]]])
    assert plan.mode.dtype == jnp.int8
    assert (plan.block_size, plan.sink_blocks, plan.local_blocks) == (128, 1, 16)


def test_routed_plan_per_entry():
    blocks = BlockMask(bitmap=jnp.zeros((2, 2, 1, 1), jnp.uint32))
    plan = routed_plan(jnp.asarray([[[1.0, 0.0]], [[0.0, 0.0]]]), SparsityConfig(setting="xa_ssa"), blocks=blocks)
    np.testing.assert_array_equal(plan.mode, [[B, S], [S, S]])
    assert plan.blocks is blocks


def test_plans_with_block_sparse_heads_need_blocks():
    with pytest.raises(ValueError, match="blocks=None"):
        routed_plan(jnp.zeros((1, 1, 1)), SparsityConfig(setting="fa_xa"))
    with pytest.raises(ValueError, match="blocks=None"):
        uniform_plan(B, 1, 1, SparsityConfig())


def test_statics_are_part_of_the_tree():
    plan = uniform_plan(F, 1, 1, SparsityConfig())
    assert len(jax.tree.leaves(plan)) == 1
    assert jax.tree.structure(plan) != jax.tree.structure(dataclasses.replace(plan, block_size=64))


def test_model_sparsity_is_the_share_of_sparse_heads_and_differentiable():
    is_full = np.zeros((2, 1, 3, 4), np.float32)  # 2 layers, 3 documents, 4 KV heads
    is_full[0, 0, 1], is_full[1, 0, 1, :2], is_full[:, 0, 2] = 1, 1, 1
    np.testing.assert_allclose(model_sparsity(jnp.asarray(is_full)), [[1.0, 0.25, 0.0]])
    gradient = jax.grad(lambda z: model_sparsity(z)[0, 1])(jnp.asarray(is_full))
    np.testing.assert_allclose(gradient[:, 0, 1], np.full((2, 4), -1 / 8))
    assert not np.asarray(gradient)[:, 0, ::2].any()


def test_effective_sparsity_counts_token_pairs_of_each_document():
    x = inputs(PACKED)
    document = jnp.asarray(np.repeat([0, 1, 2, 3, -1], [3, 17, 1, 12, 2])[None].repeat(2, 0))
    ratio = jax.jit(functools.partial(effective_sparsity, num_blocks=35, num_documents=5))(
        x.plan, first_block=x.first_block, document=document
    )
    mask, owner = dense_mask(PACKED, x), np.repeat(document[0], PACKED.block)
    for c in range(4):
        own = owner == c
        pairs = own.sum() * (own.sum() + 1) // 2
        np.testing.assert_allclose(ratio[:, c], 1 - mask[:, :, own].sum((2, 3)).mean(1) / pairs, rtol=1e-5, atol=1e-6)
    assert not np.asarray(ratio)[:, 4].any()  # a document that no block belongs to


def test_effective_sparsity_with_lengths():
    case = Case(name="ragged", queries=100, keys=100, heads=3, kv_heads=3, batch=2, ragged=True, bitmap="kv")
    x = inputs(case)
    pairs = np.asarray(x.lengths) * (np.asarray(x.lengths) + 1) / 2
    expected = 1 - dense_mask(case, x).sum((2, 3)).mean(1) / pairs
    np.testing.assert_allclose(effective_sparsity(x.plan, 7, lengths=x.lengths)[:, 0], expected, rtol=1e-5)


def test_effective_sparsity_of_full_heads_is_zero():
    np.testing.assert_allclose(effective_sparsity(uniform_plan(F, 1, 2, SparsityConfig()), 9), [[0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockMask.from_dense(jnp.ones((1, 2), jnp.int32)), "visible has dtype int32: accepted is bool"),
        (lambda: BlockMask(bitmap=jnp.zeros((1, 1), jnp.uint32)).to_dense(64), "num_key_blocks=64: accepted are 0 to 32"),
        (lambda: uniform_plan(7, 1, 2, SparsityConfig()), "mode=7: accepted are the values of HeadMode"),
        (lambda: routed_plan(jnp.ones((1, 2, 2)), SparsityConfig()), "C = 1 where document is None"),
        (
            lambda: routed_plan(jnp.ones((1, 1, 2)), SparsityConfig(), document=jnp.array([[0, 5]])),
            "document has id 5: accepted are ids below C = 1",
        ),
        (lambda: routed_plan(jnp.ones((2, 1, 2)), SparsityConfig(), document=jnp.array([[0, 0]])), r"document has .*shape \(1, 2\)"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
