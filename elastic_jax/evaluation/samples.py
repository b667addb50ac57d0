"""What a benchmark is to the runner: a list of samples, each a prompt, its references and the metric that scores an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt of a benchmark.

    Attributes:
      id: unique among the samples of a run and the same in every run of the same settings, such as "niah_single_1/8192/0".
      task: of the benchmark, such as "niah_single_1".
      group: the column of the report that the task counts in, such as "Single-Doc QA".
      prompt: the user's text.
      references: accepted answers, as the metric reads them.
      metric: a name of `elastic_jax.evaluation.metrics.METRICS`.
      max_new_tokens: of the answer.
      system: message before the user's; None: none.
      answer_prefix: begins the answer: after the assistant's header, where the model goes on from it; "" for none.
      chat: through the tokenizer's chat template; False: the prompt is text that is continued.
      min_new_tokens: before which the answer does not end.
      stop: texts that end the answer beside the model's own stop tokens, one token each.
      length: column of the report by length, such as 8192 or "0-4k"; None: the benchmark has none.
      extra: what the metric needs beside the references, and what the report should know (JSON values).
    """

    id: str
    task: str
    group: str
    prompt: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    system: str | None = None
    answer_prefix: str = ""
    chat: bool = True
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    length: int | str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
