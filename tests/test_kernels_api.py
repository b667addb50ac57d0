"""The kernel API's edge: what it refuses, what it reports, what its gradient leaves out."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.plan import BlockMask
from pallas_kernels import api
from tests.kernel_cases import Case, inputs

X = inputs(Case(name="api", queries=40, keys=50, heads=4, kv_heads=2, batch=2))  # 4 blocks of 16


def call(**changes):
    """Under jit, for speed: refusals happen while tracing."""
    static = {"implementation": changes.pop("implementation", "reference"), "scale": changes.pop("scale", None)}
    arrays = {"q": X.q, "k": X.k, "v": X.v, "plan": X.plan, **changes}
    return jax.jit(functools.partial(api.mixed_head_attention, **static))(**arrays)


def plan(**changes):
    return {"plan": dataclasses.replace(X.plan, **changes)}


BAD = {
    "q_rank": ({"q": X.q[0]}, r"q has shape \(40, 4, 16\): accepted are arrays of rank 4"),
    "dtype": ({"q": X.q.astype(jnp.int32)}, "q has dtype int32: accepted are bfloat16, float16, float32"),
    "mixed_dtypes": ({"v": X.v.astype(jnp.bfloat16)}, "v has dtype bfloat16"),
    "batch": ({"k": X.k[:1]}, r"k has shape \(1, 50, 2, 16\): .* B=2"),
    "head_dim": ({"k": X.k[..., :8]}, r"k has shape .* H=16"),
    "heads_do_not_divide": ({"q": X.q[:, :, :3]}, "K a divisor of 3"),
    "queries_exceed_keys": ({"k": X.k[:, :39], "v": X.v[:, :39]}, "S >= 40"),
    "v_shape": ({"v": X.v[:, :49]}, r"v has shape \(2, 49, 2, 16\): accepted is \(2, 50, 2, 16\)"),
    "scale": ({"scale": 0.0}, r"scale=0.0"),
    "block_size": (plan(block_size=48), "plan.block_size=48: accepted are powers of two from 16"),
    "window": (plan(local_blocks=0), "plan.local_blocks=0"),
    "mode_shape": (plan(mode=X.plan.mode[:, :1]), r"plan.mode has shape \(2, 1\): accepted is \(2, 2\) or \(2, 4, 2\)"),
    "mode_blocks": (plan(mode=jnp.zeros((2, 3, 2), jnp.int8)), r"plan.mode has shape \(2, 3, 2\)"),
    "mode_dtype": (plan(mode=jnp.zeros((2, 2))), "plan.mode has dtype float32: accepted are integers"),
    "bitmap_shape": (plan(blocks=BlockMask(bitmap=jnp.zeros((2, 3, 4, 1), jnp.uint32))), "plan.blocks.bitmap has shape"),
    "bitmap_dtype": (plan(blocks=BlockMask(bitmap=jnp.zeros((2, 4, 4, 1), jnp.int32))), "plan.blocks.bitmap has dtype int32"),
    "lengths_shape": ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths has shape \(3,\): accepted is \(2,\)"),
    "lengths_dtype": ({"lengths": jnp.zeros((2,))}, "lengths has dtype float32"),
    "first_block_shape": ({"first_block": jnp.zeros((2, 3), jnp.int32)}, r"first_block has shape \(2, 3\): accepted is \(2, 4\)"),
    "implementation": ({"implementation": "cuda"}, "implementation='cuda': accepted are None, reference, xla, triton, mosaic"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_missing_implementations_say_what_there_is():
    with pytest.raises(NotImplementedError, match="available are reference, xla, triton"):
        call(implementation="mosaic")


def test_backward_checks_what_the_forward_returned():
    with pytest.raises(ValueError, match=r"lse has shape \(2, 40\)"):
        api.mixed_head_attention_backward(X.q, X.k, X.v, X.d_out, jnp.zeros((2, 40)), X.d_out, X.plan)


def test_the_choice_is_logged_once(caplog):
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        call()
        call()
    assert [r.getMessage() for r in caplog.records] == ["mixed_head_attention runs the reference implementation on cpu"]


def test_none_means_xla():
    np.testing.assert_array_equal(call(implementation=None)[0], call(implementation="xla")[0])


def test_scale_defaults_to_the_head_dimension():
    np.testing.assert_array_equal(call()[0], call(scale=0.25)[0])


def test_lse_has_no_gradient():
    gradient = jax.jit(jax.grad(lambda q: jnp.nan_to_num(call(q=q)[1]).sum()))(X.q)
    assert not np.asarray(gradient).any()


def test_lengths_beyond_the_keys_mean_all_keys():
    np.testing.assert_array_equal(call(lengths=jnp.full((2,), 99))[0], call()[0])
