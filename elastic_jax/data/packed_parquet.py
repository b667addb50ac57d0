"""The authors' packed layout: a parquet table whose rows are packs of tokenised documents.

  input_ids: tokens of all documents, one after the other.
  labels: the same tokens, not shifted: a token's label is the token itself, or -100 where its prediction does not count (the first
    token of each document; in files made for "sft", the whole user turn).
  seq_lengths: where documents begin, and the end of the last: 0, n0, n0 + n1, ...
  task_ids: class of each document; 5 stands for any other.
  task_type: the class's name; not read.
  range_ids: eight numbers per document, from its start, ends inclusive: the last four are the user turn and what follows it.

Documents are taken out of their packs, since ours start on block boundaries. The answer's range begins right after the user turn,
at the assistant's header, and includes everything to the document's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elastic_jax.data.chat import length_fault
from elastic_jax.data.documents import Document
from elastic_jax.data.rows import Reason, RejectionReport
from elastic_jax.data.tasks import NUM_TASK_CLASSES, TaskClass

_COLUMNS = ("input_ids", "labels", "seq_lengths", "task_ids", "range_ids")
_IGNORED = -100


def read_packed(path: Path, *, report: RejectionReport, max_tokens: int, min_tokens: int = 1) -> Iterator[Document]:
    """Yields the documents of a packed file, in its order.

    Args:
      path: the parquet file.
      report: receives documents of unknown class or unfit length and counts the kept ones.
      max_tokens: longest document.
      min_tokens: shortest document.

    Raises:
      ImportError: `pyarrow` is not installed.
      ValueError: an unreadable file, a missing column, or a row that contradicts itself; names file and row.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path}: parquet files need the package `pyarrow`: pip install pyarrow") from error
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            if missing := [column for column in _COLUMNS if column not in file.schema_arrow.names]:
                raise ValueError(f"{path}: no column {missing[0]!r}; found {', '.join(map(repr, file.schema_arrow.names))}")
            for column in _COLUMNS:
                kind = file.schema_arrow.field(column).type
                if _integer_lists(kind) != (2 if column == "range_ids" else 1):
                    needed = "lists of lists of integers" if column == "range_ids" else "lists of integers"
                    raise ValueError(f"{path}: column {column!r} has type {kind}: accepted are {needed}")
            for batch in file.iter_batches(batch_size=1, columns=list(_COLUMNS)):
                pack = {name: batch.column(name)[0].values for name in _COLUMNS}
                for number, document in enumerate(_split(pack, f"{path}, row {row}")):
                    id = f"{path.name}:{row}:{number}"
                    if document is None:
                        report.reject(Reason.UNKNOWN_TASK, id)
                    elif fault := length_fault(len(document["tokens"]), min_tokens, max_tokens):
                        report.reject(fault, id)
                    else:
                        report.kept += 1
                        yield Document(**document, id=id)
                row += 1
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: cannot be read at row {row} ({error})") from error


def _integer_lists(kind: Any) -> int | None:
    """How many lists deep a pyarrow type has its integers; None where it has none."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inside = _integer_lists(kind.value_type)
        return None if inside is None else inside + 1
    return 0 if pa.types.is_integer(kind) else None


def _split(pack: dict[str, Any], where: str) -> Iterator[dict[str, Any] | None]:
    """Yields each document's fields but its id, or None for one of unknown class; `pack` holds pyarrow arrays."""
    if any(pack[name] is None or pack[name].null_count for name in _COLUMNS):
        raise ValueError(f"{where}: a value is missing")
    tokens, labels, starts, tasks = (pack[name].to_numpy(zero_copy_only=False) for name in _COLUMNS[:4])
    try:
        ranges = np.array(pack["range_ids"].to_pylist(), np.int64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: range_ids must be lists of 8 numbers, one for each document") from error
    if ranges.ndim != 2:
        raise ValueError(f"{where}: range_ids must be lists of 8 numbers, one for each document")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**31:
        raise ValueError(f"{where}: input_ids from {tokens.min()} to {tokens.max()}: token ids lie from 0 to 2**31 - 1")
    if len(labels) != len(tokens):
        raise ValueError(f"{where}: {len(tokens)} input_ids but {len(labels)} labels")
    labelled = labels != _IGNORED
    if not np.array_equal(labels[labelled], tokens[labelled]):
        raise ValueError(f"{where}: a label is neither its own token nor {_IGNORED}")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(tokens) or np.any(np.diff(starts) < 1):
        raise ValueError(f"{where}: seq_lengths {starts.tolist()} do not rise from 0 to the {len(tokens)} input_ids")
    if len(tasks) != len(starts) - 1 or ranges.shape != (len(tasks), 8):
        raise ValueError(f"{where}: {len(starts) - 1} documents but task_ids {tasks.shape} and range_ids {ranges.shape}")
    for start, end, task, range_ids in zip(starts[:-1], starts[1:], tasks, ranges):
        user_start, user_last, answer_start, answer_last = range_ids[4:].tolist()
        if not 0 <= user_start <= user_last < answer_start <= answer_last < end - start:
            raise ValueError(f"{where}: range_ids {range_ids.tolist()} do not lie within a document of {end - start} tokens")
        if not 0 <= task < NUM_TASK_CLASSES:
            yield None
            continue
        yield {
            "tokens": tokens[start:end].astype(np.int32),
            "labelled": labelled[start:end],
            "user_turn": (user_start, user_last + 1),
            "answer": (answer_start, answer_last + 1),
            "task": TaskClass(int(task)),
        }
