"""RULER (arXiv:2404.06654): 13 synthetic tasks at any length, generated with the model's tokenizer.

What a task hides, how much of it, where, and how an answer is scored is the benchmark's. Its sentences are re-worded, so single scores
may differ from published ones by more than chance; compare models by one set of prompts. Further differences from the original:

- Each sample has its own seed and its own order of documents, words and needles. The original shuffles with one seed, so that all
  samples of one size have the answer in the same place; `upstream_order` does likewise, with the original's coarse sizes.
- A prompt is filled to within one word, line, needle or document of its length, instead of 500 words, 25 lines or 10 documents.
- Needles that only distract never have the asked key; documents that are repeated never answer the question a second time.
- Common words that wonderwords does not have enough of are "adjective-noun" pairs, where the original has a second list.

| task                              | group                    | size counts |
|-----------------------------------|--------------------------|-------------|
| niah_single_1                     | Retrieval                | noise lines |
| niah_single_2, _3, niah_multikey_1, niah_multivalue, niah_multiquery | Retrieval | words of essays |
| niah_multikey_2, niah_multikey_3  | Retrieval                | needles     |
| vt                                | Multi-hop tracing        | noise lines |
| cwe                               | Aggregation              | different words |
| fwe                               | Aggregation              | words       |
| qa_1 (SQuAD), qa_2 (HotpotQA)     | QA                       | documents   |
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from elastic_jax.data.chat import ChatEncoder
from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites import ruler_tasks, texts
from elastic_jax.evaluation.suites.ruler_tasks import Content, Draft, Setting

Prefix = Literal["assistant", "user"]
_ATTEMPTS = 8  # of the size of a sample; nearly always one or two are needed
_FULL = 0.001  # of the budget: a prompt that lacks less is not tried larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """make: draft from a setting and the task's text, if it has one. text: the file that this is in."""

    group: str
    make: Callable[..., Draft]
    max_new_tokens: int
    metric: str = "ruler_match_all"
    text: str | None = None


def _niah(haystack: str, text: str | None = None, **options: Any) -> _Task:
    make = partial(ruler_tasks.niah, haystack=haystack, **options)
    return _Task(group="Retrieval", make=make, max_new_tokens=128, text=text)


_TASKS: dict[str, _Task] = {
    "niah_single_1": _niah("noise"),
    "niah_single_2": _niah("essay", texts.ESSAYS),
    "niah_single_3": _niah("essay", texts.ESSAYS, values="UUIDs"),
    "niah_multikey_1": _niah("essay", texts.ESSAYS, key_count=4),
    "niah_multikey_2": _niah("needles"),
    "niah_multikey_3": _niah("needles", keys="UUIDs", values="UUIDs"),
    "niah_multivalue": _niah("essay", texts.ESSAYS, value_count=4),
    "niah_multiquery": _niah("essay", texts.ESSAYS, key_count=4, query_count=4),
    "vt": _Task(group="Multi-hop tracing", make=ruler_tasks.variable_tracking, max_new_tokens=30),
    "cwe": _Task(group="Aggregation", make=ruler_tasks.common_words, max_new_tokens=120),
    "fwe": _Task(group="Aggregation", make=ruler_tasks.frequent_words, max_new_tokens=50),
    "qa_1": _Task(group="QA", make=ruler_tasks.question_answering, max_new_tokens=32, metric="ruler_match_part", text=texts.SQUAD),
    "qa_2": _Task(group="QA", make=ruler_tasks.question_answering, max_new_tokens=32, metric="ruler_match_part", text=texts.HOTPOTQA),
}
ALL_TASKS: tuple[str, ...] = tuple(_TASKS)
PAPER_TASKS: tuple[str, ...] = tuple(task for task in ALL_TASKS if task not in ("vt", "cwe"))
PAPER_LENGTHS: tuple[int, ...] = tuple(1024 * k for k in (8, 16, 32, 64, 128, 256))
PAPER_SAMPLES = 50
TEXTS: dict[str, str] = {name: task.text for name, task in _TASKS.items() if task.text is not None}  # the tasks' files of texts
MAX_NEW_TOKENS: dict[str, int] = {name: task.max_new_tokens for name, task in _TASKS.items()}


