"""`HeadPlan`, what a router's decision is to an attention kernel, and the sparsity ratios measured from it.

Axis letters: B batch, N query heads, K KV heads, G = N / K, C documents, Q query blocks, J key blocks, R any run of query blocks.

Query block r of a document that begins at block a sees these key blocks:
    FULL          a .. r
    STREAMING     a .. a + sink - 1   and   max(a + sink, r - local + 1) .. r
    BLOCK_SPARSE  the blocks of its row of the bitmap that lie in a .. r
Inside block r the mask is causal by element. Blocks are always counted on the key side: a query that sits at key position p is in
block p // block_size even where the queries are only a suffix of the keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from elastic_jax.config import HeadMode, SparsityConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMask:
    """Which key blocks each query block of a BLOCK_SPARSE head may see.

    A bitmap, because it has one fixed size whatever is selected: at 256K tokens and blocks of 128 it is 0.5 MiB a head, where lists of
    block indices take 16 MiB.

        mask = BlockMask.from_dense(visible)      # bool[B, K or N, Q, J]
        mask.to_dense(num_key_blocks=J)           # the same again

    Attributes:
      bitmap: u32[B, K or N, Q, ceil(J / 32)]; bit j % 32 of word j // 32 is key block j. Per KV head, or per query head where the
        heads of a group select for themselves.
    """

    bitmap: Any

    WORD: ClassVar[int] = 32

    @classmethod
    def from_dense(cls, visible: jax.Array) -> BlockMask:
        """From bool[B, K or N, Q, J]; any leading axes are kept. Raises ValueError for other dtypes."""
        if visible.dtype != bool:
            raise ValueError(f"visible has dtype {visible.dtype}: accepted is bool")
        pad = -visible.shape[-1] % cls.WORD
        bits = jnp.pad(visible.astype(jnp.uint32), [(0, 0)] * (visible.ndim - 1) + [(0, pad)])
        bits = bits.reshape(*visible.shape[:-1], -1, cls.WORD)
        return cls(bitmap=jnp.sum(bits << jnp.arange(cls.WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32))

    def to_dense(self, num_key_blocks: int) -> jax.Array:
        """To bool[B, K or N, Q, num_key_blocks]. Raises ValueError where the bitmap has fewer columns."""
        if not 0 <= num_key_blocks <= self.bitmap.shape[-1] * self.WORD:
            raise ValueError(f"num_key_blocks={num_key_blocks}: accepted are 0 to {self.bitmap.shape[-1] * self.WORD}")
        return _unpack(self.bitmap, num_key_blocks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """How every KV head of one layer attends. Entries of the batch, and documents packed in one entry, may differ.

    Attributes:
      mode: i8[B, K], or i8[B, J, K] with one row per key-side block (so a suffix of queries reads the same table), equal rows for all
        blocks of a document. Values of `HeadMode`.
      blocks: what BLOCK_SPARSE heads see, its Q axis key-side as well (Q = J); without it such a head sees nothing.
      sink_blocks: first blocks of a document that STREAMING heads see.
      local_blocks: last blocks that STREAMING heads see, the diagonal block included.
      block_size: tokens per block.
    """

    mode: Any
    blocks: BlockMask | None = None
    sink_blocks: int = dataclasses.field(metadata={"static": True})
    local_blocks: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})


def uniform_plan(mode: HeadMode, batch: int, kv_heads: int, sparsity: SparsityConfig, *, blocks: BlockMask | None = None) -> HeadPlan:
    """The plan where every head of every entry attends in the same `mode`. Raises ValueError for an unknown mode, and for BLOCK_SPARSE
    without `blocks`."""
    if mode not in list(HeadMode):
        raise ValueError(f"mode={mode!r}: accepted are the values of HeadMode, 0 to 2")
    _require_blocks([mode], blocks)
    return HeadPlan(mode=jnp.full((batch, kv_heads), mode, jnp.int8), blocks=blocks, **_window(sparsity))


def routed_plan(
    is_full: jax.Array, sparsity: SparsityConfig, *, document: jax.Array | None = None, blocks: BlockMask | None = None
) -> HeadPlan:
    """The plan that hard decisions select.

    Args:
      is_full: [B, C, K], 1 for the setting's retrieval mode and 0 for its sparse mode.
      sparsity: says which modes those are, and the window.
      document: i32[B, J], the document of each block; padding blocks (-1) get the sparse mode. None: one document per entry, C = 1.
      blocks: what BLOCK_SPARSE heads see.

    Returns: a plan with mode i8[B, J, K], or i8[B, K] where `document` is None.

    Raises:
      ValueError: the setting has BLOCK_SPARSE heads and there are no `blocks`; shapes that do not fit; known document ids from C on.
    """
    if is_full.ndim != 3 or (document is None and is_full.shape[1] != 1):
        raise ValueError(f"is_full has shape {is_full.shape}: accepted is (B, C, K) with C documents, C = 1 where document is None")
    if document is not None:
        if document.ndim != 2 or document.shape[0] != is_full.shape[0] or not jnp.issubdtype(document.dtype, jnp.integer):
            accepted = f"integers of shape ({is_full.shape[0]}, J)"
            raise ValueError(f"document has dtype {document.dtype}, shape {document.shape}: accepted are {accepted}")
        if not isinstance(document, Tracer) and np.asarray(document).max(initial=-1) >= is_full.shape[1]:
            raise ValueError(f"document has id {np.asarray(document).max()}: accepted are ids below C = {is_full.shape[1]}, -1 for padding")
    _require_blocks([sparsity.retrieval_mode, sparsity.sparse_mode], blocks)
    mode = jnp.where(per_block(is_full, document) > 0.5, sparsity.retrieval_mode, sparsity.sparse_mode).astype(jnp.int8)
    return HeadPlan(mode=mode[:, 0] if document is None else mode, blocks=blocks, **_window(sparsity))


def per_block(per_document: jax.Array, document: jax.Array | None) -> jax.Array:
    """[B, C, K] to [B, J, K] by i32[B, J] document ids, 0 in padding blocks; without ids [B, 1, K] stays as it is."""
    if document is None:
        return per_document
    values = jnp.take_along_axis(per_document, jnp.maximum(document, 0)[:, :, None], axis=1)
    return jnp.where(document[:, :, None] >= 0, values, 0)


def see_blocks(
    mode: jax.Array, row: jax.Array, first: jax.Array, words: jax.Array | None, num_key_blocks: int, sink_blocks: int, local_blocks: int
) -> jax.Array:
    """The rules at the top of this file for a run of query blocks; arguments broadcast against each other.

    Args:
      mode: i8[..., R]. row: i32[R], key-side index of each query block. first: i32[..., R], where its document begins.
      words: u32[..., R, W], rows of the bitmap, or None.

    Returns: bool[..., R, num_key_blocks].
    """
    mode, row, first = mode[..., None], row[:, None], first[..., None]
    key = jnp.arange(num_key_blocks)
    causal = (key >= first) & (key <= row)
    window = causal & ((key < first + sink_blocks) | (key > row - local_blocks))
    listed = jnp.zeros_like(causal) if words is None else causal & _unpack(words, num_key_blocks)
    return jnp.where(mode == HeadMode.FULL, causal, jnp.where(mode == HeadMode.STREAMING, window, listed))


def visible_blocks(plan: HeadPlan, num_query_blocks: int, num_key_blocks: int, first_block: jax.Array | None = None) -> jax.Array:
    """Dense block mask, for references, tests and small measurements; the queries are the last of the key blocks.

    Args:
      first_block: i32[B, num_key_blocks]; None: every entry is one document.

    Returns: bool[B, K, Q, J], or bool[B, N, Q, J] where the plan's bitmap is per query head.
    """
    start = num_key_blocks - num_query_blocks
    return _visible(plan, jnp.arange(start, num_key_blocks), num_key_blocks, first_block)


def model_sparsity(is_full: jax.Array) -> jax.Array:
    """Model sparsity ratio, paper Eq. 4: the share of a model's heads that are routed to sparse attention.

    `is_full` is [L, ..., K] with hard values; the result [...] is float32 and keeps the straight-through gradient. Counted over KV
    heads, which equals the count over query heads because a group shares one decision.
    """
    return 1.0 - jnp.mean(is_full.astype(jnp.float32), axis=(0, -1))


def effective_sparsity(
    plan: HeadPlan,
    num_blocks: int,
    *,
    first_block: jax.Array | None = None,
    document: jax.Array | None = None,
    num_documents: int = 1,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Effective sparsity ratio of one layer: the share of causal (query, key) token pairs of a document that are not attended.

    Paper Eq. 5 is a mean over heads of each head's pruned ratio, 0 for full heads; so is this one. The paper does not define the ratio
    and its plotted values fit the last query's row only; here every causal pair of the document counts once, the
    triangle of the diagonal block by element.

    Args:
      num_blocks: J, of queries and of keys.
      first_block: i32[B, J]. document: i32[B, J] with values below `num_documents`, -1 for padding; None: one document per entry.
      lengths: i32[B], tokens per entry; None: whole blocks. (Packed documents are counted in whole blocks.)

    Returns: f32[B, num_documents]; 0 for a document without tokens.
    """
    size = plan.block_size
    batch = plan.mode.shape[0]
    document = jnp.zeros((batch, num_blocks), jnp.int32) if document is None else document
    first = jnp.zeros((batch, num_blocks), jnp.int32) if first_block is None else first_block
    rows = jnp.arange(num_blocks)
    tokens = jnp.full((batch, num_blocks), size) if lengths is None else jnp.clip(lengths[:, None] - rows * size, 0, size)

    def seen(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        visible = _visible(plan, row[None], num_blocks, first_block)[:, :, 0]
        diagonal = visible[:, :, row]
        return jnp.sum(visible, axis=-1) - diagonal, diagonal

    below, diagonal = jax.lax.map(seen, rows, batch_size=min(64, num_blocks))  # [Q, B, heads]: never all rows' J columns at once
    tokens = tokens.astype(jnp.float32)
    triangle = tokens * (tokens + 1) / 2
    attended = jnp.einsum("BQ,QBH->BQH", tokens * size, below.astype(jnp.float32), precision="highest") + triangle[
        ..., None
    ] * diagonal.transpose(1, 0, 2)
    causal = tokens * size * (rows - first) + triangle
    member = (document[:, :, None] == jnp.arange(num_documents)).astype(jnp.float32)
    total = jnp.einsum("BQ,BQC->BC", causal, member, precision="highest")
    share = jnp.einsum("BQH,BQC->BCH", attended, member, precision="highest").mean(-1) / jnp.maximum(total, 1.0)
    return jnp.where(total > 0, 1.0 - share, 0.0)


def _require_blocks(modes: list[HeadMode], blocks: BlockMask | None) -> None:
    if HeadMode.BLOCK_SPARSE in modes and blocks is None:
        raise ValueError("blocks=None: heads of mode BLOCK_SPARSE need a BlockMask")


def _window(sparsity: SparsityConfig) -> dict[str, int]:
    return {"sink_blocks": sparsity.sink_blocks, "local_blocks": sparsity.local_blocks, "block_size": sparsity.block_size}


def _visible(plan: HeadPlan, rows: jax.Array, num_key_blocks: int, first_block: jax.Array | None) -> jax.Array:
    """bool[B, K or N, R, J] of the query blocks `rows` (i32[R], key-side indices)."""
    batch, kv_heads = plan.mode.shape[0], plan.mode.shape[-1]
    mode = plan.mode[:, :, None] if plan.mode.ndim == 2 else plan.mode[:, rows].swapaxes(1, 2)  # [B, K, 1 or R]
    first = jnp.zeros((batch, 1, 1), jnp.int32) if first_block is None else jnp.asarray(first_block)[:, None, rows]
    words = None
    if plan.blocks is not None:
        words = plan.blocks.bitmap[:, :, rows]
        mode = jnp.repeat(mode, words.shape[1] // kv_heads, axis=1)
    visible = see_blocks(mode, rows, first, words, num_key_blocks, plan.sink_blocks, plan.local_blocks)
    return jnp.broadcast_to(visible, (batch, mode.shape[1], rows.shape[0], num_key_blocks))


def _unpack(words: jax.Array, count: int) -> jax.Array:
    """u32[..., W] to bool[..., count]."""
    bits = (words[..., None] >> np.arange(BlockMask.WORD, dtype=np.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)
