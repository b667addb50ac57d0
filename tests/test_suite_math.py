"""GSM8K, MATH and AIME 2024, read from small files in the benchmarks' own layouts."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_jax.evaluation.metrics import METRICS
from elastic_jax.evaluation.suites import mathematics

_GSM8K = [
    {"question": "Ann has 3 boxes of 6 eggs. How many eggs?", "answer": "3 * 6 = <<3*6=18>>18 eggs.\n#### 18"},
    {"question": "A house costs $70,000 and repairs a third. In total?", "answer": "It is much.\n#### 93,333"},
]
_MATH = [
    {
        "problem": "What is $\\frac{2}{4}$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "First \\boxed{2/4}, then $\\boxed{\\frac{1}{2}}$.",
    },
    {"problem": "Which way?", "level": "Level 5", "type": "Geometry", "solution": "It is $\\boxed{\\text{east}}$."},
]
_AIME = [{"id": 60, "problem": "Find $m + n$.", "answer": "025"}, {"id": 61, "problem": "Find $n$.", "answer": "204"}]
_RECORDS = {"gsm8k": _GSM8K, "math": _MATH, "aime24": _AIME}


def _write(folder, benchmark):
    """The hub's layout of each."""
    if benchmark == "gsm8k":
        for part in ("main", "socratic"):
            (folder / part).mkdir()
            for split in ("train", "test"):
                rows = _GSM8K if (part, split) == ("main", "test") else [{"question": "no", "answer": "#### 0"}]
                pq.write_table(pa.Table.from_pylist(rows), folder / part / f"{split}-00000-of-00001.parquet")
    elif benchmark == "math":
        (folder / "test.jsonl").write_text("\n".join(map(json.dumps, _MATH)))
        (folder / "train.jsonl").write_text("no")
    else:
        (folder / "data").mkdir()
        rows = [{**row, "answer": int(row["answer"])} for row in _AIME]
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "train-00000-of-00001.parquet")
    return folder


def test_gsm8k(tmp_path):
    first, second = mathematics.samples(_write(tmp_path, "gsm8k"), benchmark="gsm8k")
    assert (first.id, first.task, first.group, first.metric) == ("gsm8k/0/0", "gsm8k", "GSM8K", "final_number")
    assert first.references == ("18",)
    assert second.references == ("93,333",)
    assert first.prompt.startswith("Ann has 3 boxes")
    assert first.prompt.endswith("end with the final number in \\boxed{}.")


def test_math(tmp_path):
    first, second = mathematics.samples(_write(tmp_path, "math"), benchmark="math")
    assert (first.references, second.references) == (("\\frac{1}{2}",), ("\\text{east}",))
    assert first.extra == {"question": "math/0", "prompt": "own", "level": "Level 1", "subject": "Algebra"}
    assert (first.group, first.metric) == ("MATH", "math_expression")


def test_math_as_it_was_published(tmp_path):
    for number, record in enumerate(_MATH):
        for split in ("train", "test"):
            file = tmp_path / "MATH" / split / record["type"].lower() / f"{number}.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(record if split == "test" else {"problem": "no", "solution": "\\boxed{0}"}))
    samples = mathematics.samples(mathematics.folder_of(tmp_path, "math"), benchmark="math")
    assert [sample.references[0] for sample in samples] == ["\\frac{1}{2}", "\\text{east}"]
    file.write_text("[]")
    with pytest.raises(ValueError, match="1.json: a problem is needed, an object; found list"):
        mathematics.samples(tmp_path, benchmark="math")


def test_a_folder_with_several_benchmarks(tmp_path):
    assert mathematics.folder_of(tmp_path, "math") == tmp_path
    for name in ("GSM8K", "MATH-500"):
        (tmp_path / name).mkdir()
    assert mathematics.folder_of(tmp_path, "math") == tmp_path / "MATH-500"
    assert mathematics.folder_of(tmp_path, "gsm8k") == tmp_path / "GSM8K"
    with pytest.raises(ValueError, match="has no subfolder for aime24: name one aime24, or leave it out"):
        mathematics.folder_of(tmp_path, "aime24")


