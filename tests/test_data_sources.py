"""Every source on a small sample in its own layout, and what is said about files that are not in it."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_jax.data.dataset import PackedDataset
from elastic_jax.data.hub_sources import HUB_SOURCES
from elastic_jax.data.rows import Reason, RejectionReport, Row
from elastic_jax.data.sources import load_documents, load_rows
from elastic_jax.data.tasks import TaskClass
from tests.data_helpers import byte_tokenizer

# Records in the layout in which each source is published: file, records (what is not read is kept in part).
SAMPLES = {
    "chatqa2": {
        "long_sft/long_sft_QA_train.json": [
            {
                "paragraph_id": "",
                "sub-paragraphs": "",
                "question": "User: Read the article.\n\nArticle:\nA long one.\n\nQuestion:\nWho wrote it?\n\nAssistant:",
                "answer": "Nobody.",
            },
            {"paragraph_id": "", "sub-paragraphs": "", "question": "User: Text.\n\nWrite a summary.\n\nAssistant:", "answer": "Short."},
        ],
        "NarrativeQA_131072/NarrativeQA_131072_QA_train.json": [
            {
                "paragraph_id": "p7",
                "sub-paragraphs": "<|begin_of_text|>Once upon a time.",
                "question": "When?",
                "answer": ["Once", "Once upon a time"],
            }
        ],
    },
    "musique": {
        "musique_ans_v1.0_train.jsonl": [
            {
                "id": "2hop__1_2",
                "paragraphs": [
                    {"idx": 0, "title": "A", "paragraph_text": "A is in B.", "is_supporting": True},
                    {"idx": 1, "title": "B", "paragraph_text": "B is in C.", "is_supporting": True},
                ],
                "question": "Where is A's place?",
                "question_decomposition": [],
                "answer": "C",
                "answer_aliases": [],
                "answerable": True,
            },
            {"id": "2hop__3_4", "paragraphs": [], "question": "?", "answer": "x", "answer_aliases": [], "answerable": False},
        ]
    },
    "colt": {
        "sft_data/python_api.jsonl": [
            {
                "namespace": "pkg.mod.f",
                "project_dir": "pkg",
                "code_file_path": "pkg/mod.py",
                "function_name": "f",
                "prefix": "import util\n\ndef f(x):\n",
                "middle": "    return util.g(x)",
                "suffix": "\n\nprint(f(1))\n",
                "cross_file_dependency": [{"code_file_path": "pkg/util.py", "abstraction": "def g(x): ..."}],
                "similar_functions": [{"code_file_path": "pkg/b.py", "code_block": "def h(x):\n    return x"}],
            }
        ]
    },
    "govreport": {"document/train-00000-of-00001.parquet": [{"report": "The agency reports.", "summary": "It reports."}]},
    "xsum": {"data/train.jsonl": [{"document": "News of the day.", "summary": "News.", "id": "35232142"}]},
    "released": {
        "part0.parquet": [
            {"id": "a", "context": "Text.", "question": "What?", "answer": "It.", "metadata": "{'task': 'Single QA', 'is_prefix': False}"},
            {"id": "b", "context": "Text.", "question": "What?", "answer": "It.", "metadata": "{'task': 'In-Context Learning'}"},
            {"id": "c", "context": "Text.", "question": "What?", "answer": "It.", "metadata": "{'task': 'Other'}"},
        ]
    },
}
EXPECTED = {
    "chatqa2": [
        ("Once upon a time.", "When?", "Once", TaskClass.SINGLE_QA),
        ("Read the article.\n\nArticle:\nA long one.", "Question:\nWho wrote it?", "Nobody.", TaskClass.SINGLE_QA),
        ("Text.", "Write a summary.", "Short.", TaskClass.SUMMARIZATION),
    ],
    "musique": [("A\nA is in B.\n\nB\nB is in C.", "Where is A's place?", "C", TaskClass.MULTIHOP_QA)],
    "colt": [
        (
            "File: pkg/util.py\ndef g(x): ...\n\nFile: pkg/b.py\ndef h(x):\n    return x\n\n"
            "File: pkg/mod.py (after the missing code)\n\n\nprint(f(1))\n",
            "import util\n\ndef f(x):\n",
            "    return util.g(x)",
            TaskClass.CODE,
        )
    ],
    "govreport": [("The agency reports.", "", "It reports.", TaskClass.SUMMARIZATION)],
    "xsum": [("News of the day.", "", "News.", TaskClass.SUMMARIZATION)],
    "released": [("Text.", "What?", "It.", TaskClass.SINGLE_QA), ("Text.", "What?", "It.", TaskClass.IN_CONTEXT)],
}


def write(file: Path, records: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(records))
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(spec: str, split: str = "train") -> tuple[list[Row], RejectionReport]:
    report = RejectionReport()
    return list(load_rows(spec, split, report)), report


@pytest.mark.parametrize("name", list(HUB_SOURCES))
def test_a_source_is_read_in_its_published_layout(name, tmp_path):
    for file, records in SAMPLES[name].items():
        write(tmp_path / file, records)
    write(tmp_path / "other_dev_test_data.jsonl", [{"nothing": 1}])
    if name == "released":  # one split only: every file counts as training data
        (tmp_path / "other_dev_test_data.jsonl").unlink()
    rows, report = read(f"{name}:{tmp_path}")
    assert [(row.context, row.question, row.answer, row.task) for row in rows] == EXPECTED[name]
    assert len({row.id for row in rows}) == len(rows)
    expected = {"musique": {Reason.EMPTY_ANSWER: 1}, "released": {Reason.UNKNOWN_TASK: 1}}
    assert dict(report.counts) == expected.get(name, {})
    if name == "released":
        assert [row.is_prefix for row in rows] == [False, True]


@pytest.mark.parametrize("name", list(HUB_SOURCES))
def test_a_missing_column_is_named(name, tmp_path):
    file, records = next(iter(SAMPLES[name].items()))
    gone = HUB_SOURCES[name].columns[-1]
    write(tmp_path / file, [{key: value for key, value in record.items() if key != gone} for record in records])
    with pytest.raises(ValueError, match=f"{Path(file).name}, record 0: no column '{gone}'; found '"):
        read(f"{name}:{tmp_path}")


def test_a_single_file_is_read_for_either_split(tmp_path):
    write(tmp_path / "any.jsonl", SAMPLES["xsum"]["data/train.jsonl"])
    assert read(f"xsum:{tmp_path / 'any.jsonl'}", "heldout")[0] == read(f"xsum:{tmp_path / 'any.jsonl'}")[0] != []


def test_heldout_files_are_told_by_their_path(tmp_path):
    write(tmp_path / "data/train.jsonl", SAMPLES["xsum"]["data/train.jsonl"])
    write(tmp_path / "data/validation.jsonl", [{"document": "Held out.", "summary": "H.", "id": "1"}])
    assert [row.context for row in read(f"xsum:{tmp_path}", "heldout")[0]] == ["Held out."]
    (tmp_path / "data/validation.jsonl").unlink()
    with pytest.raises(ValueError, match=r"matches 'valid\|dev\|test'; found data/train.jsonl"):
        read(f"xsum:{tmp_path}", "heldout")


def test_a_wrong_layout_below_the_columns_is_named(tmp_path):
    write(tmp_path / "train.jsonl", [{"id": "q", "paragraphs": [{"text": "x"}], "question": "?", "answer": "a"}])
    with pytest.raises(ValueError, match=r"record 0: not in the layout of 'musique' \(KeyError\('title'\)\)"):
        read(f"musique:{tmp_path}")


def test_a_corrupt_file_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"document": "a", "summary": "b", "id": "1"}\n{"document": "c", "summ')
    with pytest.raises(ValueError, match=r"train.jsonl: cannot be read after record \d"):
        read(f"xsum:{tmp_path}")
    (tmp_path / "train.jsonl").unlink()
    write(tmp_path / "train.parquet", [{"document": "a", "summary": "b"}] * 100)
    (tmp_path / "train.parquet").write_bytes((tmp_path / "train.parquet").read_bytes()[:-200])
    with pytest.raises(ValueError, match="train.parquet: cannot be read after record 0"):
        read(f"xsum:{tmp_path}")


def test_without_datasets_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="source 'xsum' needs the package `datasets`: pip install datasets"):
        read(f"xsum:{tmp_path}")


def test_a_source_without_hub_copy_asks_for_a_path():
    with pytest.raises(ValueError, match="colt:PATH"):
        read("colt")


@pytest.mark.parametrize("spec", ["", "squad", "jsonl", "packed:", "corpus:x", "xsum,", "musique:"])
def test_an_unknown_source_lists_what_is_accepted(spec):
    with pytest.raises(ValueError, match=r"accepted are corpus, jsonl:PATH, packed:PATH.parquet, chatqa2\[:PATH\]"):
        load_documents(spec, byte_tokenizer(), split="train", max_tokens=100)


LINE = {"id": "one", "context": "c", "question": "q", "answer": "a", "task": "code"}


def test_jsonl_rows(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(LINE).encode(),
        json.dumps(LINE | {"id": None, "task": 4, "is_prefix": True, "extra": 1}).encode(),
        b"",
        json.dumps(LINE | {"task": "poetry"}).encode(),
        json.dumps(LINE | {"answer": "caf"}).encode().replace(b"caf", b"caf\xe9"),
        json.dumps(LINE | {"id": "null", "answer": None}).encode(),
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    rows, report = read(f"jsonl:{tmp_path / 'rows.jsonl'}")
    assert [(row.id, row.task, row.is_prefix) for row in rows] == [
        ("one", TaskClass.CODE, False),
        (f"{tmp_path / 'rows.jsonl'}:2", TaskClass.IN_CONTEXT, True),
        ("null", TaskClass.CODE, False),
    ]
    assert dict(report.counts) == {Reason.UNKNOWN_TASK: 1, Reason.BROKEN_UNICODE: 1}
    assert report.examples[Reason.BROKEN_UNICODE] == [f"{tmp_path / 'rows.jsonl'}:5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"context": "c", "que', r"rows.jsonl:2: not valid JSON \("),
        ("[1]", "rows.jsonl:2: a JSON object is needed, found list"),
        ('{"context": "c", "answer": "a", "task": 0}', "rows.jsonl:2: no column 'question'; found 'context', 'answer', 'task'"),
        (json.dumps(LINE | {"answer": 3}), "rows.jsonl:2: context, question, answer must be texts"),
        (json.dumps(LINE | {"is_prefix": "no"}), "rows.jsonl:2: is_prefix='no'"),
    ],
)
def test_a_bad_jsonl_line_is_named(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(LINE) + "\n" + line)
    with pytest.raises(ValueError, match=message):
        read(f"jsonl:{tmp_path / 'rows.jsonl'}")


def packed_row(**change) -> dict:
    """Two documents of 6 and 4 tokens, in the authors' layout; the second is masked as for "sft"."""
    row = {
        "input_ids": [5, 6, 7, 8, 9, 1, 15, 16, 17, 1],
        "labels": [-100, 6, 7, 8, 9, 1, -100, -100, 17, 1],
        "seq_lengths": [0, 6, 10],
        "task_ids": [1, 3],
        "task_type": ["MultiHop QA", "Code"],
        "range_ids": [[0, 0, 0, 2, 0, 2, 3, 5], [0, 0, 0, 1, 0, 1, 2, 3]],
    }
    return row | change


