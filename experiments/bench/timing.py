"""How calls are timed: back to back, in samples long enough for the clock, and the rivals of a case in turns.

A GPU's clock moves with heat and load. One implementation after the other would hand the drift to whoever comes last; in turns every
implementation has every phase of it. What ran just before counts too (a kernel's time moves by up to 4 %), so every round has an order of
its own.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

_SAMPLE_SECONDS = 0.02


class Call(Protocol):
    """A prepared computation."""

    def __call__(self) -> Any:
        """Runs it once and returns its outputs, which may still be in flight."""
        ...

    def seconds(self, repeats: int) -> float:
        """Seconds that `repeats` runs take back to back."""
        ...


class JaxCall:
    """A jitted function and its arguments, timed by the host: dispatch is asynchronous, so the device sees the runs back to back."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._function, self._arguments = function, arguments
        # A GPU runs one after the other, so the last one's end is the end of all; a CPU may run several at once.
        self._wait_for_each = jax.default_backend() == "cpu"

    def __call__(self) -> Any:
        return self._function(*self._arguments)

    def seconds(self, repeats: int) -> float:
        start = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = self()
            if self._wait_for_each:
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        return time.perf_counter() - start


class TorchCall:
    """A function of PyTorch, timed by CUDA events: unlike the host's clock of a `JaxCall` they leave out the first launch (some 20 us
    of a sample), which favours PyTorch if anyone."""

    def __init__(self, function: Callable[[], Any], cuda: bool):
        self._function, self._cuda = function, cuda

    def __call__(self) -> Any:
        return self._function()

    def seconds(self, repeats: int) -> float:
        if not self._cuda:
            start = time.perf_counter()
            for _ in range(repeats):
                self()
            return time.perf_counter() - start
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            self()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def interleaved(calls: Mapping[str, Call], samples: int) -> dict[str, list[float] | str]:
    """Seconds per run of each call: `samples` rounds in which every call has its turn, in a random order that is the same in every run of
    the program, after two runs each that are not counted. A call that fails leaves the reason, and the others go on."""
    failed: dict[str, str] = {}
    repeats: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        try:
            call.seconds(1)
            repeats[name] = max(1, math.ceil(_SAMPLE_SECONDS / max(call.seconds(1), 1e-9)))
        except Exception as error:
            failed[name] = reason(error)
    shuffle = random.Random(0).shuffle
    for _ in range(samples):
        order = [name for name in calls if name not in failed]
        shuffle(order)
        for name in order:
            try:
                seconds[name].append(calls[name].seconds(repeats[name]) / repeats[name])
            except Exception as error:
                failed[name] = reason(error)
    return {name: failed.get(name, seconds[name]) for name in calls}


def fields(seconds: list[float] | str) -> dict[str, Any]:
    """The record's fields for what `interleaved` says of one call."""
    if isinstance(seconds, str):
        return {"reason": seconds}
    return {"median_ms": round(1e3 * statistics.median(seconds), 4), "min_ms": round(1e3 * min(seconds), 4), "samples": len(seconds)}


def reason(error: Exception) -> str:
    """What a record says of a failure: kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def progress(text: str) -> None:
    """Says on standard error what goes on: compiling takes long, and the first record of a case comes when all of it has run."""
    print(text, file=sys.stderr, flush=True)