def test_aime(tmp_path):
    first, second = mathematics.samples(_write(tmp_path, "aime24"), benchmark="aime24")
    assert (first.references, second.references) == (("25",), ("204",))
    assert (first.group, first.metric) == ("AIME24", "final_integer")


@pytest.mark.parametrize("benchmark", mathematics.TASKS)
def test_lines_and_parquet_are_the_same(tmp_path, benchmark):
    lines, table = tmp_path / "items.jsonl", tmp_path / "items.parquet"
    lines.write_text("\n".join(map(json.dumps, _RECORDS[benchmark])))
    pq.write_table(pa.Table.from_pylist(_RECORDS[benchmark]), table)
    hub = tmp_path / "hub"
    hub.mkdir()
    found = mathematics.samples(lines, benchmark=benchmark)
    assert found == mathematics.samples(table, benchmark=benchmark) == mathematics.samples(_write(hub, benchmark), benchmark=benchmark)


def test_k_samples_of_each_problem(tmp_path):
    source = _write(tmp_path, "aime24")
    samples = mathematics.samples(source, benchmark="aime24", k=3)
    assert [sample.id for sample in samples] == [f"aime24/{number}/{k}" for number in range(2) for k in range(3)]
    assert [sample.extra["question"] for sample in samples] == ["aime24/0"] * 3 + ["aime24/1"] * 3
    assert len({sample.prompt for sample in samples}) == 2
    assert mathematics.samples(source, benchmark="aime24", k=3, limit=1) == samples[:3]
    with pytest.raises(ValueError, match="k=0: a whole number from 1 is needed"):
        mathematics.samples(source, benchmark="aime24", k=0)
    with pytest.raises(ValueError, match="benchmark='aime25': accepted are gsm8k, math, aime24"):
        mathematics.samples(source, benchmark="aime25")


@pytest.mark.parametrize("benchmark", mathematics.TASKS)
def test_a_perfect_predictor_has_100_and_an_empty_one_0(tmp_path, benchmark):
    for sample in mathematics.samples(_write(tmp_path, benchmark), benchmark=benchmark):
        metric = METRICS[sample.metric]
        assert metric(f"Let us see. 1 + 1 = 2. So it is \\boxed{{{sample.references[0]}}}.", sample)["score"] == 1
        assert metric("Let us see. 1 + 1 = 2. So it is \\boxed{7}.", sample)["score"] == 0
        assert metric("", sample)["score"] == 0


@pytest.mark.parametrize(
    ("benchmark", "changes", "message"),
    [
        ("gsm8k", {"answer": "18"}, "column 'answer' has no number after ####"),
        ("gsm8k", {"answer": "#### many"}, "column 'answer' has no number after ####"),
        ("gsm8k", {"question": ""}, "column 'question' is empty"),
        ("math", {"solution": "It is 5."}, r"column 'solution' has no \\boxed\{\}"),
        ("math", {"solution": "It is $\\boxed{5"}, r"column 'solution' has no \\boxed\{\}"),
        ("math", {"problem": None}, "column 'problem' holds NoneType, a text is needed"),
        ("aime24", {"answer": "1000"}, "column 'answer' holds '1000', a whole number from 0 to 999 is needed"),
        ("aime24", {"answer": None}, "column 'answer' holds None, a whole number from 0 to 999 is needed"),
    ],
)
def test_a_bad_value_names_file_row_and_column(tmp_path, benchmark, changes, message):
    rows = [_RECORDS[benchmark][0], {**_RECORDS[benchmark][1], **changes}]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=f"test.jsonl:2: {message}"):
        mathematics.samples(tmp_path, benchmark=benchmark)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=f"test.parquet, row 1: {message}"):
        mathematics.samples(tmp_path / "test.parquet", benchmark=benchmark)


def test_another_benchmarks_file(tmp_path):
    with pytest.raises(ValueError, match="test.jsonl:1: no column 'question'; found 'problem', 'level', 'type', 'solution'"):
        mathematics.samples(_write(tmp_path, "math"), benchmark="gsm8k")


def test_a_truncated_parquet(tmp_path):
    source = _write(tmp_path, "gsm8k")
    file = source / "main" / "test-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match="main/test-00000-of-00001.parquet: cannot be read at row 0"):
        mathematics.samples(source, benchmark="gsm8k")
