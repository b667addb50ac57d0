"""One case of the attention benchmarks: inputs, which heads stream, and the exact result that every implementation is held against."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import HeadPlan, visible_blocks
from experiments.bench import exact
from experiments.bench.shapes import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Batch 1, one document of `tokens`, which is a multiple of the block size; `streaming` of the KV heads stream, the rest are full."""

    shape_name: str
    shape: Shape
    tokens: int
    streaming: int
    dtype: str
    sparsity: SparsityConfig

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens % self.sparsity.block_size:
            raise ValueError(f"--tokens={self.tokens}: accepted are multiples of block_size={self.sparsity.block_size}")

    @functools.cached_property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [1, T, N, H], k and v [1, T, K, H]: standard normal."""
        shape = self.shape
        return self._draw(0, shape.heads), self._draw(1, shape.kv_heads), self._draw(2, shape.kv_heads)

    @functools.cached_property
    def d_out(self) -> jax.Array:
        """Like q; apart from `arrays`, since the forward pass at 1M tokens has better use for the memory."""
        return self._draw(3, self.shape.heads)

    def _draw(self, index: int, heads: int) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), index), self.tokens // self.sparsity.block_size)
        return _normal(keys, (self.sparsity.block_size, heads, self.shape.head_dim), self.dtype)

    @functools.cached_property
    def streaming_heads(self) -> list[int]:
        """KV heads that stream: the same random ones at every length, since routers mix them in any order."""
        order = np.random.default_rng(0).permutation(self.shape.kv_heads)
        return sorted(int(head) for head in order[: self.streaming])

    @functools.cached_property
    def full_heads(self) -> list[int]:
        return [head for head in range(self.shape.kv_heads) if head not in self.streaming_heads]

    @functools.cached_property
    def plan(self) -> HeadPlan:
        mode = np.full((1, self.shape.kv_heads), HeadMode.FULL, np.int8)
        mode[0, self.streaming_heads] = HeadMode.STREAMING
        sparsity = self.sparsity
        return HeadPlan(
            mode=jnp.asarray(mode),
            sink_blocks=sparsity.sink_blocks,
            local_blocks=sparsity.local_blocks,
            block_size=sparsity.block_size,
        )

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """bool[K, Q, J], the plan's block mask. The device computes a full and a streaming head: all of them are much at 1M tokens."""
        blocks = self.tokens // self.sparsity.block_size
        modes = dataclasses.replace(self.plan, mode=jnp.array([[HeadMode.FULL, HeadMode.STREAMING]], jnp.int8))
        full, streaming = np.asarray(visible_blocks(modes, blocks, blocks)[0])
        return np.stack([streaming if head in self.streaming_heads else full for head in range(self.shape.kv_heads)])

    def about(self) -> dict[str, Any]:
        """The fields that say what was computed."""
        sparsity = self.sparsity
        return {
            "shape": self.shape_name,
            **dataclasses.asdict(self.shape),
            "batch": 1,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "sparse_share": round(self.streaming / self.shape.kv_heads, 4),
            "streaming_heads": self.streaming_heads,
            "block_size": sparsity.block_size,
            "sink_blocks": sparsity.sink_blocks,
            "local_blocks": sparsity.local_blocks,
            "visited_share": round(visited_share(self.visible, sparsity.block_size), 4),
        }

    def dense_flops(self, direction: str) -> float:
        """Work of causal attention with every head full: rates on this count compare times, and exceed the chip's where work is skipped."""
        return dense_flops(self.shape, self.tokens) * {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}[direction]

    @functools.cached_property
    def _reference(self) -> ForwardReference:
        return ForwardReference(*self.arrays, self.visible, self.sparsity.block_size)

    @functools.cached_property
    def _reference_gradients(self) -> tuple[jax.Array, ...]:
        return exact.gradients(*self.arrays, self.d_out, jnp.asarray(self.visible), block_size=self.sparsity.block_size)

    def forward_error(self, out: jax.Array) -> float:
        """Relative error of out [1, T, N, H] over the rows that are checked."""
        return self._reference.error(out)

    def gradient_error(self, gradients: tuple[jax.Array, ...]) -> float:
        """The largest relative error among dq, dk, dv. The reference computes all rows: for short sequences."""
        return max(exact.relative_error(x, y) for x, y in zip(gradients, self._reference_gradients, strict=True))


class ForwardReference:
    """Some rows of exact attention over the blocks in `visible` (bool[K or N, Q, J]), computed for the first error."""

    def __init__(self, q: jax.Array, k: jax.Array, v: jax.Array, visible: np.ndarray, block_size: int):
        self._rows = exact.checked_rows(q.shape[1], block_size)
        self._arrays, self._block_size = (q, k, v), block_size
        self._visible = np.repeat(visible[:, self._rows], q.shape[2] // visible.shape[0], axis=0)

    @functools.cached_property
    def _exact(self) -> jax.Array:
        return exact.forward_rows(*self._arrays, jnp.asarray(self._visible), jnp.asarray(self._rows), block_size=self._block_size)

    def error(self, out: jax.Array) -> float:
        return exact.relative_error(exact.take_rows(out, jnp.asarray(self._rows), block_size=self._block_size), self._exact)


def dense_flops(shape: Shape, tokens: int) -> float:
    """Forward work of causal attention with every head full, two operations per product and sum: 2 S^2 N H."""
    return 2.0 * tokens**2 * shape.heads * shape.head_dim


def visited_share(visible: np.ndarray, block_size: int) -> float:
    """Share of causal (query, key) token pairs that bool[heads, Q, Q] visits, the triangle of the diagonal blocks by element."""
    diagonal = np.diagonal(visible, axis1=1, axis2=2).sum()
    pairs = (visible.sum() - diagonal) * block_size**2 + diagonal * block_size * (block_size + 1) / 2
    tokens = visible.shape[1] * block_size
    return float(pairs / (visible.shape[0] * tokens * (tokens + 1) / 2))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(keys: jax.Array, shape: tuple[int, int, int], dtype: str) -> jax.Array:
    """[1, len(keys) shape[0], ...], a piece for each key one after the other: drawn at once, the generator's buffers would need more
    memory than the kernels that are measured."""
    pieces = jax.lax.map(lambda key: jax.random.normal(key, shape, dtype), keys)
    return pieces.reshape(1, -1, *shape[1:])
