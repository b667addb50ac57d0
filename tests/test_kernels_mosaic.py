"""The Mosaic GPU kernels: interpreted and lowered on any device, and as they are on Hopper (tests marked gpu). Needs jax 0.11."""

import functools

import jax
import jax.numpy as jnp
import pytest

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask, HeadPlan
from pallas_kernels import api
from pallas_kernels.call import Call
from tests.kernel_cases import (
    WITHOUT_BITMAP,
    Case,
    assert_agrees,
    assert_gpu_agrees_and_repeats,
    assert_gpu_entries_are_independent,
    attend,
    inputs,
)

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernels need jax 0.11; `make test-kernels` runs these tests with it", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # nothing public says whether a race was found
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.bench.shapes import SHAPES
from pallas_kernels import mosaic
from pallas_kernels.mosaic import tiles

SMALL = functools.partial(Case, block=128, head_dim=64, dtype=jnp.bfloat16)
LISTED = (HeadMode.BLOCK_SPARSE,)
# Interpreted kernels run one thread a warpgroup in Python, so the cases are few and small. An even number of query heads per table runs
# the forward pass in pairs of CUDA blocks that share copies; a bitmap per query head gives each its own table and no pairs.
INTERPRETED = [
    SMALL(name="pairs", queries=256, keys=256, heads=2, kv_heads=1, head_dim=128, bitmap="none", modes=(HeadMode.FULL,)),
    SMALL(name="pairs_bitmap", queries=200, keys=2600, heads=2, kv_heads=1, bitmap="kv", modes=LISTED),
    SMALL(name="bitmap", queries=256, keys=36 * 128, heads=2, kv_heads=1, modes=LISTED, dtype=jnp.float16),
    SMALL(name="packed", queries=640, keys=640, heads=1, kv_heads=1, documents=(1, 4), modes=(HeadMode.FULL, HeadMode.BLOCK_SPARSE)),
    SMALL(name="suffix", queries=128, keys=640, heads=2, kv_heads=2, bitmap="kv", modes=(*LISTED, HeadMode.STREAMING), ragged=True),
]
# Each costs a long compilation, so that they are few as well.
ON_GPU = [
    SMALL(name="group_4", queries=2304, keys=2304, heads=8, kv_heads=2, head_dim=128, **WITHOUT_BITMAP),
    SMALL(name="pairs_bitmap", queries=2048, keys=2048, heads=8, kv_heads=2, batch=2, bitmap="kv", ragged=True),
    SMALL(name="ragged", queries=1000, keys=1000, heads=9, kv_heads=3, batch=3, ragged=True, head_dim=80),
    SMALL(name="packed", queries=2560, keys=2560, heads=4, kv_heads=2, batch=2, documents=(3, 9, 1, 5), head_dim=128, dtype=jnp.float16),
    SMALL(name="suffix", queries=300, keys=20000, heads=4, kv_heads=1, batch=2, bitmap="kv", ragged=True, head_dim=128),
    SMALL(name="one_block", queries=128, keys=128, heads=1, kv_heads=1, **WITHOUT_BITMAP),
]


class _Sum:
    """A stand-in for an accumulator, which the interpreter can neither start from a value nor feed from registers."""

    def __init__(self, value):
        self.value = value


@pytest.fixture
def interpret(monkeypatch):
    """A function case -> results of the interpreted kernels, which asserts that they have no race.

    Products are stand-ins that read their operands when the kernel waits for them, the latest time at which a GPU does. Reads of operands
    are the async proxy's on a GPU, as copies are; the stand-in's are not, so a fence follows each. It serves for the loads of lse and delta
    before it as well, which the interpreter would have fenced: to read a slot, to arrive and to copy anew where that was waited for is
    ordered without a fence in every published pipeline for Hopper (CUTLASS's consumer_release).
    """
    pending, states = [], []

    def accumulate(run, *start):
        sums = [_Sum(x) for x in start]
        run(*sums)
        assert not pending, "products that nobody waits for"
        return tuple(s.value for s in sums)

    def wgmma(*operands):
        pending.append(operands)

    def wgmma_wait(newer):
        while len(pending) > newer:
            acc, a, b = pending.pop(0)
            acc.value = acc.value + jnp.dot(a if isinstance(a, jax.Array) else a[...], b[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()

    class State(gpu_callbacks.GPURaceDetectionState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            states.append(self)

    monkeypatch.setattr(tiles, "accumulate", accumulate)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(plgpu, "wgmma_wait", wgmma_wait)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", State)
    monkeypatch.setattr(api, "_obstacle", lambda *_: None)

    def run(x):
        f = jax.jit(functools.partial(attend.__wrapped__, implementation="mosaic"))
        results = jax.block_until_ready(f(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block))
        assert len(states) == 3  # of forward, dQ and dK/dV
        assert not any(state.races_found for state in states), "see the races in what was printed"
        return results

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield run
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda c: c.name)
def test_interpreted_agrees_with_the_reference(case, interpret):
    x = inputs(case)
    assert_agrees(interpret(x), x, case)


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

    call = Call(q=q, k=k, v=k, plan=plan, lengths=array((1,), jnp.int32), first_block=array((1, blocks), jnp.int32), scale=0.1)

    def both(call):
        out, lse = mosaic.forward(call)
        return mosaic.backward(call, out, lse, call.q)

    lowered = jax.jit(both).trace(call).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda c: c.name)
def test_gpu_agrees_with_the_reference(case):
    assert_gpu_agrees_and_repeats(case, "mosaic")


@pytest.mark.gpu
def test_gpu_entries_are_independent():
    assert_gpu_entries_are_independent("mosaic", queries=10 * 128 + 40, keys=12 * 128, block=128, head_dim=128, dtype=jnp.bfloat16)
