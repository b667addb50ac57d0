"""Benchmarks on any model and setting: answers as JSON lines, one per sample, then the tables and the plot of `report.md`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from elastic_jax.elastic import LayerBackbones
from elastic_jax.evaluation.paper import MODELS, PAPER
from elastic_jax.evaluation.results import ResultsFolder, read_run
from elastic_jax.evaluation.runner import RunConfig, run_samples
from elastic_jax.evaluation.samples import Sample
from elastic_jax.evaluation.suite_report import markdown, suite_report
from elastic_jax.evaluation.suites import longbench_e, longbench_v2, longhealth, mathematics, ruler, texts
from elastic_jax.files import replacing
from elastic_jax.generate import Generator
from elastic_jax.sampling import check_options
from experiments.common import load_generator, read_heads
from experiments.figures import plot_lengths

_HUB = {"longbench_e": "zai-org/LongBench", "longbench_v2": "zai-org/LongBench-v2"}
_MATH_HUB = {"gsm8k": "openai/gsm8k", "math": "HuggingFaceH4/MATH-500", "aime24": "HuggingFaceH4/aime_2024"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Selection:
    """Which samples, and how long they may be: flags, or what a preset says. None: as the suite has it."""

    data: str | None
    tasks: Sequence[str] | None
    samples: int | None
    lengths: Sequence[int] | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None


_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        "ruler": {"lengths": [1280, 2304], "samples": 1, "tasks": ["niah_single_2", "niah_multikey_3", "fwe", "qa_1"]},
        "longbench_e": {"samples": 1, "max_prompt_tokens": 1024, "max_new_tokens": 32},
        "longbench_v2": {"samples": 4, "max_prompt_tokens": 1024, "max_new_tokens": 32},
        "math": {"samples": 2, "max_new_tokens": 64},
        "longhealth": {"samples": 1, "max_prompt_tokens": 1024, "max_new_tokens": 32},
    },
    # The paper's folders say 128k; the lengths and samples of RULER are its Table 9.
    "paper": {
        "ruler": {"lengths": ruler.PAPER_LENGTHS, "samples": ruler.PAPER_SAMPLES},
        "longbench_e": {"max_prompt_tokens": 128_000},
        "longbench_v2": {"max_prompt_tokens": 128_000},
        "math": {},
        "longhealth": {},
    },
}
SUITES = tuple(_PRESETS["paper"])
_MAX_NEW_TOKENS = {  # by task, of all tasks of a suite: a run may go on with more of them
    "ruler": ruler.MAX_NEW_TOKENS,
    "longbench_e": longbench_e.MAX_NEW_TOKENS,
    "longbench_v2": longbench_v2.MAX_NEW_TOKENS,
    "math": mathematics.MAX_NEW_TOKENS,
    "longhealth": longhealth.MAX_NEW_TOKENS,
}
# Flags that few suites read; those of this module that are not here are read by all benchmarks.
_READ_BY = {
    **dict.fromkeys(("lengths", "ruler_prefix", "ruler_order"), ("ruler",)),
    "sample_seed": ("ruler", "longhealth"),
    "prompts": ("longbench_e",),
    "repeats": ("math",),
    **dict.fromkeys(("rows", "random_seeds"), ("heldout",)),
}
_NAMES = ("router", "heads", "data", "tasks", "lengths", "prompts", "against", "baseline")  # flags that name something


def define_suite_flags() -> None:
    """Flags of the benchmarks, beside the model's."""
    flags.DEFINE_string("router", None, "Folder of a training run: its routers decide, and its model flags hold where none are given.")
    flags.DEFINE_string(
        "heads", None, "Instead of a router: full, sparse, or a .npy or .json file of 0 (sparse) and 1 (full), [layers][KV heads]."
    )
    flags.DEFINE_enum("preset", "paper", list(_PRESETS), "Samples and lengths: the paper's, or a few that a CPU answers in minutes.")
    flags.DEFINE_string("data", None, "The benchmark's folder, file or hub id (default: its hub id; RULER: the fetched texts).")
    flags.DEFINE_list("tasks", None, "Tasks of the suite (default: all; RULER: the paper's 11).")
    flags.DEFINE_list("lengths", None, "RULER's lengths in tokens.")
    flags.DEFINE_integer("samples", None, "Samples of each task (and length); LongHealth: questions.", lower_bound=1)
    flags.DEFINE_integer(
        "max_prompt_tokens", None, "Longer prompts lose the middle of the user's text, LongHealth's documents.", lower_bound=1
    )
    flags.DEFINE_integer("max_new_tokens", None, "Longest answer, instead of the task's own.", lower_bound=1)
    flags.DEFINE_integer("batch_tokens", 65_536, "Most padded prompt tokens of a batch, though at least one prompt.", lower_bound=1)
    flags.DEFINE_float("cache_gib", None, "Memory of the KV cache (default: what a batch needs).")
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
    flags.DEFINE_integer("top_k", 0, "Draws are from the k best tokens only (0: all).", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "Draws are from the fewest tokens that hold this probability.")
    flags.DEFINE_integer("repeats", 1, "Math: answers to each problem, drawn with seeds of their own.", lower_bound=1)
    flags.DEFINE_enum("ruler_prefix", "assistant", ["assistant", "user"], "RULER's answer prefix: after the header (NVIDIA), or as LOOM.")
    flags.DEFINE_enum("ruler_order", "sample", ["sample", "upstream"], "RULER's places of answers: of each sample, or fixed by the size.")
    flags.DEFINE_integer("sample_seed", None, "RULER and LongHealth: of what is drawn into prompts (default: 42 and 0).", lower_bound=0)
    flags.DEFINE_string("prompts", None, "LongBench-E: the benchmark's own dataset2prompt.json instead of the re-worded prompts.")
    flags.DEFINE_enum("compare", None, MODELS, "Puts the paper's rows for this model into the table.")
    flags.DEFINE_string("against", None, "Another --out of the suite: paired differences on common samples.")
    flags.DEFINE_string("baseline", None, "Another --out of the suite, such as --heads=full: speed-up of prefill.")
    flags.DEFINE_boolean("report_only", False, "Runs nothing: writes the report of what --out has.")


