"""`experiments.generate` on a tiny model with a tokenizer of bytes: as a process where that matters, else in this one."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from elastic_jax import assets
from elastic_jax.checkpoints import RunDirectory
from elastic_jax.elastic import ElasticModel
from elastic_jax.files import append_lines
from elastic_jax.models.decoder import Decoder
from elastic_jax.pretrained import load_generator
from elastic_jax.trainer import TrainConfig, init_state
from elastic_jax.weights.safetensors import save_safetensors
from experiments import generate
from experiments.common import MODEL_FLAGS, define_model_flags
from tests.data_helpers import byte_tokenizer
from tests.tiny import SPARSITY, tiny_config

# With NEW tokens behind them, prompts of 117 to 128 tokens run in the same programs, which saves most compiling.
TEXT = "A text longer than a window: streaming heads have lost its middle when the answer begins. And now?"
RAW = f"{TEXT} Beyond what is full."
NEW = 12
CACHE_GIB = 0.001
CHAT = [{"role": "user", "content": TEXT}]
SYSTEM = [{"role": "system", "content": "x"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model: weights large enough for varied text, and a tokenizer. run: of a router that decides both ways. bare: no chat template."""
    root = tmp_path_factory.mktemp("generate")
    config = tiny_config(vocab_size=259)
    decoder = Decoder(config, rngs=nnx.Rngs(params=0), param_dtype=jnp.float32)
    nnx.update(decoder, jax.tree.map(lambda w: w * 10 if w.ndim > 2 else w, nnx.state(decoder, nnx.Param)))
    model, _ = ElasticModel.create(decoder, config, sparsity=SPARSITY)
    state = init_state(model, TrainConfig())
    state = dataclasses.replace(state, trainable=state.trainable | {"router": jax.tree.map(lambda w: w * 30, state.trainable["router"])})
    for name, template in (("model", byte_tokenizer().chat_template), ("bare", None)):
        save_safetensors(decoder, root / name)
        byte_tokenizer(template).save_pretrained(root / name)
    settings = dict.fromkeys(MODEL_FLAGS) | dataclasses.asdict(SPARSITY) | {"router_width": 4, "pooling": "boundary"}
    with RunDirectory(root / "run", keep=1) as run:
        run.claim(settings | {"model": str(root / "model"), "dtype": "float32"})
        run.save(state)
    return SimpleNamespace(model=root / "model", bare=root / "bare", run=root / "run")


@pytest.fixture(scope="module")
def library(folders):
    return load_generator(folders.model, router=folders.run, cache_gib=CACHE_GIB)


@pytest.fixture(scope="module", autouse=True)
def defined_flags():
    before = set(flags.FLAGS)
    define_model_flags()
    generate.define_generation_flags()
    yield
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


