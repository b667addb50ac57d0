"""Texts of the RULER tasks: essays, SQuAD and HotpotQA in the layout of RULER's own files, each with a label of what was read.

| text     | file                  | layout                                                                                      |
|----------|-----------------------|---------------------------------------------------------------------------------------------|
| essays   | PaulGrahamEssays.json | {"text": ...}                                                                               |
| SQuAD    | squad.json            | {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}], ...}]}]}]} |
| HotpotQA | hotpotqa.json         | [{"question", "answer", "context": [[title, [sentence]]], "supporting_facts": [[title, i]]}] |

A file is read from the user's folder, else from the fetched assets (`elastic_jax.assets`), which are RULER's own. Where neither has
the essays, the documentation that Python ships with takes their place; SQuAD and HotpotQA have no substitute.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_jax import assets

ESSAYS, SQUAD, HOTPOTQA = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
_ASSETS = {ESSAYS: "essays", SQUAD: "squad", HOTPOTQA: "hotpotqa"}
_LAYOUTS = {
    ESSAYS: '{"text": "..."}',
    SQUAD: 'SQuAD\'s: {"data": [{"paragraphs": [{"context": "...", "qas": [{"question": "...", "answers": [{"text": "..."}]}]}]}]}',
    HOTPOTQA: (
        'HotpotQA\'s: [{"question": "...", "answer": "...", "context": [["title", ["sentence"]]], "supporting_facts": [["title", 0]]}]'
    ),
}
_ABBREVIATIONS = re.compile(r"\W*([A-Z]|mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|cf|no|fig|inc|ltd|co|corp|jr|sr|u\.s)\.", re.IGNORECASE)
_END = re.compile(r"[.!?][\"'”’)\]]*$")
_BEGIN = re.compile(r"[\"'“‘(\[]*[A-Z0-9]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Essays:
    """Running text in words.

    Attributes:
      words: separated by white space.
      ends: ascending numbers of words, after each of which a sentence ends; the last is len(words).
      source: what the text is, for the report.
    """

    words: list[str]
    ends: list[int]
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question about some of a set's documents, which are given by number.

    Attributes:
      own: documents that always come with it, the answering one of SQuAD, all paragraphs of HotpotQA.
      near: documents that come before any others, SQuAD's of the same article.
      gold: those of `own` that the answer needs.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]
    gold: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """Documents, the questions about them in the file's order, and what they are, for the report."""

    documents: list[str]
    questions: list[Question]
    source: str


def essays(folder: str | Path | None = None) -> Essays:
    """The essays; Python's documentation where there are none.

    Raises:
      ValueError: the file is malformed, or `folder` is not a folder.
    """
    path = _find(folder, ESSAYS)
    return _python_documentation() if path is None else _read_essays(path)


def squad(folder: str | Path | None = None) -> Questions:
    """SQuAD's answerable questions; documents are its paragraphs.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed, or `folder` is not a folder.
    """
    return _read_squad(_need(folder, SQUAD))


def hotpotqa(folder: str | Path | None = None) -> Questions:
    """HotpotQA's questions; documents are "title\\nparagraph". Errors as of `squad`."""
    return _read_hotpotqa(_need(folder, HOTPOTQA))


def sentence_ends(words: list[str]) -> list[int]:
    """Numbers of words after which a sentence ends: at a full stop, question or exclamation mark, except of initials and a few
    abbreviations, where the next word begins with a capital or a digit; and at the last word."""
    ends = [
        i + 1
        for i, word in enumerate(words[:-1])
        if _END.search(word) and _BEGIN.match(words[i + 1]) and not _ABBREVIATIONS.fullmatch(word)
    ]
    return [*ends, len(words)]


def _find(folder: str | Path | None, file: str) -> Path | None:
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"texts_folder={str(folder)!r} is not a folder: accepted is one with any of {', '.join(_ASSETS)}")
    candidates = [] if folder is None else [Path(folder) / file]
    candidates.append(assets.asset_dir() / assets.ASSETS[_ASSETS[file]].path)
    return next((path.resolve() for path in candidates if path.is_file()), None)


def _need(folder: str | Path | None, file: str) -> Path:
    path = _find(folder, file)
    if path is None:
        tried = [assets.asset_dir(), *([] if folder is None else [Path(folder)])]
        raise FileNotFoundError(
            f"{file} is neither in texts_folder nor among the assets (looked in {', '.join(map(str, tried))}): put {_LAYOUTS[file]} "
            f"there, or run `python -m experiments.fetch_assets`"
        )
    return path


def _read(path: Path) -> tuple[Any, str]:
    """The parsed file and its label."""
    data = path.read_bytes()
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): accepted is {_LAYOUTS[path.name]}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest == assets.ASSETS[_ASSETS[path.name]].sha256:
        return parsed, f"{path.name} of RULER"
    return parsed, f"user's file {path.name}, sha256 {digest[:12]}"


