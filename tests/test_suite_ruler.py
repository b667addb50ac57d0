"""RULER: what each task's prompt holds, read back from its text, on small files in RULER's layout with a tokenizer of bytes; and on the
real files with the demo model's tokenizer where they have been fetched."""

import collections
import json
import random
import re

import numpy as np
import pytest

from elastic_jax import assets
from elastic_jax.data.chat import ChatEncoder
from elastic_jax.evaluation.metrics import METRICS
from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suites import ruler, ruler_tasks, texts
from elastic_jax.evaluation.suites.ruler import ALL_TASKS, PAPER_TASKS
from tests.data_helpers import byte_tokenizer

LENGTH = 9000  # bytes: both forms of cwe are longer than their examples, hotpotqa has room for its ten documents
NEEDLE = re.compile(r"One of the magic (numbers|UUIDs) that belong to (\S+) is (\S+)\.(?=\s|$)")
NUMBER, WORDS, UUID = r"[1-9]\d{6}", r"\D+-\D+", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
# The most tokens (bytes) that the next size could need.
UNITS = {name: 30 for name in ESSAY_TASKS} | {
    **{"niah_single_1": 110, "niah_multikey_2": 110, "niah_multikey_3": 140, "vt": 110, "cwe": 150, "fwe": 200, "qa_1": 300, "qa_2": 300},
}


