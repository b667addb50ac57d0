"""LongHealth, read from a small file in the benchmark's own layout."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.evaluation.metrics import METRICS
from elastic_jax.evaluation.suites import longhealth


def _words(name: str, count: int) -> str:
    return " ".join(f"{name}w{number}" for number in range(count))


def _benchmark(patients: int = 4, documents: int = 5, words: int = 50) -> dict:
    content = {}
    for patient in range(1, patients + 1):
        name = f"patient_{patient:02}"
        content[name] = {
            "name": "A. Person",
            "birthday": "01.01.1950",
            "diagnosis": "nothing",
            "texts": {f"text_{number}": _words(f"p{patient}t{number}", words) for number in range(documents)},
            "questions": [
                {
                    "No": number,
                    "question": f"What was found, {patient}.{number}?",
                    **{f"answer_{letter}": f"finding {letter}{patient}{number}" for letter in "abcde"},
                    "correct": f"finding {'abcde'[number]}{patient}{number}",
                    "answer_location": {"text_1": {"start": [0.1], "end": [0.2]}, f"text_{3 + number}": {"start": [0], "end": [1]}},
                }
                for number in range(2)
            ],
        }
    return content


@pytest.fixture
def source(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "benchmark_v5.json").write_text(json.dumps(_benchmark()))
    return tmp_path


def _tasks(samples):
    return {task: [sample for sample in samples if sample.task == task] for task in longhealth.TASKS}


def test_five_prompts_of_each_question_and_task(source):
    samples = longhealth.samples(source)
    assert len({sample.id for sample in samples}) == len(samples) == 4 * 2 * 15
    tasks = _tasks(samples)
    draws = {task: [sample.id.rsplit("/", 1)[1] for sample in tasks[task][:5]] for task in tasks}
    assert draws == {"longhealth_1": list("01234"), "longhealth_2": list("13579"), "longhealth_3": list("02468")}
    assert tasks["longhealth_1"][5].id == "longhealth_1/patient_01/1/0"
    assert {sample.extra["question"] for task in tasks for sample in tasks[task][:5]} == {"patient_01/0"}
    assert [sample.references for sample in tasks["longhealth_2"][::5][:2]] == [("A", "finding a10"), ("B", "finding b11")]
    assert all(sample.references[0] == "F" for sample in tasks["longhealth_3"])
    for sample in samples:
        assert (sample.metric, sample.max_new_tokens, sample.group) == ("letter_or_text", 512, "LongHealth")
        assert "discharge letters" in sample.system
        assert ("\nF: " in sample.prompt) == (sample.task != "longhealth_1")
        assert 'begins with "The correct answer is"' in sample.prompt
    assert longhealth.samples(source / "data" / "benchmark_v5.json", tasks=["longhealth_3"], limit=1) == tasks["longhealth_3"][:5]
    with pytest.raises(ValueError, match="tasks has 'task1': accepted are longhealth_1, longhealth_2, longhealth_3"):
        longhealth.samples(source, tasks=["task1"])


def test_which_documents_a_task_has(source):
    tasks = _tasks(longhealth.samples(source))
    for sample in tasks["longhealth_1"][:5]:  # room for everything: all of the patient's
        assert sorted(sample.extra["documents"]) == [f"patient_01/text_{number}" for number in range(5)]
    for task, gold in (("longhealth_2", {"patient_02/text_1", "patient_02/text_3"}), ("longhealth_3", set())):
        for sample in [sample for sample in tasks[task] if "/patient_02/0/" in sample.id]:
            names = set(sample.extra["documents"])
            assert len(sample.extra["documents"]) == len(names) == 10 + len(gold)
            assert {name for name in names if name.startswith("patient_02/")} == gold


def test_documents_stand_in_the_order_that_is_recorded(source):
    content = _benchmark()
    for sample in longhealth.samples(source, limit=1):
        body = sample.prompt.split(" DOCUMENTS --------------\n\n")[1].split("\n\n-------------- END")[0]
        documents = [content[patient]["texts"][name] for patient, name in (key.split("/") for key in sample.extra["documents"])]
        assert body.split("\n\n--------------\n\n") == documents


def test_prompts_depend_on_the_seed_and_their_own_id_only(source):
    samples = longhealth.samples(source)
    assert samples == longhealth.samples(source)
    by_id = {sample.id: sample for sample in samples}
    for sample in longhealth.samples(source, tasks=["longhealth_2"], limit=1):
        assert sample == by_id[sample.id]
    orders = {tuple(sample.extra["documents"]) for sample in samples[:5]}
    assert len(orders) > 1
    assert samples != longhealth.samples(source, seed=1)


def _system_words(source):
    return len(longhealth.samples(source, limit=1)[0].system.split())


def test_gold_documents_come_first_and_the_one_that_does_not_fit_is_cut(source):
    system = _system_words(source)
    for sample in longhealth.samples(source, limit=1, max_tokens=system + 80):
        if sample.task == "longhealth_3":
            assert len(sample.extra["documents"]) == 1
        else:
            assert sorted(sample.extra["documents"]) == ["patient_01/text_1", "patient_01/text_3"]
            assert "p1t1w49" in sample.prompt
            assert "p1t3w29" in sample.prompt
            assert "p1t3w30" not in sample.prompt
    only = longhealth.samples(source, tasks=["longhealth_1"], limit=1, max_tokens=system + 20)[0]
    assert only.extra["documents"] == ["patient_01/text_1"]
    assert "p1t1w19" in only.prompt
    assert "p1t1w20" not in only.prompt
    with pytest.raises(ValueError, match=f"max_tokens={system}: more than the {system} of the system message are needed"):
        longhealth.samples(source, max_tokens=system)


@settings(max_examples=40, deadline=None)
@given(room=st.integers(1, 700), letters=st.booleans())
def test_documents_fit_the_budget(tmp_path_factory, room, letters):
    file = tmp_path_factory.getbasetemp() / "benchmark_v5.json"
    if not file.exists():
        file.write_text(json.dumps(_benchmark(words=30)))
    count = len if letters else lambda text: len(text.split())
    system = count(longhealth.samples(file, limit=1)[0].system)
    content = _benchmark(words=30)
    for sample in longhealth.samples(file, limit=1, max_tokens=system + room, count_tokens=count):
        body = sample.prompt.split(" DOCUMENTS --------------\n\n")[1].split("\n\n-------------- END")[0]
        documents = body.split("\n\n--------------\n\n") if body else []
        assert len(documents) == len(sample.extra["documents"])
        assert sum(map(count, documents)) <= room
        for name, document in zip(sample.extra["documents"], documents):
            patient, own = name.split("/")
            assert document
            assert content[patient]["texts"][own].startswith(document)


def test_documents_leave_room_for_the_question(source):
    count = lambda text: len(text.split())
    whole = lambda sample: count(sample.system) + count(sample.prompt)
    for sample in longhealth.samples(source, max_prompt_tokens=400):
        assert 400 - 65 < whole(sample) <= 400  # no room for a document of 50 words beside those that were set aside
    with pytest.raises(ValueError, match=r"max_prompt_tokens=80: longhealth_1/patient_01/0 needs more than \d+ without its documents"):
        longhealth.samples(source, max_prompt_tokens=80)


def test_perfect_empty_and_constant_predictors(source):
    for task, samples in _tasks(longhealth.samples(source)).items():
        for sample in samples:
            metric = METRICS[sample.metric]
            letter, option = sample.references
            assert metric(f"The correct answer is {letter}: {option}", sample) == {"score": 1, "text_match": 1}
            assert metric("", sample) == {"score": 0, "text_match": 0}
            constant = metric("The correct answer is F: none", sample)["score"]
            assert constant == (task == "longhealth_3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patient, question: question.pop("answer_c"), "patient_02, question 1: no column 'answer_c'; found "),
        (lambda patient, question: question.update(question=" "), "patient_02, question 1: column 'question' is empty"),
        (lambda patient, question: question.update(correct="gout"), "question 1: column 'correct' holds 'gout', which is none of"),
        (lambda patient, question: question.update(answer_location={"text_9": {}}), "question 1: column 'answer_location' holds "),
        (lambda patient, question: question.update(answer_location=None), "question 1: column 'answer_location' holds None"),
        (lambda patient, question: patient.pop("texts"), "patient_02: no column 'texts'; found "),
        (lambda patient, question: patient.update(texts={}), "patient_02: column 'texts' has to be an object"),
        (lambda patient, question: patient["texts"].update(text_2=""), "patient_02, texts: column 'text_2' is empty"),
        (lambda patient, question: patient["texts"].update(text_2=5), "patient_02, texts: column 'text_2' holds int"),
        (lambda patient, question: patient.update(questions={}), "patient_02: column 'questions' has to be a list"),
        (lambda patient, question: patient["questions"].insert(1, "x"), "patient_02, question 1: an object is needed, found str"),
    ],
)
def test_bad_values_are_named(tmp_path, change, message):
    content = copy.deepcopy(_benchmark())
    change(content["patient_02"], content["patient_02"]["questions"][1])
    file = tmp_path / "benchmark_v5.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"benchmark_v5.json, .*{message}"):
        longhealth.samples(tmp_path)


def test_an_option_may_differ_from_the_right_answer_in_case_and_full_stop(tmp_path):
    content = _benchmark()
    content["patient_01"]["questions"][0]["correct"] = "Finding  a10."
    (tmp_path / "benchmark_v5.json").write_text(json.dumps(content))
    assert longhealth.samples(tmp_path, limit=1)[0].references == ("A", "finding a10")


def test_options_that_are_alike(tmp_path):
    """One that is written as the right answer is comes before those that differ in case and full stop; of these there may be one."""
    content = _benchmark()
    question = content["patient_01"]["questions"][0]
    file = tmp_path / "benchmark_v5.json"
    for correct, letter in (("So.", "B"), ("so", "D")):
        question |= {"answer_b": "So.", "answer_d": "so", "correct": correct}
        file.write_text(json.dumps(content))
        assert longhealth.samples(tmp_path, limit=1)[0].references == (letter, correct)
    for changes in ({"correct": "SO"}, {"correct": "so", "answer_b": "so"}):
        file.write_text(json.dumps(content | {"patient_01": content["patient_01"] | {"questions": [question | changes]}}))
        with pytest.raises(ValueError, match="patient_01, question 0: column 'correct' holds '(so|SO)', which is the options B and D"):
            longhealth.samples(tmp_path)


def test_damaged_files(tmp_path):
    file = tmp_path / "benchmark_v5.json"
    content = json.dumps(_benchmark(), indent=1)
    file.write_text(content[:-30])
    with pytest.raises(ValueError, match=r"benchmark_v5.json:\d+: not valid JSON"):
        longhealth.samples(tmp_path)
    file.write_bytes(content.replace("p1t0w0 ", "pät ").encode("latin-1"))
    with pytest.raises(ValueError, match="patient_01, texts: column 'text_0' is not valid UTF-8"):
        longhealth.samples(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="benchmark_v5.json: an object with a patient for each name is needed"):
        longhealth.samples(tmp_path)
