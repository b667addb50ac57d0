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
from pallas_kernels.shapes import Shape

_REFERENCE_BLOCKS = 128  # query blocks that the forward reference computes: all of them up to 16K tokens
_GRADIENT_TOKENS = 16_384  # the reference of the gradients needs all rows; longer cases go without


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
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """q [1, T, N, H], k and v [1, T, K, H], d_out like q: standard normal."""
        shape, keys = self.shape, jax.random.split(jax.random.key(0), 4)
        draw = lambda key, heads: jax.random.normal(key, (1, self.tokens, heads, shape.head_dim), self.dtype)
        return draw(keys[0], shape.heads), draw(keys[1], shape.kv_heads), draw(keys[2], shape.kv_heads), draw(keys[3], shape.heads)

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
        """bool[K, Q, J], the plan's block mask."""
        blocks = self.tokens // self.sparsity.block_size
        return np.asarray(visible_blocks(self.plan, blocks, blocks)[0])

    def about(self) -> dict[str, Any]:
        """The fields that say what was computed."""
        sparsity = self.sparsity
        return {
            "shape": self.shape_name,
            **dataclasses.asdict(self.shape),
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
    def _rows(self) -> np.ndarray:
        blocks = self.tokens // self.sparsity.block_size
        return np.unique(np.linspace(0, blocks - 1, min(blocks, _REFERENCE_BLOCKS)).astype(np.int32))

    @functools.cached_property
    def _reference(self) -> jax.Array:
        q, k, v, _ = self.arrays
        return _reference_rows(q, k, v, jnp.asarray(self.visible), jnp.asarray(self._rows), size=self.sparsity.block_size)

    @functools.cached_property
    def _reference_gradients(self) -> tuple[jax.Array, ...]:
        return _reference_gradients(*self.arrays, jnp.asarray(self.visible), size=self.sparsity.block_size)

    def forward_error(self, out: jax.Array) -> float:
        """Relative error |out - exact| / |exact| of out [1, T, N, H], over the rows that the reference computes."""
        blocks = out.reshape(-1, self.sparsity.block_size, *out.shape[2:])[self._rows]
        return _relative_error(blocks, self._reference)

    def gradient_error(self, gradients: tuple[jax.Array, ...]) -> float | None:
        """The largest relative error among dq, dk, dv; None where there is no reference."""
        if self.tokens > _GRADIENT_TOKENS:
            return None
        return max(_relative_error(actual, exact) for actual, exact in zip(gradients, self._reference_gradients, strict=True))


def dense_flops(shape: Shape, tokens: int) -> float:
    """Forward work of causal attention with every head full, two operations per product and sum: 2 S^2 N H."""
    return 2.0 * tokens**2 * shape.heads * shape.head_dim


def visited_share(visible: np.ndarray, block_size: int) -> float:
    """Share of causal (query, key) token pairs that bool[heads, Q, Q] visits, the triangle of the diagonal blocks by element."""
    diagonal = np.diagonal(visible, axis1=1, axis2=2).sum()
    pairs = (visible.sum() - diagonal) * block_size**2 + diagonal * block_size * (block_size + 1) / 2
    tokens = visible.shape[1] * block_size
    return float(pairs / (visible.shape[0] * tokens * (tokens + 1) / 2))


def _relative_error(actual: jax.Array, exact: jax.Array) -> float:
    actual = actual.astype(jnp.float32)
    return float(jnp.linalg.norm((actual - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def _attend_block(q: jax.Array, k: jax.Array, v: jax.Array, row: Any, visible: jax.Array) -> jax.Array:
    """f32[size, G, H] of one query block and KV head. q f32[size, G, H], k and v f32[S, H], visible bool[J]: the row of the block mask."""
    size = q.shape[0]
    query, key = row * size + jnp.arange(size)[:, None], jnp.arange(k.shape[0])
    mask = jnp.repeat(visible, size) & (key <= query)
    scores = jnp.einsum("TGH,SH->GTS", q, k, precision="highest") * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("GTS,SH->TGH", p, v, precision="highest")


def _blocks(x: jax.Array, kv_heads: int, size: int) -> jax.Array:
    """[1, T, N, H] to [K, Q, size, G, H]."""
    return x.reshape(-1, size, kv_heads, x.shape[2] // kv_heads, x.shape[3]).transpose(2, 0, 1, 3, 4)


@functools.partial(jax.jit, static_argnames="size")
def _reference_rows(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, rows: jax.Array, *, size: int) -> jax.Array:
    """f32[R, size, N, H] of the query blocks `rows`, one block and KV head at a time."""
    kv_heads = k.shape[2]
    q_blocks = _blocks(q, kv_heads, size)

    def one(index: jax.Array) -> jax.Array:
        row, head = rows[index // kv_heads], index % kv_heads
        q_block, k_head, v_head = (x.astype(jnp.float32) for x in (q_blocks[head, row], k[0, :, head], v[0, :, head]))
        return _attend_block(q_block, k_head, v_head, row, visible[head, row])

    out = jax.lax.map(one, jnp.arange(rows.shape[0] * kv_heads))  # [R K, size, G, H]
    out = out.reshape(rows.shape[0], kv_heads, *out.shape[1:]).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], -1, q.shape[3])


@functools.partial(jax.jit, static_argnames="size")
def _reference_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, visible: jax.Array, *, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 (dq, dk, dv), one query block and KV head at a time."""
    kv_heads = k.shape[2]
    q_blocks, d_blocks = _blocks(q, kv_heads, size), _blocks(d_out, kv_heads, size)

    def one_head(head: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        k_head, v_head = (x[0, :, head].astype(jnp.float32) for x in (k, v))

        def one_block(sums: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            attend = functools.partial(_attend_block, row=row, visible=visible[head, row])
            _, pullback = jax.vjp(attend, q_blocks[head, row].astype(jnp.float32), k_head, v_head)
            dq, dk, dv = pullback(d_blocks[head, row].astype(jnp.float32))
            return (sums[0] + dk, sums[1] + dv), dq

        nothing = jnp.zeros_like(k_head)
        (dk, dv), dq = jax.lax.scan(one_block, (nothing, nothing), jnp.arange(q_blocks.shape[1]))
        return dq, dk, dv

    dq, dk, dv = jax.lax.map(one_head, jnp.arange(kv_heads))  # [K, Q, size, G, H], [K, S, H] twice
    return dq.transpose(1, 2, 0, 3, 4).reshape(q.shape), dk.swapaxes(0, 1)[None], dv.swapaxes(0, 1)[None]
