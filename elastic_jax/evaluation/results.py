"""A folder of results: one JSON line per answered sample, a file per task, and what made them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_RUN, _TIMINGS = "run.json", "timings"


class ResultsFolder:
    """Writes results, in a `with` statement: `TASK.jsonl`, `timings.jsonl` of the batches, and `run.json`.

    A folder belongs to one run: the same model, heads, generation and protocol. Which samples, and in what batches, may change. It can
    be left at any moment: a line that was not finished is dropped when the folder is opened again.

    Args:
      path: made if absent.
      settings: JSON values that decide what the answers are.
      environment: JSON values worth knowing that do not, such as the device; those of the last run are kept.

    Raises:
      ValueError: the folder holds results of other settings (each that differs is named) or a damaged file, or is in use.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], environment: dict[str, Any]) -> None:
        self.path = Path(path)
        settings = json.loads(json.dumps(settings))
        self._run = _settings_hash(settings)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ValueError(f"{path} is in use by another evaluation") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be a folder of results: {error.strerror}") from error
        try:
            self._check(settings)
            for file in self.path.glob("*.jsonl"):
                _drop_unfinished_line(file)
            file = self.path / _RUN
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps({"settings": settings, "environment": environment}, indent=2) + "\n")
            partial.rename(file)
        except BaseException:
            self._lock.close()
            raise

    def _check(self, settings: dict[str, Any]) -> None:
        if (self.path / _RUN).exists():
            old = read_run(self.path)["settings"]
            names = sorted(old.keys() | settings.keys())
            differing = [f"{n}: {old.get(n)!r} there, {settings.get(n)!r} now" for n in names if old.get(n) != settings.get(n)]
            if differing:
                raise ValueError(f"{self.path} holds results of other settings ({'; '.join(differing)}): give another folder")
        self.records = read_records(self.path)
        for record in self.records:
            if record["run"] != self._run:
                file = self.path / f"{record['task']}.jsonl"
                raise ValueError(f"{file} has results of other settings (run {record['run']}, now {self._run}): give another folder")

    def add(self, records: Sequence[Record], timing: Record) -> None:
        """Appends a batch's results and its timing."""
        for record in records:
            if not re.fullmatch(r"[\w.-]+", record["task"]) or record["task"] == _TIMINGS:
                raise ValueError(f"task {record['task']!r} is no name for a file: accepted are letters, digits and . _ -")
            record = record | {"run": self._run}
            _append(self.path / f"{record['task']}.jsonl", record)
            self.records.append(record)
        _append(self.path / f"{_TIMINGS}.jsonl", timing)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_run(path: str | Path) -> dict[str, Any]:
    """The settings and the environment of a folder of results; ValueError where it is none."""
    file = Path(path) / _RUN
    if not file.exists():
        raise ValueError(f"{path} holds no results: {_RUN} is missing")
    try:
        run = json.loads(file.read_text())
        assert run["settings"].keys() | run["environment"].keys()
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{file} is damaged: an object with settings and environment is needed") from error
    return run


def read_records(path: str | Path) -> list[Record]:
    """All finished results of a folder, by task and then by sample."""
    files = sorted(file for file in Path(path).glob("*.jsonl") if file.stem != _TIMINGS)
    return [record for file in files for record in sorted(_read_lines(file), key=lambda record: record["id"])]


def read_timings(path: str | Path) -> list[Record]:
    """The batches of a folder, in the order in which they ran."""
    file = Path(path) / f"{_TIMINGS}.jsonl"
    return _read_lines(file) if file.exists() else []


def _settings_hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _append(file: Path, record: Record) -> None:
    with file.open("ab") as stream:  # closed, so with the system, before the next batch begins
        stream.write((json.dumps(record) + "\n").encode())


def _drop_unfinished_line(file: Path) -> None:
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with file.open("r+b") as stream:
            stream.truncate(end)


def _read_lines(file: Path) -> list[Record]:
    records = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}: line {number} is damaged") from error
        records.append(record)
    return records
