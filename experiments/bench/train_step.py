"""Times one optimiser step's micro-batch of the training program: tokens per second and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from elastic_jax.data.batch import PackedBatch
from elastic_jax.elastic import Arrays, ElasticModel
from elastic_jax.trainer import TrainConfig, data_mesh, init_state, make_train_step, shard_batch
from experiments.bench.timing import progress


def _random_pack(model: ElasticModel, tokens: int) -> PackedBatch:
    """One document of random tokens that fills the pack, shaped [A=1, B=1, ...]."""
    rng = np.random.default_rng(0)
    blocks = tokens // model.sparsity.block_size
    ids = rng.integers(0, model.config.vocab_size, tokens + 1).astype(np.int32)
    pack = PackedBatch(
        tokens=ids[:-1],
        targets=ids[1:],
        loss_weights=np.ones(tokens, np.float32),
        positions=np.arange(tokens, dtype=np.int32),
        document=np.zeros(blocks, np.int32),
        first_block=np.zeros(blocks, np.int32),
        task=np.zeros(1, np.int32),
        span=np.array([[0, tokens]], np.int32),
        user_turn=np.array([[0, tokens - 8]], np.int32),
        index=np.int32(0),
    )
    return jax.tree.map(lambda x: np.asarray(x)[None, None], pack)


def run(model: ElasticModel, backbone: Arrays, *, tokens: int, samples: int) -> Iterator[dict[str, Any]]:
    """Yields one record: median and fastest step, tokens/s, and the memory that the compiled step and the device report."""
    config = TrainConfig(global_batch=1)
    mesh = data_mesh(jax.devices()[:1])
    state, batch = init_state(model, config), shard_batch(_random_pack(model, tokens), mesh)
    progress(f"train_step: {tokens} tokens")
    started = time.perf_counter()
    step = make_train_step(model, config, mesh).lower(state, backbone, batch).compile()
    compile_s = time.perf_counter() - started
    state = jax.block_until_ready(step(state, backbone, batch))[0]
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        state = jax.block_until_ready(step(state, backbone, batch))[0]
        seconds.append(time.perf_counter() - started)
    stats = jax.devices()[0].memory_stats() or {}
    median = statistics.median(seconds)
    yield {
        "what": "train_step",
        "batch": 1,
        "tokens": tokens,
        "setting": model.sparsity.setting,
        "block_size": model.sparsity.block_size,
        "sink_tokens": model.sparsity.sink_tokens,
        "local_tokens": model.sparsity.local_tokens,
        "dtype": str(jax.tree.leaves(backbone)[0].dtype),
        "compile_s": round(compile_s, 2),
        "median_ms": round(1e3 * median, 2),
        "min_ms": round(1e3 * min(seconds), 2),
        "samples": samples,
        "tokens_per_second": round(tokens / median, 1),
        "temporary_gib": round(step.memory_analysis().temp_size_in_bytes / 2**30, 3),
        "peak_gib": round(stats["peak_bytes_in_use"] / 2**30, 3) if "peak_bytes_in_use" in stats else None,
    }
