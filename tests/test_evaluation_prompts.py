"""Samples in tokens: chat template, answer prefix, and the cutting of the user's text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.data.chat import ChatEncoder
from elastic_jax.evaluation.prompts import encode_sample
from elastic_jax.evaluation.samples import Sample
from elastic_jax.generate import EncodedPrompt
from tests.test_generate import LONG, TOKENIZER, generator

MODEL = generator()


def sample(**changes):
    options = {"id": "s", "task": "t", "group": "g", "prompt": LONG, "references": ("x",), "metric": "m", "max_new_tokens": 4}
    return Sample(**(options | changes))


def text_of(tokens):
    return TOKENIZER.decode(tokens)


def test_a_chat_with_system_message_and_answer_prefix():
    (tokens, user_turn), cut = encode_sample(MODEL, sample(system="Be brief.", answer_prefix=" So:"))
    expected = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{LONG}<|im_end|>\n"
    assert text_of(tokens) == f"{expected}<|im_start|>assistant\n So:"
    assert text_of(tokens[slice(*user_turn)]) == expected
    assert cut == 0


def test_text_that_is_continued():
    (tokens, user_turn), cut = encode_sample(MODEL, sample(chat=False, answer_prefix=" So:"))
    assert text_of(tokens) == f"{LONG} So:"
    assert text_of(tokens[slice(*user_turn)]) == LONG
    (tokens, user_turn), cut = encode_sample(MODEL, sample(chat=False, answer_prefix=" So:"), 54)
    assert text_of(tokens) == LONG[:25] + LONG[-25:] + " So:"
    assert (user_turn, cut) == ((0, 50), len(LONG) - 50)
    with pytest.raises(ValueError, match="'s' has a system message, but is no chat"):
        encode_sample(MODEL, sample(chat=False, system="x"))


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(min_size=1, max_size=60),
    system=st.none() | st.text(min_size=1, max_size=10),
    prefix=st.sampled_from(["", " So: \u00e9"]),
    limit=st.integers(1, 200),
)
def test_only_the_middle_of_the_users_text_is_cut(text, system, prefix, limit):
    one = sample(prompt=text, system=system, answer_prefix=prefix)
    (whole, (start, end)), none = encode_sample(MODEL, one)
    user = text.encode()
    assert none == 0
    if len(whole) > limit and len(whole) - limit >= len(user):
        with pytest.raises(ValueError, match="'s'.* of which at least one must stay"):
            encode_sample(MODEL, one, limit)
        return
    (tokens, user_turn), cut = encode_sample(MODEL, one, limit)
    assert len(tokens) == min(len(whole), limit)
    assert cut == len(whole) - len(tokens)
    assert user_turn == (start, end - cut)
    kept = len(user) - cut
    before = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    at = len(TOKENIZER(f"{before}<|im_start|>user\n")["input_ids"])
    first = -(-kept // 2)
    expected = [*whole[: at + first], *whole[at + len(user) - (kept - first) :]]
    np.testing.assert_array_equal(tokens, expected)


def test_the_models_positions_bound_a_prompt():
    (tokens, _), cut = encode_sample(MODEL, sample(prompt="a" * 1000, max_new_tokens=12))
    assert len(tokens) == 500
    assert cut == 1000 - 500 + len(TOKENIZER("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    MODEL.check_length([len(tokens)], 12)
    for wanted, left in ((500, 12), (512, 0), (100_000, 0)):
        reason = rf"cannot be cut to {left} \(the model's 512 positions less max_new_tokens={wanted}\), since only {len(LONG)} of them"
        with pytest.raises(ValueError, match=rf"sample 's': \d+ tokens {reason}"):
            encode_sample(MODEL, sample(max_new_tokens=wanted), 600)
    with pytest.raises(ValueError, match=r"cannot be cut to 9 \(max_prompt_tokens=9\)"):
        encode_sample(MODEL, sample(), 9)


def test_templates_that_trim_and_that_rewrite(monkeypatch):
    trimming = TOKENIZER.chat_template.replace("{{ m.content }}", "{{ m.content | trim }}")
    monkeypatch.setattr(TOKENIZER, "chat_template", trimming)
    encoder, text = ChatEncoder(TOKENIZER), [{"role": "user", "content": "\n abc \n"}]
    start, end = encoder.text_range(text)
    assert text_of(encoder.encode_prompt(text)[0][start:end]) == "abc"
    monkeypatch.setattr(TOKENIZER, "chat_template", TOKENIZER.chat_template.replace("m.content", "m.content | upper"))
    with pytest.raises(ValueError, match="changes the text of a message"):
        ChatEncoder(TOKENIZER).text_range(text)


def test_hashes_tell_prompts_apart():
    variants = [{}, {"prompt": LONG + " "}, {"system": "x"}, {"answer_prefix": "x"}, {"chat": False}]
    hashes = {encode_sample(MODEL, sample(**changes)).hash for changes in variants} | {encode_sample(MODEL, sample(), 100).hash}
    assert len(hashes) == 6
    assert encode_sample(MODEL, sample(id="other", references=())).hash == encode_sample(MODEL, sample()).hash


def test_encoded_prompts_are_generated_as_the_chats_they_came_from():
    chat = [{"role": "user", "content": LONG}]
    encoded = MODEL.encode([chat])
    one, other = MODEL.generate([chat, encoded[0]], max_new_tokens=8, seeds=[1, 1]).completions
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.is_full, other.is_full)
    for user_turn in ((3, 3), (-1, 4), (0, 10_000)):
        with pytest.raises(ValueError, match=r"prompts\[0\] has user_turn=.*a range within its"):
            MODEL.generate([EncodedPrompt(encoded[0].tokens, user_turn)], max_new_tokens=1)
    with pytest.raises(ValueError, match="has tokens from 259 to 259"):
        MODEL.generate([EncodedPrompt(np.array([259], np.int32), (0, 1))], max_new_tokens=1)
