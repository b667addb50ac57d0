"""Generates text: one prompt, a conversation, or a file of prompts. The router of a training run picks the heads, or --heads does.

python -m experiments.generate --router=runs/smollm2 --prompt="Who wrote this?"
python -m experiments.generate --model=FOLDER --heads=full --chat
python -m experiments.generate --router=runs/smollm2 --batch=questions.jsonl --out=answers.jsonl

The text goes to standard output as it comes, everything else to standard error.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from tqdm import tqdm

from elastic_jax.checks import errors_name
from elastic_jax.files import append_lines, drop_unfinished_line, lock, read_lines
from elastic_jax.generate import Completion, Generator, Timings
from elastic_jax.replicas import map_batches
from elastic_jax.sampling import check_options
from experiments import common
from experiments.common import define_model_flags, end_interrupted, errors_in_one_line, load_generator, read_heads, use_compilation_cache

_INPUTS = ("prompt", "prompt_file", "chat", "batch")
_SAMPLE = (
    'a JSON object with "prompt" (a text) or "messages" (a list of {"role", "content"}), and if wanted "id" (a text or whole number) '
    'and "seed" (a whole number from 0 to 2**32 - 1)'
)
_ANOTHER = "give another --out"
_RESULT_BEGINS = b'{"fingerprint": "'
_RESULT_FIELDS = {"fingerprint", "id", "text", "prompt_tokens", "new_tokens", "finish_reason", "msr", "esr", "seed"}


def define_generation_flags() -> None:
    flags.DEFINE_string("router", None, "Folder of a training run: its router, and its model flags where none are given here.")
    flags.DEFINE_string("heads", None, "Instead of a router's choice: full, sparse, or a .npy or .json file of 0 and 1 [layers][KV heads].")
    flags.DEFINE_float("logit_bias", 0.0, "Added to every head's logit for full attention: moves the sparsity without retraining.")
    flags.DEFINE_string("prompt", None, "A text: the user's message, or what is continued with --raw.")
    flags.DEFINE_string("prompt_file", None, "File with the prompt. Without any input flag it is read from standard input.")
    flags.DEFINE_boolean("chat", False, "Answer message after message, a line each, until the end of input or /exit.")
    flags.DEFINE_string("batch", None, f"File of prompts, each line {_SAMPLE}.")
    flags.DEFINE_string("out", None, "File of --batch's results, a JSON line each, in the order they are done; the same command goes on.")
    flags.DEFINE_integer("batch_size", 8, "Prompts of --batch that run together.", lower_bound=1)
    flags.DEFINE_boolean("raw", False, "Continue the prompt as it is: no chat template.")
    flags.DEFINE_string("system", None, 'System message of prompts and chats; the "messages" of --batch have their own.')
    flags.DEFINE_boolean("reroute", True, "Choose the heads of a chat anew with each message, which runs the whole chat again.")
    flags.DEFINE_integer("max_new_tokens", 256, "Most new tokens of an answer.")
    flags.DEFINE_float("temperature", 0.0, "0 takes the best token; otherwise logits are divided by it.")
    flags.DEFINE_integer("top_k", 0, "Draw from the k best tokens only (0: all).")
    flags.DEFINE_float("top_p", 1.0, "Draw from the fewest tokens that hold this probability.")
    flags.DEFINE_integer("seed", 0, "Of the draws; --batch adds to it the number of a line that has no seed of its own.", lower_bound=0)
    flags.DEFINE_multi_string("stop", None, "Token that ends a text, by id or text, instead of the model's own; repeat for several.")
    flags.DEFINE_float("cache_gib", None, "Memory of the cache (default: what the prompts need).")


class CompileTime:
    """When JAX made programs in this thread: tracing, lowering, and compiling or reading from the cache. Nested ones count once."""

    def __init__(self) -> None:
        self._local = threading.local()
        jax.monitoring.register_event_time_span_listener(self._take)

    def _take(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self._spans().append((start_time, end_time))

    def _spans(self) -> list[tuple[float, float]]:
        return self._local.__dict__.setdefault("spans", [])

    def within(self, begin: float, end: float) -> float:
        """Seconds of it between two values of `time.time()`."""
        total = 0.0
        for start, stop in sorted(self._spans()):
            start, stop = max(start, begin), min(stop, end)
            if stop > start:
                total, begin = total + stop - start, stop
        return total


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the generator: its results, and its seconds with those of compiling apart."""

    completions: Sequence[Completion]
    timings: Timings
    prefill: float
    decode: float
    compiling: float