def _get(path: Path, where: str, entry: Any, key: str, kind: type, default: Any = None) -> Any:
    """`entry[key]`, which must have a type (or be absent where there is a default)."""
    value = entry.get(key, default) if isinstance(entry, Mapping) else None
    if not isinstance(value, kind):
        found = "is absent" if value is None else f"is {type(value).__name__}"
        name = {str: "a text", list: "a list", bool: "true or false"}[kind]
        raise ValueError(f"{path}: {where}{key} {found}, it must be {name}: accepted is {_LAYOUTS[path.name]}")
    return value


@functools.lru_cache(maxsize=2)
def _read_essays(path: Path) -> Essays:
    data, source = _read(path)
    words = _get(path, "", data, "text", str).split()
    if not words:
        raise ValueError(f"{path}: text is empty: accepted is {_LAYOUTS[path.name]}")
    return Essays(words=words, ends=sentence_ends(words), source=source)


@functools.cache
def _python_documentation() -> Essays:
    from pydoc_data.topics import topics

    # Paragraphs of prose: no headings, grammar, code or tables, which are indented or do not end in a full stop.
    paragraphs = (text for topic in topics.values() for text in re.split(r"\n\s*\n", topic))
    prose = [text.split() for text in paragraphs if re.match(r"\S", text) and text.rstrip().endswith(".") and len(text.split()) >= 8]
    words = [word for paragraph in prose for word in paragraph]
    source = f"packaged substitute for essays: documentation of Python {platform.python_version()} (pydoc_data), {len(words)} words"
    return Essays(words=words, ends=sentence_ends(words), source=source)


@functools.lru_cache(maxsize=2)
def _read_squad(path: Path) -> Questions:
    data, source = _read(path)
    numbers: dict[str, int] = {}
    questions: list[Question] = []
    for a, article in enumerate(_get(path, "", data, "data", list)):
        paragraphs = _get(path, f"data[{a}].", article, "paragraphs", list)
        contexts = [_get(path, f"data[{a}].paragraphs[{p}].", paragraph, "context", str) for p, paragraph in enumerate(paragraphs)]
        mine = [numbers.setdefault(text, len(numbers)) for text in contexts]
        for p, paragraph in enumerate(paragraphs):
            near = tuple(number for number in dict.fromkeys(mine) if number != mine[p])
            for q, asked in enumerate(_get(path, f"data[{a}].paragraphs[{p}].", paragraph, "qas", list)):
                where = f"data[{a}].paragraphs[{p}].qas[{q}]."
                if _get(path, where, asked, "is_impossible", bool, default=False):
                    continue
                text, given = _get(path, where, asked, "question", str), _get(path, where, asked, "answers", list)
                answers = tuple(dict.fromkeys(_get(path, f"{where}answers[{i}].", one, "text", str) for i, one in enumerate(given)))
                if not answers or not all(answers):
                    raise ValueError(f"{path}: {where}answers has none or an empty one, but the question is not marked is_impossible")
                questions.append(Question(text=text, answers=answers, own=(mine[p],), near=near, gold=(mine[p],)))
    return _checked(path, Questions(documents=list(numbers), questions=questions, source=source))


@functools.lru_cache(maxsize=2)
def _read_hotpotqa(path: Path) -> Questions:
    data, source = _read(path)
    if not isinstance(data, list):
        raise ValueError(f"{path} holds {type(data).__name__}, not a list: accepted is {_LAYOUTS[path.name]}")
    numbers: dict[str, int] = {}
    questions: list[Question] = []
    for i, asked in enumerate(data):
        where = f"[{i}]."
        text, answer = _get(path, where, asked, "question", str), _get(path, where, asked, "answer", str)
        context = _get(path, where, asked, "context", list)
        try:
            needed = {str(title) for title, _ in _get(path, where, asked, "supporting_facts", list)}
            paragraphs = {f"{title}\n{''.join(sentences)}": title in needed for title, sentences in context}
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {where}context or supporting_facts: {error}: accepted is {_LAYOUTS[path.name]}") from None
        if not answer or not paragraphs:
            raise ValueError(f"{path}: {where}answer or context is empty: accepted is {_LAYOUTS[path.name]}")
        own = tuple(numbers.setdefault(document, len(numbers)) for document in paragraphs)
        gold = tuple(number for number, is_gold in zip(own, paragraphs.values(), strict=True) if is_gold)
        questions.append(Question(text=text, answers=(answer,), own=own, near=(), gold=gold))
    return _checked(path, Questions(documents=list(numbers), questions=questions, source=source))


def _checked(path: Path, result: Questions) -> Questions:
    if not result.questions:
        raise ValueError(f"{path} has no answerable question: accepted is {_LAYOUTS[path.name]}")
    return result
