"""Running samples: batches, order, interruptions and refusals, on a tiny model."""

import dataclasses
import random

import pytest

from elastic_jax.evaluation.metrics import METRICS
from elastic_jax.evaluation.results import ResultsFolder, read_records, read_run, read_timings
from elastic_jax.evaluation.runner import RunConfig, run_samples
from elastic_jax.evaluation.samples import Sample
from tests.test_generate import LONG, generator

SETTINGS = {"suite": "ruler", "model": "tiny"}


def checksum(answer, sample):
    """Another answer, another score."""
    return {"score": (sum(answer.encode()) % 101) / 100, "long": float(len(answer) > 3)}


@pytest.fixture(autouse=True, scope="module")
def metric():
    METRICS["checksum"] = checksum
    yield
    del METRICS["checksum"]


def samples():
    """Two tasks, each of prompts of the same two shapes: chats with an answer prefix, and texts with a stop of their own."""
    options = {"group": "g", "references": ("x", "y"), "metric": "checksum", "extra": {"note": 1}}
    made = []
    for number in range(7):
        text = LONG[number:] if number % 2 else LONG[number : number + 40]
        made.append(Sample(id=f"chat/{number}", task="chat", prompt=text, max_new_tokens=9, answer_prefix="So:", length=32, **options))
        made.append(Sample(id=f"text/{number}", task="text", prompt=text + LONG[:46], max_new_tokens=9, chat=False, stop=("e",), **options))
    return made


def run(out, model, wanted, devices=(), **options):
    with ResultsFolder(out, SETTINGS, {"device": "cpu"}) as results:
        run_samples(model, wanted, results, RunConfig(**options), devices=devices, quiet=True)


def lines(out):
    return {file.stem: sorted(file.read_text().splitlines()) for file in out.glob("*.jsonl") if file.stem != "timings"}


@pytest.fixture(scope="module")
def model():
    return generator()


@pytest.fixture(scope="module")
def expected(tmp_path_factory, model):
    out = tmp_path_factory.mktemp("expected")
    run(out, model, samples(), batch_size=1)
    assert {task: len(content) for task, content in lines(out).items()} == {"chat": 7, "text": 7}
    return out


def test_a_line_says_what_was_asked_answered_and_scored(expected, model):
    for record in read_records(expected):
        (sample,) = (sample for sample in samples() if sample.id == record["id"])
        prompt = sample.prompt if not sample.chat else f"<|im_start|>user\n{sample.prompt}<|im_end|>\n<|im_start|>assistant\nSo:"
        assert record["LEN"] == len(model.tokenizer(prompt)["input_ids"])
        stops = [*model.default_stops(not sample.chat), *sample.stop]
        options = {"max_new_tokens": sample.max_new_tokens, "stop": stops}
        (answer,) = model.generate([prompt], **options).completions
        if not sample.chat:  # a chat's router does not pool the answer prefix, so that its plan is another
            assert record["pred"] == answer.text
            assert record["msr"] == pytest.approx(answer.msr, abs=1e-6)
            assert record["esr"] == pytest.approx(answer.esr, abs=1e-4)
        assert record["answer"] == ["x", "y"]
        assert record["scores"] == checksum(record["pred"], sample)
        assert record["score"] == record["scores"]["score"]
        assert record["length"] == sample.length
        assert record["extra"] == {"note": 1}
    assert len({record["pred"] for record in read_records(expected)}) > 6
    assert len({record["msr"] for record in read_records(expected)}) > 1
    assert sum(timing["rows"] for timing in read_timings(expected)) == 14
    assert read_run(expected) == {"settings": SETTINGS, "environment": {"device": "cpu"}, "expected": 14}


@pytest.mark.parametrize("batch_size", [3, 5])
def test_neither_batches_nor_order_change_a_line(tmp_path, expected, model, batch_size):
    shuffled = samples()
    random.Random(batch_size).shuffle(shuffled)
    run(tmp_path, model, shuffled, batch_size=batch_size)
    assert lines(tmp_path) == lines(expected)
    assert max(timing["rows"] for timing in read_timings(tmp_path)) > 1
    assert {timing["rows"] for timing in read_timings(expected)} == {1}


class Stopped(Exception):
    pass


