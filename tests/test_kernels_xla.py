"""The block-wise JAX implementation: parity with the reference, skipping, independence of batch and padding, transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import routed_plan, uniform_plan
from pallas_kernels import device, xla
from pallas_kernels.api import mixed_head_attention
from tests.kernel_cases import CASES, Case, assert_agrees, assert_same_bits, attend, inputs, run
from tests.tolerances import assert_close


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_the_reference(case):
    x = inputs(case)
    assert_agrees(run(x, "xla"), x, case)


@pytest.mark.parametrize("name", ["off_block_ragged", "packed", "bfloat16"])
def test_tiling_of_accelerators_agrees_with_the_reference(name, monkeypatch):
    """All KV heads of an entry in one step, operands in the inputs' dtype, another tile: what a GPU runs, here on the CPU."""
    case = next(c for c in CASES if c.name == name)
    x = inputs(case)
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(xla, "_DEVICE_TILE", 64)
    fresh = jax.jit(functools.partial(attend.__wrapped__, implementation="xla"))  # `attend` itself may hold the CPU's trace
    actual = fresh(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block)
    assert_agrees(actual, x, case)


def test_key_tiles_that_nobody_sees_are_not_read():
    case = Case(name="skip", queries=2048, keys=2048, heads=2, kv_heads=1, block=64, bitmap="none")
    x = inputs(case)
    plan = uniform_plan(HeadMode.STREAMING, 1, 1, SparsityConfig(block_size=64, sink_tokens=64, local_tokens=64))
    # Rows of the last 256 tokens see the first block and their own; everything between is NaN, as are the rows that would read it.
    hole = (jnp.arange(2048) >= 256) & (jnp.arange(2048) < 1792)
    q, d_out = x.q[:, 1792:], x.d_out[:, 1792:]
    k, v = (jnp.where(hole[:, None, None], jnp.nan, y) for y in (x.k, x.v))
    clean = attend(q, *(jnp.where(hole[:, None, None], 0.0, y) for y in (x.k, x.v)), d_out, plan, None, None, implementation="xla")
    for actual, expected in zip(attend(q, k, v, d_out, plan, None, None, implementation="xla"), clean):
        assert_same_bits(actual, expected)


def test_no_array_of_queries_times_keys():
    x = inputs(Case(name="long", queries=4096, keys=4096, heads=2, kv_heads=1, block=64, bitmap="none"))
    compiled = attend.lower(x.q, x.k, x.v, x.d_out, x.plan, None, None, implementation="xla").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096  # one head's scores alone would be four times this


def test_batch_neighbours_padding_and_runs_change_no_bit():
    case = Case(name="batch", queries=512, keys=512, heads=4, kv_heads=2, batch=3, block=32, ragged=True)
    x = inputs(case)
    together = run(x, "xla")
    for actual, expected in zip(run(x, "xla"), together):
        assert_same_bits(actual, expected)
    length = int(x.lengths[1])
    blocks = -(-length // case.block)
    plan = jax.tree.map(lambda a: a[1:2], x.plan)
    words = plan.blocks.bitmap[:, :, :blocks, : -(-blocks // 32)]
    plan = dataclasses.replace(plan, blocks=dataclasses.replace(plan.blocks, bitmap=words))
    alone = attend(*(y[1:2, :length] for y in (x.q, x.k, x.v, x.d_out)), plan, None, None, implementation="xla")
    for actual, expected in zip(alone, together):
        assert_same_bits(actual, expected[1:2, :length])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padding_may_hold_nan(implementation):
    x = inputs(Case(name="nan", queries=70, keys=90, heads=4, kv_heads=2, batch=2, ragged=True))
    beyond = [jnp.arange(90 - y.shape[1], 90) >= x.lengths[:, None] for y in (x.q, x.k, x.v, x.d_out)]
    q, k, v, d_out = (jnp.where(b[..., None, None], jnp.nan, y) for b, y in zip(beyond, (x.q, x.k, x.v, x.d_out)))
    poisoned = attend(q, k, v, d_out, x.plan, x.lengths, None, implementation=implementation)
    for actual, expected in zip(poisoned, run(x, implementation)):
        assert_same_bits(actual, expected)
    out, lse, dq, dk, _ = poisoned
    assert not np.asarray(out)[beyond[0]].any()
    assert np.isneginf(np.asarray(lse)[beyond[0]]).all()
    assert not np.asarray(dq)[beyond[0]].any()
    assert not np.asarray(dk)[beyond[1]].any()


def test_inside_scan_checkpoint_and_shard_map():
    devices = jax.devices()
    case = Case(name="sharded", queries=64, keys=64, heads=4, kv_heads=2, batch=2 * len(devices), bitmap="none")
    x = inputs(case)
    sparsity = SparsityConfig(block_size=16, sink_tokens=16, local_tokens=16)
    is_full = jnp.asarray(np.arange(3 * case.batch * 2).reshape(3, case.batch, 1, 2) % 3 == 0, jnp.float32)  # three layers

    def loss(implementation, wrap, q, k, v, is_full):
        def layer(q, is_full):
            plan = routed_plan(is_full, sparsity)
            return mixed_head_attention(q, k, v, plan, implementation=implementation)[0], None

        return jax.lax.scan(wrap(layer), q, is_full)[0].sum((1, 2, 3))

    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,))
    data, layers = PartitionSpec("data"), PartitionSpec(None, "data")
    sharded = jax.shard_map(
        functools.partial(loss, "xla", jax.checkpoint), mesh=mesh, in_specs=(data, data, data, layers), out_specs=data, check_vma=False
    )
    plain = functools.partial(loss, "reference", lambda f: f)
    actual, expected = (jax.jit(jax.grad(lambda *a, f=f: f(*a, is_full).sum(), (0, 1, 2)))(x.q, x.k, x.v) for f in (sharded, plain))
    for name, a, e in zip("qkv", actual, expected):
        assert_close(a, e, "float32", "gradient", f"d{name}")
