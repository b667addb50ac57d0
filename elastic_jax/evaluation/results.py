"""A folder of results: one JSON line per answered sample, a file per task, and what made them."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_jax.checks import differences
from elastic_jax.files import append_lines, drop_unfinished_line, lock, read_lines, replacing

Record = dict[str, Any]

_RUN, _TIMINGS = "run.json", "timings"
_TIMING_BEGINS = b'{"length": '

_Field = tuple[str, Callable[[Any], bool]]  # what is accepted, and whether a value is


def _number(value: Any, most: float = sys.float_info.max) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_TEXT: _Field = ("a text", lambda value: isinstance(value, str))
_COUNT: _Field = ("a whole number from 0", _whole)
_SOME: _Field = ("a whole number from 1", lambda value: _whole(value, 1))
_SHARE: _Field = ("a number from 0 to 1", lambda value: _number(value, most=1.0))
_AMOUNT: _Field = ("a number from 0", _number)
_LENGTH: _Field = ("a text, a whole number from 0 or null", lambda value: value is None or isinstance(value, str) or _whole(value))
_OBJECT: _Field = ("an object", lambda value: isinstance(value, dict))
_SHARES: _Field = (
    "an object of numbers from 0 to 1",
    lambda value: isinstance(value, dict) and all(_number(score, most=1.0) for score in value.values()),
)

_RECORD_FIELDS: dict[str, _Field] = {
    **dict.fromkeys(("run", "id", "question", "task", "group", "prompt", "pred", "metric", "finish_reason"), _TEXT),
    "length": _LENGTH,
    "answer": ("a list", lambda value: isinstance(value, list)),
    "score": _SHARE,
    "scores": _SHARES,
    "msr": _SHARE,
    "esr": ("a number from 0 to 1 or null", lambda value: value is None or _number(value, most=1.0)),
    "LEN": _SOME,
    "cut_tokens": _COUNT,
    "new_tokens": _COUNT,
    "extra": _OBJECT,
}
_TIMING_FIELDS: dict[str, _Field] = {
    "length": _LENGTH,
    "rows": _SOME,
    "padded_tokens": _SOME,
    "prefill_seconds": ("a number above 0", lambda value: _number(value) and value > 0),
    "decode_seconds": _AMOUNT,
    "steps": _COUNT,
    "cache_mib": _AMOUNT,
    "prompt_tokens": _SOME,
    "first": ("true or false", lambda value: isinstance(value, bool)),
}


class ResultsFolder:
    """Writes results, in a `with` statement: `TASK.jsonl`, `timings.jsonl` of the batches, and `run.json`.

    A folder belongs to one run: the same model, heads, generation and protocol. Which samples, and in what batches, may change. It can
    be left at any moment: a line that was not finished is dropped when the folder is opened again.

    Args:
      path: made if absent.
      settings: JSON values that decide what the answers are.
      environment: JSON values worth knowing that do not, such as the device; those of the last run are kept.

    Raises:
      ValueError: the folder holds results of other settings (each that differs is named), .jsonl files that are no results or a damaged
        one, or is in use. Nothing in it has been changed then.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], environment: dict[str, Any]) -> None:
        self.path = Path(path)
        settings = json.loads(json.dumps(settings))
        self._run = _settings_hash(settings)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / ".lock", f"{path} is in use by another evaluation")
        except OSError as error:
            raise ValueError(f"{path} cannot be a folder of results: {error.strerror}") from error
        try:
            self._check(settings)
            for file in self.path.glob("*.jsonl"):
                drop_unfinished_line(file)
            self._content |= {"settings": settings, "environment": environment}
            self._write()
        except BaseException:
            self._lock.close()
            raise

    def _check(self, settings: dict[str, Any]) -> None:
        self.records: list[Record] = []
        self._content: dict[str, Any] = {}
        if (self.path / _RUN).exists():
            self._content = read_run(self.path)
            old = self._content["settings"]
            if differing := differences(old, settings):
                raise ValueError(f"{self.path} holds results of other settings ({differing}): give another folder")
            self.records = read_records(self.path)
            read_timings(self.path)
        elif others := sorted(file.name for file in self.path.glob("*.jsonl")):
            raise ValueError(f"{self.path} holds {others[0]}, but no {_RUN}, so it is no folder of results: give another folder")

    def _write(self) -> None:
        with replacing(self.path / _RUN) as file:
            file.write_text(json.dumps(self._content, indent=2) + "\n")

    def expect(self, names: Iterable[str]) -> None:
        """Notes how many answers there will be when all samples of these ids are answered: until then the report says how many lack."""
        self._content["expected"] = len({record["id"] for record in self.records}.union(names))
        self._write()

    def add(self, records: Sequence[Record], timing: Record) -> None:
        """Appends a batch's results and its timing."""
        for record in records:
            if not re.fullmatch(r"[\w.-]+", record["task"]) or record["task"] == _TIMINGS:
                raise ValueError(f"task {record['task']!r} is no name for a file: accepted are letters, digits and . _ -")
            record = {"run": self._run} | record
            append_lines(self.path / f"{record['task']}.jsonl", record)
            self.records.append(record)
        append_lines(self.path / f"{_TIMINGS}.jsonl", timing)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_run(path: str | Path) -> dict[str, Any]:
    """The settings, of which `suite` is one, the environment and, once it is known, the `expected` number of answers of a folder of
    results; ValueError where it is none."""
    file = Path(path) / _RUN
    if not file.exists():
        raise ValueError(f"{path} holds no results: {_RUN} is missing")
    try:
        run = json.loads(file.read_bytes())
        good = isinstance(run["settings"]["suite"], str) and isinstance(run["environment"], dict) and _whole(run.get("expected", 0))
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise ValueError(f"{file} is damaged: an object with settings, among them the suite, environment and a number expected is needed")
    return run


