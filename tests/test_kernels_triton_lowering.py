"""Every configuration of the Triton kernels that a call can meet lowers for CUDA, and fits an Ampere GPU, on a machine without one.

Interpreted kernels run where a GPU refuses them, so these tests are what a CPU can say about the GPU. Lowering stops at Triton's IR;
where the package triton is installed, its compiler and ptxas go on from there to shared memory and registers. XLA has a Triton of its
own, so the numbers are close, not exact.
"""

import dataclasses
import itertools
import pathlib
import re
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import pytest

from elastic_jax.plan import BlockMask, HeadPlan
from pallas_kernels import triton
from pallas_kernels.triton import _compat, configs

pytestmark = pytest.mark.filterwarnings(f"ignore:{_compat.DEPRECATION}:DeprecationWarning")

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Shape:
    head_dim: int = 128
    block: int = 128
    dtype: str = "bfloat16"
    bitmap: str = "none"
    tokens: int = 4096
    heads: int = 8
    kv_heads: int = 2

    def arrays(self):
        """(q, k, plan, lengths, first_block) without data."""
        array, blocks = jax.ShapeDtypeStruct, self.tokens // self.block
        q, k = (array((1, self.tokens, heads, self.head_dim), jnp.dtype(self.dtype)) for heads in (self.heads, self.kv_heads))
        bitmap = None
        if self.bitmap != "none":
            heads = self.heads if self.bitmap == "query" else self.kv_heads
            bitmap = BlockMask(bitmap=array((1, heads, blocks, -(-blocks // 32)), jnp.uint32))
        mode = array((1, blocks, self.kv_heads), jnp.int8)
        plan = HeadPlan(mode=mode, blocks=bitmap, sink_blocks=1, local_blocks=4, block_size=self.block)
        return q, k, plan, array((1,), jnp.int32), array((1, blocks), jnp.int32)


SHAPES = [
    Shape(head_dim, block, dtype, bitmap)
    for head_dim, block, dtype, bitmap in itertools.product((64, 128), (128, 64, 32, 16), ("bfloat16", "float32"), ("none", "query"))
]


def lower_cuda(f, *arguments, kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))


def lower_both(shape, kind):
    """(forward, backward)."""
    q, k, plan, lengths, first_block = shape.arrays()
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    forward, backward = (lambda *a, f=f: f(*a, scale=0.1) for f in (triton.forward, triton.backward))
    return (
        lower_cuda(forward, q, k, k, plan, lengths, first_block, kind=kind),
        lower_cuda(backward, q, k, k, q, lse, q, plan, lengths, first_block, kind=kind),
    )


@pytest.fixture
def capability(monkeypatch, request):
    monkeypatch.setattr(configs, "compute_capability", lambda: request.param)
    return request.param


GPUS = [(A100, "8.0"), (H200, "9.0")]
LONG = [Shape(tokens=2**20, heads=32, kv_heads=8, bitmap="kv"), Shape(tokens=2**20, heads=32, kv_heads=8)]


@pytest.mark.parametrize(("kind", "capability"), GPUS, indirect=["capability"])
@pytest.mark.parametrize("shape", SHAPES + LONG, ids=repr)
def test_lowers_for_cuda(shape, kind, capability):
    assert configs.compute_capability() == capability
    for lowered, kernels in zip(lower_both(shape, kind), (1, 2)):
        assert lowered.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == kernels


def test_half_precision_lowers():
    for lowered in lower_both(Shape(dtype="float16"), A100):
        assert "f16" in lowered.as_text()


@pytest.fixture
def compiled_kernels(monkeypatch):
    """A function (shape, kind, target) -> [(kernel, configuration, shared bytes, spilled bytes)] of forward, dQ and dK/dV."""
    compiler = pytest.importorskip("triton.compiler", reason="needs the package triton, which compiles without a GPU")
    from jax._src.pallas.triton import lowering  # nothing public gives the IR

    modules, chosen = [], []
    lower, choose = lowering.lower_jaxpr_to_triton_module, configs.choose

    def keep_module(*args, **kwargs):
        result = lower(*args, **kwargs)
        modules.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    def keep_choice(kernel, **kwargs):
        chosen.append((kernel, choose(kernel, **kwargs)))
        return chosen[-1][1]

    def compile_all(shape, kind, target):
        modules.clear(), chosen.clear()
        lower_both(shape, kind)
        assert [kernel for kernel, _ in chosen] == ["forward", "dq", "dkv"]
        return [(*choice, *resources(compiler, ir, choice[1], target)) for choice, ir in zip(chosen, modules, strict=True)]

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", keep_module)
    monkeypatch.setattr(configs, "choose", keep_choice)
    return compile_all


def resources(compiler, ir, config, target):
    """(bytes of shared memory, bytes of spilled registers)."""
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        source, ptx = (pathlib.Path(folder) / name for name in ("kernel.ttir", "kernel.ptx"))
        source.write_text(ir)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled = compiler.compile(str(source), target=GPUTarget("cuda", target, 32), options=options)
        ptx.write_text(compiled.asm["ptx"])
        ptxas = pathlib.Path(compiler.__file__).parents[1] / "backends/nvidia/bin/ptxas"
        architecture = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)
        command = [ptxas, "-v", "--gpu-name", architecture, ptx, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return compiled.metadata.shared, int(re.search(r"(\d+) bytes spill stores", report).group(1))


@pytest.mark.parametrize("capability", ["8.0"], indirect=True)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.block == 128 or s.dtype == "bfloat16"], ids=repr)
def test_fits_every_ampere_gpu(shape, capability, compiled_kernels):
    for kernel, config, shared, spilled in compiled_kernels(shape, A100, 80):
        assert shared <= 99 * 1024, f"{kernel} {config}"  # of capability 8.6 and 8.9; an A100 has 163 KiB
        assert spilled <= 128 or shape.dtype == "float32", f"{kernel} {config}"


@pytest.mark.parametrize("capability", ["9.0"], indirect=True)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.block >= 64 and s.dtype == "bfloat16"], ids=repr)
def test_fits_hopper(shape, capability, compiled_kernels):
    for kernel, config, shared, spilled in compiled_kernels(shape, H200, 90):
        assert shared <= 227 * 1024, f"{kernel} {config}"
        assert spilled <= 512, f"{kernel} {config}"


def test_more_stages_take_more_shared_memory(compiled_kernels, monkeypatch):
    """Loads are pipelined, those whose address comes from walking a bitmap too."""
    shared = []
    for stages in (2, 3):
        monkeypatch.setattr(configs, "_BLOCK_64", dict.fromkeys(("forward", "dq", "dkv"), configs.TritonConfig(64, 64, 4, stages)))
        shared.append([kernel[2] for kernel in compiled_kernels(Shape(block=64, bitmap="query"), A100, 80)])
    assert all(few < many for few, many in zip(*shared)), shared
