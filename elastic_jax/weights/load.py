"""Models and tokenizers by where they are: a folder, a GGUF file, or a repository of the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from elastic_jax.checks import check_number, read_json
from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.weights.gguf import load_gguf
from elastic_jax.weights.gguf_file import GgufFile
from elastic_jax.weights.safetensors import load_safetensors
from elastic_jax.weights.tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A decoder with the configuration it was built from."""

    config: ModelConfig
    decoder: Decoder


def load_model(source: str | Path, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, revision: str | None = None) -> LoadedModel:
    """Loads a pretrained model.

    Args:
      source: a folder with config.json and safetensors, a folder with one *.gguf, a *.gguf file, or a hub id `organisation/name`.
      dtype: of the parameters, and so of the activations.
      revision: branch, tag or commit of a hub repository.

    Raises:
      FileNotFoundError: nothing usable there, or the hub cannot be reached.
      ValueError: a damaged file, an unsupported model, or tensors that do not fit the configuration.
    """
    path = _locate(source, ["*.json", "*.safetensors"], revision)
    decoder = load_gguf(path, dtype=dtype) if path.suffix == ".gguf" else load_safetensors(path, dtype=dtype)
    return LoadedModel(config=decoder.config, decoder=decoder)


def load_tokenizer(source: str | Path, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to a model, from the same sources as `load_model`.

    Raises:
      FileNotFoundError: nothing usable there, or the hub cannot be reached.
      ValueError: a damaged file, or a tokenizer in a GGUF file that is not supported.
    """
    path = _locate(source, _TOKENIZER_FILES, revision)
    if path.suffix == ".gguf":
        return gguf_tokenizer(GgufFile(path))
    if not (path / "tokenizer.json").exists() and not (path / "tokenizer_config.json").exists():
        raise FileNotFoundError(f"{path} holds no tokenizer: neither tokenizer.json nor tokenizer_config.json is there")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (path / name).exists():
            read_json(path / name)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the libraries answer damage with whatever fails first, the Rust one with a bare Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: the tokenizer cannot be read from its tokenizer.json and tokenizer_config.json ({reason})") from error


def load_stop_tokens(source: str | Path, *, revision: str | None = None) -> list[int]:
    """The tokens that end a text by the model's generation_config.json; none where there is no such file.

    Raises:
      FileNotFoundError: nothing usable there, or the hub cannot be reached.
      ValueError: the file is damaged, or names a token that the model does not have.
    """
    folder = _locate(source, _TOKENIZER_FILES, revision)
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    found = read_json(path).get("eos_token_id")
    if found is None:
        return []
    tokens, last = found if isinstance(found, list) else [found], ModelConfig.from_hf(folder).vocab_size - 1
    for token in tokens:
        check_number(f"{path}: eos_token_id", token, 0, last, whole=True)
    return tokens


def _locate(source: str | Path, patterns: list[str], revision: str | None) -> Path:
    """A *.gguf file, or the folder that holds safetensors."""
    path = Path(source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: a single file must be a *.gguf; for safetensors give the folder, which holds config.json too")
        return path
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            listed = f" but {len(found)} *.gguf files ({', '.join(file.name for file in found)}): name one" if found else " and no *.gguf"
            raise FileNotFoundError(f"{path} holds no config.json{listed}")
        return found[0]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or path.suffix == ".gguf":
        raise FileNotFoundError(f"{source} does not exist: give a model folder, a *.gguf file, or a hub id organisation/name")
    return _download(str(source), patterns, revision)


def _download(repository: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # "original/" holds the same weights once more in Meta's own layout.
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=["original/*"]))
    except Exception as error:  # the hub's, the HTTP client's and the system's errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"{repository!r} is not a local path and could not be had from the Hugging Face hub ({reason}): give the path of a folder "
            f"with config.json and safetensors, or of a *.gguf file, instead"
        ) from error
