"""The kernel benchmarks: rivals compute what ours compute, errors and ratios are right, the program says all it should."""

import dataclasses
import json
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.models.config import preset
from elastic_jax.plan import effective_sparsity
from experiments import benchmark
from experiments.bench import attention, exact, flex, report, rivals, router, timing, tuning, xattn
from experiments.bench.implementations import NAMES, OURS, TORCH, Prepared, attempt, jax_backward, jax_forward
from experiments.bench.problem import Problem, dense_flops, visited_share
from experiments.bench.shapes import SHAPES, Shape

SPARSITY = SparsityConfig(block_size=16, sink_tokens=16, local_tokens=32, xattn_stride=4)
PROBLEM = Problem(shape_name="tiny", shape=Shape(6, 3, 16), tokens=128, streaming=2, dtype="float32", sparsity=SPARSITY)
uncompiled_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def seen_blocks(problem):
    """bool[N, Q, J] by the words of the house plan."""
    blocks, group = problem.tokens // 16, problem.shape.heads // problem.shape.kv_heads
    seen = np.zeros((problem.shape.heads, blocks, blocks), bool)
    for head, row, key in np.ndindex(seen.shape):
        near = key < 1 or key > row - 2  # one sink block, two local ones
        seen[head, row, key] = key <= row and (near or head // group not in problem.streaming_heads)
    return seen


def test_shapes_are_those_of_the_models():
    assert SHAPES["qwen3_4b"] == Shape(32, 8, 128)
    for name, shape in SHAPES.items():
        assert (preset(name).num_heads, preset(name).num_kv_heads, preset(name).head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)


def test_block_mask_of_flex_attention_is_the_plan():
    expected = seen_blocks(PROBLEM)
    assert len(PROBLEM.streaming_heads) == 2
    mask = flex.block_mask(np.repeat(PROBLEM.visible, 2, axis=0), 16, "cpu")
    assert mask.shape == (1, 6, 128, 128)
    np.testing.assert_array_equal(mask.to_dense()[0].bool().numpy(), expected)

    def dense(counts, indices):
        found = np.zeros(expected.shape, bool)
        for head, row in np.ndindex(expected.shape[:2]):
            listed = indices[0, head, row, : counts[0, head, row]].numpy()
            assert list(listed) == sorted(listed)
            found[head, row, listed] = True
        return found

    whole = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = dense(mask.kv_num_blocks, mask.kv_indices)
    np.testing.assert_array_equal(partial, np.broadcast_to(np.eye(8, dtype=bool), partial.shape))  # the causal mask is applied here only
    np.testing.assert_array_equal(whole, expected & ~partial)
    np.testing.assert_array_equal(dense(mask.full_q_num_blocks, mask.full_q_indices), whole.swapaxes(1, 2))
    np.testing.assert_array_equal(dense(mask.q_num_blocks, mask.q_indices), partial)


@uncompiled_flex
@pytest.mark.parametrize("streaming", [0, 2, 3])
def test_rivals_compute_what_ours_computes(streaming, monkeypatch):
    problem = Problem(shape_name="tiny", shape=PROBLEM.shape, tokens=128, streaming=streaming, dtype="float32", sparsity=SPARSITY)
    side = rivals.TorchSide(problem)
    (ours,) = jax_forward("xla", problem).to_jax(jax_forward("xla", problem).call())
    for name in ("flex_torch", "serial_flash"):
        prepared = side.forward(name, {})
        (out,) = prepared.to_jax(prepared.call())
        np.testing.assert_allclose(out, ours, atol=2e-6)
        assert problem.forward_error(out) < 1e-6
    if streaming == 2:
        assert "kernel_options" in side.forward("serial_flash", {}).notes
    else:  # nothing is mixed, so nothing may be gathered or copied
        monkeypatch.setattr(torch.Tensor, "index_select", None)
        prepared = side.forward("serial_flash", {})
        np.testing.assert_allclose(prepared.to_jax(prepared.call())[0], ours, atol=2e-6)
        assert prepared.notes.keys() == ({"kernel_options"} if streaming else {"heads_expanded"})
    prepared = side.forward("flash_torch", {})
    error = problem.forward_error(*prepared.to_jax(prepared.call()))
    assert error < 1e-6 if streaming == 0 else error > 0.1  # dense attention is told apart from the plan's


def test_gradients_are_held_against_the_reference():
    for name, direction in (("reference", "backward"), ("xla", "backward"), ("xla", "forward_backward")):
        gradients = jax_backward(name, PROBLEM, direction).call()
        assert PROBLEM.gradient_error(tuple(gradients)) < 2e-6
        dq, dk, dv = gradients
        assert PROBLEM.gradient_error((dq, 1.02 * dk, dv)) == pytest.approx(0.02, rel=1e-3)
    dense = Problem(shape_name="tiny", shape=PROBLEM.shape, tokens=128, streaming=0, dtype="float32", sparsity=SPARSITY)
    prepared = rivals.TorchSide(dense).backward("flash_torch", {})
    for _ in range(2):  # the graph is kept
        assert dense.gradient_error(prepared.to_jax(prepared.call())) < 2e-6


def test_gradients_of_expanded_heads_are_folded(monkeypatch):
    dense = Problem(shape_name="tiny", shape=PROBLEM.shape, tokens=128, streaming=0, dtype="float32", sparsity=SPARSITY)
    monkeypatch.setattr(rivals.TorchSide, "_takes_groups", lambda *_, **__: False)
    side = rivals.TorchSide(dense)
    prepared = side.backward("flash_torch", {})
    assert prepared.notes["heads_expanded"]
    assert dense.gradient_error(prepared.to_jax(prepared.call())) < 2e-6
    for name in ("flash_torch", "serial_flash"):
        prepared = side.forward(name, {})
        assert dense.forward_error(*prepared.to_jax(prepared.call())) < 1e-6


def test_pullback_leaves_one_jitted_function_and_enters_another(monkeypatch):
    """What times cuDNN's backward pass alone, with JAX's own attention in cuDNN's place."""
    # A length of its own: the trace that holds the replacement serves no other test.
    dense = Problem(shape_name="tiny", shape=PROBLEM.shape, tokens=48, streaming=0, dtype="float32", sparsity=SPARSITY)
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, implementation, **options: attend(*args, **options))
    call = jax_backward("cudnn_jax", dense, "backward").call
    assert dense.gradient_error(tuple(call())) < 2e-6


