"""Attention of one layer under a router's decisions: training (both branches of every head) and inference (the selected one).

Letters: B batch, T tokens, N query heads, K KV heads, G = N / K, H head dim, C documents, Q = ceil(T / block_size) blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.plan import BlockMask, HeadPlan, per_block, routed_plan, uniform_plan
from elastic_jax.sparsity.xattention import EstimateImplementation, estimate_blocks
from pallas_kernels.api import Implementation, mixed_head_attention, mixed_head_attention_backward
from pallas_kernels.checks import expect_array

# What the backward pass keeps of the attention kernels' work is named "attention_out" (outputs of both branches) and "attention_lse"
# (log-sum-exp, decisions and XAttention's selected blocks): under the decoder's SAVE_ATTENTION no kernel runs a second time.

# Who asks for attention in plain JAX gets XAttention in plain JAX; both kinds of kernels use the one that estimates.
_ESTIMATES: dict[Implementation, EstimateImplementation] = {
    "reference": "xla",
    "xla": "xla",
    "triton": "triton",
    "mosaic": "triton",
    "jax_triton": "triton",
}


def routed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_full: jax.Array,
    *,
    document: jax.Array | None,
    first_block: jax.Array | None,
    sparsity: SparsityConfig,
    valid: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Training: every head runs in the setting's retrieval mode and in its sparse mode, and `is_full` selects one (paper section 4).

    The gradient of is_full[b, c, k] is <dO, O_retrieval - O_sparse> over the document's tokens and the group's query heads, in float32;
    those of q, k and v come from the selected branch alone, by one backward call on the mixed plan. XAttention's selection is computed
    once from q and k and has no gradient.

    Args:
      q: [B, T, N, H], k and v: [B, T, K, H], after RoPE; bfloat16, float16 or float32.
      is_full: f32[B, C, K], hard values (0 or 1) that carry a straight-through gradient.
      document: i32[B, Q], values below C; -1 marks padding blocks, which attend in the sparse mode and give `is_full` no gradient.
        None: one document per entry, C = 1.
      first_block: i32[B, Q], as in `PackedBatch`. None with document=None.
      valid: bool[B, T], False for the padding at the end of a document, which XAttention must not count. None: no padding.

    Returns: [B, T, N, H] in q's dtype.

    Raises:
      ValueError: shapes that do not fit; and what `mixed_head_attention` raises.
    """
    _check(q, k, is_full, document, first_block, valid, sparsity)
    return _routed(_Static(sparsity, implementation), q, k, v, is_full, document, first_block, valid)


def selected_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_full: jax.Array,
    *,
    document: jax.Array | None,
    first_block: jax.Array | None,
    sparsity: SparsityConfig,
    valid: jax.Array | None = None,
    lengths: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, HeadPlan]:
    """Inference over whole prompts: only the selected mode of each head, and XAttention's estimate only for heads that need it.

    Arguments as in `routed_attention`, and lengths i32[B]: tokens per entry, what lies beyond is padding of any content.

    Returns: ([B, T, N, H] in q's dtype, the plan: mode i8[B, K] where `document` is None, else i8[B, Q, K]).
    """
    _check(q, k, is_full, document, first_block, valid, sparsity)
    if lengths is not None:
        expect_array("lengths", lengths)
    blocks = None
    if _uses_xattention(sparsity):
        if lengths is not None:
            within = jnp.arange(q.shape[1]) < lengths[:, None]
            valid = within if valid is None else valid & within
        needed = jnp.any((is_full > 0.5) == (sparsity.retrieval_mode == HeadMode.BLOCK_SPARSE), axis=1)
        blocks = _estimate(_Static(sparsity, implementation), q, k, first_block, valid, needed)
    plan = routed_plan(is_full, sparsity, document=document, blocks=blocks)
    out, _ = mixed_head_attention(q, k, v, plan, lengths=lengths, first_block=first_block, implementation=implementation)
    return out, plan


@dataclasses.dataclass(frozen=True)
class _Static:
    sparsity: SparsityConfig
    implementation: Implementation | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(static: _Static, q: Any, k: Any, v: Any, is_full: Any, document: Any, first_block: Any, valid: Any) -> jax.Array:
    return _routed_fwd(static, q, k, v, is_full, document, first_block, valid)[0]


def _routed_fwd(
    static: _Static, q: Any, k: Any, v: Any, is_full: Any, document: Any, first_block: Any, valid: Any
) -> tuple[jax.Array, Any]:
    sparsity = static.sparsity
    # The backward pass must take the very decisions of the forward pass, not recomputed ones that could differ in a near-tie.
    is_full = checkpoint_name(is_full, "attention_lse")
    blocks = None
    if _uses_xattention(sparsity):
        blocks = _estimate(static, q, k, first_block, valid, None)
        blocks = BlockMask(bitmap=checkpoint_name(blocks.bitmap, "attention_lse"))

    def branch(mode: HeadMode) -> tuple[jax.Array, jax.Array]:
        plan = uniform_plan(mode, k.shape[0], k.shape[2], sparsity, blocks=blocks if mode == HeadMode.BLOCK_SPARSE else None)
        return mixed_head_attention(q, k, v, plan, first_block=first_block, implementation=static.implementation)

    (out_full, lse_full), (out_sparse, lse_sparse) = branch(sparsity.retrieval_mode), branch(sparsity.sparse_mode)
    # Both outputs rather than the selected one and the difference: the same memory, and neither is rounded a second time.
    out_full, out_sparse = checkpoint_name(out_full, "attention_out"), checkpoint_name(out_sparse, "attention_out")
    full = _per_token(is_full, document, q, sparsity)
    lse = checkpoint_name(jnp.where(full, lse_full, lse_sparse), "attention_lse")
    out = jnp.where(full[..., None], out_full, out_sparse)
    return out, (q, k, v, is_full, document, first_block, blocks, out_full, out_sparse, lse)


