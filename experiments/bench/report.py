"""JSON lines of records, on standard output and in a folder; a table and a plot of what the folder holds."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.bench.implementations import NAMES, SERIAL

# What two lines of one plot must share; and what makes a later line of a file replace an earlier one.
_SETTING = ("shape", "dtype", "block_size", "sink_blocks", "local_blocks", "device")
_CASE = (*_SETTING, "direction", "implementation", "tokens", "sparse_share")
_MODEL_SETTING = ("dtype", "setting", "block_size", "sink_blocks", "local_blocks", "device")
_MODEL_CASE = ("model", "setting", "batch", "routed", "msr", "prefilled_layers")
_VERSIONS = ("jax", "torch", "triton", "cudnn")
# Of whole models: the fields that a table has, a row for each record.
_ABOUT = ("model", "tokens", "batch", "implementation", "msr", "routed")
_RATIOS = ("speedup_over_hf", "speedup_over_dense", "times_single")
_COLUMNS = {
    "prefill": (*_ABOUT, "median_ms", "tokens_per_second", *_RATIOS, "cache_mib", "cache_share", "peak_gib"),
    "decode": (*_ABOUT, "median_ms", "tokens_per_second", *_RATIOS, "cache_mib", "cache_share"),
    "memory": (*_ABOUT, "prefilled_layers", "weights_gib", "cache_mib", "cache_share", "peak_gib", "first_prefill_s", "first_decode_s"),
}


def about() -> dict[str, Any]:
    """Device and versions. cuDNN's is that of the package that JAX and PyTorch both load; `platform` is what JAX knows of CUDA."""
    cudnn = [version for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12") if (version := _version(name))]
    return {
        "device": jax.devices()[0].device_kind,
        "platform": " ".join(jax.devices()[0].client.platform_version.split()),
        "jax": jax.__version__,
        **{name: _version(name) for name in ("jaxlib", "torch", "triton", "transformers")},
        "cudnn": cudnn[0] if cudnn else None,
        "python": platform.python_version(),
    }


def write(records: Iterable[dict[str, Any]], file: Path | None) -> None:
    """Prints each record as it comes and appends it to `file`, so that an interrupted run keeps what it measured.

    Raises:
      ValueError: before anything is measured, where the file cannot be written or holds what `read` refuses.
    """
    common = about()
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            raise ValueError(f"--out={file.parent}: {error.strerror}; accepted is a folder that can be written") from error
        read(file)
    for record in records:
        line = json.dumps(peak_memory() | record | common)
        print(line, flush=True)
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The file's records without those that hold a `reason` for not having run; of those of the same case the last. Raises ValueError
    for lines that `write` did not write."""
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line.decode("utf-8"))
            complete = isinstance(record, dict) and {"what", *_VERSIONS} <= record.keys()
            complete = complete and ("sparse_share" not in record or {*_CASE, "dense"} <= record.keys())
        except ValueError:
            complete = False
        if not complete:
            raise ValueError(f"{file}, line {number}: not a whole line of a benchmark; remove it to go on with this file")
        records.append(record)
    return list({tuple(r.get(key) for key in (*_CASE, *_MODEL_CASE)): r for r in records if "reason" not in r}.values())


def plot(file: Path) -> Path | None:
    """Draws speed-ups by sparse share, a panel for each length, beside `file`; None where there is nothing to draw.

    `attention` and `backward`: over the fastest dense rival. `dispatch`: ours over serial dispatch, the paper's Fig. 4. A file may hold
    several shapes, windows or devices: those of its last line are drawn.
    """
    what = file.stem
    records = [r for r in read(file) if "sparse_share" in r]
    records = [r for r in records if not r["dense"] and all(r[key] == records[-1][key] for key in _SETTING)]
    lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for record in records:
        label = record["implementation"]
        if what == "dispatch":
            if label not in SERIAL or "times_ours" not in record:
                continue
            label, value = f"{record['ours']} over {label}", record["times_ours"]
        elif "speedup_over_dense" in record:
            label = label if what == "attention" else f"{label} {record['direction']}"
            value = record["speedup_over_dense"]
        else:
            continue
        lines.setdefault((record["tokens"], label), []).append((record["sparse_share"], value))
    if not lines:
        return None

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({tokens for tokens, _ in lines})
    labels = sorted({label for _, label in lines})
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.2 * len(lengths), 4), layout="constrained", squeeze=False)
    for axis, tokens in zip(axes[0], lengths, strict=True):
        for number, label in enumerate(labels):
            if points := sorted(lines.get((tokens, label), [])):
                axis.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=label)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=f"{tokens:,} tokens", xlabel="share of streaming KV heads")
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("speed-up over serial dispatch" if what == "dispatch" else "speed-up over the fastest dense")
    path = file.with_suffix(".png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def table(file: Path) -> Path | None:
    """Writes what `attention`, `dispatch` and `backward` measured as a Markdown table beside `file`: a row for each length and share, a
    column for each implementation: median milliseconds, and in brackets how many times ours that is, or for ours itself the share of
    the ideal, which is our dense time times the share of visited pairs. `prefill`, `decode` and `memory`: a row for each record. None
    where there is nothing to write."""
    if columns := _COLUMNS.get(file.stem):
        return _listing(file, columns)
    records = [r for r in read(file) if "sparse_share" in r]
    records = [r for r in records if all(r[key] == records[-1][key] for key in _SETTING)]
    if not records:
        return None
    cells = {(r["direction"], r["tokens"], r["sparse_share"], r["implementation"]): r for r in records}
    rows = sorted({key[:3] for key in cells})
    columns = [name for name in NAMES if any(key[3] == name for key in cells)]
    setting = ", ".join(f"{key} {records[-1][key]}" for key in (*_SETTING, *_VERSIONS))
    lines = [setting, "", "| direction | tokens | sparse share | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for row in rows:
        texts = []
        for name in columns:
            record, dense = cells.get((*row, name)), cells.get((*row[:2], 0.0, name))
            text = "" if record is None else f"{record['median_ms']:.4g}"
            if record is not None and record.get("ours", name) != name:
                text += f" ({record['times_ours']:.2f})"
            elif record is not None and dense not in (None, record):
                text += f" ({100 * dense['median_ms'] * record['visited_share'] / record['median_ms']:.0f} %)"
            texts.append(text)
        lines.append(f"| {row[0]} | {row[1]:,} | {row[2]:g} | " + " | ".join(texts) + " |")
    path = file.with_suffix(".md")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _listing(file: Path, columns: Sequence[str]) -> Path | None:
    records = read(file)
    records = [r for r in records if all(r.get(key) == records[-1].get(key) for key in _MODEL_SETTING)]
    if not records:
        return None
    setting = ", ".join(f"{key} {records[-1].get(key)}" for key in (*_MODEL_SETTING, *_VERSIONS, "transformers"))
    lines = [setting, "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    text = lambda value: "" if value is None else f"{value:,}" if type(value) in (int, float) else str(value)
    records.sort(key=lambda r: (r["model"], r["tokens"], r["batch"]))  # within these as they were measured
    lines += ["| " + " | ".join(text(r.get(key)) for key in columns) + " |" for r in records]
    path = file.with_suffix(".md")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def peak_memory() -> dict[str, float]:
    """{"peak_gib": the most memory that JAX has held on the first device so far}; {} where the device does not count it."""
    statistics = jax.devices()[0].memory_stats() or {}
    return {"peak_gib": round(statistics["peak_bytes_in_use"] / 2**30, 2)} if "peak_bytes_in_use" in statistics else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
