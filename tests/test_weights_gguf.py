"""GGUF files written here from tiny transformers models, as llama.cpp writes them, and damaged ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.models import ModelConfig, RopeConfig
from elastic_jax.models.rope import rope_frequencies
from elastic_jax.weights import load_model
from elastic_jax.weights.gguf_file import GgufFile
from elastic_jax.weights.names import NAMES
from tests.tiny_models import jax_logits, random_tokens, torch_logits, torch_model


def _permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to a llama's queries and keys: row i + H/2 of a head follows its row i."""
    size = tensor.shape[0] // heads
    order = [head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in range(2)]
    return tensor[order]


def _write(model: Any, path: Path, edit: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> None:
    """Writes a transformers model; norms and biases stay float32, and so does everything else that no test quantizes."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    edit(writer)

    names = {}
    for name in NAMES.values():
        for layer in range(config.num_hidden_layers):
            names[name.hf.format(layer)] = name.gguf.format(layer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and projection in name:
                array = _permute(array, heads)
        writer.add_tensor(names[name], np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _scaling(kind: gguf.RopeScalingType) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    return edit


def _llama3_factors(writer: gguf.GGUFWriter) -> None:
    plain = RopeConfig(theta=500_000.0)
    scaled = dataclasses.replace(plain, kind="llama3", factor=4.0, original_max_positions=8192)
    writer.add_tensor("rope_freqs.weight", rope_frequencies(plain, 8)[0] / rope_frequencies(scaled, 8)[0])


@pytest.mark.parametrize(
    ("model_type", "rope", "tied", "edit"),
    [
        ("llama", "default", False, lambda _: None),
        ("llama", "linear", True, _scaling(gguf.RopeScalingType.LINEAR)),
        ("qwen2", "yarn", False, _scaling(gguf.RopeScalingType.YARN)),
        ("qwen3", "default", True, _scaling(gguf.RopeScalingType.NONE)),
    ],
)
def test_logits_are_those_of_transformers(model_type: str, rope: str, tied: bool, edit: Any, tmp_path: Path) -> None:
    theirs = torch_model(model_type, rope=rope, tied=tied)
    _write(theirs, tmp_path / "model.gguf", edit)
    ours = load_model(tmp_path, dtype=jnp.float32)
    expected_config = ModelConfig.from_hf(theirs.config.to_dict())
    # The file keeps float32 numbers.
    assert dataclasses.replace(ours.config, rms_norm_eps=1e-5) == expected_config
    tokens = random_tokens()
    np.testing.assert_allclose(jax_logits(ours.decoder, tokens), torch_logits(theirs, tokens), atol=3e-5)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model = torch_model("llama")
    model.config.rope_parameters["rope_theta"] = 500_000.0
    _write(model, tmp_path / "model.gguf", _llama3_factors)
    rope = load_model(tmp_path, dtype=jnp.float32).config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("llama3", 4.0, 8192)

    other = tmp_path / "other.gguf"
    _write(model, other, lambda writer: writer.add_tensor("rope_freqs.weight", np.array([1.0, 2.0, 3.0, 4.0], np.float32)))
    with pytest.raises(ValueError, match="rope_freqs.weight is not Llama 3's scaling"):
        load_model(other)


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    model = torch_model("qwen3", tied=True)
    embedding = model.state_dict().pop("model.embed_tokens.weight").numpy()
    quantized = gguf.quantize(embedding, gguf.GGMLQuantizationType.Q8_0)
    add_tensor = gguf.GGUFWriter.add_tensor

    def edit(writer: gguf.GGUFWriter) -> None:
        def add(name: str, tensor: np.ndarray) -> None:
            if name == "token_embd.weight":
                add_tensor(writer, name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            elif name.startswith("blk.0.ffn") and tensor.ndim == 2:
                add_tensor(writer, name, tensor.astype(np.float16))
            else:
                add_tensor(writer, name, tensor)

        writer.add_tensor = add

    _write(model, tmp_path / "model.gguf", edit)
    loaded = load_model(tmp_path, dtype=jnp.float32).decoder
    np.testing.assert_allclose(loaded.embedding[...], embedding, atol=np.abs(embedding).max() / 127)
    gate = model.state_dict()["model.layers.0.mlp.gate_proj.weight"].half().float().numpy()
    np.testing.assert_array_equal(loaded.layers.mlp.gate[...][0], gate)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    _write(torch_model("llama"), path, lambda writer: writer.add_token_list(["a", "b"]))
    return path.read_bytes()


def test_truncated_tensors_are_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match=rf"model.gguf is truncated: it has {len(whole) - 1000} bytes and its tensors need {len(whole)}"):
        load_model(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_header_is_a_value_error(data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut anywhere in the header, or with bytes of it overwritten, the file either still parses or says that it does not."""
    header = len(whole) - sum(tensor.stop - tensor.start for tensor in _parsed(whole, tmp_path_factory).tensors.values())
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, header - 1024)) :]
    else:
        for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=3)):
            damaged[at] = data.draw(st.integers(0, 255))
    try:
        _parsed(bytes(damaged), tmp_path_factory)
        outcome = "parsed"
    except ValueError as error:
        outcome = str(error)
    assert "model.gguf" in outcome or (outcome == "parsed" and len(damaged) == len(whole))


