"""The 13 tasks of RULER as drafts: prompts that can be built in any size, with an estimate of the tokens of each size.

Counts, needles, frequencies, depths and the order of a prompt's parts are the benchmark's; all sentences are re-worded.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import string
import uuid
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from elastic_jax.evaluation.suites.texts import Essays, Questions

PieceCounts = Callable[[Sequence[str]], np.ndarray]
Permutation = Callable[[int], list[int]]

_FILLER = "The lake is still. The road is long. The lamp is lit. So it was then and so it is now. On we walk."
_DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, 40))]
_SHORT = 4096  # tokens: the aggregation of words has fewer repetitions below
_EXAMPLE_TOKENS = 500  # of variable tracking's example
_SPARE = 1.25  # by which needles and documents at hand exceed what their estimated tokens allow
_LEAST_LINES = 10
_LEAST_WORDS = 100
_LEAST_UNCOMMON = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """A prompt of some size: the user's text, how the answer begins, what it is to hold, and what the report should know."""

    prompt: str
    prefix: str
    references: tuple[str, ...]
    extra: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A sample whose random choices are made, but not its size.

    Attributes:
      least, most: sizes, in lines, words or documents.
      cost: tokens that a size takes, but for an unknown constant and a factor near 1; increasing.
      build: the prompt of a size, the same each time.
      step: of sizes in upstream's order, whose positions depend on the size.
    """

    least: int
    most: int
    cost: Callable[[int], float]
    build: Callable[[int], Content]
    step: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a draft is made from.

    Attributes:
      rng: of the sample; all draws come from it.
      index: of the sample in its task and length.
      length: nominal, of prompt and answer, in tokens.
      budget: tokens of the prompt.
      pieces: token counts of pieces of text, i64[n].
      permutation: of n, the same each time. Upstream's depends on n only, so that all samples of one size have it.
    """

    rng: np.random.Generator
    index: int
    length: int
    budget: int
    pieces: PieceCounts
    permutation: Permutation


@functools.cache
def _vocabulary() -> dict[str, list[str]]:
    """Words of wonderwords by part of speech: unique, sorted."""
    from wonderwords import RandomWord

    source = RandomWord()
    parts = ("adjective", "noun", "verb")
    return {part: sorted(set(source.filter(include_categories=[part], exclude_with_spaces=True))) for part in parts}


def _pairs(rng: np.random.Generator, count: int) -> list[str]:
    """Random "adjective-noun", possibly with repetitions."""
    adjectives, nouns = _vocabulary()["adjective"], _vocabulary()["noun"]
    first, second = rng.integers(len(adjectives), size=count), rng.integers(len(nouns), size=count)
    return [f"{adjectives[i]}-{nouns[j]}" for i, j in zip(first.tolist(), second.tolist(), strict=True)]


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    return list(map(str, rng.integers(1_000_000, 10_000_000, size=count).tolist()))


def _uuids(rng: np.random.Generator, count: int) -> list[str]:
    data = rng.bytes(16 * count)
    return [str(uuid.UUID(bytes=data[16 * i : 16 * i + 16], version=4)) for i in range(count)]


_KINDS: dict[str, Callable[[np.random.Generator, int], list[str]]] = {"words": _pairs, "numbers": _numbers, "UUIDs": _uuids}


def _distinct(make: Callable[[int], list[str]], count: int, taken: Container[str] = ()) -> list[str]:
    """`count` different texts that are not `taken`."""
    result: dict[str, None] = {}
    while len(result) < count:  # a repetition is rare
        result |= dict.fromkeys(text for text in make(count - len(result)) if text not in taken)
    return list(result)


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _depths(context: str, needles: Sequence[str]) -> list[float]:
    """Share of the context's characters before each needle."""
    return [round(context.index(needle) / len(context), 4) for needle in needles]