@pytest.fixture
def program(folders, monkeypatch, capsys):
    """Runs the program in this process: (what it exits with, standard output, standard error)."""

    def run(*arguments, stdin=b"", **given):
        given = {"router": folders.run, "max_new_tokens": NEW, "cache_gib": CACHE_GIB} | given
        arguments += tuple(f"--{name}={value}" for name, value in given.items() if value is not None)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with flagsaver.flagsaver():
            try:
                status = generate.main(flags.FLAGS(["generate", *arguments]))
            except SystemExit as end:
                status = end.code
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def write_lines(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_routers_lie_as_the_backbone_does(library):
    """Otherwise a layer's output lies as neither does, and each program of the prefill is compiled twice."""
    places = lambda arrays: {array.sharding for array in jax.tree.leaves(arrays)}
    assert places(library.router) == places(library.backbones)


def test_a_prompt_from_flag_file_and_standard_input(program, library, tmp_path):
    (expected,) = library.generate([CHAT], max_new_tokens=NEW).completions
    (tmp_path / "prompt.txt").write_text(TEXT)
    for result in (program(prompt=TEXT), program(prompt_file=tmp_path / "prompt.txt"), program(stdin=TEXT.encode())):
        status, out, err = result
        assert (status, out) == (None, expected.text + "\n")
        assert f"running a prompt of {expected.prompt_tokens} tokens\n" in err
        line = err.splitlines()[-1]
        numbers = re.fullmatch(
            r"(\d+) prompt tokens, prefill ([\d.]+) s; (\d+) new tokens, ([\d.]+) ms/token; cache ([\d.]+) MiB \(([\d.]+) with every head "
            r"full\); MSR ([\d.]+), ESR ([\d.]+); compiling took another ([\d.]+) s",
            line,
        )
        assert numbers, line
        prompt, _, new, _, cache, dense, msr, esr, _ = map(float, numbers.groups())
        assert (prompt, new) == (expected.prompt_tokens, NEW)
        assert 0 < cache < dense
        assert (msr, esr) == pytest.approx((expected.msr, expected.esr), abs=0.0051)


def test_options_reach_the_generator(program, library, tmp_path):
    drawn = {"temperature": 0.9, "top_k": 50, "top_p": 0.9}
    (expected,) = library.generate([RAW], max_new_tokens=NEW, seeds=[5], stop=[65, "<|end|>"], **drawn).completions
    assert program("--raw", "--stop=65", "--stop=<|end|>", prompt=RAW, seed=5, **drawn)[1] == expected.text + "\n"
    plan = np.arange(6).reshape(3, 2) % 2
    np.save(tmp_path / "plan.npy", plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan.tolist()))
    (expected,) = library.generate([SYSTEM + CHAT], max_new_tokens=NEW, heads=plan).completions
    for file in ("plan.npy", "plan.json"):
        assert program(prompt=TEXT, heads=tmp_path / file, system="x")[1] == expected.text + "\n"
    for heads, bias in (("full", np.inf), ("sparse", -np.inf)):
        out, err = program(prompt=TEXT, heads=heads)[1:]
        assert f"MSR {float(heads == 'sparse'):.2f}" in err
        assert out == program(prompt=TEXT, logit_bias=bias)[1]


def test_a_model_named_here_goes_before_that_of_the_run(program, folders):
    routed = program("--raw", prompt=RAW)[1]
    assert program("--raw", prompt=RAW, model=folders.bare)[1] == routed
    assert program("--raw", prompt=RAW, model="nowhere", weights=folders.bare)[1] == routed
    full = program("--raw", prompt=RAW, heads="full", router=None, model=folders.bare, **dataclasses.asdict(SPARSITY))[1]
    assert full == program("--raw", prompt=RAW, heads="full")[1] != routed


@pytest.mark.parametrize("flag", ["--reroute", "--noreroute"])
def test_chat(program, library, flag):
    with library.chat(system="x", reroute=flag == "--reroute") as conversation:
        first = conversation.send(TEXT, max_new_tokens=NEW, logit_bias=np.inf).text
        second = conversation.send("Why?", max_new_tokens=NEW, logit_bias=np.inf if flag == "--reroute" else 0.0).text
    status, out, err = program("--chat", flag, system="x", logit_bias=np.inf, stdin=f"{TEXT}\n\nWhy?\n /exit\nnot sent".encode())
    assert (status, out) == (None, f"{first}\n{second}\n")
    assert err.count("MSR 0.00") == 2
    assert err.count("ESR 0.00") == (2 if flag == "--reroute" else 1)


def test_chat_ends_with_the_error_that_a_piped_message_makes(program):
    status, out, err = program("--chat", stdin=f"{TEXT}\n{TEXT * 5}".encode())
    assert "the model has 512 positions" in status
    assert out.endswith("\n")
    assert err.count("ms/token") == 1


def test_a_batch_and_what_a_kill_left_of_it(program, library, tmp_path):
    rows = [
        {"prompt": TEXT},
        {"messages": SYSTEM + CHAT, "id": "chat"},
        {"prompt": TEXT + "x", "id": 7, "seed": 3},
        "",
        {"prompt": TEXT + "xx"},
    ]
    batch, out = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "results" / "out.jsonl"
    options = {"batch": batch, "out": out, "batch_size": 2, "temperature": 0.8, "seed": 11}
    status, printed, err = program(**options)
    assert (status, printed) == (None, "")
    assert f"4 results are in {out}\n" in err
    results = {result["id"]: result for result in read_lines(out)}
    assert list(results) == ["chat", 5, 7, 1]  # the longest first
    chats = [SYSTEM + CHAT, *([{"role": "user", "content": text}] for text in (TEXT + "xx", TEXT + "x", TEXT))]
    for chat, seed, result in zip(chats, (13, 16, 3, 12), results.values(), strict=True):
        (expected,) = library.generate([chat], max_new_tokens=NEW, temperature=0.8, seeds=[seed]).completions
        assert (result["text"], result["seed"]) == (expected.text, seed)
        assert (result["prompt_tokens"], result["new_tokens"]) == (expected.prompt_tokens, expected.new_tokens)
        assert (result["finish_reason"], result["msr"]) == (expected.finish_reason, expected.msr)
        assert result["esr"] == pytest.approx(expected.esr, abs=1e-6)

    whole = out.read_text()
    first, second, *_ = whole.splitlines(keepends=True)
    out.write_text(first + second[:30])
    program(**options)
    assert out.read_text().startswith(first)
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    assert "nothing was left to do" in program(**options)[2]
    kept = out.read_bytes()
    for change in ({"temperature": 0.7}, {"heads": "full"}, {"system": "x"}, {"stop": "65"}, {"local_tokens": 48}):
        assert "is of a prompt or settings that are not the ones now" in program(**(options | change))[0]
    assert out.read_bytes() == kept


