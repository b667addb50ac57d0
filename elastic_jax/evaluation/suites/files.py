"""A benchmark's own files: found in a folder or on the hub, read record by record, and checked value by value."""

from __future__ import annotations

import fnmatch
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_jax.checks import check_text

Record = dict[str, Any]
Located = tuple[str, Record]  # where a record lies, for messages, and the record


def find_files(source: str | Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a benchmark.

    Args:
      source: a file, which is taken as it is; a folder, which is searched with all that is inside it; or a hub id `organisation/name`
        of a data set.
      patterns: of paths inside the folder, `*` standing for any text; the first pattern that any file matches is the one that counts.

    Raises:
      FileNotFoundError: nothing there, no file matches, or the hub cannot be reached.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or path.suffix in (".json", ".jsonl", ".parquet", ".zip"):
            raise FileNotFoundError(f"{source} does not exist: give a folder, a file, or a hub id organisation/name")
        path = _download(str(source), patterns)
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    for pattern in patterns:
        if matching := [file for name, file in files.items() if fnmatch.fnmatchcase(name, pattern)]:
            return matching
    found = ", ".join(list(files)[:10]) or "none"
    raise FileNotFoundError(f"{source} holds no file that matches {' or '.join(patterns)}; found {found}")


def _download(repository: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as error:  # the hub's, the HTTP client's and the system's errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"{repository!r} is not a local path and could not be had from the Hugging Face hub ({reason}): give the path of a folder "
            f"with the benchmark's files instead"
        ) from error


def read_records(path: Path) -> Iterator[Located]:
    """Yields the records of a .jsonl or .parquet file, or of a .json file that holds a list, in their order.

    Raises:
      ValueError: another kind of file, a damaged one, one without records, or a record that is none; names file and row.
    """
    readers = {".jsonl": _read_jsonl_file, ".json": _read_list, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: a {', '.join(readers)} file is needed")
    yield from _some(path, readers[path.suffix](path))


def read_zipped_jsonl(path: Path, member: str) -> Iterator[Located]:
    """As `read_records`, for a .jsonl file inside a .zip file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as lines:
            yield from _some(f"{path}/{member}", _read_jsonl(lines, f"{path}/{member}"))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(f"{path}/{member}: cannot be read ({error})") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file; ValueError where it is damaged, naming file and place."""
    content = path.read_bytes()
    try:
        # A byte that is no UTF-8 becomes half a surrogate pair, which `text` finds and whose place it can name.
        return json.loads(content.decode("utf-8-sig", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {_no_json(content, error)}") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, or lists in lists in lists
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def text(record: Record, column: str, where: str, *, empty: bool = False) -> str:
    """The text of a column.

    Raises:
      ValueError: there is none, it is no text, is not valid UTF-8 or, unless `empty`, has nothing but white space; names the place and
        the column.
    """
    found = value(record, column, where)
    if not isinstance(found, str):
        raise ValueError(f"{where}: column {column!r} holds {type(found).__name__}, a text is needed")
    check_text(f"{where}: column {column!r}", found)
    if not empty and not found.strip():
        raise ValueError(f"{where}: column {column!r} is empty")
    return found


def value(record: Record, column: str, where: str) -> Any:
    """What a column holds; ValueError where there is no such column, naming the place and the column."""
    if column not in record:
        raise ValueError(f"{where}: no column {column!r}; found {', '.join(map(repr, record)) or 'none'}")
    return record[column]


def texts(record: Record, column: str, where: str) -> tuple[str, ...]:
    """The texts of a column that holds a list of them, at least one; errors as `text`."""
    found = value(record, column, where)
    if not isinstance(found, list) or not found or not all(isinstance(part, str) and part.strip() for part in found):
        raise ValueError(f"{where}: column {column!r} holds {_brief(found)}, a list of texts is needed")
    for part in found:
        check_text(f"{where}: column {column!r}", part)
    return tuple(found)


def as_record(found: Any, where: str) -> Record:
    """`found`, which must be an object; ValueError that names the place otherwise."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: an object with named values is needed, found {type(found).__name__}")
    return found


def records(record: Record, column: str, where: str) -> list[Located]:
    """The objects of a column that holds a list of them, possibly none; errors as `text`."""
    found = value(record, column, where)
    if not isinstance(found, list):
        raise ValueError(f"{where}: column {column!r} holds {_brief(found)}, a list of objects is needed")
    return [(place, as_record(one, place)) for place, one in ((f"{where}, {column} {i}", one) for i, one in enumerate(found))]


def choice(record: Record, column: str, where: str, accepted: Sequence[str]) -> str:
    """The text of a column that holds one of few; errors as `text`."""
    found = text(record, column, where)
    if found not in accepted:
        raise ValueError(f"{where}: column {column!r} holds {_brief(found)}: accepted are {', '.join(accepted)}")
    return found


def _brief(found: Any) -> str:
    shown = repr(found)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _some(where: str | Path, records: Iterator[Located]) -> Iterator[Located]:
    empty = True
    for located in records:
        empty = False
        yield located[0], as_record(located[1], located[0])
    if empty:
        raise ValueError(f"{where}: no records")


def _read_jsonl_file(path: Path) -> Iterator[Located]:
    with path.open("rb") as lines:
        yield from _read_jsonl(lines, str(path))


def _read_jsonl(lines: Iterable[bytes], path: str) -> Iterator[Located]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {_no_json(line, error)}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: cannot be read as JSON ({error})") from error
        yield f"{path}:{number}", record


def _no_json(content: bytes, error: json.JSONDecodeError) -> str:
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as undecodable:
        return f"not valid UTF-8 (at byte {undecodable.start}), and no JSON"
    return f"not valid JSON ({error.msg} at character {error.colno})"


def _read_list(path: Path) -> Iterator[Located]:
    records = read_json(path)
    if not isinstance(records, list):
        raise ValueError(f"{path}: a list of records is needed, found {type(records).__name__}")
    for row, record in enumerate(records):
        yield f"{path}, row {row}", record


def _read_parquet(path: Path) -> Iterator[Located]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path}: parquet files need the package `pyarrow`: pip install pyarrow") from error
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{path}: column {twice[0]!r} is there twice")
            for batch in file.iter_batches(batch_size=64):
                for index in range(batch.num_rows):
                    record = {}
                    for name, column in zip(batch.schema.names, batch.columns, strict=True):
                        try:
                            record[name] = column[index].as_py()
                        except UnicodeDecodeError as error:
                            raise ValueError(f"{path}, row {row}: column {name!r} is not valid UTF-8 ({error.reason})") from error
                        except (ValueError, OverflowError) as error:  # a date that Python has not
                            raise ValueError(f"{path}, row {row}: column {name!r} cannot be read ({error})") from error
                    yield f"{path}, row {row}", record
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read at row {row} ({' '.join(str(error).split())})") from error
