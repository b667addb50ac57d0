"""How far a kernel may be from the float32 reference on the same inputs, by the dtype of the inputs.

Errors are relative to the largest absolute value of the reference, since sums cancel. `forward` is for outputs and log-sum-exps,
`gradient` for dq, dk, dv and the gradient of routing decisions. bfloat16 keeps 8 bits, float16 11.
"""

from __future__ import annotations

import numpy as np

TOLERANCES = {
    "float32": {"forward": 2e-6, "gradient": 5e-6},
    "float16": {"forward": 2e-3, "gradient": 4e-3},
    "bfloat16": {"forward": 8e-3, "gradient": 1.6e-2},
}


def assert_close(actual, expected, dtype, kind: str, name: str = "") -> None:
    """-inf must sit at the same places, NaN nowhere; finite values within the table's error."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    assert not np.isnan(actual).any(), f"{name}: NaN"
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=name)
    if finite.any():
        limit = TOLERANCES[np.dtype(dtype).name][kind] * max(1.0, np.abs(expected[finite]).max())
        error = np.abs(actual[finite] - expected[finite]).max()
        assert error <= limit, f"{name}: error {error:.2e} above {limit:.2e}"