def niah(
    setting: Setting,
    *,
    haystack: str,
    keys: str = "words",
    values: str = "numbers",
    key_count: int = 1,
    value_count: int = 1,
    query_count: int = 1,
    source: Essays | None = None,
) -> Draft:
    """Needles that give values of keys, in a "noise", "essay" or "needles" haystack; the question names some of the keys."""
    rng = setting.rng
    names = _distinct(lambda n: _KINDS[keys](rng, n), max(key_count, query_count))
    held = _distinct(lambda n: _KINDS[values](rng, n), len(names) * value_count)
    tell = lambda name, value: f"One of the magic {values} that belong to {name} is {value}."
    needles = [tell(name, held[i]) for i, name in enumerate(name for name in names for _ in range(value_count))]
    asked = sorted(rng.choice(len(names), size=query_count, replace=False).tolist())
    gold = [i * value_count + j for i in asked for j in range(value_count)]
    queried, references, wanted = _listed([names[i] for i in asked]), tuple(held[i] for i in gold), [needles[i] for i in gold]
    order = [needles[i] for i in setting.permutation(len(needles))]

    if haystack == "essay":
        assert source is not None
        stack = _essay_haystack(setting, order, source)
    elif haystack == "noise":
        line = int(setting.pieces([f"\n{_FILLER}"])[0])
        stack = _line_haystack(rng, order, [_FILLER] * (setting.budget + _LEAST_LINES), lambda size: size * line)
    else:
        make = lambda n: list(map(tell, _KINDS[keys](rng, n), _KINDS[values](rng, n)))
        average = float(setting.pieces([f"\n{text}" for text in make(64)]).mean())
        # A second needle of the same key, rare as it is, would be a second right answer.
        others = [text for text in make(int(_SPARE * setting.budget / average) + 32) if not any(f" {name} is " in text for name in names)]
        stack = _line_haystack(rng, order, others, lambda size: size * average)

    one = len(references) == 1
    noun, verb = (values.removesuffix("s"), "is") if one else (values, "are")
    question = f"What {verb} the magic {noun} that belong{'s' if one else ''} to {queried} in the text?"
    prefix = f"The magic {noun} that belong{'s' if one else ''} to {queried} in the text {verb}"

    def build(size: int) -> Content:
        context = stack.context(size)
        prompt = f"Some magic {values} are hidden in the text below. Remember them: a question about them follows.\n{context}\n\n{question}"
        return Content(prompt=prompt, prefix=prefix, references=references, extra={"depths": _depths(context, wanted)})

    return Draft(least=stack.least, most=stack.most, cost=stack.cost, build=build)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack:
    least: int
    most: int
    cost: Callable[[int], float]
    context: Callable[[int], str]


def _scattered(needles: Sequence[str], lines: Sequence[str], rng: np.random.Generator) -> list[str]:
    """The lines with the needles among them: in their order, in random places."""
    result = list(lines)
    places = rng.choice(len(lines) + len(needles), size=len(needles), replace=False)
    for place, needle in zip(sorted(places.tolist()), needles, strict=True):
        result.insert(place, needle)
    return result


def _line_haystack(rng: np.random.Generator, needles: Sequence[str], lines: Sequence[str], cost: Callable[[int], float]) -> _Stack:
    """The first lines, with the needles in places drawn without replacement."""
    seed = int(rng.integers(2**32))

    def context(size: int) -> str:
        return "\n".join(_scattered(needles, lines[:size], np.random.default_rng(seed)))

    return _Stack(least=_LEAST_LINES, most=len(lines), cost=cost, context=context)


def _essay_haystack(setting: Setting, needles: Sequence[str], essays: Essays) -> _Stack:
    """The first words of the essays, again from the start where they end, with the needles between sentences."""
    words, ends = essays.words, essays.ends
    depths = sorted(setting.rng.choice(_DEPTHS, size=len(needles), replace=False).tolist())
    most = setting.budget + _LEAST_WORDS  # no word is less than a token
    costs = np.cumsum(setting.pieces([f" {word}" for word in words[:most]]))

    def cost(size: int) -> int:
        rounds, rest = divmod(size, len(words))
        return rounds * int(costs[-1]) + (int(costs[rest - 1]) if rest else 0)

    def context(size: int) -> str:
        rounds, rest = divmod(size, len(words))
        used = words * rounds + words[:rest]
        breaks = [turn * len(words) + end for turn in range(rounds) for end in ends]
        breaks += [rounds * len(words) + end for end in ends[: bisect.bisect_left(ends, rest)]]
        breaks += [size] if rest else []
        places = [0, *breaks]
        parts, start = list[str](), 0
        for depth, needle in zip(depths, needles, strict=True):
            place = places[int(len(breaks) * depth / 100)]
            parts += [*used[start:place], needle]
            start = place
        return " ".join([*parts, *used[start:]])

    return _Stack(least=_LEAST_WORDS, most=most, cost=cost, context=context)


