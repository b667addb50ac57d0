"""LongBench-v2 (https://arxiv.org/abs/2412.15204): 503 questions with four options over texts of 8 thousand to 2 million words.

Zero-shot without reasoning, as in the paper's tables. The prompt is re-worded, keeping its recipe: the text between tags, the question,
lettered options, and the sentence that the answer is to be. The benchmark samples at temperature 0.1 and leaves out requests whose
answer was empty; here decoding is the runner's (greedy unless told otherwise) and an empty answer is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites.files import Record, choice, find_files, read_records, text

TASKS = ("longbench_v2_easy", "longbench_v2_hard")
MAX_NEW_TOKENS: dict[str, int] = dict.fromkeys(TASKS, 128)
_LETTERS = ("A", "B", "C", "D")


def samples(source: str | Path, *, tasks: Sequence[str] | None = None, limit: int | None = None) -> list[Sample]:
    """The samples of LongBench-v2 in the file's order; easy and hard questions are a task and a group each.

    `Sample.length` is "short", "medium" or "long". In `extra`: the record's `_id`, difficulty, domain and sub_domain.

    Args:
      source: a folder with data.json or the parquet files of the split `train`, such a file, or a hub id such as zai-org/LongBench-v2.
      tasks: of `TASKS`; None: both.
      limit: the first records of each task; None: all.

    Raises:
      FileNotFoundError: the source is not there.
      ValueError: an unknown task; a damaged file or record (names file, row and column).
    """
    for task in (tasks := TASKS if tasks is None else tasks):
        if task not in TASKS:
            raise ValueError(f"tasks has {task!r}: accepted are {', '.join(TASKS)}")
    files = find_files(source, ["*data.json", "*train*.parquet"])
    found, left = [], {task: float("inf") if limit is None else limit for task in tasks}
    for number, (where, record) in enumerate(itertools.chain.from_iterable(map(read_records, files))):
        if not any(left.values()):
            break
        sample = _sample(number, where, record)
        if left.get(sample.task):
            found.append(sample)
            left[sample.task] -= 1
    return found


def _sample(number: int, where: str, record: Record) -> Sample:
    options = "\n".join(f"({letter}) {text(record, f'choice_{letter}', where)}" for letter in _LETTERS)
    difficulty = choice(record, "difficulty", where, ("easy", "hard"))
    return Sample(
        id=f"longbench_v2/{number}",
        task=f"longbench_v2_{difficulty}",
        group=difficulty.capitalize(),
        prompt=(
            f"Read this text, then choose the right answer to a question about it.\n\n<text>\n{text(record, 'context', where).strip()}\n"
            f"</text>\n\nQuestion: {text(record, 'question', where).strip()}\nOptions:\n{options}\n\n"
            'Reply in this form: "The correct answer is (letter)".'
        ),
        references=(choice(record, "answer", where, _LETTERS),),
        metric="multiple_choice",
        max_new_tokens=MAX_NEW_TOKENS[f"longbench_v2_{difficulty}"],
        length=choice(record, "length", where, ("short", "medium", "long")),
        extra={"difficulty": difficulty, "prompt": "re-worded"}
        | {column: text(record, column, where) for column in ("_id", "domain", "sub_domain")},
    )
