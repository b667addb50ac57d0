"""What the tests of models and weights share: tiny random torch models of each family, dense attention, and logits from both sides."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.models import Decoder

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1_000.0, "factor": 4.0, "original_max_position_embeddings": 16},
}
VOCABULARY = 97


def torch_model(model_type: str, *, rope: str = "default", tied: bool = False) -> Any:
    """A random transformers model in float32 whose every parameter matters: norms and biases are not ones and zeros."""
    import torch
    import transformers

    config_class = {
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
    }[model_type]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=dict(ROPES[rope]),
        attn_implementation="eager",
        # Qwen3's heads are wider than hidden_size / num_heads.
        **({"head_dim": 16} if model_type == "qwen3" else {}),
    )
    torch.set_num_threads(1)  # torch's threads and JAX's would compete for the same cores
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """f32[B, T, V]."""
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def random_tokens(batch: int = 2, length: int = 48) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (batch, length), dtype=np.int32)


def dense_attend(q: jax.Array, k: jax.Array, v: jax.Array, keys_before_rope: jax.Array, extra: Any) -> tuple[jax.Array, None]:
    """Plain causal attention; no aux."""
    del keys_before_rope, extra
    batch, length, heads, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k).astype(jnp.float32) * size**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores).astype(v.dtype), v)
    return out.reshape(batch, length, heads, size), None


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array) -> jax.Array:
    decoder = nnx.merge(graphdef, state)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.hidden_states(tokens, positions, dense_attend)
    return decoder.logits(hidden)


def jax_logits(decoder: Decoder, tokens: np.ndarray) -> jax.Array:
    """f32[B, T, V] with dense attention; in full float32 on a GPU too, which would otherwise use TF32."""
    with jax.default_matmul_precision("float32"):
        return _logits(*nnx.split(decoder), tokens)
