"""What a layer's routing costs: pooled keys, both MLPs and the decision, by the length of the prompt (paper section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from elastic_jax.config import RouterConfig
from elastic_jax.router import AttentionRouter, choose_routing, pool_keys
from experiments.bench.shapes import SHAPES
from experiments.bench.timing import JaxCall, fields, interleaved, progress

TOKENS = tuple(2**power for power in range(9, 21))  # 512 to 1M, the paper's range
_KV_HEADS = (8, 32)  # grouped heads, and a model without groups
_LOOPS = 100


def run(*, shape: str, tokens: Sequence[int], config: RouterConfig, dtype: str, samples: int) -> Iterator[dict[str, Any]]:
    """Two times for each length and head count: `chain` is the mean of 100 decisions in one jitted loop, each waiting for the one
    before, which is what a decision adds to a layer; `call` is a single jitted call as the host sees it, launch and return included."""
    head_dim = SHAPES[shape].head_dim
    graphdef, state = nnx.split(AttentionRouter(head_dim, config, rngs=nnx.Rngs(params=0)))

    @jax.jit
    def decide(state: nnx.State, keys: jax.Array, user_turn: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(pool_keys(keys, user_turn, user_turn, config))
        return choose_routing(logits).is_full

    @jax.jit
    def chain(state: nnx.State, keys: jax.Array, user_turn: jax.Array) -> jax.Array:
        def step(_: Any, turn: jax.Array) -> jax.Array:
            # The sum of decisions is never negative, which the compiler does not know: the turn stays and the next step has to wait.
            return turn - (jnp.sum(decide(state, keys, turn)) < 0).astype(turn.dtype)

        return jax.lax.fori_loop(0, _LOOPS, step, user_turn)

    for length in tokens:
        for kv_heads in _KV_HEADS:
            progress(f"router: {length} tokens, {kv_heads} KV heads")
            keys = jnp.ones((1, length, kv_heads, head_dim), dtype)  # the time does not depend on the values
            user_turn = jnp.array([[[0, length]]], jnp.int32)
            calls = {"chain": JaxCall(chain, state, keys, user_turn), "call": _Waiting(JaxCall(decide, state, keys, user_turn))}
            times = interleaved(calls, samples)
            for timed, seconds in times.items():
                if timed == "chain" and not isinstance(seconds, str):
                    seconds = [of_all / _LOOPS for of_all in seconds]
                yield {
                    "what": "router",
                    "implementation": timed,
                    "batch": 1,
                    "tokens": length,
                    "kv_heads": kv_heads,
                    "head_dim": head_dim,
                    "width": config.width,
                    "pooling": config.pooling,
                    "dtype": dtype,
                } | fields(seconds)


class _Waiting:
    """The call as a caller sees it who needs every result before going on."""

    def __init__(self, call: JaxCall):
        self._call = call

    def __call__(self) -> Any:
        return self._call()

    def seconds(self, repeats: int) -> float:
        return sum(self._call.seconds(1) for _ in range(repeats))
