"""Mixed-head attention against its rivals, one case at a time: `attention` and `dispatch` (forward), `backward`.

All implementations of a case run on the same inputs and masks, in turns (`timing.interleaved`). Dense rivals know no streaming heads:
they run in every case as the time that sparsity has to beat.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from elastic_jax.config import SparsityConfig
from experiments.bench import rivals
from experiments.bench.implementations import DENSE, NAMES, OURS, SERIAL, TORCH, Prepared, attempt, jax_backward, jax_forward
from experiments.bench.problem import Problem
from experiments.bench.timing import interleaved, milliseconds
from pallas_kernels.shapes import SHAPES

_TUNING_TOKENS = 16_384

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
    flex_options: dict[str, Any] | None,
) -> Iterator[dict[str, Any]]:
    """Records of every length, share and implementation, those that could not run with the `reason`.

    Args:
      what: a key of `DEFAULTS`.
      sparse_shares: of KV heads that stream, to the nearest head.
      flex_options: `kernel_options` of FlexAttention; None takes the best of a few at 16K tokens (or at the first length if shorter).
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
    if flex_options is None and set(implementations) & {"flex_torch", *SERIAL}:
        flex_options = _tune_flex(problem_of(min(tokens[0], _TUNING_TOKENS), 0.5), what)
    for case in cases:
        yield from _case(what, problem_of(*case), implementations, samples, flex_options or {})  # its arrays end with the case
        free_memory()


def _case(
    what: str, problem: Problem, implementations: Sequence[str], samples: int, flex_options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    torch_side = functools.cache(lambda: rivals.TorchSide(problem, flex_options))
    attempts: dict[tuple[str, str], Prepared | str] = {}
    for name in implementations:
        knows_plan = name not in DENSE or not problem.streaming
        directions = ("forward",)
        if what == "backward":
            directions = ("backward", "forward_backward") if name in OURS else ("backward",)
        for direction in directions:
            build, error_of = _builder(name, problem, direction, torch_side)
            attempts[name, direction] = attempt(build, error_of if knows_plan else None)
    calls = {f"{name} {direction}": x.call for (name, direction), x in attempts.items() if isinstance(x, Prepared)}
    times = interleaved(calls, samples)
    records = []
    for (name, direction), prepared in attempts.items():
        record = {"what": what, "direction": direction, "implementation": name, "dense": name in DENSE, **problem.about()}
        if isinstance(prepared, Prepared):
            record |= milliseconds(times[f"{name} {direction}"])
            record["tflops"] = round(problem.dense_flops(direction) / record["median_ms"] / 1e9, 2)
            record |= prepared.notes
        else:
            record["reason"] = prepared
        records.append(record)
    yield from compare(records)


def _builder(
    name: str, problem: Problem, direction: str, torch_side: Callable[[], rivals.TorchSide]
) -> tuple[Callable[[], Prepared], Callable[[tuple[jax.Array, ...]], float | None]]:
    """(what prepares the implementation, what measures the error of its outputs)."""
    if direction == "forward":
        build = (lambda: torch_side().forward(name)) if name in TORCH else (lambda: jax_forward(name, problem))
        return build, lambda outputs: problem.forward_error(outputs[0])
    build = (lambda: torch_side().backward(name)) if name in TORCH else (lambda: jax_backward(name, problem, direction))
    return build, problem.gradient_error


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


def _tune_flex(problem: Problem, what: str) -> dict[str, Any]:
    """FlexAttention's fastest `kernel_options` on this problem; {} on a CPU, where it is not compiled, and where none of them runs."""
    if jax.default_backend() != "gpu":
        return {}
    candidates = rivals.FLEX_BACKWARD if what == "backward" else rivals.FLEX_FORWARD
    calls, options_of = {}, {}
    for number, options in enumerate(candidates):
        side = functools.partial(rivals.TorchSide, problem, options)
        build = (
            (lambda side=side: side().backward("flex_torch")) if what == "backward" else (lambda side=side: side().forward("flex_torch"))
        )
        prepared = attempt(build, None)
        if isinstance(prepared, Prepared):
            calls[str(number)], options_of[str(number)] = prepared.call, options
    if not calls:
        return {}
    times = interleaved(calls, 5)
    return options_of[min(times, key=lambda number: min(times[number]))]


def free_memory() -> None:
    """Hands PyTorch's cached memory back, so that the next case's JAX arrays find room."""
    gc.collect()
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