def samples(
    *,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int] = PAPER_LENGTHS,
    tasks: Sequence[str] = PAPER_TASKS,
    samples_per_task: int = PAPER_SAMPLES,
    seed: int = 42,
    texts_folder: str | Path | None = None,
    upstream_order: bool = False,
    prefix: Prefix = "assistant",
    chat: bool = True,
) -> Iterator[Sample]:
    """Builds the samples of each length and task in turn; by default those of the Elastic Attention paper (its Table 9).

    One of 64K tokens takes about 0.4 s, and time grows with the length: the default ones take about 25 minutes. Sample i of a task and
    length depends on the other arguments only, not on how many samples, tasks and lengths there are.

    Args:
      tokenizer: of the model under test: fast, for chats with a chat template. A long prompt has about four bytes per token.
      lengths: in tokens, each of the prompt with all that the chat template adds, the answer prefix and the new tokens. No sample is
        longer; each lacks at most about one word, line, needle or document.
      tasks: of `ALL_TASKS`.
      samples_per_task: of each task and length; for qa_1 and qa_2 as many questions of their files.
      seed: of all choices.
      texts_folder: with RULER's own files of texts, see `texts`. Without, the fetched assets are read, which are the same files;
        without those essays are replaced by Python's documentation. `extra["texts"]` says which it was.
      upstream_order: answers in the same place in all samples of a size (see the module's text).
      prefix: where the beginning of the answer goes: after the assistant's header, as in NVIDIA's harness, or, as in LOOM, at the end
        of the user's turn. Scores of the two are not comparable. Without chat it ends the prompt.
      chat: through the chat template.

    Returns:
      samples, each made when it is asked for, with `extra`: prefix ("assistant", "user", "text"), wording, order, texts, tokens (of the
      whole prompt) and what the task tells of itself: depths of the asked needles (shares of the context's characters), numbers of the
      documents that answer, counts; for qa_1 and qa_2 the id of the question (`question`), which sample i has at every length.

    Raises:
      ValueError: an argument is not accepted, or a file is malformed; when its first sample is asked for: a length is too short for a
        task (the least one is named).
      FileNotFoundError: there is no SQuAD or HotpotQA for qa_1 or qa_2.
    """
    _check(lengths, tasks, samples_per_task, seed, prefix)
    gauge = _Gauge(tokenizer, prefix=prefix if chat else "text")
    contents = {file: texts.READERS[file](texts_folder) for file in dict.fromkeys(TEXTS[name] for name in tasks if name in TEXTS)}
    sources = {name: contents[TEXTS[name]] if name in TEXTS else None for name in tasks}
    for name, source in sources.items():
        if isinstance(source, texts.Questions) and samples_per_task > len(source.questions):
            raise ValueError(f"samples_per_task={samples_per_task}: {name} has {len(source.questions)} questions in {source.source}")
    maker = lambda name, length: _Maker(gauge, name, length, seed, sources[name], upstream_order)
    return (sample for length in lengths for name in tasks for sample in _samples(partial(maker, name), name, length, samples_per_task))


def _samples(maker: Callable[[int], _Maker], name: str, length: int, count: int) -> Iterator[Sample]:
    try:
        yield from map(maker(length).sample, range(count))
    except _TooShortError:
        least = length
        while (needed := maker(least).least_length(count)) > least:
            least = needed
        raise ValueError(f"lengths has {length}: {name} needs at least {least} with this tokenizer and these samples") from None


def _check(lengths: Sequence[int], tasks: Sequence[str], samples_per_task: int, seed: int, prefix: str) -> None:
    if unknown := [name for name in tasks if name not in _TASKS]:
        raise ValueError(f"tasks has {', '.join(map(repr, unknown))}: accepted are {', '.join(ALL_TASKS)}")
    for name, values in (("lengths", lengths), ("tasks", tasks)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)}: at least one is needed, and none twice")
    if min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: positive numbers of tokens are needed")
    if samples_per_task < 1:
        raise ValueError(f"samples_per_task={samples_per_task}: at least 1 is needed")
    if seed < 0:
        raise ValueError(f"seed={seed}: at least 0 is needed")
    if prefix not in ("assistant", "user"):
        raise ValueError(f"prefix={prefix!r}: accepted are 'assistant', 'user'")


class _TooShortError(Exception):
    pass