class StoppingGenerator:
    """Fails in its third call."""

    def __init__(self, model):
        self._model, self.calls, self.batches = model, 0, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def generate(self, *arguments, **options):
        self.calls += 1
        if self.calls == 3:
            raise Stopped
        self.batches.append([prompt.tokens.tobytes() for prompt in arguments[0]])
        return self._model.generate(*arguments, **options)


@pytest.mark.parametrize("torn", [0, 1, 40, "zeros"])
def test_a_stopped_run_goes_on_without_loss_or_repetition(tmp_path, expected, model, torn):
    """Also where the last line was written in part, down to its missing line break, or a loss of power left zeros in its place."""
    with pytest.raises(Stopped):
        run(tmp_path, StoppingGenerator(model), samples(), batch_size=3)
    kept = read_records(tmp_path)
    assert 0 < len(kept) < 14
    assert read_run(tmp_path)["expected"] == 14
    file = tmp_path / f"{kept[-1]['task']}.jsonl"
    if torn == "zeros":
        file.write_bytes(file.read_bytes() + bytes(512))
    elif torn:
        file.write_bytes(file.read_bytes()[:-torn])
        assert len(read_records(tmp_path)) == len(kept) - 1
    counting = StoppingGenerator(model)
    counting.calls = 3
    run(tmp_path, counting, samples(), batch_size=5)
    assert lines(tmp_path) == lines(expected)
    before = counting.calls
    run(tmp_path, counting, samples(), batch_size=5)
    assert counting.calls == before
    assert lines(tmp_path) == lines(expected)


def test_a_stopped_run_makes_the_batches_that_were_left_as_they_would_have_been(tmp_path, model):
    """In bfloat16 a batch of other rows may be rounded otherwise."""
    whole, stopping = StoppingGenerator(model), StoppingGenerator(model)
    whole.calls = 3
    run(tmp_path / "whole", whole, samples(), batch_size=3)
    with pytest.raises(Stopped):
        run(tmp_path / "parts", stopping, samples(), batch_size=3)
    file = tmp_path / "parts" / f"{read_records(tmp_path / 'parts')[-1]['task']}.jsonl"
    file.write_bytes(file.read_bytes()[:-1])  # a sample of a batch that was there otherwise
    run(tmp_path / "parts", stopping, samples(), batch_size=3)
    assert stopping.batches[:2] == whole.batches[:2]
    assert stopping.batches[2:] in (whole.batches[1:], [whole.batches[0], *whole.batches[2:]])
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_an_answer_that_must_not_end_at_once(tmp_path, model):
    """Samples that differ in this alone are in batches of their own."""
    stop = tuple(map(chr, range(128)))
    wanted = [dataclasses.replace(samples()[1], id=str(number), stop=stop, min_new_tokens=number) for number in (0, 1, 3)]
    run(tmp_path, model, wanted)
    assert [record["new_tokens"] > number for number, record in zip((0, 1, 3), read_records(tmp_path), strict=True)] == [True] * 3
    assert read_records(tmp_path)[0]["new_tokens"] == 1
    assert [timing["rows"] for timing in read_timings(tmp_path)] == [1, 1, 1]


def test_more_samples_join_a_run(tmp_path, expected, model):
    run(tmp_path, model, samples()[:5], batch_size=1)
    run(tmp_path, model, samples(), batch_size=1)
    assert lines(tmp_path) == lines(expected)


def test_repeated_answers_have_seeds_of_their_own(tmp_path, model):
    wanted = [sample for sample in samples() if sample.task == "text"][:3]
    wanted = [dataclasses.replace(one, id=f"{one.id}/{k}", extra={"question": one.id}) for one in wanted for k in range(3)]
    options = {"temperature": 1.0, "seed": 5}
    run(tmp_path / "a", model, wanted, batch_size=1, **options)
    run(tmp_path / "b", model, wanted[::-1], batch_size=3, **options)
    run(tmp_path / "c", model, wanted, batch_size=1, **(options | {"seed": 6}))
    assert lines(tmp_path / "a") == lines(tmp_path / "b") != lines(tmp_path / "c")
    records = read_records(tmp_path / "a")
    assert [record["id"] for record in records] == [f"text/{n}/{k}" for n in (0, 1, 2) for k in range(3)]
    assert [record["question"] for record in records] == [f"text/{n}" for n in (0, 1, 2) for k in range(3)]
    assert len({record["pred"] for record in records}) == 9