def check_suite_flags(suite: str) -> None:
    """ValueError where a flag is given that the suite does not read."""
    benchmarks = {flag.name: SUITES for flag in flags.FLAGS.flags_by_module_dict()[__name__]}
    for name, suites in (benchmarks | _READ_BY).items():
        if suite not in suites and name in flags.FLAGS and flags.FLAGS[name].value != flags.FLAGS[name].default:
            raise ValueError(f"--{name} is of no use to --suite={suite}: it goes with {', '.join(suites)}")


def run_suite(suite: str, out: str, *, batch_size: int, seed: int, logit_bias: float) -> None:
    """Answers what --out has no answers of yet, and writes its report."""
    values, started = flags.FLAGS, time.perf_counter()
    check_suite_flags(suite)
    if values.compare is not None and suite not in PAPER:
        raise ValueError(f"--compare: the paper has no numbers of {suite}, accepted are {', '.join(PAPER)}")
    if empty := [name for name in _NAMES if values[name].value in ("", [])]:
        raise ValueError(f"--{empty[0]} is empty: give a value, or leave the flag out")
    for other in filter(None, (values.against, values.baseline, out if values.report_only else None)):
        if (theirs := read_run(other)["settings"]["suite"]) != suite:
            raise ValueError(f"{other} has results of {theirs}, not of {suite}")
    if not values.report_only:
        _answer(suite, out, batch_size, seed, logit_bias)
    report = suite_report(out, compare=values.compare, against=values.against, baseline=values.baseline)
    text = markdown(report)
    for name, content in (("report.json", json.dumps(report, indent=2, allow_nan=False) + "\n"), ("report.md", text)):
        with replacing(Path(out, name)) as file:
            file.write_text(content, encoding="utf-8")
    plots = [plot_lengths(Path(out), report).name] if report["cells"]["lengths"] else []
    print(f"\n{text}\n{time.perf_counter() - started:.0f} s; wrote {Path(out) / 'report.md'}, {', '.join(['report.json', *plots])}")


