"""Runs samples through a generator and keeps a line of results for each; goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from elastic_jax.cache import bucket
from elastic_jax.evaluation.metrics import METRICS, Metric
from elastic_jax.evaluation.prompts import SamplePrompt, encode_sample
from elastic_jax.evaluation.results import Record, ResultsFolder
from elastic_jax.evaluation.samples import Sample
from elastic_jax.generate import Completion, Generation, Generator
from elastic_jax.replicas import map_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How samples are run; the sizes of batches change no answer but by rounding (see `run_samples`).

    Attributes:
      heads, logit_bias, temperature, top_k, top_p: as in `Generator.generate`, but that the bias is finite.
      max_prompt_tokens: longer prompts lose their middle. None: only those that the model has no positions for.
      seed: of the draws; an answer's own seed depends on this and on its sample's id only.
      batch_size: most prompts at once.
      batch_tokens: most padded prompt tokens at once, though at least one prompt.
    """

    heads: Literal["full", "sparse"] | np.ndarray | None = None
    logit_bias: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_prompt_tokens: int | None = None
    seed: int = 0
    batch_size: int = 8
    batch_tokens: int = 65_536

    def __post_init__(self) -> None:
        if not math.isfinite(self.logit_bias):
            raise ValueError(f"logit_bias={self.logit_bias}: a finite number is needed; heads=full or sparse makes all heads alike")
        for name in ("batch_size", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a whole number from 1 is needed")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens={self.max_prompt_tokens}: a whole number from 1 is needed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Item:
    sample: Sample
    encoded: SamplePrompt
    padded: int  # tokens that the prompt is padded to

    @property
    def tokens(self) -> int:
        return len(self.encoded.prompt.tokens)


def run_samples(
    generator: Generator,
    samples: Iterable[Sample],
    results: ResultsFolder,
    config: RunConfig,
    *,
    devices: Sequence[Any] = (),
    quiet: bool = False,
) -> None:
    """Answers and scores the samples that the folder has no result of.

    Results do not depend on the samples' order, on interruptions or on the devices: batches are made of all samples, and one that was
    interrupted runs again as it was. In float32 they do not depend on the size of batches either; in bfloat16 another number of rows may
    end a near-tie between two tokens otherwise (see `Generator.generate`).

    Args:
      devices: that share the batches; the weights are copied to as many as there are batches for. None given: the generator's own.

    Raises:
      ValueError: two samples have one id, the folder has a result of another prompt under a sample's id, a metric is unknown, or as in
        `encode_sample` and `Generator.generate`.
    """
    known = {record["id"]: record["prompt"] for record in results.records}
    block = generator.model.sparsity.block_size
    items, names = [], set()
    for sample in tqdm(samples, desc="reading samples", unit="", disable=quiet, leave=False):
        _metric(sample)
        if sample.id in names:
            raise ValueError(f"two samples have the id {sample.id!r}")
        names.add(sample.id)
        encoded = encode_sample(generator, sample, config.max_prompt_tokens)
        items.append(_Item(sample=sample, encoded=encoded, padded=bucket(len(encoded.prompt.tokens), block)))
        if known.get(sample.id, encoded.hash) != encoded.hash:
            raise ValueError(f"{results.path} has a result of {sample.id!r} for another prompt: give another folder")
    results.expect(names)
    batches = [batch for batch in _batches(items, config) if any(item.sample.id not in known for item in batch)]
    tokens = lambda items: sum(item.tokens for item in items if item.sample.id not in known)
    left = sum(item.sample.id not in known for item in items)
    # In tokens, since a sample of 128K takes as long as many of 4K.
    total = sum(item.tokens for item in items)
    progress = tqdm(total=total, initial=total - tokens(items), unit=" tokens", unit_scale=True, disable=quiet)
    generators = generator.on(devices[: max(1, len(batches))]) if devices else [generator]
    shapes = [set() for _ in generators]  # that each has compiled

    def answer(number: int, batch: Sequence[_Item]) -> tuple[Generation, bool]:
        result = _generate(generators[number], batch, config)
        shape = len(batch), batch[0].padded, batch[0].sample.max_new_tokens
        first = shape not in shapes[number]
        shapes[number].add(shape)
        return result, first

    with progress:
        progress.set_description(f"{left} answers left")
        for batch, (generation, first) in map_batches(range(len(generators)), batches, answer):
            timing: Record = {"length": batch[0].sample.length, "rows": len(batch), "padded_tokens": batch[0].padded}
            timing |= {name: getattr(generation.timings, name) for name in ("prefill_seconds", "decode_seconds", "steps", "cache_mib")}
            # The first batch of its shape is compiled in this time, on every device.
            timing |= {"prompt_tokens": sum(item.tokens for item in batch), "first": first}
            answers = zip(batch, generation.completions, strict=True)
            records = [_record(item, completion) for item, completion in answers if item.sample.id not in known]
            results.add(records, timing)
            left -= len(records)
            progress.set_description(f"{left} answers left, last of {batch[0].sample.task}")
            progress.update(tokens(batch))


def _generate(generator: Generator, batch: Sequence[_Item], config: RunConfig) -> Generation:
    sample = batch[0].sample
    return generator.generate(
        [item.encoded.prompt for item in batch],
        max_new_tokens=sample.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seeds=[zlib.crc32(f"{config.seed}/{item.sample.id}".encode()) for item in batch],
        stop=[*generator.default_stops(not sample.chat), *sample.stop],
        min_new_tokens=sample.min_new_tokens,
        heads=config.heads,
        logit_bias=config.logit_bias,
    )


def _metric(sample: Sample) -> Metric:
    if sample.metric not in METRICS:
        raise ValueError(f"sample {sample.id!r}: metric {sample.metric!r} is unknown: accepted are {', '.join(sorted(METRICS))}")
    return METRICS[sample.metric]


def _batches(items: Sequence[_Item], config: RunConfig) -> Iterator[list[_Item]]:
    """Batches of prompts that are padded alike and end alike, the longest first: what does not fit fails at once."""

    def key(item: _Item) -> tuple[Any, ...]:
        sample = item.sample
        return -item.padded, str(sample.length), sample.max_new_tokens, sample.min_new_tokens, sample.chat, sample.stop

    for (padded, *_), group in itertools.groupby(sorted(items, key=lambda item: (*key(item), -item.tokens, item.sample.id)), key):
        rows = max(1, min(config.batch_size, config.batch_tokens // -padded))
        members = list(group)
        yield from (members[start : start + rows] for start in range(0, len(members), rows))


def _record(item: _Item, completion: Completion) -> Record:
    """`pred`, `answer` and `LEN` are named as LOOM's rescoring reads them: prediction, references, tokens of the prompt."""
    sample = item.sample
    scores = _metric(sample)(completion.text, sample)
    return {
        "id": sample.id,
        # Answers to one question are no independent evidence.
        "question": sample.extra.get("question", sample.id),
        "task": sample.task,
        "group": sample.group,
        "length": sample.length,
        "prompt": item.encoded.hash,
        "pred": completion.text,
        "answer": list(sample.references),
        "metric": sample.metric,
        "score": scores["score"],
        "scores": scores,
        "msr": round(completion.msr, 6),
        # Batches of other sizes round its last bits otherwise.
        "esr": None if completion.esr is None else round(completion.esr, 4),
        "LEN": completion.prompt_tokens,
        "cut_tokens": item.encoded.cut_tokens,
        "new_tokens": completion.new_tokens,
        "finish_reason": completion.finish_reason,
        "extra": dict(sample.extra),
    }
