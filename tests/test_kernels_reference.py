"""The float32 reference against a float64 oracle in numpy."""

import pytest

from tests.kernel_cases import CASES, inputs, oracle, run
from tests.tolerances import assert_close


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_numpy(case):
    x = inputs(case)
    out, lse, *_ = run(x, "reference")
    assert out.dtype == x.q.dtype
    expected_out, expected_lse = oracle(case, x)
    assert_close(out, expected_out, case.dtype, "forward", "out")
    assert_close(lse, expected_lse, "float32", "forward", "lse")
