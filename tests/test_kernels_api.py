"""The kernel API's edge: what it refuses, what it reports, what its gradient leaves out."""

import dataclasses
import functools
import importlib.machinery
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.plan import BlockMask
from pallas_kernels import api, device
from tests.kernel_cases import Case, inputs

X = inputs(Case(name="api", queries=40, keys=50, heads=4, kv_heads=2, batch=2))  # 4 blocks of 16


def call(**changes):
    """Under jit, for speed: refusals happen while tracing."""
    if "k" in changes and isinstance(changes["k"], list):  # which jit would take apart
        return api.mixed_head_attention(X.q, changes["k"], X.v, X.plan)
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
    "empty_batch": ({"q": X.q[:0], "k": X.k[:0], "v": X.v[:0]}, r"q has shape \(0, 40, 4, 16\): .* none of them 0"),
    "list": ({"k": [1.0]}, "accepted are arrays"),
    "plan": ({"plan": {"mode": X.plan.mode}}, "accepted is a HeadPlan"),
    "scale_overflows": ({"scale": 1e300}, "scale=1e\\+300: accepted are None and Python numbers above 0 that float32 can hold"),
    "block_size": (plan(block_size=48), "plan.block_size=48: accepted are powers of two from 16 to 4096"),
    "huge_block_size": (plan(block_size=2**20), "plan.block_size=1048576"),
    "window": (plan(local_blocks=0), "plan.local_blocks=0: accepted are integers from 1"),
    "sink": (plan(sink_blocks=2**31), "plan.sink_blocks=2147483648"),
    "mode_shape": (plan(mode=X.plan.mode[:, :1]), r"plan.mode has shape \(2, 1\): accepted is \(2, 2\) or \(2, 4, 2\)"),
    "mode_blocks": (plan(mode=jnp.zeros((2, 3, 2), jnp.int8)), r"plan.mode has shape \(2, 3, 2\)"),
    "mode_dtype": (plan(mode=jnp.zeros((2, 2))), "plan.mode has dtype float32: accepted are integers"),
    "bitmap_shape": (plan(blocks=BlockMask(bitmap=jnp.zeros((2, 3, 4, 1), jnp.uint32))), "plan.blocks.bitmap has shape"),
    "bitmap_dtype": (plan(blocks=BlockMask(bitmap=jnp.zeros((2, 4, 4, 1), jnp.int32))), "plan.blocks.bitmap has dtype int32"),
    "lengths_shape": ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths has shape \(3,\): accepted is \(2,\)"),
    "lengths_dtype": ({"lengths": jnp.zeros((2,))}, "lengths has dtype float32"),
    "first_block_shape": ({"first_block": jnp.zeros((2, 3), jnp.int32)}, r"first_block has shape \(2, 3\): accepted is \(2, 4\)"),
    "implementation": ({"implementation": "cuda"}, "implementation='cuda': accepted are None, reference, xla, triton, mosaic, jax_triton"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(**changes)


def on_a_gpu(monkeypatch, capability, version=(0, 11, 2)):
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "__version_info__", version)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU they run")
@pytest.mark.parametrize("name", ["triton", "mosaic", "jax_triton"])
def test_gpu_implementations_refuse_a_cpu(name):
    with pytest.raises(NotImplementedError, match=f"'{name}' needs a CUDA GPU, and this is a cpu; accepted .* None, reference, xla"):
        call(implementation=name)