def measured(compiling: CompileTime, begun: float, completions: Sequence[Completion], timings: Timings) -> Call:
    """Of a call that began at this value of `time.time()` and has just returned."""
    ended = time.time()
    decoding = ended - timings.decode_seconds
    before, after = compiling.within(begun, decoding), compiling.within(decoding, ended)
    return Call(
        completions=completions,
        timings=timings,
        prefill=max(timings.prefill_seconds - before, 0.0),
        decode=max(timings.decode_seconds - after, 0.0),
        compiling=before + after,
    )


def summary(calls: Sequence[Call]) -> str:
    """One line. The first new token is the prefill's; MSR and ESR are means; of several calls the largest cache is told."""
    completions = [completion for call in calls for completion in call.completions]
    prompt, prefill = sum(completion.prompt_tokens for completion in completions), sum(call.prefill for call in calls)
    new = sum(completion.new_tokens for completion in completions)
    decoded, seconds = new - len(completions), sum(call.decode for call in calls)
    largest = max((call.timings for call in calls), key=lambda timings: timings.cache_mib)
    esr = [completion.esr for completion in completions if completion.esr is not None]
    return (
        f"{prompt} prompt tokens, prefill {prefill:.2f} s; "
        f"{new} new tokens{f', {1e3 * seconds / decoded:.1f} ms/token' if decoded else ''}; "
        f"cache {largest.cache_mib:.2f} MiB ({largest.dense_cache_mib:.2f} with every head full); "
        f"MSR {np.mean([completion.msr for completion in completions]):.2f}{f', ESR {np.mean(esr):.2f}' if esr else ''}; "
        f"compiling took another {sum(call.compiling for call in calls):.1f} s"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(_: int, piece: str) -> None:
    print(piece, end="", flush=True)


def _as_prompt(text: str, values: flags.FlagValues) -> str | list[dict[str, str]]:
    if values.raw:
        return text
    system = [] if values.system is None else [{"role": "system", "content": values.system}]
    return [*system, {"role": "user", "content": text}]


def _read_prompt(values: flags.FlagValues) -> str:
    """The one prompt, from its flag, its file or standard input."""
    if values.prompt is not None:
        name, content = "--prompt", os.fsencode(values.prompt)
    elif values.prompt_file is not None:
        name, content = values.prompt_file, Path(values.prompt_file).read_bytes()
    elif sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt, --prompt_file, --chat or --batch, or a text on standard input")
    else:
        name, content = "standard input", sys.stdin.buffer.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text in UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{name} is empty: a prompt is needed")
    return text


def _single(generator: Generator, values: flags.FlagValues, text: str, options: dict[str, Any], compiling: CompileTime) -> None:
    prompt = _as_prompt(text, values)
    _say(f"running a prompt of {len(generator.encode([prompt])[0][0])} tokens")
    begun = time.time()
    result = generator.generate([prompt], seeds=[values.seed], on_text=_write, **options)
    print()
    _say(summary([measured(compiling, begun, result.completions, result.timings)]))


def _next_message() -> str | None:
    """A line of standard input; None at its end and at /exit."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = input()
    except EOFError:
        return None
    return None if line.strip() == "/exit" else line


def _chat(generator: Generator, values: flags.FlagValues, options: dict[str, Any], compiling: CompileTime) -> None:
    with generator.chat(system=values.system, reroute=values.reroute) as conversation:
        while (message := _next_message()) is not None:
            if not message.strip():
                continue
            begun = time.time()
            try:
                completion = conversation.send(message, seeds=[values.seed], on_text=_write, **options)
            except ValueError as error:
                if not sys.stdin.isatty():
                    raise
                _say(f"error: {error}")  # the conversation is as before the message
                continue
            print()
            assert conversation.timings is not None
            _say(summary([measured(compiling, begun, [completion], conversation.timings)]))
            if not values.reroute:
                options = options | {"logit_bias": 0.0}  # it belongs to the choice, and the first message made that


@dataclasses.dataclass(frozen=True)
class Sample:
    """A line of --batch: its number from 1, and what it asks for."""

    line: int
    id: str | int
    prompt: str | list[dict[str, str]]
    seed: int

    def fingerprint(self, settings: dict[str, Any]) -> str:
        """Of all that the result depends on."""
        return hashlib.sha256(json.dumps([settings, self.prompt, self.seed], sort_keys=True).encode()).hexdigest()[:16]


def read_samples(file: str, values: flags.FlagValues) -> list[Sample]:
    """The prompts of a file; ValueError names the line that is none. Empty lines are passed over."""
    samples: dict[str | int, Sample] = {}
    for number, line in enumerate(Path(file).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number} is not JSON ({error}): accepted is {_SAMPLE}") from error
        if not isinstance(row, dict) or row.keys() - {"id", "prompt", "messages", "seed"} or ("prompt" in row) == ("messages" in row):
            raise ValueError(f"{file}, line {number}: accepted is {_SAMPLE}")
        key, seed = row.get("id", number), row.get("seed", values.seed + number)
        if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
            raise ValueError(f"{file}, line {number} has prompt={row['prompt']!r}: accepted is a text that is not empty")
        if not isinstance(row.get("messages", []), list):
            raise ValueError(f"{file}, line {number} has messages={row['messages']!r}: accepted is {_SAMPLE}")
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ValueError(f"{file}, line {number} has id={key!r}: accepted are texts and whole numbers")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"{file}, line {number} has seed={seed!r}: accepted are whole numbers from 0 to 2**32 - 1")
        if key in samples:
            raise ValueError(f"{file}, line {number} has id={key!r}, as line {samples[key].line} has: ids must differ")
        prompt = _as_prompt(row["prompt"], values) if "prompt" in row else row["messages"]
        samples[key] = Sample(line=number, id=key, prompt=prompt, seed=seed)
    if not samples:
        raise ValueError(f"{file} holds no prompts: each line must be {_SAMPLE}")
    return list(samples.values())


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[None]:
    """Keeps --out for this run, with its folder made; ValueError where another run has it or it is no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.is_file():
        raise ValueError(f"{_ANOTHER}: {file} is no regular file")
    with lock(file, f"{_ANOTHER}: {file} is being written by another run"):
        yield


def finished(file: Path, fingerprints: dict[str | int, str]) -> set[str | int]:
    """The ids that --out holds already; drops the last line if a kill cut it off.

    Raises:
      ValueError: it holds something else, and is left as it is: results of other prompts or settings, or none at all.
    """
    done = set()
    with errors_name(_ANOTHER):
        for where, result in read_lines(file, _RESULT_BEGINS):
            key: Any = result.get("id")
            if set(result) != _RESULT_FIELDS or type(key) not in (str, int):
                raise ValueError(f"{where} is no result of this program")
            if key in done:
                raise ValueError(f"{where} has a second result for id={key!r}: one is accepted")
            if key not in fingerprints or result["fingerprint"] != fingerprints[key]:
                raise ValueError(f"{where} (id={key!r}) is of a prompt or settings that are not the ones now")
            done.add(key)
    drop_unfinished_line(file)
    return done


def _batch(
    generator: Generator,
    values: flags.FlagValues,
    samples: list[Sample],
    settings: dict[str, Any],
    options: dict[str, Any],
    compiling: CompileTime,
) -> None:
    lengths = {}
    for sample in samples:
        try:
            lengths[sample.id] = len(generator.encode([sample.prompt])[0][0])
            generator.check_length([lengths[sample.id]], options["max_new_tokens"])
        except ValueError as error:
            raise ValueError(f"{values.batch}, line {sample.line}: {error}") from error
    fingerprints = {sample.id: sample.fingerprint(settings) for sample in samples}
    calls, size, started, file = [], values.batch_size, time.perf_counter(), Path(values.out)
    with claimed(file):
        done = finished(file, fingerprints)
        # The longest first: should memory not do, that is told at once.
        left = sorted((s for s in samples if s.id not in done), key=lambda sample: -lengths[sample.id])
        groups = [left[start : start + size] for start in range(0, len(left), size)]
        generators = generator.on(jax.local_devices()[: max(1, len(groups))])

        def answer(generator: Generator, group: list[Sample]) -> Call:
            begun = time.time()
            result = generator.generate([s.prompt for s in group], seeds=[s.seed for s in group], **options)
            return measured(compiling, begun, result.completions, result.timings)

        try:
            with tqdm(total=len(samples), initial=len(done), unit="prompt") as bar:
                for group, call in map_batches(generators, groups, answer):
                    calls.append(call)
                    append_lines(file, *(_result(s, fingerprints[s.id], r) for s, r in zip(group, call.completions, strict=True)))
                    bar.update(len(group))
        except KeyboardInterrupt:
            done = finished(file, fingerprints)  # only the file knows, wherever the interruption came
            end_interrupted(f"interrupted: {len(done)} of {len(samples)} results are in {file}; the same command goes on")
    several = f"added up over {len(generators)} devices, {time.perf_counter() - started:.2f} s together: " if len(generators) > 1 else ""
    _say(several + summary(calls) if calls else "nothing was left to do")
    _say(f"{len(samples)} results are in {file}")


def _result(sample: Sample, fingerprint: str, result: Completion) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "id": sample.id,
        "text": result.text,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "finish_reason": result.finish_reason,
        "msr": result.msr,
        "esr": result.esr,
        "seed": sample.seed,
    }


