"""The attention of published models, one layer's heads: the shapes that kernels are tested, tuned and timed at."""

from __future__ import annotations

import dataclasses

from elastic_jax.models.config import PRESETS


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Query heads N, KV heads K and head dimension H."""

    heads: int
    kv_heads: int
    head_dim: int


def _shape(name: str) -> Shape:
    config = PRESETS[name]
    return Shape(config.num_heads, config.num_kv_heads, config.head_dim)


# The paper's three models and the demo's.
SHAPES: dict[str, Shape] = {name: _shape(name) for name in ("qwen3_4b", "qwen3_8b", "llama3_1_8b", "smollm2_135m")}
