"""The parts of one decoder layer. Attention itself is handed in: see `elastic_jax.models.decoder`.

Weights keep the order of Hugging Face's checkpoints, outputs before inputs, so that loading and saving are reshapes; the matrix
products contract the last axis as fast as any other (measured on a CPU, float32 and bfloat16). Products take the default matmul
precision (`jax.default_matmul_precision`): exact float32 on a CPU, while a GPU may use TF32 for float32 weights.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.models.config import ModelConfig
from elastic_jax.models.rope import apply_rope

_INIT_STD = 0.02


def normal_params(key: jax.Array, dtype: jax.typing.DTypeLike, *shapes: tuple[int, ...]) -> list[nnx.Param]:
    """Weights from N(0, 0.02), as the supported families initialise theirs. One draw for all: each shape takes 0.5 s to compile."""
    sizes = [math.prod(shape) for shape in shapes]
    drawn = (_INIT_STD * jax.random.normal(key, (sum(sizes),), jnp.float32)).astype(dtype)
    parts = jnp.split(drawn, np.cumsum(sizes)[:-1])
    return [nnx.Param(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: jax.typing.DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] in the dtype of x."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class AttentionProjections(nnx.Module):
    """Projections around attention: hidden states to rotated queries, keys and values, and heads back to hidden states."""

    def __init__(self, config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike) -> None:
        q_shape = (config.num_heads, config.head_dim, config.hidden_size)
        kv_shape = (config.num_kv_heads, config.head_dim, config.hidden_size)
        output_shape = (config.hidden_size, config.num_heads, config.head_dim)
        self.query, self.key, self.value, self.output = normal_params(key, dtype, q_shape, kv_shape, kv_shape, output_shape)
        if config.attention_bias:
            self.query_bias = nnx.Param(jnp.zeros(q_shape[:2], dtype))
            self.key_bias = nnx.Param(jnp.zeros(kv_shape[:2], dtype))
            self.value_bias = nnx.Param(jnp.zeros(kv_shape[:2], dtype))
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.has_bias = config.attention_bias
        self.has_norm = config.qk_norm

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of one layer.

        Args:
          x: [B, T, D], already normalised.
          cos, sin: f32[B, T, H/2].

        Returns:
          q [B, T, N, H] and k [B, T, K, H] after RoPE, v [B, T, K, H], and k [B, T, K, H] before RoPE (after the key norm, if any).
        """
        q = jnp.einsum("BTD,NHD->BTNH", x, self.query[...])
        k = jnp.einsum("BTD,KHD->BTKH", x, self.key[...])
        v = jnp.einsum("BTD,KHD->BTKH", x, self.value[...])
        if self.has_bias:
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        if self.has_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, k

    def merge(self, heads: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        return jnp.einsum("BTNH,DNH->BTD", heads, self.output[...])


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike) -> None:
        inward, outward = (config.mlp_size, config.hidden_size), (config.hidden_size, config.mlp_size)
        self.gate, self.up, self.down = normal_params(key, dtype, inward, inward, outward)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        gate = jnp.einsum("BTD,FD->BTF", x, self.gate[...])
        up = jnp.einsum("BTD,FD->BTF", x, self.up[...])
        return jnp.einsum("BTF,DF->BTD", jax.nn.silu(gate) * up, self.down[...])
