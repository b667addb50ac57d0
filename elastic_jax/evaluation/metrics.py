"""Metrics of the benchmarks: an answer and its sample in, named scores from 0 to 1 out, `score` being the one that is reported.

Where a benchmark's own program has quirks that published numbers contain, they are kept and named here; where it can only fail, it is
not followed, and that is said too.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np

from elastic_jax.evaluation import metrics_ruler
from elastic_jax.evaluation.math_equality import last_boxed, math_equal
from elastic_jax.evaluation.samples import Sample

Metric = Callable[[str, Sample], dict[str, float]]


def qa_f1(prediction: str, sample: Sample) -> dict[str, float]:
    """F1 of the words that answer and reference share, at most once per occurrence; the best over the references.

    Words: lower case, without ASCII punctuation and without a, an, the. As in LongBench, a reference of nothing but those scores 0.
    """
    return {"score": max(_token_f1(_considered(prediction, sample), reference) for reference in sample.references)}


def rouge_l(prediction: str, sample: Sample) -> dict[str, float]:
    """ROUGE-L (F) as the package `rouge` computes it, which LongBench uses, in a fraction of its time; the best over the references.

    That package counts distinct words, splits sentences at full stops only, does not lower case, and sums what sentences add to a union
    of common subsequences; `rouge_score`, the other package, does none of this and gives other numbers. Where `rouge` raises,
    LongBench scores 0: so do empty texts here, and those of full stops and white space. Its recursion is as deep as two sentences are
    long, and beyond Python's limit that was a 0 too; here the score is what it should be.
    """
    return {"score": max(_rouge_l(_considered(prediction, sample), reference) for reference in sample.references)}


def classification(prediction: str, sample: Sample) -> dict[str, float]:
    """1 / n where the reference is among the n classes that the answer names; names that are part of the reference do not count.

    `sample.extra["all_classes"]` lists the classes. LongBench removes such names from the list that it walks, and so keeps the second
    of two neighbours; here both go. TREC's classes give no such neighbours in an answer that names one class.
    """
    answer = _considered(prediction, sample)
    scores = [0.0]
    for reference in sample.references:
        named = [name for name in sample.extra["all_classes"] if name in answer and (name == reference or name not in reference)]
        scores.append(1 / len(named) if reference in named else 0.0)
    return {"score": max(scores)}


def number_fraction(prediction: str, sample: Sample) -> dict[str, float]:
    """Share of the answer's whole numbers that are the reference's (its first: "Paragraph 7" is 7); 0 where it has none.

    As in LongBench, digits are compared as text: 07 is not 7, and 7.5 is the numbers 7 and 5.
    """
    numbers = re.findall(r"\d+", prediction)
    scores = [0.0]
    for reference in sample.references:
        wanted = re.search(r"\d+", reference)
        if wanted and numbers:
            scores.append(numbers.count(wanted[0]) / len(numbers))
    return {"score": max(scores)}


def code_similarity(prediction: str, sample: Sample) -> dict[str, float]:
    """Similarity of the answer's first line of code and the reference, in hundredths; the best over the references.

    The first line is the first after leading line breaks that has no back-tick, # or //, which LongBench takes for marks of Markdown
    and comments; so a reference with such a mark (`#include`, an address) cannot be reached. The similarity is difflib's, which is what
    fuzzywuzzy computes where python-Levenshtein is not installed, and LongBench does not ask for it. `rapidfuzz`, `thefuzz` and
    fuzzywuzzy with python-Levenshtein use the longest common subsequence instead: as high or higher, by some points for unlike lines.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line:
        return {"score": 0.0}
    ratios = [difflib.SequenceMatcher(None, line, reference).ratio() for reference in sample.references]
    return {"score": round(100 * max(ratios)) / 100}


def multiple_choice(prediction: str, sample: Sample) -> dict[str, float]:
    """Whether the answer's letter, A to D, is the reference: after "The correct answer is ", in parentheses, else bare.

    As in LongBench-v2, asterisks are dropped and case counts. An answer without a letter, or an empty one, is wrong.
    """
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return {"score": float(found is not None and found[1] in sample.references)}


def letter_or_text(prediction: str, sample: Sample) -> dict[str, float]:
    """LongHealth. score: the answer's letter is that of the right option; text_match: the answer contains that option's text.

    `sample.references` holds the letter and the text. text_match is how LOOM scores: case counts, and an answer that quotes several
    options is right. The letter is the one after "answer is" or "answer:", else the one that begins the answer, with or without "option",
    brackets and quotes. It is none where it is part of a text: "A patient", "B-cell lymphoma".
    """
    letter, option = sample.references
    text = prediction.replace("*", "")
    found = re.search(rf"(?i:\banswer(?: is:?|:)){_LETTER}", text) or re.match(rf"{_LETTER}[ \t]*(?:[^\w \t]|$)", text)
    return {"score": float(found is not None and found[1] == letter), "text_match": float(option in prediction)}