def test_packed_parquet_is_taken_apart(tmp_path):
    write(tmp_path / "p.parquet", [packed_row(), packed_row(task_ids=[5, 0])])
    documents = load_documents(f"packed:{tmp_path / 'p.parquet'}", byte_tokenizer(), split="train", max_tokens=5)
    assert [d.id for d in documents] == ["p.parquet:0:1", "p.parquet:1:1"]
    documents = load_documents(f"packed:{tmp_path / 'p.parquet'}", byte_tokenizer(), split="train", max_tokens=6, min_tokens=4)
    assert [(d.id, d.task) for d in documents] == [
        ("p.parquet:0:0", TaskClass.MULTIHOP_QA),
        ("p.parquet:0:1", TaskClass.CODE),
        ("p.parquet:1:1", TaskClass.SINGLE_QA),
    ]
    assert dict(documents.report.counts) == {Reason.UNKNOWN_TASK: 1}
    assert documents.report.kept == 3
    first, second = documents[0], documents[1]
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert first.labelled.tolist() == [False, True, True, True, True, True]
    assert second.labelled.tolist() == [False, False, True, True]
    assert (first.user_turn, first.answer) == ((0, 3), (3, 6))
    assert (second.user_turn, second.answer) == ((0, 2), (2, 4))
    assert first.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [-100, 6]}, "10 input_ids but 2 labels"),
        ({"labels": [6, 7, 8, 9, 1, 15, 16, 17, 1, -100]}, "neither its own token nor -100"),
        ({"seq_lengths": [0, 6, 9]}, r"seq_lengths \[0, 6, 9\]"),
        ({"seq_lengths": [0, 6, 6, 10]}, "do not rise"),
        ({"task_ids": [1]}, "2 documents but task_ids"),
        ({"range_ids": [[0, 0, 0, 2, 0, 2, 3, 6], [0, 0, 0, 1, 0, 1, 2, 3]]}, "do not lie within a document of 6 tokens"),
        ({"input_ids": None}, "a value is missing"),
    ],
)
def test_a_bad_packed_row_is_named(change, message, tmp_path):
    write(tmp_path / "p.parquet", [packed_row(), packed_row(**change)])
    with pytest.raises(ValueError, match=f"p.parquet, row 1: .*{message}"):
        load_documents(f"packed:{tmp_path / 'p.parquet'}", byte_tokenizer(), split="train", max_tokens=10)