def variable_tracking(setting: Setting, *, hops: int = 4) -> Draft:
    """A value that goes from variable to variable, in noise; a small solved example comes first."""
    rng = setting.rng

    def letters(length: int) -> Callable[[int], list[str]]:
        return lambda n: ["".join(row) for row in rng.choice(list(string.ascii_uppercase), size=(n, length)).tolist()]

    names, example_names = _distinct(letters(5), hops + 1), _distinct(letters(3), hops + 1)
    value, example_value = _distinct(lambda n: list(map(str, rng.integers(10_000, 99_999, size=n).tolist())), 2)
    seed, example_seed = rng.integers(2**32, size=2).tolist()

    def chain(variables: list[str], start: str) -> list[str]:
        return [f"VAR {name} = {source}" for name, source in zip(variables, [start, *(f"VAR {name}" for name in variables)])]

    def text(variables: list[str], start: str, seed: int, size: int) -> tuple[str, str]:
        lines = _scattered(chain(variables, start), [_FILLER] * size, np.random.default_rng(seed))
        context = "\n".join(lines)
        prompt = (
            "Follow the chain of variable assignments that is hidden in the text below.\n"
            f"{context}\n\nWhich variables hold the value {start} at the end? List all of them."
        )
        return prompt, context

    def answer_start(start: str) -> str:
        return f"The chain of assignments in the text gives the value {start} to {hops + 1} variables, which are:"

    line = int(setting.pieces([f"\n{_FILLER}"])[0])
    solved = lambda size: (
        f"{text(example_names, example_value, example_seed, size)[0]} {answer_start(example_value)} {' '.join(example_names)}"
    )
    room = _EXAMPLE_TOKENS - int(setting.pieces([solved(0)])[0])
    example = solved(max(0, room // line))

    def build(size: int) -> Content:
        prompt, context = text(names, value, seed, size)
        depths = _depths(context, chain(names, value))
        return Content(prompt=f"{example}\n\n{prompt}", prefix=answer_start(value), references=tuple(names), extra={"depths": depths})

    return Draft(least=_LEAST_LINES, most=setting.budget + _LEAST_LINES, cost=lambda size: size * line, build=build)


def common_words(setting: Setting) -> Draft:
    """A numbered list of words in which ten come more often; a small solved example comes first. Sizes count different words."""
    rng, common = setting.rng, 10
    often, seldom, example_size, example_often, example_seldom = (30, 3, 40, 10, 3) if setting.length >= _SHORT else (6, 1, 20, 3, 1)
    words = sorted({word for part in _vocabulary().values() for word in part})
    order = [words[i] for i in rng.permutation(len(words))]
    example_words, order = order[:example_size], order[example_size:]
    least = common + _LEAST_UNCOMMON
    most = least + setting.budget // (3 * seldom)  # a word, its number and the mark between are at least three tokens
    costs = setting.pieces([f" {word}" for word in order[:most]]).astype(float)
    if most > len(order):
        pairs = _distinct(lambda n: _pairs(rng, n), most - len(order), taken=set(words))
        average = setting.pieces([f" {word}" for word in pairs[:64]]).mean()
        order, costs = [*order, *pairs], np.append(costs, np.full(len(pairs), average))
    example_order = rng.permutation(common * example_often + (example_size - common) * example_seldom).tolist()

    def entries(chosen: list[str], often: int, seldom: int) -> list[str]:
        return [*chosen[:common] * often, *chosen[common:] * seldom]

    def text(shuffled: list[str]) -> str:
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, start=1))
        return (
            "The numbered list below holds some words many times and others few times. Remember the words that come most often.\n"
            f"{listed}\n\nWhich {common} words come most often in the list?"
        )

    prefix = f"The {common} words that come most often in the list are:"
    example_entries = entries(example_words, example_often, example_seldom)
    solved = " ".join(f"{i}. {word}" for i, word in enumerate(example_words[:common], start=1))
    example = f"{text([example_entries[i] for i in example_order])} {prefix} {solved}"

    word_costs = np.cumsum([0.0, *costs])
    total = lambda size: common * often + (size - common) * seldom
    number_costs = np.cumsum([0, *setting.pieces([f" {i}." for i in range(1, total(most) + 1)])])

    def cost(size: int) -> float:
        return float(number_costs[total(size)] + (often - seldom) * word_costs[common] + seldom * word_costs[size])

    def build(size: int) -> Content:
        listed = entries(order[:size], often, seldom)
        prompt = f"{example}\n\n{text([listed[i] for i in setting.permutation(len(listed))])}"
        return Content(prompt=prompt, prefix=prefix, references=tuple(order[:common]), extra={"words": len(listed)})

    return Draft(least=least, most=most, cost=cost, build=build, step=10)