class _Gauge:
    """Token counts: of whole prompts, as `prompts.encode_sample` makes them, and of pieces, which are remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, prefix: str):
        self.prefix = prefix
        self._tokenizer = tokenizer
        self._encoder = None if prefix == "text" else ChatEncoder(tokenizer)
        self._counts: dict[str, int] = {}

    def parts(self, content: Content) -> tuple[str, str]:
        """The user's text and the answer prefix."""
        if self.prefix == "assistant":
            return content.prompt, content.prefix
        return f"{content.prompt} {content.prefix}", ""

    def whole(self, content: Content) -> int:
        prompt, prefix = self.parts(content)
        if self._encoder is None:
            return len(self._ids(prompt, add_special_tokens=True))
        tokens, _ = self._encoder.encode_prompt([{"role": "user", "content": prompt}])
        return tokens.size + (len(self._ids(prefix, add_special_tokens=False)) if prefix else 0)

    def pieces(self, pieces: Sequence[str]) -> np.ndarray:
        if unknown := [piece for piece in dict.fromkeys(pieces) if piece not in self._counts]:
            self._counts |= zip(unknown, map(len, self._ids(unknown, add_special_tokens=False)), strict=True)
        return np.array([self._counts[piece] for piece in pieces], np.int64)

    def _ids(self, text: str | list[str], *, add_special_tokens: bool) -> Any:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]


class _Maker:
    """Samples of one task and length."""

    def __init__(self, gauge: _Gauge, name: str, length: int, seed: int, source: Any, upstream_order: bool):
        self._gauge, self._name, self._length, self._seed, self._source = gauge, name, length, seed, source
        self._task = _TASKS[name]
        self._budget = length - self._task.max_new_tokens
        self._upstream_order = upstream_order
        self._most: int | None = None  # in upstream's order, the size of sample 0

    def sample(self, index: int) -> Sample:
        """Raises `_TooShortError`."""
        if self._upstream_order and self._most is None:
            self._most = self._fit(self._draft(0))[1]
        content, _, tokens = self._fit(self._draft(index))
        prompt, answer_prefix = self._gauge.parts(content)
        extra = {
            "prefix": self._gauge.prefix,
            "wording": "re-worded",
            "order": "upstream" if self._upstream_order else "per sample",
            "texts": "generated" if self._source is None else self._source.source,
            "tokens": tokens,
        }
        if isinstance(self._source, texts.Questions):
            extra["question"] = f"{self._name}/{index}"
        return Sample(
            id=f"{self._name}/{self._length}/{index}",
            task=self._name,
            group=self._task.group,
            prompt=prompt,
            references=content.references,
            metric=self._task.metric,
            max_new_tokens=self._task.max_new_tokens,
            answer_prefix=answer_prefix,
            chat=self._gauge.prefix != "text",
            length=self._length,
            extra=extra | content.extra,
        )

    def least_length(self, count: int) -> int:
        """Of the first `count` samples in their least sizes."""
        drafts = map(self._draft, range(count))
        return max(self._gauge.whole(draft.build(draft.least)) for draft in drafts) + self._task.max_new_tokens

    def _draft(self, index: int) -> Draft:
        key = [self._seed, ALL_TASKS.index(self._name), self._length, index]

        def permutation(n: int) -> list[int]:
            if not self._upstream_order:
                return np.random.default_rng([*key, 1]).permutation(n).tolist()
            order = list(range(n))
            random.Random(self._seed).shuffle(order)
            return order

        setting = Setting(
            rng=np.random.default_rng(key),
            index=index,
            length=self._length,
            budget=max(0, self._budget),
            pieces=self._gauge.pieces,
            permutation=permutation,
        )
        draft = self._task.make(setting) if self._source is None else self._task.make(setting, source=self._source)
        if not self._upstream_order:
            return dataclasses.replace(draft, step=1)
        return draft if self._most is None else dataclasses.replace(draft, most=min(draft.most, max(draft.least, self._most)))

    def _fit(self, draft: Draft) -> tuple[Content, int, int]:
        """The largest prompt found within the budget, its size and its tokens.

        The costs of pieces predict the size, and the whole prompt's tokens correct the prediction. Each attempt narrows the range of
        sizes, and there are at most `_ATTEMPTS`.
        """
        best, low, high = draft.build(draft.least), draft.least, draft.most + 1
        floor = tokens = self._gauge.whole(best)
        if floor > self._budget:
            raise _TooShortError
        room, rate = self._budget - floor, 1.0
        base = draft.cost(draft.least)
        for _ in range(_ATTEMPTS):
            size = bisect.bisect_right(range(low, high), base + room / rate, key=draft.cost) + low - 1
            size = size // draft.step * draft.step
            if size <= low or draft.cost(size) == base:  # the second: a few more words that frequencies round away
                break
            content = draft.build(size)
            count = self._gauge.whole(content)
            rate = (count - floor) / (draft.cost(size) - base)
            if count > self._budget:
                high = size
            else:
                best, low, tokens = content, size, count
                if self._budget - count < _FULL * self._budget:
                    break
        return best, low, tokens
