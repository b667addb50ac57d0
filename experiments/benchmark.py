"""Benchmarks: one JSON line per case on standard output, with versions and device.

python -m experiments.benchmark --what=train_step --tokens=1024
python -m experiments.benchmark --what=xla_attention --tokens=8192
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

import jax
from absl import app, flags, logging

from elastic_jax.data.packing import check_pack_shape
from experiments.bench import train_step, xla_attention
from experiments.common import define_model_flags, errors_in_one_line, load_elastic_model, model_settings


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}: every option is a flag, --helpfull lists them")
    values = flags.FLAGS
    logging.set_verbosity(logging.WARNING)
    with errors_in_one_line():
        if values.what == "train_step":
            check_pack_shape(values.tokens, values.block_size, 1)
            model, backbone, _ = load_elastic_model(model_settings())
            records = train_step.run(model, backbone, tokens=values.tokens, repeats=values.repeats)
        else:
            records = xla_attention.run(tokens=values.tokens, dtype=model_settings()["dtype"], repeats=values.repeats)
        about = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
        }
        for record in records:
            print(json.dumps(record | about), flush=True)


if __name__ == "__main__":
    define_model_flags()
    flags.DEFINE_enum("what", None, ["train_step", "xla_attention"], "What to time.", required=True)
    flags.DEFINE_integer("tokens", 1024, "Sequence length.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each case.", lower_bound=1)
    app.run(main)
