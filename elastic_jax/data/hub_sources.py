"""The paper's five training sources (and its released rows), each read through the package `datasets` and mapped to `Row`s.

A source is read from its hub or from a local copy: a file, or a folder in which the files of a split are told by their paths.
Layouts: MuSiQue, GovReport and XSum as on the hub; ChatQA2 and CoLT-132K after published programs that read them (ChatQA2's
`long_sft` holds the whole prompt in `question`; CoLT-132K is a zip archive on Zenodo, record 15019938, with no hub copy); the
released rows after the authors' packing code. The last three could not be compared with the data itself.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from elastic_jax.data.rows import Reason, RejectionReport, Row
from elastic_jax.data.tasks import TaskClass, parse_task_class

Split = Literal["train", "heldout"]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """Where a source lies and how its records become rows.

    Attributes:
      columns: columns that must be there.
      to_row: from a record and its id to a row, or to the reason why there is none.
      hub: (dataset, configuration, revision) on the hub, one for each part; empty if it has to be local.
      splits: the hub's names for our splits.
      files: per split, a pattern for the path of its files inside a local folder.
    """

    columns: tuple[str, ...]
    to_row: Callable[[Record, str], Row | Reason]
    hub: tuple[tuple[str, str | None, str | None], ...] = ()
    splits: dict[Split, str]
    files: dict[Split, str]


def _chatqa2(record: Record, id: str) -> Row | Reason:
    """`long_sft`: `question` is "User: instruction, text, question\\n\\nAssistant:"; `NarrativeQA_131072`: the text is apart.

    The released run's class labels for these rows are not published; requests for a summary count as summarization, the others
    as single-document QA.
    """
    context, question, answer = record["sub-paragraphs"] or "", record["question"] or "", record["answer"]
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    if not context.strip():
        prompt = re.sub(r"\s*Assistant:\s*$", "", question.removeprefix("User: "))
        context, _, question = prompt.rpartition("\n\n")
    context = context.replace("<|begin_of_text|>", "")  # left over in NarrativeQA from its first tokenizer
    task = TaskClass.SUMMARIZATION if re.search(r"\bsummar(y|ize|ise)\b", question, re.IGNORECASE) else TaskClass.SINGLE_QA
    return Row(context=context, question=question, answer=answer or "", task=task, id=id)


def _musique(record: Record, id: str) -> Row | Reason:
    if record.get("answerable") is False:
        return Reason.EMPTY_ANSWER
    paragraphs = [f"{paragraph['title']}\n{paragraph['paragraph_text']}" for paragraph in record["paragraphs"]]
    context, question, answer = "\n\n".join(paragraphs), record["question"] or "", record["answer"] or ""
    return Row(context=context, question=question, answer=answer, task=TaskClass.MULTIHOP_QA, id=id)


def _colt(record: Record, id: str) -> Row | Reason:
    """Context: declarations and similar code of other files, and the code after the gap. Question: the code before the gap."""
    pieces = [(part["code_file_path"], part["abstraction"]) for part in record["cross_file_dependency"] or []]
    pieces += [(part["code_file_path"], part["code_block"]) for part in record["similar_functions"] or []]
    pieces.append((record["code_file_path"] + " (after the missing code)", record["suffix"] or ""))
    context = "\n\n".join(f"File: {path}\n{code}" for path, code in pieces if code and code.strip())
    prefix = record["prefix"] or ""
    return Row(context=context, question=prefix, answer=record["middle"] or "", task=TaskClass.CODE, id=id)


def _summary_of(column: str) -> Callable[[Record, str], Row | Reason]:
    def to_row(record: Record, id: str) -> Row | Reason:
        text, summary = record[column] or "", record["summary"] or ""
        return Row(context=text, question="", answer=summary, task=TaskClass.SUMMARIZATION, id=id)

    return to_row


def _released(record: Record, id: str) -> Row | Reason:
    """Rows of the released data; `metadata` is a dictionary or the text of one."""
    metadata = record["metadata"] or {}
    try:
        metadata = ast.literal_eval(metadata) if isinstance(metadata, str) else metadata
        task = parse_task_class(metadata.get("task", "none"))
    except (ValueError, SyntaxError, AttributeError):
        return Reason.UNKNOWN_TASK
    return Row(
        context=record["context"] or "",
        question=record["question"] or "",
        answer=record["answer"] or "",
        task=task,
        id=id,
        is_prefix=metadata.get("is_prefix") is not False,
    )


_VALIDATION: dict[Split, str] = {"train": "train", "heldout": "validation"}
_BY_NAME: dict[Split, str] = {"train": "train", "heldout": "valid|dev|test"}

HUB_SOURCES: dict[str, HubSource] = {
    "chatqa2": HubSource(
        columns=("question", "sub-paragraphs", "answer"),
        to_row=_chatqa2,
        hub=tuple(("nvidia/ChatQA2-Long-SFT-data", part, None) for part in ("long_sft", "NarrativeQA_131072")),
        splits={"train": "train", "heldout": "test"},
        files=_BY_NAME,
    ),
    "musique": HubSource(
        columns=("paragraphs", "question", "answer"),
        to_row=_musique,
        hub=(("dgslibisey/MuSiQue", None, None),),
        splits=_VALIDATION,
        files=_BY_NAME,
    ),
    "colt": HubSource(
        columns=("prefix", "middle", "suffix", "cross_file_dependency", "similar_functions", "code_file_path"),
        to_row=_colt,
        splits=_VALIDATION,
        files={"train": "sft_data", "heldout": "test_data"},
    ),
    "govreport": HubSource(
        columns=("report", "summary"),
        to_row=_summary_of("report"),
        hub=(("ccdv/govreport-summarization", "document", None),),
        splits=_VALIDATION,
        files=_BY_NAME,
    ),
    "xsum": HubSource(
        columns=("document", "summary"),
        to_row=_summary_of("document"),
        # The main branch holds a loading script, which `datasets` no longer runs.
        hub=(("EdinburghNLP/xsum", None, "refs/convert/parquet"),),
        splits=_VALIDATION,
        files=_BY_NAME,
    ),
    "released": HubSource(
        columns=("context", "question", "answer", "metadata"),
        to_row=_released,
        splits=_VALIDATION,
        files={"train": "", "heldout": "valid|dev|test"},
    ),
}


def load_hub_rows(name: str, path: str | None, split: Split, report: RejectionReport) -> Iterator[Row]:
    """Yields the rows of one source in its order.

    Args:
      name: a key of `HUB_SOURCES`.
      path: local file or folder; None reads from the hub.
      split: which part.
      report: receives the records that cannot become rows.

    Raises:
      ImportError: `datasets` is not installed.
      FileNotFoundError: `path` does not exist.
      ValueError: a source without hub copy and no path; no files of the split; an unreadable file; a missing column.
    """
    source = HUB_SOURCES[name]
    for where, open_records in _parts(name, source, path, split):
        for number, record in enumerate(_guarded(where, open_records)):
            if missing := [column for column in source.columns if column not in record]:
                raise ValueError(f"{where}, record {number}: no column {missing[0]!r}; found {', '.join(map(repr, record))}")
            id = str(record.get("id") or f"{name}:{where}:{number}")
            try:
                row = source.to_row(record, id)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{where}, record {number}: not in the layout of {name!r} ({error!r})") from error
            if isinstance(row, Reason):
                report.reject(row, id)
            else:
                yield row


def _parts(name: str, source: HubSource, path: str | None, split: Split) -> Iterator[tuple[str, Callable[[], Iterable[Any]]]]:
    """Yields (name for messages, function that opens the records) of each part of a split."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"source {name!r} needs the package `datasets`: pip install datasets") from error
    if path is None:
        if not source.hub:
            raise ValueError(f"source {name!r} has no copy on the hub: give a local one as {name}:PATH")
        for dataset, config, revision in source.hub:
            where = "/".join(filter(None, (dataset, config)))
            yield where, functools.partial(datasets.load_dataset, dataset, config, revision=revision, split=source.splits[split])
        return
    for file in _split_files(Path(path), source.files[split]):
        # Streaming: a local copy is read where it lies, without writing a second one into the cache.
        builder = "parquet" if file.suffix == ".parquet" else "json"
        yield str(file), functools.partial(datasets.load_dataset, builder, data_files=str(file), split="train", streaming=True)


def _split_files(path: Path, pattern: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    found = sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl", ".parquet"))
    files = [file for file in found if re.search(pattern, str(file.relative_to(path)))]
    if not files:
        names = ", ".join(str(file.relative_to(path)) for file in found[:10]) or "none"
        raise ValueError(f"{path}: no .json, .jsonl or .parquet file whose path matches {pattern!r}; found {names}")
    return files


def _guarded(where: str, open_records: Callable[[], Iterable[Record]]) -> Iterator[Record]:
    """The records; whatever their reader raises becomes a ValueError that says where."""
    number, iterator = 0, None
    while True:
        try:
            iterator = iter(open_records()) if iterator is None else iterator
            record = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # pyarrow, json and datasets each have their own
            raise ValueError(f"{where}: cannot be read after record {number} ({type(error).__name__}: {error})") from error
        yield record
        number += 1
