"""RoPE against transformers' own functions, and the properties a rotation must have."""

from __future__ import annotations

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.models.rope import RopeConfig, apply_rope, rope_cos_sin, rope_frequencies


def _theirs(parameters: dict, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=max_positions)
    functions = {"default": Qwen3RotaryEmbedding.compute_default_rope_parameters} | ROPE_INIT_FUNCTIONS
    frequencies, factor = functions[parameters["rope_type"]](config)
    return frequencies.numpy(), factor


_maybe = lambda low, high: st.none() | st.floats(low, high)


@st.composite
def _parameters(draw: st.DrawFn) -> dict:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    parameters = {"rope_type": kind, "rope_theta": draw(st.sampled_from([500.0, 1e4, 5e5, 1e6]))}
    if kind != "default":
        parameters["factor"] = draw(st.floats(1.0, 64.0))
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([64, 4096, 8192, 32768]))
    if kind == "llama3":
        parameters["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        parameters["high_freq_factor"] = draw(st.floats(3.0, 8.0))
    if kind == "yarn":
        options = {
            "beta_fast": draw(_maybe(16.0, 64.0)),
            "beta_slow": draw(_maybe(0.5, 2.0)),
            "attention_factor": draw(_maybe(0.5, 2.0)),
            "mscale": draw(_maybe(0.5, 2.0)),
            "mscale_all_dim": draw(_maybe(0.5, 2.0)),
            "truncate": draw(st.booleans()),
        }
        parameters |= {key: value for key, value in options.items() if value is not None}
    return parameters


@settings(max_examples=100, deadline=None)
@given(parameters=_parameters(), head_dim=st.sampled_from([16, 64, 128]))
def test_frequencies_are_those_of_transformers(parameters: dict, head_dim: int) -> None:
    max_positions = 1 << 17
    theirs, their_factor = _theirs(parameters, head_dim, max_positions)
    rope = RopeConfig.from_hf({"rope_parameters": parameters, "max_position_embeddings": max_positions})
    ours, our_factor = rope_frequencies(rope, head_dim)
    assert ours.dtype == np.float32
    tolerance = 2e-6
    if parameters["rope_type"] == "llama3":
        # They blend in float32: near the low end the weight (x - low) / (high - low) is a small difference, four roundings of x ~ low, and
        # it multiplies a frequency that is `factor` times the one that it is added to.
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        tolerance += 4 * 2.0**-24 * parameters["factor"] * low / (high - low)
    elif parameters["rope_type"] == "yarn":
        # The same where their weight 1 - ramp is small: the ramp beside 1 is rounded.
        tolerance += 4 * 2.0**-24 * parameters["factor"]
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    assert our_factor == pytest.approx(their_factor, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(parameters=_parameters())
def test_configuration_survives_writing_and_reading(parameters: dict) -> None:
    rope = RopeConfig.from_hf({"rope_parameters": parameters})
    assert RopeConfig.from_hf({"rope_parameters": rope.to_hf()}) == rope


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_old_layout(kind_key: str) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {kind_key: "linear", "factor": 2.0}}
    assert RopeConfig.from_hf(old) == RopeConfig(theta=5e5, kind="linear", factor=2.0)
    assert RopeConfig.from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(theta=1e6)
    assert RopeConfig.from_hf({}) == RopeConfig(theta=1e4)


def test_original_length_falls_back_to_the_models() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert RopeConfig.from_hf({"rope_scaling": scaling, "max_position_embeddings": 512}).original_max_positions == 512


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type='dynamic': accepted are default, linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings=None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: an object is needed"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor=0: only 1.0"),
        *(({"rope_theta": value}, "rope_theta=.*: a number from 2 to 1e") for value in (0, math.nan, math.inf, 10**400, [1], "abc", True)),
    ],
)
def test_unsupported_configurations_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((kind, "factor", value) for kind in ("linear", "llama3", "yarn") for value in (math.nan, math.inf, "4", 0, True)),
        ("llama3", "low_freq_factor", math.nan),
        ("llama3", "high_freq_factor", math.inf),
        *(("yarn", "attention_factor", value) for value in (math.nan, 0, "1")),
        *(("yarn", name, value) for name in ("beta_fast", "beta_slow") for value in (math.nan, 0, -1)),
        ("yarn", "beta_fast", 0.5),  # below beta_slow
        ("yarn", "mscale", math.nan),
        ("yarn", "truncate", "false"),
        *(("yarn", "original_max_position_embeddings", value) for value in ("64", 0, 64.5)),
    ],
)
def test_every_option_is_checked(kind: str, option: str, value: object) -> None:
    whole = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    RopeConfig.from_hf({"rope_parameters": whole})
    with pytest.raises(ValueError, match=f"^{option}={re.escape(repr(value))}: "):
        RopeConfig.from_hf({"rope_parameters": whole | {option: value}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ntk"}, "kind='ntk'"),
        ({"theta": 0.0}, "theta=0.0"),
        (
            {"kind": "llama3", "original_max_positions": 16, "low_freq_factor": 4.0},
            "low_freq_factor=4.0: it must be below high_freq_factor",
        ),
    ],
)
def test_configuration_is_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**{"theta": 1e4, **fields})


def test_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 64)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        rotated = [
            apply_rope(x, *rope_cos_sin(jnp.array([[position]]), RopeConfig(theta=1e4), 64))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(10, 3) == pytest.approx(score(1010, 1003), abs=1e-3)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)
    assert score(0, 0) == pytest.approx(float(jnp.sum(q * k)), abs=1e-5)


def test_neighbouring_positions_differ_in_bfloat16_models() -> None:
    cos, sin = rope_cos_sin(jnp.array([[4096, 4097]]), RopeConfig(theta=1e4), 64)
    assert cos.dtype == sin.dtype == jnp.float32
    rotated = apply_rope(jnp.ones((1, 2, 1, 64), jnp.bfloat16), cos, sin)
    assert rotated.dtype == jnp.bfloat16
    assert bool(jnp.any(rotated[:, 0] != rotated[:, 1]))
