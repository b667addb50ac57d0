"""`Document`: a row as tokens; `Documents`: many of them in a few flat arrays."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from elastic_jax.data.rows import RejectionReport
from elastic_jax.data.tasks import TaskClass


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Document:
    """One tokenised conversation: user turn, then answer. n is its length; ranges count from its first token, ends exclusive.

    Attributes:
      tokens: i32[n].
      labelled: bool[n], tokens whose prediction may count in the loss (all of them, unless the source masks some).
      user_turn: range of everything before the assistant's turn: template, system message if any, context, question.
      answer: range of the answer and its end-of-turn token; what lies between `user_turn` and it is the assistant's header.
      task: class of the document.
      id: names the document in reports.
      kind: as in `Row`.
    """

    tokens: np.ndarray
    labelled: np.ndarray
    user_turn: tuple[int, int]
    answer: tuple[int, int]
    task: TaskClass
    id: str
    kind: str = ""


class Documents(Sequence[Document]):
    """A list of documents, stored as one flat array of tokens (5 bytes per token) and one of offsets.

    Attributes:
      report: which documents were rejected on the way here.
    """

    def __init__(self, documents: Iterable[Document], report: RejectionReport):
        tokens, labelled, ranges, tasks = [np.empty(0, np.int32)], [np.empty(0, bool)], [], []
        self._ids: list[str] = []
        self._kinds: list[str] = []
        for document in documents:
            tokens.append(document.tokens.astype(np.int32, copy=False))
            labelled.append(document.labelled)
            ranges.append((*document.user_turn, *document.answer))
            tasks.append(document.task)
            self._ids.append(document.id)
            self._kinds.append(document.kind)
        self.report = report
        self._offsets = np.cumsum([len(part) for part in tokens], dtype=np.int64)
        self._tokens, self._labelled = np.concatenate(tokens), np.concatenate(labelled)
        self._ranges = np.array(ranges, np.int32).reshape(-1, 4)
        self._tasks = np.array(tasks, np.int8)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start, end = self._offsets[position], self._offsets[position + 1]
        user_start, user_end, answer_start, answer_end = self._ranges[position].tolist()
        return Document(
            tokens=self._tokens[start:end],
            labelled=self._labelled[start:end],
            user_turn=(user_start, user_end),
            answer=(answer_start, answer_end),
            task=TaskClass(int(self._tasks[position])),
            id=self._ids[position],
            kind=self._kinds[position],
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError where a token is not one of the model's: naming a document that has it."""
        wrong = np.flatnonzero((self._tokens < 0) | (self._tokens >= vocab_size))
        if wrong.size:
            document = self[int(np.searchsorted(self._offsets, wrong[0], side="right")) - 1]
            raise ValueError(f"document {document.id!r} has token id {self._tokens[wrong[0]]}: the model's are 0 to {vocab_size - 1}")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that training reads of the documents: another data set under the same name has another."""
        arrays = (self._tokens, self._offsets, self._labelled, self._ranges, self._tasks)
        return hashlib.sha256(b"".join(hashlib.sha256(array.tobytes()).digest() for array in arrays)).hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        """i64[D]: tokens of each document."""
        return np.diff(self._offsets)

    @property
    def class_counts(self) -> dict[TaskClass, int]:
        """Documents of each class."""
        counts = collections.Counter(self._tasks.tolist())
        return {task: counts[task] for task in TaskClass}
