"""Which documents go into which pack, and one pack's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from elastic_jax.data.batch import PackedBatch
from elastic_jax.data.documents import Document

LossOn = Literal["all", "answer"]
_OPEN_PACKS = 32  # packs that still take documents: enough to fill gaps, and keeps planning linear in the number of documents


def permutation(size: int, *key: int) -> np.ndarray:
    """i64[size]: a permutation of 0..size-1 that depends on the non-negative integers in `key` only.

    Sorts raw generator output: NumPy keeps that stable over its versions, unlike `Generator.permutation`, so a run can be resumed
    after an upgrade.
    """
    return np.argsort(np.random.PCG64(np.random.SeedSequence(key)).random_raw(size), kind="stable")


def check_pack_shape(pack_tokens: int, block_size: int, max_documents: int) -> None:
    """ValueError where the sizes of a pack do not fit together."""
    if block_size < 1 or pack_tokens < block_size or pack_tokens % block_size:
        raise ValueError(f"pack_tokens={pack_tokens}: it must be a positive multiple of block_size={block_size}")
    if max_documents < 1:
        raise ValueError(f"max_documents={max_documents}: at least 1 is needed")


def plan_packs(lengths: np.ndarray, *, pack_tokens: int, block_size: int, max_documents: int, seed: int) -> list[list[int]]:
    """Distributes documents over packs: in seeded random order, each into the oldest open pack that has room for it.

    Args:
      lengths: i[D], tokens of each document; each at most `pack_tokens`.
      pack_tokens: size of a pack, a multiple of `block_size`.
      block_size: documents start on multiples of it.
      max_documents: most documents in a pack.
      seed: of the order.

    Returns:
      for each pack the indices of its documents, in the order in which they lie in it. Each document is in one pack.

    Raises:
      ValueError: a size out of range, or a document longer than a pack.
    """
    check_pack_shape(pack_tokens, block_size, max_documents)
    if lengths.size and lengths.max() > pack_tokens:
        raise ValueError(f"document {int(lengths.argmax())} has {lengths.max()} tokens, more than pack_tokens={pack_tokens}")
    blocks = -(-lengths // block_size)
    packs: list[list[int]] = []
    free: dict[int, int] = {}  # free blocks of the open packs, oldest first
    for document in permutation(len(lengths), seed).tolist():
        need = int(blocks[document])
        pack = next((number for number, room in free.items() if room >= need), None)
        if pack is None:
            pack = len(packs)
            packs.append([])
            free[pack] = pack_tokens // block_size
            if len(free) > _OPEN_PACKS:
                del free[next(iter(free))]
        packs[pack].append(document)
        free[pack] -= need
        if not free[pack] or len(packs[pack]) == max_documents:
            del free[pack]
    return packs


def fill_pack(
    documents: Sequence[Document], *, pack_tokens: int, block_size: int, max_documents: int, loss_on: LossOn, index: int = 0
) -> PackedBatch:
    """Lays documents one after the other, each from the next block boundary on.

    Args:
      documents: at most `max_documents`, which together fit.
      pack_tokens: T, a multiple of `block_size`.
      block_size: tokens per block.
      max_documents: C, documents per pack.
      loss_on: "all" counts the prediction of every labelled token but a document's first (the released run's loss); "answer" only
        that of the answer's tokens.
      index: number of the pack in its stream.

    Returns:
      a `PackedBatch` of numpy arrays without batch axis.

    Raises:
      ValueError: the documents are too many or too long.
    """
    if len(documents) > max_documents:
        raise ValueError(f"{len(documents)} documents: a pack holds at most max_documents={max_documents}")
    tokens, targets = np.zeros((2, pack_tokens), np.int32)
    weights = np.zeros(pack_tokens, np.float32)
    document_of = np.full(pack_tokens // block_size, -1, np.int32)
    first_block = np.arange(pack_tokens // block_size, dtype=np.int32)
    task = np.full(max_documents, -1, np.int32)
    span, user_turn = np.zeros((2, max_documents, 2), np.int32)
    start = 0
    for number, document in enumerate(documents):
        length = len(document.tokens)
        end = start + -(-length // block_size) * block_size
        if end > pack_tokens:
            raise ValueError(f"document {document.id!r} of {length} tokens does not fit into what is left of pack_tokens={pack_tokens}")
        tokens[start : start + length] = document.tokens
        targets[start : start + length - 1] = document.tokens[1:]
        counted = document.labelled.copy()
        if loss_on == "answer":
            counted[: document.answer[0]] = False
            counted[document.answer[1] :] = False
        weights[start : start + length - 1] = counted[1:]
        blocks = slice(start // block_size, end // block_size)
        document_of[blocks] = number
        first_block[blocks] = start // block_size
        task[number] = document.task
        span[number] = start, start + length
        user_turn[number] = start + document.user_turn[0], start + document.user_turn[1]
        start = end
    return PackedBatch(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        positions=np.arange(pack_tokens, dtype=np.int32) - np.repeat(first_block * block_size, block_size),
        document=document_of,
        first_block=first_block,
        task=task,
        span=span,
        user_turn=user_turn,
        index=np.int32(index),
    )
