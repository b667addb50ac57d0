"""LongBench-E (https://arxiv.org/abs/2308.14508): 13 tasks whose samples are spread over three ranges of length.

The prompts are re-worded, keeping each recipe: what is asked stands before and after the context, answers begin after "Answer:" or
"Summary:", examples stand in the context, code ends where its next line begins. The benchmark's own dataset2prompt.json can be given
instead, and is needed to repeat published numbers to the point.

Two things are the runner's: prompts that are too long lose their middle, and decoding is greedy.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites.files import Located, Record, find_files, read_json, read_records, read_zipped_jsonl, text, texts, value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """A task; `prompt` with the places {context} and {input}; `has_input`: records have one."""

    group: str
    metric: str
    max_new_tokens: int
    prompt: str
    chat: bool = True
    first_line: bool = False
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()

    @property
    def has_input(self) -> bool:
        return "{input}" in self.prompt


_SHORT = "Reply with the answer alone and nothing else."


def _qa(intro: str, rule: str) -> str:
    return f"{intro} {rule}\n\n{{context}}\n\n{intro} {rule}\n\nQuestion: {{input}}\nAnswer:"


_PASSAGES = _qa("Use the passages to answer a question.", _SHORT)

_TASKS = {
    "qasper": _Task(
        group="Single-Doc QA",
        metric="qa_f1",
        max_new_tokens=128,
        prompt=_qa(
            "Answer a question about a scientific article.",
            "Be as brief as possible: a phrase, or one sentence. To a yes/no question reply yes, no or unanswerable, and write "
            "unanswerable whenever the article does not say. Explain nothing.",
        ),
    ),
    "multifieldqa_en": _Task(
        group="Single-Doc QA",
        metric="qa_f1",
        max_new_tokens=64,
        prompt=_qa("Answer a question about the text briefly.", _SHORT),
    ),
    "hotpotqa": _Task(group="Multi-Doc QA", metric="qa_f1", max_new_tokens=32, prompt=_PASSAGES),
    "2wikimqa": _Task(group="Multi-Doc QA", metric="qa_f1", max_new_tokens=32, prompt=_PASSAGES),
    "gov_report": _Task(
        group="Summarization",
        metric="rouge_l",
        max_new_tokens=512,
        prompt="Summarize the following government report on one page.\n\nReport:\n{context}\n\nSummarize this report on one page."
        "\n\nSummary:",
    ),
    "multi_news": _Task(
        group="Summarization",
        metric="rouge_l",
        max_new_tokens=512,
        prompt="Summarize the following news articles together on one page.\n\nNews:\n{context}\n\n"
        "Summarize all of this news on one page.\n\nSummary:",
    ),
    "trec": _Task(
        group="In-Context",
        metric="classification",
        max_new_tokens=64,
        prompt="Name the type of the last question, as these examples do.\n\n{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": _Task(
        group="In-Context",
        metric="qa_f1",
        max_new_tokens=32,
        prompt=f"Answer the question about the passage. {_SHORT} Some examples come first.\n\n{{context}}\n\n{{input}}",
        chat=False,
        first_line=True,
    ),
    "samsum": _Task(
        group="In-Context",
        metric="rouge_l",
        max_new_tokens=128,
        prompt="Sum up the dialogue in a few short sentences. Some examples come first.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
        min_new_tokens=1,  # a line break ends the answer, but not before it begins
        stop=("\n",),
    ),
    "passage_count": _Task(
        group="Synthetic",
        metric="number_fraction",
        max_new_tokens=32,
        prompt="Below are paragraphs from Wikipedia, some of which may be repeated. Read them and find out how many different ones there "
        "are, each repeated paragraph counting once.\n\n{context}\n\nHow many different paragraphs are there? Reply with the number alone, "
        "such as 1, 2, 3.\n\nThe number is:",
    ),
    "passage_retrieval_en": _Task(
        group="Synthetic",
        metric="number_fraction",
        max_new_tokens=32,
        prompt="Below are 30 paragraphs from Wikipedia and an abstract of one of them. Find out which one.\n\n{context}\n\n"
        'This is the abstract:\n\n{input}\n\nWhich paragraph is it of? Reply in the form "Paragraph 1", "Paragraph 2".\n\nThe answer is:',
    ),
    "lcc": _Task(
        group="Code",
        metric="code_similarity",
        max_new_tokens=64,
        prompt="Write the line that comes next in this code.\n{context}The next line:\n",
        chat=False,
    ),
    "repobench-p": _Task(
        group="Code",
        metric="code_similarity",
        max_new_tokens=64,
        prompt="Write the line that comes next in this code.\n{context}{input}The next line:\n",
        chat=False,
    ),
}

TASKS = tuple(_TASKS)
MAX_NEW_TOKENS: dict[str, int] = {name: task.max_new_tokens for name, task in _TASKS.items()}
MIN_NEW_TOKENS: dict[str, int] = {name: task.min_new_tokens for name, task in _TASKS.items() if task.min_new_tokens}


def samples(
    source: str | Path, *, tasks: Sequence[str] | None = None, limit: int | None = None, prompts: str | Path | None = None
) -> list[Sample]:
    """The samples of LongBench-E, each task's in its file's order.

    `Sample.length` is the range of the record's `length` in words: "0-4k", "4-8k" or "8k+". In `extra`: the record's `_id`, its words,
    whose prompt it is, and what the metric needs.

    Args:
      source: a folder with TASK_e.jsonl files or data.zip, such a file, or a hub id such as zai-org/LongBench.
      tasks: of `TASKS`; None: all.
      limit: the first records of each task; None: all.
      prompts: the benchmark's dataset2prompt.json; None: the prompts here.

    Raises:
      FileNotFoundError: the source, or a task's file in it, is not there.
      ValueError: an unknown task; a damaged file or record (names file, row and column); a prompt without its places.
    """
    for task in (tasks := TASKS if tasks is None else tasks):
        if task not in _TASKS:
            raise ValueError(f"tasks has {task!r}: accepted are {', '.join(TASKS)}")
    templates = {task: _TASKS[task].prompt if prompts is None else _own_prompt(Path(prompts), task) for task in tasks}
    files = find_files(source, ["*_e.jsonl", "*data.zip"])
    return [
        _sample(task, number, where, record, templates[task], "re-worded" if prompts is None else "dataset2prompt")
        for task in tasks
        for number, (where, record) in enumerate(itertools.islice(_records(source, files, task), limit))
    ]


def _records(source: str | Path, files: Sequence[Path], task: str) -> Iterator[Located]:
    name = f"{task}_e.jsonl"
    for file in files:
        if file.name == name:
            return read_records(file)
        if file.suffix == ".zip":
            try:
                with zipfile.ZipFile(file) as archive:
                    members = [member for member in archive.namelist() if member.rsplit("/", 1)[-1] == name]
            except zipfile.BadZipFile as error:
                raise ValueError(f"{file}: cannot be read ({error})") from error
            if members:
                return read_zipped_jsonl(file, members[0])
    raise FileNotFoundError(f"{source} holds no {name}; found {', '.join(sorted(file.name for file in files))}")


def _own_prompt(path: Path, task: str) -> str:
    templates = read_json(path)
    template = text(templates, task, str(path)) if isinstance(templates, dict) else ""
    needed = ["{context}"] + ["{input}"] * (_TASKS[task].has_input)
    if missing := [place for place in needed if place not in template]:
        raise ValueError(f"{path}: the prompt of {task!r} has no {missing[0]}")
    return template


def _sample(task: str, number: int, where: str, record: Record, template: str, wording: str) -> Sample:
    described = _TASKS[task]
    context = text(record, "context", where)
    asked = text(record, "input", where, empty=not described.has_input)
    words = value(record, "length", where)
    if not isinstance(words, int):
        raise ValueError(f"{where}: column 'length' holds {words!r}, a number of words is needed")
    answers = texts(record, "answers", where)
    if described.metric == "number_fraction" and not all(any(map(str.isdigit, answer)) for answer in answers):
        raise ValueError(f"{where}: column 'answers' holds {answers!r}, each needs a number")
    extra: dict[str, Any] = {"_id": text(record, "_id", where), "words": words, "prompt": wording}
    if described.metric == "classification":
        extra["all_classes"] = list(texts(record, "all_classes", where))
    if described.first_line:
        extra["first_line"] = True
    return Sample(
        id=f"{task}/{number}",
        task=task,
        group=described.group,
        prompt=re.sub(r"\{(context|input)\}", lambda place: context if place[1] == "context" else asked, template),
        references=answers,
        metric=described.metric,
        max_new_tokens=described.max_new_tokens,
        chat=described.chat,
        min_new_tokens=described.min_new_tokens,
        stop=described.stop,
        length="0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+",
        extra=extra,
    )
