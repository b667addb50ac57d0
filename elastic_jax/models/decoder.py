"""The decoder: embedding, a scan over layers, final norm, output head. How a layer attends is an argument.

Training, prefill and decoding differ only in the function they pass as `attend`; everything they need per layer (routers, PRNG keys,
caches, forced plans) comes in through `per_layer` and everything they produce leaves through `aux`, both with a leading layer axis.

Use it as an argument of a jitted function, never as a closure (its weights would become constants of the program):

    graphdef, state = nnx.split(decoder)

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graphdef, state, tokens, positions):
        return nnx.merge(graphdef, state).hidden_states(tokens, positions, attend)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from elastic_jax.models.config import ModelConfig
from elastic_jax.models.layers import AttentionProjections, GatedMLP, RMSNorm, normal_params
from elastic_jax.models.rope import rope_cos_sin

# attend(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], keys_before_rope [B,T,K,H], this layer's slice of per_layer)
#   -> (out [B,T,N,H], any pytree)
AttendFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# Layers are recomputed in the backward pass except for what attention names with jax.ad_checkpoint.checkpoint_name: its output and
# log-sum-exp are small beside the cost of running it twice.
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike) -> None:
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = AttentionProjections(config, attention_key, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, mlp_key, dtype)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: AttendFn, extra: Any) -> tuple[jax.Array, Any]:
        """x [B, T, D], cos and sin f32[B, T, H/2] -> (x [B, T, D], what `attend` returned beside its output)."""
        q, k, v, keys_before_rope = self.before_attention(x, cos, sin)
        heads, aux = attend(q, k, v, keys_before_rope, extra)
        return self.after_attention(x, heads), aux

    def before_attention(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] -> q, k, v and the keys before RoPE: see `AttentionProjections.project`."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after_attention(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        """The layer's input [B, T, D] and attention's output [B, T, N, H] -> the layer's output [B, T, D]."""
        x = x + self.attention.merge(heads)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A Qwen3 or Llama language model. Activations have the dtype of the parameters.

    Attributes:
      embedding: [V, D].
      layers: a `DecoderLayer` whose parameters have a leading axis L.
      final_norm: applied to the last layer's output.
      head: [V, D]; absent where the embeddings are tied.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: jax.typing.DTypeLike = jnp.bfloat16) -> None:
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        (self.embedding,) = normal_params(rngs.params(), param_dtype, table)
        # vmap of the initialisation: every leaf gets a leading axis L, and the layer's structure (a static value) comes along.
        init = jax.vmap(lambda key: nnx.split(DecoderLayer(config, key, param_dtype)))
        graphdef, state = init(jax.random.split(rngs.params(), config.num_layers))
        self.layers = nnx.merge(graphdef, state)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype)
        if not config.tie_embeddings:
            (self.head,) = normal_params(rngs.params(), param_dtype, table)

    def hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: AttendFn,
        per_layer: Any = None,
        *,
        remat_policy: Callable[..., bool] = SAVE_ATTENTION,
    ) -> tuple[jax.Array, Any]:
        """Runs all layers.

        Args:
          tokens: i32[B, T].
          positions: i32[B, T], restarting with every packed document.
          attend: how a layer attends; see `AttendFn`.
          per_layer: a pytree whose leaves have a leading axis L; each layer's slice is the last argument of `attend`.
          remat_policy: what of a layer's forward pass is kept for the backward pass (`jax.checkpoint_policies`); the rest is
            computed again. Without gradients it has no effect.

        Returns:
          hidden [B, T, D] after the final norm, and what `attend` returned beside its output, stacked [L, ...].
        """
        cos, sin = rope_cos_sin(positions, self.config.rope, self.config.head_dim)
        graphdef, layers = nnx.split(self.layers)

        # Inside a scan the compiler cannot merge the recomputation with the original, so the barriers against that are left out.
        @functools.partial(jax.checkpoint, policy=remat_policy, prevent_cse=False)
        def step(x: jax.Array, xs: tuple[nnx.State, Any]) -> tuple[jax.Array, Any]:
            layer, extra = xs
            return nnx.merge(graphdef, layer)(x, cos, sin, attend, extra)

        hidden, aux = jax.lax.scan(step, self.embedding[...][tokens], (layers, per_layer))
        return self.final_norm(hidden), aux

    def output_embedding(self) -> jax.Array:
        """[V, D]: the output head, which is the input embedding where the two are tied."""
        return self.embedding[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> f32[..., V]. Training does not call this on a whole sequence: see `elastic_jax.objective`."""
        return jnp.einsum("...D,VD->...V", hidden, self.output_embedding(), preferred_element_type=jnp.float32)
