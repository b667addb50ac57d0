"""How heads are made sparse and how the router looks: frozen configurations without behaviour of their own.

The model's own configuration is `elastic_jax.models.config.ModelConfig`; the training program's is `elastic_jax.trainer.TrainConfig`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, get_args

Setting = Literal["fa_ssa", "fa_xa", "xa_ssa"]
Pooling = Literal["boundary", "user_turn", "sequence"]


class HeadMode(enum.IntEnum):
    """How one KV head (and the query heads of its group) attends."""

    FULL = 0
    STREAMING = 1
    BLOCK_SPARSE = 2


_SETTING_MODES: dict[str, tuple[HeadMode, HeadMode]] = {
    "fa_ssa": (HeadMode.FULL, HeadMode.STREAMING),
    "fa_xa": (HeadMode.FULL, HeadMode.BLOCK_SPARSE),
    "xa_ssa": (HeadMode.BLOCK_SPARSE, HeadMode.STREAMING),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SparsityConfig:
    """What the router's two choices mean. Defaults: the paper's Table 6, with the block of 128 that its code executes.

    Attributes:
      setting: `retrieval mode`_`sparse mode`: what a head does when the router says full, and when it says sparse.
      block_size: tokens per block, queries and keys alike (64 and 128 have kernels; the CPU takes any power of two from 16).
      sink_tokens: first tokens of a document that a streaming head always sees; rounded up to blocks.
      local_tokens: last tokens that a streaming head sees, the diagonal block included; rounded up to blocks.
      xattn_stride: XAttention's stride: one score per `stride` x `stride` tile.
      xattn_threshold: share of a block row's estimated attention mass that XAttention keeps, in (0, 1].
    """

    setting: Setting = "fa_ssa"
    block_size: int = 128
    sink_tokens: int = 128
    local_tokens: int = 2048
    xattn_stride: int = 16
    xattn_threshold: float = 0.9

    def __post_init__(self) -> None:
        if self.setting not in _SETTING_MODES:
            raise ValueError(f"setting={self.setting!r}: accepted are {', '.join(get_args(Setting))}")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size}: accepted are powers of two from 16")
        for name in ("sink_tokens", "local_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 token is needed")
        if self.xattn_stride < 1 or self.block_size % self.xattn_stride:
            raise ValueError(f"xattn_stride={self.xattn_stride}: it must divide block_size={self.block_size}")
        if not 0.0 < self.xattn_threshold <= 1.0:
            raise ValueError(f"xattn_threshold={self.xattn_threshold}: accepted are values in (0, 1]")

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_tokens // self.block_size)

    @property
    def local_blocks(self) -> int:
        return -(-self.local_tokens // self.block_size)

    @property
    def retrieval_mode(self) -> HeadMode:
        return _SETTING_MODES[self.setting][0]

    @property
    def sparse_mode(self) -> HeadMode:
        return _SETTING_MODES[self.setting][1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Shape and input of the per-layer router (paper section 4, Table 3).

    Attributes:
      width: hidden width of both MLPs as a multiple of the head dimension (4 in the paper).
      pooling: which tokens' keys are averaged: `boundary` (first and last `boundary_tokens` of the user turn),
        `user_turn` (all of it: how the released checkpoints were trained), `sequence` (the whole document).
      boundary_tokens: tokens taken from each end of the user turn by `boundary` pooling.
      init_std: standard deviation of the weights at initialisation; biases start at zero.
    """

    width: int = 4
    pooling: Pooling = "boundary"
    boundary_tokens: int = 100
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling={self.pooling!r}: accepted are {', '.join(get_args(Pooling))}")
        for name in ("width", "boundary_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
