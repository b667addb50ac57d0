"""The demo model: greedy text with every head full is that of transformers, token for token."""

from pathlib import Path

import numpy as np
import pytest

from elastic_jax.elastic import ElasticModel
from elastic_jax.generate import Generator
from elastic_jax.weights import save_safetensors
from elastic_jax.weights.load import load_model
from tests.tiny_models import torch_logits

pytestmark = pytest.mark.assets

SUBJECTS = ["cat", "river", "clock", "garden", "train", "piano", "robot", "winter", "market", "dragon"]
NEW = 200


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Generator:
    return ElasticModel.from_pretrained(demo_model, dtype="float32")


def test_dense_greedy_text_is_that_of_transformers(demo_model: Path, model: Generator, tmp_path: Path) -> None:
    """With our reading of the weights, which tests/test_weights_real.py compares with theirs."""
    import torch
    from transformers import AutoModelForCausalLM

    chats = [[{"role": "user", "content": f"Write a short story about a {subject}."}] for subject in SUBJECTS]
    texts = [f"{number}. The {subject} was" for number, subject in enumerate(SUBJECTS)]
    prompts = chats + texts
    pieces: list[list[str]] = [[] for _ in prompts]
    result = model.generate(prompts, max_new_tokens=NEW, heads="full", stop=[], on_text=lambda index, text: pieces[index].append(text))
    assert result.timings.cache_pages == result.timings.dense_cache_mib * 2**20 / (2 * 128 * 64 * 4)

    torch.set_num_threads(2)  # JAX is idle now
    save_safetensors(load_model(demo_model, dtype="float32").decoder, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for (tokens, _), completion, streamed in zip(model.encode(prompts), result.completions, pieces, strict=True):
        # If each token is their best one after the tokens before it, their greedy decoding writes the same text.
        assert completion.new_tokens == NEW
        row = np.concatenate([tokens, completion.tokens])[None, :-1]
        logits = torch_logits(theirs, row)[0, tokens.size - 1 :]
        np.testing.assert_array_equal(logits.argmax(-1), completion.tokens)
        assert completion.text == "".join(streamed) == model.tokenizer.decode(completion.tokens, skip_special_tokens=True)
    assert len({completion.text for completion in result.completions}) == 20
