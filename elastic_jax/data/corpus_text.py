"""Texts of the offline corpus, split into a training and a held-out part that share no article, question, paper, file or essay section.

Everything comes from `elastic_jax.assets` and from the running interpreter's own library (so the code part depends on its version).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sysconfig
from pathlib import Path
from typing import Literal

from elastic_jax import assets

Split = Literal["train", "heldout"]
_HELDOUT_SHARE = 5  # one in five
_SECTION_PIECES = 40
# Tests, code that pip put there, and files that are tables rather than code.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "lib2to3", "ensurepip", "turtledemo"),
}


def in_split(key: str, split: Split) -> bool:
    """Whether whatever `key` names belongs to a split: decided by its hash, so it never moves."""
    heldout = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % _HELDOUT_SHARE == 0
    return heldout == (split == "heldout")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Article:
    """An encyclopedia article: its paragraphs, and (paragraph number, question, answer, id) of what is asked about them."""

    title: str
    paragraphs: list[str]
    questions: list[tuple[int, str, str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HopQuestion:
    """A question that needs all `gold` documents, and the `distractors` found for it; documents are "title\\ntext"."""

    id: str
    question: str
    answer: str
    gold: list[str]
    distractors: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A research paper without its abstract, the abstract, and a summary of three sentences that a person wrote."""

    id: str
    title: str
    paragraphs: list[str]
    abstract: str
    summary: str


def articles(split: Split) -> list[Article]:
    """SQuAD's articles with their answerable questions, split by article."""
    result = []
    for article in json.loads(assets.require("squad").read_text(encoding="utf-8"))["data"]:
        title = article["title"].replace("_", " ")
        if not in_split(f"squad:{title}", split):
            continue
        questions = [
            (number, asked["question"].strip(), asked["answers"][0]["text"], asked["id"])
            for number, paragraph in enumerate(article["paragraphs"])
            for asked in paragraph["qas"]
            if not asked["is_impossible"]
        ]
        paragraphs = [paragraph["context"].strip() for paragraph in article["paragraphs"]]
        result.append(Article(title=title, paragraphs=paragraphs, questions=questions))
    return result


def hop_questions(split: Split) -> list[HopQuestion]:
    """HotpotQA's questions, split by question. Yes-or-no questions are left out: half of them are right without reading."""
    result = []
    for asked in json.loads(assets.require("hotpotqa").read_text(encoding="utf-8")):
        if asked["answer"] in ("yes", "no") or not in_split(f"hotpotqa:{asked['_id']}", split):
            continue
        needed = {title for title, _ in asked["supporting_facts"]}
        documents = [(title, f"{title}\n{''.join(sentences).strip()}") for title, sentences in asked["context"]]
        result.append(
            HopQuestion(
                id=asked["_id"],
                question=asked["question"].strip(),
                answer=asked["answer"],
                gold=[text for title, text in documents if title in needed],
                distractors=[text for title, text in documents if title not in needed],
            )
        )
    return result


def essay_pieces(split: Split) -> list[str]:
    """The essays as pieces of a few sentences, in order; split by sections of 40 pieces."""
    text = re.sub(r"\s+", " ", json.loads(assets.require("essays").read_text(encoding="utf-8"))["text"])
    # Where the source dropped a paragraph break, a sentence's end touches the next one's capital.
    pieces, current = [], ""
    for sentence in re.split(r"(?<=[.!?]) |(?<=[a-z)\"][.!?])(?=[A-Z])", text):
        current = f"{current} {sentence}".lstrip()
        if len(current) > 300:
            pieces.append(current)
            current = ""
    return [piece for number, piece in enumerate(pieces) if in_split(f"essays:{number // _SECTION_PIECES}", split)]


def papers(split: Split) -> list[Paper]:
    """ACLSum's papers, split by paper."""
    folder = assets.require("aclsum")
    result = []
    for part in ("train", "val", "test"):
        for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if not in_split(f"aclsum:{record['id']}", split):
                continue
            paper = json.loads((folder / "paper_jsons" / f"{record['id']}.json").read_text(encoding="utf-8"))
            result.append(
                Paper(
                    id=record["id"],
                    title=paper["title"],
                    paragraphs=[paragraph["text"] for paragraph in paper["pdf_parse"]["body_text"] if paragraph["text"].strip()],
                    abstract=paper["abstract"].strip(),
                    summary=" ".join(record["summary"][aspect].strip() for aspect in ("challenge", "approach", "outcome")),
                )
            )
    return result


def code_files(split: Split) -> list[tuple[str, str]]:
    """(path, text) of the standard library's modules, by path; split by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    result = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1]) and in_split(f"code:{name}", split):
            try:
                result.append((name, file.read_text(encoding="utf-8").strip("\n")))
            except UnicodeDecodeError:
                continue  # a few modules declare another encoding
    return result
