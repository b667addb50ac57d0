"""Choosing the next token: greedy, or a draw from the distribution that temperature, top-k and top-p leave.

Axis letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.checks import MAX_INT32, check_number


class Sampling(NamedTuple):
    """temperature: f32[], 0 is greedy. top_k: i32[], 0 keeps all. top_p: f32[] in (0, 1]. seeds: u32[B], one per sequence.
    first_stop: i32[B], the first position where a sequence may end."""

    temperature: Any
    top_k: Any
    top_p: Any
    seeds: Any
    first_stop: Any


def check_options(
    *, max_new_tokens: int, temperature: float, top_k: int, top_p: float, logit_bias: float, heads: Any, min_new_tokens: int = 0
) -> None:
    """ValueError where what decides a call's tokens is no number of its range, whatever the model: see `Generator.generate`."""
    check_number("max_new_tokens", max_new_tokens, 1, MAX_INT32, whole=True)
    check_number("min_new_tokens", min_new_tokens, 0, max_new_tokens, whole=True)
    check_number("temperature", temperature, 0.0, float(np.finfo(np.float32).max))
    check_number("top_k", top_k, 0, MAX_INT32, whole=True)
    check_number("top_p", top_p, 1e-9, 1.0)
    check_number("logit_bias", logit_bias, -math.inf, math.inf)
    if heads is not None and logit_bias:
        raise ValueError(f"logit_bias={logit_bias}: accepted are numbers, and none where heads are given")


def sample(logits: jax.Array, position: jax.Array, sampling: Sampling, stops: jax.Array) -> jax.Array:
    """The next token of each sequence.

    The draw is a function of a sequence's logits, its seed and the position that the token will have, so neither the batch nor where
    a loop was cut changes it.

    Args:
      logits: f32[B, V]. position: i32[B]. stops: i32[B, S], tokens that are not chosen before `Sampling.first_stop`, -1 for none.

    Returns: i32[B].
    """
    size = logits.shape[-1]
    barred = jnp.where((position < sampling.first_stop)[:, None] & (stops >= 0), stops, size)  # `size` is none
    logits = logits.at[jnp.arange(len(stops))[:, None], barred].set(-jnp.inf, mode="drop")
    greedy = lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.lax.cond(sampling.temperature > 0, lambda: _draw(logits, position, sampling), greedy)


def _draw(logits: jax.Array, position: jax.Array, sampling: Sampling) -> jax.Array:
    order = jnp.argsort(-logits, axis=-1, stable=True)  # of equals the lower token first, so that k of them are k
    rank = jnp.arange(logits.shape[-1])
    ranked = filtered(jnp.take_along_axis(logits, order, axis=-1), sampling.temperature, sampling.top_k, sampling.top_p)
    noise = jax.vmap(lambda seed, p: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), p), rank.shape))(sampling.seeds, position)
    chosen = jnp.argmax(ranked + noise, axis=-1, keepdims=True)
    return jnp.take_along_axis(order, chosen, axis=-1)[:, 0].astype(jnp.int32)


def filtered(ranked: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Scaled logits of what may be drawn, -inf elsewhere.

    Top-k keeps the k best; of these, renormalised, top-p keeps the fewest best whose probabilities reach `top_p`, at least one.

    Args:
      ranked: f32[..., V], logits in descending order.
    """
    # The best one becomes 0, so that a tiny temperature makes others -inf and never inf - inf.
    scaled = (ranked - ranked[..., :1]) / temperature
    scaled = jnp.where((jnp.arange(ranked.shape[-1]) < top_k) | (top_k == 0), scaled, -jnp.inf)
    p = jax.nn.softmax(scaled, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    first = jnp.arange(ranked.shape[-1]) == 0
    # Rounded sums may reach 1 before the tail does.
    return jnp.where((before < top_p) | (top_p >= 1) | first, scaled, -jnp.inf)
