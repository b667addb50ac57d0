"""Texts of the RULER tasks: essays, SQuAD and HotpotQA in the layout of RULER's own files, each with a label of what was read.

| text     | file                  | layout                                                                                      |
|----------|-----------------------|---------------------------------------------------------------------------------------------|
| essays   | PaulGrahamEssays.json | {"text": ...}                                                                               |
| SQuAD    | squad.json            | {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}], ...}]}]}]} |
| HotpotQA | hotpotqa.json         | [{"question", "answer", "context": [[title, [sentence]]], "supporting_facts": [[title, i]]}] |

A file is read from the user's folder, else from the fetched assets (`elastic_jax.assets`), which are RULER's own. Where neither has
the essays, the documentation that Python ships with takes their place; SQuAD and HotpotQA have no substitute. `sources` says which.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_jax import assets
from elastic_jax.checks import check_text
from elastic_jax.evaluation.suites.files import Record, as_record, read_json, records, text, value

ESSAYS, SQUAD, HOTPOTQA = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
_ASSETS = {ESSAYS: "essays", SQUAD: "squad", HOTPOTQA: "hotpotqa"}
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


def sources(folder: str | Path | None = None) -> dict[str, str]:
    """What is read for each file's name; "none" where there is no file and no substitute. ValueError if `folder` is not a folder."""
    found = {file: _find(folder, file) for file in _ASSETS}
    labels = {file: "none" if path is None else _label(path) for file, path in found.items()}
    return labels if found[ESSAYS] else labels | {ESSAYS: _python_documentation().source}


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


READERS: dict[str, Callable[[str | Path | None], Any]] = {ESSAYS: essays, SQUAD: squad, HOTPOTQA: hotpotqa}


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
        place = assets.asset_dir() if folder is None else folder
        raise FileNotFoundError(
            f"{Path(place, file)} is missing: `python -m experiments.fetch_assets` brings RULER's own, or put a file in its layout there; "
            f"the tasks niah_*, vt, cwe and fwe need neither {SQUAD} nor {HOTPOTQA}"
        )
    return path


def _label(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest == assets.ASSETS[_ASSETS[path.name]].sha256:
        return f"{path.name} of RULER"
    return f"user's file {path.name}, sha256 {digest[:12]}"


def _read_essays(path: Path) -> Essays:
    words = text(as_record(read_json(path), str(path)), "text", str(path)).split()
    return Essays(words=words, ends=sentence_ends(words), source=_label(path))


@functools.cache
def _python_documentation() -> Essays:
    from pydoc_data.topics import topics

    # Paragraphs of prose: no headings, grammar, code or tables, which are indented or do not end in a full stop.
    paragraphs = (text for topic in topics.values() for text in re.split(r"\n\s*\n", topic))
    prose = [text.split() for text in paragraphs if re.match(r"\S", text) and text.rstrip().endswith(".") and len(text.split()) >= 8]
    words = [word for paragraph in prose for word in paragraph]
    source = f"packaged substitute for essays: documentation of Python {platform.python_version()} (pydoc_data), {len(words)} words"
    return Essays(words=words, ends=sentence_ends(words), source=source)


def _read_squad(path: Path) -> Questions:
    numbers: dict[str, int] = {}
    questions: list[Question] = []
    for where, article in records(as_record(read_json(path), str(path)), "data", str(path)):
        paragraphs = records(article, "paragraphs", where)
        mine = [numbers.setdefault(text(paragraph, "context", place), len(numbers)) for place, paragraph in paragraphs]
        for own, (place, paragraph) in zip(mine, paragraphs, strict=True):
            near = tuple(number for number in dict.fromkeys(mine) if number != own)
            for asked_at, asked in records(paragraph, "qas", place):
                impossible = asked.get("is_impossible", False)
                if not isinstance(impossible, bool):
                    raise ValueError(f"{asked_at}: column 'is_impossible' holds {impossible!r}, true or false is needed")
                if impossible:
                    continue
                answers = tuple(dict.fromkeys(text(one, "text", at).strip() for at, one in records(asked, "answers", asked_at)))
                if not answers:
                    raise ValueError(f"{asked_at}: column 'answers' is empty, but the question is not marked is_impossible")
                questions.append(Question(text=text(asked, "question", asked_at), answers=answers, own=(own,), near=near, gold=(own,)))
    return _checked(path, Questions(documents=list(numbers), questions=questions, source=_label(path)))


def _read_hotpotqa(path: Path) -> Questions:
    content = read_json(path)
    if not isinstance(content, list):
        raise ValueError(f"{path}: a list of questions is needed, found {type(content).__name__}")
    numbers: dict[str, int] = {}
    questions: list[Question] = []
    for i, found in enumerate(content):
        where = f"{path}, question {i}"
        asked = as_record(found, where)
        context = _titled(asked, "context", where, list)
        needed = {title for title, _ in _titled(asked, "supporting_facts", where, int)}
        if unknown := needed - {title for title, _ in context}:
            raise ValueError(f"{where}: column 'supporting_facts' names {min(unknown)!r}, which is no title of its context")
        paragraphs: dict[str, bool] = {}
        for title, sentences in context:
            if not all(isinstance(sentence, str) for sentence in sentences):
                raise ValueError(f"{where}: column 'context' has sentences of {title!r} that are no texts")
            document = f"{title}\n{''.join(sentences)}"
            check_text(f"{where}: column 'context'", document)
            paragraphs[document] = title in needed
        own = tuple(numbers.setdefault(document, len(numbers)) for document in paragraphs)
        gold = tuple(number for number, is_gold in zip(own, paragraphs.values(), strict=True) if is_gold)
        answer = text(asked, "answer", where).strip()
        questions.append(Question(text=text(asked, "question", where), answers=(answer,), own=own, near=(), gold=gold))
    return _checked(path, Questions(documents=list(numbers), questions=questions, source=_label(path)))


def _titled(record: Record, column: str, where: str, kind: type) -> list[tuple[str, Any]]:
    """A column with a list, not empty, of [title, value of that type]."""
    found = value(record, column, where)
    pairs = found if isinstance(found, list) else []
    good = lambda pair: isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], kind)
    if not pairs or not all(map(good, pairs)):
        shape = {list: "[title, [sentence, ...]]", int: "[title, number of a sentence]"}[kind]
        raise ValueError(f"{where}: column {column!r} has to be a list of {shape}, and not empty")
    return [(title, content) for title, content in pairs]


def _checked(path: Path, result: Questions) -> Questions:
    if not result.questions:
        raise ValueError(f"{path} has no answerable question")
    return result