def test_long_prompts_make_smaller_batches(tmp_path, model):
    run(tmp_path, model, samples(), batch_size=5, batch_tokens=300, max_prompt_tokens=90)
    for timing in read_timings(tmp_path):
        assert timing["rows"] * timing["padded_tokens"] <= 300
    records = read_records(tmp_path)
    assert max(record["LEN"] for record in records) == 90
    assert sum(record["cut_tokens"] > 0 for record in records) > 4
    assert {timing["rows"] for timing in read_timings(tmp_path)} == {1, 3, 4}


def test_a_folder_of_another_run_is_refused(tmp_path, model):
    run(tmp_path, model, samples()[:2], batch_size=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"other settings \(model: 'tiny' there, 'small' now\): give another folder"):
        ResultsFolder(tmp_path, SETTINGS | {"model": "small"}, {})
    longer = [dataclasses.replace(sample, prompt=sample.prompt + "!") for sample in samples()[:2]]
    with pytest.raises(ValueError, match="has a result of 'chat/0' for another prompt"):
        run(tmp_path, model, longer, batch_size=1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("tail", ["", "\n"])
def test_files_that_are_no_results_are_left_alone(tmp_path, model, tail):
    """Beside nothing of ours, and among results: none is cut, whether or not it ends in a line break."""
    wanted = samples()[:1]
    for out, message in (
        (tmp_path / "foreign", r"holds data.jsonl, but no run.json, so it is no folder of"),
        (tmp_path / "ours", "data.jsonl, line 1 "),
    ):
        if out.name == "ours":
            run(out, model, wanted, batch_size=1)
        out.mkdir(exist_ok=True)
        (out / ".lock").write_text("mine")
        for content in ('{"id": "chat/0", "text": "theirs"}', '{"length": 5}', "[1]"):
            (out / "data.jsonl").write_text(content + tail)
            before = {file.name: file.read_bytes() for file in out.iterdir()}
            with pytest.raises(ValueError, match=message):
                run(out, model, wanted, batch_size=1)
            assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (out / "data.jsonl").rename(out / "timings.jsonl")
    with pytest.raises(ValueError, match="timings.jsonl, line 1 "):
        run(out, model, wanted, batch_size=1)


def test_damage_and_use_by_two_are_named(tmp_path, model):
    run(tmp_path, model, samples()[:3], batch_size=1)
    with (
        ResultsFolder(tmp_path, SETTINGS, {}),
        pytest.raises(ValueError, match="is in use by another evaluation"),
    ):
        ResultsFolder(tmp_path, SETTINGS, {})
    file = tmp_path / "chat.jsonl"
    file.write_text("{\n" + file.read_text())
    with pytest.raises(ValueError, match="chat.jsonl, line 1 is damaged"):
        ResultsFolder(tmp_path, SETTINGS, {})
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="run.json is damaged"):
        ResultsFolder(tmp_path, SETTINGS, {})
    with pytest.raises(ValueError, match="holds no results: run.json is missing"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be a folder of results"):
        ResultsFolder(file, SETTINGS, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "taste"}, "sample 'chat/0': metric 'taste' is unknown: accepted are .*checksum"),
        ({"task": "../x"}, "task '../x' is no name for a file"),
        ({"task": "timings"}, "task 'timings' is no name"),
        ({"stop": ("ab",)}, "stop: 'ab' is 2 tokens"),
        ({"id": "text/0"}, "two samples have the id 'text/0'"),
        ({"chat": False, "system": "x"}, "has a system message, but is no chat"),
    ],
)
def test_samples_that_cannot_be_run(tmp_path, model, changes, message):
    first, second = samples()[:2]
    with pytest.raises(ValueError, match=message):
        run(tmp_path, model, [dataclasses.replace(first, **changes), second])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"logit_bias": float("inf")}, "logit_bias=inf: a finite number is needed; heads=full or sparse"),
        ({"logit_bias": float("nan")}, "logit_bias=nan: a finite number is needed"),
    ],
)
def test_settings_that_cannot_be_run(options, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options)
