"""Prefill: whole prompts through the model one layer at a time, into the paged cache.

Axis letters: L layers, B sequences, T tokens (padded), N query heads, K KV heads, H head dim, D model dim, V vocabulary.

A layer's router reads keys of the prompt's end, so a layer runs over the whole prompt before the next one begins. A loop on the host
calls three programs per layer, compiled once: projections and the router's decision; attention, output projection and MLP; and the
writing of keys and values. The host needs the decision to hand out pages, and waits for it while the device already attends.

All products run over chunks of a fixed number of tokens, taken from the batch's tokens in a row: memory never holds T x F of the MLP,
and a token's bits do not depend on T, on B or on the other sequences: with `xla` attention in float32 on a CPU this holds for the whole
prefill but the logits' own product (`reference` attention sums over all of T, so there T must be the same).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.attention import selected_attention
from elastic_jax.cache import HeadTables, PagedCache, Pages, bucket, keeps_ring, write_prompt
from elastic_jax.elastic import Arrays, ElasticModel, LayerBackbones
from elastic_jax.models.rope import rope_cos_sin
from elastic_jax.plan import effective_sparsity
from elastic_jax.router import Routing
from pallas_kernels import device

# Least T. On a CPU attention's tiles are as long as the prompts up to 256 tokens, and sums over fewer than 128 are rounded otherwise.
_SHORTEST = 128

# Tokens of a chunk. A CPU gains nothing beyond a block; elsewhere a chunk is a few launches, so chunks are large.
_CPU_CHUNK, _DEVICE_CHUNK = 128, 2048


class Prefilled(NamedTuple):
    """logits: f32[B, V] after each prompt's last token. is_full: bool[L, B, K], decisions. logit: f32[L, B, K], full minus sparse, 0
    where the decisions were given. effective_sparsity: f32[B], Omega_ESR averaged over layers."""

    logits: jax.Array
    is_full: np.ndarray
    logit: np.ndarray
    effective_sparsity: np.ndarray


def prefill(
    model: ElasticModel,
    backbones: LayerBackbones,
    router: Arrays | None,
    prompts: Sequence[np.ndarray],
    user_turns: Sequence[tuple[int, int]],
    cache: PagedCache,
    *,
    heads: np.ndarray | None = None,
    logit_bias: float = 0.0,
) -> Prefilled:
    """Runs prompts of any lengths and fills an empty cache of as many sequences.

    Args:
      backbones: from `split_layers`.
      router: the routers' arrays; None where `heads` are given.
      prompts: token ids i32[n] each, n from 1 to the sequence's capacity.
      user_turns: first token and end (exclusive) of what the router pools.
      heads: [L, B, K], 1 for the setting's retrieval mode and 0 for its sparse mode, instead of the router.
      logit_bias: as in `choose_routing`.

    Raises:
      ValueError: the pool is too small for the decisions, which are known layer by layer unless they are given; sequences that got
        pages by then keep them, so free the cache.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    assert (lengths >= 1).all()
    assert (lengths <= cache.capacity).all()
    if heads is not None:  # nothing runs where the pool is too small
        cache.change(cache.capacity.tolist(), keeps_ring(heads, model.sparsity))
    tokens = np.zeros((len(prompts), bucket(max(_SHORTEST, int(lengths.max())), model.sparsity.block_size)), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    ranges = np.array(user_turns, np.int32)[:, None], np.stack([np.zeros_like(lengths), lengths], axis=1)[:, None]

    pool, x = cache.pool, _embed(model, backbones[0], tokens)
    decisions, pruned = [], []
    for layer, backbone in enumerate(backbones):
        given = None if heads is None else np.asarray(heads[layer], np.float32)[:, None]
        routers = router if heads is None else None
        q, k, v, routing = _project(model, backbone, routers, np.int32(layer), x, *ranges, given, np.float32(logit_bias))
        x, esr = _attend(model, backbone, x, q, k, v, routing.is_full, lengths)
        decisions.append(jax.device_get(routing))
        pruned.append(esr)
        if heads is None:
            cache.allocate(layer, keeps_ring(decisions[-1].is_full[:, 0], model.sparsity))
        tables = cache.layer(layer)
        pool.pages = _write(pool.lend(), tables, k, v, lengths)
        del q, k, v
    cache.lengths[:] = lengths
    return Prefilled(
        logits=_last_logits(model, backbones[-1], x, lengths),
        is_full=np.stack([routing.is_full[:, 0] > 0.5 for routing in decisions]),
        logit=np.stack([routing.logit[:, 0] for routing in decisions]),
        effective_sparsity=np.mean(jax.device_get(pruned), axis=0),
    )


@functools.partial(jax.jit, static_argnums=0)
def _embed(model: ElasticModel, backbone: Arrays, tokens: jax.Array) -> jax.Array:
    return nnx.merge(model.decoder, backbone).embedding[...][tokens]


@functools.partial(jax.jit, static_argnums=0)
def _project(
    model: ElasticModel,
    backbone: Arrays,
    router: Arrays | None,
    number: jax.Array,
    x: jax.Array,
    user_turn: jax.Array,
    span: jax.Array,
    given: jax.Array | None,
    logit_bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Routing]:
    """q, k and v of a layer, and its decisions f32[B, 1, K]: those `given`, or of router `number`."""
    config, layer = model.config, nnx.merge(model.decoder, backbone).layers
    position = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])

    def project(x: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        return layer.before_attention(x, *rope_cos_sin(position, config.rope, config.head_dim))

    q, k, v, keys = _in_chunks(project, x, position)
    if router is None:
        assert given is not None
        return q, k, v, Routing(given, jnp.zeros_like(given))
    arrays = jax.tree.map(lambda weights: jax.lax.dynamic_index_in_dim(weights, number, keepdims=False), router)
    return q, k, v, model.decide(arrays, keys, user_turn, span, logit_bias)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _attend(
    model: ElasticModel,
    backbone: Arrays,
    x: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_full: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The layer's output [B, T, D], and its Omega_ESR f32[B]."""
    layer = nnx.merge(model.decoder, backbone).layers
    heads, plan = selected_attention(
        q,
        k,
        v,
        is_full,
        document=None,
        first_block=None,
        lengths=lengths,
        sparsity=model.sparsity,
        implementation=model.implementation,
    )
    pruned = effective_sparsity(plan, x.shape[1] // model.sparsity.block_size, lengths=lengths)
    return _in_chunks(layer.after_attention, x, heads), pruned[:, 0]


@functools.partial(jax.jit, donate_argnums=0)
def _write(pages: Pages, tables: HeadTables, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Pages:
    return write_prompt(pages, tables, k, v, lengths)


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model: ElasticModel, backbone: Arrays, x: jax.Array, lengths: jax.Array) -> jax.Array:
    decoder = nnx.merge(model.decoder, backbone)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return decoder.logits(decoder.final_norm(last))


def _in_chunks(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """function([1, C, ...], ...) -> pytree of [1, C, ...], over all tokens of [B, T, ...] arrays."""
    batch, tokens = arrays[0].shape[:2]
    total = batch * tokens
    # A device would spend on the padding of few tokens what it gains; a CPU's chunk is small enough to be padded.
    size = _CPU_CHUNK if device.platform() == "cpu" else min(_DEVICE_CHUNK, total)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.reshape(total, *x.shape[2:]), [(0, -total % size)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(-1, 1, size, *x.shape[1:])

    results = jax.lax.map(lambda chunk: function(*chunk), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[:total].reshape(batch, tokens, *x.shape[3:]), results)
