"""What the Mosaic GPU kernels share: tile sizes, work order, the walk over a row's blocks.

Every kernel is one CUDA block per row of tiles, with two compute warpgroups of `ROWS` rows each and one warpgroup that only starts
copies (TMA). Only this package imports `jax.experimental.pallas.mosaic_gpu`, of which it needs what jax 0.11 introduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.visits import Visits

BLOCK = 128  # tokens of a plan's block, of a key tile, and of a row of query tiles
ROWS = 64  # rows of one warpgroup's products; 128 spilled registers (measured on an H200: a third of the speed)
WARPGROUPS = BLOCK // ROWS
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24  # of a thread; 2 * 240 + 24 fill the register file

# The layout of tiles in shared memory that wgmma reads without bank conflicts, for 16-bit types.
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


def tile(*shape: int, dtype: Any) -> Any:
    """Shared memory for operands of wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=TRANSFORMS)


def barriers(*shape: int, arrivals: int = 1, pair: bool = False) -> Any:
    """arrivals: until a barrier opens, of warpgroups or copies. pair: of both CUDA blocks of a pair, each with that many arrivals."""
    if pair:
        return plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=arrivals, num_barriers=shape)
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=shape)


def kernel(
    body: Callable[..., None], *, name: str, blocks: int, out_type: Any, scratch: list[Any], pairs: bool = False
) -> Callable[..., Any]:
    """A launch of `blocks` CUDA blocks; `body` reads axes "block" and "warpgroup", the last warpgroup being the copying one.

    pairs: they form clusters of two, which can share copies; "block" then counts pairs, and "pair" is 0 or 1.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(blocks // 2 if pairs else blocks,),
        grid_names=("block",),
        cluster=(2,) if pairs else (),
        cluster_names=("pair",) if pairs else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def tables(visits: Visits) -> tuple[jax.Array, ...]:
    """A kernel's last inputs: runs, and words where there are any."""
    return (visits.runs,) if visits.words is None else (visits.runs, visits.words)


def div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a, jnp.int32(b))


def rem(a: jax.Array, b: int) -> jax.Array:
    return lax.rem(a, jnp.int32(b))


def over_columns(x: jax.Array, width: int) -> jax.Array:
    """[r] to [r, width]."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def over_rows(x: jax.Array, height: int) -> jax.Array:
    """[c] to [height, c]."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), [1])


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def load(ref: Any, layout: Any) -> jax.Array:
    """Shared memory to registers."""
    return plgpu.load(ref, layout=layout)  # pyright: ignore[reportCallIssue] (jax 0.10, which this package does not support, wants an index)


def accumulate(run: Callable[..., None], *start: jax.Array) -> Any:
    """What the accumulators hold that begin at `start` when run(*accumulators) has added products to them and waited."""
    return pl.run_state(lambda refs: run(*refs))(tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in start))


def drain(steps: jax.Array, stages: int, *free: Any) -> None:
    """Waits until the last slots of a ring are free, so that every barrier ends in the phase its waiters have seen."""
    for back in range(stages):
        for barrier in free:
            pl.when(steps > back)(lambda barrier=barrier, back=back: plgpu.barrier_wait(barrier.at[rem(steps - 1 - back, stages)]))


def mask(scores: jax.Array, limit: jax.Array, keys_axis: int = 1) -> jax.Array:
    """-inf where key - query > limit, both counted from the tile's corner."""
    key, query = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=WGMMA) for axis in (keys_axis, 1 - keys_axis))
    return jnp.where(key - query <= limit, scores, -jnp.inf)


class Walk:
    """The blocks that a row of `Visits` walks, as the copying warpgroup asks for them.

    for s in range(count):  block, state = walk.step(s, state)      with state = walk.start()
    """

    def __init__(self, runs_ref: Any, words_ref: Any | None, row: tuple[Any, ...]):
        self.begin, self.length, self.second, self.count, self.diagonal = (runs_ref[(*row, i)] for i in range(5))
        self.words_ref, self.row = words_ref, row

    def start(self) -> tuple[jax.Array, ...]:
        return () if self.words_ref is None else (jnp.int32(0), self._word(jnp.int32(0)))

    def step(self, step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        block = lax.select(step < self.length, self.begin + step, self.second + step - self.length)
        if not state:
            return block, state
        slot, word = state
        bits = word & 0xFFFF
        lowest = jnp.maximum(31 - lax.clz(bits & -bits), 0)  # a row without bits may be walked one step, see `forward_kernel`
        block = lax.select(self.length < 0, (word >> 16) * 16 + lowest, block)
        word = word & (word - 1)
        done = (word & 0xFFFF) == 0
        slot = slot + done.astype(jnp.int32)
        return block, (slot, lax.select(done, self._word(slot), word))

    def _word(self, slot: jax.Array) -> jax.Array:
        assert self.words_ref is not None
        return self.words_ref[(*self.row, jnp.minimum(slot, self.words_ref.shape[-1] - 1))]
