"""`Row`: one question about a text, before it becomes tokens; and the report of the rows that were not used."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re

from elastic_jax.data.tasks import TaskClass

_EXAMPLES_PER_REASON = 3
_BROKEN = re.compile(r"[\ud800-\udfff\ufffd]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A context, a question about it and the answer.

    Attributes:
      context: the long text.
      question: may be empty for `SUMMARIZATION` and `CODE`, whose chat text brings its own instruction.
      answer: what the model should say.
      task: class of the row.
      id: names the row in reports.
      is_prefix: the question comes before the context (the released data's default) instead of after it.
      kind: how the row was made ("needle", "hotpotqa", ...), for evaluation by kind; "" if unknown.
    """

    context: str
    question: str
    answer: str
    task: TaskClass
    id: str
    is_prefix: bool = False
    kind: str = ""


class Reason(enum.StrEnum):
    """Why a row or document was left out."""

    EMPTY_CONTEXT = "empty context"
    EMPTY_QUESTION = "empty question"
    EMPTY_ANSWER = "empty answer"
    UNKNOWN_TASK = "unknown task class"
    BROKEN_UNICODE = "broken unicode"
    SPECIAL_TOKEN = "special token in text"
    TOO_SHORT = "too short"
    TOO_LONG = "too long"


class RejectionReport:
    """Counts what was kept and, by reason, what was not, with the ids of the first few. `str()` is a table."""

    def __init__(self) -> None:
        self.kept = 0
        self.counts: collections.Counter[Reason] = collections.Counter()
        self.examples: dict[Reason, list[str]] = {}

    def reject(self, reason: Reason, id: str) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES_PER_REASON:
            examples.append(id)

    @property
    def rejected(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        lines = [f"{'read':<22}{self.kept + self.rejected:>9}", f"{'kept':<22}{self.kept:>9}"]
        for reason in Reason:
            if count := self.counts[reason]:
                more = ", ..." if count > len(self.examples[reason]) else ""
                lines.append(f"{reason:<22}{count:>9}  {', '.join(self.examples[reason])}{more}")
        return "\n".join(lines)


def find_fault(row: Row) -> Reason | None:
    """The reason to reject a row for its text alone, or None: empty parts, lone surrogates, U+FFFD (a decoder's replacement mark)."""
    if not row.context.strip():
        return Reason.EMPTY_CONTEXT
    if not row.question.strip() and row.task not in (TaskClass.SUMMARIZATION, TaskClass.CODE):
        return Reason.EMPTY_QUESTION
    if not row.answer.strip():
        return Reason.EMPTY_ANSWER
    if any(_BROKEN.search(text) for text in (row.context, row.question, row.answer)):
        return Reason.BROKEN_UNICODE
    return None
