"""Whole models at inference: `prefill` and `decode` beside Hugging Face transformers, and `memory`, what a prompt and its tokens need.

Ours are the functions that `Generator.generate` runs through. A preset without `--weights` gets random ones of its shape, made on the
device. Which KV heads are sparse is given, at random over all layers and for each sequence anew, or decided by random routers.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elastic_jax.cache import PagedCache, Pages, keeps_ring, pages_needed
from elastic_jax.checkpoints import run_configs
from elastic_jax.decoding import DecodeState, first_token, generate_tokens
from elastic_jax.elastic import Arrays, ElasticModel, split_layers
from elastic_jax.generate import Generator
from elastic_jax.models.config import PRESETS, ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.prefill import Prefilled
from experiments.bench.attention import free_memory
from experiments.bench.hf import HuggingFace
from experiments.bench.report import peak_memory
from experiments.bench.timing import Call, fields, interleaved, progress, reason
from experiments.common import load_elastic_model

STEPS = 64  # tokens that are decoded, and that every cache has room for beside the prompt

# Implementations, lengths and shares of sparse heads unless flags say otherwise.
DEFAULTS: dict[str, tuple[Sequence[str], Sequence[int], Sequence[float]]] = {
    "prefill": (("elastic", "hf_sdpa"), (8192, 32_768, 131_072), (0.0, 0.7)),
    "decode": (("elastic", "hf_sdpa", "hf_static"), (8192, 32_768, 131_072), (0.0, 0.7)),
    "memory": (("elastic",), tuple(2**power for power in range(13, 21)), (0.0, 0.7)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What one call of ours does: `batch` prompts of `tokens` random tokens; `share` of each one's KV heads is sparse, None: routed."""

    tokens: int
    batch: int
    share: float | None

    def __str__(self) -> str:
        heads = "routed" if self.share is None else f"{self.share:g} of the heads sparse" if self.share else "dense"
        return f"{self.batch} x {self.tokens} tokens, {heads}"


def run(
    what: str,
    *,
    settings: dict[str, Any],
    tokens: Sequence[int],
    batches: Sequence[int],
    sparse_shares: Sequence[float],
    routed: bool,
    implementations: Sequence[str],
    samples: int,
    memory_layers: int | None,
) -> Iterator[dict[str, Any]]:
    """Records of every length, batch, share and implementation, those that could not run with the `reason`.

    Args:
      what: a key of `DEFAULTS`.
      settings: values of `experiments.common.MODEL_FLAGS`.
      sparse_shares: of all layers' KV heads, to the nearest head.
      routed: adds a case in which random routers decide.
      memory_layers: of `memory`: the prompt runs through the first ones only, since each layer's work needs the same memory; weights and
        cache are there of all.
    """
    if unknown := sorted(set(implementations) - set(DEFAULTS[what][0])):
        raise ValueError(f"--implementations: {', '.join(unknown)} unknown; {what} has {', '.join(DEFAULTS[what][0])}")
    if any(not 0.0 <= share <= 1.0 for share in sparse_shares):
        raise ValueError(f"--sparse_shares={','.join(map(str, sparse_shares))}: accepted are values in [0, 1]")
    if routed and what == "decode":
        raise ValueError("--routed: decode fills the cache without a prompt, so nothing can be routed; a share has the same time")
    if memory_layers is not None and routed:
        raise ValueError("--memory_layers: layers that do not run have no decisions, so it goes with --sparse_shares, not with --routed")
    shares = [*sparse_shares, *([None] if routed else [])]
    cases = {length: [Case(tokens=length, batch=batch, share=share) for batch in batches for share in shares] for length in tokens}
    sparsity, _ = run_configs(settings)
    about = {
        "what": what,
        "model": settings["model"],
        "dtype": settings["dtype"],
        "setting": sparsity.setting,
        "block_size": sparsity.block_size,
        "sink_blocks": sparsity.sink_blocks,
        "local_blocks": sparsity.local_blocks,
    }
    if what == "memory":
        for ascending in zip(*(cases[length] for length in sorted(cases))):
            for case, record in zip(ascending, _memory(settings, ascending, memory_layers), strict=True):
                yield about | _about_case("elastic", case) | record
        return
    generator = make_generator(settings, max(tokens))
    rival = functools.cache(lambda: HuggingFace(generator.model.config, settings["dtype"]))
    for of_length in cases.values():
        records = _timed(what, generator, rival, of_length, implementations, samples)
        compare(records)
        yield from (about | record for record in records.values())
        free_memory()