def test_a_results_file_is_taken_up_or_left_alone(tmp_path):
    out, ids = tmp_path / "out.jsonl", {1: "aa", "two": "bb"}

    def finished(content):
        out.write_text(content)
        return generate.finished(out, ids)

    rest = {"text": "", "prompt_tokens": 1, "new_tokens": 1, "finish_reason": "stop", "msr": 0.0, "esr": None, "seed": 0}
    lines = [json.dumps({"fingerprint": fingerprint, "id": key} | rest) + "\n" for key, fingerprint in ids.items()]
    assert finished("") == set()
    assert finished("".join(lines)) == {1, "two"}
    for rest in (lines[1][:-1], lines[1][:20], lines[1][:3]):
        assert finished(lines[0] + rest) == {1}
        assert out.read_text() == lines[0]
    for other in (lines[0].replace("aa", "cc"), lines[0].replace('"id": 1', '"id": 3')):
        with pytest.raises(ValueError, match=r"line 1 \(id=\d\) is of a prompt or settings that are not the ones now"):
            finished(other)
        assert out.read_text() == other
    with pytest.raises(ValueError, match="line 3 has a second result for id=1: one is accepted"):
        finished("".join([*lines, lines[0]]))
    assert out.read_text().count("\n") == 3
    with pytest.raises(ValueError, match=r"line 1 \(id=5\) is of a prompt or settings"):
        finished(lines[0].replace('"aa"', "null").replace('"id": 1', '"id": 5'))
    for other in (
        '{"id": 1}\n',
        '{"fingerprint": "aa", "id": 1}\n',
        "[" * 100_000 + "\n",
        "notes",
        "notes\n",
        "[1]\n",
        '{"id": [1], "fingerprint": ""}\n',
        '{"id": 1, "fingerprint": "aa"}',
    ):
        with pytest.raises(ValueError, match="another --out: .*out.jsonl, line 1 (is no result of this program|is damaged|has no line)"):
            finished(other)
        assert out.read_text() == other


