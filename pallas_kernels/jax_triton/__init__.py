"""Mixed-head attention in Triton's own language, called through jax-triton: faster than through Pallas, and the path that JAX names for
the time when Pallas has no Triton backend any more.

The kernels do the same as those of `pallas_kernels.triton`: they walk the tables of `pallas_kernels.visits`, a tile never exceeds a
plan's block, and the diagonal block, the only one that needs a mask by element, is peeled off the loops. Importing this package imports
triton, a call jax_triton; requirements.txt leaves out both, so `api` imports the package when it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels.call import Call
from pallas_kernels.common import LOG2_E, TritonConfig, heaviest_first, row_statistics
from pallas_kernels.jax_triton import configs, kernels
from pallas_kernels.visits import Visits, key_visits, query_visits


def forward(call: Call) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`."""
    batch, queries, heads, _ = call.q.shape
    config, visits = configs.choose("forward", call), query_visits(call)
    return _launch(
        kernels.forward,
        (call.q, call.k, call.v, call.lengths, *_tables(call, visits)),
        (jax.ShapeDtypeStruct(call.q.shape, call.q.dtype), jax.ShapeDtypeStruct(call.q.shape[:3], jnp.float32)),
        programs=batch * heads * (queries // config.query_tile),
        config=config,
        static={"FACTOR": call.scale * LOG2_E, **_static(call, visits)},
    )


def backward(call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`api._Kernel.backward`."""
    rows = (d_out.astype(call.q.dtype), *row_statistics(out, lse, d_out))
    return query_gradient(call, *rows), *key_gradients(call, *rows)


def query_gradient(call: Call, d_out: Any, lse2: Any, delta: Any) -> Any:
    """dq [B, T, N, H]. d_out: in q's dtype. lse2, delta: `row_statistics`."""
    batch, queries, heads, _ = call.q.shape
    config, visits = configs.choose("dq", call), query_visits(call)
    (dq,) = _launch(
        kernels.query_gradient,
        (call.q, call.k, call.v, d_out, lse2, delta, *_tables(call, visits)),
        (jax.ShapeDtypeStruct(call.q.shape, call.q.dtype),),
        programs=batch * heads * (queries // config.query_tile),
        config=config,
        static={"SCALE": call.scale, "FACTOR": call.scale * LOG2_E, **_static(call, visits)},
    )
    return dq


def key_gradients(call: Call, d_out: Any, lse2: Any, delta: Any) -> Any:
    """(dk, dv), both [B, S, K, H], of arguments as in `query_gradient`."""
    batch, keys, kv_heads, _ = call.k.shape
    config, visits = configs.choose("dkv", call), key_visits(call)
    return _launch(
        kernels.key_gradients,
        (call.q, call.k, call.v, d_out, lse2, delta, *_tables(call, visits)),
        (jax.ShapeDtypeStruct(call.k.shape, call.k.dtype), jax.ShapeDtypeStruct(call.v.shape, call.v.dtype)),
        programs=batch * kv_heads * (keys // config.key_tile),
        config=config,
        static={"SCALE": call.scale, "FACTOR": call.scale * LOG2_E, "BATCH": batch, **_static(call, visits)},
    )


def _tables(call: Call, visits: Visits) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(order, runs, words); a kernel's parameters are fixed in number, so without words the runs take their place and are not read."""
    work = visits.runs[..., 3].reshape(call.q.shape[0] * call.k.shape[2], -1).sum(1)
    return heaviest_first(work), visits.runs, visits.runs if visits.words is None else visits.words


def _static(call: Call, visits: Visits) -> dict[str, Any]:
    return {
        "QUERIES": call.q.shape[1],
        "KEYS": call.k.shape[1],
        "HEADS": call.q.shape[2],
        "KV_HEADS": call.k.shape[2],
        "DIM": call.q.shape[3],
        "TABLES": visits.runs.shape[1],
        "WIDTH": 0 if visits.words is None else visits.words.shape[-1],
        "HAS_WORDS": visits.words is not None,
        "BLOCK": call.plan.block_size,
        "PRECISION": "ieee" if call.q.dtype == jnp.float32 else "tf32",
    }


def _launch(
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