def test_forward_error_is_relative():
    (out,) = jax_forward("reference", PROBLEM).to_jax(jax_forward("reference", PROBLEM).call())
    assert PROBLEM.forward_error(out) < 1e-6
    assert PROBLEM.forward_error(0.97 * out) == pytest.approx(0.03, rel=1e-3)


def test_reference_takes_keys_in_tiles_and_few_rows_of_long_sequences(monkeypatch):
    monkeypatch.setattr(exact, "_TILE", 48)  # 128 keys: two tiles and an overlapping third
    exact.forward_rows.clear_cache()
    (out,) = jax_forward("reference", PROBLEM).to_jax(jax_forward("reference", PROBLEM).call())
    per_head = np.repeat(PROBLEM.visible, 2, axis=0)
    rows = np.array([0, 3, 7], np.int32)
    found = exact.forward_rows(*PROBLEM.arrays, jnp.asarray(per_head[:, rows]), jnp.asarray(rows), block_size=16)
    np.testing.assert_allclose(found, out.reshape(8, 16, 6, 16)[rows], atol=2e-6)
    exact.forward_rows.clear_cache()
    assert [len(exact.checked_rows(tokens, 128)) for tokens in (1024, 16_384, 65_536, 262_144, 2**20)] == [8, 128, 128, 32, 8]
    assert exact.checked_rows(2**20, 128)[[0, -1]].tolist() == [0, 8191]


