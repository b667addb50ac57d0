"""Files of one run that a kill or a full disk leaves usable: replaced as a whole, or JSON lines that it appends to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def lock(file: Path, taken: str) -> IO[bytes]:
    """Keeps a file, made if absent, for this process until the result is closed; ValueError that says `taken` where another has it."""
    stream = file.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise ValueError(taken) from error
    return stream


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, whose place it takes if nothing fails: what was there stays whole until then."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _named(path):
            partial.unlink(missing_ok=True)  # of a process with the same number that was killed
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def append_lines(file: Path, *records: dict[str, Any]) -> None:
    """Appends a line for each record; they are with the system when it returns."""
    with _named(file), file.open("ab") as stream:
        stream.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def read_lines(file: Path, begins: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The finished lines: where each is, for messages, and its object.

    Args:
      begins: what all lines of the file begin with. A last one without a line break, as a kill leaves it, is passed over if it does;
        zeros too, as a loss of power leaves them.

    Raises:
      ValueError: a line holds no JSON object, or text that UTF-8 cannot hold; the last one is neither finished nor begun.
    """
    *lines, rest = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair could not be written into a report
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is damaged: a JSON object is needed") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is damaged: a JSON object is needed, found {type(record).__name__}")
        yield where, record
    rest = rest.rstrip(b"\0")
    if rest[: len(begins)] != begins[: len(rest)]:
        where = f"{file}, line {len(lines) + 1}"
        raise ValueError(f"{where} has no line break and does not begin as this run's do: remove it to go on with this file")


def drop_unfinished_line(file: Path) -> None:
    """Removes what follows the last line break."""
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with file.open("r+b") as stream:
            stream.truncate(end)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Puts the file's name into an error of the system that has none, as that a disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(file)) from error
        raise
