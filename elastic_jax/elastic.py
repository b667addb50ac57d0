"""`ElasticModel`: a frozen decoder with a router on every layer, as pure functions of (router, backbone, batch).

Axis letters: L layers, B packs, T tokens, C documents per pack, K KV heads, D model, H head dimension.

The arrays are arguments, never closed over: `backbone` and `router` are nested dictionaries of arrays (layers stacked along a
leading L axis), so a step compiles once for any weights and takes gradients of the router alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from elastic_jax.attention import routed_attention, selected_attention
from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.data.batch import PackedBatch
from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.plan import effective_sparsity
from elastic_jax.router import AttentionRouter, Routing, choose_routing, pool_keys, straight_through
from pallas_kernels.api import Implementation

if TYPE_CHECKING:
    from elastic_jax.generate import Generator

Arrays = dict[str, Any]
LayerBackbones = tuple[Arrays, ...]


def split_layers(backbone: Arrays, *, free: bool = False) -> LayerBackbones:
    """The backbone as one for each layer: "layers" holds the weights of that layer alone, without the L axis; the rest is shared.

    Merged with `ElasticModel.decoder` each is a decoder whose `layers` is one `DecoderLayer`. Generation runs on these: a slice of stacked
    weights is a copy, which made a decode step of Qwen3-4B 6.4 ms instead of 2.6 (without attention; H200, jax 0.11.2).

    Args:
      free: deletes each stacked array once it is split, so that the weights are never twice in memory; `backbone` is of no use then.
    """
    count = jax.tree.leaves(backbone["layers"])[0].shape[0]

    def pieces(weights: jax.Array) -> list[jax.Array]:
        layers = jax.block_until_ready([weights[layer] for layer in range(count)])
        if free:
            weights.delete()
        return layers

    split = jax.tree.map(pieces, backbone["layers"])
    pick = lambda layer: jax.tree.map(lambda weights: weights[layer], split, is_leaf=lambda x: isinstance(x, list))
    return tuple(backbone | {"layers": pick(layer)} for layer in range(count))


class Inference(NamedTuple):
    """Result of an inference pass over packs.

    hidden: [B, T, D] after the final norm. is_full: f32[L, B, C, K] decisions. logit: f32[L, B, C, K], full minus sparse,
    0 where the decisions were given. effective_sparsity: f32[B, C], Omega_ESR (Eq. 5) averaged over layers.
    """

    hidden: jax.Array
    is_full: jax.Array
    logit: jax.Array
    effective_sparsity: jax.Array


@dataclasses.dataclass(frozen=True)
class ElasticModel:
    """The static half of the model; hashable, so that it can be closed over by jitted functions.

    Attributes:
      config: the decoder's shape.
      decoder: graph definition of the decoder; `nnx.merge(decoder, backbone)` rebuilds it.
      sparsity: what full and sparse mean.
      router: shape and input of the routers.
      implementation: of `mixed_head_attention`; None takes the documented best for the device.
    """

    config: ModelConfig
    decoder: nnx.GraphDef[Decoder]
    sparsity: SparsityConfig = SparsityConfig()
    router: RouterConfig = RouterConfig()
    implementation: Implementation | None = None

    @classmethod
    def create(cls, decoder: Decoder, config: ModelConfig, **options: Any) -> tuple[ElasticModel, Arrays]:
        """Splits a loaded decoder into the static model and its backbone arrays; `options` are the other attributes."""
        graphdef, state = nnx.split(decoder)
        return cls(config, graphdef, **options), nnx.to_pure_dict(state)

    @staticmethod
    def from_pretrained(source: str | Path, **options: Any) -> Generator:
        """The model and all that generation needs; arguments and errors as in `elastic_jax.pretrained.load_generator`."""
        from elastic_jax.pretrained import load_generator  # generation is built on this file

        return load_generator(source, **options)

    def _new_router(self, key: jax.Array) -> AttentionRouter:
        return AttentionRouter(self.config.head_dim, self.router, rngs=nnx.Rngs(params=key))

    @property
    def _router_graphdef(self) -> nnx.GraphDef[AttentionRouter]:
        return nnx.split(nnx.eval_shape(lambda: self._new_router(jax.random.key(0))))[0]

    def init_router(self, key: jax.Array) -> Arrays:
        """Fresh routers, one per layer: f32 arrays with a leading L axis."""
        init = lambda layer_key: nnx.to_pure_dict(nnx.split(self._new_router(layer_key))[1])
        return jax.vmap(init)(jax.random.split(key, self.config.num_layers))

    def decide(self, router: Arrays, keys: jax.Array, user_turn: jax.Array, span: jax.Array, logit_bias: jax.Array | float) -> Routing:
        """One layer's noise-free decisions, f32[B, C, K], by that layer's slice of the router; other arguments as in `pool_keys`."""
        return choose_routing(nnx.merge(self._router_graphdef, router)(pool_keys(keys, user_turn, span, self.router)), logit_bias)

    def output_embedding(self, backbone: Arrays) -> jax.Array:
        """[V, D], the matrix that turns hidden states into logits."""
        return nnx.merge(self.decoder, backbone).output_embedding()

    def training_forward(
        self, router: Arrays, backbone: Arrays, batch: PackedBatch, *, key: jax.Array, temperature: jax.Array | float
    ) -> tuple[jax.Array, Routing]:
        """Forward pass with sampled routing; both branches of every head are computed for the router's gradient.

        The noise of a pack depends on `key`, the layer and the pack's `index` alone.

        Returns:
          hidden [B, T, D] after the final norm, and the Routing with arrays f32[L, B, C, K].
        """
        batch = jax.tree.map(jnp.asarray, batch)
        graphdef, valid = self._router_graphdef, _valid_tokens(batch)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, layer: tuple[Arrays, jax.Array]):
            arrays, number = layer
            logits = nnx.merge(graphdef, arrays)(pool_keys(keys, batch.user_turn, batch.span, self.router))
            layer_key = jax.random.fold_in(key, number)
            noise = jax.vmap(lambda pack: jax.random.gumbel(jax.random.fold_in(layer_key, pack), logits.shape[1:]))(batch.index)
            routing = straight_through(logits, noise, temperature)
            out = routed_attention(
                q,
                k,
                v,
                routing.is_full,
                document=batch.document,
                first_block=batch.first_block,
                valid=valid,
                sparsity=self.sparsity,
                implementation=self.implementation,
            )
            return out, routing

        layers = (router, jnp.arange(self.config.num_layers))
        return nnx.merge(self.decoder, backbone).hidden_states(batch.tokens, batch.positions, attend, layers)

    def routed_forward(self, router: Arrays, backbone: Arrays, batch: PackedBatch, *, logit_bias: jax.Array | float = 0.0) -> Inference:
        """Forward pass with the router's noise-free decisions; each head computes its selected attention only."""
        batch = jax.tree.map(jnp.asarray, batch)

        def decide(keys: jax.Array, arrays: Arrays) -> Routing:
            return self.decide(arrays, keys, batch.user_turn, batch.span, logit_bias)

        return self._inference(backbone, batch, decide, router)

    def forced_forward(self, backbone: Arrays, batch: PackedBatch, is_full: jax.Array) -> Inference:
        """Forward pass with given decisions, f32[L, B, C, K] in {0, 1}."""
        batch = jax.tree.map(jnp.asarray, batch)
        return self._inference(backbone, batch, lambda keys, decision: Routing(decision, jnp.zeros_like(decision)), is_full)

    def _inference(self, backbone: Arrays, batch: PackedBatch, decide: Any, per_layer: Any) -> Inference:
        valid = _valid_tokens(batch)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, layer: Any):
            routing = decide(keys, layer)
            out, plan = selected_attention(
                q,
                k,
                v,
                routing.is_full,
                document=batch.document,
                first_block=batch.first_block,
                valid=valid,
                sparsity=self.sparsity,
                implementation=self.implementation,
            )
            pruned = effective_sparsity(
                plan,
                batch.document.shape[1],
                first_block=batch.first_block,
                document=batch.document,
                num_documents=batch.task.shape[1],
            )
            return out, (routing, pruned)

        hidden, (routing, pruned) = nnx.merge(self.decoder, backbone).hidden_states(batch.tokens, batch.positions, attend, per_layer)
        return Inference(hidden, routing.is_full, routing.logit, jnp.mean(pruned, axis=0))


def _valid_tokens(batch: PackedBatch) -> jax.Array:
    """bool[B, T], True for tokens of documents, False for padding."""
    token = jnp.arange(batch.tokens.shape[1])
    start, end = batch.span[..., :1], batch.span[..., 1:]
    return jnp.any((token >= start) & (token < end), axis=1)