def frequent_words(setting: Setting, *, exponent: float = 2.0) -> Draft:
    """Made-up words whose frequencies fall with the square of their rank; the first rank is noise. Sizes are near the count of words."""
    rng = setting.rng
    alphabet = list(string.ascii_lowercase)
    vocabulary = max(10, setting.budget // 50)
    words = ["...", *_distinct(lambda n: ["".join(row) for row in rng.choice(alphabet, size=(n, 6)).tolist()], vocabulary - 1)]
    shares = np.arange(1, vocabulary + 1) ** -exponent / (np.pi**2 / 6)  # zeta(2)
    costs = setting.pieces([f" {word}" for word in words])
    counts = lambda size: np.floor(size * shares).astype(int)
    # The least size at which the third word of the answer still comes more often than the one after it.
    least = next(size for size in range(1, 1000) if (np.diff(counts(size)[1:5]) < 0).all() and counts(size)[4])

    def build(size: int) -> Content:
        listed = [word for word, count in zip(words, counts(size).tolist(), strict=True) for _ in range(count)]
        context = " ".join(listed[i] for i in setting.permutation(len(listed)))
        prompt = (
            "The text below is made of coded words and of dots, which mean nothing. Keep track of how often each coded word comes.\n"
            f"{context}\n\nWhich three coded words come most often in the text? The dots do not count."
        )
        extra = {"words": len(listed), "counts": counts(size)[1:5].tolist()}
        prefix = "The three coded words that come most often in the text are:"
        return Content(prompt=prompt, prefix=prefix, references=tuple(words[1:4]), extra=extra)

    most = 2 * setting.budget + least  # about as many words, each of at least one token, come of three fourths as large a size
    return Draft(least=least, most=most, cost=lambda size: int(counts(size) @ costs), build=build, step=max(1, setting.length // 32))


def question_answering(setting: Setting, source: Questions) -> Draft:
    """Question `index` of a set among numbered documents: its own, those near to it, and any others. Sizes count documents."""
    question = source.questions[setting.index]
    # All documents again where that is not enough, but never the question's own: what answers it is there once.
    others = np.setdiff1d(np.arange(len(source.documents)), [*question.own, *question.near])
    order = [*question.own, *question.near, *setting.rng.permutation(others).tolist()]
    again = order[len(question.own) :]
    spent, costs = 0, [0]
    chosen: list[int] = []
    while spent <= _SPARE * setting.budget or len(chosen) < len(question.own):
        if len(chosen) >= len(order):
            if not again:
                break
            order += again
        number = order[len(chosen)]
        chosen.append(number)
        piece = setting.pieces([f"\n\nDocument {len(chosen)}:\n", source.documents[number]])
        spent += int(piece.sum())
        costs.append(spent)

    instruction = "Answer the question from the documents. Give the answer alone, in as few words as possible."

    def build(size: int) -> Content:
        shuffled = [chosen[i] for i in setting.permutation(size)]
        context = "\n\n".join(f"Document {i}:\n{source.documents[number]}" for i, number in enumerate(shuffled, start=1))
        prompt = f"{instruction} The documents follow.\n\n{context}\n\n{instruction}\n\nQuestion: {question.text}"
        places = [i for i, number in enumerate(shuffled, start=1) if number in question.gold]
        return Content(prompt=prompt, prefix="Answer:", references=question.answers, extra={"documents": size, "gold_documents": places})

    return Draft(least=len(question.own), most=len(chosen), cost=lambda size: costs[size], build=build, step=10)
