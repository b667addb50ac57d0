"""The one entry to training and evaluation data: from a specification such as "chatqa2,musique:/data/musique" to documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from elastic_jax.data.chat import tokenize_rows
from elastic_jax.data.corpus import build_corpus
from elastic_jax.data.documents import Document, Documents
from elastic_jax.data.hub_sources import HUB_SOURCES, Split, load_hub_rows
from elastic_jax.data.packed_parquet import read_packed
from elastic_jax.data.rows import Reason, RejectionReport, Row
from elastic_jax.data.tasks import parse_task_class

_ACCEPTED = (
    "corpus, jsonl:PATH, packed:PATH.parquet, "
    + ", ".join(f"{name}[:PATH]" if source.hub else f"{name}:PATH" for name, source in HUB_SOURCES.items())
    + ", or several of these joined by commas"
)
_TEXT_COLUMNS = ("context", "question", "answer")


def needs_tokenizer(spec: str) -> bool:
    """Whether a mixture has text to tokenise; ValueError for an unknown source."""
    return any(name != "packed" for name, _ in [_parse(part) for part in spec.split(",")])


def load_documents(
    spec: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    split: Split,
    max_tokens: int,
    min_tokens: int = 1,
    corpus_rows_per_class: int = 200,
    seed: int = 0,
    workers: int = 1,
) -> Documents:
    """Loads a mixture and tokenises it. What cannot be used is counted in the result's `report`.

    Args:
      spec: sources joined by commas (paths hold no comma). "corpus" is built offline from the packaged texts; "jsonl:PATH" has a
        row per line (see `read_jsonl`); "packed:PATH" is the authors' packed layout, already tokenised; the others are the tables
        of `HUB_SOURCES`, from their hub or a local copy.
      tokenizer: fast, with a chat template; None will do where `needs_tokenizer` says so.
      split: "train" or "heldout". A single file is read whole for either.
      max_tokens: longest document; longer ones are rejected, never cut. Also the length that corpus rows are built to.
      min_tokens: shortest document; the shortest length that corpus rows are built to.
      corpus_rows_per_class: rows of each class in the corpus.
      seed: of the corpus.
      workers: threads that tokenise; the result does not depend on it.

    Raises:
      ValueError: an unknown source; a file or record that is not in its source's layout.
      FileNotFoundError: a path that does not exist, or an asset of the corpus that was not fetched.
      ImportError: a package that a source needs is absent.
    """
    parts = [_parse(part) for part in spec.split(",")]
    report = RejectionReport()

    def stream() -> Iterator[Document]:
        for name, path in parts:
            if name == "packed":
                yield from read_packed(Path(path), report=report, max_tokens=max_tokens, min_tokens=min_tokens)
                continue
            if tokenizer is None:
                raise ValueError(f"source {name!r} has text: a tokenizer is needed")
            if name == "corpus":
                rows = iter(
                    build_corpus(
                        tokenizer,
                        split=split,
                        min_tokens=min_tokens,
                        max_tokens=max_tokens,
                        per_class=corpus_rows_per_class,
                        seed=seed,
                    )
                )
            else:
                rows = _read_rows(name, path, split, report)
            yield from tokenize_rows(rows, tokenizer, report=report, max_tokens=max_tokens, min_tokens=min_tokens, workers=workers)

    return Documents(stream(), report)


def load_rows(spec: str, split: Split, report: RejectionReport) -> Iterator[Row]:
    """Yields the rows of a mixture of text sources; as `load_documents`, but "corpus" and "packed" are not text sources."""
    for name, path in [_parse(part) for part in spec.split(",")]:
        if name in ("corpus", "packed"):
            raise ValueError(f"source {name!r} needs a tokenizer or is tokenised already: use build_corpus or load_documents")
        yield from _read_rows(name, path, split, report)


def read_jsonl(path: Path, report: RejectionReport) -> Iterator[Row]:
    """Yields the rows of a file with one JSON object per line.

    Each has the texts `context`, `question` and `answer` (null counts as empty) and `task` (a name or number that
    `parse_task_class` takes); it may have `id` and `is_prefix`. Lines that are not UTF-8 and unknown tasks are reported.

    Raises:
      ValueError: a line that is no JSON object, lacks a column or has one of another type; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                report.reject(Reason.BROKEN_UNICODE, where)
                continue
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error.msg} at character {error.pos})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a JSON object is needed, found {type(record).__name__}")
            if missing := [column for column in (*_TEXT_COLUMNS, "task") if column not in record]:
                raise ValueError(f"{where}: no column {missing[0]!r}; found {', '.join(map(repr, record))}")
            context, question, answer = ("" if record[column] is None else record[column] for column in _TEXT_COLUMNS)
            if not all(isinstance(text, str) for text in (context, question, answer)):
                raise ValueError(f"{where}: {', '.join(_TEXT_COLUMNS)} must be texts")
            id, is_prefix = str(record.get("id") or where), record.get("is_prefix", False)
            if not isinstance(is_prefix, bool):
                raise ValueError(f"{where}: is_prefix={is_prefix!r}: accepted are true and false")
            try:
                task = parse_task_class(record["task"])
            except ValueError:
                report.reject(Reason.UNKNOWN_TASK, id)
                continue
            yield Row(context=context, question=question, answer=answer, task=task, id=id, is_prefix=is_prefix)


def _read_rows(name: str, path: str, split: Split, report: RejectionReport) -> Iterator[Row]:
    if name == "jsonl":
        return read_jsonl(Path(path), report)
    return load_hub_rows(name, path or None, split, report)


def _parse(part: str) -> tuple[str, str]:
    """(source, path or "") of one part of a specification."""
    name, colon, path = part.strip().partition(":")
    known = name in HUB_SOURCES or name in ("corpus", "jsonl", "packed")
    if not known or (colon and not path) or (name == "corpus" and path) or (name in ("jsonl", "packed") and not path):
        raise ValueError(f"source {part.strip()!r}: accepted are {_ACCEPTED}")
    return name, path
