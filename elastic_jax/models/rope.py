"""Rotary position embedding: the frequencies of each scaling kind that the supported families use, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Base frequencies and how they are stretched beyond the length the model was first trained for.

    Attributes:
      theta: base wavelength.
      kind: `default` (none), `linear` (Chen et al. 2023), `llama3` (Llama 3.1), `yarn` (Peng et al. 2023).
      factor: how many times longer the context becomes; unused by `default`.
      original_max_positions: length before stretching, for `llama3` and `yarn`.
      low_freq_factor, high_freq_factor: `llama3`: wavelengths above original / low are stretched, those below original / high kept.
      beta_fast, beta_slow: `yarn`: frequencies that turn more than `beta_fast` times in the original length are kept, those that
        turn less than `beta_slow` times are stretched.
      attention_factor: `yarn`: multiplies cos and sin; None derives it from `factor` (and `mscale`, `mscale_all_dim` where both are set).
      truncate: `yarn`: round the two bounds outwards to whole dimensions.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ValueError(f"RoPE kind={self.kind!r}: accepted are {', '.join(get_args(RopeKind))}")
        if self.theta <= 1.0:
            raise ValueError(f"RoPE theta={self.theta}: it must be above 1")
        if self.factor < 1.0:
            raise ValueError(f"RoPE factor={self.factor}: it must be at least 1")
        if self.kind in ("llama3", "yarn") and not (self.original_max_positions and self.original_max_positions > 0):
            raise ValueError(f"RoPE original_max_positions={self.original_max_positions}: kind={self.kind!r} needs a positive length")
        if self.kind == "llama3" and not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}: needed is 0 < low < high"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Reads a Hugging Face config.json: `rope_theta` with `rope_scaling`, or `rope_parameters` (transformers 5).

        Raises:
          ValueError: a RoPE type, a partial rotation or per-layer parameters that are not supported; a parameter is missing.
        """
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        found = dict(config.get(key) or {})
        kind = found.pop("rope_type", None) or found.get("type") or "default"
        found.pop("type", None)
        theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
        partial = found.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if any(isinstance(value, dict) for value in found.values()):
            raise ValueError(f"{key}={config[key]}: parameters per kind of layer are not supported, only one set for the whole model")
        if kind not in get_args(RopeKind):
            raise ValueError(f"{key}.rope_type={kind!r}: accepted are {', '.join(get_args(RopeKind))}")
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor={partial}: only 1.0 is supported")
        if kind == "default":
            return cls(theta=float(theta))

        required = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "yarn": ["factor"]}[kind]
        if absent := [name for name in required if found.get(name) is None]:
            raise ValueError(f"{key} with rope_type={kind!r} lacks {', '.join(absent)}")
        # transformers lets a top-level length win, then takes the scaling's own, then the model's.
        original = (
            config.get("original_max_position_embeddings")
            or found.get("original_max_position_embeddings")
            or config.get("max_position_embeddings")
        )
        known = {field.name for field in dataclasses.fields(cls)}
        options = {name: value for name, value in found.items() if name in known and value is not None}
        return cls(theta=float(theta), kind=kind, original_max_positions=original if kind != "linear" else None, **options)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a config.json in the layout of transformers 5."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        names = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        }[self.kind]
        parameters |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.original_max_positions is not None:
            parameters["original_max_position_embeddings"] = self.original_max_positions
        return parameters


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency of each pair of dimensions, and the factor for cos and sin.

    Computed on the host in float64 and rounded once: these are a few constants, and a device's float32 power is off by several ulp.

    Returns:
      inv_freq f32[H/2], attention_factor (1.0 for all kinds but `yarn`).
    """
    wavelength_exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-wavelength_exponent
    if rope.kind == "linear":
        frequencies = plain / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, plain)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, plain, head_dim)
    else:
        frequencies = plain
    return frequencies.astype(np.float32), _attention_factor(rope)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    original = rope.original_max_positions
    assert original is not None  # RopeConfig checks it
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    original = rope.original_max_positions
    assert original is not None  # RopeConfig checks it

    def dimension_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, to avoid 0 / 0
    stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1.0 - stretched + stretched / rope.factor)


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rope_cos_sin(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, in float32 (bfloat16 cannot tell position 257 from 256).

    Args:
      positions: i32[B, T].

    Returns:
      cos f32[B, T, H/2], sin f32[B, T, H/2], both times the attention factor.
    """
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates dimension pairs (i, i + H/2), as Hugging Face's checkpoints expect.

    Args:
      x: [B, T, N, H], queries or keys (K heads).
      cos, sin: f32[B, T, H/2] from `rope_cos_sin`.

    Returns:
      [B, T, N, H] in the dtype of x; the arithmetic is float32.
    """
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
