"""Where models and tokenizers are looked for, and tokenizers built from GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from elastic_jax.elastic import ElasticModel
from elastic_jax.models import preset
from elastic_jax.weights import load_model, load_stop_tokens, load_tokenizer


def _write_tokenizer(
    path: Path, *, pre: str = "smollm", model: str = "gpt2", add_bos: bool | None = None, skip: str = "", **changes: Any
) -> None:
    """Bytes, two merges, a control token, a user-defined one, and one that only pads the table. `changes` are keys of tokenizer.ggml."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "he", "hel", "<|end|>", "<tool>", "[PAD]"]
    kinds = [gguf.TokenType.NORMAL] * (len(letters) + 2) + [
        gguf.TokenType.CONTROL,
        gguf.TokenType.USER_DEFINED,
        gguf.TokenType.UNUSED,
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_key_value("tokenizer.ggml.pre", pre, gguf.GGUFValueType.get_type(pre))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if skip != "merges":
        writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(tokens.index("<|end|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}")
    for key, value in changes.items():
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        if value is not None:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "hel 12\n\n5", ["hel", "Ġ", "1", "2", "Ċ", "Ċ", "5"]),
        ("qwen2", "hel 12\n\n5", ["hel", "Ġ", "1", "2", "Ċ", "Ċ", "5"]),
        ("llama-bpe", "hello", ["hel", "l", "o"]),
        ("qwen2", "hel<|end|>he<tool>he", ["hel", "<|end|>", "he", "<tool>", "he"]),
    ],
)
def test_tokenizer_from_gguf(pre: str, text: str, pieces: list[str], path: Path) -> None:
    _write_tokenizer(path, pre=pre)
    tokenizer = load_tokenizer(path)
    assert tokenizer.tokenize(text) == pieces
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|end|>", None)
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he<|end|>"


def test_padding_entries_are_no_tokens(path: Path) -> None:
    _write_tokenizer(path)
    tokenizer = load_tokenizer(path)
    assert "[PAD]" not in tokenizer.get_vocab()
    assert "<tool>" not in tokenizer.all_special_tokens
    assert tokenizer.decode(tokenizer("he<tool><|end|>")["input_ids"], skip_special_tokens=True) == "he<tool>"


@pytest.mark.parametrize(
    ("pre", "add_bos", "starts"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)]
)
def test_beginning_of_text(pre: str, add_bos: bool | None, starts: bool, path: Path) -> None:
    _write_tokenizer(path, pre=pre, add_bos=add_bos)
    tokenizer = load_tokenizer(path)
    assert (tokenizer("he")["input_ids"][0] == tokenizer.bos_token_id) == starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "gemma"}, "tokenizer.ggml.pre='gemma': accepted are smollm, qwen2, llama-bpe"),
        ({"model": "llama"}, "tokenizer.ggml.model='llama': only 'gpt2'"),
        ({"skip": "merges"}, "no usable tokenizer: tokenizer.ggml.merges missing"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokenizer.ggml.tokens holds 'a' twice"),
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens=\[1, 2\]: a list of str"),
        ({"merges": "h e"}, "tokenizer.ggml.merges='h e': a list of str"),
        ({"merges": ["h e", "he he"]}, "tokenizer.ggml.merges holds 'he he': two tokens whose"),
        ({"merges": ["he"]}, "tokenizer.ggml.merges holds 'he '"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries: one for each of 261 tokens"),
        ({"pre": ["smollm"]}, r"tokenizer.ggml.pre=\['smollm'\]: accepted are"),
        *(({"eos_token_id": value}, f"tokenizer.ggml.eos_token_id={value!r}: a whole number from 0 to 260") for value in ("2", 261, -1)),
        ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token='yes': a bool"),
    ],
)
def test_other_tokenizers_are_refused(options: dict[str, Any], message: str, path: Path) -> None:
    _write_tokenizer(path, **options)
    with pytest.raises(ValueError, match=rf"^{path}: .*{message}"):
        load_tokenizer(path)


def test_tokenizer_from_a_folder(path: Path, tmp_path: Path) -> None:
    _write_tokenizer(path)
    tokenizer = load_tokenizer(path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError, match="holds no tokenizer: neither tokenizer.json nor tokenizer_config.json"):
        load_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    again = load_tokenizer(folder)
    text = "hel 12<|end|> he"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    for name, damaged, message in (
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a JSON list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "{}", "folder: the tokenizer cannot be read from"),
    ):
        kept = (folder / name).read_text()
        (folder / name).write_text(damaged)
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(folder)
        assert "\n" not in str(caught.value)
        (folder / name).write_text(kept)


@pytest.mark.parametrize(
    ("found", "refused"), [("[1, 96]", False), ("null", False), *((text, True) for text in ("-1", "97", "true", '"2"', "2.0"))]
)
def test_stop_tokens_are_the_models(found: str, refused: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.replace(preset("smollm2_135m"), vocab_size=97).to_hf()))
    file = tmp_path / "generation_config.json"
    file.write_text(f'{{"eos_token_id": {found}}}')
    if not refused:
        assert load_stop_tokens(tmp_path) == (json.loads(found) or [])
    else:
        with pytest.raises(ValueError, match=rf"^{file}: eos_token_id={json.loads(found)!r}: a whole number from 0 to 96"):
            load_stop_tokens(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": None}, "source=None: a model folder"),
        ({"sparsity": 5}, "sparsity=5: a SparsityConfig or None"),
        *(({"dtype": dtype}, f"dtype={dtype!r}: accepted are None, float32, bfloat16, float16") for dtype in ("x", "int8", "float64", 3)),
    ],
)
def test_arguments_of_a_generator_are_checked(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticModel.from_pretrained(**{"source": tmp_path, **arguments})


def test_places_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json and no \*\.gguf"):
        load_model(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"2 \*\.gguf files \(a\.gguf, b\.gguf\): name one"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"a single file must be a \*\.gguf"):
        load_model(tmp_path / "model.safetensors")
    for absent in (tmp_path / "nowhere", "folder/model.gguf"):
        with pytest.raises(FileNotFoundError, match="does not exist: give a model folder"):
            load_model(absent)


def test_unreachable_hub_says_what_to_give_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match="'nobody/nothing' is not a local path and could not be had") as caught:
            load("nobody/nothing")
        assert "give the path of a folder with config.json and safetensors, or of a *.gguf file" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_hub_repository_loads_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny_models import torch_model

    torch_model("llama").save_pretrained(tmp_path)
    asked = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_model("somebody/something", revision="v1").config.family == "llama"
    assert (asked["repository"], asked["revision"]) == ("somebody/something", "v1")
    assert asked["allow_patterns"] == ["*.json", "*.safetensors"]
