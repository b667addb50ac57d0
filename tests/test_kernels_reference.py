"""The float32 reference against a float64 oracle in numpy."""

import numpy as np
import pytest

from elastic_jax.config import HeadMode
from tests.kernel_cases import CASES, inputs, listed_rows, oracle, run, tables
from tests.tolerances import assert_close


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_numpy(case):
    x = inputs(case)
    out, lse, *_ = run(x, "reference")
    assert out.dtype == x.q.dtype
    expected_out, expected_lse = oracle(case, x)
    assert_close(out, expected_out, case.dtype, "forward", "out")
    assert_close(lse, expected_lse, "float32", "forward", "lse")


@pytest.mark.parametrize("bitmap", ["query", "kv"])
def test_the_cases_walk_bitmaps_across_words(bitmap):
    rows = [row for case in CASES if case.bitmap == bitmap for row in listed_rows(case, inputs(case))]
    assert any(len(set(row // 32)) > 1 for row in rows)  # words of a bitmap
    assert any(len(set(row // 16)) > 1 for row in rows if row.size and row[0] < 16)  # words that kernels walk


def test_the_cases_have_every_mode():
    modes = [set(np.unique(tables(case, inputs(case))[0])) for case in CASES]
    assert set(HeadMode) in modes
    assert {HeadMode.FULL, HeadMode.STREAMING} in modes