def _answer(suite: str, out: str, batch_size: int, seed: int, logit_bias: float) -> None:
    values, selection = flags.FLAGS, _selection(suite)
    heads = read_heads(values.heads)
    drawing: dict[str, Any] = {name: values[name].value for name in ("temperature", "top_k", "top_p")}
    check_options(max_new_tokens=selection.max_new_tokens or 1, heads=heads, logit_bias=logit_bias, **drawing)
    generator, settings, source = _load_generator(values.router, values.heads, values.cache_gib)
    generator.request([True], max_new_tokens=1, heads=heads, logit_bias=logit_bias)  # for its check of the heads
    positions = generator.model.config.max_positions
    if selection.max_new_tokens is not None and selection.max_new_tokens >= positions:
        raise ValueError(f"--max_new_tokens={selection.max_new_tokens}: the model has {positions} positions, and the prompt needs some")
    config = RunConfig(
        heads=heads,
        logit_bias=logit_bias,
        **drawing,
        max_prompt_tokens=selection.max_prompt_tokens,
        seed=seed,
        batch_size=batch_size,
        batch_tokens=values.batch_tokens,
    )
    samples, protocol = _READERS[suite](selection, generator)
    if selection.max_new_tokens is not None:
        samples = [dataclasses.replace(sample, max_new_tokens=selection.max_new_tokens) for sample in samples]
    if not samples:
        raise ValueError(f"--suite={suite}: no sample is left by --tasks, --lengths and --samples")
    sampling = drawing | {"seed": seed} if values.temperature else {"temperature": 0.0}
    settings = {"suite": suite, "protocol": protocol} | settings
    settings |= {
        "heads": values.heads if heads is None or isinstance(heads, str) else f"sha256 {_digest(heads)}",
        "logit_bias": logit_bias,
        "decoding": sampling,
        "max_prompt_tokens": selection.max_prompt_tokens,
        "max_new_tokens": selection.max_new_tokens or _MAX_NEW_TOKENS[suite],
    }
    devices = jax.local_devices()
    environment = {"source": str(source), "router_run": values.router, "device": devices[0].device_kind, "devices": len(devices)}
    environment |= {"jax": jax.__version__, "batch_size": batch_size}
    with ResultsFolder(out, settings, environment) as results:
        print(f"{len(samples)} samples; {len(results.records)} answers in {out}")
        run_samples(generator, samples, results, config, devices=devices)


def _selection(suite: str) -> _Selection:
    values = flags.FLAGS
    names = [field.name for field in dataclasses.fields(_Selection)]
    given: dict[str, Any] = {name: values[name].value for name in names if values[name].value is not None}
    if "lengths" in given:
        if not all(length.isascii() and length.isdecimal() for length in given["lengths"]):
            raise ValueError(f"--lengths={','.join(given['lengths'])}: numbers of tokens are needed, such as 8192,16384")
        given["lengths"] = [int(length) for length in given["lengths"]]
    for name in ("tasks", "lengths"):
        if twice := [str(value) for value in given.get(name, []) if given[name].count(value) > 1]:
            raise ValueError(f"--{name} has {twice[0]} twice: each is accepted once")
    if values.repeats > 1 and not values.temperature:
        raise ValueError(f"--repeats={values.repeats}: several answers to a problem go with a --temperature above 0")
    return _Selection(**dict.fromkeys(("data", "tasks", "samples")) | _PRESETS[values.preset][suite] | given)


def _load_generator(router: str | None, heads: str | None, cache_gib: float | None) -> tuple[Generator, dict[str, Any], str]:
    """A generator, what of it decides the answers, and where its weights are."""
    if (router is None) == (heads is None):
        raise ValueError("one of --router=RUN (a trained run decides) and --heads=full|sparse|FILE is needed")
    generator, settings, source = load_generator(router, cache_gib)
    # Where weights and routers lie does not matter; that they are the same does.
    digests = {"weights_sha256": _weights_digest(generator.backbones)}
    if generator.router is not None:
        digests |= {"router_sha256": _digest(*jax.tree.leaves(generator.router))}
    unused = {"weights", "router"} | (set() if generator.router is not None else {"pooling", "router_width"})
    return generator, {name: value for name, value in settings.items() if name not in unused} | digests, source


def _weights_digest(backbones: LayerBackbones) -> str:
    """Of a row of every array of every layer: all weights would take long to fetch."""
    arrays = jax.tree.leaves([backbones[0], [backbone["layers"] for backbone in backbones]])
    return _digest(*jax.device_get([array[(0,) * (array.ndim - 1)] for array in arrays]))


def _digest(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:16]


_Reader = Callable[[_Selection, Generator], tuple[list[Sample], dict[str, Any]]]