def read_records(path: str | Path) -> list[Record]:
    """All finished results of a folder, by task and then by sample.

    Raises:
      ValueError: the folder is none of results, or a line in it is no result of this run, or a second one of a sample (names file, line
        and what is accepted).
    """
    run = _settings_hash(read_run(path)["settings"])
    records: dict[str, Record] = {}
    places: dict[str, str] = {}
    for file in sorted(file for file in Path(path).glob("*.jsonl") if file.stem != _TIMINGS):
        found = []
        for where, record in _checked_lines(file, _RECORD_FIELDS, _record_begins(run)):
            name = record["id"]
            if record["task"] != file.stem:
                raise ValueError(f"{where}: {name!r} is of the task {record['task']!r}: {file.name} is for results of {file.stem!r}")
            if record["run"] != run:
                raise ValueError(f"{where}: {name!r} is a result of other settings (run {record['run']}, the folder is of {run})")
            if name in places:
                raise ValueError(f"{where}: {name!r} has a result already, in {places[name]}: one for each id is accepted")
            places[name] = where
            found.append(record)
        records |= {record["id"]: record for record in sorted(found, key=lambda record: record["id"])}
    return list(records.values())


def read_timings(path: str | Path) -> list[Record]:
    """The batches of a folder, in the order in which they ran; ValueError as `read_records`."""
    file = Path(path) / f"{_TIMINGS}.jsonl"
    return [timing for _, timing in _checked_lines(file, _TIMING_FIELDS, _TIMING_BEGINS)] if file.exists() else []


def _settings_hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _record_begins(run: str) -> bytes:
    return json.dumps({"run": run, "id": ""}).encode().removesuffix(b'"}')


def _checked_lines(file: Path, fields: dict[str, _Field], begins: bytes) -> Iterator[tuple[str, Record]]:
    """The finished lines and where each is, with the values that `fields` accepts."""
    for where, record in read_lines(file, begins):
        which = f" ({record['id']!r})" if isinstance(record.get("id"), str) else ""
        for name, (accepted, accepts) in fields.items():
            if name not in record:
                raise ValueError(f"{where}{which} has no {name!r}: {accepted} is needed")
            if not accepts(record[name]):
                shown = repr(record[name])
                shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
                raise ValueError(f"{where}{which} has {name}={shown}: {accepted} is needed")
        yield where, record
