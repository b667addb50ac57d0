"""The router of one layer: pooled keys of a document -> full or sparse attention, for each KV head (paper section 4).

Axis letters: B packs, T tokens, C documents per pack, K KV heads, H head dimension.
Convention of the released code: class 1 is full attention, class 0 sparse; the paper's text names them the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from elastic_jax.config import RouterConfig


class RouterParam(nnx.Param):
    """A trainable array of a router; every other array of the model is frozen."""


class _Dense(nnx.Module):
    def __init__(self, inputs: int, outputs: int, std: float, *, rngs: nnx.Rngs):
        self.kernel = RouterParam(std * jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = RouterParam(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        # Decisions hang on the sign of small logits: no TF32.
        return jnp.matmul(x, self.kernel[...], precision="highest") + self.bias[...]


class AttentionRouter(nnx.Module):
    """Task MLP (H -> width*H -> H) followed by the router MLP (H -> width*H -> H -> 2), in float32, SiLU between layers.

    One router serves all KV heads of its layer: heads differ only by their pooled keys. With H = 128 and width 4 it has
    263,682 parameters.
    """

    def __init__(self, head_dim: int, config: RouterConfig, *, rngs: nnx.Rngs):
        hidden = config.width * head_dim
        self.task_hidden = _Dense(head_dim, hidden, config.init_std, rngs=rngs)
        self.task_out = _Dense(hidden, head_dim, config.init_std, rngs=rngs)
        self.router_hidden = _Dense(head_dim, hidden, config.init_std, rngs=rngs)
        self.router_features = _Dense(hidden, head_dim, config.init_std, rngs=rngs)
        self.router_out = _Dense(head_dim, 2, config.init_std, rngs=rngs)

    def __call__(self, pooled: Float[Array, "*batch H"]) -> Float[Array, "*batch 2"]:
        """Returns float32 logits (sparse, full) for pooled keys of any float dtype."""
        x = pooled.astype(jnp.float32)
        features = self.task_out(jax.nn.silu(self.task_hidden(x)))
        x = jax.nn.silu(self.router_hidden(features))
        x = jax.nn.silu(self.router_features(x))
        return self.router_out(x)


def _range_mean(keys: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    token = jnp.arange(keys.shape[1])
    inside = (token >= start[..., None]) & (token < end[..., None])  # [B, C, T]
    # A masked sum, not a product with the mask: one document's bits must not depend on how many others there are.
    total = jnp.sum(jnp.where(inside[..., None, None], keys[:, None].astype(jnp.float32), 0.0), axis=2)
    return total / jnp.maximum(end - start, 1)[..., None, None]


def _boundary_mean(keys: jax.Array, start: jax.Array, end: jax.Array, count: int) -> jax.Array:
    step = jnp.arange(count)
    first = start[..., None] + step
    last = end[..., None] - 1 - step
    # A token of the last `count` that is also one of the first `count` is counted once.
    token = jnp.concatenate([first, last], axis=-1)  # [B, C, 2 * count]
    valid = jnp.concatenate([first < end[..., None], last >= start[..., None] + count], axis=-1)
    # A gather, which reads these rows only; its gradient adds each valid row once, in any order.
    rows = jax.vmap(lambda k, t: k[t])(keys, jnp.clip(token, 0, keys.shape[1] - 1))  # [B, C, 2 * count, K, H]
    total = jnp.sum(jnp.where(valid[..., None, None], rows.astype(jnp.float32), 0.0), axis=2)
    return total / jnp.maximum(jnp.sum(valid, axis=-1), 1)[..., None, None]


def pool_keys(
    keys: Float[Array, "B T K H"],
    user_turn: Int[Array, "B C 2"],
    span: Int[Array, "B C 2"],
    config: RouterConfig,
) -> Float[Array, "B C K H"]:
    """Averages each document's keys (before RoPE, after Qwen3's key norm) into the router's input, in float32.

    Args:
      keys: any float dtype; only the tokens that `config.pooling` names are read.
      user_turn: first token and end (exclusive) of the user turn, counted from the start of the pack.
      span: the same for the whole document.
      config: which tokens; `boundary` counts a token that is in both ends once.

    Returns:
      float32 means; zeros for an empty range.
    """
    if config.pooling == "boundary":
        return _boundary_mean(keys, user_turn[..., 0], user_turn[..., 1], config.boundary_tokens)
    tokens = user_turn if config.pooling == "user_turn" else span
    return _range_mean(keys, tokens[..., 0], tokens[..., 1])


class Routing(NamedTuple):
    """`is_full`: f32[...] in {0, 1}, carrying the straight-through gradient in training. `logit`: f32[...], full minus sparse."""

    is_full: jax.Array
    logit: jax.Array


def straight_through(logits: Float[Array, "*heads 2"], noise: Float[Array, "*heads 2"], temperature: jax.Array | float) -> Routing:
    """Training: Gumbel-softmax, hard in the forward pass, the soft probability's gradient in the backward pass; in float32.

    `noise` is Gumbel noise, two independent variables a head as in the paper's main text and its code (its appendix F has one). The
    chance of full attention is sigmoid(logit) at any temperature: the temperature only shapes the gradient.
    """
    noisy = logits.astype(jnp.float32) + noise
    soft = jax.nn.softmax(noisy / temperature, axis=-1)[..., 1]
    hard = (noisy[..., 1] > noisy[..., 0]).astype(jnp.float32)
    # soft - soft is exactly 0, so the value stays exactly 0 or 1.
    return Routing(jax.lax.stop_gradient(hard) + (soft - jax.lax.stop_gradient(soft)), logits[..., 1] - logits[..., 0])


def choose_routing(logits: Float[Array, "*heads 2"], logit_bias: jax.Array | float = 0.0) -> Routing:
    """Inference: full attention where full's logit plus `logit_bias` exceeds sparse's; no noise, a tie is sparse.

    `logit_bias` moves the sparsity without retraining: positive values give more full heads, +-inf all or none.
    """
    logit = logits[..., 1] - logits[..., 0]
    return Routing((logit + logit_bias > 0).astype(jnp.float32), logit)


def exponential_temperature(progress: jax.Array | float, *, start: float, end: float, rate: float = 0.6) -> jax.Array:
    """Paper appendix F.3: max(end, start * exp(-rate * progress)), progress in [0, 1].

    The paper prints `progress` as the training step; taken literally the temperature would collapse within a few steps.
    """
    return jnp.maximum(end, start * jnp.exp(-rate * jnp.asarray(progress, jnp.float32)))


def cosine_temperature(progress: jax.Array | float, *, start: float, end: float, fraction: float = 0.6) -> jax.Array:
    """Released code: half a cosine from `start` to `end` over the first `fraction` of training, then `end`."""
    phase = jnp.clip(jnp.asarray(progress, jnp.float32) / fraction, 0.0, 1.0)
    return end + 0.5 * (start - end) * (1.0 + jnp.cos(jnp.pi * phase))
