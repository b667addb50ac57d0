"""Decoding over the paged cache: whole runs of steps as one program.

Axis letters: L layers, B sequences, K KV heads, H head dim, D model dim, V vocabulary.

A step feeds each sequence's newest token: its keys and values go into the cache, attention reads the pages of every head, and the next
token is chosen. So the newest token of a sequence is never in the cache yet. Sequences stand at positions of their own; one that is
done writes nothing, reads nothing and keeps its place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.cache import HeadTables, PagedCache, Pages, write_token
from elastic_jax.elastic import Arrays, ElasticModel, LayerBackbones
from elastic_jax.models.rope import rope_cos_sin
from elastic_jax.sampling import Sampling, sample
from pallas_kernels import decode as decode_attention
from pallas_kernels.api import Implementation

# Most steps of one program call: what the host does in between costs less than a step.
MAX_STEPS = 128

# As in `elastic_jax.attention`: who asks for plain JAX gets it, and all GPU kernels decode with the one there is.
_DECODES: dict[Implementation, decode_attention.Implementation] = {
    "reference": "reference",
    "xla": "xla",
    "triton": "triton",
    "mosaic": "triton",
    "jax_triton": "triton",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """token: i32[B], the newest one, not in the cache yet. position: i32[B], where it belongs. done: bool[B], no token is wanted."""

    token: Any
    position: Any
    done: Any


@jax.jit
def first_token(logits: jax.Array, position: jax.Array, sampling: Sampling, stops: jax.Array) -> DecodeState:
    """Chooses each sequence's first new token, which goes to `position` i32[B], from logits f32[B, V]; `stops` as in `generate_tokens`."""
    token = sample(logits, position, sampling, stops)
    return DecodeState(token=token, position=position, done=jnp.any(token[:, None] == stops, axis=1))


def generate_tokens(
    model: ElasticModel, backbones: LayerBackbones, cache: PagedCache, state: DecodeState, sampling: Sampling, stops: np.ndarray, steps: int
) -> tuple[DecodeState, np.ndarray]:
    """Runs `steps` steps, fewer where all sequences are done before.

    Args:
      backbones: from `split_layers`.
      stops: i32[B, S], tokens that end a sequence; -1 where it has fewer.
      steps: 1 to MAX_STEPS; every sequence that is not done has room for as many tokens.

    Returns:
      The state after it, and the new tokens i32[B, n] in order, n steps at most; what follows a sequence's stop has no meaning.
    """
    assert 1 <= steps <= MAX_STEPS
    done, position = jax.device_get((state.done, state.position))
    assert (position + steps <= cache.capacity)[~done].all()
    tables = cache.tables(~done)
    cache.pool.pages, state, tokens, count = _run(model, backbones, cache.pool.lend(), tables, state, sampling, stops, np.int32(steps))
    cache.lengths = np.array(state.position, np.int64)
    return state, np.asarray(tokens)[:, : int(count)]


def feed_tokens(model: ElasticModel, backbones: LayerBackbones, cache: PagedCache, tokens: np.ndarray, counts: np.ndarray) -> jax.Array:
    """Puts given tokens i32[B, S], the first `counts` i32[B] of each row, one after another behind what the cache holds.

    Returns: f32[B, V], the logits after each sequence's last one.
    """
    assert (counts >= 1).all()
    assert (cache.lengths + counts <= cache.capacity).all()
    tables, start = cache.tables(), cache.lengths.astype(np.int32)
    cache.pool.pages, logits = _feed(model, backbones, cache.pool.lend(), tables, tokens, counts.astype(np.int32), start)
    cache.lengths = cache.lengths + counts
    return logits


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run(
    model: ElasticModel,
    backbones: LayerBackbones,
    pages: Pages,
    tables: HeadTables,
    state: DecodeState,
    sampling: Sampling,
    stops: jax.Array,
    steps: jax.Array,
) -> tuple[Pages, DecodeState, jax.Array, jax.Array]:
    decoder = nnx.merge(model.decoder, backbones[0])

    def step(carry: tuple[Pages, DecodeState, jax.Array, jax.Array]) -> tuple[Pages, DecodeState, jax.Array, jax.Array]:
        pages, state, tokens, count = carry
        pages, hidden = _step(model, backbones, pages, tables, state.token, state.position, ~state.done)
        position = jnp.where(state.done, state.position, state.position + 1)
        token = jnp.where(state.done, state.token, sample(decoder.logits(hidden), position, sampling, stops))
        done = state.done | jnp.any(token[:, None] == stops, axis=1)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, count, axis=1)
        return pages, DecodeState(token=token, position=position, done=done), tokens, count + 1

    def more(carry: tuple[Pages, DecodeState, jax.Array, jax.Array]) -> jax.Array:
        return (carry[3] < steps) & ~jnp.all(carry[1].done)

    tokens = jnp.zeros((state.token.shape[0], MAX_STEPS), jnp.int32)
    return jax.lax.while_loop(more, step, (pages, state, tokens, jnp.int32(0)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _feed(
    model: ElasticModel, backbones: LayerBackbones, pages: Pages, tables: HeadTables, tokens: jax.Array, counts: jax.Array, start: jax.Array
) -> tuple[Pages, jax.Array]:
    decoder = nnx.merge(model.decoder, backbones[0])

    def step(i: jax.Array, carry: tuple[Pages, jax.Array]) -> tuple[Pages, jax.Array]:
        pages, last = carry
        active = i < counts
        pages, hidden = _step(model, backbones, pages, tables, tokens[:, i], start + i, active)
        return pages, jnp.where(active[:, None], hidden, last)

    last = jnp.zeros((tokens.shape[0], model.config.hidden_size), decoder.embedding.dtype)
    pages, last = jax.lax.fori_loop(0, jnp.max(counts), step, (pages, last))
    return pages, decoder.logits(last)


def _step(
    model: ElasticModel,
    backbones: LayerBackbones,
    pages: Pages,
    tables: HeadTables,
    token: jax.Array,
    position: jax.Array,
    active: jax.Array,
) -> tuple[Pages, jax.Array]:
    """One token of each active sequence through all layers: the pages with its keys and values, and [B, D] after the final norm."""
    cos, sin = rope_cos_sin(position[:, None], model.config.rope, model.config.head_dim)
    implementation = None if model.implementation is None else _DECODES[model.implementation]

    @jax.jit  # traced once for all layers
    def run_layer(backbone: Arrays, x: jax.Array, pages: Pages, tables: HeadTables) -> tuple[jax.Array, Pages]:
        layer = nnx.merge(model.decoder, backbone).layers
        q, k, v, _ = layer.before_attention(x, cos, sin)
        pages = write_token(pages, tables, k[:, 0], v[:, 0], position, active)
        heads = decode_attention.paged_decode_attention(
            q[:, 0], *pages, tables.table, *tables.slots(position, active), implementation=implementation
        )
        return layer.after_attention(x, heads[:, None]), pages

    decoder = nnx.merge(model.decoder, backbones[0])
    x = decoder.embedding[...][token][:, None]
    for number, backbone in enumerate(backbones):
        x, pages = run_layer(backbone, x, pages, jax.tree.map(lambda rows, number=number: rows[number], tables))
    return pages, decoder.final_norm(x[:, 0])
