"""LongBench-E and LongBench-v2, read from small files in the benchmarks' own layouts."""

from __future__ import annotations

import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_jax.evaluation.metrics import METRICS
from elastic_jax.evaluation.suites import longbench_e, longbench_v2

_TREC = ["City", "Country", "Other location"]
_ANSWERS = {
    "qasper": ["a neural network", "unanswerable"],
    "trec": ["City"],
    "gov_report": ["The report finds that costs rose. It asks for a plan."],
    "passage_count": ["7"],
    "passage_retrieval_en": ["Paragraph 12"],
    "lcc": ["        return self.size"],
    "repobench-p": ["import os"],
}


def _record(task: str, number: int = 0, **changes) -> dict:
    record = {
        "input": "" if task in ("gov_report", "multi_news", "passage_count", "lcc") else f"the input {number}",
        "context": f"the context {number} with {{braces}} and {{input}}",
        "answers": _ANSWERS.get(task, ["Paris in spring"]),
        "length": 3000 * (number + 1),
        "dataset": task,
        "language": "en",
        "all_classes": _TREC if task == "trec" else None,
        "_id": f"{task}-{number}",
    }
    return {**record, **changes}


def _lines(records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


@pytest.fixture
def data(tmp_path):
    """The hub's layout, unpacked: data/TASK_e.jsonl, beside files of the tasks without lengths."""
    folder = tmp_path / "data"
    folder.mkdir()
    for task in longbench_e.TASKS:
        (folder / f"{task}_e.jsonl").write_bytes(_lines(_record(task, number) for number in range(3)))
        (folder / f"{task}.jsonl").write_bytes(_lines([_record(task, 9)]))
    return tmp_path


def test_every_task_is_read_as_the_paper_groups_it(data):
    samples = longbench_e.samples(data)
    assert len(samples) == 39
    groups = {}
    for sample in samples:
        groups.setdefault(sample.group, {})[sample.task] = sample.max_new_tokens
    assert groups == {
        "Single-Doc QA": {"qasper": 128, "multifieldqa_en": 64},
        "Multi-Doc QA": {"hotpotqa": 32, "2wikimqa": 32},
        "Summarization": {"gov_report": 512, "multi_news": 512},
        "In-Context": {"trec": 64, "triviaqa": 32, "samsum": 128},
        "Synthetic": {"passage_count": 32, "passage_retrieval_en": 32},
        "Code": {"lcc": 64, "repobench-p": 64},
    }
    assert [sample.length for sample in samples[:3]] == ["0-4k", "4-8k", "8k+"]
    assert [sample.id for sample in samples[:3]] == ["qasper/0", "qasper/1", "qasper/2"]
    assert len({sample.id for sample in samples}) == 39
    assert {sample.task for sample in samples if not sample.chat} == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {sample.task: sample.stop for sample in samples if sample.stop} == {"samsum": ("\n",)}
    assert {sample.task: sample.min_new_tokens for sample in samples if sample.min_new_tokens} == {"samsum": 1}
    assert all(sample.extra["prompt"] == "re-worded" for sample in samples)
    json.dumps([dict(sample.extra) for sample in samples])


def test_ranges_of_length_are_half_open(tmp_path):
    file = tmp_path / "lcc_e.jsonl"
    file.write_bytes(_lines(_record("lcc", length=words) for words in (0, 3999, 4000, 7999, 8000, 90000)))
    assert [s.length for s in longbench_e.samples(file, tasks=["lcc"])] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+", "8k+"]


def test_prompts_keep_each_recipe(data):
    prompts = {sample.task: sample.prompt for sample in longbench_e.samples(data, limit=1)}
    context = "the context 0 with {braces} and {input}"
    for task, prompt in prompts.items():
        assert prompt.count(context) == 1, task
        assert ("the input 0" in prompt) == (task not in ("gov_report", "multi_news", "passage_count", "lcc")), task
    for task in ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"):
        before, after = prompts[task].split(context)
        assert before.strip() in after, task
        assert after.endswith("Question: the input 0\nAnswer:")
    for task in ("gov_report", "multi_news"):
        assert prompts[task].endswith("\nSummary:")
    for task in ("trec", "triviaqa", "samsum"):
        assert prompts[task].endswith("the input 0")
    for task in ("lcc", "repobench-p"):
        assert prompts[task].endswith("The next line:\n")


@pytest.mark.parametrize("task", longbench_e.TASKS)
def test_a_perfect_predictor_has_100_and_an_empty_one_0(data, task):
    for sample in longbench_e.samples(data, tasks=[task]):
        metric = METRICS[sample.metric]
        assert metric(sample.references[0], sample)["score"] == pytest.approx(1, abs=1e-6)
        assert metric(f"\n{sample.references[0]}\nPassage: more", sample)["score"] > 0
        assert metric("", sample)["score"] == 0


def test_first_lines_count_where_the_benchmark_says_so(data):
    for sample in longbench_e.samples(data, limit=1):
        score = METRICS[sample.metric](f"{sample.references[0]}\nCountry 5 and more words", sample)["score"]
        first_line = sample.task in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
        assert (score > 1 - 1e-6) == first_line, sample.task


def test_tasks_and_limit(data):
    samples = longbench_e.samples(data, tasks=["lcc", "trec"], limit=2)
    assert [sample.id for sample in samples] == ["lcc/0", "lcc/1", "trec/0", "trec/1"]
    assert samples[2].extra["all_classes"] == _TREC
    assert samples[0].extra["_id"] == "lcc-0"
    with pytest.raises(ValueError, match="tasks has 'narrativeqa': accepted are qasper, "):
        longbench_e.samples(data, tasks=["narrativeqa"])


def test_the_hub_archive_is_read_as_it_is(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((data / "data").iterdir()):
            archive.write(file, f"data/{file.name}")
    assert longbench_e.samples(folder) == longbench_e.samples(folder / "data.zip") == longbench_e.samples(data)


def test_a_broken_archive_is_named(tmp_path):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        file.writestr("data/lcc_e.jsonl", _lines([_record("lcc")]))
    content = archive.read_bytes()
    archive.write_bytes(content.replace(b"the context", b"the CONTEXT", 1))  # fails its checksum
    with pytest.raises(ValueError, match=r"data.zip/data/lcc_e.jsonl: cannot be read \(Bad CRC"):
        longbench_e.samples(tmp_path, tasks=["lcc"])
    archive.write_bytes(content[:40])
    with pytest.raises(ValueError, match="data.zip: cannot be read"):
        longbench_e.samples(tmp_path, tasks=["lcc"])


def test_the_benchmarks_own_prompts(data, tmp_path):
    own = tmp_path / "dataset2prompt.json"
    own.write_text(json.dumps({"lcc": "Go on:\n{context}\n>", "hotpotqa": "{input}? {context}", "trec": "{context}"}))
    first, second = longbench_e.samples(data, tasks=["lcc", "hotpotqa"], limit=1, prompts=own)
    assert first.prompt == "Go on:\nthe context 0 with {braces} and {input}\n>"
    assert second.prompt == "the input 0? the context 0 with {braces} and {input}"
    assert first.extra["prompt"] == "dataset2prompt"
    with pytest.raises(ValueError, match=r"dataset2prompt.json: the prompt of 'trec' has no \{input\}"):
        longbench_e.samples(data, tasks=["trec"], prompts=own)
    with pytest.raises(ValueError, match=r"dataset2prompt.json: no column 'qasper'"):
        longbench_e.samples(data, prompts=own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": " \n"}, "column 'context' is empty"),
        ({"context": None}, "column 'context' holds NoneType, a text is needed"),
        ({"input": ""}, "column 'input' is empty"),
        ({"answers": []}, r"column 'answers' holds \[\], a list of texts is needed"),
        ({"answers": "Paris"}, "column 'answers' holds 'Paris', a list of texts is needed"),
        ({"length": "long"}, "column 'length' holds 'long', a number of words is needed"),
        ({"context": "half \ud83d a pair"}, r"column 'context' is not valid UTF-8 \(half of a surrogate pair at character 5\)"),
    ],
)
def test_a_bad_value_names_file_row_and_column(tmp_path, changes, message):
    good, bad = _record("hotpotqa"), _record("hotpotqa", **changes)
    (tmp_path / "hotpotqa_e.jsonl").write_text("\n".join(map(json.dumps, (good, bad))))
    with pytest.raises(ValueError, match=rf"hotpotqa_e.jsonl:2: {message}"):
        longbench_e.samples(tmp_path, tasks=["hotpotqa"])


@pytest.mark.parametrize("column", ["context", "input", "answers", "length", "_id"])
def test_a_missing_column_is_named(tmp_path, column):
    record = _record("trec")
    del record[column]
    (tmp_path / "trec_e.jsonl").write_bytes(_lines([record]))
    with pytest.raises(ValueError, match=rf"trec_e.jsonl:1: no column '{column}'; found "):
        longbench_e.samples(tmp_path, tasks=["trec"])


def test_values_that_only_some_tasks_need(tmp_path):
    (tmp_path / "trec_e.jsonl").write_bytes(_lines([_record("trec", all_classes=None)]))
    with pytest.raises(ValueError, match="trec_e.jsonl:1: column 'all_classes' holds None"):
        longbench_e.samples(tmp_path, tasks=["trec"])
    (tmp_path / "passage_count_e.jsonl").write_bytes(_lines([_record("passage_count", answers=["seven"])]))
    with pytest.raises(ValueError, match="passage_count_e.jsonl:1: column 'answers' holds .*, each needs a number"):
        longbench_e.samples(tmp_path, tasks=["passage_count"])


def test_files_that_are_not_what_they_should_be(tmp_path):
    file = tmp_path / "lcc_e.jsonl"
    good = _lines([_record("lcc", context="naïve")])
    file.write_bytes(good + good.decode().encode("latin-1"))
    with pytest.raises(ValueError, match=r"lcc_e.jsonl:2: column 'context' is not valid UTF-8 \(half of a surrogate pair at character 2\)"):
        longbench_e.samples(file, tasks=["lcc"])
    file.write_bytes(good.decode().encode("utf-16"))
    with pytest.raises(ValueError, match=r"lcc_e.jsonl:1: not valid UTF-8 \(at byte 0\)"):
        longbench_e.samples(file, tasks=["lcc"])
    file.write_bytes(b"\xef\xbb\xbf" + good)  # a byte order mark does no harm
    assert "naïve" in longbench_e.samples(file, tasks=["lcc"])[0].prompt
    file.write_bytes(good + good[:50])
    with pytest.raises(ValueError, match=r"lcc_e.jsonl:2: not valid JSON \(Unterminated string"):
        longbench_e.samples(file, tasks=["lcc"])
    file.write_bytes(b"[1]\n")
    with pytest.raises(ValueError, match="lcc_e.jsonl:1: an object with named values is needed, found list"):
        longbench_e.samples(file, tasks=["lcc"])
    file.write_bytes(good + b"[" * 100_000 + b"\n")
    with pytest.raises(ValueError, match=r"lcc_e.jsonl:2: cannot be read as JSON \(maximum recursion depth"):
        longbench_e.samples(file, tasks=["lcc"])
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="lcc_e.jsonl: no records"):
        longbench_e.samples(file, tasks=["lcc"])


