"""Mixed-head attention of the `xla` implementation: what do streaming heads save over full ones, forward and backward?"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import HeadPlan, effective_sparsity, uniform_plan
from pallas_kernels.api import mixed_head_attention

WINDOWS = {
    "small": SparsityConfig(block_size=64, sink_tokens=64, local_tokens=256),
    "paper": SparsityConfig(block_size=128, sink_tokens=128, local_tokens=2048),
}


def run(
    *, tokens: int = 8192, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, dtype: str = "float32", repeats: int = 5
) -> Iterator[dict[str, Any]]:
    """One row per window, plan and direction: medians and minima of single jitted calls after a warm-up, batch 1.

    `tflops` counts the dense causal work (2 S^2 N H forward, 3.5 times that with the backward pass), so sparse rows can exceed the
    machine's peak.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    q, d_out = (jax.random.normal(key, (1, tokens, heads, head_dim), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (1, tokens, kv_heads, head_dim), dtype) for key in keys[2:])
    for window, sparsity in WINDOWS.items():
        full = uniform_plan(HeadMode.FULL, 1, kv_heads, sparsity)
        streaming = uniform_plan(HeadMode.STREAMING, 1, kv_heads, sparsity)
        for name, plan in (("full", full), ("streaming", streaming)):
            pruned = effective_sparsity(plan, -(-tokens // sparsity.block_size)).item()
            for direction, function, work in (("forward", _forward, 1.0), ("forward_backward", _forward_backward, 3.5)):
                seconds = _time(functools.partial(function, q, k, v, d_out, plan), repeats)
                yield {
                    "what": "xla_attention",
                    "direction": direction,
                    "plan": name,
                    "window": window,
                    "shape": {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
                    "block_size": sparsity.block_size,
                    "dtype": dtype,
                    "effective_sparsity": round(pruned, 4),
                    "median_ms": round(1e3 * statistics.median(seconds), 2),
                    "min_ms": round(1e3 * min(seconds), 2),
                    "tflops": round(work * 2 * tokens**2 * heads * head_dim / min(seconds) / 1e12, 4),
                }


@jax.jit
def _forward(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, plan: HeadPlan) -> jax.Array:
    del d_out
    return mixed_head_attention(q, k, v, plan, implementation="xla")[0]


@jax.jit
def _forward_backward(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, plan: HeadPlan) -> Any:
    out, pullback = jax.vjp(lambda q, k, v: mixed_head_attention(q, k, v, plan, implementation="xla")[0], q, k, v)
    return out, pullback(d_out)


def _time(call: Any, repeats: int) -> list[float]:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds
