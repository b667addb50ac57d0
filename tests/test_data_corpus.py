"""The offline corpus: on small stand-ins for the assets everywhere, on the real ones where they have been fetched."""

import collections
import json
import re

import pytest

from elastic_jax import assets
from elastic_jax.data import corpus_text
from elastic_jax.data.chat import ChatEncoder
from elastic_jax.data.corpus import build_corpus
from elastic_jax.data.rows import Row
from elastic_jax.data.sources import load_documents
from elastic_jax.data.tasks import TaskClass
from tests.data_helpers import byte_tokenizer

KINDS = {
    TaskClass.SINGLE_QA: {"needle", "squad"},
    TaskClass.MULTIHOP_QA: {"hotpotqa"},
    TaskClass.SUMMARIZATION: {"aclsum"},
    TaskClass.CODE: {"code"},
    TaskClass.IN_CONTEXT: {"labels"},
}


def sentences(name: str, count: int) -> str:
    return " ".join(f"{name} has a fact with number {i} that is told in this sentence." for i in range(count))


@pytest.fixture
def small_assets(tmp_path, monkeypatch):
    """Files in the assets' layouts: 30 articles, 60 two-hop questions, essays, 12 papers, 20 modules."""
    articles = [
        {
            "title": f"Title_{a}",
            "paragraphs": [
                {
                    "context": sentences(f"Item {a}.{p}", 3),
                    "qas": [
                        {"id": f"{a}.{p}", "question": f"What is {a}.{p}?", "answers": [{"text": f"Item {a}.{p}"}], "is_impossible": False},
                        {"id": f"no{a}.{p}", "question": "Impossible?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(4)
            ],
        }
        for a in range(30)
    ]
    hops = [
        {
            "_id": f"h{i}",
            "question": f"Hop {i}?",
            "answer": "yes" if i % 10 == 0 else f"Answer {i}",
            "supporting_facts": [["Gold 1", 0], ["Gold 2", 1]],
            "context": [
                [title, [sentences(f"{title} of {i}", 1), " " + sentences(title, 1)]]
                for title in ("D 1", "Gold 1", "D 2", "D 3", "Gold 2", "D 4")
            ],
        }
        for i in range(60)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hops))
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": sentences("An essay", 8000)}))
    (tmp_path / "aclsum" / "paper_jsons").mkdir(parents=True)
    for part, ids in {"train": range(8), "val": range(8, 10), "test": range(10, 12)}.items():
        records = [{"id": f"P{i}", "summary": {aspect: f"{aspect} {i}." for aspect in ("challenge", "approach", "outcome")}} for i in ids]
        (tmp_path / "aclsum" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, records)))
        for i in ids:
            body = [{"text": sentences(f"Paper {i}.{p}", 3)} for p in range(6)]
            paper = {"title": f"On {i}", "abstract": f"Abstract {i}.", "pdf_parse": {"body_text": [*body, {"text": ""}]}}
            (tmp_path / "aclsum" / "paper_jsons" / f"P{i}.json").write_text(json.dumps(paper))
    code = tmp_path / "stdlib"
    (code / "test").mkdir(parents=True)
    for i in range(20):
        (code / f"m{i}.py").write_text("".join(f"def function_{i}_{j}():\n    return {j}\n\n" for j in range(40)))
    (code / "test" / "test_m.py").write_text("skipped\n" * 100)
    (code / "latin.py").write_bytes(b"# \xe9\n" * 100)
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path))
    monkeypatch.setattr(corpus_text.sysconfig, "get_paths", lambda: {"stdlib": str(code)})
    return tmp_path


def build(tokenizer, **change) -> list[Row]:
    return build_corpus(tokenizer, **{"split": "train", "min_tokens": 1400, "max_tokens": 2000, "per_class": 7, "seed": 0} | change)


def check_rows(rows: list[Row], tokenizer, per_class: int, shortest: int, longest: int) -> None:
    counts = collections.Counter(row.task for row in rows)
    assert counts == {task: per_class for task in TaskClass}
    assert all(row.kind in KINDS[row.task] for row in rows)
    assert len({row.id for row in rows}) == len(rows)
    encoder = ChatEncoder(tokenizer)
    for row in rows:
        assert encoder.find_fault(row) is None
        length = len(encoder.encode(row).tokens)
        assert shortest <= length <= longest, row.id


def place_of_needle(row: Row, encoder: ChatEncoder) -> tuple[int, float]:
    """Tokens of the context before the number, and the share of the context before it."""
    assert row.context.count(row.answer) == 1
    before = row.context.index(row.answer)
    return len(encoder.ids(row.context[:before])), before / len(row.context)


def test_rows_have_the_asked_lengths_and_classes(small_assets):
    check_rows(build(byte_tokenizer()), byte_tokenizer(), 7, 1400, 2000)


def test_rows_depend_on_seed_and_number_only(small_assets):
    rows = build(byte_tokenizer())
    assert build(byte_tokenizer()) == rows
    assert build(byte_tokenizer(), per_class=3) == rows[: 3 * len(TaskClass)]
    other = {row.context for row in build(byte_tokenizer(), seed=1)}
    assert len(other & {row.context for row in rows}) < len(rows) / 4


def test_needles_lie_in_the_middle(small_assets):
    encoder = ChatEncoder(byte_tokenizer())
    needles = [row for row in build(byte_tokenizer(), per_class=15) if row.kind == "needle"]
    assert len(needles) == 9
    for row in needles:
        tokens, share = place_of_needle(row, encoder)
        assert re.search(r" \d{7}\.$", row.answer)
        assert tokens >= 192
        assert share < 0.8
        assert row.context.count("magic number") == 1


def test_other_classes_need_their_context(small_assets):
    for row in build(byte_tokenizer()):
        if row.kind == "squad":
            assert row.answer in row.context[192:]
        if row.kind == "hotpotqa":
            number = row.question.split()[2].rstrip("?")
            assert f"Gold 1 of {number} has" in row.context
            assert f"Gold 2 of {number} has" in row.context
            assert row.answer == f"Answer {number}"
        if row.kind == "code":
            file = row.id.split(":")[2]
            written = [line for line in (small_assets / "stdlib" / file).read_text().split("\n") if line]
            shown = [line for line in (row.context.split("\n")[-6:] + row.answer.split("\n")) if line]
            assert "\n".join(shown) in "\n".join(written)
        if row.kind == "labels":
            assert f"Topic: {row.answer}" in row.context
            assert row.question.split("\n")[0] not in row.context
        if row.kind == "aclsum":
            assert "Abstract" not in row.context


def test_the_parts_share_nothing(small_assets):
    for load, name in [
        (corpus_text.articles, lambda a: a.title),
        (corpus_text.hop_questions, lambda q: q.id),
        (corpus_text.papers, lambda p: p.id),
        (corpus_text.code_files, lambda f: f[0]),
    ]:
        train, heldout = ({name(item) for item in load(split)} for split in ("train", "heldout"))
        assert train
        assert heldout
        assert train.isdisjoint(heldout)
    assert not {item.answer for item in corpus_text.hop_questions("train")} & {"yes", "no"}
    assert {name for name, _ in corpus_text.code_files("train")}.isdisjoint({"test/test_m.py", "latin.py"})
    splits = ("train", "heldout")
    keys = {split: {row.question for row in build(byte_tokenizer(), split=split, per_class=15) if row.kind == "needle"} for split in splits}
    assert keys["train"].isdisjoint(keys["heldout"])


def test_load_documents_builds_the_corpus(small_assets):
    documents = load_documents(
        "corpus", byte_tokenizer(), split="heldout", min_tokens=1400, max_tokens=2000, corpus_rows_per_class=2, seed=3
    )
    assert documents.class_counts == {task: 2 for task in TaskClass}
    assert documents.report.rejected == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, "split='test'"),
        ({"min_tokens": 1, "max_tokens": 200}, "max_tokens=200"),
        ({"min_tokens": 3000}, "min_tokens=3000"),
    ],
)
def test_bad_arguments_are_named(change, message, small_assets):
    with pytest.raises(ValueError, match=message):
        build(byte_tokenizer(), **change)


def test_absent_assets_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="fetch_assets"):
        build(byte_tokenizer())


@pytest.fixture(scope="module")
def real_tokenizer():
    try:
        for name in assets.ASSETS:
            assets.require(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    from elastic_jax.weights import load_tokenizer

    return load_tokenizer(assets.require("smollm2_135m"))


@pytest.mark.assets
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_real_corpus(real_tokenizer, split):
    rows = build(real_tokenizer, split=split, min_tokens=870, max_tokens=1024, per_class=10)
    check_rows(rows, real_tokenizer, 10, 870, 1024)
    encoder = ChatEncoder(real_tokenizer)
    for row in rows:
        if row.kind == "needle":
            tokens, share = place_of_needle(row, encoder)
            assert tokens >= 180
            assert share < 0.8
