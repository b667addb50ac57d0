"""ModelConfig from config.json of either layout, presets, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from elastic_jax.models import PRESETS, Decoder, ModelConfig, RopeConfig, preset

# As published in the model's repository (transformers 4).
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def test_published_configs_are_the_presets() -> None:
    assert ModelConfig.from_hf(QWEN3_0_6B) == preset("qwen3_0_6b")
    assert ModelConfig.from_hf(LLAMA3_2_1B) == preset("llama3_2_1b")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # What the repositories of the untied models state, and what the tied ones come to without their head.
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_2_3b", 3_212_749_824),
        ("smollm2_135m", 134_515_008),
        ("smollm2_360m", 361_821_120),
        ("smollm2_1_7b", 1_711_376_384),
    ],
)
def test_presets_have_the_published_size(name: str, parameters: int) -> None:
    decoder = nnx.eval_shape(lambda: Decoder(preset(name), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(decoder))) == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_written_config_reads_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset(name).to_hf()))
    assert ModelConfig.from_hf(tmp_path) == preset(name)
    assert ModelConfig.from_hf(tmp_path / "config.json") == preset(name)


def test_qwen2_is_a_llama_with_biases() -> None:
    raw = {**QWEN3_0_6B, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
    del raw["head_dim"]
    config = ModelConfig.from_hf(raw)
    assert (config.family, config.attention_bias, config.qk_norm, config.head_dim) == ("llama", True, False, 64)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    raw = {key: LLAMA3_2_1B[key] for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")}
    config = ModelConfig.from_hf({**raw, "num_attention_heads": 32, "num_hidden_layers": 2})
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.tie_embeddings) == (32, 64, 1e-6, False)
    assert config.rope == RopeConfig(theta=1e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3': accepted are 'qwen3', 'llama', 'qwen2'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True: only false"),
        ({"mlp_bias": True}, "mlp_bias=True: only false"),
        ({"use_sliding_window": True}, "use_sliding_window=True: only false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*'sliding_attention'.*: only a list of 'full_attention'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope': accepted are"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "num_heads=16: it must be a multiple of num_kv_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"layer_types": [1]}, r"layer_types=\[1\]: only a list of 'full_attention'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5: a whole number from 1 to 2147483647"),
        *(({"rms_norm_eps": value}, "rms_norm_eps=.*: a number from 1e-12 to 0.1") for value in (math.nan, 0, -1e-6, 1, "1e-6")),
    ],
)
def test_unsupported_configs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**QWEN3_0_6B, **change})


def test_damaged_config_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_hf(tmp_path)
    wrong = json.dumps({**QWEN3_0_6B, "rope_theta": math.nan})
    for text, message in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a JSON list"), (wrong, "rope_theta=nan: ")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*{message}") as caught:
            ModelConfig.from_hf(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e300, 0.5, 1e5, "4", True])
def test_yarn_factor_is_checked(factor: object) -> None:
    with pytest.raises(ValueError, match="yarn_factor=.*: a number from 1 to 52428 is needed"):
        preset("qwen3_8b").with_yarn(factor)


def test_unknown_preset_and_family_are_refused() -> None:
    with pytest.raises(ValueError, match="preset 'qwen': accepted are qwen3_0_6b, "):
        preset("qwen")
    with pytest.raises(ValueError, match="family='gemma'"):
        dataclasses.replace(preset("qwen3_8b"), family="gemma")
