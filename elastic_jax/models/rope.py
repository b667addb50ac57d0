"""Rotary position embedding: the frequencies of each scaling kind that the supported families use, and the rotation."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.checks import MAX_INT32, check_number

RopeKind = Literal["default", "linear", "llama3", "yarn"]
# The options of each kind, which a config.json calls as `RopeConfig` does.
_OPTIONS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


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
        check_number("rope_theta", self.theta, 2, 1e12)
        check_number("factor", self.factor, 1, 1e6)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name), 1e-3, 1e6)
        for name, low in (("attention_factor", 1e-3), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), low, 1e3)
        if self.original_max_positions is not None or self.kind in ("llama3", "yarn"):
            check_number("original_max_position_embeddings", self.original_max_positions, 1, MAX_INT32, whole=True)
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor}: it must be below high_freq_factor={self.high_freq_factor}")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast}: it must not be below beta_slow={self.beta_slow}")
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate={self.truncate!r}: accepted are true and false")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Reads a Hugging Face config.json: `rope_theta` with `rope_scaling`, or `rope_parameters` (transformers 5).

        Raises:
          ValueError: a RoPE type, a partial rotation or per-layer parameters that are not supported; a parameter is missing or out of
            its range.
        """
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(config.get(key), dict | None):
                raise ValueError(f"{key}={reprlib.repr(config[key])}: an object is needed")
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        found: dict[str, Any] = config.get(key) or {}
        kind = _first(found.get("rope_type"), found.get("type"), "default")
        theta = _first(found.get("rope_theta"), config.get("rope_theta"), 10_000.0)
        partial = _first(found.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
        if any(isinstance(value, dict) for value in found.values()):
            raise ValueError(f"{key}={config[key]}: parameters per kind of layer are not supported, only one set for the whole model")
        if kind not in get_args(RopeKind):
            raise ValueError(f"{key}.rope_type={kind!r}: accepted are {', '.join(get_args(RopeKind))}")
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor={partial!r}: only 1.0 is supported")
        if kind == "default":
            return cls(theta=theta)

        required = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "yarn": ["factor"]}[kind]
        if absent := [name for name in required if found.get(name) is None]:
            raise ValueError(f"{key} with rope_type={kind!r} lacks {', '.join(absent)}")
        # transformers lets a top-level length win, then takes the scaling's own, then the model's.
        original = _first(
            config.get("original_max_position_embeddings"),
            found.get("original_max_position_embeddings"),
            config.get("max_position_embeddings"),
        )
        options = {name: found[name] for name in _OPTIONS[kind] if found.get(name) is not None}
        return cls(theta=theta, kind=kind, original_max_positions=original if kind != "linear" else None, **options)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a config.json in the layout of transformers 5."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        parameters |= {name: getattr(self, name) for name in _OPTIONS[self.kind] if getattr(self, name) is not None}
        if self.original_max_positions is not None:
            parameters["original_max_position_embeddings"] = self.original_max_positions
        return parameters


def _first(*values: Any) -> Any:
    """The first that is not None: a key that is null counts as absent, one that is 0 does not."""
    return next((value for value in values if value is not None), None)


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
