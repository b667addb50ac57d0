"""What a machine without a GPU can say about a kernel on one: that it lowers, and what ptxas makes of it where triton is installed.

XLA has a Triton of its own, so the numbers of the package are close, not exact.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import tempfile

import jax
import pytest

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
# Bytes of shared memory that one program may have: on every GPU from Ampere on (capabilities 8.6 and 8.9 have the least), and on Hopper.
AMPERE_SHARED, HOPPER_SHARED = 99 * 1024, 227 * 1024


def lower_cuda(f, *arguments, kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))


def launches(lowered):
    """[(warps, stages)] of the Triton kernels that a lowered program calls."""
    found = re.findall(r"num_stages = (\d+) : i32, num_warps = (\d+) : i32", lowered.as_text())
    return [(int(warps), int(stages)) for stages, warps in found]


@contextlib.contextmanager
def triton_modules(monkeypatch):
    """A list that fills with the Triton IR of the kernels that are lowered meanwhile."""
    from jax._src.pallas.triton import lowering  # nothing public gives the IR

    modules, lower = [], lowering.lower_jaxpr_to_triton_module

    def keep(*args, **kwargs):
        result = lower(*args, **kwargs)
        modules.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "lower_jaxpr_to_triton_module", keep)
        yield modules


def resources(module, target, num_warps, num_stages):
    """(bytes of shared memory, bytes of spilled registers) of Triton IR on compute capability `target`, such as 80."""
    compiler = pytest.importorskip("triton.compiler", reason="needs the package triton, which compiles without a GPU")
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": num_warps, "num_stages": num_stages}
    gpu = GPUTarget("cuda", target, 32)
    with tempfile.TemporaryDirectory() as folder:
        source, ptx = (pathlib.Path(folder) / name for name in ("kernel.ttir", "kernel.ptx"))
        source.write_text(module)
        # The compiler takes IR files to be past its first passes. One of these folds an addition into the product that it follows;
        # without it every step of a sum of products holds a second accumulator.
        backend, context = compiler.make_backend(gpu), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = ir.parse_mlir_module(str(source), context)
        parsed.context = context
        backend.make_ttir(parsed, {}, backend.parse_options(options), target)
        source.write_text(str(parsed))
        compiled = compiler.compile(str(source), target=gpu, options=options)
        ptx.write_text(compiled.asm["ptx"])
        ptxas = pathlib.Path(compiler.__file__).parents[1] / "backends/nvidia/bin/ptxas"
        architecture = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)
        command = [ptxas, "-v", "--gpu-name", architecture, ptx, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return compiled.metadata.shared, int(re.search(r"(\d+) bytes spill stores", report).group(1))
