"""The training objective: language loss + lambda1 * L_diff + lambda2 * L_diff^2 (paper section 4.3, Eq. 8).

Axis letters: B packs, T tokens, C documents per pack, D model, V vocabulary, L layers, K KV heads.

A pack is the unit of every mean: the language loss is the mean over a pack's weighted tokens, the penalty is averaged within a
task class and then over the classes present in the pack, and a step's loss is the mean over its packs. So the loss does not
depend on how the packs are spread over devices or micro-batches.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from elastic_jax.data.tasks import NUM_TASK_CLASSES, TaskClass

Penalty = Literal["absolute", "signed"]

# Tokens per pack and chunk of the language loss: with a vocabulary of 151,936 the float32 logits of one chunk take 0.6 GiB.
LOSS_CHUNK = 1024


def token_losses(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    chunk: int = LOSS_CHUNK,
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """Cross-entropy of every token (nats, float32) and whether the most likely token is the target (i32, 0 or 1).

    The vocabulary is projected `chunk` tokens at a time and again in the backward pass, so the [T, V] logits never exist.
    """
    batch, tokens, _ = hidden.shape
    chunk = min(chunk, tokens)
    padding = -tokens % chunk
    pieces = (tokens + padding) // chunk

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, pieces, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def piece(carry: None, x: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        states, goal = x
        logits = jnp.einsum("BTD,VD->BTV", states, embedding, preferred_element_type=jnp.float32)
        # A masked sum, not a gather: the gradient of a gather is a scatter, slow where XLA must be deterministic.
        is_goal = jnp.arange(logits.shape[-1]) == goal[..., None]
        loss = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_goal, logits, 0.0), axis=-1)
        return carry, (loss, (jnp.argmax(logits, axis=-1) == goal).astype(jnp.int32))

    _, (loss, hit) = jax.lax.scan(piece, None, (split(hidden), split(targets)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :tokens]
    return join(loss), join(hit)


def pack_means(losses: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Float[Array, "B"]:
    """Weighted mean of each pack's token losses; 0 for a pack without weight."""
    return jnp.sum(losses * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyConfig:
    """The constraint on each class's sparsity: lower and upper bound of Omega_MSR, by TaskClass number.

    A target is a class whose bounds are equal. Inside the bounds the penalty is zero; outside, the deviation is measured from
    the nearer bound ("non-tight constraints", paper section 4.3).

    Attributes:
      lower, upper: one value per task class, 0 <= lower <= upper <= 1.
      kind: `absolute` uses |deviation| in the linear term, as the released run did; `signed` is Eq. 8 as printed. With the signed term
        and a positive lambda1, a document that is less sparse than its target lowers the loss: for t_rob = 1, where no document can be
        sparser, the linear term rewards full attention until ascent has carried lambda1 below zero. Hence the default.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    kind: Penalty = "absolute"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Penalty):
            raise ValueError(f"penalty={self.kind!r}: accepted are {', '.join(get_args(Penalty))}")
        for name in ("lower", "upper"):
            bounds = getattr(self, name)
            if len(bounds) != NUM_TASK_CLASSES:
                raise ValueError(f"{name}={bounds}: one bound for each of the {NUM_TASK_CLASSES} task classes is needed")
            if not all(0.0 <= bound <= 1.0 for bound in bounds):
                raise ValueError(f"{name}={bounds}: bounds are shares of sparse heads, accepted are values in [0, 1]")
        if any(low > high for low, high in zip(self.lower, self.upper, strict=True)):
            raise ValueError(f"lower={self.lower} exceeds upper={self.upper} in some class: accepted is lower <= upper")

    @classmethod
    def from_targets(cls, *, robust: float = 1.0, sensitive: float = 0.7, kind: Penalty = "absolute") -> PenaltyConfig:
        """The paper's targets: t_rob for code, summarisation and in-context learning, t_sen for question answering."""
        targets = tuple(sensitive if task.sensitive else robust for task in TaskClass)
        return cls(lower=targets, upper=targets, kind=kind)


def penalty_deviation(sparsity: Float[Array, "B C"], task: Int[Array, "B C"], config: PenaltyConfig) -> Float[Array, "B C"]:
    """L_diff: signed distance of each document's sparsity from its class's bounds, 0 inside them and where task is -1."""
    low = jnp.asarray(config.lower, jnp.float32)[task]
    high = jnp.asarray(config.upper, jnp.float32)[task]
    return jnp.where(task >= 0, sparsity - jnp.clip(sparsity, low, high), 0.0)


def class_means(values: Float[Array, "B C"], task: Int[Array, "B C"]) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Mean of each pack's documents by task class (0 where a class is absent), and the number of documents; N classes."""
    member = (task[..., None] == jnp.arange(NUM_TASK_CLASSES)).astype(jnp.float32)
    count = jnp.sum(member, axis=1)
    return jnp.einsum("BC,BCN->BN", values, member, precision="highest") / jnp.maximum(count, 1.0), count


def sparsity_penalty(
    sparsity: Float[Array, "B C"],
    task: Int[Array, "B C"],
    multipliers: dict[str, Float[Array, "N"]],
    config: PenaltyConfig,
) -> tuple[Float[Array, "B"], Float[Array, "B C"]]:
    """Penalty of each pack and of each document.

    Args:
      sparsity: Omega_MSR per document, from straight-through decisions, so that it carries the router's gradient.
      task: TaskClass per document, -1 where there is none.
      multipliers: `lambda1` and `lambda2`, f32[N] by class.
      config: bounds and kind.

    Returns:
      f32[B], the mean over the classes present of the mean over each class's documents; and f32[B, C].
    """
    deviation = penalty_deviation(sparsity, task, config)
    linear = jnp.abs(deviation) if config.kind == "absolute" else deviation
    per_document = multipliers["lambda1"][task] * linear + multipliers["lambda2"][task] * jnp.square(deviation)
    per_class, count = class_means(per_document, task)
    present = (count > 0).astype(jnp.float32)
    return jnp.sum(per_class * present, axis=1) / jnp.maximum(jnp.sum(present, axis=1), 1.0), per_document


def init_multipliers(key: jax.Array, high: float = 0.5) -> dict[str, jax.Array]:
    """lambda1 and lambda2, one value per task class, uniform in [0, high) as in the released code."""
    first, second = jax.random.split(key)
    return {
        "lambda1": jax.random.uniform(first, (NUM_TASK_CLASSES,), jnp.float32, maxval=high),
        "lambda2": jax.random.uniform(second, (NUM_TASK_CLASSES,), jnp.float32, maxval=high),
    }
