"""The shape of a decoder, read from a Hugging Face config.json or taken from a preset."""

from __future__ import annotations

import dataclasses
import reprlib
from pathlib import Path
from typing import Any, Literal, get_args

from elastic_jax.checks import MAX_INT32, check_number, errors_name, read_json
from elastic_jax.models.rope import RopeConfig

Family = Literal["qwen3", "llama"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder. Both families are pre-norm transformers with RoPE, grouped-query attention and a gated SiLU MLP.

    Attributes:
      family: `qwen3` or `llama` (Qwen2 is a llama with `attention_bias`).
      mlp_size: width F of the MLP.
      max_positions: longest sequence the checkpoint claims.
      tie_embeddings: the output head is the input embedding.
      qk_norm: RMSNorm over the head dimension of queries and keys, before RoPE (Qwen3).
      attention_bias: biases on the query, key and value projections, none on the output projection (Qwen2).
    """

    family: Family
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    qk_norm: bool
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise ValueError(f"family={self.family!r}: accepted are {', '.join(get_args(Family))}")
        for name in ("vocab_size", "hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
            check_number(name, getattr(self, name), 1, MAX_INT32, whole=True)
        check_number("rms_norm_eps", self.rms_norm_eps, 1e-12, 0.1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: it must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: RoPE needs an even one")

    @classmethod
    def from_hf(cls, source: dict[str, Any] | str | Path) -> ModelConfig:
        """Reads a raw Hugging Face config.json, of transformers 5 or older.

        Args:
          source: the parsed file, its path, or the path of the folder that holds it.

        Raises:
          ValueError: a key is missing, or asks for something this decoder does not do.
          FileNotFoundError: no such file.
        """
        if not isinstance(source, dict):
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            raw = read_json(path)
            with errors_name(path):
                return cls.from_hf(raw)
        raw = source
        model_type = raw.get("model_type")
        if model_type not in ("qwen3", "llama", "qwen2"):
            raise ValueError(f"model_type={model_type!r}: accepted are 'qwen3', 'llama', 'qwen2'")
        _refuse_unsupported(raw)
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        if absent := [key for key in required if raw.get(key) is None]:
            raise ValueError(f"the model's config lacks {', '.join(absent)}")

        for key in (*required, "num_key_value_heads", "head_dim"):
            if raw.get(key) is not None:
                check_number(key, raw[key], 1, MAX_INT32, whole=True)
        if not isinstance(raw.get("tie_word_embeddings", False), bool | None):
            raise ValueError(f"tie_word_embeddings={raw['tie_word_embeddings']!r}: accepted are true and false")

        num_heads = raw["num_attention_heads"]
        # Where a key is absent, transformers' own default for that model type holds.
        head_dim = raw.get("head_dim") or (128 if model_type == "qwen3" else raw["hidden_size"] // num_heads)
        return cls(
            family="qwen3" if model_type == "qwen3" else "llama",
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            mlp_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-6 if raw.get("rms_norm_eps") is None else raw["rms_norm_eps"],
            rope=RopeConfig.from_hf(raw),
            max_positions=raw["max_position_embeddings"],
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            attention_bias=model_type == "qwen2",
        )

    @property
    def original_positions(self) -> int:
        """Positions that the model has without scaling of its RoPE."""
        return self.rope.original_max_positions or self.max_positions

    def yarn_factor_for(self, tokens: int) -> int:
        """The least whole factor with which `with_yarn` makes room for so many tokens."""
        return -(-tokens // self.original_positions)

    def with_yarn(self, factor: float) -> ModelConfig:
        """The same model with its positions stretched `factor` times by YaRN, in place of whatever scaling it had.

        Raises:
          ValueError: `factor` is below 1, or not a number, or asks for more positions than int32 counts.
        """
        original = self.original_positions
        check_number("yarn_factor", factor, 1, MAX_INT32 // original)
        rope = RopeConfig(theta=self.rope.theta, kind="yarn", factor=factor, original_max_positions=original)
        return dataclasses.replace(self, rope=rope, max_positions=int(original * factor))

    def to_hf(self) -> dict[str, Any]:
        """The config.json of transformers 5 that describes this model.

        Raises:
          ValueError: no model type of transformers has this combination of norms and biases.
        """
        if self.qk_norm != (self.family == "qwen3") or (self.qk_norm and self.attention_bias):
            raise ValueError(
                f"family={self.family!r} with qk_norm={self.qk_norm} and attention_bias={self.attention_bias}: "
                f"no Hugging Face model type describes it"
            )
        model_type = "qwen2" if self.attention_bias else self.family
        return {
            "architectures": [f"{model_type.capitalize()}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_hf(),
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
        }


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raises for a config that would load and then compute something else than the model it describes."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r}: only 'silu' is supported")
    # Llama and Qwen3 put a bias on the output projection too where this is set; no released checkpoint of either does.
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ValueError(f"{key}={raw[key]}: only false is supported")
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ValueError(f"layer_types={reprlib.repr(kinds)}: only a list of 'full_attention' is supported")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is set: only unquantized safetensors are supported (quantized weights: as GGUF)")


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        max_positions=40_960,
        tie_embeddings=tied,
        qk_norm=True,
    )


def _llama3(hidden: int, mlp: int, layers: int, heads: int, head_dim: int, factor: float, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=factor, original_max_positions=8192),
        max_positions=131_072,
        tie_embeddings=tied,
        qk_norm=False,
    )


def _smollm2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, theta: float) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        max_positions=8192,
        tie_embeddings=True,
        qk_norm=False,
    )


# The values of each model's published config.json.
PRESETS: dict[str, ModelConfig] = {
    "qwen3_0_6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3_1_7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3_4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3_8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3_14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3_32b": _qwen3(5120, 25_600, 64, 64, tied=False),
    "llama3_1_8b": _llama3(4096, 14_336, 32, 32, 128, 8.0, tied=False),
    "llama3_2_1b": _llama3(2048, 8192, 16, 32, 64, 32.0, tied=True),
    "llama3_2_3b": _llama3(3072, 8192, 28, 24, 128, 32.0, tied=True),
    "smollm2_135m": _smollm2(576, 1536, 30, 9, 3, 100_000.0),
    "smollm2_360m": _smollm2(960, 2560, 32, 15, 5, 100_000.0),
    "smollm2_1_7b": _smollm2(2048, 8192, 24, 32, 32, 130_000.0),
}


def preset(name: str) -> ModelConfig:
    """A published model's configuration by name.

    Raises:
      ValueError: no preset has that name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: accepted are {', '.join(PRESETS)}")
    return PRESETS[name]