def test_reference_at_a_million_tokens_needs_little_memory():
    # float16: of bfloat16 XLA's CPU compiler makes float32 copies, since CPUs have none.
    array = lambda *shape, dtype=jnp.float16: jax.ShapeDtypeStruct(shape, dtype)
    q, k = array(1, 2**20, 32, 128), array(1, 2**20, 8, 128)
    compiled = exact.forward_rows.lower(q, k, k, array(32, 8, 8192, dtype=bool), array(8, dtype=jnp.int32), block_size=128).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


def test_gradients_of_long_cases_are_checked_once_and_at_a_short_length(monkeypatch, capsys):
    def half_wrong(name, problem, direction):  # those of long cases are not looked at
        dq, dk, dv = problem._reference_gradients if problem.tokens == 32 else (0, 0, 0)
        return Prepared(timing.JaxCall(lambda: (dq, 1.5 * dk, dv)))

    monkeypatch.setattr(attention, "jax_backward", half_wrong)
    options = dict(shape="smollm2_135m", sparse_shares=[1.0], dtype="float32", sparsity=SPARSITY, samples=1, flex_options={})

    def run(tokens, check):
        return list(attention.run("backward", tokens=tokens, implementations=["xla"], gradient_check_tokens=check, **options))

    records = run([64, 128], 40)
    assert [(r["tokens"], r["direction"]) for r in records] == [(t, d) for t in (64, 128) for d in ("backward", "forward_backward")]
    assert all((r["relative_error"], r["error_tokens"]) == (0.5, 32) for r in records)
    text = capsys.readouterr().err
    assert text.count("backward: 64 tokens, 3 of 3 KV heads stream") == 1
    assert text.count("xla forward_backward against the reference at 32: prepared") == 1
    assert re.search(r"xla backward: prepared \(\d+\.\d s\)", text)
    assert [(r["relative_error"], r["error_tokens"]) for r in run([32], 32)] == [(0.5, 32)] * 2
    assert not any("relative_error" in r for r in run([64], 0))


def test_work_and_visited_share():
    assert dense_flops(Shape(32, 8, 128), 16_384) == 2 * 16_384**2 * 32 * 128
    assert PROBLEM.dense_flops("backward") == 2.5 * PROBLEM.dense_flops("forward")
    assert visited_share(PROBLEM.visible, 16) == pytest.approx(1 - effective_sparsity(PROBLEM.plan, 8).item(), rel=1e-5)
    with pytest.raises(ValueError, match="multiples of block_size=16"):
        Problem(shape_name="tiny", shape=PROBLEM.shape, tokens=100, streaming=0, dtype="float32", sparsity=SPARSITY)


def test_ratios_are_of_medians_within_a_direction():
    row = lambda name, ms, direction="forward": {"implementation": name, "direction": direction, "median_ms": ms}
    mosaic, triton, cudnn, flash, other, failed = attention.compare(
        [
            row("mosaic", 2.0),
            row("triton", 1.0),
            row("cudnn_jax", 3.0),
            row("flash_torch", 6.0),
            row("triton", 5.0, "backward"),
            {"implementation": "flex_torch", "direction": "forward", "reason": "none"},
        ]
    )
    assert (mosaic["ours"], mosaic["times_ours"], mosaic["speedup_over_dense"]) == ("mosaic", 1.0, 1.5)  # preferred, though not fastest
    assert (triton["times_ours"], triton["speedup_over_dense"]) == (0.5, 3.0)
    assert (cudnn["times_ours"], cudnn["speedup_over_dense"]) == (1.5, 1.0)
    assert (flash["times_ours"], flash["speedup_over_dense"]) == (3.0, 0.5)
    assert (other["ours"], other["times_ours"]) == ("triton", 1.0)
    assert "speedup_over_dense" not in other
    assert failed.keys() == {"implementation", "direction", "reason"}