HALF = {name: getattr(X, name).astype(jnp.bfloat16) for name in "qkv"}
OBSTACLES = {
    "jax": ("mosaic", {**HALF, **plan(block_size=128)}, ((9, 0), (0, 10, 2)), "jax 0.11 or newer"),
    "capability": ("mosaic", {**HALF, **plan(block_size=128)}, ((8, 0),), "compute capability 9.0, and this device has 8.0"),
    "dtype": ("mosaic", plan(block_size=128), ((9, 0),), "bfloat16 or float16 inputs, and q is float32"),
    "block_size": ("mosaic", {**HALF, **plan(block_size=64)}, ((9, 0),), "plan.block_size=128, and it is 64"),
    "head_dim": ("triton", {"q": jnp.zeros((1, 64, 2, 136))}, ((8, 0),), "a head dim up to 128, and q has 136"),
    "old": ("triton", {}, ((7, 5),), "compute capability 8.0 or newer, and this device has 7.5"),
    "package": ("jax_triton", {}, ((8, 0),), r"the package jax_triton \(pip install -r requirements-triton.txt\), which is not installed"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_says_what_an_implementation_needs(name, monkeypatch):
    implementation, changes, gpu, message = OBSTACLES[name]
    on_a_gpu(monkeypatch, *gpu)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    arguments = {"q": X.q, "plan": X.plan, **changes}
    with pytest.raises(NotImplementedError, match=message):
        api._static(arguments["q"], arguments["plan"], None, implementation)


@pytest.mark.parametrize(
    ("capability", "changes", "best", "without_jax_triton"),
    [
        ((9, 0), {**HALF, **plan(block_size=128)}, "mosaic", "mosaic"),
        ((9, 0), {**HALF, **plan(block_size=64)}, "jax_triton", "triton"),
        ((8, 0), {**HALF, **plan(block_size=128)}, "jax_triton", "triton"),
        ((10, 0), {**HALF, **plan(block_size=128)}, "jax_triton", "triton"),
        ((9, 0), {"q": jnp.zeros((1, 64, 2, 136))}, "xla", "xla"),
        ((7, 5), {}, "xla", "xla"),
    ],
)
def test_none_is_the_best_for_device_and_call(capability, changes, best, without_jax_triton, monkeypatch):
    on_a_gpu(monkeypatch, capability)
    arguments = {"q": X.q, "plan": X.plan, **changes}
    choice = lambda: api._static(arguments["q"], arguments["plan"], None, None).implementation
    for package in ("jax_triton", "triton"):
        module = types.ModuleType(package)
        module.__spec__ = importlib.machinery.ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, module)
    assert choice() == best
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert choice() == without_jax_triton


def test_backward_checks_what_the_forward_returned():
    lse = jnp.zeros((2, 40, 4))
    with pytest.raises(ValueError, match="lse has dtype int8: accepted is float32"):
        api.mixed_head_attention_backward(X.q, X.k, X.v, X.d_out, lse.astype(jnp.int8), X.d_out, X.plan)
    with pytest.raises(ValueError, match="d_out has dtype int32: accepted is floating point"):
        api.mixed_head_attention_backward(X.q, X.k, X.v, X.d_out, lse, X.d_out.astype(jnp.int32), X.plan)
    with pytest.raises(ValueError, match=r"lse has shape \(2, 40\)"):
        api.mixed_head_attention_backward(X.q, X.k, X.v, X.d_out, jnp.zeros((2, 40)), X.d_out, X.plan)


def test_the_choice_is_logged_once(caplog):
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        call()
        call()
    assert [r.getMessage() for r in caplog.records] == ["mixed_head_attention runs the reference implementation on cpu"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU it is another")
def test_none_means_xla_on_a_cpu():
    np.testing.assert_array_equal(call(implementation=None)[0], call(implementation="xla")[0])


def test_scale_defaults_to_the_head_dimension():
    np.testing.assert_array_equal(call()[0], call(scale=0.25)[0])


def test_lse_has_no_gradient():
    gradient = jax.jit(jax.grad(lambda q: jnp.nan_to_num(call(q=q)[1]).sum()))(X.q)
    assert not np.asarray(gradient).any()


def test_traced_lengths_beyond_the_keys_mean_all_keys():
    np.testing.assert_array_equal(call(lengths=jnp.full((2,), 99))[0], call()[0])


FIRST = jnp.asarray([[0, 0, 2, 2], [0, 1, 1, 3]], jnp.int32)
BAD_VALUES = {
    "lengths": ({"lengths": jnp.asarray([50, 51])}, r"lengths=\[50, 51\]: accepted are 0 to 50"),
    "negative_lengths": ({"lengths": np.asarray([-1, 3])}, r"lengths=\[-1, 3\]"),
    "mode": (plan(mode=jnp.asarray([[0, 7], [0, 1]])), r"plan.mode holds \[7\]: accepted are the values of HeadMode, 0 to 2"),
    "first_block_future": ({"first_block": FIRST.at[0, 0].set(1)}, "first_block=.*accepted are blocks of documents that follow each other"),
    "first_block_back": ({"first_block": FIRST.at[0, 3].set(0)}, "first_block="),
    "first_block_inside": ({"first_block": FIRST.at[1, 3].set(2)}, "first_block="),
    "modes_of_a_document": (
        {"first_block": FIRST, **plan(mode=jnp.zeros((2, 4, 2), jnp.int8).at[1, 2].set(1))},
        "accepted is one mode per head for all blocks of a document",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_refuses_known_values(name):
    changes, message = BAD_VALUES[name]
    arguments = {"q": X.q, "k": X.k, "v": X.v, "plan": X.plan, **changes}
    with pytest.raises(ValueError, match=message):
        api.mixed_head_attention(**arguments, implementation="reference")


def test_accepts_documents_with_modes_of_their_own():
    mode = jnp.zeros((2, 4, 2), jnp.int8).at[0, 2:].set(1).at[1, 3].set(1)
    arguments = {"q": X.q, "k": X.k, "v": X.v, "first_block": FIRST, **plan(mode=mode)}
    assert api.mixed_head_attention(**arguments, implementation="reference")[0].shape == X.q.shape


def test_scale_is_not_traced():
    with pytest.raises(ValueError, match="accepted are None and Python numbers above 0"):
        jax.jit(lambda scale: api.mixed_head_attention(X.q, X.k, X.v, X.plan, scale=scale))(0.5)


@pytest.mark.parametrize(("capability", "expected"), [("9.0", ("gpu", (9, 0))), ("12.1", ("gpu", (12, 1))), ("gfx942", ("rocm", None))])
def test_device_of_other_vendors(capability, expected, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(device, "_device", lambda: gpu)
    assert (device.platform(), device.compute_capability()) == expected


def test_device_of_a_lowering_is_the_abstract_one():
    abstract = jax.sharding.AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=abstract)):
        assert (device.platform(), device.compute_capability()) == ("gpu", None)


def test_nan_among_visible_keys_is_not_an_empty_row():
    out, lse = call(k=X.k.at[0, 10].set(jnp.nan), plan=dataclasses.replace(X.plan, mode=jnp.zeros((2, 2), jnp.int8)), implementation="xla")
    assert np.isnan(np.asarray(lse[0])).all()  # every query comes after key 10
    assert np.isfinite(np.asarray(out[1])).all()


def test_float32_results_whatever_the_default_precision():
    with jax.enable_x64(True):
        assert call(implementation="xla")[1].dtype == jnp.float32


def test_traced_lengths_of_any_integer_type():
    lengths = jnp.asarray([2**32 - 1, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(call(lengths=lengths)[0], call()[0])
