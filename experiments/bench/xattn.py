"""XAttention beside dense attention: what the estimate costs, and what a layer of it saves on inputs where it has something to drop.

Random queries and keys have nearly flat attention, the worst case: the threshold keeps its share of the blocks. The other inputs are
a layer of the demo model on real text, repeated to the length.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax import assets
from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import BlockMask, uniform_plan
from elastic_jax.sparsity.xattention import EstimateImplementation, estimate_blocks
from elastic_jax.weights.load import load_model, load_tokenizer
from experiments.bench.attention import free_memory
from experiments.bench.implementations import OURS, Prepared, attempt, jax_forward
from experiments.bench.problem import ForwardReference, Problem, dense_flops, visited_share
from experiments.bench.shapes import SHAPES
from experiments.bench.timing import JaxCall, fields, interleaved, progress
from pallas_kernels.api import mixed_head_attention

TOKENS = (16_384, 65_536, 131_072, 262_144)
IMPLEMENTATIONS = ("mosaic", "triton", "xla", "cudnn_jax")
INPUTS = ("random", "demo")
_ABOUT = ("shape", "heads", "kv_heads", "head_dim", "batch", "tokens")
_DEMO = "smollm2_135m"
_DEMO_TOKENS = 4096  # of text; the model's positions end at 8192


def run(
    *,
    shape: str,
    tokens: Sequence[int],
    inputs: Sequence[str],
    implementations: Sequence[str],
    dtype: str,
    sparsity: SparsityConfig,
    samples: int,
) -> Iterator[dict[str, Any]]:
    """For each length and inputs: the estimate with its selection, dense attention (`cudnn_jax`), and with ours the attention over the
    selected blocks alone (`attention`) and together with the estimate (`layer`), whose errors are those of attention over these blocks."""
    if unknown := sorted(set(inputs) - set(INPUTS)):
        raise ValueError(f"--xattn_inputs: {', '.join(unknown)} unknown; accepted are {', '.join(INPUTS)}")
    if unknown := sorted(set(implementations) - {*OURS, "cudnn_jax"}):
        raise ValueError(f"--implementations: {', '.join(unknown)} unknown; accepted are {', '.join((*OURS, 'cudnn_jax'))}")
    for length in tokens:
        for kind in inputs:
            name = _DEMO if kind == "demo" else shape
            problem = Problem(shape_name=name, shape=SHAPES[name], tokens=length, streaming=0, dtype=dtype, sparsity=sparsity)
            about = {
                "what": "xattn",
                "inputs": kind,
                **{key: value for key, value in problem.about().items() if key in _ABOUT},
                "dtype": dtype,
                "block_size": sparsity.block_size,
                "stride": sparsity.xattn_stride,
                "threshold": sparsity.xattn_threshold,
                "estimate_implementation": _estimate_implementation(),
            }
            progress(f"xattn: {length} tokens, {kind} inputs")
            try:
                q, k = _demo_queries_and_keys(length, dtype) if kind == "demo" else problem.arrays[:2]
            except FileNotFoundError as error:  # the demo model has not been fetched
                yield about | {"implementation": "estimate", "reason": str(error)}
                continue
            yield from _case(about, problem, q, k, implementations, sparsity, samples)
            del q, k, problem
            free_memory()


def _case(
    about: dict[str, Any],
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    implementations: Sequence[str],
    sparsity: SparsityConfig,
    samples: int,
) -> Iterator[dict[str, Any]]:
    v = problem.arrays[2]
    # Where the estimate fails, so does each of the attempts that need it, with the same reason.
    selection = functools.cache(lambda: _Selection(q, k, v, sparsity))
    attempts: dict[tuple[str, str], Prepared | str] = {
        ("estimate", "estimate"): attempt("estimate", lambda: Prepared(selection().estimate), None)
    }
    kept = None if isinstance(attempts["estimate", "estimate"], str) else selection().kept

    def attention(name: str) -> Prepared:
        return Prepared(JaxCall(functools.partial(_attend, name), q, k, v, selection().blocks, sparsity), lambda out: (out,))

    def layer(name: str) -> Prepared:
        return Prepared(JaxCall(functools.partial(_layer, name), q, k, v, sparsity), lambda out: (out,))

    for name in implementations:
        if name == "cudnn_jax":  # its time does not depend on the values
            attempts[name, "dense"] = attempt("cudnn_jax", lambda: jax_forward("cudnn_jax", problem), None)
            continue
        for part, build in (("attention", attention), ("layer", layer)):
            error_of = lambda outputs: selection().exact.error(outputs[0])
            attempts[name, part] = attempt(f"{name} {part}", functools.partial(build, name), error_of)
    times = interleaved({" ".join(key): x.call for key, x in attempts.items() if isinstance(x, Prepared)}, samples)
    results: dict[tuple[str, str], dict[str, Any]] = {
        key: fields(times[" ".join(key)]) | x.notes if isinstance(x, Prepared) else {"reason": x} for key, x in attempts.items()
    }
    dense = results["cudnn_jax", "dense"].get("median_ms") if ("cudnn_jax", "dense") in results else None
    for (name, part), result in results.items():
        record = about | {"implementation": name, "part": part, "kept_share": None if kept is None else round(kept, 4)} | result
        if "median_ms" in record:
            if dense is not None:
                record["speedup_over_dense"] = round(dense / record["median_ms"], 4)
            if part in ("attention", "layer") and kept is not None:
                record["ideal_speedup"] = round(1.0 / kept, 4)  # of attention, were the estimate free and every block equally fast
            if part != "estimate":
                record["tflops"] = round(dense_flops(problem.shape, problem.tokens) / record["median_ms"] / 1e9, 2)
        yield record


class _Selection:
    """The estimate's call, the blocks that it selects, their share of the causal pairs, and exact attention over them."""

    def __init__(self, q: jax.Array, k: jax.Array, v: jax.Array, sparsity: SparsityConfig):
        self.estimate = JaxCall(_estimate, q, k, sparsity)
        self.blocks = _estimate(q, k, sparsity)
        visible = np.asarray(self.blocks.to_dense(q.shape[1] // sparsity.block_size)[0])
        self.kept = visited_share(visible, sparsity.block_size)
        self.exact = ForwardReference(q, k, v, visible, sparsity.block_size)


def _estimate_implementation() -> EstimateImplementation:
    return "triton" if jax.default_backend() == "gpu" else "xla"


@functools.partial(jax.jit, static_argnames="sparsity")
def _estimate(q: jax.Array, k: jax.Array, sparsity: SparsityConfig) -> BlockMask:
    return estimate_blocks(
        q,
        k,
        block_size=sparsity.block_size,
        stride=sparsity.xattn_stride,
        threshold=sparsity.xattn_threshold,
        implementation=_estimate_implementation(),
    )


@functools.partial(jax.jit, static_argnames=("implementation", "sparsity"))
def _attend(implementation: Any, q: jax.Array, k: jax.Array, v: jax.Array, blocks: BlockMask, sparsity: SparsityConfig) -> jax.Array:
    plan = uniform_plan(HeadMode.BLOCK_SPARSE, 1, k.shape[2], sparsity, blocks=blocks)
    return mixed_head_attention(q, k, v, plan, implementation=implementation)[0]


@functools.partial(jax.jit, static_argnames=("implementation", "sparsity"))
def _layer(implementation: Any, q: jax.Array, k: jax.Array, v: jax.Array, sparsity: SparsityConfig) -> jax.Array:
    return _attend(implementation, q, k, v, _estimate(q, k, sparsity), sparsity)


def _demo_queries_and_keys(tokens: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """q and k of the demo model's middle layer on an essay, after RoPE, repeated to `tokens`.

    Raises:
      FileNotFoundError: the model or the text has not been fetched.
    """
    q, k = _demo_layer(min(tokens, _DEMO_TOKENS), dtype)
    repeat = lambda x: jnp.tile(x, (1, -(-tokens // x.shape[1]), 1, 1))[:, :tokens]
    return repeat(q), repeat(k)


@functools.cache
def _demo_layer(tokens: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    source, essays = str(assets.require(_DEMO)), assets.require("essays")
    text = json.loads(essays.read_text(encoding="utf-8"))["text"]
    ids = load_tokenizer(source)(text[: 8 * tokens])["input_ids"][:tokens]
    graphdef, state = nnx.split(load_model(source, dtype=jnp.dtype(dtype)).decoder)
    return _middle_layer(graphdef, state, jnp.asarray(ids, jnp.int32)[None])


@functools.partial(jax.jit, static_argnums=0)
def _middle_layer(graphdef: Any, state: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        del keys, layer
        full = uniform_plan(HeadMode.FULL, 1, k.shape[2], SparsityConfig())
        return mixed_head_attention(q, k, v, full, implementation="xla")[0], (q, k)

    _, (q, k) = nnx.merge(graphdef, state).hidden_states(ids, jnp.arange(ids.shape[1])[None], attend)
    return q[q.shape[0] // 2], k[k.shape[0] // 2]
