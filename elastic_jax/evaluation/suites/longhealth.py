"""LongHealth (https://arxiv.org/abs/2401.14490): 400 questions with five options about the records of 20 fictional patients.

Task 1: the documents that hold the answer, and others of the patient. Tasks 2 and 3: a sixth option, that the question cannot be
answered from the documents; ten draws of each question take turns between ten documents of other patients alone (task 3, where the
sixth option is right) and the same with those that hold the answer (task 2).

Prompts are re-worded, keeping their recipe: documents with a line between them, the question, lettered options, and the sentence that
the answer is to be. The benchmark draws without a seed; here every prompt has its own. It scores whether the answer contains the right
option's text; here the letter counts, and that is reported beside it. Its data carry a canary string and are not to be passed on.
The layout is known from programs that read it; it could not be compared with the data itself.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites.files import Record, find_files, read_json, text, value

TASKS = ("longhealth_1", "longhealth_2", "longhealth_3")
MAX_NEW_TOKENS: dict[str, int] = dict.fromkeys(TASKS, 512)
_UNANSWERABLE = "The documents do not contain the answer to this question"
_SYSTEM = (
    "You help physicians to find information in discharge letters of hospitals. You will be given one or more such letters and a question "
    "about them with several options. Read the letters with care, rely on nothing but them, and be accurate and brief."
)
_FORM = (
    'Reply in one sentence that begins with "The correct answer is", followed by the letter of the right option, a colon and the text of '
    'that option. For example: "The correct answer is C: Acute bronchitis."'
)
_LINE = "-" * 14
_DRAWS = {"longhealth_1": range(5), "longhealth_2": range(1, 10, 2), "longhealth_3": range(0, 10, 2)}
_DISTRACTORS = 10

_Documents = dict[str, str]  # by "patient/name"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """options: by letter. letter: of the right one. gold: names of the documents that hold the answer."""

    patient: str
    number: int
    text: str
    options: dict[str, str]
    letter: str
    gold: list[str]


def samples(
    source: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    max_tokens: int = 16_000,
    max_prompt_tokens: int | None = None,
    count_tokens: Callable[[str], int] = lambda text: len(text.split()),
    seed: int = 0,
) -> list[Sample]:
    """The samples of LongHealth: of each question five for each task, in the order of patients and questions.

    In `extra`: the id of the question (`question`), the same for its five samples of every task, and the documents that were put in, in
    their order.

    Args:
      source: benchmark_v5.json, a folder that holds it, or a hub id.
      tasks: of `TASKS`; None: all.
      limit: the first questions; None: all.
      max_tokens: room for the system message and the documents.
      max_prompt_tokens: room for these and all the rest, but for what the chat template adds; None: as much as they need.
      count_tokens: tokens of a text, such as `lambda text: len(tokenizer.encode(text))`; words unless given.
      seed: of the draws and the order of documents; each prompt's own depends on this and on its id only.

    Raises:
      FileNotFoundError: the source is not there.
      ValueError: an unknown task; max_tokens or max_prompt_tokens without room for documents; a damaged file or record (names file,
        patient, question and column).
    """
    for task in (tasks := TASKS if tasks is None else tasks):
        if task not in TASKS:
            raise ValueError(f"tasks has {task!r}: accepted are {', '.join(TASKS)}")
    room = max_tokens - count_tokens(_SYSTEM)
    if room < 1:
        raise ValueError(f"max_tokens={max_tokens}: more than the {max_tokens - room} of the system message are needed")
    documents, questions = _read(find_files(source, ["*benchmark_v5.json", "*LongHealth.json"])[0])
    count = functools.cache(count_tokens)
    return [
        _sample(task, question, draw, seed, documents, room, max_prompt_tokens, count)
        for task in tasks
        for question in questions[:limit]
        for draw in _DRAWS[task]
    ]


def _sample(
    task: str,
    question: _Question,
    draw: int,
    seed: int,
    documents: _Documents,
    room: int,
    max_prompt_tokens: int | None,
    count_tokens: Callable[[str], int],
) -> Sample:
    item = f"{task}/{question.patient}/{question.number}"
    rng = random.Random(f"{seed}/{item}/{draw}")
    own = [name for name in documents if name.startswith(f"{question.patient}/")]
    if task == "longhealth_1":
        others = [name for name in own if name not in question.gold]
        rng.shuffle(others)
    else:
        foreign = [name for name in documents if name not in own]
        others = rng.sample(foreign, min(_DISTRACTORS, len(foreign)))
    gold = [] if task == "longhealth_3" else question.gold
    options = question.options if task == "longhealth_1" else question.options | {"F": _UNANSWERABLE}
    if max_prompt_tokens is not None:
        # With a word for each document, since line breaks with nothing between them would be fewer tokens.
        rest = count_tokens(_SYSTEM) + count_tokens(_prompt(["x"] * len([*gold, *others]), question.text, options))
        room = min(room, max_prompt_tokens - rest)
        if room < 1:
            raise ValueError(f"max_prompt_tokens={max_prompt_tokens}: {item} needs more than {rest} without its documents")
    chosen = _select(gold, others, documents, room, count_tokens)
    names = list(chosen)
    rng.shuffle(names)
    letter = "F" if task == "longhealth_3" else question.letter
    return Sample(
        id=f"{item}/{draw}",
        task=task,
        group="LongHealth",
        system=_SYSTEM,
        prompt=_prompt([chosen[name] for name in names], question.text, options),
        references=(letter, options[letter]),
        metric="letter_or_text",
        max_new_tokens=MAX_NEW_TOKENS[task],
        extra={"question": f"{question.patient}/{question.number}", "documents": names, "prompt": "re-worded"},
    )


def _select(gold: Sequence[str], others: Sequence[str], documents: _Documents, room: int, count_tokens: Callable[[str], int]) -> _Documents:
    """Gold documents first, the one that does not fit cut; then of the others, in their order, each that fits whole."""
    chosen = {}
    for name in (*gold, *others):
        document = documents[name]
        if name in gold and count_tokens(document) > room:
            document = _cut(document, room, count_tokens)
        if document and (needed := count_tokens(document)) <= room:
            chosen[name] = document
            room -= needed
    return chosen


def _cut(document: str, room: int, count_tokens: Callable[[str], int]) -> str:
    """The most of a document's first words that `room` tokens hold."""
    ends = [0, *(word.end() for word in re.finditer(r"\S+", document))]
    fits, too_many = 0, len(ends)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if count_tokens(document[: ends[middle]]) <= room else (fits, middle)
    return document[: ends[fits]]