def test_a_bad_packed_file_is_named(tmp_path):
    load = lambda: load_documents(f"packed:{tmp_path / 'p.parquet'}", byte_tokenizer(), split="train", max_tokens=10)
    with pytest.raises(FileNotFoundError, match=r"p\.parquet"):
        load()
    write(tmp_path / "p.parquet", [{"input_ids": [1], "labels": [1]}])
    with pytest.raises(ValueError, match=r"p\.parquet: no column 'seq_lengths'; found 'input_ids', 'labels'"):
        load()
    write(tmp_path / "p.parquet", [packed_row()] * 3)
    (tmp_path / "p.parquet").write_bytes((tmp_path / "p.parquet").read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"p\.parquet: cannot be read at row 0"):
        load()


def test_a_mixture_is_read_in_order_and_reported_together(tmp_path):
    write(tmp_path / "p.parquet", [packed_row()])
    write(tmp_path / "rows.jsonl", [LINE, LINE | {"id": "bad", "answer": ""}, LINE | {"id": "long", "context": "c" * 500}])
    spec = f"packed:{tmp_path / 'p.parquet'}, jsonl:{tmp_path / 'rows.jsonl'}"
    documents = load_documents(spec, byte_tokenizer(), split="train", max_tokens=200)
    assert [d.id for d in documents] == ["p.parquet:0:0", "p.parquet:0:1", "one"]
    assert dict(documents.report.counts) == {Reason.EMPTY_ANSWER: 1, Reason.TOO_LONG: 1}
    assert documents.report.kept == 3
    with pytest.raises(ValueError, match="use build_corpus or load_documents"):
        read("corpus")


def test_packs_do_not_depend_on_the_number_of_workers(tmp_path):
    lines = [
        LINE | {"id": str(i), "context": f"word{i} " * (1 + i % 9), "task": i % 5, "answer": "" if i % 11 == 0 else "a"} for i in range(300)
    ]
    write(tmp_path / "rows.jsonl", lines)

    def batches(workers: int) -> list[np.ndarray]:
        documents = load_documents(f"jsonl:{tmp_path / 'rows.jsonl'}", byte_tokenizer(), split="train", max_tokens=128, workers=workers)
        data = PackedDataset(documents, pack_tokens=256, block_size=16, max_documents=4, seed=1)
        leaves = [leaf for step in range(2) for leaf in jax.tree.leaves(data.batch(step, (2, 8)))]
        return [*leaves, np.array(str(documents.report))]

    one = batches(1)
    for workers in (2, 3):
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, batches(workers), strict=True))
