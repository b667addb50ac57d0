"""Metrics of RULER: which references an answer contains."""

from __future__ import annotations

import re
from collections.abc import Callable

from elastic_jax.evaluation.samples import Sample

_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(answer: str, sample: Sample) -> dict[str, float]:
    """`score`: share of the references that the answer contains, in any case of letters; `empty`: 1 for an empty answer."""
    found, empty = _found(answer, sample)
    return {"score": sum(found) / len(found), "empty": empty}


def match_part(answer: str, sample: Sample) -> dict[str, float]:
    """`score`: 1 where the answer contains any reference, in any case of letters; `empty` as in `match_all`."""
    found, empty = _found(answer, sample)
    return {"score": float(any(found)), "empty": empty}


def _found(answer: str, sample: Sample) -> tuple[list[bool], float]:
    if not sample.references:
        raise ValueError(f"sample {sample.id!r} has no references: at least one is needed")
    answer = _CONTROL.sub("\n", answer.strip()).strip().lower()
    return [reference.lower() in answer for reference in sample.references], float(not answer)


METRICS: dict[str, Callable[[str, Sample], dict[str, float]]] = {"ruler_match_all": match_all, "ruler_match_part": match_part}
