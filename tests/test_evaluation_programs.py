"""`experiments.evaluate` on every benchmark with a tiny model: results, reports, a kill, comparisons and refusals."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.config import SparsityConfig
from elastic_jax.elastic import ElasticModel
from elastic_jax.evaluation import runner
from elastic_jax.evaluation.results import read_records
from elastic_jax.evaluation.suite_report import markdown, suite_report
from elastic_jax.generate import Completion, Generation, Timings
from elastic_jax.models.decoder import Decoder
from elastic_jax.trainer import TrainConfig, init_state
from elastic_jax.weights.safetensors import save_safetensors
from experiments.common import define_model_flags
from experiments.suites import SUITES, _weights_digest, check_suite_flags, define_suite_flags, run_suite
from tests.test_generate import LONG, TOKENIZER, VOCABULARY
from tests.tiny import BLOCK, tiny_config

# Tests share few shapes, since each is compiled: one prompt at a time, most of them cut to one length.
SMALL = {"block_size": BLOCK, "sink_tokens": BLOCK, "local_tokens": 2 * BLOCK}


def write_lines(file: Path, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module", autouse=True)
def defined_flags():
    before = set(flags.FLAGS)
    define_model_flags()
    define_suite_flags()
    flags.FLAGS(["tests"])
    yield
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, defined_flags):
    """A tiny model with its tokenizer, a run whose router is untrained, and a few records of each benchmark."""
    root = tmp_path_factory.mktemp("workshop")
    config = tiny_config(vocab_size=VOCABULARY, max_positions=4096)
    decoder = Decoder(config, rngs=nnx.Rngs(params=0), param_dtype=jnp.float32)
    save_safetensors(decoder, root / "model")
    TOKENIZER.save_pretrained(root / "model")
    model, _ = ElasticModel.create(decoder, config, sparsity=SparsityConfig(**SMALL))
    with RunDirectory(root / "run", keep=1) as run, flagsaver.flagsaver(model=str(root / "model"), dtype="float32", **SMALL):
        run.claim({name: flags.FLAGS[name].value for name in flags.FLAGS if name in MODEL_NAMES})
        run.save(init_state(model, TrainConfig(seed=3)))
    shared = {"context": 7 * LONG, "answers": ["More text"], "all_classes": None, "_id": "x", "length": 100}
    for task in ("qasper", "lcc"):
        write_lines(root / "longbench_e" / f"{task}_e.jsonl", [shared | {"input": f"{n}?"} for n in range(4)])
    question = {"_id": "x", "domain": "d", "sub_domain": "s", "length": "short", "question": "Why?", "answer": "B", "context": 7 * LONG}
    question |= {f"choice_{letter}": f"for {letter}" for letter in "ABCD"}
    (root / "longbench_v2").mkdir()
    records = [question | {"difficulty": difficulty} for difficulty in ("easy", "hard", "hard")]
    (root / "longbench_v2" / "data.json").write_text(json.dumps(records))
    write_lines(root / "math" / "gsm8k" / "test.jsonl", [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)])
    asked = {"No": 0, "question": "Why?", "correct": "so", "answer_location": {"text_0": {}}}
    asked |= {f"answer_{letter}": "so" if letter == "c" else f"not {letter}" for letter in "abcde"}
    patients = {f"patient_{n:02}": {"texts": {f"text_{t}": LONG for t in range(2)}, "questions": [asked]} for n in range(2)}
    (root / "longhealth").mkdir()
    (root / "longhealth" / "benchmark_v5.json").write_text(json.dumps(patients))
    return root


MODEL_NAMES = ("yarn_factor", "model", "weights", "dtype", "setting", *SMALL, "xattn_stride", "xattn_threshold", "pooling", "router_width")
MODEL_NAMES += ("implementation",)
CHANGES = {
    "ruler": {"tasks": ["niah_single_1"], "lengths": ["1500"], "samples": 1, "max_new_tokens": 4},
    "longbench_e": {"tasks": ["qasper", "lcc"], "samples": 2, "max_prompt_tokens": 700, "max_new_tokens": 4},
    "longbench_v2": {"max_prompt_tokens": 700, "max_new_tokens": 4},
    "math": {"tasks": ["gsm8k"], "repeats": 2, "temperature": 0.7, "top_k": 50, "max_new_tokens": 4},
    "longhealth": {"tasks": ["longhealth_1"], "samples": 1, "max_prompt_tokens": 700, "max_new_tokens": 4},
}


def evaluate(workshop, suite, out, **changes):
    data = None if suite == "ruler" else str(workshop / suite)
    options = {"router": str(workshop / "run"), "data": data} | CHANGES[suite] | changes
    with flagsaver.flagsaver(**options):
        run_suite(suite, str(out), batch_size=1, seed=0, logit_bias=0.0)
    return json.loads((out / "report.json").read_text())


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_runs_and_reports(workshop, tmp_path, suite, capsys):
    report = evaluate(workshop, suite, tmp_path)
    expected = {"ruler": 1, "longbench_e": 4, "longbench_v2": 3, "math": 6, "longhealth": 5}[suite]
    overall = report["cells"]["overall"]
    assert overall["answers"] == expected
    assert overall["n"] == {"math": 3, "longhealth": 1}.get(suite, expected)
    assert 0 <= overall["low"] <= overall["mean"] <= overall["high"] <= 100
    assert 0 <= overall["esr"] <= overall["msr"] <= 1
    assert report["settings"]["block_size"] == BLOCK  # of the run
    assert report["settings"]["protocol"]["prompts"]
    drawn = {"temperature": 0.7, "top_k": 50, "top_p": 1.0, "seed": 0}
    assert report["settings"]["decoding"] == (drawn if suite == "math" else {"temperature": 0.0})
    text = (tmp_path / "report.md").read_text()
    assert text in capsys.readouterr().out
    assert (tmp_path / "lengths.png").exists() == bool(report["cells"]["lengths"])
    assert (overall["cut_prompts"] > 0) == (suite in ("longbench_e", "longbench_v2"))
    if suite != "longbench_e":
        return
    again = {file.name: file.read_bytes() for file in tmp_path.glob("*.jsonl")}
    evaluate(workshop, suite, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.jsonl")} == again


def test_what_ruler_is_made_of_is_told(workshop, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path / "none"))
    changes = {"tasks": ["niah_single_2"], "ruler_order": "upstream", "sample_seed": 7}
    report = evaluate(workshop, "ruler", tmp_path / "out", max_new_tokens=None, **changes)
    assert "no PaulGrahamEssays.json was found; instead: packaged substitute for essays: " in capsys.readouterr().out
    protocol = report["settings"]["protocol"]
    assert (protocol["order"], protocol["seed of the samples"]) == ("upstream", 7)
    assert re.fullmatch(r"PaulGrahamEssays.json: packaged .*; squad.json: none; hotpotqa.json: none", protocol["texts"])
    limits = report["settings"]["max_new_tokens"]
    assert (len(limits), limits["niah_single_2"], limits["fwe"]) == (13, 128, 50)
    for change in ({"max_new_tokens": 4}, {"sample_seed": 8}, {"ruler_order": "sample"}):
        with pytest.raises(ValueError, match="holds results of other settings"):
            evaluate(workshop, "ruler", tmp_path / "out", **{"max_new_tokens": None, **changes, **change})
    (tmp_path / "data").mkdir()
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "PaulGrahamEssays.json").write_text(json.dumps({"text": "A sentence. " * 500}))
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path / "assets"))
    evaluate(workshop, "ruler", tmp_path / "other", data=str(tmp_path / "data"), **changes)
    assert f"--data={tmp_path / 'data'} has no PaulGrahamEssays.json; instead: user's file" in capsys.readouterr().out


@pytest.mark.parametrize("changed", ["embedding", 0, 1])
def test_weights_are_told_apart_by_every_layer(changed):
    weights = lambda name: {"weight": jnp.full((4, 3), float(name == changed)), "norm": jnp.ones(3)}
    backbones = lambda: tuple({"embedding": weights("embedding"), "layers": weights(layer)} for layer in range(2))
    one = _weights_digest(backbones())
    changed = None
    assert one != _weights_digest(backbones()) == _weights_digest(backbones())


def perfect(sample):
    right = sample.references[0]
    forms = {
        "ruler_match_all": " ".join(sample.references),
        "multiple_choice": f"The correct answer is ({right})",
        "letter_or_text": f"The correct answer is {right}: {sample.references[-1]}",
        "final_number": rf"\boxed{{{right}}}",
    }
    return forms.get(sample.metric, right)


@pytest.mark.parametrize("suite", SUITES)
def test_perfect_answers_have_100_and_empty_ones_0(workshop, tmp_path, suite, monkeypatch):
    """From the benchmark's files to every cell of the report, the model's answers being replaced."""
    times = Timings(prefill_seconds=1.0, decode_seconds=1.0, steps=1, cache_pages=1, cache_mib=1.0, pool_mib=1.0, dense_cache_mib=1.0)
    shared = {"tokens": np.zeros(1, np.int32), "finish_reason": "stop", "is_full": np.ones((3, 2), bool), "esr": 0.0}
    ruler = {"tasks": ["niah_single_1", "vt", "fwe"], "lengths": ["2000", "2500"]}  # that need no texts
    changes = {"ruler": ruler, "longhealth": {"tasks": None, "max_prompt_tokens": 1000}}.get(suite, {})
    for answer, expected in ((perfect, 100.0), (lambda sample: "", 0.0)):

        def generate(generator, batch, config, answer=answer):
            results = [Completion(text=answer(item.sample), prompt_tokens=item.tokens, **shared) for item in batch]
            return Generation(completions=results, timings=times)

        monkeypatch.setattr(runner, "_generate", generate)
        report = evaluate(workshop, suite, tmp_path / str(expected), **changes)
        cells = report["cells"]
        sections = [*(cells[name] for name in ("groups", "lengths", "tasks")), *cells["task_lengths"].values()]
        every = [cells["overall"], *(cell for section in sections for cell in section.values())]
        assert all(cell[name] == pytest.approx(expected) for cell in every for name in ("mean", "low", "high"))
        others = {"ruler": {"empty": 100 - expected}, "longhealth": {"text_match": expected}}.get(suite, {})
        assert {name: score["mean"] for name, score in cells["overall"]["scores"].items()} == pytest.approx(others)
        assert report["expected"] == cells["overall"]["answers"]
        text = (tmp_path / str(expected) / "report.md").read_text()
        assert f"| this run | {expected:.2f} [{expected:.1f}, {expected:.1f}] |" in text


def command(workshop, out, *options):
    arguments = [f"--data={workshop / 'longbench_e'}", "--tasks=qasper,lcc", "--max_prompt_tokens=700", "--max_new_tokens=4"]
    small = [f"--model={workshop / 'model'}", *(f"--{name}={value}" for name, value in SMALL.items())]
    return [sys.executable, "-m", "experiments.evaluate", "--suite=longbench_e", f"--out={out}", *arguments, *small, *options]


def test_a_killed_program_goes_on_and_is_compared(workshop, tmp_path):
    evaluate(workshop, "longbench_e", tmp_path / "whole", router=None, heads="full", samples=None, model=str(workshop / "model"), **SMALL)
    out = tmp_path / "killed"
    arguments = command(workshop, out, "--heads=full", "--batch_size=1", f"--against={tmp_path / 'whole'}", "--compare=qwen3_4b")
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not any(b"\n" in file.read_bytes() for file in out.glob("*.jsonl")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = len(read_records(out))
    assert 0 < killed < 8
    assert f"**Unfinished: {killed} of 8 answers." in markdown(suite_report(out))
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"8 samples; {killed} answers in {out}" in result.stdout
    assert read_records(out) == read_records(tmp_path / "whole")
    assert "paired over 8 answers that both have (0 are only here, 0 only there; 0 of the common ones" in result.stdout
    assert "| overall | 8 | 0.00 [0.0, 0.0] |" in result.stdout
    assert "| paper: Elastic FA-SSA | 42.20 | 0.66 |" in result.stdout
    result = subprocess.run([*arguments, "--heads=sparse"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "holds results of other settings (heads: 'full' there, 'sparse' now)" in result.stderr
    assert "Traceback" not in result.stderr


def test_other_heads_and_the_report_alone(workshop, tmp_path):
    np.save(tmp_path / "heads.npy", np.array([[1, 0], [0, 1], [1, 1]]))
    tiny = {"router": None, "model": str(workshop / "model")} | SMALL
    report = evaluate(workshop, "longbench_e", tmp_path / "file", heads=str(tmp_path / "heads.npy"), **tiny)
    assert report["cells"]["overall"]["msr"] == pytest.approx(1 / 3, abs=1e-5)
    evaluate(workshop, "longbench_e", tmp_path / "full", heads="full", **tiny)
    changes = {"report_only": True, "baseline": str(tmp_path / "full"), "against": str(tmp_path / "full")}
    report = evaluate(workshop, "longbench_e", tmp_path / "file", **changes)
    assert set(report["against"]["settings"]) == {"heads"}
    assert report["against"]["common"] == 4
    assert set(report["speedup"]["settings"]) == {"heads"}
    before = (tmp_path / "full" / "report.json").read_bytes()
    with pytest.raises(ValueError, match="full has results of longbench_e, not of math"):
        evaluate(workshop, "math", tmp_path / "full", report_only=True)
    assert (tmp_path / "full" / "report.json").read_bytes() == before
    assert not list(tmp_path.rglob(".*.json*"))  # nothing unfinished is left


def test_held_out_documents_take_no_flags_of_benchmarks():
    check_suite_flags("heldout")
    for changes in ({"tasks": ["fwe"]}, {"temperature": 0.7}, {"repeats": 2}, {"ruler_order": "upstream"}):
        with flagsaver.flagsaver(**changes), pytest.raises(ValueError, match=rf"--{min(changes)} is of no use to --suite=heldout"):
            check_suite_flags("heldout")


@pytest.mark.parametrize(
    ("suite", "changes", "message"),
    [
        ("ruler", {"lengths": ["8192"]}, "--lengths has 8192, the model has 4096 positions: give shorter ones, or --yarn_factor=2"),
        ("ruler", {"lengths": ["8k"]}, "--lengths=8k: numbers of tokens are needed"),
        ("ruler", {"lengths": ["٣٠٠٠"]}, "--lengths=٣٠٠٠: numbers of tokens are needed"),
        ("ruler", {"lengths": ["1500", "01500"]}, "--lengths has 1500 twice"),
        ("ruler", {"tasks": []}, "--tasks is empty: give a value, or leave the flag out"),
        ("longbench_e", {"data": ""}, "--data is empty"),
        ("longbench_e", {"tasks": ["qasper", "qasper"]}, "--tasks has qasper twice: each is accepted once"),
        ("longbench_e", {"max_new_tokens": 100_000}, "--max_new_tokens=100000: the model has 4096 positions"),
        ("longbench_e", {"top_p": 2.0}, "top_p=2.0: a number from 1e-09 to 1 is needed"),
        ("ruler", {"tasks": ["tea"]}, "tasks has 'tea': accepted are niah_single_1"),
        ("ruler", {"heads": "full"}, "one of --router=RUN .* and --heads="),
        ("ruler", {"router": None}, "one of --router=RUN .* and --heads="),
        ("ruler", {"router": "/nowhere"}, "/nowhere holds no run"),
        ("ruler", {"router": None, "heads": "half"}, "--heads=half: accepted are full, sparse, and a .npy or .json file"),
        ("ruler", {"repeats": 2}, "--repeats is of no use to --suite=ruler: it goes with math"),
        ("math", {"temperature": 0.0}, "--repeats=2: .* a --temperature above 0"),
        ("math", {"tasks": ["gsm8k", "math500"]}, "--tasks=math500: accepted are gsm8k, math, aime24"),
        ("math", {"tasks": ["gsm8k", "aime24"]}, "has no subfolder for aime24"),
        ("math", {"compare": "qwen3_4b"}, "--compare: the paper has no numbers of math"),
        ("math", {"lengths": ["100"]}, "--lengths is of no use to --suite=math: it goes with ruler"),
        ("math", {"sample_seed": 3}, "--sample_seed is of no use to --suite=math: it goes with ruler, longhealth"),
        ("math", {"prompts": "x"}, "--prompts is of no use to --suite=math: it goes with longbench_e"),
        ("longhealth", {"ruler_order": "upstream"}, "--ruler_order is of no use to --suite=longhealth"),
        ("math", {"against": "/nowhere"}, "/nowhere holds no results"),
        ("math", {"max_prompt_tokens": 5}, "of which at least one must stay"),
        ("longhealth", {"data": None}, "--data is needed"),
    ],
)
def test_bad_input_is_named(workshop, tmp_path, suite, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(workshop, suite, tmp_path / "out", model=str(workshop / "model"), **changes)
