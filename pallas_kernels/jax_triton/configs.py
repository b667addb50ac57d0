"""Tile sizes of the kernels by head dim, dtype, block size and the GPU's compute capability."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.call import Call
from pallas_kernels.common import Kernel, TritonConfig

# What every GPU from Ampere on can run: at most 99 KiB of shared memory, the limit of compute capabilities 8.6, 8.9 and 12.0 (8.0 has
# 163), and no register spills inside loops on 8.0. Chosen by these two, not by speed: no Ampere GPU was at hand.
_ANY = {
    64: {"forward": TritonConfig(128, 64, 4, 3), "dq": TritonConfig(64, 64, 4, 3), "dkv": TritonConfig(64, 128, 8, 2)},
    128: {"forward": TritonConfig(128, 64, 8, 3), "dq": TritonConfig(64, 64, 4, 2), "dkv": TritonConfig(64, 64, 8, 2)},
}
# Hopper has 227 KiB. Taken from `pallas_kernels.triton.configs`, where they were chosen by time; here H=128 takes 0.84 to 0.91 of the time
# that it takes there (one H200, jax 0.11.2, docs/performance.md).
_SM90 = {
    64: {"forward": TritonConfig(128, 128, 8, 3), "dq": TritonConfig(128, 64, 8, 3), "dkv": TritonConfig(64, 128, 8, 2)},
    128: {"forward": TritonConfig(128, 128, 8, 3), "dq": TritonConfig(128, 64, 8, 3), "dkv": TritonConfig(64, 128, 8, 2)},
}
_BLOCK_64 = {"forward": TritonConfig(64, 64, 4, 3), "dq": TritonConfig(64, 64, 4, 2), "dkv": TritonConfig(64, 64, 8, 2)}


def choose(kernel: Kernel, call: Call) -> TritonConfig:
    """The configuration of one kernel of a call, on the device that it is traced for."""
    head_dim, block_size, capability = call.q.shape[-1], call.plan.block_size, device.compute_capability()
    if call.q.dtype == jnp.float32:
        # Exact float32 products do not run on tensor cores, and operands are twice as large: with four warps all kernels spill, with eight
        # dq at H=128 does, half a kilobyte.
        tile = min(32, block_size)
        return TritonConfig(tile, tile, 8, 1)
    if block_size < 64:
        return TritonConfig(block_size, block_size, 4, 2)
    if block_size == 64:
        return _BLOCK_64[kernel]
    return (_SM90 if capability == (9, 0) else _ANY)[head_dim][kernel]
