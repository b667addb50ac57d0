"""Optimisers: descent on the routers, ascent on the Lagrange multipliers, nothing on the backbone (paper Table 6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import optax

TRAINABLE = ("router", "multipliers")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW for both groups, one schedule shape: linear warm-up, then a cosine to zero.

    Attributes:
      steps: optimiser steps in all; the schedules end there.
      router_lr, multiplier_lr: peak learning rates.
      warmup: share of the steps that warm up.
      weight_decay: decoupled, on every trained array, as in the released code.
      clip: largest global norm of the gradient, which is a mean over micro-batches. The released code clips the *sum* of its six
        micro-batches at 5.0, so its clip acts six times earlier.
    """

    steps: int = 300
    router_lr: float = 5e-4
    multiplier_lr: float = 1e-3
    warmup: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps < 2**31:
            raise ValueError(f"steps={self.steps}: accepted are 1 to 2**31 - 1")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup={self.warmup}: accepted are shares of the steps in [0, 1)")
        for name in ("router_lr", "multiplier_lr", "clip"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: accepted are positive numbers")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay}: accepted are numbers from 0")


def schedule(config: OptimizerConfig, peak: float) -> optax.Schedule:
    """Learning rate by step: 0 -> peak over the warm-up, then a cosine to 0 at `config.steps`."""
    warmup = round(config.warmup * config.steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else peak, peak_value=peak, warmup_steps=warmup, decay_steps=max(config.steps, warmup + 1)
    )


def parameter_labels(tree: dict[str, Any]) -> dict[str, Any]:
    """Labels every array by the top-level key it lies under: `router`, `multipliers`, and `frozen` for all others."""
    return {key: jax.tree.map(lambda _, label=key if key in TRAINABLE else "frozen": label, branch) for key, branch in tree.items()}


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clips the gradient by its global norm, then updates each label of `parameter_labels`.

    Multipliers ascend: their Adam update has its sign flipped, while weight decay still shrinks them (as torch's AdamW with
    `maximize`). Frozen arrays get no update and no state. Give it the trainable part alone where gradients of the backbone are
    not wanted: the clip reads every gradient that it is given.
    """
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2)
    router = optax.chain(
        adam, optax.add_decayed_weights(config.weight_decay), optax.scale_by_learning_rate(schedule(config, config.router_lr))
    )
    multipliers = optax.chain(
        adam,
        optax.scale(-1.0),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config, config.multiplier_lr)),
    )
    groups: dict[Hashable, optax.GradientTransformation] = {"router": router, "multipliers": multipliers, "frozen": optax.set_to_zero()}
    return optax.chain(optax.clip_by_global_norm(config.clip), optax.multi_transform(groups, parameter_labels))