def _parsed(content: bytes, factory: pytest.TempPathFactory) -> GgufFile:
    path = factory.getbasetemp() / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGUF\x03\x00", "is truncated: its 6 bytes end inside the header"),
        (b"PK\x03\x04" + bytes(40), "starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1: accepted are 2 and 3"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def _heads_per_layer(writer: gguf.GGUFWriter) -> None:
    del writer.kv_data[0]["llama.attention.head_count_kv"]
    writer.add_head_count_kv([2, 2, 1])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda writer: writer.add_expert_count(8), "llama.expert_count=8: only 0"),
        (lambda writer: writer.add_rope_dimension_count(4), "llama.rope.dimension_count=4: only 8"),
        (_heads_per_layer, r"head_count_kv=\[2, 2, 1\]: a whole number from 1 to"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "llama.rope: scaling.type='longrope': accepted are"),
        (lambda writer: writer.add_uint16("split.count", 2), "is one of 2 parts"),
        (lambda writer: writer.add_string("split.count", "2"), "model.gguf: split.count='2': a whole number from 0"),
        (lambda writer: writer.add_tensor("blk.0.attn_output.bias", np.ones(32, np.float32)), "unexpected: blk.0.attn_output.bias"),
    ],
)
def test_unsupported_models_are_refused(edit: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(torch_model("llama"), path, edit)
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 0, "attention.head_count=0: a whole number from 1"),
        *(
            (key, value, f"{key}={value!r}: a whole number from 1")
            for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.key_length")
            for value in ("64", 64.0)
        ),
        *(("attention.layer_norm_rms_epsilon", value, "rms_norm_eps=") for value in (math.nan, 0.0, -1.0, 1.0, "1e-5")),
        *(("rope.freq_base", value, "llama.rope: rope_theta=") for value in (math.nan, math.inf, 0.0, "10000")),
        *(("rope.scaling.factor", value, "llama.rope: factor=") for value in (math.nan, math.inf, "4")),
        ("block_count", 1_000_000_000, "tensors: too few for the 1000000000 layers"),
    ],
)
def test_every_number_is_checked(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kind = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}[type(value)]
    _write(torch_model("llama"), path, lambda writer: writer.kv_data[0].update({f"llama.{key}": gguf.GGUFValue(value, kind)}))
    with pytest.raises(ValueError, match=f"^{path}.*{message}") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_other_architectures_and_absent_keys_are_refused(tmp_path: Path) -> None:
    for architecture, message in (("gemma3", "general.architecture='gemma3': accepted are llama"), ("llama", "lacks llama.block_count")):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / "model.gguf")