class FakeCall:
    """Takes `seconds` per run and logs who ran; fails at the run number `fails_at`."""

    def __init__(self, name, seconds, log, fails_at=None):
        self.name, self.one, self.log, self.fails_at = name, seconds, log, fails_at

    def seconds(self, repeats):
        self.log.append((self.name, repeats))
        if [name for name, _ in self.log].count(self.name) == self.fails_at:
            raise MemoryError("out of memory\nat length")
        return self.one * repeats


def test_samples_are_taken_in_turns_and_are_long_enough():
    log = []
    calls = {name: FakeCall(name, seconds, log) for name, seconds in (("fast", 0.001), ("slow", 1.0), ("other", 0.5))}
    times = timing.interleaved(calls, 8)
    rounds = [log[start : start + 3] for start in range(6, 30, 3)]
    assert all(sorted(turns) == [("fast", 20), ("other", 1), ("slow", 1)] for turns in rounds)
    before_fast = {log[index - 1][0] for index in range(7, 30) if log[index][0] == "fast"}
    assert len({tuple(turns) for turns in rounds}) > 2
    assert before_fast >= {"slow", "other"}
    first = list(log)
    log.clear()
    timing.interleaved(calls, 8)
    assert log == first
    assert times["fast"] == pytest.approx([0.001] * 8)
    assert timing.fields([0.003, 0.001, 0.002]) == {"median_ms": 2.0, "min_ms": 1.0, "samples": 3}


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_failure_in_timing_is_the_call_s_own(fails_at):
    log = []
    times = timing.interleaved({"bad": FakeCall("bad", 1.0, log, fails_at), "good": FakeCall("good", 1.0, log)}, 3)
    assert times == {"bad": "MemoryError: out of memory", "good": [1.0] * 3}
    assert [name for name, _ in log].count("bad") == fails_at
    assert timing.fields(times["bad"]) == {"reason": "MemoryError: out of memory"}


def test_a_failure_in_timing_leaves_a_line_with_the_reason(monkeypatch):
    def fail(*_):
        raise MemoryError("too much")

    monkeypatch.setattr(timing.JaxCall, "seconds", fail)
    options = dict(shape="smollm2_135m", tokens=[128], dtype="float32", sparsity=SPARSITY, samples=1, implementations=["xla"])
    records = [*attention.run("attention", sparse_shares=[0], flex_options={}, **options), *xattn.run(inputs=["random"], **options)]
    assert [r["reason"] for r in records] == ["MemoryError: too much"] * 4


