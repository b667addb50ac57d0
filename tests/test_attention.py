"""Routed attention: gradients against dense autodiff, what checkpointing repeats, and inference's selected branch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.attention import routed_attention, selected_attention
from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.models.decoder import SAVE_ATTENTION
from elastic_jax.plan import routed_plan, uniform_plan, visible_blocks
from elastic_jax.sparsity.xattention import estimate_blocks
from pallas_kernels.api import mixed_head_attention
from tests.tolerances import assert_close

SETTINGS = ["fa_ssa", "fa_xa", "xa_ssa"]
BLOCK = 16
DOCUMENT = jnp.asarray([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2]])
FIRST = jnp.asarray([[0, 0, 0, 0, 0, 5, 5, 5, 5, 9], [0, 1, 1, 1, 1, 1, 1, 1, 1, 9]])
IS_FULL = jnp.asarray([[[1, 0], [0, 1], [0, 0]], [[0, 0], [1, 0], [1, 1]]], jnp.float32)


def sparsity(setting="fa_ssa", **changes):
    defaults = {"block_size": BLOCK, "sink_tokens": BLOCK, "local_tokens": BLOCK, "xattn_stride": 4, "xattn_threshold": 0.6}
    return SparsityConfig(setting=setting, **{**defaults, **changes})


def arrays(group, tokens=10 * BLOCK, batch=2, kv_heads=2, dim=8, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, tokens, n, dim) for n in (kv_heads * group, kv_heads, kv_heads, kv_heads * group)]
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    return q, k, v, d_out


def dense_mode(q, k, v, mode, config, first_block):
    """Plain softmax attention under the mode's dense mask; jax.grad does the rest."""
    tokens, heads = q.shape[1:3]
    blocks = None
    if mode == HeadMode.BLOCK_SPARSE:
        blocks = estimate_blocks(
            q, k, block_size=BLOCK, stride=config.xattn_stride, threshold=config.xattn_threshold, first_block=first_block
        )
    visible = visible_blocks(
        uniform_plan(mode, q.shape[0], k.shape[2], config, blocks=blocks), -(-tokens // BLOCK), -(-tokens // BLOCK), first_block
    )
    mask = jnp.repeat(jnp.repeat(visible, BLOCK, axis=2), BLOCK, axis=3)[..., :tokens, :tokens]
    mask = jnp.repeat(mask & jnp.tril(jnp.ones((tokens, tokens), bool)), heads // mask.shape[1], axis=1)
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v, precision="highest")


def dense_routed(q, k, v, is_full, document, first_block, config):
    """The mix z O_full + (1 - z) O_sparse in float32, whose value is the selection and whose z gradient is the difference."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    full, sparse = (dense_mode(q, k, v, mode, config, first_block) for mode in (config.retrieval_mode, config.sparse_mode))
    member = jnp.repeat(document, BLOCK, axis=1)[:, : q.shape[1], None] == jnp.arange(is_full.shape[1])
    z = jnp.einsum("btc,bck->btk", member.astype(jnp.float32), is_full)
    z = jnp.repeat(z, q.shape[2] // k.shape[2], axis=2)[..., None]
    return z * full + (1 - z) * sparse


@functools.partial(jax.jit, static_argnames=("function", "config"))
def value_and_gradients(q, k, v, is_full, d_out, document, first_block, *, function, config):
    out, pullback = jax.vjp(lambda *x: function(*x, document, first_block, config), q, k, v, is_full)
    return out, *pullback(d_out.astype(out.dtype))


def routed(q, k, v, is_full, document, first_block, config):
    return routed_attention(q, k, v, is_full, document=document, first_block=first_block, sparsity=config)


@pytest.mark.parametrize(
    ("setting", "group", "tokens", "dtype"),
    [
        ("fa_ssa", 3, 160, jnp.float32),
        ("fa_xa", 4, 160, jnp.float32),
        ("xa_ssa", 1, 160, jnp.float32),
        ("fa_ssa", 1, 151, jnp.float32),
        ("fa_xa", 3, 160, jnp.bfloat16),
    ],
)
def test_training_agrees_with_dense_autodiff_and_inference_with_training(setting, group, tokens, dtype):
    q, k, v, d_out = arrays(group, tokens, dtype=dtype)
    arguments, config = (q, k, v, IS_FULL, d_out, DOCUMENT, FIRST), sparsity(setting)
    actual = value_and_gradients(*arguments, function=routed, config=config)
    expected = value_and_gradients(*arguments, function=dense_routed, config=config)
    assert actual[0].dtype == dtype
    assert actual[4].dtype == jnp.float32
    for name, a, e in zip(("out", "dq", "dk", "dv", "d_is_full"), actual, expected):
        assert_close(a, e, dtype, "forward" if name == "out" else "gradient", name)
    assert np.abs(expected[4]).max() > 0.1  # the two branches differ

    select = jax.jit(functools.partial(selected_attention, sparsity=config))
    selected, plan = select(q, k, v, IS_FULL, document=DOCUMENT, first_block=FIRST)
    np.testing.assert_array_equal(np.asarray(selected, np.float32), np.asarray(actual[0], np.float32))
    np.testing.assert_array_equal(plan.mode, routed_plan(IS_FULL, config, document=DOCUMENT, blocks=plan.blocks).mode)


def test_padding_blocks_give_decisions_no_gradient():
    q, k, v, d_out = arrays(3)
    loud = d_out.at[0, 9 * BLOCK :].set(1e6)  # the padding block of the first pack
    run = functools.partial(value_and_gradients, document=DOCUMENT, first_block=FIRST, function=routed, config=sparsity())
    np.testing.assert_array_equal(run(q, k, v, IS_FULL, loud)[4], run(q, k, v, IS_FULL, d_out)[4])


def test_one_document_per_entry_needs_no_tables():
    q, k, v, d_out = arrays(2, tokens=64)
    zeros = jnp.zeros((2, 4), jnp.int32)
    with_tables = value_and_gradients(q, k, v, IS_FULL[:, :1], d_out, zeros, zeros, function=routed, config=sparsity())
    without = value_and_gradients(q, k, v, IS_FULL[:, :1], d_out, None, None, function=routed, config=sparsity())
    for a, e in zip(without, with_tables):
        assert_close(a, e, "float32", "gradient")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_checkpointed_layer_runs_no_attention_forward_twice(setting):
    q, k, v, _ = arrays(1, tokens=64)
    config = sparsity(setting)

    def layer(q, k, v, is_full):
        return jnp.sin(routed(jnp.sin(q), k, v, is_full, DOCUMENT[:, :4] * 0, FIRST[:, :4] * 0, config)).sum()

    def loops_and_sorts(function):
        text = str(jax.make_jaxpr(jax.grad(function, (0, 1, 2, 3)))(q, k, v, IS_FULL))
        return text.count(" while["), text.count(" sort[")

    policy = SAVE_ATTENTION
    sorts = 0 if setting == "fa_ssa" else 2  # of XAttention's selection
    assert loops_and_sorts(layer) == (3, sorts)  # a kernel has one loop of traced length: two branches, one backward pass
    assert loops_and_sorts(jax.checkpoint(layer, policy=policy)) == (3, sorts)
    assert loops_and_sorts(jax.checkpoint(layer)) == (5, 2 * sorts)  # the measure does see what runs again


def test_selected_estimates_only_where_a_head_needs_it():
    q, k, v, _ = arrays(1, tokens=64)
    select = jax.jit(functools.partial(selected_attention, document=None, first_block=None, sparsity=sparsity("fa_xa")))
    full, needed = jnp.ones((2, 1, 2)), jnp.ones((2, 1, 2)).at[1, 0, 1].set(0)
    assert not np.asarray(select(q, k, v, full)[1].blocks.bitmap).any()
    assert np.asarray(select(q, k, v, needed)[1].blocks.bitmap).any()


def test_selected_with_padding_equals_each_prompt_alone():
    q, k, v, _ = arrays(2, tokens=90)
    lengths = jnp.asarray([90, 41])
    beyond = (jnp.arange(90) >= lengths[:, None])[..., None, None]
    q, k, v = (jnp.where(beyond, jnp.nan, x) for x in (q, k, v))
    is_full = jnp.asarray([[[1.0, 0.0]], [[0.0, 1.0]]])
    select = jax.jit(functools.partial(selected_attention, document=None, first_block=None, sparsity=sparsity("xa_ssa")))
    out, plan = select(q, k, v, is_full, lengths=lengths)
    assert plan.mode.shape == (2, 2)
    alone, _ = select(q[1:, :41], k[1:, :41], v[1:, :41], is_full[1:])
    assert_close(out[1:, :41], alone, "float32", "forward")
    assert not np.asarray(out)[1, 41:].any()


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa"])
def test_a_full_budget_is_dense_attention(setting):
    q, k, v, d_out = arrays(1)
    everything = sparsity(setting, local_tokens=160, xattn_threshold=1.0)
    sparse = value_and_gradients(q, k, v, IS_FULL * 0, d_out, DOCUMENT, FIRST, function=routed, config=everything)
    plan = uniform_plan(HeadMode.FULL, 2, 2, everything)
    dense, _ = jax.jit(mixed_head_attention)(q, k, v, plan, first_block=FIRST)
    np.testing.assert_array_equal(sparse[0], dense)
    assert not np.asarray(sparse[4]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_full": IS_FULL[:1]}, r"is_full has shape \(1, 3, 2\): accepted is \(2, C, 2\)"),
        ({"document": None, "first_block": None}, "C = 1 where document is None"),
        ({"first_block": None}, "document and first_block"),
        ({"document": DOCUMENT[:, :9]}, r"document has shape \(2, 9\): accepted is \(2, 10\)"),
        ({"first_block": FIRST[:, :9]}, r"first_block has shape \(2, 9\)"),
        ({"k": jnp.zeros((2, 170, 2, 8))}, "with one T"),
    ],
)
def test_refuses(changes, message):
    q, k, v, _ = arrays(1)
    call = {"q": q, "k": k, "v": v, "is_full": IS_FULL, "document": DOCUMENT, "first_block": FIRST, "sparsity": sparsity()}
    with pytest.raises(ValueError, match=message):
        routed_attention(**{**call, **changes})