def _about_case(implementation: str, case: Case) -> dict[str, Any]:
    about = {"implementation": implementation, "batch": case.batch, "tokens": case.tokens}
    return about | ({"routed": case.share is None, "msr": case.share} if implementation == "elastic" else {})


def _timed(
    what: str,
    generator: Generator,
    rival: Callable[[], HuggingFace],
    cases: Sequence[Case],
    implementations: Sequence[str],
    samples: int,
) -> dict[tuple[str, Case], dict[str, Any]]:
    """The records of one length by implementation and case, all timed in turns; ours are prepared first, so that a rival that fills the
    memory fails alone."""
    ours = PrefillCall if what == "prefill" else DecodeCall
    builds: dict[tuple[str, Case], Callable[[], Call]] = {}
    if "elastic" in implementations:
        builds |= {("elastic", case): functools.partial(ours, generator, case) for case in cases}
    for name in (name for name in implementations if name != "elastic"):
        for case in {case.batch: dataclasses.replace(case, share=0.0) for case in cases}.values():  # it knows no sparse heads
            builds[name, case] = functools.partial(_rival_call, what, name, rival, case)
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for (name, case), build in builds.items():
        progress(f"{what}: {name}, {case}")
        try:
            calls[f"{name} {case}"] = build()
        except Exception as error:
            failed[f"{name} {case}"] = reason(error)
    times = interleaved(calls, samples)
    steps = STEPS if what == "decode" else 1
    records = {}
    for name, case in builds:
        seconds = times.get(key := f"{name} {case}", failed.get(key, ""))
        record = _about_case(name, case) | fields(seconds if isinstance(seconds, str) else [s / steps for s in seconds])
        if "median_ms" in record:
            made = case.batch * (1 if what == "decode" else case.tokens)
            record["tokens_per_second"] = round(1e3 * made / record["median_ms"], 1)
        call = calls.get(key)
        records[name, case] = record | (call.notes if isinstance(call, _Ours) else {})
    return records


def _rival_call(what: str, name: str, rival: Callable[[], HuggingFace], case: Case) -> Call:
    if what == "prefill":
        return rival().prefill(case.tokens, case.batch)
    return rival().decode(case.tokens, case.batch, STEPS, static=name == "hf_static")


def compare(records: dict[tuple[str, Case], dict[str, Any]]) -> None:
    """Adds to our records of one length what needs the others, by medians: `speedup_over_hf`, the faster of transformers' ways at the
    same batch; `speedup_over_dense`, ours with no sparse head; `times_single`, of `batch` sequences one after the other."""
    medians = {key: record["median_ms"] for key, record in records.items() if "median_ms" in record}
    for (name, case), median in medians.items():
        if name != "elastic":
            continue
        record = records[name, case]
        if rivals := [ms for (other, at), ms in medians.items() if other != "elastic" and at.batch == case.batch]:
            record["speedup_over_hf"] = round(min(rivals) / median, 4)
        if (dense := medians.get((name, dataclasses.replace(case, share=0.0)))) is not None:
            record["speedup_over_dense"] = round(dense / median, 4)
        if case.batch > 1 and (single := medians.get((name, dataclasses.replace(case, batch=1)))) is not None:
            record["times_single"] = round(median / (case.batch * single), 4)