def test_a_results_file_is_of_one_run(tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    with generate.claimed(out), pytest.raises(ValueError, match=r"out\.jsonl is being written by another run"), generate.claimed(out):
        pass
    with pytest.raises(ValueError, match="/dev/full is no regular file"), generate.claimed(Path("/dev/full")):
        pass


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "\\ud800"}', "is not JSON"),
        ("[]", 'accepted is a JSON object with "prompt"'),
        ({"text": "x"}, 'accepted is a JSON object with "prompt"'),
        ({"prompt": "x", "messages": CHAT}, "accepted is"),
        ({"prompt": "x", "max_tokens": 3}, "accepted is"),
        ({"prompt": ""}, "prompt='': accepted is a text that is not empty"),
        ({"prompt": "x", "id": None}, "id=None: accepted are"),
        ({"prompt": "x", "id": True}, "id=True: accepted are"),
        ({"prompt": "x", "seed": -1}, "seed=-1: accepted are"),
        ({"prompt": "x", "id": 1}, "id=1, as line 1 has"),
        ({"messages": "x"}, "messages='x': accepted is"),
        ({"messages": [{"role": "user"}]}, "roles system, user, assistant"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "y"}]}, "the last one must be the user's"),
        ({"prompt": TEXT * 7}, "the model has 512 positions"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(program, tmp_path, line, message):
    batch = write_lines(tmp_path / "in.jsonl", [{"prompt": "first"}, line])
    status = program(batch=batch, out=tmp_path / "out.jsonl")[0]
    assert f"{batch}, line 2" in status
    assert message in status
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "standard input is empty: a prompt is needed"),
        ({"prompt": "x", "chat": True}, "--prompt and --chat: give one of them"),
        ({"prompt": "x", "router": None}, "--router=FOLDER of a training run, or --heads=full"),
        ({"prompt": "x", "router": "nowhere"}, "nowhere holds no run"),
        ({"prompt": "\udcff"}, "--prompt is not a text in UTF-8"),
        ({"prompt_file": "nowhere.txt"}, "No such file or directory: 'nowhere.txt'"),
        ({"batch": "nowhere.jsonl"}, "--batch and --out go together"),
        ({"prompt": "x", "out": "out.jsonl"}, "--batch and --out go together"),
        ({"batch": "/dev/null", "out": "out.jsonl"}, "/dev/null holds no prompts"),
        ({"chat": True, "raw": True}, "--raw continues a text as it is"),
        ({"prompt": "x", "raw": True, "system": "x"}, "--raw continues a text as it is"),
        ({"prompt": "x", "heads": "all"}, "--heads=all: accepted are full, sparse, and a .npy or .json file"),
        ({"prompt": "x", "heads": "nowhere.npy"}, "nowhere.npy"),
        ({"prompt": "x", "heads": "full", "logit_bias": 1}, "logit_bias=1.0"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt": "x", "max_new_tokens": 600}, "the model has 512 positions"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1.0"),
        ({"prompt": "x", "top_p": 0}, "top_p=0.0"),
        ({"prompt": "x", "stop": "two"}, "stop: 'two' is 3 tokens"),
        ({"prompt": "x", "stop": "259"}, "stop: 259 is no token"),
        ({"prompt": "x", "cache_gib": 0}, "cache_gib=0.0: a number from 1.9"),
    ],
)
def test_bad_input_is_one_line_that_names_it(program, arguments, message):
    status, out, _ = program(**arguments)
    assert message in status
    assert "\n" not in status
    assert out == ""


def test_plans_in_files_are_checked(program, tmp_path):
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "text.npy", np.array([["x"]]))
    np.save(tmp_path / "pickled.npy", np.array([None]), allow_pickle=True)
    for name, content in {"cut.json": "[[1", "ragged.json": "[[1], [0, 1]]", "object.json": '{"a": 1}', "flat.json": "[0, 1]"}.items():
        (tmp_path / name).write_text(content)
    for file in tmp_path.iterdir():
        assert f"--heads={file}: accepted are full, sparse" in program(prompt="x", heads=file)[0]
    for name, plan in {"small": [[1, 0]], "half": [[0.5, 1]] * 3}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(plan))
        assert "accepted are 0 and 1 of shape (3, 2)" in program(prompt="x", heads=tmp_path / f"{name}.json")[0]


def test_a_model_without_a_chat_template(program, folders):
    for arguments in ({"prompt": TEXT}, {"chat": True}):
        assert "it has no chat_template: --raw continues the prompt as it is" in program(model=folders.bare, **arguments)[0]


