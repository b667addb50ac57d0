"""Metrics of the benchmarks: an answer and its sample in, named scores from 0 to 1 out, `score` being the one that is reported."""

from __future__ import annotations

from collections.abc import Callable

from elastic_jax.evaluation.samples import Sample

Metric = Callable[[str, Sample], dict[str, float]]

METRICS: dict[str, Metric] = {}