def _prompt(documents: Sequence[str], question: str, options: dict[str, str]) -> str:
    joined = f"\n\n{_LINE}\n\n".join(documents)
    lettered = "\n".join(f"{letter}: {option}" for letter, option in options.items())
    return f"{_LINE} DOCUMENTS {_LINE}\n\n{joined}\n\n{_LINE} END OF DOCUMENTS {_LINE}\n\n{question}\n{lettered}\n\n{_FORM}"


def _read(path: Path) -> tuple[_Documents, list[_Question]]:
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path}: an object with a patient for each name is needed")
    documents, questions = {}, []
    for patient, record in content.items():
        where = f"{path}, {patient}"
        if not isinstance(record, dict) or not isinstance(value(record, "texts", where), dict) or not record["texts"]:
            raise ValueError(f"{where}: column 'texts' has to be an object with documents by name")
        if not isinstance(value(record, "questions", where), list):
            raise ValueError(f"{where}: column 'questions' has to be a list")
        documents |= {f"{patient}/{name}": text(record["texts"], name, f"{where}, texts") for name in record["texts"]}
        for number, question in enumerate(record["questions"]):
            questions.append(_question(question, patient, number, documents, f"{where}, question {number}"))
    return documents, questions


def _question(record: Record, patient: str, number: int, documents: _Documents, where: str) -> _Question:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: an object is needed, found {type(record).__name__}")
    options = {letter: text(record, f"answer_{letter.lower()}", where) for letter in "ABCDE"}
    correct = text(record, "correct", where)
    letters = [letter for letter, option in options.items() if option == correct]
    letters = letters or [letter for letter, option in options.items() if _folded(option) == _folded(correct)]
    if len(letters) != 1:
        found = f"the options {' and '.join(letters)}" if letters else "none of the options"
        raise ValueError(f"{where}: column 'correct' holds {correct!r}, which is {found}: it has to be one")
    locations = value(record, "answer_location", where)
    gold = [f"{patient}/{name}" for name in locations] if isinstance(locations, dict | list) else []
    if not gold or any(name not in documents for name in gold):
        raise ValueError(f"{where}: column 'answer_location' holds {locations!r}: names of the patient's documents are needed")
    asked = text(record, "question", where)
    return _Question(patient=patient, number=number, text=asked, options=options, letter=letters[0], gold=gold)


def _folded(option: str) -> str:
    return " ".join(option.casefold().split()).rstrip(".")
