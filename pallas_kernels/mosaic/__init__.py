"""Mixed-head attention as Pallas Mosaic GPU kernels, forward and backward, for Hopper (wgmma, TMA).

Modes and documents are unknown to the kernels: they walk the tables of `pallas_kernels.visits`. Plans have blocks of 128 tokens, which
are the kernels' tiles. Importing this package needs jax 0.11.
"""

from __future__ import annotations

import jax

from pallas_kernels.call import Call
from pallas_kernels.common import row_statistics
from pallas_kernels.mosaic import backward_kernels, forward_kernel


def forward(call: Call) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`."""
    out, lse = forward_kernel.attend(call)
    return out, lse.swapaxes(1, 2)


def backward(call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`api._Kernel.backward`."""
    rows = (d_out.astype(call.q.dtype), *row_statistics(out, lse, d_out))
    return backward_kernels.query_gradient(call, *rows), *backward_kernels.key_gradients(call, *rows)
