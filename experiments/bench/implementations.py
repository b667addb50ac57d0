"""The implementations by name: ours and cuDNN through JAX here, PyTorch's in `rivals`; and what a failed one leaves in the report."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, cast

import jax

from elastic_jax.plan import HeadPlan
from experiments.bench.problem import Problem
from experiments.bench.timing import Call, JaxCall, progress, reason
from pallas_kernels.api import Implementation, mixed_head_attention, mixed_head_attention_backward

# In order of preference: the first that ran is "ours" wherever a rival's time is given in multiples of ours.
OURS = ("mosaic", "jax_triton", "triton", "xla", "reference")
DENSE = ("cudnn_jax", "cudnn_torch", "flash_torch")
SERIAL = ("serial_cudnn", "serial_flash")
TORCH = ("cudnn_torch", "flash_torch", "flex_torch", *SERIAL)
NAMES = (*OURS, *DENSE, "flex_torch", *SERIAL)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call, how its outputs become JAX arrays in our layout ([1, T, heads, H]), and what the record should add about it."""

    call: Call
    to_jax: Callable[[Any], tuple[jax.Array, ...]] = lambda outputs: outputs
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def attempt(name: str, build: Callable[[], Prepared], error_of: Callable[[tuple[jax.Array, ...]], float] | None) -> Prepared | str:
    """Builds, runs once and notes the relative error; or says why that failed. Standard error hears how long it took.

    Whatever an implementation throws is a result here: kernels are missing, do not fit the device, run out of memory.
    """
    started = time.perf_counter()
    try:
        prepared = build()
        outputs = prepared.to_jax(jax.block_until_ready(prepared.call()))
        if error_of is not None:
            prepared.notes["relative_error"] = float(f"{error_of(outputs):.3g}")
    except Exception as error:
        prepared = reason(error)
    outcome = f"failed, {prepared}" if isinstance(prepared, str) else "prepared"
    progress(f"  {name}: {outcome} ({time.perf_counter() - started:.1f} s)")
    return prepared


def jax_forward(name: str, problem: Problem) -> Prepared:
    """Of ours and `cudnn_jax`."""
    q, k, v = problem.arrays
    if name == "cudnn_jax":
        return Prepared(JaxCall(_cudnn_forward, q, k, v), lambda out: (out,))
    return Prepared(JaxCall(functools.partial(_forward, implementation=name), q, k, v, problem.plan), lambda outputs: outputs[:1])


def jax_backward(name: str, problem: Problem, direction: str) -> Prepared:
    """(dq, dk, dv) of ours and `cudnn_jax`: from the forward pass's results (`backward`), or with that pass (`forward_backward`)."""
    (q, k, v), d_out = problem.arrays, problem.d_out
    if name == "cudnn_jax":
        _, pullback = _cudnn_pullback(q, k, v)
        return Prepared(JaxCall(_pull_back, pullback, d_out))
    if direction == "forward_backward":
        return Prepared(JaxCall(functools.partial(_forward_backward, implementation=name), q, k, v, d_out, problem.plan))
    out, lse = _forward(q, k, v, problem.plan, implementation=name)
    return Prepared(JaxCall(functools.partial(_backward, implementation=name), q, k, v, out, lse, d_out, problem.plan))


@functools.partial(jax.jit, static_argnames="implementation")
def _forward(q: jax.Array, k: jax.Array, v: jax.Array, plan: HeadPlan, *, implementation: str) -> tuple[jax.Array, jax.Array]:
    return mixed_head_attention(q, k, v, plan, implementation=cast(Implementation, implementation))


@functools.partial(jax.jit, static_argnames="implementation")
def _backward(q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, plan: HeadPlan, *, implementation: str) -> tuple[jax.Array, ...]:
    return mixed_head_attention_backward(q, k, v, out, lse, d_out, plan, implementation=cast(Implementation, implementation))


@functools.partial(jax.jit, static_argnames="implementation")
def _forward_backward(q: Any, k: Any, v: Any, d_out: Any, plan: HeadPlan, *, implementation: str) -> tuple[jax.Array, ...]:
    attend = lambda q, k, v: mixed_head_attention(q, k, v, plan, implementation=cast(Implementation, implementation))[0]
    return jax.vjp(attend, q, k, v)[1](d_out)


@jax.jit
def _cudnn_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@jax.jit
def _cudnn_pullback(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    # The pullback is a pytree of the residuals, so it leaves one jitted function and enters another: the backward pass alone is timed.
    return jax.vjp(_cudnn_forward, q, k, v)


@jax.jit
def _pull_back(pullback: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
    return pullback(d_out)