def test_tiles_that_are_tried_fit_the_mask_and_include_hopper_s():
    for size in (16, 32, 64, 128, 256):
        for backward in (False, True):
            for options in flex.candidates(size, backward=backward):
                tiles = {name: value for name, value in options.items() if "BLOCK" in name}
                assert all(size % tile == 0 for tile in tiles.values())
                m1, n1, m2, n2 = (tiles.get(f"bwd_BLOCK_{name}", 1) for name in ("M1", "N1", "M2", "N2"))
                assert (n1 % m1, m2 % n2) == (0, 0)
    forward = flex.candidates(128, backward=False)
    tried = {tuple(o.get(f"fwd_{x}") for x in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")) for o in forward}
    assert {(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3)} <= tried
    assert 4 <= len(forward) <= 6
    assert 4 <= len(flex.candidates(128, backward=True)) <= 6


@uncompiled_flex
def test_each_flex_kernel_is_tuned_on_its_own_problem(monkeypatch, capsys):
    monkeypatch.setattr(flex, "candidates", lambda *_, **__: [{}, {"BLOCK_M": 16}])
    for kind in tuning.KINDS:
        assert tuning.fastest(kind, PROBLEM, backward=False) in ({}, {"BLOCK_M": 16})
        text = capsys.readouterr().err
        assert "fastest of 2, " in text
        assert f"flex {kind} {{'BLOCK_M': 16}}: prepared" in text
    tried = []
    monkeypatch.setattr(tuning, "fastest", lambda kind, problem, backward: tried.append((kind, problem.tokens, problem.streaming)) or {})
    assert tuning.FlexOptions({}, backward=False).of("flex_torch", PROBLEM) == {}
    assert not tried  # nothing to choose on a CPU
    monkeypatch.setattr(tuning.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tuning, "_TUNING_TOKENS", 100)
    of = tuning.FlexOptions({}, backward=False).of
    for streaming in (0, 2, 2):
        for name in ("flex_torch", "serial_flash", "serial_cudnn"):
            of(name, dataclasses.replace(PROBLEM, streaming=streaming))
    assert tried == [("mixed", 96, 0), ("mixed", 96, 2), ("window", 96, 3)]
    given = tuning.FlexOptions({"window": {"x": 1}}, backward=False)
    assert given.of("serial_cudnn", PROBLEM) == {"x": 1}
    assert len(tried) == 3


def test_flex_options_are_for_both_kernels_or_by_kind():
    assert benchmark._options('{"x": 1}') == {"mixed": {"x": 1}, "window": {"x": 1}}
    assert benchmark._options("{}") == {"mixed": {}, "window": {}}
    assert benchmark._options('{"window": {"x": 1}}') == {"window": {"x": 1}}
    for text in ("[1]", "x"):
        with pytest.raises(ValueError, match=re.escape(f"--flex_options={text}: accepted is a JSON object")):
            benchmark._options(text)


def test_failures_become_reasons(monkeypatch):
    assert "cuDNN" in attempt("cudnn_jax", lambda: jax_forward("cudnn_jax", PROBLEM), None)
    monkeypatch.setitem(sys.modules, "torch", None)
    records = list(
        attention.run(
            "attention",
            shape="smollm2_135m",
            tokens=[64],
            sparse_shares=[0.3],
            implementations=["xla", *TORCH],
            dtype="float32",
            sparsity=SPARSITY,
            samples=1,
            flex_options={},
        )
    )
    assert [r["implementation"] for r in records] == ["xla", *TORCH]
    assert records[0]["streaming_heads"] == [2]
    assert all("torch" in r["reason"] for r in records[1:])


def test_router_times_every_length(monkeypatch):
    monkeypatch.setattr(router, "_KV_HEADS", (2,))
    records = list(router.run(shape="smollm2_135m", tokens=[512, 600], config=RouterConfig(), dtype="float32", samples=1))
    assert [(r["tokens"], r["implementation"]) for r in records] == [(t, i) for t in (512, 600) for i in ("chain", "call")]
    assert all(r["median_ms"] > 0 for r in records)


def test_xattention_layer_and_absent_demo(monkeypatch, tmp_path):
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path))
    options = dict(shape="smollm2_135m", tokens=[128], dtype="float32", sparsity=SPARSITY, samples=1)
    *rows, demo = xattn.run(inputs=["random", "demo"], implementations=["xla", "cudnn_jax"], **options)
    assert [(r["implementation"], r["part"]) for r in rows] == [
        ("estimate", "estimate"),
        ("xla", "attention"),
        ("xla", "layer"),
        ("cudnn_jax", "dense"),
    ]
    assert 0.5 < rows[1]["kept_share"] < 1
    assert all(r["relative_error"] < 1e-6 for r in rows[1:3])
    assert all((r["estimate_implementation"], r["batch"]) == ("xla", 1) for r in rows)
    assert rows[1]["ideal_speedup"] == pytest.approx(1 / rows[1]["kept_share"], rel=1e-3)
    assert "cuDNN" in rows[3]["reason"]
    assert "fetch_assets" in demo["reason"]