class _Ours:
    """Prompts, plans and cache of a case."""

    notes: dict[str, Any]

    def __init__(self, generator: Generator, case: Case):
        self.generator, self.case = generator, case
        config = generator.model.config
        plans = None if case.share is None else np.stack([sparse_plan(config, case.share, index) for index in range(case.batch)])
        self.request = generator.request([True] * case.batch, max_new_tokens=STEPS, stop=[], heads=plans)
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (case.batch, case.tokens), dtype=np.int32)
        self._encoded = [(prompt, (0, case.tokens)) for prompt in prompts]
        self.notes = {}

    def open_cache(self) -> PagedCache:
        return self.generator.open_cache([self.case.tokens] * self.case.batch, self.request)

    def prefill(self, layers: int | None = None) -> tuple[PagedCache, Prefilled]:
        cache = self.open_cache()
        generator = copy.copy(self.generator)
        generator.backbones = generator.backbones[:layers]
        result = generator.prefill(self._encoded, cache, self.request)
        jax.block_until_ready((result.logits, cache.pool.pages))
        return cache, result

    def note(self, cache: PagedCache, is_full: np.ndarray) -> None:
        """Share of sparse heads and size of the cache, from decisions [L, B, K]."""
        config, sparsity = self.generator.model.config, self.generator.model.sparsity
        dense = config.num_layers * config.num_kv_heads * int(pages_needed(cache.capacity, False, sparsity).sum())
        mib = lambda pages: round(1024 * cache.pool.gib(pages), 1)
        self.notes = {
            "msr": round(1.0 - float(np.mean(is_full)), 4),
            "cache_mib": mib(cache.num_pages),
            "dense_cache_mib": mib(dense),
            "cache_share": round(cache.num_pages / dense, 4),
        }


