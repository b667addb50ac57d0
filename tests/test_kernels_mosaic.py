"""The Mosaic GPU kernels: interpreted and lowered on any device, and as they are on Hopper (tests marked gpu). Needs jax 0.11."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from elastic_jax.plan import BlockMask, HeadPlan
from tests.kernel_cases import NAMES, Case, assert_agrees, assert_same_bits, attend, four_plans, inputs, take_entries
from tests.tolerances import assert_close

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernels need jax 0.11; `make test-kernels` runs these tests with it", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.bench.shapes import SHAPES
from pallas_kernels import mosaic, reference
from pallas_kernels.mosaic import tiles

SMALL = functools.partial(Case, block=128, head_dim=64, dtype=jnp.bfloat16)
# Interpreted kernels run one thread a warpgroup in Python, so the cases are few and small.
INTERPRETED = [
    SMALL(name="grouped", queries=256, keys=256, heads=2, kv_heads=1, bitmap="none", head_dim=128),
    SMALL(name="packed", queries=512, keys=512, heads=2, kv_heads=1, documents=(1, 2, 1), dtype=jnp.float16),
    SMALL(name="suffix", queries=128, keys=384, heads=2, kv_heads=2, bitmap="kv", ragged=True),
]
ON_GPU = [
    SMALL(name="one_block", queries=128, keys=128, heads=1, kv_heads=1),
    SMALL(name="grouped", queries=2048, keys=2048, heads=8, kv_heads=2, head_dim=128),
    SMALL(name="ragged", queries=1000, keys=1000, heads=9, kv_heads=3, batch=3, ragged=True),
    SMALL(name="packed", queries=2560, keys=2560, heads=4, kv_heads=2, batch=2, documents=(3, 9, 1, 5), head_dim=128, dtype=jnp.float16),
    SMALL(name="suffix", queries=300, keys=5000, heads=4, kv_heads=1, batch=2, bitmap="kv", ragged=True, head_dim=128),
    SMALL(name="odd_head_dim", queries=512, keys=512, heads=2, kv_heads=1, head_dim=80),
    SMALL(name="no_bitmap", queries=1024, keys=1024, heads=6, kv_heads=2, batch=2, bitmap="none"),
]


class _Sum:
    """A stand-in for an accumulator, which the interpreter can neither start from a value nor feed from registers."""

    def __init__(self, value):
        self.value = value


@pytest.fixture
def interpret(monkeypatch):
    def accumulate(run, *start):
        sums = [_Sum(x) for x in start]
        run(*sums)
        return tuple(s.value for s in sums)

    def wgmma(acc, a, b):
        a = a if isinstance(a, jax.Array) else a[...]
        acc.value = acc.value + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    monkeypatch.setattr(tiles, "accumulate", accumulate)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def tables(case, x):
    mode = x.plan.mode if x.plan.mode.ndim == 3 else jnp.broadcast_to(x.plan.mode[:, None], (case.batch, case.num_blocks, case.kv_heads))
    lengths = jnp.full((case.batch,), case.keys, jnp.int32) if x.lengths is None else x.lengths
    first = jnp.zeros((case.batch, case.num_blocks), jnp.int32) if x.first_block is None else x.first_block
    return dataclasses.replace(x.plan, mode=mode), lengths, first


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda c: c.name)
def test_interpreted_agrees_with_the_reference(case, interpret):
    x = inputs(case)
    statics = tables(case, x)
    out, lse = mosaic.forward(x.q, x.k, x.v, *statics, scale=0.125)
    expected = reference.forward(x.q, x.k, x.v, *statics, scale=0.125)
    for name, a, e in zip(NAMES, (out, lse), expected):
        assert_close(a, e, case.dtype, "forward", name)
    actual = mosaic.backward(x.q, x.k, x.v, *expected, x.d_out, *statics, scale=0.125)
    for name, a, e in zip(NAMES[2:], actual, reference.backward(x.q, x.k, x.v, *expected, x.d_out, *statics, scale=0.125)):
        assert a.dtype == e.dtype
        assert_close(a, e, case.dtype, "gradient", name)


@pytest.mark.parametrize("bitmap", ["none", "query", "kv"])
@pytest.mark.parametrize("shape", dict.fromkeys(SHAPES.values()), ids=lambda s: f"{s.heads}_{s.kv_heads}_{s.head_dim}")
def test_lowers_for_cuda_without_a_gpu(shape, bitmap):
    tokens, array = 2**18, jax.ShapeDtypeStruct
    blocks = tokens // 128
    q, k = (array((1, tokens, heads, shape.head_dim), jnp.bfloat16) for heads in (shape.heads, shape.kv_heads))
    heads = {"none": 0, "query": shape.heads, "kv": shape.kv_heads}[bitmap]
    mask = BlockMask(bitmap=array((1, heads, blocks, blocks // 32), jnp.uint32)) if heads else None
    mode = array((1, blocks, shape.kv_heads), jnp.int8)
    plan = HeadPlan(mode=mode, blocks=mask, sink_blocks=1, local_blocks=16, block_size=128)

    def both(q, k, v, d_out, *statics):
        out, lse = mosaic.forward(q, k, v, *statics, scale=0.1)
        return mosaic.backward(q, k, v, out, lse, d_out, *statics, scale=0.1)

    lowered = (
        jax.jit(both).trace(q, k, k, q, plan, array((1,), jnp.int32), array((1, blocks), jnp.int32)).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("wgmma") > 0


def on_gpu(x):
    # Freed memory full of NaN is what the outputs are then likely to be made of.
    jnp.full((256, 2**20), jnp.nan).block_until_ready().delete()
    return attend(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda c: c.name)
def test_gpu_agrees_with_the_reference(case):
    x = inputs(case)
    actual = on_gpu(x)
    assert_agrees(actual, x, case)
    for again, first in zip(on_gpu(x), actual):
        assert_same_bits(again, first)


@pytest.mark.gpu
def test_gpu_entries_are_independent():
    x = four_plans(queries=10 * 128 + 40, keys=12 * 128, block=128, head_dim=128, dtype=jnp.bfloat16)
    together = on_gpu(x)
    for b in range(4):
        for actual, expected in zip(on_gpu(take_entries(x, slice(b, b + 1))), together):
            assert_same_bits(actual, expected[b : b + 1])
