"""Mixed-head attention as Pallas-Triton kernels, forward and backward, for Ampere and every other CUDA GPU.

Modes, documents and lengths are unknown to the kernels: they walk the tables of `pallas_kernels.visits`. A tile never exceeds a plan's
block, so what a tile visits is decided by its block; only the diagonal block needs a mask by element, and it is peeled off the loops.
"""

from __future__ import annotations

from typing import Any

import jax

from elastic_jax.plan import HeadPlan
from pallas_kernels import device
from pallas_kernels.common import Kernel, TritonConfig, row_statistics
from pallas_kernels.triton import backward_kernels, configs, forward_kernel
from pallas_kernels.visits import key_visits, query_visits


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: HeadPlan,
    lengths: jax.Array,
    first_block: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`. interpret: run the kernel's operations as JAX's, on any device, for tests."""
    visits = query_visits(plan, lengths, first_block, q.shape[1] // plan.block_size)
    return forward_kernel.attend(
        q, k, v, visits, lengths, scale=scale, block_size=plan.block_size, config=_config("forward", q, plan), interpret=interpret
    )


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    plan: HeadPlan,
    lengths: jax.Array,
    first_block: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`api._Kernel.backward`. interpret: as in `forward`."""
    query_blocks = q.shape[1] // plan.block_size
    lse2, delta = row_statistics(out, lse, d_out)
    d_out = d_out.astype(q.dtype)
    by_query, by_key = (f(plan, lengths, first_block, query_blocks) for f in (query_visits, key_visits))
    shared: dict[str, Any] = {"scale": scale, "block_size": plan.block_size, "interpret": interpret}
    dq = backward_kernels.query_gradient(q, k, v, d_out, lse2, delta, by_query, config=_config("dq", q, plan), **shared)
    dk, dv = backward_kernels.key_gradients(q, k, v, d_out, lse2, delta, by_key, config=_config("dkv", q, plan), **shared)
    return dq, dk, dv


def _config(kernel: Kernel, q: jax.Array, plan: HeadPlan) -> TritonConfig:
    return configs.choose(
        kernel,
        head_dim=q.shape[-1],
        dtype=q.dtype,
        block_size=plan.block_size,
        capability=device.compute_capability(),
    )
