"""The kernels in Triton's own language: interpreted by Triton, compiled by it without a GPU, lowered by jax-triton, and on a GPU.

Each needs other packages; where they are missing the tests are skipped and say so. Of what a compiled kernel takes, the numbers are
exact here, unlike those of Pallas-Triton: jax-triton compiles with the installed Triton.
"""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from tests.gpu_lowering import AMPERE_SHARED, HOPPER_SHARED, resources
from tests.jax_triton_interpreter import CASES as INTERPRETED
from tests.kernel_cases import CASES, NAMES, assert_agrees, assert_gpu_agrees_and_repeats, assert_gpu_entries_are_independent, inputs
from tests.test_kernels_triton import GPU_CASES, MORE_CASES
from tests.test_kernels_triton_lowering import LONG, SHAPES, Shape

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """All results of `jax_triton_interpreter`."""
    output = tmp_path_factory.mktemp("interpreted") / "results.npz"
    command = [sys.executable, "-m", "tests.jax_triton_interpreter", str(output)]
    process = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return np.load(output)


@needs_triton
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_agrees_with_the_reference(name, interpreted):
    case, _ = INTERPRETED[name]
    assert_agrees([interpreted[f"{name}/{result}"] for result in NAMES], inputs(case), case)


def forward_and_backward(call):
    from pallas_kernels import jax_triton

    out, lse = jax_triton.forward(call)
    return jax_triton.backward(call, out, lse, out)


@pytest.fixture
def capability(monkeypatch, request):
    monkeypatch.setattr(device, "compute_capability", lambda: request.param)
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """A function shape -> [(kernel, configuration, Triton IR at a capability such as 80)] of forward, dQ and dK/dV."""
    from pallas_kernels import jax_triton

    found = []

    def keep(kernel, arrays, outputs, *, programs, config, static):
        found.append((kernel, config, functools.partial(triton_ir, kernel, [*arrays, *outputs], config, static)))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

    def trace(shape):
        found.clear()
        jax.eval_shape(lambda call: forward_and_backward(call), shape.call())  # new, so that it is traced again
        return list(found)

    monkeypatch.setattr(jax_triton, "_launch", keep)
    return trace


def triton_ir(kernel, arrays, config, static, target):
    """Of a kernel, as jax-triton makes it: arrays begin at multiples of 16 bytes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    names = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
    constants = {"QUERY_TILE": config.query_tile, "KEY_TILE": config.key_tile, "STAGES": config.num_stages, **static}
    signature = dict(zip(kernel.arg_names, [names[x.dtype.name] for x in arrays])) | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
    gpu = GPUTarget("cuda", target, 32)
    backend, context = make_backend(gpu), ir.context()
    options = backend.parse_options({"num_warps": config.num_warps, "num_stages": config.num_stages})
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants, attributes)
    return str(source.make_ir(gpu, options, backend.get_codegen_implementation(options), backend.get_module_map(), context))


FIT = [s for s in SHAPES if s.block == 128 or s.dtype == "bfloat16"]


@needs_triton
@pytest.mark.parametrize(
    ("capability", "target", "limit"), [((8, 0), 80, AMPERE_SHARED), ((9, 0), 90, HOPPER_SHARED)], indirect=["capability"]
)
@pytest.mark.parametrize("shape", [*FIT, *LONG], ids=repr)
def test_fits_the_gpu(shape, capability, target, limit, launches):
    kernels = launches(shape)
    assert len(kernels) == 3
    for kernel, config, module in kernels:
        shared, spilled = resources(module(target), target, config.num_warps, config.num_stages)
        assert shared <= limit, f"{kernel.__name__} {config}"
        assert spilled <= (640 if shape.dtype == "float32" else 192), f"{kernel.__name__} {config}"


@needs_triton
def test_more_stages_take_more_shared_memory(launches, monkeypatch):
    """Loads are pipelined, those whose address comes from walking a bitmap too."""
    from pallas_kernels.jax_triton import configs

    shared = []
    for stages in (2, 3):
        monkeypatch.setattr(configs, "choose", lambda *_, stages=stages, **__: configs.TritonConfig(64, 64, 4, stages))
        shared.append([resources(module(80), 80, 4, stages)[0] for _, _, module in launches(Shape(block=64, bitmap="query"))])
    assert all(few < many for few, many in zip(*shared)), shared


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], indirect=True)
@pytest.mark.parametrize("shape", [s for s in SHAPES if (s.dtype, s.block) != ("float32", 32) or s.head_dim == 64], ids=repr)
def test_lowers_for_cuda(shape, capability):
    pytest.importorskip("jax_triton", reason="needs jax-triton and the package jax-cuda13-plugin (or 12)", exc_type=ImportError)
    lowered = jax.jit(forward_and_backward).trace(shape.call()).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @triton_kernel_call") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + MORE_CASES + GPU_CASES, ids=lambda c: c.name)
def test_gpu_agrees_with_the_reference(case):
    assert_gpu_agrees_and_repeats(case, "jax_triton")


@pytest.mark.gpu
def test_gpu_entries_are_independent():
    assert_gpu_entries_are_independent("jax_triton")
