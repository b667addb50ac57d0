"""Fetches the demo model and texts (174 MB on disk) that the demo and the tests use: see elastic_jax/assets.py.

python -m experiments.fetch_assets [--only=smollm2_135m,essays]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags

from elastic_jax import assets

_ONLY = flags.DEFINE_list("only", None, f"Comma-separated assets; all by default. Known: {', '.join(assets.ASSETS)}.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        assets.fetch(_ONLY.value)
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"fetch_assets: {error}")


if __name__ == "__main__":
    app.run(main)
