"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

_CONTEXT = 4  # tokens before new ones, since some tokenizers write a token otherwise at the start of a text
_LONGEST = 32  # tokens decoded again with each piece


class TextStream:
    """Decodes a sequence's tokens piece by piece; the pieces joined are the text of all tokens, special ones left out.

    A character that is spread over tokens comes once its last byte is there. Until then a tokenizer shows U+FFFD in its place, so what
    ends in one waits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the window's start
        self._shown = 0  # characters of the window's text that were returned

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        complete = text.rstrip("\ufffd")
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text and len(self._tokens) > _LONGEST:
            self._tokens = self._tokens[-_CONTEXT:]
            self._shown = len(self._decode(self._tokens))
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that make no character, as U+FFFD."""
        piece = self._decode(self._tokens)[self._shown :]
        self._tokens, self._shown = [], 0
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