def _routed_bwd(static: _Static, residuals: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, is_full, document, first_block, blocks, out_full, out_sparse, lse = residuals
    sparsity = static.sparsity
    out = jnp.where(_per_token(is_full, document, q, sparsity)[..., None], out_full, out_sparse)
    plan = routed_plan(is_full, sparsity, document=document, blocks=blocks)
    dq, dk, dv = mixed_head_attention_backward(
        q, k, v, out, lse, d_out, plan, first_block=first_block, implementation=static.implementation
    )
    batch, tokens, kv_heads = q.shape[0], q.shape[1], k.shape[2]
    difference = out_full.astype(jnp.float32) - out_sparse.astype(jnp.float32)
    change = jnp.sum(d_out.astype(jnp.float32) * difference, axis=-1).reshape(batch, tokens, kv_heads, -1).sum(-1)  # [B, T, K]
    if document is None:
        d_full = change.sum(1, keepdims=True)
    else:
        change = jnp.pad(change, ((0, 0), (0, -tokens % sparsity.block_size), (0, 0)))
        change = change.reshape(batch, -1, sparsity.block_size, kv_heads).sum(2)
        member = (document[:, :, None] == jnp.arange(is_full.shape[1])).astype(jnp.float32)
        d_full = jnp.einsum("BQK,BQC->BCK", change, member, precision="highest")
    return dq, dk, dv, d_full.astype(is_full.dtype), None, None, None


_routed.defvjp(_routed_fwd, _routed_bwd)


def _uses_xattention(sparsity: SparsityConfig) -> bool:
    return HeadMode.BLOCK_SPARSE in (sparsity.retrieval_mode, sparsity.sparse_mode)


def _estimate(
    static: _Static, q: jax.Array, k: jax.Array, first_block: jax.Array | None, valid: jax.Array | None, needed: jax.Array | None
) -> BlockMask:
    return estimate_blocks(
        q,
        k,
        block_size=static.sparsity.block_size,
        stride=static.sparsity.xattn_stride,
        threshold=static.sparsity.xattn_threshold,
        first_block=first_block,
        valid=valid,
        needed=needed,
        # An unknown name is left to `mixed_head_attention`, which says what is accepted.
        implementation=_ESTIMATES[static.implementation] if static.implementation in list(_ESTIMATES) else None,
    )


def _per_token(is_full: jax.Array, document: jax.Array | None, q: jax.Array, sparsity: SparsityConfig) -> jax.Array:
    """bool[B, T, N] (or [B, 1, N]) by broadcast of the decisions f32[B, C, K]."""
    full = per_block(is_full, document) > 0.5
    full = jnp.repeat(full, q.shape[2] // full.shape[2], axis=2)
    return full if document is None else jnp.repeat(full, sparsity.block_size, axis=1)[:, : q.shape[1]]


def _check(
    q: jax.Array,
    k: jax.Array,
    is_full: jax.Array,
    document: jax.Array | None,
    first_block: jax.Array | None,
    valid: jax.Array | None,
    sparsity: SparsityConfig,
) -> None:
    for name, x in (("q", q), ("k", k), ("is_full", is_full), ("document", document), ("first_block", first_block), ("valid", valid)):
        if x is not None:
            expect_array(name, x)
    if q.ndim != 4 or k.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError(f"q has shape {q.shape}, k has shape {k.shape}: accepted are [B, T, N, H] and [B, T, K, H] with one T")
    batch, tokens, kv_heads = q.shape[0], q.shape[1], k.shape[2]
    if is_full.ndim != 3 or is_full.shape[::2] != (batch, kv_heads) or (document is None and is_full.shape[1] != 1):
        raise ValueError(
            f"is_full has shape {is_full.shape}: accepted is ({batch}, C, {kv_heads}) with C documents, C = 1 where document is None"
        )
    if (document is None) != (first_block is None):
        raise ValueError("document and first_block: accepted are two arrays, or None for both")
    blocks = -(-tokens // sparsity.block_size)
    if document is not None and document.shape != (batch, blocks):
        raise ValueError(f"document has shape {document.shape}: accepted is ({batch}, {blocks}), one entry per block")
    if valid is not None and (valid.shape != (batch, tokens) or valid.dtype != bool):
        raise ValueError(f"valid has dtype {valid.dtype}, shape {valid.shape}: accepted is bool of shape ({batch}, {tokens})")