def test_xattention_without_an_estimate_still_has_its_lines(monkeypatch):
    monkeypatch.setattr(xattn, "_estimate_implementation", lambda: "triton")  # a GPU's
    xattn._estimate.clear_cache()
    options = dict(shape="smollm2_135m", tokens=[64], dtype="float32", sparsity=SPARSITY, samples=1)
    rows = list(xattn.run(inputs=["random"], implementations=["xla"], **options))
    assert [r["part"] for r in rows] == ["estimate", "attention", "layer"]
    assert all("needs a CUDA GPU" in r["reason"] and r["kept_share"] is None for r in rows)


@pytest.mark.assets
def test_xattention_on_the_demo_model():
    q, k = xattn._demo_queries_and_keys(200, "float32")
    assert (q.shape, k.shape) == ((1, 200, 9, 64), (1, 200, 3, 64))
    assert bool(jnp.isfinite(q).all() & jnp.isfinite(k).all())


def test_program_prints_flushes_and_draws(tmp_path):
    arguments = ["--shape=smollm2_135m", "--block_size=16", "--sink_tokens=16", "--local_tokens=32", "--samples=1", f"--out={tmp_path}"]
    arguments += ["--tokens=64,128", "--sparse_shares=0,1", "--implementations=xla,mosaic,flash_torch"]
    command = [sys.executable, "-m", "experiments.benchmark", *arguments]
    result = subprocess.run([*command, "--what=attention"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "attention.jsonl").read_text() == result.stdout
    records = [json.loads(line) for line in result.stdout.splitlines()]
    expected = [(t, s, i) for t in (64, 128) for s in (0.0, 1.0) for i in ("xla", "mosaic", "flash_torch")]
    assert [(r["tokens"], r["sparse_share"], r["implementation"]) for r in records] == expected
    for record in records:
        assert {
            "what",
            "shape",
            "heads",
            "kv_heads",
            "head_dim",
            "dtype",
            "visited_share",
            "jax",
            "torch",
            "triton",
            "cudnn",
            "device",
            "platform",
            "batch",
        } <= set(record)
        if record["implementation"] == "mosaic":  # a GPU's
            assert record["reason"]
            continue
        assert 0 < record["min_ms"] <= record["median_ms"]
        assert record["samples"] == 1
        work = 2 * record["tokens"] ** 2 * 9 * 64
        assert record["tflops"] == pytest.approx(work / record["median_ms"] / 1e9, abs=0.006)
        if record["dense"] and record["sparse_share"]:
            assert "relative_error" not in record  # it did not compute the plan
        else:
            assert record["relative_error"] < 1e-6
    assert (tmp_path / "attention.png").stat().st_size > 10_000


LINE = {"what": "attention", "shape": "s", "dtype": "d", "block_size": 1, "sink_blocks": 1, "local_blocks": 1, "device": "x", "tokens": 8}
LINE |= {"direction": "forward", "dense": False, "jax": "1", "torch": "2", "triton": "3", "cudnn": "4"}


@pytest.mark.parametrize("damaged", [b"{broken", b"[1, 2]", b'{"median_ms": 1, "sparse_share": 0.5}', b"\xff\xfe", b'{"what": "attenti'])
def test_damaged_files_are_refused_before_anything_runs(damaged, tmp_path):
    file = tmp_path / "attention.jsonl"
    file.write_bytes(json.dumps(LINE).encode() + b"\n" + damaged)
    measured = iter(lambda: pytest.fail("measured"), None)
    for use in (report.read, report.plot, report.table, lambda file: report.write(measured, file)):
        with pytest.raises(ValueError, match=re.escape(f"{file}, line 2: not a whole line of a benchmark")):
            use(file)
    assert file.read_bytes().endswith(damaged)


def test_folders_that_cannot_be_written_are_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=re.escape(f"--out={tmp_path / 'file'}: ")):
        report.write(iter(lambda: pytest.fail("measured"), None), tmp_path / "file" / "attention.jsonl")


