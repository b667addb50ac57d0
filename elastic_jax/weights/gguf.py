"""Models in GGUF files: configuration and weights of llama, qwen2 and qwen3 architectures."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from elastic_jax.checks import MAX_INT32, check_number, errors_name
from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.models.rope import RopeConfig, rope_frequencies
from elastic_jax.weights.gguf_file import GgufFile
from elastic_jax.weights.names import assemble

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LLAMA3_FACTORS = "rope_freqs.weight"


def load_gguf(source: str | Path | GgufFile, *, dtype: jax.typing.DTypeLike) -> Decoder:
    """Loads the weights of a GGUF file, dequantized.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is damaged, its model is not supported, or its tensors are not those of the model.
    """
    file = source if isinstance(source, GgufFile) else GgufFile(source)
    config = gguf_config(file)
    interleaved = file.metadata["general.architecture"] == "llama"

    def read(name: str) -> np.ndarray:
        tensor = file.read(name)
        kind = name.split(".")[-2]
        if interleaved and kind in ("attn_q", "attn_k"):
            return _split_rotation_pairs(tensor, config.num_heads if kind == "attn_q" else config.num_kv_heads)
        return tensor

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return assemble(config, naming="gguf", shapes=shapes, read=read, dtype=dtype, source=str(file.path), ignored=[r"rope_freqs\.weight"])


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model's configuration from a GGUF file's metadata (and from which tensors there are).

    Raises:
      ValueError: a key is missing, or asks for something this decoder does not do.
    """
    with errors_name(file.path):
        return _config(file)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"general.architecture={architecture!r}: accepted are {', '.join(_ARCHITECTURES)}")

    def find(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def size(key: str, default: int | None = None) -> int:
        check_number(f"{architecture}.{key}", find(key, default), 1, MAX_INT32, whole=True)
        return find(key, default)

    required = (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    )
    absent = [f"{architecture}.{key}" for key in required if find(key) is None]
    absent += [name for name in ("token_embd.weight",) if name not in file.tensors]
    if absent:
        raise ValueError(f"it lacks {', '.join(absent)}")
    num_heads, hidden_size = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // num_heads)
    for key, only in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), ("expert_count", 0)):
        if find(key, only) != only:
            raise ValueError(f"{architecture}.{key}={reprlib.repr(find(key))}: only {only} is supported here")

    with errors_name(f"{architecture}.rope"):
        rope = _rope(find, size)
    if _LLAMA3_FACTORS in file.tensors:
        rope = _llama3_rope(file, rope, head_dim)
    return ModelConfig(
        family="qwen3" if architecture == "qwen3" else "llama",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        mlp_size=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=find("attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_positions=size("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture == "qwen3",
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _rope(find: Callable[..., Any], size: Callable[..., int]) -> RopeConfig:
    theta = find("rope.freq_base", 10_000.0)
    factor = find("rope.scaling.factor", find("rope.scale_linear", 0.0)) or 1.0  # llama.cpp reads 0 as none
    kind = find("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise ValueError(f"scaling.type={kind!r}: accepted are none, linear, yarn")
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        if find(f"rope.scaling.{key}") is not None:
            raise ValueError(f"scaling.{key} is set: only YaRN with its default magnitude is supported")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=size("rope.scaling.original_context_length", size("context_length")),
        beta_fast=find("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=find("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(file: GgufFile, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """Llama 3's scaling is not in the metadata: the file holds what each frequency is divided by. Finds the parameters that give that."""
    divisors = file.read(_LLAMA3_FACTORS)
    rope = dataclasses.replace(plain, kind="llama3", factor=float(divisors.max()), original_max_positions=8192)
    expected = rope_frequencies(plain, head_dim)[0] / rope_frequencies(rope, head_dim)[0]
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{_LLAMA3_FACTORS} is not Llama 3's scaling with low_freq_factor=1, high_freq_factor=4 and 8192 original "
            f"positions: no other is supported"
        )
    return rope


def _split_rotation_pairs(tensor: np.ndarray, heads: int) -> np.ndarray:
    """[heads * H, ...], pairs that rotate together side by side (llama architecture) -> the same with pairs H/2 apart (Hugging Face)."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
