"""Mixed-head attention as Pallas-Triton kernels, forward and backward, for Ampere and every other CUDA GPU.

Modes, documents and lengths are unknown to the kernels: they walk the tables of `pallas_kernels.visits`. A tile never exceeds a plan's
block, so what a tile visits is decided by its block; only the diagonal block needs a mask by element, and it is peeled off the loops.
"""

from __future__ import annotations

import jax

from pallas_kernels.call import Call
from pallas_kernels.common import row_statistics
from pallas_kernels.triton import backward_kernels, forward_kernel


def forward(call: Call, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """`api._Kernel.forward`. interpret: run the kernel's operations as JAX's, on any device, for tests."""
    return forward_kernel.attend(call, interpret)


def backward(
    call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`api._Kernel.backward`. interpret: as in `forward`."""
    rows = (d_out.astype(call.q.dtype), *row_statistics(out, lse, d_out))
    dq = backward_kernels.query_gradient(call, *rows, interpret)
    return dq, *backward_kernels.key_gradients(call, *rows, interpret)
