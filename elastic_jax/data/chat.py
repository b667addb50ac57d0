"""From rows to tokens: user text, chat template, tokenizer; by several threads, in the rows' order."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from elastic_jax.checks import check_text
from elastic_jax.data.documents import Document
from elastic_jax.data.rows import Reason, RejectionReport, Row, find_fault
from elastic_jax.data.tasks import TaskClass

# What the released data adds around the user text of two classes, in our own words.
_INSTRUCTIONS = {
    TaskClass.SUMMARIZATION: ("Read the following text and write a summary of it.", "\n\nSummary:"),
    TaskClass.CODE: ("Continue the following code.", ""),
}
_BYTE_ORDER_MARK = "\ufeff"
_ROWS_IN_FLIGHT = 256  # bounds the text held in memory when rows come from a stream


def user_text(row: Row) -> str:
    """The user's message: context and question in the row's order, with the instruction of its class."""
    context = "\n" + row.context.replace(_BYTE_ORDER_MARK, "").rstrip()
    question = "\n" + row.question.replace(_BYTE_ORDER_MARK, "").lstrip()
    text = f"{question}\n{context}" if row.is_prefix else f"{context}\n{question}"
    before, after = _INSTRUCTIONS.get(row.task, ("", ""))
    return before + text + after


class ChatEncoder:
    """Turns rows into documents with a tokenizer's own chat template, thinking switched off.

    A document is the user-only rendering, the assistant's header and the answer with what the template puts after it, tokenised
    one by one: the first two are then exactly the prompt that generation sees, even if the answer begins with a space or a line
    break that the tokenizer would merge into the header. The end-of-sequence token is appended where the last token is another
    (as in the released data, also after a template that ends in a line break). Whatever the template adds by itself, such as a
    default system message, belongs to the user turn.

    Args:
      tokenizer: a fast tokenizer with a chat template.

    Raises:
      ValueError: the tokenizer is not fast or has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"tokenizer {type(tokenizer).__name__}: a fast tokenizer (tokenizer.json) is needed")
        if not tokenizer.chat_template:
            raise ValueError(f"tokenizer {type(tokenizer).__name__}: it has no chat_template")
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009 (only fast tokenizers declare it)
        if self._backend.truncation is not None or self._backend.padding is not None:
            self._backend = copy.deepcopy(self._backend)
            self._backend.no_truncation()
            self._backend.no_padding()
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = np.array(sorted(special.values()), np.int32)
        # A text that holds a special token would end the user's turn early.
        self._special = re.compile("|".join(re.escape(text) for text in sorted(special)) or r"(?!)")

    def ids(self, text: str) -> np.ndarray:
        """i32[n]: the tokens of a text, without any that a tokenizer adds at its ends."""
        # encode_batch releases the GIL, encode does not: threads gain only by the first (measured with tokenizers 0.23).
        return np.array(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def find_fault(self, row: Row) -> Reason | None:
        """As `rows.find_fault`, and special tokens in the text."""
        if fault := find_fault(row):
            return fault
        if any(self._special.search(text) for text in (row.context, row.question, row.answer)):
            return Reason.SPECIAL_TOKEN
        return None

    def encode(self, row: Row) -> Document:
        """The row as a document, whatever its length; its text is taken to be without fault.

        Raises:
          ValueError: the chat template fails, or writes the earlier part of a conversation otherwise once there is an answer.
        """
        user = {"role": "user", "content": user_text(row)}
        assistant = {"role": "assistant", "content": row.answer.replace(_BYTE_ORDER_MARK, "")}
        asked, prompt, answered = self._render([user]), self._render([user], prompt=True), self._render([user, assistant])
        if not prompt.startswith(asked) or not answered.startswith(prompt):
            raise ValueError(f"row {row.id!r}: the chat template's prompt is not the beginning of the answered conversation")
        parts = [*self._prompt_parts(asked, prompt), self.ids(answered[len(prompt) :])]
        (stops,) = np.nonzero(np.isin(parts[2], self._special_ids))
        eos: Any = self._tokenizer.eos_token_id
        if eos is not None and (not parts[2].size or parts[2][-1] != eos):
            parts[2] = np.append(parts[2], np.int32(eos))
        start = parts[0].size + parts[1].size
        tokens = np.concatenate(parts)
        return Document(
            tokens=tokens,
            labelled=np.ones(tokens.size, bool),
            user_turn=(0, parts[0].size),
            answer=(start, start + int(stops[0]) + 1 if stops.size else tokens.size),
            task=row.task,
            id=row.id,
            kind=row.kind,
        )

    def encode_prompt(self, messages: list[dict[str, str]]) -> tuple[np.ndarray, int]:
        """A conversation that ends with a user's message, tokenised as a document is up to its answer: i32[n], and the end of the user
        turn, where the assistant's header begins. As in a document, the user turn begins at token 0: what a later message refers to is
        in the ones before it.

        Raises:
          ValueError: the chat template fails on these messages or does not append the assistant's header; a text is not valid UTF-8.
        """
        asked, prompt = self._render(messages), self._render(messages, prompt=True)
        if not prompt.startswith(asked):
            raise ValueError("the chat template's prompt does not begin with the conversation that it continues")
        parts = self._prompt_parts(asked, prompt)
        return np.concatenate(parts), parts[0].size

    def text_range(self, messages: list[dict[str, str]]) -> tuple[int, int]:
        """First token and end (exclusive) in `encode_prompt` of what holds only text of the last message, nothing of the template.

        Raises:
          ValueError: the chat template changes the text by more than trimming it.
        """
        asked, text = self._render(messages), messages[-1]["content"]
        start = asked.rfind(text)
        if start < 0:
            text = text.strip()
            start = asked.rfind(text)
        if start < 0:
            raise ValueError("the chat template changes the text of a message, so that its tokens cannot be told from the template's")
        # Offsets count characters of the text as it was before any normalisation; encode_batch_fast has none.
        offsets = np.array(self._backend.encode_batch([asked], add_special_tokens=False)[0].offsets)
        (inside,) = np.nonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= start + len(text)))
        return (int(inside[0]), int(inside[-1]) + 1) if inside.size else (0, 0)

    def _prompt_parts(self, asked: str, prompt: str) -> list[np.ndarray]:
        return [self.ids(asked), self.ids(prompt[len(asked) :])]

    def encode_next(self, messages: list[dict[str, str]]) -> np.ndarray:
        """What a conversation that ends with a user's message adds behind the text of the answer before it: the end of that turn, the
        user's message and the assistant's header, i32[n]. That answer's own text does not matter."""
        *history, answer, user = messages
        mark = "<answer>"
        while any(mark in message["content"] for message in messages):
            mark += ">"
        rendered = self._render([*history, answer | {"content": mark}, user], prompt=True)
        return self.ids(rendered.rpartition(mark)[2])

    def end_of_turn(self) -> int | None:
        """The special token that the template puts after an answer; None if it puts none."""
        following = self.encode_next([{"role": role, "content": "x"} for role in ("user", "assistant", "user")])
        special = following[np.isin(following, self._special_ids)]
        return int(special[0]) if special.size else None

    def _render(self, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, enable_thinking=False)
        except Exception as error:  # a template is a program: besides Jinja's own errors it can raise any of Python's
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"the tokenizer's chat template cannot be used ({reason})") from error
        assert isinstance(text, str)
        check_text("the conversation", text)  # the tokenizer would only say that this is not a str
        return text