def test_a_damaged_run_is_named(program, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert "settings.json is missing" in program(prompt="x", router=tmp_path)[0]
    (tmp_path / "settings.json").write_text("{}")
    assert "settings.json is damaged: yarn_factor is missing" in program(prompt="x", router=tmp_path)[0]


def test_compile_time_counts_nested_programs_once():
    clock = generate.CompileTime()
    for kind, start, end in (("compile", 0, 4), ("compile", 1, 2), ("compile", 3, 6), ("other", 6, 9), ("compile", 8, 10)):
        jax.monitoring.record_event_time_span(f"/jax/core/{kind}/x", start, end)
    assert clock.within(0, 20) == 8
    assert clock.within(1.5, 9) == 5.5
    assert clock.within(6, 8) == 0
    jax.monitoring.unregister_event_time_span_listener(clock._take)


# A shell's background jobs ignore Ctrl-C, and so would what they start.
_MAIN = """import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.generate", run_name="__main__", alter_sys=True)"""


def start(folders, *arguments):
    arguments = [f"--router={folders.run}", f"--max_new_tokens={NEW}", f"--cache_gib={CACHE_GIB}", *arguments]
    command = [sys.executable, "-c", _MAIN, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_an_answer_comes_before_the_next_message(folders, library):
    with start(folders, "--chat") as process, library.chat() as conversation:
        for message in (TEXT, "Why?"):
            process.stdin.write(f"{message}\n".encode())
            process.stdin.flush()
            expected, got = f"{conversation.send(message, max_new_tokens=NEW).text}\n".encode(), b""
            while len(got) < len(expected):
                piece = os.read(process.stdout.fileno(), 10_000)
                assert piece, process.stderr.read()
                got += piece
            assert got == expected
        out, err = process.communicate()
    assert (process.returncode, out, err.count(b"ms/token")) == (0, b"", 2)


def test_a_prompts_text_comes_in_pieces(program, library, monkeypatch):
    pieces = []
    monkeypatch.setattr(generate, "_write", lambda _, piece: pieces.append(piece))
    (expected,) = library.generate([CHAT], max_new_tokens=3 * NEW).completions
    assert program(prompt=TEXT, max_new_tokens=3 * NEW)[1] == "\n"
    assert len(pieces) > 2
    assert "".join(pieces) == expected.text


def test_ctrl_c_keeps_what_is_done(folders, program, tmp_path):
    batch, out = write_lines(tmp_path / "in.jsonl", [{"prompt": TEXT}] * 40), tmp_path / "out.jsonl"
    done = lambda: out.read_bytes().count(b"\n") if out.exists() else 0
    with start(folders, f"--batch={batch}", f"--out={out}", "--batch_size=1") as process:
        while done() < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1].decode()
    kept = out.read_bytes()
    assert 2 <= done() < 40
    assert process.returncode == 130
    assert err.endswith(f"interrupted: {done()} of 40 results are in {out}; the same command goes on\n")
    assert "Traceback" not in err
    assert program(batch=batch, out=out, batch_size=1)[0] is None
    assert out.read_bytes().startswith(kept)
    assert sorted(result["id"] for result in read_lines(out)) == list(range(1, 41))


def test_ctrl_c_between_writing_and_counting(program, tmp_path, monkeypatch):
    def interrupted(*what):
        append_lines(*what)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "append_lines", interrupted)
    monkeypatch.setattr(generate, "end_interrupted", sys.exit)
    batch, out = write_lines(tmp_path / "in.jsonl", [{"prompt": TEXT}] * 3), tmp_path / "out.jsonl"
    message = f"interrupted: 1 of 3 results are in {out}; the same command goes on"
    assert program(batch=batch, out=out, batch_size=1)[0] == message
    assert len(read_lines(out)) == 1


def test_several_devices_share_the_batches_and_change_no_result(folders, tmp_path, monkeypatch):
    """3 devices: for more batches than devices, and for fewer in a run that goes on."""
    batch = write_lines(tmp_path / "in.jsonl", [{"prompt": TEXT[number:]} for number in range(10)])
    results = {}
    for devices in ("1", "3"):
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
        out = tmp_path / f"{devices}.jsonl"
        with start(folders, f"--batch={batch}", f"--out={out}", "--batch_size=2", "--temperature=0.7") as process:
            err = process.communicate(timeout=300)[1].decode()
        assert process.returncode == 0, err
        assert ("added up over 3 devices, " in err) == (devices == "3")
        results[devices] = sorted(out.read_text().splitlines())
    assert results["3"] == results["1"]
    (tmp_path / "3.jsonl").write_text("".join(f"{line}\n" for line in results["3"][:-3]))
    with start(folders, f"--batch={batch}", f"--out={tmp_path / '3.jsonl'}", "--batch_size=2", "--temperature=0.7") as process:
        err = process.communicate(timeout=300)[1].decode()
    assert "added up over 2 devices, " in err
    # Other batches are other sums, of which only the last bits of the sparsity can tell.
    texts = lambda path: sorted((result["id"], result["text"]) for result in read_lines(path))
    assert texts(tmp_path / "3.jsonl") == texts(tmp_path / "1.jsonl")


@pytest.mark.assets
def test_the_demo_model_answers(program):
    try:
        assets.require("smollm2_135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    status, out, err = program(prompt="What is the capital of France?", heads="full", router=None, cache_gib=None, max_new_tokens=8)
    assert status is None
    assert "Paris" in out
    assert "MSR 0.00, ESR 0.00" in err
