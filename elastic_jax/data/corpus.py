"""Rows of the five task classes, built offline at any length: the sensitive ones need the middle, the others mostly what is near.

| class         | kind     | context                                               | answer                                     |
|---------------|----------|-------------------------------------------------------|--------------------------------------------|
| single_qa     | needle   | essays with one sentence that states a number          | that sentence (three rows of five)          |
|               | squad    | paragraphs of other articles around the right one      | SQuAD's answer                              |
| multihop_qa   | hotpotqa | documents of other questions around the two needed     | HotpotQA's answer                           |
| summarization | aclsum   | research papers, as many as fit                        | abstract, or each paper's human summary     |
| code          | code     | files of Python's library up to a line                 | the next lines                              |
| in_context    | labels   | sentences with the title of their article, few titles  | the title of one more sentence              |

What a sensitive row asks for lies after the first 192 tokens (the template and a block of 128) and before the context's last
quarter, evenly spread: outside what a streaming head sees, unless its window covers a quarter of the row.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from elastic_jax.data import corpus_text
from elastic_jax.data.chat import ChatEncoder
from elastic_jax.data.corpus_text import Split
from elastic_jax.data.rows import Row
from elastic_jax.data.tasks import TaskClass

_SHORTEST = 384  # tokens: room for a middle
_FILLED = 0.9  # of the length aimed at, nearly always
_SPARE_TOKENS = 8  # tokens that joining pieces may add
_CUT_PIECES = 4  # pieces of which a part is tried once a whole one no longer fits
_ATTEMPTS = 20
_FIRST_TOKENS = 192
_LAST_SHARE = 0.25
_ANSWER_LINES = 8
_LABELS = 5
_T = TypeVar("_T")

# fmt: off
_ADJECTIVES = (
    "amber", "brisk", "calm", "dusty", "early", "faint", "gentle", "hollow", "ivory", "jolly", "keen", "lucid", "mellow", "olive",
)
_NOUNS = (
    "anchor", "badger", "canyon", "dolphin", "engine", "falcon", "garden", "harbor", "island", "jacket", "kettle", "lantern",
    "meadow", "needle", "orchard", "pigeon", "quarry", "river", "saddle", "temple", "umbrella", "valley", "window", "yacht",
)
# fmt: on


def build_corpus(
    tokenizer: PreTrainedTokenizerBase, *, split: Split, min_tokens: int, max_tokens: int, per_class: int, seed: int
) -> list[Row]:
    """Builds rows of all classes in turn. A row depends on the arguments and its number only, not on `per_class`.

    Args:
      tokenizer: fast, with a chat template; lengths are those of its documents.
      split: the two parts share no article, question, paper, file, essay section or needle.
      min_tokens: shortest document; below 384 it counts as 384.
      max_tokens: longest document. Each row aims at a length drawn evenly between the two and comes within about 10 % below it,
        never above; where papers end early, up to 15 %.
      per_class: rows per class. Texts are used again, in other company, once all have been used.
      seed: of every choice.

    Raises:
      ValueError: `max_tokens` below 384, `min_tokens` above it, or an unknown split.
      FileNotFoundError: an asset is missing.
      ValueError: the tokenizer's special tokens are in every text.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split={split!r}: accepted are 'train', 'heldout'")
    if max_tokens < _SHORTEST or min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens={min_tokens}, max_tokens={max_tokens}: at least {_SHORTEST} are needed, the first not above the second"
        )
    makers = [
        _single_qa(split, seed),
        _multihop(split, seed),
        _summarization(split, seed),
        _code(split, seed),
        _in_context(split, seed),
    ]
    gauge = _Gauge(tokenizer)
    shortest = min(max_tokens, max(_SHORTEST, round(min_tokens / _FILLED)))
    return [
        _usable_row(make, number, f"{seed}:{split}:{make.__name__}", gauge, (shortest, max_tokens))
        for number, make in itertools.product(range(per_class), makers)
    ]