@pytest.mark.parametrize("text", ["-5", "0", "a", "64,"])
def test_lists_of_numbers_are_refused(text, monkeypatch):
    monkeypatch.setattr(benchmark.flags, "FLAGS", {"tokens": types.SimpleNamespace(value=text.split(","))})
    with pytest.raises(ValueError, match=f"--tokens={text}: accepted are whole numbers from 1, with commas between them"):
        benchmark._numbers("tokens", int, None)


def test_empty_lists_are_refused(monkeypatch):
    lists = {"tokens": ["1"], "batches": None, "sparse_shares": None, "implementations": [], "xattn_inputs": ["demo"]}
    monkeypatch.setattr(benchmark.flags, "FLAGS", {name: types.SimpleNamespace(value=value) for name, value in lists.items()})
    with pytest.raises(ValueError, match="--implementations= is empty"):
        benchmark._refuse_empty_lists()


def test_lines_of_the_same_case_replace_each_other_and_reasons_draw_nothing(tmp_path):
    file = tmp_path / "dispatch.jsonl"
    line = LINE | {"sparse_share": 0.5, "ours": "mosaic"}
    row = lambda name, ms, ratio: json.dumps(line | {"implementation": name, "median_ms": ms, "times_ours": ratio}) + "\n"
    failed = json.dumps(line | {"implementation": "serial_cudnn", "reason": "none"}) + "\n"
    file.write_text(row("mosaic", 1.0, 1.0) + failed)
    assert report.plot(file) is None
    file.write_text(file.read_text() + row("serial_flash", 3.0, 3.0) + row("serial_flash", 2.0, 2.0))
    assert [(r["implementation"], r["median_ms"]) for r in report.read(file)] == [("mosaic", 1.0), ("serial_flash", 2.0)]
    assert report.plot(file) == tmp_path / "dispatch.png"


def test_table_has_times_ratios_and_shares_of_the_ideal(tmp_path):
    file = tmp_path / "attention.jsonl"
    line = LINE | {"ours": "xla"}
    measured = [
        ("xla", 0.0, 4.0, 1.0, 1.0),
        ("flex_torch", 0.0, 6.0, 1.5, 1.0),
        ("xla", 0.5, 2.5, 1.0, 0.5),
        ("flex_torch", 0.5, 10.0, 4.0, 0.5),
    ]
    names = ("implementation", "sparse_share", "median_ms", "times_ours", "visited_share")
    file.write_text("".join(json.dumps(line | dict(zip(names, values))) + "\n" for values in measured))
    text = report.table(file).read_text().splitlines()
    assert text[0].startswith("shape s, dtype d")
    assert text[2:] == [
        "| direction | tokens | sparse share | xla | flex_torch |",
        "|---|---|---|---|---|",
        "| forward | 8 | 0 | 4 | 6 (1.50) |",
        "| forward | 8 | 0.5 | 2.5 (80 %) | 10 (4.00) |",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementations": ["fast"]}, f"--implementations: fast unknown; accepted are {', '.join(NAMES)}"),
        ({"sparse_shares": [0.5, 2.0]}, "--sparse_shares=0.5,2.0: accepted are values in [0, 1]"),
        ({"tokens": [64, 100]}, "--tokens=100: accepted are multiples of block_size=16"),
    ],
)
def test_bad_values_are_named_before_anything_runs(changes, message):
    options = dict(shape="smollm2_135m", tokens=[64], sparse_shares=[0.0], implementations=["xla"], dtype="float32", samples=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        next(attention.run("attention", **(options | changes), sparsity=SPARSITY, flex_options={}))


def test_names_are_complete():
    assert set(OURS) | set(TORCH) | {"cudnn_jax"} == set(NAMES)
    for implementations, tokens, shares in attention.DEFAULTS.values():
        assert set(implementations) <= set(NAMES)
        assert all(length % 128 == 0 for length in tokens)
        assert all(0 <= share <= 1 for share in shares)