def facts(name: str, count: int) -> str:
    return " ".join(f"{name} has fact {i}, told in this sentence." for i in range(count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Essays, 12 articles of 4 paragraphs, 40 two-hop questions of 10 documents."""
    path = tmp_path_factory.mktemp("ruler")
    articles = [
        {
            "title": f"Article {a}",
            "paragraphs": [
                {
                    "context": facts(f"Item {a}.{p}", 3),
                    "qas": [
                        {"question": "Impossible?", "answers": [], "is_impossible": True},
                        {"question": f"What is {a}.{p}?", "answers": [{"text": f"Item {a}.{p}"}, {"text": "Item"}], "is_impossible": False},
                    ],
                }
                for p in range(4)
            ],
        }
        for a in range(12)
    ]
    hops = [
        {
            "question": f"Hop {i}?",
            "answer": f"Answer {i}",
            "supporting_facts": [["Gold A", 0], ["Gold B", 0]],
            "context": [
                [title, [f"{title} of {i}.", f" It is Answer {i}."]] for title in (*(f"D{d}" for d in range(8)), "Gold A", "Gold B")
            ],
        }
        for i in range(40)
    ]
    (path / "PaulGrahamEssays.json").write_text(json.dumps({"text": facts("Mr. Essay", 100)}))
    (path / "squad.json").write_text(json.dumps({"data": articles}))
    (path / "hotpotqa.json").write_text(json.dumps(hops))
    return path


@pytest.fixture(autouse=True)
def no_assets(request, tmp_path, monkeypatch):
    if "assets" not in request.keywords:
        monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path / "none"))


def build(folder, tasks, **change) -> list[Sample]:
    tasks = [tasks] if isinstance(tasks, str) else tasks
    arguments = {"tokenizer": byte_tokenizer(), "lengths": [LENGTH], "samples_per_task": 4, "seed": 1, "texts_folder": folder}
    return list(ruler.samples(tasks=tasks, **(arguments | change)))


def prompt_tokens(sample: Sample, tokenizer) -> int:
    """As the runner reads it, counted here on its own."""
    count = lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not sample.chat:
        return count(sample.prompt) + count(sample.answer_prefix)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample.prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return count(rendered) + count(sample.answer_prefix)


def context_of(sample: Sample) -> str:
    """Between the instruction's line and the question."""
    return sample.prompt.split("\n", 1)[1].rpartition("\n\n")[0]


def score(answer: str, sample: Sample) -> float:
    return METRICS[sample.metric](answer, sample)["score"]


@pytest.mark.parametrize("prefix", ["assistant", "user", "text"])
@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_prompt_fills_its_length(folder, task, prefix):
    change = {"chat": False} if prefix == "text" else {"prefix": prefix}
    for sample in build(folder, task, **change):
        tokens = prompt_tokens(sample, byte_tokenizer())
        assert sample.extra["tokens"] == tokens
        assert 0 <= LENGTH - sample.max_new_tokens - tokens <= UNITS[task]
        assert sample.extra["prefix"] == prefix
        assert sample.extra["wording"] == "re-worded"
        assert sample.chat == (prefix != "text")
        assert bool(sample.answer_prefix) == (prefix == "assistant")
        assert prefix == "assistant" or re.search(r"( are:?| is| which are:|Answer:)$", sample.prompt)
        json.dumps(dict(sample.extra))


@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_perfect_answer_scores_1_and_none_0(folder, task):
    for index, sample in enumerate(build(folder, task)):
        assert (sample.id, sample.task, sample.length) == (f"{task}/{LENGTH}/{index}", task, LENGTH)
        assert score(", ".join(sample.references).upper(), sample) == 1
        assert score("", sample) == 0
        assert METRICS[sample.metric](" \x00", sample) == {"score": 0.0, "empty": 1.0}


def test_metrics_take_shares_and_any():
    def sample(metric: str) -> Sample:
        return Sample(id="s", task="t", group="g", prompt="p", references=("Ab", "cd\nef"), metric=metric, max_new_tokens=1)

    assert score("xabx", sample("ruler_match_all")) == 0.5
    assert score("CD\x07EF", sample("ruler_match_all")) == 0.5  # control characters are line breaks
    assert score("xabx", sample("ruler_match_part")) == 1
    assert score("a b", sample("ruler_match_part")) == 0
    with pytest.raises(ValueError, match="'s' has no references"):
        score("", Sample(id="s", task="t", group="g", prompt="p", references=(), metric="ruler_match_all", max_new_tokens=1))


def test_samples_do_not_depend_on_each_other(folder):
    every = build(folder, ALL_TASKS, lengths=[LENGTH, LENGTH + 500], samples_per_task=3)
    assert len({sample.id for sample in every}) == len(every) == 2 * 3 * len(ALL_TASKS)
    by_id = {sample.id: sample for sample in every}
    for task in ALL_TASKS:
        for sample in build(folder, task, samples_per_task=2, lengths=[LENGTH + 500]):
            assert by_id[sample.id] == sample
    assert all(by_id[sample.id].prompt != sample.prompt for sample in build(folder, ALL_TASKS, seed=2, samples_per_task=1))
    assert len({sample.prompt for sample in every}) == len(every)


NIAH = {  # keys, needles of each, asked, distinct kinds of key and value; None: as many needles as fit
    "niah_single_1": (1, 1, 1, WORDS, NUMBER),
    "niah_single_2": (1, 1, 1, WORDS, NUMBER),
    "niah_single_3": (1, 1, 1, WORDS, UUID),
    "niah_multikey_1": (4, 1, 1, WORDS, NUMBER),
    "niah_multikey_2": (None, 1, 1, WORDS, NUMBER),
    "niah_multikey_3": (None, 1, 1, UUID, UUID),
    "niah_multivalue": (1, 4, 1, WORDS, NUMBER),
    "niah_multiquery": (4, 1, 4, WORDS, NUMBER),
}


@pytest.mark.parametrize("task", NIAH)
def test_needles(folder, task):
    keys, values_each, asked, key_kind, value_kind = NIAH[task]
    for sample in build(folder, task):
        context, question = context_of(sample), sample.prompt.rpartition("\n\n")[2]
        needles = [match.group(2, 3) for match in NEEDLE.finditer(context)]
        assert all(re.fullmatch(key_kind, key) and re.fullmatch(value_kind, value) for key, value in needles)
        values = collections.defaultdict(list)
        for key, value in needles:
            values[key].append(value)
        if keys is None:
            assert len(values) > 40
            assert all(NEEDLE.fullmatch(line) for line in context.split("\n"))
        else:
            assert len(values) == keys
            assert {len(of_key) for of_key in values.values()} == {values_each}
        queried = [key for key in values if re.search(rf"(?<!\S){re.escape(key)}(?=,| in )", question)]
        assert len(queried) == asked
        assert sorted(sample.references) == sorted(value for key in queried for value in values[key])
        assert len(set(sample.references)) == asked * values_each
        for reference, depth in zip(sample.references, sample.extra["depths"], strict=True):
            assert context.count(reference) == 1
            start = context.rindex("One of", 0, context.index(reference))
            assert depth == round(start / len(context), 4)
        plural = len(sample.references) > 1
        assert question.startswith("What are the magic" if plural else "What is the magic")
        assert sample.answer_prefix.endswith(" are" if plural else " is")


def test_needles_lie_between_sentences_at_any_depth(folder):
    depths = []
    for sample in build(folder, "niah_multivalue", samples_per_task=30, lengths=[2500]):
        context = context_of(sample)
        rest = NEEDLE.sub("", context).split()
        essay = facts("Mr. Essay", 100).split()
        assert rest == essay[: len(rest)]
        for match in NEEDLE.finditer(context):
            before = context[: match.start()].rstrip()
            assert not before or before.endswith(".") or match.end() == len(context)
            assert not before.endswith("Mr.") or match.end() == len(context)
        depths += sample.extra["depths"]
    counts, _ = np.histogram(depths, bins=4, range=(0, 1))
    assert counts.min() > 15


def test_essays_begin_again_where_they_end(folder):
    (sample,) = build(folder, "niah_single_2", samples_per_task=1)
    rest, essay = NEEDLE.sub("", context_of(sample)).split(), facts("Mr. Essay", 100).split()
    assert len(rest) > len(essay)
    assert rest == (2 * essay)[: len(rest)]


def chain_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+)$", text, re.MULTILINE))


def test_variables_are_tracked_through_four_hops(folder):
    for sample in build(folder, "vt"):
        example, _, task = sample.prompt.rpartition("\n\nFollow the chain")
        for text, letters, limit in ((example, 3, ruler_tasks._EXAMPLE_TOKENS), (task, 5, LENGTH)):
            assigned = chain_of(text)
            assert len(text) <= limit
            assert all(re.fullmatch(rf"[A-Z]{{{letters}}}", name) for name in assigned)
            (value,) = (value for value in assigned.values() if value.isdigit())
            assert 10_000 <= int(value) <= 99_998
            order = list(assigned)
            assert [assigned[name] for name in order] == [value, *order[:-1]]  # each line takes the variable of the line before
            assert len(order) == 5
            assert f"hold the value {value} at the end" in text
        assert tuple(chain_of(task)) == sample.references
        assert example.endswith(" ".join(chain_of(example)))
        assert " 5 variables" in sample.answer_prefix
        context = task.split("\n", 1)[1].rpartition("\n\n")[0]
        assert sample.extra["depths"] == [round(context.index(f"VAR {name} = ") / len(context), 4) for name in sample.references]


@pytest.mark.parametrize(("length", "often", "seldom"), [(4000, 6, 1), (LENGTH, 30, 3)])
def test_common_words_are_the_most_frequent(folder, length, often, seldom):
    for sample in build(folder, "cwe", lengths=[length]):
        example, *task = re.split(r"\n(?=1\. )", sample.prompt)[1:]
        counted = collections.Counter()
        entries = re.findall(r"(\d+)\. (\S+)", task[0])
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counted.update(word for _, word in entries)
        assert {word for word, count in counted.items() if count == often} == set(sample.references)
        assert {count for word, count in counted.items() if word not in sample.references} == {seldom}
        listed, _, answer = example.partition(" words that come most often in the list are: ")
        solved = collections.Counter(word for _, word in re.findall(r"(\d+)\. (\S+)", listed))
        assert {word for word, _ in solved.most_common(10)} == set(re.findall(r"\d+\. (\S+)", answer))
        assert not set(solved) & set(counted)


def test_coded_words_follow_the_zeta_distribution(folder):
    for sample in build(folder, "fwe"):
        words = context_of(sample).split()
        (noise, dots), *ranked = collections.Counter(words).most_common(5)
        assert noise == "..."
        assert tuple(word for word, _ in ranked[:3]) == sample.references
        assert [count for _, count in ranked] == sample.extra["counts"]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked)
        for rank, (_, count) in enumerate(ranked, start=2):
            assert abs(count - dots / rank**2) <= 1.3


