"""Error bars: bootstrap intervals of means over strata, and of paired differences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_ROWS = 1000  # resamples at a time: bounds the memory


class Interval(NamedTuple):
    """A mean and its 95 % interval; NaN where there are no values."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    strata: Sequence[Mapping[Hashable, float]],
    weights: Sequence[float] | None = None,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The weighted mean of the strata's means with its 95 % percentile interval, questions being redrawn.

    A benchmark's tasks are strata: which tasks there are is no accident, which questions they have is. A question that several strata
    ask is redrawn in all of them at once, among those that the same strata ask, so that every stratum keeps its size. Values that belong
    together, such as several answers to one question, are to be averaged before. Few questions, or values that are all the same, give
    an interval that is too narrow: of one question it is a point.

    Args:
      strata: the value of each question, at least one each.
      weights: one per stratum, of any sum above 0; None: all the same.
    """
    if not strata:
        return Interval(np.nan, np.nan, np.nan)
    share = np.ones(len(strata)) if weights is None else np.array(weights, float)
    share /= share.sum()
    parts: dict[Hashable, float] = {}  # what a question adds to the mean
    asking: dict[Hashable, tuple[int, ...]] = {}
    for number, (values, weight) in enumerate(zip(strata, share, strict=True)):
        for question, value in values.items():
            parts[question] = parts.get(question, 0.0) + weight * value / len(values)
            asking[question] = (*asking.get(question, ()), number)
    alike: dict[tuple[int, ...], list[float]] = {}
    for question, part in parts.items():
        alike.setdefault(asking[question], []).append(part)
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for values in map(np.array, alike.values()):
        for start in range(0, resamples, _ROWS):
            some = means[start : start + _ROWS]
            some += values[rng.integers(0, len(values), (len(some), len(values)))].sum(axis=1)
    mean = float(sum(parts.values()))
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean, float(low), float(high))