def test_sources_that_are_not_there(data, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/at/all does not exist: give a folder, a file, or a hub id"):
        longbench_e.samples("nowhere/at/all")
    (data / "data" / "lcc_e.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="holds no lcc_e.jsonl; found 2wikimqa_e.jsonl, "):
        longbench_e.samples(data, tasks=["lcc"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no file that matches \*_e.jsonl or \*data.zip; found none"):
        longbench_e.samples(empty)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    def fail(*arguments, **options):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"'zai-org/LongBench' is not a local path and could not be had .* \(no route\)"):
        longbench_e.samples("zai-org/LongBench")


def test_a_hub_id_is_downloaded_as_a_data_set(monkeypatch, data):
    import huggingface_hub

    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(data)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert longbench_e.samples("zai-org/LongBench", limit=1) == longbench_e.samples(data, limit=1)
    assert asked == {"repository": "zai-org/LongBench", "repo_type": "dataset", "allow_patterns": ["*_e.jsonl", "*data.zip"]}


def _question(number: int, **changes) -> dict:
    record = {
        "_id": f"q{number}",
        "domain": "Single-Document QA",
        "sub_domain": "Academic",
        "difficulty": ("easy", "hard")[number % 2],
        "length": ("short", "medium", "long")[number % 3],
        "question": f"What is said {number}?",
        **{f"choice_{letter}": f"option {letter}{number}" for letter in "ABCD"},
        "answer": "ABCD"[number % 4],
        "context": f"a long text {number}\n",
    }
    return {**record, **changes}


def test_v2_list_and_parquet_are_the_same(tmp_path):
    questions = [_question(number) for number in range(12)]
    (tmp_path / "data.json").write_text(json.dumps(questions))
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(questions[6 * part : 6 * part + 6]), folder / f"train-0000{part}-of-00002.parquet")
    samples = longbench_v2.samples(tmp_path)
    assert samples == longbench_v2.samples(tmp_path / "data.json") == longbench_v2.samples(tmp_path / "hub")
    assert [sample.id for sample in samples] == [f"longbench_v2/{number}" for number in range(12)]
    assert [sample.length for sample in samples[:3]] == ["short", "medium", "long"]
    assert [(sample.group, sample.task) for sample in samples[:2]] == [("Easy", "longbench_v2_easy"), ("Hard", "longbench_v2_hard")]
    assert samples[5].references == ("B",)
    assert samples[5].extra == {
        "difficulty": "hard",
        "prompt": "re-worded",
        "_id": "q5",
        "domain": "Single-Document QA",
        "sub_domain": "Academic",
    }
    prompt = samples[5].prompt
    assert "<text>\na long text 5\n</text>" in prompt
    assert "(A) option A5\n(B) option B5\n(C) option C5\n(D) option D5" in prompt
    assert prompt.endswith('Reply in this form: "The correct answer is (letter)".')
    hard = [f"longbench_v2/{number}" for number in (1, 3, 5, 7)]
    assert [sample.id for sample in longbench_v2.samples(tmp_path, tasks=["longbench_v2_hard"], limit=4)] == hard
    assert longbench_v2.samples(tmp_path, limit=2) == samples[:4]


def test_v2_perfect_empty_and_constant_predictors(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([_question(number) for number in range(12)]))
    samples = longbench_v2.samples(tmp_path)

    def mean(answer):
        return sum(METRICS[sample.metric](answer(sample), sample)["score"] for sample in samples) / len(samples)

    assert mean(lambda sample: f"The correct answer is ({sample.references[0]})") == 1
    assert mean(lambda sample: "") == 0
    assert mean(lambda sample: "The correct answer is (A)") == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": ""}, "column 'context' is empty"),
        ({"answer": "E"}, "column 'answer' holds 'E': accepted are A, B, C, D"),
        ({"difficulty": "medium"}, "column 'difficulty' holds 'medium': accepted are easy, hard"),
        ({"length": "huge"}, "column 'length' holds 'huge': accepted are short, medium, long"),
        ({"choice_C": None}, "column 'choice_C' holds NoneType, a text is needed"),
    ],
)
def test_v2_bad_values_name_file_row_and_column(tmp_path, changes, message):
    rows = [_question(0), _question(1, **changes)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    for name in ("data.json", "train.parquet"):
        with pytest.raises(ValueError, match=f"{name}, row 1: {message}"):
            longbench_v2.samples(tmp_path / name)


def test_v2_missing_column(tmp_path):
    pq.write_table(pa.Table.from_pylist([_question(0)]).drop_columns(["choice_B"]), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 0: no column 'choice_B'; found '_id', "):
        longbench_v2.samples(tmp_path)


def test_v2_damaged_parquet(tmp_path):
    file = tmp_path / "train.parquet"
    table = pa.Table.from_pylist([_question(number, context=f"{number} " * 2000) for number in range(200)])
    pq.write_table(table, file, row_group_size=100, compression="none", use_dictionary=False)
    content = file.read_bytes()
    file.write_bytes(content[:-200])
    with pytest.raises(ValueError, match="train.parquet: cannot be read at row 0"):
        longbench_v2.samples(tmp_path)
    # The beginning of the second half's pages is gone: the first hundred rows are read.
    start = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(1).column(0).data_page_offset
    file.write_bytes(content[:start] + bytes(64) + content[start + 64 :])
    assert len(longbench_v2.samples(tmp_path, limit=25)) == 50
    with pytest.raises(ValueError, match=r"train.parquet: cannot be read at row (64|100)"):
        longbench_v2.samples(tmp_path)


def test_v2_columns_of_parquet_that_are_not_what_they_should_be(tmp_path):
    file, table = tmp_path / "train.parquet", pa.Table.from_pylist([_question(0), _question(1)])
    place = table.column_names.index("_id")
    for column, message in (
        (pa.array([1, 2]), "row 0: column '_id' holds int, a text is needed"),
        (pa.array([2**40, 1], pa.timestamp("s")), "row 0: column '_id' cannot be read"),
        (pa.array(["a", None]), "row 1: column '_id' holds NoneType, a text is needed"),
    ):
        pq.write_table(table.set_column(place, "_id", column), file)
        with pytest.raises(ValueError, match=f"train.parquet, {message}"):
            longbench_v2.samples(tmp_path)
    pq.write_table(table.append_column("_id", table["_id"]), file)
    with pytest.raises(ValueError, match="train.parquet: column '_id' is there twice"):
        longbench_v2.samples(tmp_path)
    pq.write_table(table.slice(0, 0), file)
    with pytest.raises(ValueError, match="train.parquet: no records"):
        longbench_v2.samples(tmp_path)
    pq.write_table(table, file, compression="none")
    content = file.read_bytes()
    for damaged in (b"", content.replace(b"context", b"cont\xdext"), b"version https://git-lfs"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="train.parquet: cannot be read at row 0") as caught:
            longbench_v2.samples(tmp_path)
        assert len(str(caught.value).splitlines()) == 1


def test_v2_text_that_is_not_utf8_in_parquet(tmp_path):
    table = pa.Table.from_pylist([_question(0), _question(1)])
    raw = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.column_names.index("context"), "context", raw), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet, row 1: column 'context' is not valid UTF-8"):
        longbench_v2.samples(tmp_path)


def test_v2_damaged_json(tmp_path):
    file = tmp_path / "data.json"
    content = json.dumps([_question(0), _question(1)], indent=1)
    file.write_text(content[:-100])
    with pytest.raises(ValueError, match=r"data.json:\d+: not valid JSON"):
        longbench_v2.samples(tmp_path)
    file.write_bytes(json.dumps([_question(0, context="café")], ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match="data.json, row 0: column 'context' is not valid UTF-8"):
        longbench_v2.samples(tmp_path)
    for content, reason in (("[" * 100_000, "maximum recursion depth"), (f"[{'1' * 5000}]", "Exceeds the limit")):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"data.json: cannot be read as JSON \({reason}"):
            longbench_v2.samples(tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match="data.json: a list of records is needed, found dict"):
        longbench_v2.samples(tmp_path)
    other = tmp_path / "data.csv"
    other.write_text("x")
    with pytest.raises(ValueError, match="data.csv: a .jsonl, .json, .parquet file is needed"):
        longbench_v2.samples(other)
    with pytest.raises(ValueError, match="tasks has 'easy': accepted are longbench_v2_easy, longbench_v2_hard"):
        longbench_v2.samples(tmp_path, tasks=["easy"])
