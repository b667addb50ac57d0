"""The only importer of `jax.experimental.pallas.triton`, which JAX has deprecated since 0.11.0 and still ships in 0.12.

A `pallas_call` that is given these compiler parameters is a Triton kernel in every supported JAX; without them the default backend
of `pallas_call` on GPUs differs between versions.
"""

from __future__ import annotations

import warnings

from jax.experimental.pallas import triton

CompilerParams = triton.CompilerParams
load = triton.load

# JAX warns when the program around the kernel is lowered, which is long after our call has returned, so the filter is by message. There
# is nothing a caller could do about it: the move to another backend happens in this package.
DEPRECATION = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)