def _ruler(selection: _Selection, generator: Generator) -> tuple[list[Sample], dict[str, Any]]:
    lengths, config = list(selection.lengths or ruler.PAPER_LENGTHS), generator.model.config
    if (longest := max(lengths)) > config.max_positions:
        raise ValueError(
            f"--lengths has {longest}, the model has {config.max_positions} positions: give shorter ones, or "
            f"--yarn_factor={config.yarn_factor_for(longest)}"
        )
    chat = generator.tokenizer.chat_template is not None
    tasks, count = selection.tasks or ruler.PAPER_TASKS, selection.samples or ruler.PAPER_SAMPLES
    order, seed = flags.FLAGS.ruler_order, _sample_seed(42)
    samples = ruler.samples(
        tokenizer=generator.tokenizer,
        lengths=lengths,
        tasks=tasks,
        samples_per_task=count,
        seed=seed,
        texts_folder=selection.data,
        upstream_order=order == "upstream",
        prefix=flags.FLAGS.ruler_prefix,
        chat=chat,
    )
    sources = texts.sources(selection.data)
    for file in dict.fromkeys(ruler.TEXTS[name] for name in tasks if name in ruler.TEXTS):
        if selection.data is not None and not Path(selection.data, file).is_file():
            print(f"--data={selection.data} has no {file}; instead: {sources[file]}")
        elif sources[file].startswith("packaged substitute"):
            print(f"no {file} was found; instead: {sources[file]}")
    samples = list(tqdm(samples, total=len(lengths) * len(tasks) * count, desc="making samples", unit="", leave=False))
    return samples, {
        "prompts": "re-worded",
        "answer prefix": flags.FLAGS.ruler_prefix if chat else "text",
        "chat template": chat,
        "seed of the samples": seed,
        "order": order,
        "texts": "; ".join(f"{file}: {source}" for file, source in sources.items()),
    }


def _sample_seed(default: int) -> int:
    given = flags.FLAGS.sample_seed
    return default if given is None else given


def _longbench_e(selection: _Selection, generator: Generator) -> tuple[list[Sample], dict[str, Any]]:
    prompts = flags.FLAGS.prompts
    samples = longbench_e.samples(selection.data or _HUB["longbench_e"], tasks=selection.tasks, limit=selection.samples, prompts=prompts)
    return samples, {"prompts": "re-worded" if prompts is None else "dataset2prompt", "min_new_tokens": longbench_e.MIN_NEW_TOKENS}


def _longbench_v2(selection: _Selection, generator: Generator) -> tuple[list[Sample], dict[str, Any]]:
    samples = longbench_v2.samples(selection.data or _HUB["longbench_v2"], tasks=selection.tasks, limit=selection.samples)
    return samples, {"prompts": "re-worded", "reasoning": "none asked for"}


def _math(selection: _Selection, generator: Generator) -> tuple[list[Sample], dict[str, Any]]:
    samples, tasks = [], selection.tasks or mathematics.TASKS
    if unknown := sorted(set(tasks) - set(mathematics.TASKS)):
        raise ValueError(f"--tasks={unknown[0]}: accepted are {', '.join(mathematics.TASKS)}")
    task: Any
    for task in tasks:
        source: str | Path = _MATH_HUB[task] if selection.data is None else selection.data
        if Path(source).is_dir():
            source = mathematics.folder_of(source, task)
            if len(tasks) > 1 and source == Path(selection.data or ""):
                raise ValueError(f"--data={source}: subfolders {', '.join(tasks)} are needed, or --tasks with one of them")
        samples += mathematics.samples(source, benchmark=task, k=flags.FLAGS.repeats, limit=selection.samples)
    return samples, {"prompts": "own, zero-shot", "thinking": "off"}


def _longhealth(selection: _Selection, generator: Generator) -> tuple[list[Sample], dict[str, Any]]:
    if selection.data is None:
        raise ValueError("--data is needed: the folder with LongHealth's benchmark_v5.json")
    count = lambda text: len(generator.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    positions = generator.model.config.max_positions - (selection.max_new_tokens or max(longhealth.MAX_NEW_TOKENS.values()))
    ((template, _),) = generator.encode([[{"role": role, "content": "x"} for role in ("system", "user")]])
    samples = longhealth.samples(
        selection.data,
        tasks=selection.tasks,
        limit=selection.samples,
        max_tokens=(room := 16_000),
        max_prompt_tokens=min(selection.max_prompt_tokens or positions, positions) - len(template),
        count_tokens=functools.cache(count),
        seed=(seed := _sample_seed(0)),
    )
    return samples, {"prompts": "re-worded", "documents' tokens": room, "score": "letter", "seed of the samples": seed}


_READERS: dict[str, _Reader] = {
    "ruler": _ruler,
    "longbench_e": _longbench_e,
    "longbench_v2": _longbench_v2,
    "math": _math,
    "longhealth": _longhealth,
}