def tokenize_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    report: RejectionReport,
    max_tokens: int,
    min_tokens: int = 1,
    workers: int = 1,
) -> Iterator[Document]:
    """Yields a document for each row that can be used, in the rows' order; the others go to the report, none is cut.

    Args:
      rows: read as they are needed.
      tokenizer: as for `ChatEncoder`.
      report: receives every rejected row and counts the kept ones.
      max_tokens: longest document.
      min_tokens: shortest document.
      workers: threads that tokenise. The result does not depend on it.
    """
    encoder = ChatEncoder(tokenizer)

    def convert(row: Row) -> tuple[Row, Document | Reason]:
        return row, encoder.find_fault(row) or encoder.encode(row)

    source = iter(rows)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        while chunk := list(itertools.islice(source, _ROWS_IN_FLIGHT)):
            for row, result in pool.map(convert, chunk):
                if isinstance(result, Reason):
                    report.reject(result, row.id)
                elif fault := length_fault(result.tokens.size, min_tokens, max_tokens):
                    report.reject(fault, row.id)
                else:
                    report.kept += 1
                    yield result


def length_fault(length: int, min_tokens: int, max_tokens: int) -> Reason | None:
    """`TOO_SHORT`, `TOO_LONG` or None for a document of that many tokens."""
    if length < min_tokens:
        return Reason.TOO_SHORT
    return Reason.TOO_LONG if length > max_tokens else None
