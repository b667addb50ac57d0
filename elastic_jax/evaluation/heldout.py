"""Held-out documents under full attention, the learned router, all-sparse, and random routing of equal sparsity.

The measure is the answer: its loss given everything before it, and for needles whether every answer token is the model's first
choice, which is what greedy decoding would print. Random routing makes as many heads sparse as the router does in that class, but
which ones is drawn anew for every document: a router that is worth having beats it.

Axis letters: L layers, B documents in a batch (one per pack), T tokens, K KV heads, A answer tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from elastic_jax.data.batch import PackedBatch, stack_packs
from elastic_jax.data.tasks import TaskClass
from elastic_jax.elastic import Arrays, ElasticModel
from elastic_jax.objective import token_losses
from elastic_jax.replicas import copy_to, map_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldoutBatch:
    """Documents of one batch: `packs` of one document each; the answer's predicting positions i32[B, A], -1 where there are fewer."""

    packs: PackedBatch
    answer_position: Any
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Per document: mean loss of an answer token (nats), whether all were predicted, decisions and sparsity."""

    loss: np.ndarray  # f32[M]
    hit: np.ndarray  # bool[M]
    is_full: np.ndarray  # bool[M, L, K]
    effective_sparsity: np.ndarray  # f32[M]

    @property
    def sparsity(self) -> np.ndarray:
        """Omega_MSR of each document, f32[M]."""
        return 1.0 - self.is_full.mean(axis=(1, 2))


def heldout_batches(packs: Sequence[PackedBatch], kinds: Sequence[str], batch_size: int) -> list[HeldoutBatch]:
    """Groups packs of one document each, whose loss weights mark the answer; the last batch repeats its last document."""
    if unlabelled := [number for number, pack in enumerate(packs) if not (pack.loss_weights > 0).any()]:
        raise ValueError(
            f"{len(unlabelled)} of {len(packs)} held-out documents have no labelled answer token, so their answers have no loss"
        )
    batch_size = min(batch_size, len(packs))
    longest = max(int((pack.loss_weights > 0).sum()) for pack in packs)
    batches = []
    for start in range(0, len(packs), batch_size):
        group = list(packs[start : start + batch_size])
        real = len(group)
        group += [group[-1]] * (batch_size - real)
        position = np.full((batch_size, longest), -1, np.int32)
        for row, pack in enumerate(group):
            where = np.flatnonzero(pack.loss_weights > 0)
            position[row, : len(where)] = where
        batches.append(HeldoutBatch(packs=stack_packs(group), answer_position=position, kinds=tuple(kinds[start : start + batch_size])))
    return batches


def _answer_scores(model: ElasticModel, backbone: Arrays, hidden: jax.Array, batch: PackedBatch, position: jax.Array):
    gather = lambda x: jax.vmap(lambda row, index: row[index])(x, jnp.maximum(position, 0))
    losses, hits = token_losses(gather(hidden), model.output_embedding(backbone), gather(batch.targets))
    real = (position >= 0).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(real, axis=1), 1.0)
    return jnp.sum(losses * real, axis=1) / count, jnp.sum(hits * real, axis=1) == count


class HeldoutScorer:
    """Compiles two programs (routed and given decisions) and runs them over the batches.

    Args:
      devices: that share the batches, the first of them the one where the arrays are; None given: that one alone.
    """

    def __init__(self, model: ElasticModel, backbone: Arrays, router: Arrays, batches: list[HeldoutBatch], *, devices: Sequence[Any] = ()):
        self._batches = batches
        self._copies = [(router, backbone), *(copy_to(device, (router, backbone)) for device in devices[1 : len(batches)])]

        @jax.jit
        def routed(router: Arrays, backbone: Arrays, packs: PackedBatch, position: jax.Array, logit_bias: jax.Array):
            result = model.routed_forward(router, backbone, packs, logit_bias=logit_bias)
            return *_answer_scores(model, backbone, result.hidden, packs, position), result.is_full, result.effective_sparsity

        @jax.jit
        def forced(backbone: Arrays, packs: PackedBatch, position: jax.Array, is_full: jax.Array):
            result = model.forced_forward(backbone, packs, is_full)
            return *_answer_scores(model, backbone, result.hidden, packs, position), result.is_full, result.effective_sparsity

        self._routed_program, self._forced_program = routed, forced

    @property
    def tasks(self) -> np.ndarray:
        """TaskClass of each document, i32[M]."""
        return np.concatenate([batch.packs.task[: len(batch.kinds), 0] for batch in self._batches])

    @property
    def kinds(self) -> np.ndarray:
        """Kind of each document, str[M]."""
        return np.array([kind for batch in self._batches for kind in batch.kinds])

    def _collect(self, name: str, run: Callable[[Arrays, Arrays, int, HeldoutBatch], Any]) -> Scores:
        """Scores of run(router, backbone, number, batch) for all batches."""

        def scores(copy: tuple[Arrays, Arrays], item: tuple[int, HeldoutBatch]) -> tuple[np.ndarray, ...]:
            number, batch = item
            real = len(batch.kinds)
            loss, hit, full, esr = jax.device_get(run(*copy, number, batch))
            return loss[:real], hit[:real], np.moveaxis(full[:, :real, 0], 1, 0) > 0.5, esr[:real, 0]

        results = map_batches(self._copies, enumerate(self._batches), scores)
        rows = {number: row for (number, _), row in tqdm(results, desc=name, leave=False, total=len(self._batches))}
        loss, hit, is_full, esr = (np.concatenate(column) for column in zip(*(rows[number] for number in sorted(rows)), strict=True))
        return Scores(loss=loss, hit=hit, is_full=is_full, effective_sparsity=esr)

    def routed(self, logit_bias: float = 0.0) -> Scores:
        """Scores under the learned router."""

        def run(router: Arrays, backbone: Arrays, _: int, batch: HeldoutBatch) -> Any:
            return self._routed_program(router, backbone, batch.packs, batch.answer_position, np.float32(logit_bias))

        return self._collect("routed", run)

    def forced(self, is_full: np.ndarray) -> Scores:
        """Scores under given decisions, bool[M, L, K]."""
        ends = np.cumsum([len(batch.kinds) for batch in self._batches])

        def run(_: Arrays, backbone: Arrays, number: int, batch: HeldoutBatch) -> Any:
            part = is_full[ends[number] - len(batch.kinds) : ends[number]]
            missing = len(batch.answer_position) - len(part)
            part = np.concatenate([part, np.repeat(part[-1:], missing, axis=0)])
            decisions = np.moveaxis(part, 0, 1)[:, :, None].astype(np.float32)  # [L, B, C=1, K]
            return self._forced_program(backbone, batch.packs, batch.answer_position, decisions)

        return self._collect("given decisions", run)


def random_decisions(sparse_heads: np.ndarray, layers: int, heads: int, rng: np.random.Generator) -> np.ndarray:
    """bool[M, L, K] full heads, drawn uniformly with exactly sparse_heads[m] sparse ones in document m."""
    order = np.argsort(rng.random((len(sparse_heads), layers * heads)), axis=1)
    return (np.argsort(order, axis=1) >= sparse_heads[:, None]).reshape(-1, layers, heads)


def evaluate_heldout(scorer: HeldoutScorer, *, random_seeds: int, seed: int, logit_bias: float = 0.0) -> dict[str, Any]:
    """Runs every condition and summarises it by class.

    Args:
      scorer: model and documents.
      random_seeds: independent draws of random routing.
      seed: of the draws.
      logit_bias: of the router, see `choose_routing`.

    Returns:
      a JSON-ready report: `classes[name]` with the number of documents, Omega_MSR and Omega_ESR of the router and, for each of
      `full`, `router`, `sparse`, `random`, the mean answer loss (`random` has its spread over the draws as well); for classes with
      needles the share of hits under each; `heads[name]` and `heads.all`: how often each head is full, [L][K].
    """
    routed = scorer.routed(logit_bias)
    full = scorer.forced(np.ones_like(routed.is_full))
    sparse = scorer.forced(np.zeros_like(routed.is_full))
    documents, layers, heads = routed.is_full.shape
    tasks, needles = scorer.tasks, scorer.kinds == "needle"
    sparse_heads = np.zeros(documents, np.int64)
    for task in np.unique(tasks):
        member = tasks == task
        sparse_heads[member] = round(float(routed.sparsity[member].mean()) * layers * heads)
    draws = []
    for draw in range(random_seeds):
        rng = np.random.default_rng([seed, draw])
        draws.append(scorer.forced(random_decisions(sparse_heads, layers, heads, rng)))

    classes, frequency = {}, {"all": routed.is_full.mean(axis=0).tolist()}
    for task in (TaskClass(number) for number in np.unique(tasks)):
        member = tasks == task
        frequency[task.name.lower()] = routed.is_full[member].mean(axis=0).tolist()
        drawn = np.array([draw.loss[member] for draw in draws])  # [draws, documents]
        gain = drawn.mean(axis=0) - routed.loss[member]
        summary: dict[str, Any] = {
            "documents": int(member.sum()),
            "msr": float(routed.sparsity[member].mean()),
            "esr": float(routed.effective_sparsity[member].mean()),
            "loss": {
                "full": float(full.loss[member].mean()),
                "router": float(routed.loss[member].mean()),
                "sparse": float(sparse.loss[member].mean()),
                "random": float(drawn.mean()),
                "random_spread": float(drawn.mean(axis=1).std(ddof=1)) if random_seeds > 1 else None,
            },
            # Paired by document: how much lower the router's loss is than the mean of the draws.
            "router_gain": float(gain.mean()),
            "router_gain_error": float(gain.std(ddof=1) / np.sqrt(len(gain))) if len(gain) > 1 else None,
        }
        member_needles = member & needles
        if member_needles.any():
            hits = lambda scores, who=member_needles: float(scores.hit[who].mean())
            drawn_hits = np.array([hits(draw) for draw in draws])
            summary["needle"] = {
                "documents": int(member_needles.sum()),
                "full": hits(full),
                "router": hits(routed),
                "sparse": hits(sparse),
                "random": float(drawn_hits.mean()),
                "random_spread": float(drawn_hits.std(ddof=1)) if random_seeds > 1 else None,
            }
        classes[task.name.lower()] = summary
    return {"documents": documents, "random_seeds": random_seeds, "classes": classes, "heads": frequency}


def report_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table: losses in nats per answer token, hits in per cent."""
    columns = "class|documents|MSR|ESR|full|router|random|all sparse|router gain over random|needle hits %: full / router / random / sparse"
    names = columns.split("|")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    number = lambda x: "-" if x is None else f"{x:.3f}"
    for name, c in report["classes"].items():
        loss, needle = c["loss"], c.get("needle")
        hits = " / ".join(f"{100 * needle[k]:.0f}" for k in ("full", "router", "random", "sparse")) if needle else "-"
        lines.append(
            f"| {name} | {c['documents']} | {c['msr']:.2f} | {c['esr']:.2f} | {number(loss['full'])} | {number(loss['router'])} "
            f"| {number(loss['random'])} ± {number(loss['random_spread'])} | {number(loss['sparse'])} "
            f"| {c['router_gain']:+.3f} ± {number(c['router_gain_error'])} | {hits} |"
        )
    return "\n".join(lines)
