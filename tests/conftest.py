"""Settings for all tests."""

import os
import tempfile
from pathlib import Path

import pytest

# Tests compile the same programs again and again, in several processes: one compilation cache serves them all.
_CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"elastic-jax-tests-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Threads of XLA's pool: an interpreted Mosaic kernel blocks one per warpgroup, 6 in a pair of CUDA blocks, and small machines have fewer.
os.environ.setdefault("NPROC", "16")


@pytest.fixture(autouse=True, scope="session")
def compilation_cache():
    import jax

    assert jax.config.jax_compilation_cache_dir == _CACHE


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file; tests that need it are marked `assets`."""
    from elastic_jax import assets

    try:
        return assets.require("smollm2_135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
