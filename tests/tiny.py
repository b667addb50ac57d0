"""A tiny random model and synthetic packs, for tests of everything around the model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.config import SparsityConfig
from elastic_jax.data.batch import PackedBatch, stack_packs
from elastic_jax.data.tasks import NUM_TASK_CLASSES
from elastic_jax.elastic import ElasticModel
from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.models.rope import RopeConfig

BLOCK = 16
SPARSITY = SparsityConfig(block_size=BLOCK, sink_tokens=BLOCK, local_tokens=2 * BLOCK, xattn_stride=4)


def tiny_config(**changes) -> ModelConfig:
    options = dict(
        family="qwen3",
        vocab_size=97,
        hidden_size=32,
        mlp_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0),
        max_positions=512,
        tie_embeddings=True,
        qk_norm=True,
    )
    return ModelConfig(**(options | changes))


def tiny_model(seed: int = 0, **options):
    """(ElasticModel, backbone arrays) with float32 weights."""
    config = tiny_config()
    decoder = Decoder(config, rngs=nnx.Rngs(params=seed), param_dtype=jnp.float32)
    return ElasticModel.create(decoder, config, **({"sparsity": SPARSITY} | options))


def lively_model(seed: int = 0, changes=None, **options):
    """(ElasticModel, backbone, router): weights large enough for varied text, routers strong enough to decide both ways."""
    config = tiny_config(**(changes or {}))
    decoder = Decoder(config, rngs=nnx.Rngs(params=seed), param_dtype=jnp.float32)
    model, backbone = ElasticModel.create(decoder, config, **({"sparsity": SPARSITY} | options))
    return (
        model,
        jax.tree.map(lambda w: w * 10 if w.ndim > 2 else w, backbone),
        jax.tree.map(lambda w: w * 30, model.init_router(jax.random.key(1))),
    )


class SyntheticPacks:
    """Random packs of two documents each; any pack is a function of its number."""

    def __init__(self, tokens: int = 128, vocab: int = 97):
        self.tokens, self.vocab = tokens, vocab

    def pack(self, index: int) -> PackedBatch:
        rng = np.random.default_rng(index)
        blocks = self.tokens // BLOCK
        split = int(rng.integers(2, blocks - 1))
        lengths = [split * BLOCK - int(rng.integers(0, BLOCK)), (blocks - split) * BLOCK - int(rng.integers(0, BLOCK))]
        starts = [0, split * BLOCK]
        tokens, targets = np.zeros(self.tokens, np.int32), np.zeros(self.tokens, np.int32)
        weights, positions = np.zeros(self.tokens, np.float32), np.zeros(self.tokens, np.int32)
        document, first = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
        document[split:], first[split:] = 1, split
        for start, length in zip(starts, lengths):
            tokens[start : start + length] = rng.integers(0, self.vocab, length)
            targets[start : start + length - 1] = tokens[start + 1 : start + length]
            weights[start : start + length - 1] = 1
            positions[start : start + length] = np.arange(length)
        span = np.array([[s, s + n] for s, n in zip(starts, lengths)], np.int32)
        return PackedBatch(
            tokens=tokens,
            targets=targets,
            loss_weights=weights,
            positions=positions,
            document=document,
            first_block=first,
            task=rng.integers(0, NUM_TASK_CLASSES, 2).astype(np.int32),
            span=span,
            user_turn=span - np.array([0, 2], np.int32),
            index=np.int32(index),
        )

    def batch(self, step: int, shape: tuple[int, int]) -> PackedBatch:
        first = step * shape[0] * shape[1]
        flat = stack_packs([self.pack(first + i) for i in range(shape[0] * shape[1])])
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), flat)
