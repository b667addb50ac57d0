"""Tables from a folder of results: scores with error bars beside the sparsity, by category, length and task; comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from elastic_jax.evaluation.paper import PAPER
from elastic_jax.evaluation.results import Record, read_records, read_run, read_timings
from elastic_jax.evaluation.statistics import bootstrap_mean

Cell = dict[str, Any]
_ORDER = (*PAPER["longbench_e"].columns, "Easy", "Hard", "0-4k", "4-8k", "8k+", "short", "medium", "long")
Section = Literal["groups", "lengths", "tasks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What a suite's headline columns are and how they come from its samples.

    Attributes:
      title: of the report.
      columns: the section whose cells are the columns of the headline table.
      strata: what is averaged by itself first: the samples of a task, or of a task at a length.
      beside: of a sample's other scores the one that the headline table has too.
      total, group: whether strata count equally in the overall cell (and by length), and in a group's, or as their samples do.
    """

    title: str
    columns: Section
    total: Literal["strata", "samples"]
    group: Literal["strata", "samples"] = "strata"
    strata: tuple[str, ...] = ("task",)
    beside: str | None = None


LAYOUTS: dict[str, Layout] = {
    "longbench_e": Layout(title="LongBench-E", columns="groups", total="samples"),
    "ruler": Layout(title="RULER", columns="lengths", total="strata", strata=("task", "length")),
    "longbench_v2": Layout(title="LongBench-v2", columns="groups", total="samples", group="samples"),
    "math": Layout(title="Math", columns="groups", total="strata"),
    "longhealth": Layout(title="LongHealth", columns="tasks", total="strata", beside="text_match"),
}


def suite_report(
    out: str | Path, *, compare: str | None = None, against: str | Path | None = None, baseline: str | Path | None = None
) -> dict[str, Any]:
    """Everything that the tables show, as JSON values.

    Args:
      out: a folder of results; unfinished ones count with what they have.
      compare: a model of `paper.MODELS`, whose rows are put beside this run's.
      against: another folder of the same suite: the differences on the samples that both have.
      baseline: another folder whose prefill time is divided by this run's.

    Raises:
      ValueError: a folder has no results, or those of another suite; the paper has no numbers of the suite.
    """
    run, records = _load(out)
    suite = run["settings"]["suite"]
    layout = LAYOUTS[suite]
    report: dict[str, Any] = {"suite": suite, "title": layout.title} | run
    report["cells"] = _sections(records, layout, _cell)
    report["timing"] = _timing(out)
    if compare is not None:
        if suite not in PAPER:
            raise ValueError(f"the paper has no numbers of {suite} to compare with: accepted are {', '.join(PAPER)}")
        table = PAPER[suite]
        report["paper"] = {"table": table.name, "model": compare, "caveats": table.caveats(compare), "rows": table.rows(compare)}
        report["paper"] |= {"speed": table.speed_rows(compare), "speed_caveats": table.speed_caveats}
    if against is not None:
        other, theirs = _load(against, suite)
        report["against"] = compare_records(records, theirs, layout) | {"run": str(against), "settings": _difference(run, other)}
    if baseline is not None:
        other, _ = _load(baseline, suite)
        report["speedup"] = {"run": str(baseline), "settings": _difference(run, other), "lengths": _speedup(out, baseline)}
    return report


def compare_records(ours: Sequence[Record], theirs: Sequence[Record], layout: Layout) -> dict[str, Any]:
    """Paired differences, ours minus theirs, over the answers that both have; how many only one has, and how many differ in the prompt."""
    one, other = ({record["id"]: record for record in records} for records in (ours, theirs))
    common = [one[name] | {"score": one[name]["score"] - other[name]["score"]} for name in one if name in other]
    return {
        "common": len(common),
        "only_ours": len(one) - len(common),
        "only_theirs": len(other) - len(common),
        "other_prompts": sum(record["prompt"] != other[record["id"]]["prompt"] for record in common),
        "cells": _sections(common, layout, _difference_cell),
    }


def _load(path: str | Path, suite: str | None = None) -> tuple[dict[str, Any], list[Record]]:
    run = read_run(path)
    if (found := run["settings"]["suite"]) not in ([suite] if suite is not None else LAYOUTS):
        raise ValueError(f"{path} has results of {found}, not of {suite or ', '.join(LAYOUTS)}")
    records = read_records(path)
    if not records:
        raise ValueError(f"{path} has no finished sample yet")
    return run, records


