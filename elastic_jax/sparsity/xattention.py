"""XAttention (Xu et al. 2025, arXiv 2503.16428): which key blocks carry a query block's attention mass, from anti-diagonal sums.

Letters: B batch, T tokens, N query heads, K KV heads, G = N / K, H head dim, Q/J query/key blocks, s stride, I/A cells of s tokens.

Estimate: cell (i, a) of the grid T/s x T/s scores the products on the anti-diagonal of its s x s tile ("inverse" order),
    A[i, a] = sum over m < s of  q[s i + s - 1 - m] . k[s a + m]  /  (sqrt(H) s),
then a softmax along each row over a <= i inside the document, then the sum over the cells of each block: W[Q, J].
Selection, per query head and query block: the document's first block and the diagonal block always; of the others, in descending W and
the lower column first among equals, the fewest with which the kept mass reaches `threshold` of the row's total.

What differs from the authors' code: scores and sums are float32 throughout; no slice by a padding of zero, so chunks
never lose their keys; "first block" is a key column of every row, per document; batches, grouped heads and ragged lengths work.
The grid is causal by cell as there, so the diagonal cell holds some products of a query with a later key of the same s tokens.

This file holds the definition in plain JAX; `pallas_kernels.xattn_estimate` has the kernels for GPUs. Both keep every sum in float32 (the
kernels count masses in integers when they select), in orders of their own, so they may differ where a row's choice is a near tie.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask, see_blocks
from pallas_kernels import device
from pallas_kernels.checks import BLOCK_SIZES, DTYPES, check_documents, expect_array

EstimateImplementation = Literal["xla", "triton"]

_CHUNK_BYTES = 2**26  # of float32 scores held at once


def estimate_blocks(
    q: jax.Array,
    k: jax.Array,
    *,
    block_size: int,
    stride: int,
    threshold: float,
    first_block: jax.Array | None = None,
    valid: jax.Array | None = None,
    needed: jax.Array | None = None,
    implementation: EstimateImplementation | None = None,
) -> BlockMask:
    """The blocks each query head should see.

    Args:
      q: [B, T, N, H], k: [B, T, K, H], after RoPE.
      block_size, stride, threshold: as in `SparsityConfig`; the stride divides the block, the threshold is in (0, 1].
      first_block: i32[B, Q], the block where each block's document begins, never decreasing along Q; None: one document per entry.
      valid: bool[B, T], False for padding, which counts as absent and may hold anything; within a document it comes last. None: no
        padding.
      needed: bool[B, K], False for KV heads whose query heads may be left without blocks; the kernels do no work for those, plain JAX
        skips the estimate only where no head needs it. None: all.
      implementation: "triton" needs a CUDA GPU from Ampere on, and powers of two as block size and stride, at most 256 strides in a
        block; "xla" is plain JAX, for any device. None: "triton" where it can do the call, else "xla".

    Returns: u32[B, N, Q, ceil(Q / 32)] as a BlockMask, Q = ceil(T / block_size); rows of zeros for heads that are not needed.

    Raises:
      ValueError: shapes that do not fit, queries that are only a suffix of the keys, stride or threshold out of range; an unknown
        implementation.
      NotImplementedError: the implementation asked for cannot do the call on this device; the text says why.
    """
    for name, x in (("q", q), ("k", k), ("first_block", first_block), ("valid", valid), ("needed", needed)):
        if x is not None:
            expect_array(name, x)
    fits = q.ndim == 4 and k.ndim == 4 and 0 not in (*q.shape, *k.shape)
    if not fits or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has shape {q.shape}, k has shape {k.shape}: accepted are [B, T, N, H] and [B, T, K, H], K a divisor of N")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q has dtype {q.dtype}, k has dtype {k.dtype}: accepted are bfloat16, float16 and float32, the same for both")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens, k has {k.shape[1]}: XAttention scores whole prompts, so they must be equal")
    if not 1 <= block_size <= BLOCK_SIZES[-1]:
        raise ValueError(f"block_size={block_size}: accepted are 1 to {BLOCK_SIZES[-1]}")
    if stride < 1 or block_size % stride:
        raise ValueError(f"stride={stride}: it must divide block_size={block_size}")
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold={threshold}: accepted are values in (0, 1]")
    batch, tokens, heads, kv_heads = *q.shape[:3], k.shape[2]
    blocks = -(-tokens // block_size)
    first = jnp.zeros((batch, blocks), jnp.int32) if first_block is None else jnp.asarray(first_block)
    accepted = {"first_block": (first, (batch, blocks)), "valid": (valid, (batch, tokens)), "needed": (needed, (batch, kv_heads))}
    for argument, (x, shape) in accepted.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{argument} has shape {x.shape}: accepted is {shape}")
        if x is not None and x.dtype != bool and argument != "first_block":
            raise ValueError(f"{argument} has dtype {x.dtype}: accepted is bool")
    check_documents(first)
    estimate = _estimate
    if _choose(implementation, block_size, stride) == "triton":
        from pallas_kernels.xattn_estimate import estimate  # not at the top: JAX will drop what it is written in
    needed = jnp.ones((batch, kv_heads), bool) if needed is None else needed

    if threshold < 1.0:
        q, k = jax.lax.stop_gradient((q, k))  # a choice has none
        return BlockMask(bitmap=estimate(q, k, first, valid, needed, block_size=block_size, stride=stride, threshold=threshold))
    # Every block: sums would leave out what is too small to change the total.
    mode = jnp.full((1, 1), HeadMode.FULL, jnp.int8)
    rows = BlockMask.from_dense(see_blocks(mode, jnp.arange(blocks), first[:, None], None, blocks, 0, 0)).bitmap
    return BlockMask(bitmap=_of_heads(needed, heads, jnp.broadcast_to(rows, (batch, heads, *rows.shape[2:]))))


def _choose(implementation: str | None, block_size: int, stride: int) -> str:
    accepted = get_args(EstimateImplementation)
    if implementation not in (None, *accepted):
        raise ValueError(f"implementation={implementation!r}: accepted are None, {', '.join(accepted)}")
    obstacle = device.cuda_obstacle()
    if obstacle is None and (block_size & (block_size - 1) or stride & (stride - 1) or block_size // stride > 256):
        obstacle = f"powers of two with at most 256 strides in a block, and block_size={block_size}, stride={stride}"
    if implementation == "triton" and obstacle is not None:
        raise NotImplementedError(f"implementation='triton' needs {obstacle}; accepted for this call are None, xla")
    return implementation or ("triton" if obstacle is None else "xla")


def _of_heads(needed: jax.Array, heads: int, bitmap: jax.Array) -> jax.Array:
    """u32[B, N, Q, W] without the bits of query heads whose KV head is not needed."""
    return jnp.where(jnp.repeat(needed, heads // needed.shape[1], axis=1)[:, :, None, None], bitmap, 0)


def _estimate(
    q: jax.Array,
    k: jax.Array,
    first: jax.Array,
    valid: jax.Array | None,
    needed: jax.Array,
    *,
    block_size: int,
    stride: int,
    threshold: float,
) -> jax.Array:
    """The bitmap of `estimate_blocks` in plain JAX."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    blocks, cells = first.shape[1], block_size // stride
    valid = jnp.ones((batch, tokens), bool) if valid is None else valid

    def to_cells(x: jax.Array, order: int) -> jax.Array:
        """[B, T, heads, H] to [B, cells, heads, s H]."""
        x = jnp.where(valid[..., None, None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, blocks * block_size - tokens), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, stride, x.shape[2], dim)[:, :, ::order].swapaxes(2, 3)
        return x.reshape(batch, x.shape[1], x.shape[2], stride * dim)

    q_cells = to_cells(q, -1).reshape(batch, blocks, cells, kv_heads, heads // kv_heads, stride * dim)
    k_cells = to_cells(k, 1)
    # A cell counts if its first token does.
    valid_cells = jnp.pad(valid, ((0, 0), (0, blocks * block_size - tokens)))[:, ::stride].reshape(batch, blocks, cells)
    scale = dim**-0.5 / stride
    column = jnp.arange(blocks * cells)

    def select_row(row: jax.Array) -> jax.Array:
        """u32[B, N, W]: the bitmap's row of one query block."""
        precision = "highest" if q.dtype == jnp.float32 else None
        scores = jnp.einsum("BIKGF,BAKF->BKGIA", q_cells[:, row], k_cells, precision=precision, preferred_element_type=jnp.float32)
        cell = row * cells + jnp.arange(cells)
        start = first[:, row]
        visible = (column <= cell[:, None]) & (column >= start[:, None, None] * cells)  # [B, I, A]
        p = jax.nn.softmax(jnp.where(visible[:, None, None], scores * scale, -jnp.inf), axis=-1)
        p = jnp.where(valid_cells[:, row][:, None, None, :, None], p, 0.0)
        mass = p.reshape(batch, heads, cells, blocks, cells).sum((2, 4))
        return BlockMask.from_dense(select_blocks(mass, row, start[:, None], threshold)).bitmap

    rows_at_once = max(1, min(blocks, _CHUNK_BYTES // (4 * batch * heads * cells * blocks * cells)))
    words = -(-blocks // BlockMask.WORD)
    bitmap = jax.lax.cond(
        jnp.any(needed),
        lambda: jax.lax.map(select_row, jnp.arange(blocks), batch_size=rows_at_once),
        lambda: jnp.zeros((blocks, batch, heads, words), jnp.uint32),
    )
    return _of_heads(needed, heads, jnp.moveaxis(bitmap, 0, 2))


def select_blocks(mass: jax.Array, row: jax.Array, first: jax.Array, threshold: float) -> jax.Array:
    """The selection rule at the top of this file.

    Args:
      mass: f32[..., J], what each key block holds, 0 outside first .. row. row, first: i32[...], the row's own block and the first
        block of its document; they broadcast against mass without its last axis.

    Returns: bool[..., J].
    """
    key = jnp.arange(mass.shape[-1])
    row, first = jnp.asarray(row)[..., None], first[..., None]
    allowed = (key >= first) & (key <= row)
    forced = (key == first) | (key == row)
    order = jnp.argsort(-jnp.where(forced, jnp.inf, jnp.where(allowed, mass, -1.0)), axis=-1, stable=True)
    ranked = jnp.take_along_axis(mass, order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    kept = jnp.sum(before < threshold * mass.sum(-1, keepdims=True), axis=-1, keepdims=True)
    rank = jnp.argsort(order, axis=-1)
    return ((rank < kept) & allowed) | forced
