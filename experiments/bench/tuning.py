"""FlexAttention's best `kernel_options`: each of its kernels is tuned on the problem that it runs on."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from typing import Any

import jax

from experiments.bench import flex, rivals
from experiments.bench.implementations import SERIAL, Prepared, attempt
from experiments.bench.problem import Problem
from experiments.bench.timing import interleaved, progress

_TUNING_TOKENS = 16_384
_SAMPLES = 5
KINDS = ("mixed", "window")


class FlexOptions:
    """Options by kind: `mixed` of `flex_torch`, for each share of streaming heads (the dense case too) its own; `window` of serial
    dispatch's kernel for the streaming heads, found with every head streaming.

    A program serves all masks of a length, so after the first share a search is timing only.

    Args:
      given: options by kind that need no search. backward: the gradients are what counts.
    """

    def __init__(self, given: Mapping[str, dict[str, Any]], *, backward: bool):
        self._given, self._backward = given, backward
        self._found: dict[tuple[str, int, int], dict[str, Any]] = {}

    def of(self, name: str, problem: Problem) -> dict[str, Any]:
        """For the implementation `name`: the fastest at 16K tokens or the problem's length if shorter; {} on a CPU, where FlexAttention is
        not compiled, and where none of the candidates runs."""
        kind = "window" if name in SERIAL else "mixed"
        if kind in self._given:
            return self._given[kind]
        if jax.default_backend() != "gpu" or (kind == "window" and not problem.streaming):
            return {}
        block_size = problem.sparsity.block_size
        tokens = max(block_size, min(problem.tokens, _TUNING_TOKENS) // block_size * block_size)
        streaming = problem.shape.kv_heads if kind == "window" else problem.streaming
        key = (kind, tokens, streaming)
        if key not in self._found:
            tuned_on = dataclasses.replace(problem, tokens=tokens, streaming=streaming)
            self._found[key] = fastest(kind, tuned_on, backward=self._backward)
        return self._found[key]


def fastest(kind: str, problem: Problem, *, backward: bool) -> dict[str, Any]:
    """Of the candidates for this problem the one with the least median; {} where none runs."""
    side = functools.cache(lambda: rivals.TorchSide(problem))
    calls, options_of = {}, {}
    for options in flex.candidates(problem.sparsity.block_size, backward=backward):
        if backward:
            build = lambda options=options: side().backward("flex_torch", options)
        else:  # with every head streaming, serial dispatch is its window kernel
            build = lambda options=options: side().forward("serial_flash" if kind == "window" else "flex_torch", options)
        name = f"flex {kind} {options}"
        prepared = attempt(name, build, None)
        if isinstance(prepared, Prepared):
            calls[name], options_of[name] = prepared.call, options
    times = {name: statistics.median(x) for name, x in interleaved(calls, _SAMPLES).items() if not isinstance(x, str)}
    if not times:
        return {}
    best = min(times, key=lambda name: times[name])
    progress(f"fastest of {len(times)}, {1e3 * times[best]:.3f} ms: {best}")
    return options_of[best]