def _sections(records: Sequence[Record], layout: Layout, cell: Callable[..., Cell]) -> dict[str, Any]:
    def by(name: str, records: Sequence[Record], weights: str) -> dict[str, Cell]:
        return {str(value): cell(part, layout, weights) for value, part in _split(records, name).items() if value is not None}

    return {
        "overall": cell(records, layout, layout.total),
        "groups": by("group", records, layout.group),
        "lengths": by("length", records, layout.total),
        "tasks": by("task", records, layout.total),
        "task_lengths": {str(task): by("length", part, layout.total) for task, part in _split(records, "task").items()},
    }


def _split(records: Sequence[Record], *names: str) -> dict[Any, list[Record]]:
    """By the values of these fields: numbers by size, names of `_ORDER` as there, others as they appear."""
    parts: dict[Any, list[Record]] = {}
    for record in records:
        parts.setdefault(record[names[0]] if len(names) == 1 else tuple(record[name] for name in names), []).append(record)
    known = lambda part: part[0] if isinstance(part[0], int) else _ORDER.index(part[0]) if part[0] in _ORDER else len(_ORDER)
    return dict(sorted(parts.items(), key=known))


def _strata(records: Sequence[Record], layout: Layout, weights: str) -> tuple[list[list[Record]], list[float]]:
    parts = list(_split(records, *layout.strata).values())
    return parts, [len(part) if weights == "samples" else 1.0 for part in parts]


def _mean(parts: Sequence[Sequence[Record]], weights: Sequence[float], name: str) -> float | None:
    """The strata's weighted mean of a field, over the records that have it."""
    values = [[record[name] for record in part if record[name] is not None] for part in parts]
    kept = [(np.mean(value), weight) for value, weight in zip(values, weights) if value]
    return float(sum(mean * weight for mean, weight in kept) / sum(weight for _, weight in kept)) if kept else None


def _score(parts: Sequence[Sequence[Record]], weights: Sequence[float], score: Callable[[Record], float] = itemgetter("score")) -> Cell:
    """In percent; a stratum's answers to one question are one value."""
    values = [{name: float(np.mean([*map(score, asked)])) for name, asked in _split(part, "question").items()} for part in parts]
    interval = bootstrap_mean(values, weights)
    means = {name: None if np.isnan(x) else 100 * x for name, x in interval._asdict().items()}
    return {"n": len(set[str]().union(*values))} | means


def _difference_cell(records: Sequence[Record], layout: Layout, weights: str) -> Cell:
    return _score(*_strata(records, layout, weights))


def _cell(records: Sequence[Record], layout: Layout, weights: str) -> Cell:
    parts, share = _strata(records, layout, weights)
    total = lambda name: sum(record[name] for record in records)
    shared = set[str].intersection(*(set(record["scores"]) for record in records)) - {"score"}
    return _score(parts, share) | {
        "scores": {name: _score(parts, share, lambda record, name=name: record["scores"][name]) for name in sorted(shared)},
        "answers": len(records),
        "msr": _mean(parts, share, "msr"),
        "esr": _mean(parts, share, "esr"),
        "prompt_tokens": total("LEN") / len(records),
        "new_tokens": total("new_tokens") / len(records),
        "cut_share": total("cut_tokens") / (total("LEN") + total("cut_tokens")),
        "cut_prompts": sum(record["cut_tokens"] > 0 for record in records),
        "empty": sum(not record["pred"].strip() for record in records),
        "unfinished": sum(record["finish_reason"] == "length" for record in records),
    }