def _run(values: flags.FlagValues) -> None:
    # What can be told at once is told before the weights are read.
    given = [f"--{name}" for name in _INPUTS if values[name].value not in (None, False)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if (values.batch is None) != (values.out is None):
        raise ValueError("--batch and --out go together: prompts in, results out")
    if values.raw and (values.chat or values.system is not None):
        raise ValueError("--raw continues a text as it is: it goes with neither --chat nor --system")
    heads = read_heads(values.heads)
    if heads is None and values.router is None:
        raise ValueError("who picks the heads? Give --router=FOLDER of a training run, or --heads=full, sparse or a file")
    samples = read_samples(values.batch, values) if values.batch is not None else []
    text = "" if values.batch is not None or values.chat else _read_prompt(values)
    options: dict[str, Any] = {name: values[name].value for name in ("max_new_tokens", "temperature", "top_k", "top_p", "logit_bias")}
    check_options(**options, heads=heads)
    stop = None if values.stop is None else [int(item) if item.isascii() and item.isdecimal() else item for item in values.stop]

    compiling, started = CompileTime(), time.perf_counter()
    generator, settings, _ = load_generator(values.router, values.cache_gib)
    _say(f"loaded {settings['model']} in {time.perf_counter() - started:.1f} s")
    settings |= options | {"stop": stop, "heads": heads.tolist() if isinstance(heads, np.ndarray) else heads}
    options |= {"stop": stop, "heads": heads}
    if not values.raw:
        try:
            _ = generator.encoder
        except ValueError as error:
            raise ValueError(f"{error}: --raw continues the prompt as it is") from error
    generator.request([values.raw], seeds=[values.seed], **options)  # for its checks
    if samples:
        _batch(generator, values, samples, settings, options, compiling)
    elif values.chat:
        _chat(generator, values, options, compiling)
    else:
        _single(generator, values, text, options, compiling)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}: every option is a flag, --help lists them")
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of a load
    use_compilation_cache()
    with errors_in_one_line():
        _run(flags.FLAGS)


if __name__ == "__main__":
    define_model_flags()
    flags.adopt_module_key_flags(common)  # so that --help has them
    define_generation_flags()
    app.run(main)
