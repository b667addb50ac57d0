"""Mixed-head attention in Triton's own language, called through jax-triton: the path that JAX names for the time when Pallas has no
Triton backend any more.

The kernels do the same as those of `pallas_kernels.triton`: they walk the tables of `pallas_kernels.visits`, a tile never exceeds a
plan's block, and the diagonal block, the only one that needs a mask by element, is peeled off the loops. Importing this package imports
triton, a call jax_triton; requirements.txt leaves out both, so `api` imports the package when it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elastic_jax.plan import HeadPlan
from pallas_kernels import device
from pallas_kernels.common import LOG2_E, Kernel, TritonConfig, heaviest_first, row_statistics
from pallas_kernels.jax_triton import configs, kernels
from pallas_kernels.visits import Visits, key_visits, query_visits


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, lengths: jax.Array, first_block: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`."""
    batch, queries, heads, _ = q.shape
    config = _config("forward", q, plan)
    visits = query_visits(plan, lengths, first_block, queries // plan.block_size)
    return _call(
        kernels.forward,
        (q, k, v, lengths, *_tables(visits, q, k)),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        programs=batch * heads * (queries // config.query_tile),
        config=config,
        static={"FACTOR": scale * LOG2_E, **_static(q, k, visits, plan)},
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`api._Kernel.backward`."""
    statistics = row_statistics(out, lse, d_out)
    arrays = (q, k, v, d_out.astype(q.dtype), *statistics)
    query_blocks = q.shape[1] // plan.block_size
    (dq,) = query_gradient(*arrays, query_visits(plan, lengths, first_block, query_blocks), plan, scale=scale)
    return dq, *key_gradients(*arrays, key_visits(plan, lengths, first_block, query_blocks), plan, scale=scale)


def query_gradient(q: Any, k: Any, v: Any, d_out: Any, lse2: Any, delta: Any, visits: Visits, plan: HeadPlan, *, scale: float) -> Any:
    """(dq [B, T, N, H],). lse2, delta: `row_statistics`. visits: `query_visits` of the plan."""
    batch, queries, heads, _ = q.shape
    config = _config("dq", q, plan)
    return _call(
        kernels.query_gradient,
        (q, k, v, d_out, lse2, delta, *_tables(visits, q, k)),
        (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        programs=batch * heads * (queries // config.query_tile),
        config=config,
        static={"SCALE": scale, "FACTOR": scale * LOG2_E, **_static(q, k, visits, plan)},
    )


def key_gradients(q: Any, k: Any, v: Any, d_out: Any, lse2: Any, delta: Any, visits: Visits, plan: HeadPlan, *, scale: float) -> Any:
    """(dk, dv), both [B, S, K, H]. lse2, delta: `row_statistics`. visits: `key_visits` of the plan."""
    batch, keys, kv_heads, _ = k.shape
    config = _config("dkv", q, plan)
    return _call(
        kernels.key_gradients,
        (q, k, v, d_out, lse2, delta, *_tables(visits, q, k)),
        (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        programs=batch * kv_heads * (keys // config.key_tile),
        config=config,
        static={"SCALE": scale, "FACTOR": scale * LOG2_E, "BATCH": batch, **_static(q, k, visits, plan)},
    )


def _config(kernel: Kernel, q: jax.Array, plan: HeadPlan) -> TritonConfig:
    capability = device.compute_capability()
    return configs.choose(kernel, head_dim=q.shape[-1], dtype=q.dtype, block_size=plan.block_size, capability=capability)


def _tables(visits: Visits, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, runs, words); a kernel's parameters are fixed in number, so without words the runs take their place and are not read."""
    work = visits.runs[..., 3].reshape(q.shape[0] * k.shape[2], -1).sum(1)
    return heaviest_first(work), visits.runs, visits.runs if visits.words is None else visits.words


def _static(q: jax.Array, k: jax.Array, visits: Visits, plan: HeadPlan) -> dict[str, Any]:
    return {
        "QUERIES": q.shape[1],
        "KEYS": k.shape[1],
        "HEADS": q.shape[2],
        "KV_HEADS": k.shape[2],
        "DIM": q.shape[3],
        "TABLES": visits.runs.shape[1],
        "WIDTH": 0 if visits.words is None else visits.words.shape[-1],
        "HAS_WORDS": visits.words is not None,
        "BLOCK": plan.block_size,
        "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
    }


def _call(
    kernel: Any,
    arrays: Sequence[jax.Array],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    programs: int,
    config: TritonConfig,
    static: dict[str, Any],
) -> Any:
    """The kernel's outputs. static: what is compiled in besides the configuration."""
    # Not at the top: where JAX has no CUDA plugin it cannot be imported.
    from jax_triton import triton_call  # pyright: ignore[reportAttributeAccessIssue]

    capability = device.compute_capability()
    # From jax-triton 0.4 on, and before, where products and the sums that follow them are fused in any case.
    parameters = {"out_type": outputs, "backend_options": {"enable_fp_fusion": True}}
    if "out_type" not in inspect.signature(triton_call).parameters:
        parameters = {"out_shape": outputs}
    return triton_call(
        *arrays,
        kernel=kernel,
        **parameters,
        grid=(programs,),
        name=f"mixed_head_attention_{kernel.__name__}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=None if capability is None else 10 * capability[0] + capability[1],
        QUERY_TILE=config.query_tile,
        KEY_TILE=config.key_tile,
        STAGES=config.num_stages,
        **static,
    )
