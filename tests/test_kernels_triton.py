"""The Pallas-Triton kernels: interpreted on any device, and as they are on a GPU (tests marked gpu)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask
from pallas_kernels import api, triton
from pallas_kernels.triton import configs
from tests.kernel_cases import (
    CASES,
    WITHOUT_BITMAP,
    Case,
    Inputs,
    assert_agrees,
    assert_gpu_agrees_and_repeats,
    assert_gpu_entries_are_independent,
    assert_same_bits,
    attend,
    four_plans,
    inputs,
    take_entries,
)
from tests.tolerances import assert_close

# What the shared cases leave out: blocks that are several tiles, and a bitmap of six words, of which rows use up several.
MORE_CASES = [
    Case(name="tiles", queries=512, keys=768, heads=4, kv_heads=2, head_dim=64, block=128, ragged=True, dtype=jnp.bfloat16),
    Case(name="many_words", queries=320, keys=1400, heads=2, kv_heads=1, bitmap="kv"),
]
GPU_CASES = [
    Case(name="bf16_128", queries=1024, keys=1024, heads=8, kv_heads=2, batch=2, head_dim=128, block=128, ragged=True, dtype=jnp.bfloat16),
    Case(name="bf16_suffix", queries=700, keys=2100, heads=4, kv_heads=2, head_dim=128, block=128, bitmap="kv", dtype=jnp.bfloat16),
    Case(name="f16_packed", queries=1152, keys=1152, heads=4, kv_heads=4, block=64, head_dim=64, documents=(3, 9, 1), dtype=jnp.float16),
    Case(name="f32_128", queries=512, keys=512, heads=2, kv_heads=1, head_dim=128, block=128, **WITHOUT_BITMAP),
]

# A function of its own, since a trace holds whether the kernels are interpreted.
_interpreted = jax.jit(functools.partial(attend.__wrapped__, implementation="triton"))


@pytest.fixture
def interpret(monkeypatch):
    """Runs a case with interpreted kernels. They write into buffers full of NaN, so what they leave out shows."""
    for kernel in (triton.forward, triton.backward):
        monkeypatch.setattr(triton, kernel.__name__, functools.partial(kernel, interpret=True))
    monkeypatch.setattr(api, "_obstacle", lambda *_: None)
    return lambda x: _interpreted(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block)


@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=lambda c: c.name)
def test_agrees_with_the_reference(case, interpret):
    x = inputs(case)
    assert_agrees(interpret(x), x, case)


@pytest.mark.parametrize(("query_tile", "key_tile"), [(64, 16), (16, 64)])
def test_any_tiles_of_a_block(query_tile, key_tile, interpret, monkeypatch):
    monkeypatch.setattr(configs, "choose", lambda *_, **__: configs.TritonConfig(query_tile, key_tile, 4, 2))
    _interpreted.clear_cache()
    case = Case(name="any_tiles", queries=256, keys=320, heads=4, kv_heads=2, block=64)
    x = inputs(case)
    assert_agrees(interpret(x), x, case)
    _interpreted.clear_cache()


def test_entries_and_runs_change_no_bit(interpret):
    case, x = four_plans()
    together = interpret(x)
    assert_agrees(together, x, case)
    for actual, expected in zip(interpret(x), together):
        assert_same_bits(actual, expected)
    for b in range(4):
        # Beside itself rather than alone: interpreted kernels are compiled anew, with other roundings, for another batch size.
        for actual, expected in zip(interpret(take_entries(x, jnp.full(4, b))), together):
            for entry in np.asarray(actual, np.float32):
                assert_same_bits(entry, expected[b])


def test_float32_statistics_whatever_the_default_precision(interpret):
    x = inputs(Case(name="x64", queries=32, keys=32, heads=2, kv_heads=1, bitmap="none"))
    expected = interpret(x)
    with jax.enable_x64(True):
        for actual, e in zip(interpret(x), expected):
            assert actual.dtype == e.dtype
            assert_close(actual, e, "float32", "gradient")


def test_padding_may_hold_nan(interpret):
    x = inputs(Case(name="nan", queries=70, keys=90, heads=4, kv_heads=2, batch=2, ragged=True))
    beyond = [jnp.arange(90 - y.shape[1], 90) >= x.lengths[:, None] for y in (x.q, x.k, x.v, x.d_out)]
    poisoned = [jnp.where(b[..., None, None], jnp.nan, y) for b, y in zip(beyond, (x.q, x.k, x.v, x.d_out))]
    results = interpret(Inputs(*poisoned, x.plan, x.lengths, None))
    for actual, expected in zip(results, interpret(x)):
        assert_same_bits(actual, expected)
    assert not np.asarray(results[0])[beyond[0]].any()
    assert np.isneginf(np.asarray(results[1])[beyond[0]]).all()


def test_rows_that_see_nothing(interpret):
    x = inputs(Case(name="empty", queries=64, keys=64, heads=2, kv_heads=1))
    blocks = BlockMask(bitmap=jnp.zeros_like(x.plan.blocks.bitmap).at[:, 0, 2, 0].set(0b010))  # head 0, block 2 sees block 1
    x = dataclasses.replace(x, plan=dataclasses.replace(x.plan, mode=jnp.full((1, 1), HeadMode.BLOCK_SPARSE, jnp.int8), blocks=blocks))
    out, lse, dq, dk, dv = interpret(x)
    seeing = np.zeros((1, 64, 2), bool)
    seeing[:, 32:48, 0] = True
    np.testing.assert_array_equal(np.isfinite(lse), seeing)
    for rows in (out, dq):
        assert not np.asarray(rows)[~seeing].any()
    for rows in (dk, dv):
        assert np.asarray(rows)[:, 16:32].all()
        assert not np.asarray(rows)[:, :16].any()
        assert not np.asarray(rows)[:, 32:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + MORE_CASES + GPU_CASES, ids=lambda c: c.name)
def test_gpu_agrees_with_the_reference(case):
    assert_gpu_agrees_and_repeats(case, "triton")


@pytest.mark.gpu
def test_gpu_entries_are_independent():
    assert_gpu_entries_are_independent("triton")
