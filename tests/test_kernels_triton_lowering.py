"""Every configuration of the Triton kernels that a call can meet lowers for CUDA, and fits an Ampere GPU, on a machine without one.

Interpreted kernels run where a GPU refuses them, so these tests are what a CPU can say about the GPU. Lowering stops at Triton's IR;
where the package triton is installed, its compiler and ptxas go on from there to shared memory and registers. XLA has a Triton of its
own, so the numbers are close, not exact.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from elastic_jax.plan import BlockMask, HeadPlan
from pallas_kernels import device, triton
from pallas_kernels.call import Call
from pallas_kernels.triton import _compat, configs
from tests.gpu_lowering import A100, AMPERE_SHARED, H200, HOPPER_SHARED, lower_cuda, resources, triton_modules

pytestmark = pytest.mark.filterwarnings(f"ignore:{_compat.DEPRECATION}:DeprecationWarning")


@dataclasses.dataclass(frozen=True)
class Shape:
    head_dim: int = 128
    block: int = 128
    dtype: str = "bfloat16"
    bitmap: str = "none"
    tokens: int = 4096
    heads: int = 8
    kv_heads: int = 2

    def call(self):
        """Without data."""
        array, blocks = jax.ShapeDtypeStruct, self.tokens // self.block
        q, k = (array((1, self.tokens, heads, self.head_dim), jnp.dtype(self.dtype)) for heads in (self.heads, self.kv_heads))
        bitmap = None
        if self.bitmap != "none":
            heads = self.heads if self.bitmap == "query" else self.kv_heads
            bitmap = BlockMask(bitmap=array((1, heads, blocks, -(-blocks // 32)), jnp.uint32))
        mode = array((1, blocks, self.kv_heads), jnp.int8)
        plan = HeadPlan(mode=mode, blocks=bitmap, sink_blocks=1, local_blocks=4, block_size=self.block)
        return Call(q=q, k=k, v=k, plan=plan, lengths=array((1,), jnp.int32), first_block=array((1, blocks), jnp.int32), scale=0.1)


SHAPES = [
    Shape(head_dim, block, dtype, bitmap)
    for head_dim, block, dtype, bitmap in itertools.product((64, 128), (128, 64, 32, 16), ("bfloat16", "float32"), ("none", "query"))
]


def lower_both(shape, kind):
    """(forward, backward)."""
    call = shape.call()
    lse = jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32)
    forward, backward = (lambda *a, f=f: f(*a) for f in (triton.forward, triton.backward))  # new, so that they are traced again
    return lower_cuda(forward, call, kind=kind), lower_cuda(backward, call, call.q, lse, call.q, kind=kind)


@pytest.fixture
def capability(monkeypatch, request):
    monkeypatch.setattr(device, "compute_capability", lambda: request.param)
    return request.param


GPUS = [(A100, (8, 0)), (H200, (9, 0))]
HALF = Shape(dtype="float16")
LONG = [Shape(tokens=2**20, heads=32, kv_heads=8, bitmap="kv"), Shape(tokens=2**20, heads=32, kv_heads=8)]


@pytest.mark.parametrize(("kind", "capability"), GPUS, indirect=["capability"])
@pytest.mark.parametrize("shape", [*SHAPES, HALF, *LONG], ids=repr)
def test_lowers_for_cuda(shape, kind, capability):
    for lowered, kernels in zip(lower_both(shape, kind), (1, 2)):
        assert lowered.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == kernels


@pytest.fixture
def compiled_kernels(monkeypatch):
    """A function (shape, kind, target) -> [(kernel, configuration, shared bytes, spilled bytes)] of forward, dQ and dK/dV."""
    choose = configs.choose

    def compile_all(shape, kind, target):
        chosen = []

        def keep_choice(kernel, call):
            chosen.append((kernel, choose(kernel, call)))
            return chosen[-1][1]

        monkeypatch.setattr(configs, "choose", keep_choice)
        with triton_modules(monkeypatch) as modules:
            lower_both(shape, kind)
        assert [kernel for kernel, _ in chosen] == ["forward", "dq", "dkv"]
        return [
            (*choice, *resources(ir, target, choice[1].num_warps, choice[1].num_stages)) for choice, ir in zip(chosen, modules, strict=True)
        ]

    return compile_all


@pytest.mark.parametrize("capability", [(8, 0)], indirect=True)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.block == 128 or s.dtype == "bfloat16"], ids=repr)
def test_fits_every_ampere_gpu(shape, capability, compiled_kernels):
    for kernel, config, shared, spilled in compiled_kernels(shape, A100, 80):
        assert shared <= AMPERE_SHARED, f"{kernel} {config}"
        # Measured at blocks of 128: up to 40 with bfloat16, up to 16 with float32, whose tiles of 32 were chosen so that little spills.
        assert spilled <= 128, f"{kernel} {config}"


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.block >= 64 and s.dtype == "bfloat16"], ids=repr)
def test_fits_hopper(shape, capability, compiled_kernels):
    for kernel, config, shared, spilled in compiled_kernels(shape, H200, 90):
        assert shared <= HOPPER_SHARED, f"{kernel} {config}"
        assert spilled <= 512, f"{kernel} {config}"


def test_more_stages_take_more_shared_memory(compiled_kernels, monkeypatch):
    """Loads are pipelined, those whose address comes from walking a bitmap too."""
    shared = []
    for stages in (2, 3):
        monkeypatch.setattr(configs, "_BLOCK_64", dict.fromkeys(("forward", "dq", "dkv"), configs.TritonConfig(64, 64, 4, stages)))
        shared.append([kernel[2] for kernel in compiled_kernels(Shape(block=64, bitmap="query"), A100, 80)])
    assert all(few < many for few, many in zip(*shared)), shared
