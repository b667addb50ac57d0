"""`PackedDataset`: an endless stream of packs in which any pack can be read directly, so that resuming needs a step number only."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np

from elastic_jax.data.batch import PackedBatch, stack_packs
from elastic_jax.data.documents import Documents
from elastic_jax.data.packing import LossOn, fill_pack, permutation, plan_packs
from elastic_jax.data.rows import RejectionReport
from elastic_jax.data.tasks import TaskClass


class PackedDataset:
    """Documents packed once; each epoch reads all packs in another order. `len()` is the number of packs in an epoch.

    Args:
      documents: at least one.
      pack_tokens: tokens per pack, a multiple of `block_size`.
      block_size: documents start on multiples of it.
      max_documents: most documents per pack.
      seed: of the packing and of every epoch's order.
      loss_on: as in `fill_pack`.

    Raises:
      ValueError: no documents, a size out of range, or a document longer than a pack.
    """

    def __init__(self, documents: Documents, *, pack_tokens: int, block_size: int, max_documents: int, seed: int, loss_on: LossOn = "all"):
        if not documents:
            raise ValueError(f"documents: none is left to train on\n{documents.report}")
        self.documents = documents
        self._plan = plan_packs(documents.lengths, pack_tokens=pack_tokens, block_size=block_size, max_documents=max_documents, seed=seed)
        self._fill = functools.partial(
            fill_pack, pack_tokens=pack_tokens, block_size=block_size, max_documents=max_documents, loss_on=loss_on
        )
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(len(self._plan), seed, 1 + epoch))
        self._pack_tokens = pack_tokens

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def report(self) -> RejectionReport:
        """What was kept and what was not."""
        return self.documents.report

    @property
    def class_counts(self) -> dict[TaskClass, int]:
        """Documents of each class."""
        return self.documents.class_counts

    @property
    def fill(self) -> float:
        """Share of an epoch's tokens that belong to documents; the rest is padding."""
        return int(self.documents.lengths.sum()) / (len(self) * self._pack_tokens)

    def pack(self, index: int) -> PackedBatch:
        """Pack number `index` >= 0 of the stream, as numpy arrays without batch axis."""
        if index < 0:
            raise ValueError(f"index={index}: packs are numbered from 0")
        epoch, position = divmod(index, len(self))
        members = self._plan[int(self._order(epoch)[position])]
        return self._fill([self.documents[i] for i in members], index=index)

    def batch(self, step: int, shape: tuple[int, ...]) -> PackedBatch:
        """The packs of a step: those numbered from step * prod(shape) on, in order, with the axes `shape` in front.

        Args:
          step: number of the step, from 0.
          shape: [A, B] for A micro-batches of B packs.
        """
        size = math.prod(shape)
        packs = stack_packs([self.pack(step * size + i) for i in range(size)])
        return jax.tree.map(lambda leaf: np.reshape(leaf, (*shape, *leaf.shape[1:])), packs)