def documents_of(sample: Sample) -> list[str]:
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", sample.prompt.rpartition("\n\nAnswer the question")[0])[1:]
    assert parts[::2] == [str(i + 1) for i in range(len(parts) // 2)]
    return parts[1::2]


def test_questions_of_squad(folder):
    for index, sample in enumerate(build(folder, "qa_1", samples_per_task=10)):
        assert sample.extra["question"] == f"qa_1/{index}"
        article, paragraph = divmod(index, 4)
        found = documents_of(sample)
        assert sample.references == (f"Item {article}.{paragraph}", "Item")
        (gold,) = sample.extra["gold_documents"]
        gold_text = facts(f"Item {article}.{paragraph}", 3)
        assert [i for i, text in enumerate(found, start=1) if text == gold_text] == [gold]
        assert {facts(f"Item {article}.{p}", 3) for p in range(4)} <= set(found)
        assert len(found) == sample.extra["documents"]
        assert sample.prompt.endswith(f"Question: What is {article}.{paragraph}?")
        assert "Impossible" not in sample.prompt


def test_questions_of_hotpotqa_and_documents_in_excess(folder):
    for index, sample in enumerate(build(folder, "qa_2", lengths=[30_000])):
        found = collections.Counter(documents_of(sample))
        own = [text for text in found if f"Answer {index}." in text]
        assert len(own) == 10
        assert {found[text] for text in own} == {1}  # although the others are repeated
        assert len(found) == 400
        assert max(found.values()) > 1
        places = [i for i, text in enumerate(documents_of(sample), start=1) if text.startswith("Gold") and f" {index}." in text]
        assert sample.extra["gold_documents"] == places
        assert sample.references == (f"Answer {index}",)


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_order_of_documents(folder, task):
    own = build(folder, task, samples_per_task=12)
    assert len({tuple(sample.extra["gold_documents"]) for sample in own}) > 6
    fixed = build(folder, task, samples_per_task=12, upstream_order=True)
    assert {sample.extra["order"] for sample in own + fixed} == {"per sample", "upstream"}
    for sample in fixed:
        count = sample.extra["documents"]
        assert count % 10 == 0
        order = list(range(count))
        random.Random(1).shuffle(order)
        gold = [0] if task == "qa_1" else [8, 9]
        assert sample.extra["gold_documents"] == sorted(order.index(place) + 1 for place in gold)
    assert len({sample.extra["documents"] for sample in fixed}) <= 2  # of sample 0, or ten fewer where that is too long


def test_order_of_words_in_upstream_order(folder):
    for sample in build(folder, "cwe", lengths=[4000], upstream_order=True):
        words = re.split(r"\n(?=1\. )", sample.prompt)[-1].split()[1::2]
        order = list(range(sample.extra["words"]))
        random.Random(1).shuffle(order)
        assert [word in sample.references for word in words[: len(order)]] == [place < 60 for place in order]
        assert (sample.extra["words"] - 60) % 10 == 0
    for sample in build(folder, "fwe", upstream_order=True):
        counts = np.array([0, sample.extra["counts"][0]])
        order = list(range(sample.extra["words"]))
        random.Random(1).shuffle(order)
        words = context_of(sample).split()
        noise = words.count("...")
        first, end = counts + noise
        assert [word == sample.references[0] for word in words] == [first <= place < end for place in order]


@pytest.mark.parametrize("factor", [0.3, 1.2])
def test_wrong_estimates_of_pieces_are_corrected(folder, monkeypatch, factor):
    measure = ruler._Gauge.pieces
    monkeypatch.setattr(ruler._Gauge, "pieces", lambda gauge, pieces: np.maximum(1, np.int64(factor * measure(gauge, pieces))))
    for sample in build(folder, ALL_TASKS, samples_per_task=1):
        assert 0 <= LENGTH - sample.max_new_tokens - prompt_tokens(sample, byte_tokenizer()) <= UNITS[sample.task]


@pytest.mark.parametrize("task", ALL_TASKS)
def test_too_short_a_length_names_the_least(folder, task):
    with pytest.raises(ValueError, match=rf"lengths has 200: {task} needs at least \d+") as error:
        build(folder, task, lengths=[200])
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(build(folder, task, lengths=[least])) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["niah"]}, r"tasks has 'niah': accepted are niah_single_1,"),
        ({"tasks": []}, r"tasks=\[\]: at least one"),
        ({"lengths": [4000, 4000]}, r"lengths=\[4000, 4000\]: at least one is needed, and none twice"),
        ({"lengths": [0]}, r"lengths=\[0\]: positive"),
        ({"samples_per_task": 0}, "samples_per_task=0: at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"prefix": "system"}, "prefix='system': accepted are 'assistant', 'user'"),
        ({"tasks": ["qa_1"], "samples_per_task": 49}, "samples_per_task=49: qa_1 has 48 questions in user's file squad.json"),
        ({"tasks": ["niah_single_2"], "texts_folder": "/nowhere"}, "texts_folder='/nowhere' is not a folder"),
        ({"tokenizer": byte_tokenizer(chat_template=None)}, "no chat_template"),
    ],
)
def test_bad_arguments(folder, change, message):
    with pytest.raises(ValueError, match=message):
        build(folder, "vt", **change) if "tasks" not in change else build(folder, change.pop("tasks"), **change)


