"""The benchmarks of whole models: ours and transformers' run the same cases, records have their fields, failures become reasons."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from elastic_jax.decoding import generate_tokens
from elastic_jax.generate import Generator
from elastic_jax.models.config import PRESETS
from elastic_jax.models.decoder import Decoder
from elastic_jax.weights.safetensors import save_safetensors
from experiments import common
from experiments.bench import hf, inference, report
from experiments.bench.inference import Case, DecodeCall, PrefillCall, compare, make_generator, measure_memory, random_model, sparse_plan
from tests.tiny import SPARSITY, tiny_config

CONFIG = tiny_config(max_positions=64)
SETTINGS = {name: None for name in common.MODEL_FLAGS} | {
    **{field.name: getattr(SPARSITY, field.name) for field in dataclasses.fields(SPARSITY)},
    "model": "tiny",
    "dtype": "float32",
    "router_width": 2,
    "pooling": "boundary",
}
STEPS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A preset of three layers with two KV heads each, and few steps; torch keeps to one core."""
    monkeypatch.setitem(PRESETS, "tiny", CONFIG)
    monkeypatch.setattr(inference, "STEPS", STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(what, **changes):
    options = dict(settings=SETTINGS, tokens=[90], batches=[1], sparse_shares=[0.5], routed=False, samples=1, memory_layers=None)
    return list(inference.run(what, **(options | {"implementations": inference.DEFAULTS[what][0]} | changes)))


def test_plans_are_exact_and_each_sequence_has_its_own():
    config = tiny_config(num_layers=10, num_kv_heads=4)
    for share, sparse in ((0.0, 0), (0.7, 28), (0.51, 20), (1.0, 40)):
        plans = [sparse_plan(config, share, sequence) for sequence in range(8)]
        assert all(plan.shape == (10, 4) and (plan == 0).sum() == sparse for plan in plans)
        assert len({plan.tobytes() for plan in plans}) == (8 if 0 < sparse < 40 else 1)
    np.testing.assert_array_equal(sparse_plan(config, 0.7, 3), sparse_plan(config, 0.7, 3))


@pytest.mark.parametrize("changes", [{}, {"family": "llama", "qk_norm": False, "attention_bias": True, "tie_embeddings": False}])
def test_random_weights_have_the_model_s_structure(changes):
    config = tiny_config(**changes)
    model, arrays = random_model(config, "bfloat16", sparsity=SPARSITY)
    structure = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    decoder = Decoder(config, rngs=inference.nnx.Rngs(0), param_dtype=jnp.bfloat16)
    same, expected = inference.ElasticModel.create(decoder, config, sparsity=SPARSITY)
    assert structure(arrays) == structure(expected)
    assert model == same
    assert (np.asarray(arrays["final_norm"]["scale"], np.float32) == 1).all()
    gate, up = (np.asarray(arrays["layers"]["mlp"][name], np.float32) for name in ("gate", "up"))
    assert gate.std() == pytest.approx(0.02, rel=0.05)
    assert abs(np.corrcoef(gate[0].ravel(), gate[1].ravel())[0, 1]) < 0.1  # each layer and each array has its own draw
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.1


def test_random_weights_of_large_models_are_drawn_in_little_memory():
    # float16: of bfloat16 XLA's CPU compiler makes float32 copies, since CPUs have none.
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = inference._draw.lower(key, shape=(36, 12_288, 4096), dtype=jnp.dtype("float16")).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.02 * memory.output_size_in_bytes


def test_prefill_runs_beside_transformers_for_every_batch_and_plan():
    records = run("prefill", batches=[1, 2], sparse_shares=[0.0, 0.5], routed=True)
    cases = [(r["implementation"], r["batch"], r.get("routed")) for r in records]
    ours = [("elastic", batch, routed) for batch in (1, 2) for routed in (False, False, True)]
    assert cases == [*ours, ("hf_sdpa", 1, None), ("hf_sdpa", 2, None)]
    assert not any("reason" in r for r in records)
    for record in records:
        assert {"what", "model", "dtype", "setting", "block_size", "tokens", "median_ms", "min_ms", "samples"} <= set(record)
        assert record["tokens_per_second"] == pytest.approx(1e3 * 90 * record["batch"] / record["median_ms"], rel=1e-3)
    by_case = {(r["implementation"], r["batch"], r.get("msr")): r for r in records if not r.get("routed")}
    for batch in (1, 2):
        dense, half, rival = by_case["elastic", batch, 0.0], by_case["elastic", batch, 0.5], by_case["hf_sdpa", batch, None]
        # 94 tokens are 6 pages of 16, of which streaming heads keep 3; 12 heads' worth of pages per sequence before.
        assert dense["cache_mib"] == dense["dense_cache_mib"] == round(batch * 6 * 6 * 2 * 16 * 16 * 4 / 2**20, 1)
        assert (dense["cache_share"], half["cache_share"]) == (1.0, 0.75)
        assert half["speedup_over_hf"] == pytest.approx(rival["median_ms"] / half["median_ms"], rel=1e-3)
        assert half["speedup_over_dense"] == pytest.approx(dense["median_ms"] / half["median_ms"], rel=1e-3)
    single, double = by_case["elastic", 1, 0.5], by_case["elastic", 2, 0.5]
    assert double["times_single"] == pytest.approx(double["median_ms"] / (2 * single["median_ms"]), rel=1e-3)
    assert all(0 <= r["msr"] <= 1 and "times_single" not in r for r in records if r.get("routed") and r["batch"] == 1)


def test_prefill_opens_and_fills_a_cache_for_each_sequence_s_plan(monkeypatch):
    opened = []
    open_cache = Generator.open_cache
    monkeypatch.setattr(Generator, "open_cache", lambda *args: opened.append(cache := open_cache(*args)) or cache)
    call = PrefillCall(make_generator(SETTINGS, 90), Case(tokens=90, batch=3, share=0.5))
    assert call.seconds(2) > 0
    assert len(opened) == 2
    for cache in opened:
        assert cache.lengths.tolist() == [90] * 3
        assert bool(jnp.any(cache.pool.pages.keys != 0))
        pages = (np.asarray(cache.tables().table) != np.iinfo(np.int32).max).sum(-1)  # [L, B, K]
        for sequence in range(3):
            np.testing.assert_array_equal(pages[:, sequence], np.where(sparse_plan(CONFIG, 0.5, sequence), 6, 3))
        assert len({pages[:, sequence].tobytes() for sequence in range(3)}) > 1


def test_decode_runs_beside_both_caches_of_transformers(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    records = run("decode", batches=[2], sparse_shares=[0.0, 0.5])
    assert [(r["implementation"], r.get("msr")) for r in records] == [
        ("elastic", 0.0),
        ("elastic", 0.5),
        ("hf_sdpa", None),
        ("hf_static", None),
    ]
    for record in records:  # of one step, which makes a token for each sequence
        assert record["tokens_per_second"] == pytest.approx(1e3 * 2 / record["median_ms"], rel=1e-3)
    fastest = min(r["median_ms"] for r in records[2:])
    assert records[1]["speedup_over_hf"] == pytest.approx(fastest / records[1]["median_ms"], rel=1e-3)
    assert records[1]["cache_share"] == 0.75


def test_decode_starts_behind_the_prompt_every_time(monkeypatch):
    taken = []

    def steps(*args):
        state, tokens = generate_tokens(*args)
        taken.append((np.asarray(args[3].position), tokens, np.asarray(state.position)))
        return state, tokens

    monkeypatch.setattr(inference, "generate_tokens", steps)
    call = DecodeCall(make_generator(SETTINGS, 90), Case(tokens=90, batch=2, share=0.5))
    pages = np.asarray(call._cache.pool.pages.values)
    assert np.isfinite(pages).all()
    assert pages.std() == pytest.approx(1.0, rel=0.1)
    call.seconds(2)
    for start, tokens, end in taken:
        assert (start.tolist(), end.tolist(), tokens.shape) == ([90, 90], [90 + STEPS] * 2, (2, STEPS))
    np.testing.assert_array_equal(taken[0][1], taken[1][1])


def test_both_caches_of_transformers_give_the_same_tokens(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    rival = hf.HuggingFace(CONFIG, "float32")
    with torch.no_grad():
        for parameter in rival._model.parameters():
            parameter.normal_(std=0.2)
    results = []
    for static in (False, True):
        torch.manual_seed(0)
        call = rival.decode(50, 2, STEPS, static=static)
        results += [call(), call()]  # the second begins where the first did
    assert len({token for result in results for token in result.flatten().tolist()}) > 1
    assert all(torch.equal(result, results[0]) for result in results)
    assert rival.prefill(50, 2)().shape == (2, 1, CONFIG.vocab_size)


def test_rope_is_stretched_for_random_weights_only_where_it_has_to_be():
    assert make_generator(SETTINGS, 64 - STEPS).model.config == CONFIG
    stretched = make_generator(SETTINGS, 200).model.config
    assert (stretched.rope.kind, stretched.rope.factor, stretched.max_positions) == ("yarn", 4, 256)
    assert make_generator(SETTINGS | {"yarn_factor": 8.0}, 200).model.config.max_positions == 512


def test_what_runs_out_of_memory_is_a_line_with_the_reason(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    prefill = Generator.prefill
    too_long = lambda self, encoded, *rest: (full if len(encoded) > 1 else prefill)(self, encoded, *rest)
    monkeypatch.setattr(Generator, "prefill", too_long)
    monkeypatch.setattr(hf.HuggingFace, "prefill", full)
    reason = "RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
    first, second, *rivals = run("prefill", batches=[1, 2])
    assert first["median_ms"] > 0
    assert "speedup_over_hf" not in first
    assert (second["reason"], second["msr"], second["batch"]) == (reason, 0.5, 2)
    assert [r["reason"] for r in rivals] == [reason] * 2
    case = Case(tokens=90, batch=2, share=0.5)
    assert measure_memory(SETTINGS, 90, case, None) == {"reason": reason, "peak_gib": None}


def test_memory_is_measured_in_processes_of_its_own(tmp_path):
    config = dataclasses.replace(CONFIG, max_positions=256)
    decoder = Decoder(config, rngs=inference.nnx.Rngs(0), param_dtype=jnp.float32)
    save_safetensors(decoder, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    shorter, record = run("memory", settings=SETTINGS | {"model": str(tmp_path)}, tokens=[90, 40])
    assert not {"reason"} & (shorter.keys() | record.keys())
    assert (shorter["tokens"], record["tokens"]) == (40, 90)
    assert (record["msr"], record["cache_share"], record["implementation"]) == (0.5, 0.65, "elastic")  # 3 pages and 10
    assert record["weights_gib"] == round(sum(x.nbytes for x in jax.tree.leaves(inference.nnx.state(decoder))) / 2**30, 3)
    assert (record["decoded_tokens"], record["prefilled_layers"]) == (64, 3)
    assert record["first_prefill_s"] > 0
    assert record["first_decode_s"] > 0


def test_memory_of_the_first_layers_has_the_cache_of_all():
    whole, part = (inference.measure_memory(SETTINGS, 90, Case(tokens=90, batch=1, share=0.5), layers) for layers in (None, 2))
    assert [record.pop("prefilled_layers") for record in (whole, part)] == [3, 2]
    for name in ("msr", "cache_mib", "cache_share", "weights_gib"):
        assert whole[name] == part[name]


class Killed:
    """Ends the process that reads it, as the system ends one that takes too much memory."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_killed_process_is_a_line_with_the_reason():
    first, second = run("memory", settings=SETTINGS | {"weights": Killed()}, tokens=[90, 120])
    for record in (first, second):
        assert record["reason"].startswith("BrokenProcessPool: ")
        assert (record["msr"], record["peak_gib"]) == (0.5, None)


def test_ratios_are_of_the_same_batch():
    record = lambda ms: {"median_ms": ms} if ms else {"reason": "none"}
    case = lambda batch, share: Case(tokens=8, batch=batch, share=share)
    records = {
        ("elastic", case(1, 0.0)): record(4.0),
        ("elastic", case(1, 0.7)): record(2.0),
        ("elastic", case(8, 0.0)): record(None),
        ("elastic", case(8, 0.7)): record(12.0),
        ("hf_sdpa", case(1, 0.0)): record(8.0),
        ("hf_static", case(1, 0.0)): record(6.0),
        ("hf_sdpa", case(8, 0.0)): record(None),
    }
    compare(records)
    ratios = [{key: value for key, value in r.items() if key not in ("median_ms", "reason")} for r in records.values()]
    assert ratios == [
        {"speedup_over_hf": 1.5, "speedup_over_dense": 1.0},
        {"speedup_over_hf": 3.0, "speedup_over_dense": 2.0},
        {},
        {"times_single": 0.75},
        {},
        {},
        {},
    ]


def test_table_lists_the_last_record_of_each_case(tmp_path):
    about = {"device": "cpu", "jax": "1", "torch": "2", "triton": "3", "cudnn": "4", "transformers": "5"}
    about |= {"what": "prefill", "model": "tiny", "dtype": "float32"}
    about |= {"setting": "fa_ssa", "block_size": 16, "sink_blocks": 1, "local_blocks": 2}
    rows = [
        {"implementation": "elastic", "tokens": 9000, "batch": 1, "msr": 0.5, "routed": False, "median_ms": 3.0, "speedup_over_hf": 2.0},
        {"implementation": "elastic", "tokens": 9000, "batch": 1, "msr": 0.5, "routed": True, "median_ms": 4.0},
        {"implementation": "elastic", "tokens": 8000, "batch": 1, "msr": 0.0, "routed": False, "reason": "none"},
        {"implementation": "hf_sdpa", "tokens": 9000, "batch": 1, "median_ms": 1234.5},
        {"implementation": "elastic", "tokens": 8000, "batch": 1, "msr": 0.5, "routed": False, "median_ms": 1.0},
        {"implementation": "elastic", "tokens": 9000, "batch": 1, "msr": 0.5, "routed": False, "median_ms": 5.0},
    ]
    file = tmp_path / "prefill.jsonl"
    file.write_text("".join(json.dumps(row | about) + "\n" for row in rows))
    setting, _, head, _, *lines = report.table(file).read_text().splitlines()
    assert setting.startswith("dtype float32, setting fa_ssa, block_size 16")
    assert setting.endswith("transformers 5")
    assert head.startswith("| model | tokens | batch | implementation | msr | routed | median_ms | tokens_per_second | speedup_over_hf |")
    assert [re.sub(r"(\s*\|)+$", " |", line) for line in lines] == [
        "| tiny | 8,000 | 1 | elastic | 0.5 | False | 1.0 |",
        "| tiny | 9,000 | 1 | elastic | 0.5 | False | 5.0 |",
        "| tiny | 9,000 | 1 | elastic | 0.5 | True | 4.0 |",
        "| tiny | 9,000 | 1 | hf_sdpa |  |  | 1,234.5 |",
    ]
    assert report.plot(file) is None


def test_a_peak_that_a_record_has_itself_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "peak_memory", lambda: {"peak_gib": 0.1})
    report.write([{"what": "memory", "peak_gib": 9.5}, {"what": "prefill"}], None)
    assert [json.loads(line)["peak_gib"] for line in capsys.readouterr().out.splitlines()] == [9.5, 0.1]


@pytest.mark.parametrize(
    ("what", "changes", "message"),
    [
        ("prefill", {"implementations": ["elastic", "hf_static"]}, "--implementations: hf_static unknown; prefill has elastic, hf_sdpa"),
        ("memory", {"sparse_shares": [0.5, 2.0]}, "--sparse_shares=0.5,2.0: accepted are values in [0, 1]"),
        ("decode", {"routed": True}, "--routed: decode fills the cache without a prompt"),
        ("memory", {"routed": True, "memory_layers": 2}, "--memory_layers: layers that do not run have no decisions"),
    ],
)
def test_bad_values_are_named_before_anything_runs(what, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(what, **changes)