def _difference(run: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What of settings and environment differs: name to (there, here)."""
    here, there = ({**part["settings"], **part["environment"]} for part in (run, other))
    return {name: [there.get(name), here.get(name)] for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)}


def _length(length: int | str | None) -> str:
    return "all" if length is None else str(length)


def _by_shape(path: str | Path) -> dict[tuple[str, int, int], list[float]]:
    """Prefill seconds of the batches by (length, rows, padded tokens), without those that were compiled in that time."""
    shapes: dict[tuple[str, int, int], list[float]] = {}
    for timing in read_timings(path):
        if not timing["first"]:
            shapes.setdefault((_length(timing["length"]), timing["rows"], timing["padded_tokens"]), []).append(timing["prefill_seconds"])
    return shapes


def _timing(path: str | Path) -> dict[str, Any]:
    """Of each length the prefill seconds per prompt and the milliseconds per decode step, without what was compiled in that time."""
    warm = [timing for timing in read_timings(path) if not timing["first"]]
    result = {}
    for length, timings in _split(warm, "length").items():
        total = lambda name, timings=timings: sum(timing[name] for timing in timings)
        result[_length(length)] = {
            "batches": len(timings),
            "prefill_seconds_per_prompt": total("prefill_seconds") / total("rows"),
            "ms_per_step": 1e3 * total("decode_seconds") / total("steps") if total("steps") else None,
        }
    return result


def _speedup(out: str | Path, baseline: str | Path) -> dict[str, Cell]:
    """Of each length the baseline's prefill time over this run's, on batches of equal shape: the median of each shape."""
    ours, theirs = _by_shape(out), _by_shape(baseline)
    result: dict[str, Cell] = {}
    for length in dict.fromkeys(length for length, *_ in ours):
        shapes = [shape for shape in ours if shape[0] == length and shape in theirs]
        if shapes:
            seconds = [sum(float(np.median(times[shape])) for shape in shapes) for times in (theirs, ours)]
            result[length] = {"speedup": seconds[0] / seconds[1], "shapes": len(shapes)}
    return result


def markdown(report: dict[str, Any]) -> str:
    """The report as text: its conditions, the headline table, the paper's rows, comparisons, then every cell."""
    layout, cells = LAYOUTS[report["suite"]], report["cells"]
    lines = [f"# {report['title']}", "", *_missing(report), *_conditions(report), "", *_headline(report, layout)]
    if cells["overall"]["n"] and any(cell["low"] == cell["high"] for cell in (*cells[layout.columns].values(), cells["overall"])):
        lines += ["", "Where an interval is a point, all scores of a task were equal or there was one: it says nothing about the error."]
    if "paper" in report:
        lines += ["", f"Against the paper's {report['paper']['table']}, {report['paper']['model']}:", ""]
        lines += [f"- {caveat}" for caveat in report["paper"]["caveats"]]
    if "against" in report:
        lines += ["", *_against(report["against"])]
    lines += ["", *_speed(report)]
    if report.get("paper", {}).get("speed"):
        lines += ["", *_paper_speed(report)]
    lines += ["", "## All cells", "", *_details(cells)]
    return "\n".join(lines) + "\n"


def _missing(report: dict[str, Any]) -> list[str]:
    answers, expected = report["cells"]["overall"]["answers"], report.get("expected", 0)
    if answers >= expected:
        return []
    return [
        f"**Unfinished: {answers} of {expected} answers. Every score below is of these alone; the longest prompts are answered first.**",
        "",
    ]


def _conditions(report: dict[str, Any]) -> list[str]:
    show = lambda value: ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
    parts = report["settings"] | report["environment"]
    return [
        "Scores in percent with 95 % bootstrap intervals over questions, tasks being strata that may share them. Ω is Ω_MSR, the share of "
        "sparse heads; Ω_ESR the share of a prompt's causal (query, key) pairs that a head leaves out, averaged over heads.",
        "",
        *(f"- {name}: {show(value)}" for name, value in parts.items() if value not in (None, {})),
    ]


def _headline(report: dict[str, Any], layout: Layout) -> list[str]:
    cells = report["cells"]
    columns = {**cells[layout.columns], "overall": cells["overall"]}
    paper = report.get("paper", {"rows": {}})["rows"]
    names = [*dict.fromkeys([*next(iter(paper.values()), {}), *columns])]
    if layout.columns == "lengths":
        names.sort(key=lambda name: int(name) if name.isdecimal() else 0)
    names = [*(name for name in names if name != "overall"), "overall"]
    header = ["", *(title for name in names for title in (name, "Ω"))]
    rows = [["this run", *(text for name in names for text in _pair(columns.get(name)))]]
    if layout.beside in cells["overall"]["scores"]:
        other = lambda name: columns[name]["scores"].get(layout.beside) if name in columns else None
        rows.append([f"its {layout.beside}", *(text for name in names for text in (_scored(other(name)), ""))])
    rows.append(["its Ω_ESR", *(text for name in names for text in ("", _ratio(columns.get(name, {}).get("esr"))))])
    for method, row in paper.items():
        values = [row.get(name, (None, None)) for name in names]
        rows.append([f"paper: {method}", *(text for score, msr in values for text in (_percent(score), _ratio(msr)))])
    return _table(header, rows)


def _pair(cell: Cell | None) -> tuple[str, str]:
    return _scored(cell), _ratio(None if cell is None else cell["msr"])


def _scored(cell: Cell | None) -> str:
    return "–" if cell is None or cell["mean"] is None else f"{cell['mean']:.2f} [{cell['low']:.1f}, {cell['high']:.1f}]"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _against(against: dict[str, Any]) -> list[str]:
    cells = against["cells"]
    rows = [("overall", cells["overall"])]
    rows += [(name, cell) for section in ("groups", "lengths", "tasks") for name, cell in cells[section].items()]
    unlike = "; ".join(f"{name}: {there} there, {here} here" for name, (there, here) in against["settings"].items())
    return [
        f"## Against {against['run']}",
        "",
        f"Differences, this run minus that one, paired over {against['common']} answers that both have ({against['only_ours']} are only "
        f"here, {against['only_theirs']} only there; {against['other_prompts']} of the common ones have another prompt). Settings: "
        f"{unlike or 'the same'}.",
        "",
        *_table(["", "n", "difference [95 %]"], [[name, str(cell["n"]), _scored(cell)] for name, cell in rows]),
    ]


def _speed(report: dict[str, Any]) -> list[str]:
    timing, speedup = report["timing"], report.get("speedup", {"lengths": {}})
    rows = [
        [
            length,
            str(times["batches"]),
            f"{times['prefill_seconds_per_prompt']:.3f}",
            "–" if times["ms_per_step"] is None else f"{times['ms_per_step']:.1f}",
            _ratio(speedup["lengths"].get(length, {}).get("speedup")),
        ]
        for length, times in timing.items()
    ]
    if not rows:
        return ["## Speed", "", "No batch shape ran a second time, so every time has its programs' compilation in it: nothing to tell."]
    lines = ["## Speed", "", "Batches that had nothing to compile."]
    if "run" in speedup:
        lines[-1] += f" Speed-up of prefill over {speedup['run']}, on batches of equal rows and padded length."
    return [*lines, "", *_table(["length", "batches", "prefill s per prompt", "ms per decode step", "prefill speed-up"], rows)]


def _paper_speed(report: dict[str, Any]) -> list[str]:
    """This run's speed-up and Omega_ESR at the paper's lengths above those of its figures."""
    paper, speedup, cells = report["paper"]["speed"], report.get("speedup", {"lengths": {}})["lengths"], report["cells"]["lengths"]
    names = list(dict.fromkeys(name for row in paper.values() for name in row))
    ours = {name: (speedup.get(name, {}).get("speedup"), cells.get(name, {}).get("esr")) for name in names}
    rows = {"this run": ours} | {f"paper: {method}": row for method, row in paper.items()}
    return [
        "## Speed-up of prefill and Ω_ESR by length, beside the paper's figures",
        "",
        *(f"- {caveat}" for caveat in report["paper"]["speed_caveats"]),
        "",
        *_table(
            ["", *(title for name in names for title in (name, "Ω_ESR"))],
            [[method, *(_ratio(value) for name in names for value in row.get(name, (None, None)))] for method, row in rows.items()],
        ),
    ]


def _details(cells: dict[str, Any]) -> list[str]:
    rows = [("overall", cells["overall"])]
    rows += [(f"{section[:-1]} {name}", cell) for section in ("groups", "lengths", "tasks") for name, cell in cells[section].items()]
    rows += [(f"{task} at {length}", cell) for task, row in cells["task_lengths"].items() for length, cell in row.items()]
    others = list(dict.fromkeys(name for _, cell in rows for name in cell["scores"]))
    header = ["", "questions", "answers", *(f"{name} [95 %]" for name in ("score", *others)), "Ω_MSR", "Ω_ESR", "prompt tokens"]
    header += ["cut prompts", "cut tokens", "new tokens", "not ended", "empty answers"]

    def row(name: str, cell: Cell) -> list[str]:
        return [
            name,
            *(str(cell[key]) for key in ("n", "answers")),
            _scored(cell),
            *(_scored(cell["scores"].get(other)) for other in others),
            *(_ratio(cell[key]) for key in ("msr", "esr")),
            f"{cell['prompt_tokens']:.0f}",
            str(cell["cut_prompts"]),
            f"{100 * cell['cut_share']:.1f} %",
            f"{cell['new_tokens']:.1f}",
            *(str(cell[key]) for key in ("unfinished", "empty")),
        ]

    return _table(header, [row(name, cell) for name, cell in rows])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(header), line(["---"] * len(header)), *map(line, rows)]