def test_a_model_without_chat_template_is_given_text(folder):
    (sample,) = build(folder, "fwe", samples_per_task=1, chat=False, tokenizer=byte_tokenizer(chat_template=None))
    assert not sample.chat
    assert sample.prompt.endswith("come most often in the text are:")


def test_sources_are_named(folder, tmp_path):
    name = lambda task, where: build(where, task, samples_per_task=1)[0].extra["texts"]
    assert re.fullmatch(r"user's file PaulGrahamEssays.json, sha256 [0-9a-f]{12}", name("niah_single_2", folder))
    assert name("niah_single_1", folder) == "generated"
    for where in (None, tmp_path):
        assert name("niah_single_2", where).startswith("packaged substitute for essays: documentation of Python 3.")
        with pytest.raises(FileNotFoundError, match=r"squad.json is missing: `python -m experiments.fetch_assets` .* niah_\*, vt"):
            name("qa_1", where)
        with pytest.raises(FileNotFoundError, match=rf"{where or 'none'}/hotpotqa.json is missing"):
            name("qa_2", where)
        assert texts.sources(where) == {
            "PaulGrahamEssays.json": texts.essays().source,
            "squad.json": "none",
            "hotpotqa.json": "none",
        }
    assert texts.sources(folder)["squad.json"] == name("qa_1", folder)


