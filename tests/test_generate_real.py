"""The demo model: greedy text with every head full is that of transformers, token for token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_jax import assets
from elastic_jax.elastic import ElasticModel
from elastic_jax.generate import Generator
from tests.tiny_models import torch_logits

pytestmark = pytest.mark.assets

SUBJECTS = ["cat", "river", "clock", "garden", "train", "piano", "robot", "winter", "market", "dragon"]
NEW = 200


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return assets.require("smollm2_135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(path: Path) -> Generator:
    return ElasticModel.from_pretrained(path, dtype="float32")


def test_dense_greedy_text_is_that_of_transformers(model: Generator, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    chats = [[{"role": "user", "content": f"Write a short story about a {subject}."}] for subject in SUBJECTS]
    texts = [f"{number}. The {subject} was" for number, subject in enumerate(SUBJECTS)]
    prompts = chats + texts
    result = model.generate(prompts, max_new_tokens=NEW, heads="full", stop=[])
    assert result.timings.cache_pages == result.timings.dense_cache_mib * 2**20 / (2 * 128 * 64 * 4)

    torch.set_num_threads(2)  # JAX is idle now
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for (tokens, _), completion in zip(model.encode(prompts), result.completions, strict=True):
        # If each token is their best one after the tokens before it, their greedy decoding writes the same text.
        assert completion.new_tokens == NEW
        row = np.concatenate([tokens, completion.tokens])[None, :-1]
        logits = torch_logits(theirs, row)[0, tokens.size - 1 :]
        np.testing.assert_array_equal(logits.argmax(-1), completion.tokens)
    assert len({completion.text for completion in result.completions}) == 20


def test_a_chat_ends_by_itself_and_streams_its_text(model: Generator) -> None:
    pieces: list[Any] = []
    result = model.generate(
        [[{"role": "user", "content": "Say the word cat in French, Japanese and with an emoji."}]],
        max_new_tokens=60,
        heads="full",
        on_text=lambda index, text: pieces.append((index, text)),
    )
    (completion,) = result.completions
    assert "".join(text for _, text in pieces) == completion.text
    assert len(pieces) > 1
    assert completion.text == model.tokenizer.decode(completion.tokens, skip_special_tokens=True)
    if completion.finish_reason == "stop":
        assert model.tokenizer.decode(completion.tokens[-1:]) == "<|im_end|>"
