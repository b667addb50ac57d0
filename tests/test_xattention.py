"""XAttention's estimate and selection: properties of the rule, and a brute-force implementation in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import uniform_plan
from elastic_jax.sparsity import xattention
from elastic_jax.sparsity.xattention import estimate_blocks, select_blocks
from pallas_kernels.api import mixed_head_attention
from tests import kernel_cases
from tests.tolerances import assert_close

BLOCK = 16


def brute_force(q, k, *, stride, threshold, first_block=None, lengths=None):
    """(selected bool[B, N, Q, Q], is the choice of each row clear of rounding) in float64 loops."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    batch, tokens, heads, dim = q.shape
    blocks = -(-tokens // BLOCK)
    chosen = np.zeros((batch, heads, blocks, blocks), bool)
    clear = np.ones((batch, heads, blocks), bool)
    for b, n in np.ndindex(batch, heads):
        length = tokens if lengths is None else int(lengths[b])
        qs, ks = np.zeros((blocks * BLOCK, dim)), np.zeros((blocks * BLOCK, dim))
        qs[:length], ks[:length] = q[b, :length, n], k[b, :length, n // (heads // k.shape[2])]
        cells = len(qs) // stride
        mass = np.zeros((blocks, blocks))
        for i in range(-(-length // stride)):
            begin = 0 if first_block is None else int(first_block[b, i * stride // BLOCK]) * BLOCK // stride
            row = np.full(cells, -np.inf)
            for a in range(begin, i + 1):
                row[a] = sum(qs[i * stride + stride - 1 - m] @ ks[a * stride + m] for m in range(stride)) / (np.sqrt(dim) * stride)
            p = np.exp(row - row.max())
            np.add.at(mass[i * stride // BLOCK], np.arange(cells) * stride // BLOCK, p / p.sum())
        for r in range(blocks):
            begin = 0 if first_block is None else int(first_block[b, r])
            keep = {begin, r}
            target = threshold * mass[r].sum()
            for c in sorted(set(range(begin, r + 1)) - keep, key=lambda c: (-mass[r, c], c)):
                clear[b, n, r] &= target == 0 or abs(mass[r, list(keep)].sum() - target) > 1e-4
                if mass[r, list(keep)].sum() >= target:
                    break
                keep.add(c)
            chosen[b, n, r, list(keep)] = True
    return chosen, clear


random_qk = functools.partial(kernel_cases.random_qk, dim=8, sharpness=3)


def estimate(q, k, stride=4, threshold=0.8, lengths=None, **arrays):
    if lengths is not None:
        arrays["valid"] = jnp.arange(q.shape[1]) < lengths[:, None]
    return jax.jit(functools.partial(estimate_blocks, block_size=BLOCK, stride=stride, threshold=threshold))(q, k, **arrays)


PACKED = np.asarray([[0, 0, 0, 3, 3, 3, 3, 7, 8], [0, 1, 1, 1, 1, 1, 1, 1, 8]])


@pytest.mark.parametrize(
    ("stride", "arrays"),
    [
        (4, {}),
        (16, {"lengths": jnp.asarray([139, 50])}),
        (8, {"first_block": jnp.asarray(PACKED), "lengths": jnp.asarray([128, 139])}),
    ],
)
def test_agrees_with_brute_force(stride, arrays, monkeypatch):
    monkeypatch.setattr(xattention, "_CHUNK_BYTES", 2**12)  # several chunks
    q, k = random_qk(140)
    expected, clear = brute_force(q, k, stride=stride, threshold=0.8, **arrays)
    actual = np.asarray(estimate(q, k, stride, **arrays).to_dense(9))
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(actual[clear], expected[clear])
    assert not expected[:, :, 5:].all(-1).any()  # something was left out


def test_padding_of_any_content_changes_nothing():
    q, k = random_qk(140)
    lengths = jnp.asarray([139, 50])
    beyond = (jnp.arange(140) >= lengths[:, None])[..., None, None]
    poisoned = estimate(*(jnp.where(beyond, jnp.nan, x) for x in (q, k)), lengths=lengths)
    np.testing.assert_array_equal(poisoned.bitmap, estimate(q, k, lengths=lengths).bitmap)


def test_padding_inside_a_packed_document_counts_for_nothing():
    """A document that ends 25 tokens before its last block's edge selects what it selects alone."""
    q, k = random_qk(8 * BLOCK)
    length, first = 5 * BLOCK - BLOCK // 2 - 1, jnp.asarray([[0] * 5 + [5] * 3] * 2)
    valid = (jnp.arange(8 * BLOCK) < length) | (jnp.arange(8 * BLOCK) >= 5 * BLOCK)
    packed = estimate(q, k, first_block=first, valid=jnp.stack([valid] * 2)).to_dense(8)[:, :, :5, :5]
    alone = estimate(q[:, :length], k[:, :length]).to_dense(5)
    np.testing.assert_array_equal(packed, alone)
    counted = estimate(q, k, first_block=first).to_dense(8)[:, :, :5, :5]
    assert not np.array_equal(counted, alone)  # the padding would have changed the last row


def test_entries_and_documents_do_not_see_each_other():
    q, k = random_qk(128)
    packed = estimate(q, k, first_block=jnp.asarray([[0, 0, 0, 3, 3, 3, 3, 3]] * 2)).to_dense(8)
    alone = estimate(q[1:, 48:], k[1:, 48:]).to_dense(5)
    np.testing.assert_array_equal(packed[1:, :, 3:, 3:], alone)
    assert not np.asarray(packed)[:, :, 3:, :3].any()


def test_bfloat16_inputs_are_summed_in_float32():
    q, k = random_qk(128, dtype=jnp.bfloat16)
    wide = estimate(q.astype(jnp.float32), k.astype(jnp.float32))
    np.testing.assert_array_equal(estimate(q, k).bitmap, wide.bitmap)


@pytest.mark.parametrize("threshold", [0.8, 1.0])
def test_heads_that_are_not_needed_get_no_blocks(threshold):
    q, k = random_qk(140)
    needed = jnp.asarray([[False, True], [False, False]])
    some, every = (estimate(q, k, threshold=threshold, **arrays).bitmap for arrays in ({"needed": needed}, {}))
    np.testing.assert_array_equal(some[0, 2:], every[0, 2:])
    assert not np.asarray(some)[0, :2].any()
    assert not np.asarray(some)[1].any()


def test_threshold_one_is_dense_attention():
    q, k = random_qk(100)
    sparsity = SparsityConfig(block_size=BLOCK)
    sparse = uniform_plan(HeadMode.BLOCK_SPARSE, 2, 2, sparsity, blocks=estimate(q, k, threshold=1.0))
    out, dense = (mixed_head_attention(q, k, k, p)[0] for p in (sparse, uniform_plan(HeadMode.FULL, 2, 2, sparsity)))
    assert_close(out, dense, "float32", "forward")


SELECT = jax.jit(select_blocks)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0.05, 0.999), st.integers(0, 7), st.sampled_from([0.1, 1.0, 6.0]))
def test_selection_is_the_smallest_that_reaches_the_threshold(seed, threshold, first, sharpness):
    rng = np.random.default_rng(seed)
    row = np.arange(8)
    begin = np.minimum(first, row)
    inside = (row >= begin[:, None]) & (row <= row[:, None])
    mass = np.where(inside, np.exp(rng.standard_normal((8, 8)) * sharpness), 0).astype(np.float32)
    chosen = np.asarray(SELECT(jnp.asarray(mass), jnp.asarray(row), jnp.asarray(begin), threshold))
    total = mass.sum(-1)
    kept = np.where(chosen, mass, 0).sum(-1)
    forced = (row == begin[:, None]) | (row == row[:, None])
    assert chosen[forced].all()
    assert not chosen[~inside].any()
    assert (kept >= threshold * total * (1 - 1e-5)).all()
    for r, c in zip(*np.nonzero(chosen & ~forced)):
        assert kept[r] - mass[r, c] < threshold * total[r] * (1 + 1e-5)
        left_out = inside[r] & ~chosen[r]
        assert not left_out.any() or mass[r, c] >= mass[r, left_out].max()


def test_of_equal_blocks_the_lower_columns_are_kept():
    chosen = select_blocks(jnp.ones((1, 8)), jnp.asarray([7]), jnp.asarray([0]), 0.5)
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), [0, 1, 2, 7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": jnp.zeros((2, 40, 2, 8))}, "q has 32 tokens, k has 40"),
        ({"k": jnp.zeros((2, 32, 3, 8))}, "K a divisor of N"),
        ({"stride": 5}, "stride=5"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"valid": jnp.zeros((1, 32), bool)}, r"valid has shape \(1, 32\): accepted is \(2, 32\)"),
        ({"needed": jnp.zeros((2, 4), bool)}, r"needed has shape \(2, 4\): accepted is \(2, 2\)"),
        ({"implementation": "cudnn"}, "implementation='cudnn': accepted are None, xla, triton"),
    ],
)
def test_refuses(changes, message):
    q, k = random_qk(32)
    with pytest.raises(ValueError, match=message):
        estimate_blocks(**{"q": q, "k": k, "block_size": BLOCK, "stride": 4, "threshold": 0.9, **changes})
