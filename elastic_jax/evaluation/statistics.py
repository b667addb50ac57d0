"""Error bars: bootstrap intervals of means over strata, and of paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROWS = 1000  # resamples at a time: bounds the memory


class Interval(NamedTuple):
    """A mean and its 95 % interval; NaN where there are no values."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    strata: Sequence[np.ndarray], weights: Sequence[float] | None = None, *, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The weighted mean of the strata's means with its 95 % percentile interval, values being redrawn within each stratum.

    A benchmark's tasks are strata: which tasks there are is no accident, which samples they have is. Values that belong together, such
    as several answers to one question, are to be averaged before. Few values, or values that are all the same, give an interval that is
    too narrow: of one value it is a point.

    Args:
      strata: f[n] each, n at least 1.
      weights: one per stratum, of any sum above 0; None: all the same.
    """
    if not strata:
        return Interval(np.nan, np.nan, np.nan)
    share = np.ones(len(strata)) if weights is None else np.array(weights, float)
    share /= share.sum()
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for values, weight in zip(strata, share, strict=True):
        for start in range(0, resamples, _ROWS):
            part = means[start : start + _ROWS]
            part += weight * values[rng.integers(0, len(values), (len(part), len(values)))].mean(axis=1)
    mean = float(sum(weight * values.mean() for values, weight in zip(strata, share)))
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean, float(low), float(high))