class PrefillCall(_Ours):
    """Times all that a prompt costs until its logits are there and its cache is filled, from opening the cache on."""

    def __call__(self) -> Any:
        return self.prefill()

    def seconds(self, repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            start = time.perf_counter()
            cache, result = self.prefill()
            total += time.perf_counter() - start
            self.note(cache, result.is_full)
            del cache, result  # before the next one is opened
        return total


class DecodeCall(_Ours):
    """Times `STEPS` greedy steps behind a cache of random keys and values, always from the same position."""

    def __init__(self, generator: Generator, case: Case):
        super().__init__(generator, case)
        assert self.request.heads is not None
        self._cache = self.open_cache()
        for layer, heads in enumerate(self.request.heads):
            self._cache.allocate(layer, keeps_ring(heads, generator.model.sparsity))
        self._cache.pool.pages = _random_pages(self._cache.pool.lend())
        self.note(self._cache, self.request.heads)
        token, done = jnp.zeros(case.batch, jnp.int32), jnp.zeros(case.batch, bool)
        self._state = DecodeState(token=token, position=jnp.full(case.batch, case.tokens, jnp.int32), done=done)

    def __call__(self) -> Any:
        return decode(self.generator, self._cache, self._state, self.request)

    def seconds(self, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            self()  # waits for the tokens
        return time.perf_counter() - start


def decode(generator: Generator, cache: PagedCache, state: DecodeState, request: Any) -> np.ndarray:
    """The next `STEPS` tokens i32[B, STEPS]."""
    _, tokens = generate_tokens(generator.model, generator.backbones, cache, state, request.sampling, request.stops, STEPS)
    return tokens


def _memory(settings: dict[str, Any], cases: Sequence[Case], layers: int | None) -> Iterator[dict[str, Any]]:
    """What cases of ascending lengths need, all in one process: a device's peak cannot be set back, and each needs more than the one
    before."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        for case in cases:
            progress(f"memory: {case}")
            try:
                yield process.submit(measure_memory, settings, cases[-1].tokens, case, layers).result()
            except Exception as error:  # the process was killed
                yield {"reason": reason(error), "peak_gib": None}


_kept_generator = functools.cache(lambda settings, tokens: make_generator(dict(settings), tokens))


def measure_memory(settings: dict[str, Any], longest: int, case: Case, layers: int | None) -> dict[str, Any]:
    """One prefill and `STEPS` steps, each with its compilation, of a model for up to `longest` tokens; in a process that did nothing
    larger. `layers`: see `run`."""
    try:
        generator = _kept_generator(tuple(settings.items()), longest)
        ours = _Ours(generator, case)
        start = time.perf_counter()
        cache, result = ours.prefill(layers)
        prefilled = time.perf_counter()
        state = first_token(result.logits, cache.lengths.astype(np.int32), ours.request.sampling, ours.request.stops)
        decode(generator, cache, state, ours.request)
        decoded = time.perf_counter()
    except Exception as error:
        return {"reason": reason(error), "peak_gib": None}
    heads = ours.request.heads
    ours.note(cache, result.is_full if heads is None else heads)
    weights = sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(generator.backbones)}.values())  # layers share the embedding
    return ours.notes | {
        "weights_gib": round(weights / 2**30, 3),
        "prefilled_layers": len(result.is_full),
        "decoded_tokens": STEPS,
        "first_prefill_s": round(prefilled - start, 2),
        "first_decode_s": round(decoded - prefilled, 2),
        **peak_memory(),
    }


def sparse_plan(config: ModelConfig, share: float, sequence: int) -> np.ndarray:
    """[L, K], 0 for sparse heads: a share of all, exact to the head, in places that a sequence has for itself."""
    heads = np.ones(config.num_layers * config.num_kv_heads, np.int8)
    heads[np.random.default_rng(sequence).permutation(heads.size)[: round(share * heads.size)]] = 0
    return heads.reshape(config.num_layers, config.num_kv_heads)


def make_generator(settings: dict[str, Any], tokens: int) -> Generator:
    """The model that `--model` and `--weights` name, with random routers and no tokenizer; random weights where a preset has none given,
    its RoPE stretched for prompts of `tokens` then."""
    config = PRESETS.get(settings["model"])
    if config is None or settings["weights"]:
        model, backbone, _ = load_elastic_model(settings)
    else:
        factor = settings["yarn_factor"]
        if factor is None and tokens + STEPS > config.max_positions:
            factor = config.yarn_factor_for(tokens + STEPS)
        config = config if factor is None else config.with_yarn(factor)
        sparsity, router = run_configs(settings)
        options = {"sparsity": sparsity, "router": router, "implementation": settings["implementation"]}
        model, backbone = random_model(config, settings["dtype"], **options)
    no_tokenizer = cast(Any, SimpleNamespace(eos_token_id=None))
    return Generator(model, split_layers(backbone, free=True), model.init_router(jax.random.key(0)), no_tokenizer)


def random_model(config: ModelConfig, dtype: str, **options: Any) -> tuple[ElasticModel, Arrays]:
    """As `ElasticModel.create`, with weights that are drawn on the device in their own dtype, one array after the other."""
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype)))
    model, shapes = ElasticModel.create(decoder, config, **options)
    leaves, structure = jax.tree.flatten_with_path(shapes)
    arrays = [
        jnp.ones(leaf.shape, leaf.dtype)
        if path[-1] == jax.tree_util.DictKey("scale")
        else _draw(jax.random.key(number), leaf.shape, leaf.dtype)
        for number, (path, leaf) in enumerate(leaves)
    ]
    return model, jax.tree.unflatten(structure, arrays)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """N(0, 0.02), in pieces: the generator needs more memory than what it draws."""
    size = math.prod(shape)
    pieces = math.gcd(size, 1024)
    drawn = jax.lax.map(lambda key: 0.02 * jax.random.normal(key, (size // pieces,), dtype), jax.random.split(key, pieces))
    return drawn.reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _random_pages(pages: Pages) -> Pages:
    """The same pages over and over, in place of zeros: what a product of zeros takes is not what others take."""

    def fill(key: jax.Array, pool: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, (min(1024, pool.shape[0]), *pool.shape[1:]), pool.dtype)
        return drawn[jnp.arange(pool.shape[0]) % drawn.shape[0]]

    return Pages(*(fill(key, pool) for key, pool in zip(jax.random.split(jax.random.key(0), 2), pages)))
