"""`PackedBatch`: what data hands to the model. Axis letters: B packs, T tokens, Q = T / block_size blocks, C documents per pack."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Packs of documents, each document starting on a block boundary and padded to one.

    Arrays are numpy on the host and jax.Array under jit; leading axes may be added (micro-batches) or removed (one pack).

    Attributes:
      tokens: i32[B, T], padding is token 0.
      targets: i32[B, T], the next token of the same document (0 where there is none).
      loss_weights: f32[B, T], 1 where the prediction of `targets` counts, else 0.
      positions: i32[B, T], restarting at 0 in each document.
      document: i32[B, Q], which document a block belongs to; -1 in padding blocks.
      first_block: i32[B, Q], the block where that document begins; a padding block's own index.
      task: i32[B, C], `TaskClass` of each document; -1 where the pack has fewer than C.
      span: i32[B, C, 2], first token and end (exclusive) of each document without its padding, counted from the start of the pack;
        0, 0 where the pack has fewer than C documents.
      user_turn: i32[B, C, 2], first token and end (exclusive) of the user turn, counted from the start of the pack; 0, 0 if none.
      index: i32[B], number of the pack in the stream; it seeds the router's noise, so noise does not depend on devices or micro-batches.
    """

    tokens: Any
    targets: Any
    loss_weights: Any
    positions: Any
    document: Any
    first_block: Any
    task: Any
    span: Any
    user_turn: Any
    index: Any


def stack_packs(packs: list[PackedBatch]) -> PackedBatch:
    """Stacks packs of equal shape along a new leading axis (numpy)."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *packs)
