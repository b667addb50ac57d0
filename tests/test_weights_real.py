"""The demo model: our logits and text are those of transformers' own reading of the same GGUF file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.models import preset
from elastic_jax.weights import LoadedModel, load_model, load_tokenizer
from tests.tiny_models import jax_logits, torch_logits

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def ours(demo_model: Path) -> LoadedModel:
    return load_model(demo_model, dtype=jnp.float32)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return load_tokenizer(demo_model)


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # as in tests.tiny_models
    return AutoModelForCausalLM.from_pretrained(demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32).eval()


def test_configuration_is_the_preset(ours: LoadedModel) -> None:
    # GGUF keeps the epsilon as a float32.
    assert dataclasses.replace(ours.config, rms_norm_eps=1e-5) == preset("smollm2_135m")


def test_logits_and_greedy_text_are_those_of_transformers(ours: LoadedModel, theirs: Any, tokenizer: Any) -> None:
    import torch

    messages = [{"role": "user", "content": "Write one sentence about each of the 4 seasons, starting with the year 2024."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    new = 24
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False)[0].numpy()

    # Teacher forcing: if each token is our best one after the tokens before it, greedy decoding writes the same text.
    row = expected[None].astype(np.int32)
    logits = jax_logits(ours.decoder, row)
    np.testing.assert_array_equal(np.argmax(logits[0, len(prompt) - 1 : -1], axis=-1), expected[len(prompt) :])
    # Logits reach 40. Measured over 1,024 tokens: 1.1e-4 between the two, and each within 1.2e-4 of transformers in float64.
    np.testing.assert_allclose(logits, torch_logits(theirs, row), atol=3e-4)
    assert len(tokenizer.decode(expected[len(prompt) :], skip_special_tokens=True).split()) >= 12


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("\n\n5 apples", ["ĊĊ", "5", "Ġapples"]),
        ("In 2024,", ["In", "Ġ", "2", "0", "2", "4", ","]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_tokenizer_splits_digits(text: str, pieces: list[str], tokenizer: Any) -> None:
    assert tokenizer.tokenize(text) == pieces


def test_tokenizer_keeps_any_text(tokenizer: Any) -> None:
    text = "def f(x):\n\treturn x ** 2  # naïve – 日本語 🙂\r\n\n   12.5e-3 <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_has_chat_format_and_special_tokens(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 2, 0)
    assert len(tokenizer) == 49_152
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).startswith("system\nBe brief.")
