"""Mixed-head attention as Pallas Mosaic GPU kernels, forward and backward, for Hopper (wgmma, TMA).

Modes and documents are unknown to the kernels: they walk the tables of `pallas_kernels.visits`. Plans have blocks of 128 tokens, which
are the kernels' tiles. Importing this package needs jax 0.11.
"""

from __future__ import annotations

import jax

from elastic_jax.plan import HeadPlan
from pallas_kernels.common import row_statistics
from pallas_kernels.mosaic import backward_kernels, forward_kernel
from pallas_kernels.visits import key_visits, query_visits


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, lengths: jax.Array, first_block: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`."""
    visits = query_visits(plan, lengths, first_block, q.shape[1] // plan.block_size)
    out, lse = forward_kernel.attend(q, k, v, visits, lengths, scale=scale)
    return out, lse.swapaxes(1, 2)


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
    lse, delta = row_statistics(out, lse, d_out)
    by_query, by_key = (visits(plan, lengths, first_block, q.shape[1] // plan.block_size) for visits in (query_visits, key_visits))
    d_out = d_out.astype(q.dtype)
    dq = backward_kernels.query_gradient(q, k, v, d_out, lse, delta, by_query, scale=scale)
    return dq, *backward_kernels.key_gradients(q, k, v, d_out, lse, delta, by_key, scale=scale)
