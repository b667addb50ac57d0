"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


def decode_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text of tokens, special ones left out."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TextStream:
    """Decodes a sequence's tokens piece by piece; the pieces joined are the text of all tokens.

    A character that is spread over tokens comes once its last byte is there. Until then a tokenizer shows U+FFFD in its place, so what
    ends in one waits. Tokenizers write a token otherwise at the start of a text, and check the bytes of several tokens as a whole, so
    new tokens are decoded together with those since the last time but one that the text was complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the window's start
        self._complete = 0  # tokens of the window whose text was complete
        self._shown = 0  # characters of the window's text that were returned

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        text = decode_text(self._tokenizer, self._tokens)
        complete = text.rstrip("\ufffd")
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text:
            self._tokens = self._tokens[self._complete :]
            self._complete, self._shown = len(self._tokens), len(decode_text(self._tokenizer, self._tokens))
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that make no character, as U+FFFD."""
        piece = decode_text(self._tokenizer, self._tokens)[self._shown :]
        self._tokens, self._complete, self._shown = [], 0, 0
        return piece
