"""Mixed-head attention as Pallas-Triton kernels, forward and backward, for Ampere and every other CUDA GPU.

Modes, documents and lengths are unknown to the kernels: they walk the tables of `pallas_kernels.visits`. A tile never exceeds a plan's
block, so what a tile visits is decided by its block; only the diagonal block needs a mask by element, and it is peeled off the loops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from elastic_jax.plan import HeadPlan
from pallas_kernels.triton import backward_kernels, configs, forward_kernel
from pallas_kernels.visits import Visits, key_visits, query_visits

_HEAD_DIMS = (64, 128)


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
    _check_device(interpret)
    head_dim = q.shape[-1]
    q, k, v = (_pad_head_dim(x) for x in (q, k, v))
    visits = _signed(query_visits(plan, lengths, first_block, q.shape[1] // plan.block_size))
    out, lse = forward_kernel.attend(
        q, k, v, visits, lengths, scale=scale, block_size=plan.block_size, config=_config("forward", q, k, plan), interpret=interpret
    )
    return out[..., :head_dim], lse


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
    _check_device(interpret)
    head_dim, query_blocks = q.shape[-1], q.shape[1] // plan.block_size
    lse2, delta = backward_kernels.row_statistics(out, lse, d_out, lengths, k.shape[1])
    q, k, v, d_out = (_pad_head_dim(x) for x in (q, k, v, d_out.astype(q.dtype)))
    by_query, by_key = (_signed(f(plan, lengths, first_block, query_blocks)) for f in (query_visits, key_visits))
    shared: dict[str, Any] = {"scale": scale, "block_size": plan.block_size, "interpret": interpret}
    dq = backward_kernels.query_gradient(q, k, v, d_out, lse2, delta, by_query, config=_config("dq", q, k, plan), **shared)
    dk, dv = backward_kernels.key_gradients(q, k, v, d_out, lse2, delta, by_key, config=_config("dkv", q, k, plan), **shared)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]


def _check_device(interpret: bool) -> None:
    abstract = jax.sharding.get_abstract_mesh().abstract_device  # of a program that is lowered for a device that is not here
    platform = jax.default_backend() if abstract is None else abstract.platform
    if platform not in ("gpu", "cuda") and not interpret:
        raise NotImplementedError(f"implementation='triton' needs a CUDA GPU; on {platform} accepted are None, reference, xla")


def _config(kernel: configs.Kernel, q: jax.Array, k: jax.Array, plan: HeadPlan) -> configs.TritonConfig:
    return configs.choose(
        kernel,
        head_dim=q.shape[-1],
        dtype=q.dtype,
        block_size=plan.block_size,
        num_keys=k.shape[1],
        capability=configs.compute_capability(),
    )


def _pad_head_dim(x: jax.Array) -> jax.Array:
    """Zeros up to the next head dim that the kernels have: they add nothing to products, and their own outputs are cut off."""
    if x.shape[-1] > _HEAD_DIMS[-1]:
        raise ValueError(f"q has head dim {x.shape[-1]}: implementation='triton' accepts up to {_HEAD_DIMS[-1]}")
    target = next(dim for dim in _HEAD_DIMS if dim >= x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, target - x.shape[-1])))


def _signed(visits: Visits) -> Visits:
    """Words as i32: Triton has no unsigned integers, and no word reaches the sign bit below half a million blocks."""
    if visits.words is None:
        return visits
    return dataclasses.replace(visits, words=jax.lax.bitcast_convert_type(visits.words, jnp.int32))