# "A", unlike the other letters, is a word, so a bare one before other words is none.
_LETTER = r"""\s*(?i:option\s+)?[(\["'“]*(A(?![ \t]+(?!because\b|since\b|as\b)\w)|[B-F])\b(?![-'’]\w)"""


def math_expression(prediction: str, sample: Sample) -> dict[str, float]:
    """Whether the answer equals the reference as LaTeX, see `math_equal`."""
    return {"score": float(any(math_equal(prediction, reference) for reference in sample.references))}


def final_number(prediction: str, sample: Sample) -> dict[str, float]:
    """Whether the answer's final number equals the reference: 1,200 is 1200.00, and $18. is 18.

    The number is the one in the last boxed expression; without one, the one after the last "####", or after the last "answer is" that
    one follows on its line (or on the next, after a colon); without those, the last of the answer. A boxed expression or "####" line with
    several numbers (such as a fraction) has no final number; powers of units and remarks in parentheses behind a number do not count.
    """
    return _number_score(_final_number(prediction, last=True), sample)


def final_integer(prediction: str, sample: Sample) -> dict[str, float]:
    """As `final_number`, but the last number of an answer that names no final one does not count: reasoning that was cut off has some.

    References are whole numbers (AIME's, from 0 to 999), so no other answer equals one; 025 is 25.
    """
    return _number_score(_final_number(prediction, last=False), sample)


def parse_number(text: str) -> Decimal | None:
    """The one number of a text, without separators, currency and units; None where there is none or more than one."""
    numbers = _numbers(text.rsplit("=", 1)[-1])
    return numbers[0] if len(numbers) == 1 else None


def _number_score(number: Decimal | None, sample: Sample) -> dict[str, float]:
    return {"score": float(number is not None and number in [parse_number(reference) for reference in sample.references])}


def _final_number(prediction: str, *, last: bool) -> Decimal | None:
    if (boxed := last_boxed(prediction)) is not None:
        return parse_number(boxed)
    if "####" in prediction:
        line = prediction.rsplit("####", 1)[1].strip().split("\n")[0]
        return parse_number(re.sub(r"(\d.*?)\s\(.*?\)", r"\1", line))
    if said := re.findall(r"(?i)\banswer is\b((?:[^\n\d]*:\s*\n)?[^\n]*)", prediction):
        found = [numbers for text in said if (numbers := _numbers(re.split(r"\.\s", text)[0].rsplit("=", 1)[-1]))]
        return found[-1][0] if found else None
    numbers = _numbers(prediction) if last else []
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}\s*\^\s*(?:\d|\{\d+\})", " ", text)  # units such as \text{cm}^2
    text = re.sub(r"\{,\}|\\[,!; $]", "", text.replace("−", "-"))  # LaTeX's separators, spaces and dollar
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    found = re.findall(r"(?<![\d.)\w])-?[$€£]?(?:\d+(?:\.\d+)?|\.\d+)", text)
    return [Decimal(re.sub(r"[$€£]", "", number)) for number in found]


def _considered(prediction: str, sample: Sample) -> str:
    """The part of an answer that counts: its first line after leading line breaks where `extra["first_line"]` says so."""
    return prediction.lstrip("\n").split("\n")[0] if sample.extra.get("first_line") else prediction


def _token_f1(prediction: str, reference: str) -> float:
    answer, wanted = _words(prediction), _words(reference)
    common = sum((Counter(answer) & Counter(wanted)).values())
    return 2 * common / (len(answer) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _rouge_l(prediction: str, reference: str) -> float:
    if not all(re.search(r"[^\s.]", text) for text in (prediction, reference)):
        return 0.0
    answer, wanted = ([" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (prediction, reference))
    common: set[str] = set().union(*(_common_words(sentence, other) for sentence in wanted for other in answer))
    precision, recall = (len(common) / len(set().union(*sentences)) for sentences in (answer, wanted))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _common_words(reference: Sequence[str], answer: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence: of several that one which keeps to the reference's later words."""
    numbers = {word: number for number, word in enumerate({*reference, *answer})}
    wanted, given = (np.array([numbers[word] for word in words]) for words in (reference, answer))
    lengths = np.zeros((len(wanted) + 1, len(given) + 1), np.int32)  # of the subsequence of the first i and the first j words
    for i, word in enumerate(wanted):
        longer = np.where(given == word, lengths[i, :-1] + 1, lengths[i, 1:])
        np.maximum.accumulate(longer, out=lengths[i + 1, 1:])
    words, i, j = set(), len(wanted), len(given)
    while i and j:
        if reference[i - 1] == answer[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return words


METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "number_fraction": number_fraction,
    "code_similarity": code_similarity,
    "multiple_choice": multiple_choice,
    "letter_or_text": letter_or_text,
    "math_expression": math_expression,
    "final_number": final_number,
    "final_integer": final_integer,
    **metrics_ruler.METRICS,
}
