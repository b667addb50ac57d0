"""What an implementation of the attention receives, and how the arguments of `api.mixed_head_attention` become it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from elastic_jax.plan import HeadPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an implementation, its arguments checked and padded.

    T and S are whole blocks, and the queries are the last of them. q, k, v, and the out, lse and d_out of a backward pass, are zero beyond
    `lengths`.

    Attributes:
      q: [B, T, N, H] in bfloat16, float16 or float32. H is 64 or 128 for the kernels of GPUs.
      k, v: [B, S, K, H] in q's dtype.
      plan: its mode is i8[B, J, K], its bitmap u32[B, K or N, J, W].
      lengths: i32[B] <= S.
      first_block: i32[B, J].
      scale: factor of the scores.
    """

    q: Any
    k: Any
    v: Any
    plan: HeadPlan
    lengths: Any
    first_block: Any
    scale: float = dataclasses.field(metadata={"static": True})


class Padding:
    """Makes the `call` of checked arguments, pads the other arrays of its queries, and cuts results back to the caller's shapes.

    Tokens beyond `lengths` become zeros: a probability of 0 times NaN is NaN. Head dims are filled with zeros up to `head_dim`, one that
    the implementation has: they add nothing to products, and their own results are cut off.
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        plan: HeadPlan,
        lengths: jax.Array | None,
        first_block: jax.Array | None,
        *,
        scale: float,
        head_dim: int,
    ):
        (batch, self._queries, _, self._dim), self._keys = q.shape, k.shape[1]
        self._first_query = self._keys - self._queries
        self._block_size, self._head_dim = plan.block_size, head_dim
        self._lengths = None if lengths is None else jnp.minimum(lengths, self._keys).astype(jnp.int32)
        num_blocks = -(-self._keys // plan.block_size)
        mode = plan.mode[:, None] if plan.mode.ndim == 2 else plan.mode
        mode = jnp.broadcast_to(mode, (batch, num_blocks, mode.shape[-1])).astype(jnp.int8)
        self.call = Call(
            q=self.pad_queries(q),
            k=self._pad(k, 0),
            v=self._pad(v, 0),
            plan=dataclasses.replace(plan, mode=mode),
            lengths=jnp.full((batch,), self._keys, jnp.int32) if self._lengths is None else self._lengths,
            first_block=jnp.zeros((batch, num_blocks), jnp.int32) if first_block is None else jnp.asarray(first_block, jnp.int32),
            scale=scale,
        )

    def pad_queries(self, x: jax.Array) -> jax.Array:
        """Of [B, T, N, H], or [B, T, N] as lse is."""
        return self._pad(x, self._first_query)

    def cut_queries(self, x: jax.Array) -> jax.Array:
        return self._cut(x, self._first_query, self._queries)

    def cut_keys(self, x: jax.Array) -> jax.Array:
        return self._cut(x, 0, self._keys)

    def _pad(self, x: jax.Array, position: int) -> jax.Array:
        """position: of the first token; zeros before it make the tokens begin on a block as well."""
        if self._lengths is not None:
            valid = position + jnp.arange(x.shape[1]) < self._lengths[:, None]
            x = jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)
        widths = [(0, 0), (position % self._block_size, -self._keys % self._block_size), (0, 0), (0, self._head_dim - self._dim)]
        return jnp.pad(x, widths[: x.ndim])

    def _cut(self, x: jax.Array, position: int, tokens: int) -> jax.Array:
        first = position % self._block_size
        return x[(slice(None), slice(first, first + tokens), slice(None), slice(self._dim))[: x.ndim]]
