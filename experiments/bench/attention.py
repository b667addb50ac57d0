"""Mixed-head attention against its rivals, one case at a time: `attention` and `dispatch` (forward), `backward`.

All implementations of a case run on the same inputs and masks, in turns (`timing.interleaved`). Dense rivals know no streaming heads:
they run in every case as the time that sparsity has to beat.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elastic_jax.config import SparsityConfig
from experiments.bench import rivals
from experiments.bench.implementations import DENSE, NAMES, OURS, SERIAL, TORCH, Prepared, attempt, jax_backward, jax_forward
from experiments.bench.problem import Problem
from experiments.bench.shapes import SHAPES
from experiments.bench.timing import fields, interleaved, progress
from experiments.bench.tuning import FlexOptions

GRADIENT_CHECK_TOKENS = 4096

# Implementations, lengths and shares that each benchmark runs unless flags say otherwise. `reference` holds all scores of a layer: tests.
_GPU = ("mosaic", "triton", "xla")
DEFAULTS: dict[str, tuple[Sequence[str], Sequence[int], Sequence[float]]] = {
    "attention": ((*_GPU, *DENSE, "flex_torch", *SERIAL), (16_384, 65_536, 262_144), (0.0, 0.5, 0.875, 1.0)),
    "dispatch": ((*_GPU, *SERIAL), (16_384, 65_536, 262_144), (0.5, 0.75, 0.875)),
    "backward": ((*_GPU, *DENSE, "flex_torch"), (16_384, 65_536), (0.0, 0.75)),
}


def run(
    what: str,
    *,
    shape: str,
    tokens: Sequence[int],
    sparse_shares: Sequence[float],
    implementations: Sequence[str],
    dtype: str,
    sparsity: SparsityConfig,
    samples: int,
    flex_options: Mapping[str, dict[str, Any]],
    gradient_check_tokens: int = GRADIENT_CHECK_TOKENS,
) -> Iterator[dict[str, Any]]:
    """Records of every length, share and implementation, those that could not run with the `reason`.

    Args:
      what: a key of `DEFAULTS`.
      sparse_shares: of KV heads that stream, to the nearest head.
      flex_options: `kernel_options` of FlexAttention by kind, see `FlexOptions`; kinds that are absent are tuned.
      gradient_check_tokens: the length at which gradients are held against the reference, since that needs every row: once for each
        implementation, direction and share, or in every case that is no longer. 0: not at all.
    """
    if unknown := sorted(set(implementations) - set(NAMES)):
        raise ValueError(f"--implementations: {', '.join(unknown)} unknown; accepted are {', '.join(NAMES)}")
    if any(not 0.0 <= share <= 1.0 for share in sparse_shares):
        raise ValueError(f"--sparse_shares={','.join(map(str, sparse_shares))}: accepted are values in [0, 1]")
    heads = SHAPES[shape].kv_heads
    problem_of = lambda length, share: Problem(
        shape_name=shape, shape=SHAPES[shape], tokens=length, streaming=round(share * heads), dtype=dtype, sparsity=sparsity
    )
    cases = [(length, share) for length in tokens for share in sparse_shares]
    for case in cases:  # all are checked before any runs
        problem_of(*case)
    bench = _Bench(what, FlexOptions(flex_options, backward=what == "backward"), gradient_check_tokens)
    for case in cases:
        yield from bench.case(problem_of(*case), implementations, samples)  # its arrays end with the case
        free_memory()


class _Bench:
    """What the cases of a run share: FlexAttention's options, and the gradients' errors by implementation, direction and share."""

    def __init__(self, what: str, flex_options: FlexOptions, gradient_check_tokens: int):
        self._what, self._flex_options, self._check_tokens = what, flex_options, gradient_check_tokens
        self._errors: dict[tuple[str, str, int], dict[str, Any]] = {}

    def case(self, problem: Problem, implementations: Sequence[str], samples: int) -> Iterator[dict[str, Any]]:
        progress(f"{self._what}: {problem.tokens} tokens, {problem.streaming} of {problem.shape.kv_heads} KV heads stream")
        torch_side = functools.cache(rivals.TorchSide)
        small = self._small(problem)
        attempts: dict[tuple[str, str], Prepared | str] = {}
        for name in implementations:
            if self._what == "backward":
                for direction in ("backward", "forward_backward") if name in OURS else ("backward",):
                    attempts[name, direction] = self._backward(name, direction, problem, small, torch_side)
            else:
                attempts[name, "forward"] = self._forward(name, problem, torch_side)
        calls = {f"{name} {direction}": x.call for (name, direction), x in attempts.items() if isinstance(x, Prepared)}
        times = interleaved(calls, samples)
        records = []
        for (name, direction), prepared in attempts.items():
            record = {"what": self._what, "direction": direction, "implementation": name, "dense": name in DENSE, **problem.about()}
            if isinstance(prepared, Prepared):
                record |= fields(times[f"{name} {direction}"]) | prepared.notes
                if "median_ms" in record:
                    record["tflops"] = round(problem.dense_flops(direction) / record["median_ms"] / 1e9, 2)
            else:
                record["reason"] = prepared
            records.append(record)
        yield from compare(records)

    def _forward(self, name: str, problem: Problem, torch_side: Callable[[Problem], rivals.TorchSide]) -> Prepared | str:
        options = self._options(name, problem)

        def build() -> Prepared:
            return torch_side(problem).forward(name, options) if name in TORCH else jax_forward(name, problem)

        error_of = (lambda outputs: problem.forward_error(outputs[0])) if _computes(name, problem) else None
        return attempt(name, build, error_of)

    def _backward(
        self, name: str, direction: str, problem: Problem, small: Problem | None, torch_side: Callable[[Problem], rivals.TorchSide]
    ) -> Prepared | str:
        options = self._options(name, problem)  # the same for the check, which is of the kernel that is timed

        def build(problem: Problem) -> Prepared:
            return torch_side(problem).backward(name, options) if name in TORCH else jax_backward(name, problem, direction)

        if small is None or not _computes(name, problem):
            return attempt(f"{name} {direction}", lambda: build(problem), None)
        if small is problem:
            prepared = attempt(f"{name} {direction}", lambda: build(problem), problem.gradient_error)
            if isinstance(prepared, Prepared):
                prepared.notes["error_tokens"] = problem.tokens
            return prepared
        key = (name, direction, problem.streaming)
        prepared = attempt(f"{name} {direction}", lambda: build(problem), None)
        if isinstance(prepared, Prepared):
            if key not in self._errors:
                checked = attempt(f"{name} {direction} against the reference at {small.tokens}", lambda: build(small), small.gradient_error)
                note = {"relative_error": checked.notes["relative_error"]} if isinstance(checked, Prepared) else {"error_reason": checked}
                self._errors[key] = note | {"error_tokens": small.tokens}
            prepared.notes.update(self._errors[key])
        return prepared

    def _options(self, name: str, problem: Problem) -> dict[str, Any]:
        return self._flex_options.of(name, problem) if name in ("flex_torch", *SERIAL) else {}

    def _small(self, problem: Problem) -> Problem | None:
        """Where this case's gradients are checked: the problem itself if it is short enough."""
        if problem.tokens <= self._check_tokens:
            return problem
        size = problem.sparsity.block_size
        tokens = self._check_tokens // size * size
        return dataclasses.replace(problem, tokens=tokens) if tokens else None


def _computes(name: str, problem: Problem) -> bool:
    """Whether the implementation computes the problem's plan: dense ones know no streaming heads."""
    return name not in DENSE or not problem.streaming


def compare(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to the records of one case what needs the others, by medians and within a direction:

    `times_ours`: the implementation's time in multiples of ours, `ours` being the first of `OURS` that ran (above 1: ours is faster);
    `speedup_over_dense`: the fastest dense rival's time in multiples of the implementation's.
    """
    medians = {(r["implementation"], r["direction"]): r["median_ms"] for r in records if "median_ms" in r}
    for record in records:
        if "median_ms" not in record:
            continue
        of = {name: median for (name, direction), median in medians.items() if direction == record["direction"]}
        if ours := next((name for name in OURS if name in of), None):
            record |= {"ours": ours, "times_ours": round(record["median_ms"] / of[ours], 4)}
        if dense := [of[name] for name in DENSE if name in of]:
            record["speedup_over_dense"] = round(min(dense) / record["median_ms"], 4)
    return records


def free_memory() -> None:
    """Hands PyTorch's cached memory back, so that the next case's JAX arrays find room."""
    gc.collect()
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
