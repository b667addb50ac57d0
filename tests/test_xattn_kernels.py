"""XAttention's GPU kernels: interpreted on any device beside the definition in plain JAX, lowered without a GPU, and as they are on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.plan import BlockMask
from elastic_jax.sparsity.xattention import estimate_blocks
from pallas_kernels import device, xattn_estimate
from pallas_kernels.triton import _compat
from pallas_kernels.xattn_estimate import EstimateConfig, smallest_set
from tests.gpu_lowering import A100, AMPERE_SHARED, H200, HOPPER_SHARED, launches, lower_cuda, resources, triton_modules
from tests.kernel_cases import random_qk

pytestmark = pytest.mark.filterwarnings(f"ignore:{_compat.DEPRECATION}:DeprecationWarning")


def kernels(q, k, first_block=None, valid=None, needed=None, *, block_size=16, stride=4, threshold=0.8):
    """The interpreted kernels with the arguments of `estimate_blocks`."""
    first = jnp.zeros((q.shape[0], -(-q.shape[1] // block_size)), jnp.int32) if first_block is None else first_block
    needed = jnp.ones((q.shape[0], k.shape[2]), bool) if needed is None else needed
    static = {"block_size": block_size, "stride": stride, "threshold": threshold, "interpret": True}
    return jax.jit(functools.partial(xattn_estimate.estimate, **static))(q, k, first, valid, needed)


def plain(q, k, first_block=None, valid=None, *, block_size=16, stride=4, threshold=0.8, implementation="xla"):
    static = {"block_size": block_size, "stride": stride, "threshold": threshold, "implementation": implementation}
    return jax.jit(functools.partial(estimate_blocks, **static))(q, k, first_block=first_block, valid=valid).bitmap


def differing_share(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.uint32
    return np.unpackbits((a ^ b).view(np.uint8)).sum() / np.unpackbits(b.view(np.uint8)).sum()


# Two documents and padding; the second document's last block is partly padding.
PACKED = {
    "first_block": jnp.asarray([[0, 0, 0, 3, 3, 3, 3, 3, 8], [0, 1, 1, 1, 1, 1, 1, 1, 8]], jnp.int32),
    "valid": jnp.stack([(jnp.arange(144) < 40) | ((jnp.arange(144) >= 48) & (jnp.arange(144) < 123)), jnp.arange(144) < 121]),
}
CASES = {
    "gqa": (random_qk(144, heads=6), {}),
    "packed": (random_qk(144), PACKED),
    "packed, cells of one token": (random_qk(144), PACKED | {"stride": 1}),
    "one cell per block": (random_qk(600, batch=1, sharpness=20), {"stride": 16}),
    "ragged": (random_qk(140), {"valid": jnp.arange(140) < jnp.asarray([[139], [50]])}),
    "small head": (random_qk(130, dim=5), {}),
    "h64, blocks of 128": (random_qk(1100, 4, 2, 1, 64, dtype=jnp.bfloat16), {"block_size": 128, "stride": 16, "threshold": 0.9}),
    "h128, blocks of 64": (random_qk(2048, 2, 1, 1, 128, dtype=jnp.float16), {"block_size": 64, "stride": 8, "threshold": 0.7}),
    "h128, blocks of 128": (random_qk(1024, 4, 1, 1, 128, dtype=jnp.bfloat16), {"block_size": 128, "stride": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_definition(case):
    (q, k), arguments = CASES[case]
    expected = plain(q, k, **arguments)
    assert differing_share(kernels(q, k, **arguments), expected) == 0
    kept = np.asarray(BlockMask(bitmap=expected).to_dense(expected.shape[2]))
    assert kept.sum(dtype=int) < 0.9 * np.broadcast_to(np.tri(kept.shape[-1]), kept.shape).sum()  # something was left out


def test_any_tiles_in_any_number_of_runs(monkeypatch):
    (q, k), arguments = random_qk(600, batch=1, seed=1), {"first_block": jnp.asarray([[0] * 10 + [10] * 28], jnp.int32)}
    expected = plain(q, k, **arguments)
    for tiles, sum_bytes in (((64, 16), 2**28), ((16, 64), 2**14), ((32, 128), 2**15)):
        monkeypatch.setattr(xattn_estimate, "choose", lambda *_, tiles=tiles: EstimateConfig(*tiles, 8, 4, 2))
        monkeypatch.setattr(xattn_estimate, "_SUM_BYTES", sum_bytes)
        assert differing_share(kernels(q, k, **arguments), expected) == 0


def block_masses(q, k, stride, block):
    """float64 [N, Q, Q] of one entry without padding."""
    q, k = np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    q_cells = q.reshape(-1, stride, *q.shape[1:])[:, ::-1]
    k_cells = k.reshape(-1, stride, *k.shape[1:])
    scores = np.einsum("ismh,asmh->mia", q_cells, k_cells) / (np.sqrt(q.shape[-1]) * stride)
    scores[:, ~np.tri(scores.shape[1], dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    blocks = q.shape[0] // block
    return p.reshape(-1, blocks, block // stride, blocks, block // stride).sum((2, 4))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([0.5, 4.0, 12.0, 60.0]))
def test_kept_mass_reaches_the_threshold_and_no_block_is_superfluous(seed, sharpness):
    q, k = random_qk(256, batch=1, seed=seed, sharpness=sharpness)
    mass = block_masses(q, k, 4, 16)
    chosen = np.asarray(BlockMask(bitmap=kernels(q, k)).to_dense(16))[0]
    kept, total = (mass * chosen).sum(-1), mass.sum(-1)
    assert (kept >= 0.8 * total * (1 - 1e-5)).all()
    forced = np.eye(16, dtype=bool) | (np.arange(16) == 0)
    without = kept[..., None] - np.where(chosen & ~forced, mass, np.inf)
    assert (without < 0.8 * total[..., None] * (1 + 1e-5)).all()
    assert (chosen | ~forced).all()
    assert not chosen[:, ~np.tri(16, dtype=bool)].any()


_SMALLEST = jax.jit(smallest_set)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 15), st.floats(0.01, 0.9999), st.sampled_from([1, 3, 1000, 2**25]))
def test_selection_is_exact(data, row, threshold, largest):
    first = data.draw(st.integers(0, row))
    units = np.zeros(16, np.int32)
    units[first : row + 1] = data.draw(st.lists(st.integers(0, largest), min_size=row + 1 - first, max_size=row + 1 - first))
    chosen = np.asarray(_SMALLEST(jnp.asarray(units), row, first, threshold))
    forced = np.isin(np.arange(16), (first, row))
    target = min(units.sum(), np.ceil(np.float32(units.sum()) * np.float32(threshold)))
    kept = units[chosen].sum()
    assert chosen[forced].all()
    assert kept >= target
    free = chosen & ~forced
    assert (kept - units[free] < target).all()
    left_out = (units > 0) & ~chosen
    for c in np.flatnonzero(free):  # no better one was left out: none is larger, none equal and further to the left
        assert not (left_out & ((units > units[c]) | ((units == units[c]) & (np.arange(16) < c)))).any()
    assert not chosen[:first].any()
    assert not chosen[row + 1 :].any()


def test_padding_of_any_content_changes_nothing():
    q, k = random_qk(140)
    valid = jnp.arange(140) < jnp.asarray([[139], [50]])
    poisoned = (jnp.where(valid[..., None, None], x, jnp.nan) for x in (q, k))
    np.testing.assert_array_equal(kernels(*poisoned, valid=valid), kernels(q, k, valid=valid))


def test_documents_and_entries_do_not_see_each_other():
    q, k = random_qk(128)
    first = jnp.asarray([[0, 0, 0, 3, 3, 3, 3, 3]] * 2, jnp.int32)
    together = kernels(q, k, first_block=first)
    packed = BlockMask(bitmap=together).to_dense(8)
    np.testing.assert_array_equal(packed[1:, :, 3:, 3:], BlockMask(bitmap=kernels(q[1:, 48:], k[1:, 48:])).to_dense(5))
    twice = (jnp.stack([x[1]] * 2) for x in (q, k))
    np.testing.assert_array_equal(kernels(*twice, first_block=first)[0], together[1])
    np.testing.assert_array_equal(kernels(q, k, first_block=first), together)


def test_heads_that_are_not_needed_get_no_blocks():
    q, k = random_qk(140, heads=6)
    needed = jnp.asarray([[False, True], [False, False]])
    some, every = kernels(q, k, needed=needed), kernels(q, k)
    np.testing.assert_array_equal(some[0, 3:], every[0, 3:])
    assert not np.asarray(some)[0, :3].any()
    assert not np.asarray(some)[1].any()


def test_refuses_what_it_cannot_do(monkeypatch):
    q, k = random_qk(96)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="'triton' needs a CUDA GPU, and this is a cpu; accepted for this call are None, xla"):
            plain(q, k, implementation="triton")
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    with pytest.raises(
        NotImplementedError, match="'triton' needs powers of two .*block_size=24, stride=4; accepted for this call are None, xla"
    ):
        plain(q, k, block_size=24, implementation="triton")
    np.testing.assert_array_equal(plain(q, k, block_size=24, implementation=None), plain(q, k, block_size=24, implementation="xla"))


SHAPES = {  # tokens, heads, KV heads, head dim, block, stride
    "128K": (2**17, 32, 8, 128, 128, 16),
    "1M": (2**20, 32, 8, 128, 128, 16),
    "h64": (2**15, 14, 2, 64, 128, 8),
    "blocks of 64": (2**14, 16, 8, 128, 64, 8),
    "blocks of 16": (1000, 4, 2, 128, 16, 16),
}
GPUS = {(8, 0): (A100, 80), (9, 0): (H200, 90)}


def lower(shape, dtype, kind):
    tokens, heads, kv_heads, dim, block, stride = SHAPES[shape]
    array = jax.ShapeDtypeStruct
    q, k = (array((1, tokens, n, dim), jnp.dtype(dtype)) for n in (heads, kv_heads))
    f = functools.partial(xattn_estimate.estimate, valid=None, block_size=block, stride=stride, threshold=0.9)
    call = lambda q, k, first, needed: f(q, k, first_block=first, needed=needed)
    return lower_cuda(call, q, k, array((1, -(-tokens // block)), jnp.int32), array((1, kv_heads), bool), kind=kind)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_cuda(shape, dtype, capability, monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    assert lower(shape, dtype, GPUS[capability][0]).as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("shape", "dtype"), [("128K", "bfloat16"), ("1M", "bfloat16"), ("h64", "bfloat16"), ("blocks of 64", "float32")])
def test_fits_the_gpu(shape, dtype, capability, monkeypatch):
    pytest.importorskip("triton.compiler", reason="needs the package triton, which compiles without a GPU")
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    kind, target = GPUS[capability]
    with triton_modules(monkeypatch) as modules:
        lowered = lower(shape, dtype, kind)
    assert len(modules) == 2
    for module, launch in zip(modules, launches(lowered), strict=True):
        shared, spilled = resources(module, target, *launch)
        assert shared <= (AMPERE_SHARED if target == 80 else HOPPER_SHARED)
        assert spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu_agrees_with_the_definition(case):
    (q, k), arguments = CASES[case]
    actual = plain(q, k, **arguments, implementation="triton")
    assert differing_share(actual, plain(q, k, **arguments)) <= 0.005  # near ties: products are summed in other orders
    np.testing.assert_array_equal(plain(q, k, **arguments, implementation="triton"), actual)


@pytest.mark.gpu
def test_gpu_threshold_one_is_every_block():
    q, k = random_qk(1024, dim=64, dtype=jnp.bfloat16)
    mask = estimate_blocks(q, k, block_size=128, stride=16, threshold=1.0)
    np.testing.assert_array_equal(mask.to_dense(8), np.broadcast_to(np.tri(8, dtype=bool), (2, 4, 8, 8)))
