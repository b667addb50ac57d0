"""Runs the raw Triton kernels in Triton's own interpreter, on numpy arrays, in a process of its own: triton decides when it is imported
whether it interprets. Neither jax_triton nor torch is needed.

TRITON_INTERPRET=1 python -m tests.jax_triton_interpreter OUTPUT

writes the results of all CASES into OUTPUT, an npz file, as "NAME/out" and so on.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api
from pallas_kernels.common import TritonConfig
from tests.kernel_cases import CASES as SHARED
from tests.kernel_cases import NAMES, Case, inputs, run

# (case, tiles of queries and of keys; None: those of the configuration). bfloat16 is left out: the interpreter keeps it as integers and
# multiplies these. The slowest shared cases are left out as well.
CASES = {
    case.name: (case, tiles)
    for case, tiles in [
        *((case, None) for case in SHARED if case.name in ("one_block", "suffix", "no_bitmap", "float16")),
        (Case(name="packed", queries=288, keys=288, heads=4, kv_heads=2, documents=(3, 9, 1, 4), head_dim=64, dtype=jnp.float16), None),
        (Case(name="ragged", queries=100, keys=133, heads=4, kv_heads=2, batch=2, bitmap="kv", ragged=True), None),
        (Case(name="wide_query_tiles", queries=256, keys=320, heads=4, kv_heads=2, block=64), (64, 16)),
        (Case(name="wide_key_tiles", queries=256, keys=320, heads=4, kv_heads=2, block=64), (16, 64)),
        (Case(name="many_words", queries=96, keys=1400, heads=2, kv_heads=1, bitmap="kv"), None),
    ]
}
_TYPES = {"float16": "fp16", "float32": "fp32", "int32": "i32"}


class _Pointer:
    """A numpy array with as much of a torch tensor's face as the interpreter looks at."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, _TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def itself(self, *_: Any, **__: Any) -> _Pointer:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = itself
    storage_offset = size = stride = itself


def interpreted(kernel, arrays, outputs, *, programs, config, static):
    """As `pallas_kernels.jax_triton._launch`. Outputs begin full of NaN, so what a kernel leaves out shows."""

    def launch(*arrays):
        arrays = [np.array(x) for x in arrays]
        results = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
        tiles = {"QUERY_TILE": config.query_tile, "KEY_TILE": config.key_tile, "STAGES": config.num_stages}
        kernel[(programs,)](*map(_Pointer, (*arrays, *results)), **tiles, **static)
        return tuple(results)

    return jax.pure_callback(launch, outputs, *arrays)


def read_scalars_as_integers() -> None:
    """The interpreter's scalars are arrays of one element, which numpy 2.5 no longer takes for integers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def main(output: str) -> None:
    from pallas_kernels import jax_triton

    read_scalars_as_integers()
    jax_triton._launch = interpreted
    api._obstacle = lambda *_: None
    choose, results = jax_triton.configs.choose, {}
    for name, (case, tiles) in CASES.items():
        jax_triton.configs.choose = choose if tiles is None else lambda *_, tiles=tiles, **__: TritonConfig(*tiles, 4, 2)
        jax.clear_caches()
        for result, value in zip(NAMES, run(inputs(case), "jax_triton")):
            results[f"{name}/{result}"] = np.asarray(value)
    np.savez(output, **results)


if __name__ == "__main__":
    main(sys.argv[1])