class _Gauge:
    """Token counts: of pieces, which are remembered, and of what a row has besides its context."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._encoder = ChatEncoder(tokenizer)
        self._counts: dict[str, int] = {}

    def count(self, text: str) -> int:
        """Tokens of a piece. Pieces begin with their separator, so that counts of consecutive pieces add up."""
        if text not in self._counts:
            self._counts[text] = len(self._encoder.ids(text))
        return self._counts[text]

    def room(self, row: Row, target: int) -> int:
        """Tokens left for the context of a row that has none yet."""
        return target - len(self._encoder.encode(row).tokens) - _SPARE_TOKENS

    def usable(self, row: Row) -> bool:
        return self._encoder.find_fault(row) is None


_Maker = Callable[[int, random.Random, _Gauge, int], Row]


def _usable_row(make: _Maker, number: int, key: str, gauge: _Gauge, lengths: tuple[int, int]) -> Row:
    """Row `number` of a maker; where its text has a fault (no room, a special token, ...), another one."""
    for attempt in range(_ATTEMPTS):
        rng = random.Random(f"{key}:{number}:{attempt}")
        row = make(number + 10_007 * attempt, rng, gauge, rng.randint(*lengths))
        if gauge.usable(row):
            return row
    raise ValueError(f"no usable row of {make.__name__} in {_ATTEMPTS} attempts")


def _take(
    pieces: Iterable[str], room: int, gauge: _Gauge, units: Callable[[str], Iterable[str]], cut_pieces: int = _CUT_PIECES
) -> list[str]:
    """Takes pieces as long as they fit; of the next `cut_pieces` that do not, the first `units` (sentences, lines) that do."""
    taken: list[str] = []
    for piece in pieces:
        parts = [piece] if gauge.count(piece) <= room else units(piece)
        for part in parts:
            if (size := gauge.count(part)) > room:
                cut_pieces -= 1
                break
            taken.append(part)
            room -= size
        if cut_pieces == 0:
            break
    return taken


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])(?=\s)", text)


def _lines_from_the_end(text: str) -> list[str]:
    return re.split(r"(?=\n)", text)[::-1]


def _hide(gold: Sequence[str], filler: list[str], rng: random.Random, gauge: _Gauge) -> str:
    """Joins the filler with each gold piece put between two of its pieces, somewhere in the middle (see the module's text).

    Empty where the gold pieces left no room for filler: such a row is not usable.
    """
    if not filler:
        return ""
    ends = list(itertools.accumulate(map(gauge.count, filler)))
    first, last = min(_FIRST_TOKENS, ends[-1] / 4), (1 - _LAST_SHARE) * ends[-1]
    allowed = [i + 1 for i, end in enumerate(ends) if first <= end <= last]
    places = [rng.choice(allowed or [len(filler) // 2]) for _ in gold]
    pieces = list(filler)
    for place, piece in sorted(zip(places, gold), reverse=True):
        pieces.insert(place, piece)
    return "".join(pieces).strip()


def _shuffled(items: Iterable[_T], *key: object) -> list[_T]:
    result = list(items)
    random.Random(":".join(map(str, key))).shuffle(result)
    return result


def _cycle_from(items: Sequence[_T], start: int) -> Iterator[_T]:
    return (items[(start + i) % len(items)] for i in itertools.count())


def _single_qa(split: Split, seed: int) -> _Maker:
    essays = corpus_text.essay_pieces(split)
    keys = [key for key in map(" ".join, itertools.product(_ADJECTIVES, _NOUNS)) if corpus_text.in_split(f"needle:{key}", split)]
    library = corpus_text.articles(split)
    asked = _shuffled(((article, *question) for article in library for question in article.questions), seed, split, "squad")

    def needle(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        key, value = rng.choice(keys), str(rng.randrange(1_000_000, 10_000_000))
        # A whole sentence: asked for the bare number, a small model begins with "The", and the first digit measures that, not retrieval.
        fact = f"The special magic number of the {key} is {value}."
        row = Row(
            context="",
            question=f"What is the special magic number of the {key}?",
            answer=fact,
            task=TaskClass.SINGLE_QA,
            id=f"needle:{split}:{number}",
            kind="needle",
        )
        fact = " " + fact
        pieces = (" " + piece for piece in _cycle_from(essays, rng.randrange(len(essays))))
        filler = _take(pieces, gauge.room(row, target) - gauge.count(fact), gauge, _sentences)
        return dataclasses.replace(row, context=_hide([fact], filler, rng, gauge))

    def squad(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        article, paragraph, question, answer, id = asked[number % len(asked)]
        question = f"Question: {question}\nAnswer with a few words of the text."
        row = Row(context="", question=question, answer=answer, task=TaskClass.SINGLE_QA, id=f"squad:{number}:{id}", kind="squad")
        fact = "\n\n" + article.paragraphs[paragraph]
        others = ["\n\n" + text for other in library if other is not article for text in other.paragraphs]
        rng.shuffle(others)
        filler = _take(_cycle_from(others, 0), gauge.room(row, target) - gauge.count(fact), gauge, _sentences)
        return dataclasses.replace(row, context=_hide([fact], filler, rng, gauge))

    def single_qa(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        # Three of five, interleaved. A small model finds a number where it answers few questions.
        return (needle if number * 3 % 5 < 3 else squad)(number, rng, gauge, target)

    return single_qa


def _multihop(split: Split, seed: int) -> _Maker:
    asked = _shuffled(corpus_text.hop_questions(split), seed, split, "hotpotqa")

    def multihop(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        item = asked[number % len(asked)]
        question = f"Question: {item.question}\nAnswer with a few words of the text."
        row = Row(
            context="",
            question=question,
            answer=item.answer,
            task=TaskClass.MULTIHOP_QA,
            id=f"hotpotqa:{number}:{item.id}",
            kind="hotpotqa",
        )
        gold = ["\n\n" + text for text in item.gold]
        others = _cycle_from(asked, rng.randrange(len(asked)))
        unrelated = (text for other in others if other is not item for text in other.distractors)
        pieces = ("\n\n" + text for text in itertools.chain(item.distractors, unrelated))
        filler = _take(pieces, gauge.room(row, target) - sum(map(gauge.count, gold)), gauge, _sentences)
        rng.shuffle(filler)
        return dataclasses.replace(row, context=_hide(gold, filler, rng, gauge))

    return multihop


def _summarization(split: Split, seed: int) -> _Maker:
    shelf = _shuffled(corpus_text.papers(split), seed, split, "aclsum")

    def summarization(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        # The second time round a paper is asked for its human summary, which long rows of several papers always use.
        first = shelf[number % len(shelf)]
        long_enough = sum(map(len, first.paragraphs)) > 5 * target  # characters; a token has about four
        short = gauge.count(first.abstract) < target // 4
        one_abstract = number // len(shelf) % 2 == 0 and short and long_enough
        question = "Write the abstract of this paper." if one_abstract else "State the problem, the approach and the outcome of each paper."
        row = Row(context="", question=question, answer="", task=TaskClass.SUMMARIZATION, id=f"aclsum:{number}:{first.id}", kind="aclsum")
        taken: list[str] = []
        for paper in _cycle_from(shelf, number % len(shelf)):
            answer = paper.abstract if one_abstract else paper.summary
            longer = dataclasses.replace(row, answer=f"{row.answer}\n\n{answer}".lstrip())
            room = gauge.room(longer, target) - sum(map(gauge.count, taken))
            if row.answer and (one_abstract or room < 0.05 * target):
                return dataclasses.replace(row, context="".join(taken).strip())
            row = longer
            taken += _take((f"\n\n{text}" for text in (paper.title, *paper.paragraphs)), room, gauge, _sentences)
        raise AssertionError("an endless shelf ended")

    return summarization


def _code(split: Split, seed: int) -> _Maker:
    files = [(name, text.split("\n")) for name, text in corpus_text.code_files(split)]
    long_enough = [i for i, (_, lines) in enumerate(files) if len(lines) >= 60]
    order = _shuffled(long_enough, seed, split, "code")

    def code(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        here = order[number % len(order)]
        name, lines = files[here]
        cut = rng.choice([i for i in range(20, len(lines) - _ANSWER_LINES) if lines[i].strip()])
        answer = "\n".join(lines[cut : cut + _ANSWER_LINES]).rstrip()
        # No question: the code to go on with ends the context, and a question would lose the first line's indentation.
        row = Row(context="", question="", answer=answer, task=TaskClass.CODE, id=f"code:{number}:{name}:{cut + 1}", kind="code")
        earlier = (files[(here - i) % len(files)] for i in itertools.count(1))
        before = itertools.chain([(name, lines[:cut])], earlier)
        pieces = (piece for path, text in before for piece in _blocks(path, text)[::-1])
        taken = _take(pieces, gauge.room(row, target), gauge, _lines_from_the_end, cut_pieces=1)
        return dataclasses.replace(row, context="".join(reversed(taken)).strip("\n"))

    return code


def _blocks(path: str, lines: list[str]) -> list[str]:
    """A file in pieces of 16 lines, the first with the file's name."""
    groups = [lines[i : i + 16] for i in range(0, len(lines), 16)]
    return [f"\n\n# File: {path}", *("\n" + "\n".join(group) for group in groups)]


def _in_context(split: Split, seed: int) -> _Maker:
    sentences: dict[str, list[str]] = {}
    for article in corpus_text.articles(split):
        found = [sentence.strip() for text in article.paragraphs for sentence in _sentences(text)]
        sentences[article.title] = [sentence for sentence in found if 40 <= len(sentence) <= 240]

    def in_context(number: int, rng: random.Random, gauge: _Gauge, target: int) -> Row:
        # Few titles, so that any stretch of examples shows them all and the nearest ones suffice; more only to fill a long row.
        titles, pool = rng.sample(list(sentences), len(sentences)), []
        label = titles[0]
        asked = rng.choice(sentences[label])
        question = f"Text: {asked}\nTopic:"
        row = Row(context="", question=question, answer=label, task=TaskClass.IN_CONTEXT, id=f"labels:{split}:{number}", kind="labels")
        room = gauge.room(row, target)
        for used, title in enumerate(titles):
            if used >= _LABELS and sum(map(gauge.count, pool)) > room:
                break
            pool += [f"\n\nText: {sentence}\nTopic: {title}" for sentence in sentences[title] if sentence != asked]
        rng.shuffle(pool)
        taken = _take(_cycle_from(pool, 0), room, gauge, lambda piece: [piece])
        return dataclasses.replace(row, context="".join(taken).strip())

    return in_context
