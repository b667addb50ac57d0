r"""GSM8K (https://arxiv.org/abs/2110.14168), MATH (https://arxiv.org/abs/2103.03874) and AIME 2024, without examples in the prompt.

The prompts are our own: the problem, then the demand for a last \boxed{}. How long an answer may be, and whether the model thinks
first, decides much of the result: `max_new_tokens` is room for an answer with its steps, and for a model that thinks it has to be
raised (`dataclasses.replace`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from elastic_jax.evaluation.math_equality import last_boxed
from elastic_jax.evaluation.metrics import parse_number
from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites.files import Located, Record, find_files, read_json, read_records, text, value

Benchmark = Literal["gsm8k", "math", "aime24"]
TASKS: tuple[Benchmark, ...] = ("gsm8k", "math", "aime24")

_STEPS = r"Solve the problem step by step, and end with"
_ENDING = {
    "gsm8k": rf"{_STEPS} the final number in \boxed{{}}.",
    "math": rf"{_STEPS} the final answer in \boxed{{}}.",
    "aime24": rf"{_STEPS} the final answer, a whole number from 0 to 999, in \boxed{{}}.",
}
_METRIC = {"gsm8k": "final_number", "math": "math_expression", "aime24": "final_integer"}
_GROUP = {"gsm8k": "GSM8K", "math": "MATH", "aime24": "AIME24"}
MAX_NEW_TOKENS: dict[str, int] = {"gsm8k": 1024, "math": 4096, "aime24": 32768}
_FILES: dict[str, Sequence[str]] = {
    "gsm8k": ["main/test-*.parquet", "*test*.jsonl", "*test*.parquet"],
    "math": ["*test*.jsonl", "*test*.parquet", "*test/*/*.json"],
    "aime24": ["*.jsonl", "*.parquet"],
}


def samples(source: str | Path, *, benchmark: Benchmark, k: int = 1, limit: int | None = None) -> list[Sample]:
    """The samples of one benchmark in the order of its files, `k` of each problem one after the other.

    In `extra`: the id of the problem (`question`), the same for its `k` samples; for MATH its level and subject, where they are given.

    Args:
      source: a folder with the test split, a .jsonl or .parquet file, or a hub id such as openai/gsm8k, HuggingFaceH4/MATH-500 or
        HuggingFaceH4/aime_2024; of MATH also the original folder, a .json file for each problem. Columns:
        question and answer (GSM8K), problem and solution (MATH), problem and answer (AIME24).
      benchmark: which one.
      k: samples of each problem, whose ids end in /0 to /k-1; their mean is the problem's score. Worth something with sampling only.
      limit: the first problems; None: all.

    Raises:
      FileNotFoundError: the source is not there.
      ValueError: an unknown benchmark, k below 1; a damaged file or record (names file, row and column).
    """
    if benchmark not in TASKS:
        raise ValueError(f"benchmark={benchmark!r}: accepted are {', '.join(TASKS)}")
    if k < 1:
        raise ValueError(f"k={k}: a whole number from 1 is needed")
    files = find_files(source, _FILES[benchmark])
    records = itertools.chain.from_iterable(_read_problem(file) if file.suffix == ".json" else read_records(file) for file in files)
    result = []
    for number, (where, record) in enumerate(itertools.islice(records, limit)):
        problem = text(record, "question" if benchmark == "gsm8k" else "problem", where).strip()
        reference = _reference(benchmark, record, where)
        extra: dict[str, Any] = {"question": f"{benchmark}/{number}", "prompt": "own"}
        extra |= {name: record[column] for column, name in _DESCRIBED.items() if record.get(column) is not None}
        result += [
            Sample(
                id=f"{benchmark}/{number}/{repeat}",
                task=benchmark,
                group=_GROUP[benchmark],
                prompt=f"{problem}\n\n{_ENDING[benchmark]}",
                references=(reference,),
                metric=_METRIC[benchmark],
                max_new_tokens=MAX_NEW_TOKENS[benchmark],
                extra=extra,
            )
            for repeat in range(k)
        ]
    return result


def folder_of(source: str | Path, benchmark: Benchmark) -> Path:
    """Where one benchmark lies in a folder with several: in a subfolder whose name begins like its own (in any case), else in the folder.

    Raises:
      ValueError: the subfolders hold other benchmarks, so that this one's files cannot be told from theirs.
    """
    names = {"gsm8k": "gsm8k", "math": "math", "aime24": "aime"}
    folders = {path.name.lower(): path for path in sorted(Path(source).iterdir(), reverse=True) if path.is_dir()}
    found = {task: [path for name, path in folders.items() if name.startswith(beginning)] for task, beginning in names.items()}
    if not found[benchmark] and any(found.values()):
        raise ValueError(f"{source} has no subfolder for {benchmark}: name one {benchmark}, or leave it out (--tasks)")
    return found[benchmark][-1] if found[benchmark] else Path(source)


def _read_problem(path: Path) -> Iterator[Located]:
    record = read_json(path)
    if not isinstance(record, dict):
        raise ValueError(f"{path}: a problem is needed, an object; found {type(record).__name__}")
    yield str(path), record


_DESCRIBED = {"level": "level", "type": "subject", "subject": "subject"}


def _reference(benchmark: Benchmark, record: Record, where: str) -> str:
    if benchmark == "math":
        boxed = last_boxed(text(record, "solution", where))
        if boxed is None:
            raise ValueError(f"{where}: column 'solution' has no \\boxed{{}}")
        return boxed
    if benchmark == "gsm8k":
        _, mark, reference = text(record, "answer", where).rpartition("####")
        if not mark or parse_number(reference) is None:
            raise ValueError(f"{where}: column 'answer' has no number after ####")
        return reference.strip()
    found = value(record, "answer", where)
    number = parse_number(str(found)) if isinstance(found, int | str) else None
    if number is None or number != int(number) or not 0 <= number <= 999:
        raise ValueError(f"{where}: column 'answer' holds {found!r}, a whole number from 0 to 999 is needed")
    return str(int(number))
