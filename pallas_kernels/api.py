"""The public entry of the attention kernels: checks, choice of implementation, gradient.

Axis letters: B batch, T query length, S key length, N query heads, K KV heads, H head dim, Q/J query/key blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from typing import Any, Literal, Protocol, cast, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from elastic_jax.plan import HeadPlan
from pallas_kernels import device, reference, xla
from pallas_kernels.call import Call, Padding
from pallas_kernels.checks import check, check_backward

Implementation = Literal["reference", "xla", "triton", "mosaic", "jax_triton"]


class _Kernel(Protocol):
    """What an implementation offers. All arrays are as `Call` says."""

    def forward(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """(out [B, T, N, H] in q's dtype, lse f32[B, T, N])."""
        ...

    def backward(self, call: Call, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(dq, dk, dv) in the dtypes of q, k, v."""
        ...


_KERNELS = {"reference": cast(_Kernel, reference), "xla": cast(_Kernel, xla)}
_HEAD_DIMS = (64, 128)  # of triton, mosaic and jax_triton
# Measured on an H200 (docs/performance.md): jax_triton is 1.1 to 1.2 times as fast as triton, forward and backward, mosaic 1.2 to 1.3
# times as fast as that.
_BEST_FIRST = ("mosaic", "jax_triton", "triton", "xla")


def mixed_head_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: HeadPlan,
    *,
    lengths: jax.Array | None = None,
    first_block: jax.Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention where every KV head, with the query heads of its group, attends as its plan says.

    Differentiable by q, k and v, once and in reverse mode. The log-sum-exp is for merging and for the backward pass: its own gradient is
    taken as zero.

    Args:
      q: [B, T, N, H] in bfloat16, float16 or float32; the softmax is float32 always. Any H.
      k, v: [B, S, K, H] in q's dtype; K divides N, and query head n reads KV head n // (N / K). The queries are the last T of the S key
        positions: query t sits at position S - T + t.
      plan: the mode of each head. Its tables count key-side blocks, J = ceil(S / block_size): mode i8[B, K] or i8[B, J, K], bitmap
        u32[B, K or N, J, ceil(J / 32)].
      lengths: i32[B], valid positions of each entry. What lies beyond is padding and may hold anything, NaN included. None: S.
      first_block: i32[B, J], the block where each block's document begins, never decreasing along J. None: one document per entry.
      scale: factor of the scores, None: H ** -0.5.
      implementation: None is the best for the device and the call: on CUDA GPUs the first that can of "mosaic", "jax_triton" and
        "triton"; "xla" in all other cases. "mosaic" needs compute capability 9.0 (Hopper), jax 0.11, 16-bit inputs, H up to 128 and
        blocks of 128; "triton" needs compute capability 8.0 (Ampere) or newer and H up to 128; "jax_triton" the same and the packages of
        requirements-triton.txt.

    Returns:
      (out [B, T, N, H] in q's dtype, lse f32[B, T, N]); rows that see no key, such as padding, hold 0 and -inf.

    Raises:
      ValueError: an argument does not fit the others; the text names it, its value and what is accepted. Values inside the plan, of
        lengths and of first_block are checked where they are known, which under jit they are not: lengths above S then count as S.
      NotImplementedError: the implementation asked for cannot run the call on this device or with this JAX; the text says why.
    """
    inputs = (q, k, v, plan, lengths, first_block)
    check(*inputs, scale)
    return _attend(_static(q, plan, scale, implementation), *inputs)


def mixed_head_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    plan: HeadPlan,
    *,
    lengths: jax.Array | None = None,
    first_block: jax.Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) of `mixed_head_attention` for callers with a gradient rule of their own.

    `out` and `lse` are what the forward pass returned for this plan, row by row: they may be selected from passes with other plans.
    `d_out` is out's cotangent. Everything else, and what is raised, as in `mixed_head_attention`.
    """
    inputs = (q, k, v, plan, lengths, first_block)
    check(*inputs, scale)
    check_backward(q, out, lse, d_out)
    return _backward(_static(q, plan, scale, implementation), inputs, out, lse, d_out)


@dataclasses.dataclass(frozen=True)
class _Static:
    implementation: str
    scale: float
    head_dim: int  # that the implementation computes with


def _static(q: jax.Array, plan: HeadPlan, scale: float | None, implementation: Implementation | None) -> _Static:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation={implementation!r}: accepted are None, {', '.join(get_args(Implementation))}")
    name = implementation or next(name for name in _BEST_FIRST if _obstacle(name, q, plan) is None)
    if (obstacle := _obstacle(name, q, plan)) is not None:
        usable = [n for n in get_args(Implementation) if _obstacle(n, q, plan) is None]
        raise NotImplementedError(f"implementation={name!r} needs {obstacle}; accepted for this call are None, {', '.join(usable)}")
    _log_choice(name, device.platform())
    dim = q.shape[-1]
    return _Static(
        implementation=name,
        scale=dim**-0.5 if scale is None else float(scale),
        head_dim=dim if name in _KERNELS else next(d for d in _HEAD_DIMS if d >= dim),
    )


def _obstacle(name: str, q: jax.Array, plan: HeadPlan) -> str | None:
    """What keeps an implementation from doing a call, with the value that is in the way; None where nothing does."""
    if name in _KERNELS:
        return None
    if (obstacle := device.cuda_obstacle()) is not None:
        return obstacle
    if q.shape[-1] > _HEAD_DIMS[-1]:
        return f"a head dim up to {_HEAD_DIMS[-1]}, and q has {q.shape[-1]}"
    if name == "jax_triton":
        missing = [package for package in ("jax_triton", "triton") if importlib.util.find_spec(package) is None]
        return f"the package {missing[0]} (pip install -r requirements-triton.txt), which is not installed" if missing else None
    if name == "triton":
        return None
    if jax.__version_info__ < (0, 11):
        return f"jax 0.11 or newer, and this is {jax.__version__}"
    if (capability := device.compute_capability()) is None or capability[0] != 9:
        known = "one that is not known" if capability is None else ".".join(map(str, capability))
        return f"compute capability 9.0, and this device has {known}"
    if q.dtype == jnp.float32:
        return "bfloat16 or float16 inputs, and q is float32"
    if plan.block_size != 128:
        return f"plan.block_size=128, and it is {plan.block_size}"
    return None


def _kernel(static: _Static) -> _Kernel:
    if static.implementation in _KERNELS:
        return _KERNELS[static.implementation]
    # Not at the top: each needs what some supported version or installation of JAX has not.
    return cast(_Kernel, importlib.import_module(f"pallas_kernels.{static.implementation}"))


@functools.cache
def _log_choice(implementation: str, backend: str) -> None:
    logging.getLogger(__name__).info("mixed_head_attention runs the %s implementation on %s", implementation, backend)


# inputs: q, k, v, plan, lengths, first_block as the caller gave them, so that no padded copies are kept for the backward pass.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(static, inputs)


def _attend_fwd(static: _Static, *inputs: Any) -> tuple[Any, Any]:
    out, lse = _forward(static, inputs)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (inputs, out, lse)


def _attend_bwd(static: _Static, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    inputs, out, lse = residuals
    return *_backward(static, inputs, out, lse, cotangents[0]), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(static: _Static, inputs: Any) -> tuple[jax.Array, jax.Array]:
    padding = Padding(*inputs, scale=static.scale, head_dim=static.head_dim)
    out, lse = _kernel(static).forward(padding.call)
    return padding.cut_queries(out), padding.cut_queries(lse)


def _backward(static: _Static, inputs: Any, out: Any, lse: Any, d_out: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    padding = Padding(*inputs, scale=static.scale, head_dim=static.head_dim)
    dq, dk, dv = _kernel(static).backward(padding.call, *(padding.pad_queries(x) for x in (out, lse, d_out)))
    return padding.cut_queries(dq), padding.cut_keys(dk), padding.cut_keys(dv)