def test_the_substitute_is_prose():
    essays = texts.essays(None)
    assert len(essays.words) > 20_000
    assert len(essays.ends) > 1000
    assert "::=" not in essays.words


def squad(**asked) -> str:
    return json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [asked]}]}]})


def hop(**changes) -> str:
    return json.dumps([{"question": "q", "answer": "a", "context": [["t", ["s"]]], "supporting_facts": [["t", 0]], **changes}])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("PaulGrahamEssays.json", "{", r":1: not valid JSON"),
        ("PaulGrahamEssays.json", "[" * 100_000, "cannot be read as JSON"),
        ("PaulGrahamEssays.json", "[]", "an object with named values is needed"),
        ("PaulGrahamEssays.json", '{"text": 3}', "column 'text' holds int"),
        ("PaulGrahamEssays.json", '{"text": " "}', "column 'text' is empty"),
        ("PaulGrahamEssays.json", r'{"text": "a \ud800"}', "column 'text' is not valid UTF-8"),
        ("squad.json", "{}", "squad.json: no column 'data'"),
        ("squad.json", '{"data": [3]}', "data 0: an object"),
        ("squad.json", '{"data": []}', "no answerable question"),
        ("squad.json", '{"data": [{"paragraphs": {}}]}', "data 0: column 'paragraphs' holds {}, a list of objects"),
        ("squad.json", '{"data": [{"paragraphs": [{"qas": []}]}]}', "data 0, paragraphs 0: no column 'context'"),
        ("squad.json", '{"data": [{"paragraphs": [{"qas": [], "context": " "}]}]}', "column 'context' is empty"),
        ("squad.json", squad(question="q"), "qas 0: no column 'answers'"),
        ("squad.json", squad(question="q", answers=[]), "column 'answers' is empty, but"),
        ("squad.json", squad(question="q", answers=[{"text": " "}]), "qas 0, answers 0: column 'text' is empty"),
        ("squad.json", squad(question="", answers=[{"text": "a"}]), "column 'question' is empty"),
        ("squad.json", squad(question="q", answers=[], is_impossible="yes"), "column 'is_impossible' holds 'yes'"),
        ("hotpotqa.json", "{}", "a list of questions is needed, found dict"),
        ("hotpotqa.json", "[3]", "question 0: an object"),
        ("hotpotqa.json", hop(answer=" "), "column 'answer' is empty"),
        ("hotpotqa.json", hop(question=None), "column 'question' holds NoneType"),
        ("hotpotqa.json", hop(context=[["t"]]), "column 'context' has to be a list of"),
        ("hotpotqa.json", hop(context=[]), "column 'context' has to be a list of"),
        ("hotpotqa.json", hop(context=[["t", "a text"]]), "column 'context' has to be a list of"),
        ("hotpotqa.json", hop(context=[["t", [3]]]), "column 'context' has sentences of 't' that are no texts"),
        ("hotpotqa.json", hop(context=[["t", ["\ud800"]]]), "column 'context' is not valid UTF-8"),
        ("hotpotqa.json", hop(supporting_facts=[]), "column 'supporting_facts' has to be a list of"),
        ("hotpotqa.json", hop(supporting_facts=[["u", 0]]), "column 'supporting_facts' names 'u'"),
    ],
)
def test_malformed_files(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    task = {"PaulGrahamEssays.json": "niah_single_2", "squad.json": "qa_1", "hotpotqa.json": "qa_2"}[file]
    with pytest.raises(ValueError, match=message) as error:
        build(tmp_path, task, samples_per_task=1)
    assert str(tmp_path / file) in str(error.value)


def test_a_file_that_changes_is_read_again(tmp_path):
    for answer in (" one ", "two"):
        (tmp_path / "squad.json").write_text(squad(question="q", answers=[{"text": answer}]))
        assert texts.squad(tmp_path).questions[0].answers == (answer.strip(),)


def test_sentences_end_where_they_do():
    text = 'He met Dr. Who. "Why?" asked J. Doe (once!) In 3.5 days. it ended'
    words = text.split()
    assert [" ".join(words[a:b]) for a, b in zip([0, *texts.sentence_ends(words)], texts.sentence_ends(words))] == [
        "He met Dr. Who.",
        '"Why?" asked J. Doe (once!)',
        "In 3.5 days. it ended",
    ]


def test_the_papers_selection():
    assert len(ALL_TASKS) == 13
    assert set(ALL_TASKS) - set(PAPER_TASKS) == {"vt", "cwe"}
    assert ruler.PAPER_LENGTHS == (8192, 16384, 32768, 65536, 131072, 262144)


@pytest.mark.assets
def test_the_real_texts_with_the_demo_tokenizer():
    from elastic_jax.weights.load import load_tokenizer

    tokenizer = load_tokenizer(assets.require("smollm2_135m"))
    encoder = ChatEncoder(tokenizer)
    for sample in ruler.samples(tokenizer=tokenizer, lengths=[16384], tasks=ALL_TASKS, samples_per_task=2):
        tokens = encoder.encode_prompt([{"role": "user", "content": sample.prompt}])[0].size + len(encoder.ids(sample.answer_prefix))
        assert tokens == sample.extra["tokens"]
        missing = sample.length - sample.max_new_tokens - tokens
        assert 0 <= missing <= (1000 if "qa" in sample.task else 110)
        assert all(reference in sample.prompt for reference in sample.references) or sample.references == ("yes",)
        expected = {"qa_1": "squad.json of RULER", "qa_2": "hotpotqa.json of RULER"} | dict.fromkeys(
            ESSAY_TASKS, "PaulGrahamEssays.json of RULER"
        )
        assert sample.extra["texts"] == expected.get(sample.task, "generated")
