"""Decode attention over a paged cache: the definition, plain JAX, the kernels interpreted, lowered without a GPU and as they are on one,
and what the entry refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import decode_triton, device
from pallas_kernels.decode import paged_decode_attention
from pallas_kernels.decode_triton import DecodeConfig
from pallas_kernels.triton import _compat
from tests.gpu_lowering import A100, AMPERE_SHARED, H200, launches, lower_cuda, resources, triton_modules
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings(f"ignore:{_compat.DEPRECATION}:DeprecationWarning")


@dataclasses.dataclass(frozen=True)
class Shape:
    """config: of the kernels, None: what they choose."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    page: int
    slots: int
    dtype: str
    config: DecodeConfig | None = None


SHAPES = [
    Shape(2, 2, 1, 64, 16, 5, "float32"),
    Shape(1, 3, 3, 64, 16, 40, "bfloat16"),
    Shape(3, 1, 4, 128, 64, 9, "float16"),
    Shape(1, 2, 8, 128, 128, 7, "bfloat16"),
    Shape(1, 2, 17, 64, 32, 30, "float32", DecodeConfig(16, 64, 4, 4, 3)),  # at most 4 runs, so that long rows have longer ones
]


def inputs(shape, used, newest, newest_tokens, seed=0):
    """The arguments of `paged_decode_attention`. Whatever must not be seen is NaN, the pages of unused slots do not exist."""
    rng = np.random.default_rng(seed)
    used, newest, newest_tokens = (np.asarray(x, np.int32) for x in (used, newest, newest_tokens))
    q = rng.standard_normal((shape.batch, shape.kv_heads * shape.group, shape.head_dim))
    q[(used == 0).all(axis=1)] = np.nan
    pages = int(used.sum()) + 3
    pools = np.full((2, pages, shape.page, shape.head_dim), np.nan)
    table = np.full((shape.batch, shape.kv_heads, shape.slots), 2**31 - 1, np.int32)
    free = iter(rng.permutation(pages))
    for b, k in np.ndindex(used.shape):
        for slot in range(used[b, k]):
            tokens = newest_tokens[b] if slot == newest[b, k] else shape.page
            table[b, k, slot] = next(free)
            pools[:, table[b, k, slot], :tokens] = rng.standard_normal((2, tokens, shape.head_dim)) * [[[2.0]], [[1.0]]]
    return *(jnp.asarray(x, shape.dtype) for x in (q, *pools)), *(jnp.asarray(x) for x in (table, used, newest, newest_tokens))


def oracle(q, key_pages, value_pages, table, used, newest, newest_tokens):
    """float64 [B, N, H], a head at a time."""
    q, key_pages, value_pages = (np.asarray(x, np.float64) for x in (q, key_pages, value_pages))
    out = np.zeros(q.shape)
    for b, n in np.ndindex(q.shape[:2]):
        k = n // (q.shape[1] // used.shape[1])
        tokens = [(p, slice(newest_tokens[b] if m == newest[b, k] else None)) for m, p in enumerate(np.asarray(table[b, k, : used[b, k]]))]
        if tokens:
            keys, values = (np.concatenate([x[at] for at in tokens]) for x in (key_pages, value_pages))
            scores = keys @ q[b, n] * q.shape[2] ** -0.5
            p = np.exp(scores - scores.max())
            out[b, n] = p @ values / p.sum()
    return out


def random_rows(shape, data):
    """(used, newest, newest_tokens)"""
    cells = shape.batch * shape.kv_heads
    draw = lambda low, high, n: np.asarray(data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n)))
    used = draw(0, shape.slots, cells)
    newest = draw(0, 2**20, cells) % np.maximum(used, 1)
    return used.reshape(shape.batch, -1), newest.reshape(shape.batch, -1), draw(1, shape.page, shape.batch)


@functools.cache
def implementation(name, shape):
    if name != "triton":
        return jax.jit(functools.partial(paged_decode_attention, implementation=name))

    def interpreted(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            if shape.config:
                patch.setattr(decode_triton, "choose", lambda *_: shape.config)
            return decode_triton.attend(*arguments, scale=shape.head_dim**-0.5, interpret=True)

    return jax.jit(interpreted)


def padded(arguments, pages):
    """With a pool of so many pages, so that examples share a compilation."""
    q, *pools, table, used, newest, newest_tokens = arguments
    grown = (jnp.pad(x, ((0, pages - x.shape[0]), (0, 0), (0, 0)), constant_values=jnp.nan) for x in pools)
    return q, *grown, table, used, newest, newest_tokens


@pytest.mark.parametrize("name", ["reference", "xla", "triton"])
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_agrees_with_the_definition(name, data):
    shape = data.draw(st.sampled_from(SHAPES))
    arguments = inputs(shape, *random_rows(shape, data), seed=data.draw(st.integers(0, 99)))
    out = implementation(name, shape)(*padded(arguments, shape.batch * shape.kv_heads * shape.slots + 3))
    assert out.shape == arguments[0].shape
    assert out.dtype == arguments[0].dtype
    assert_close(out, oracle(*arguments), shape.dtype, "forward")


def rows_of(arguments, index):
    q, key_pages, value_pages, *tables = arguments
    return q[index], key_pages, value_pages, *(x[index] for x in tables)


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def assert_rows_are_independent(f, arguments):
    """Of a batch of at least 2, bit by bit: other rows beside it, unused slots and another batch size change nothing."""
    together = f(*arguments)
    assert_same_bits(f(*arguments), together)
    for b in range(arguments[0].shape[0]):
        assert_same_bits(f(*rows_of(arguments, jnp.full(arguments[0].shape[0], b))), jnp.broadcast_to(together[b], together.shape))
        assert_same_bits(f(*rows_of(arguments, slice(b, b + 1)))[0], together[b])
    for more in (1, 1000):
        q, key_pages, value_pages, table, *rest = arguments
        wider = jnp.pad(table, ((0, 0), (0, 0), (0, more)), constant_values=2**31 - 1)
        assert_same_bits(f(q, key_pages, value_pages, wider, *rest), together)


THREE = Shape(3, 2, 2, 64, 32, 70, "bfloat16")


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_rows_are_independent(name):
    assert_rows_are_independent(
        implementation(name, THREE), inputs(THREE, [[70, 3], [0, 33], [9, 69]], [[69, 1], [0, 7], [2, 60]], [5, 32, 1])
    )


@pytest.mark.parametrize("name", ["reference", "xla", "triton"])
def test_float32_softmax_whatever_the_default_precision(name):
    arguments = inputs(SHAPES[0], [[5, 2], [1, 0]], [[2, 1], [0, 0]], [3, 16])
    with jax.enable_x64(True):
        out = implementation(name, SHAPES[0])(*arguments)
    assert out.dtype == jnp.float32
    assert_close(out, oracle(*arguments), "float32", "forward")


def abstract(shape, pages):
    array, rows = jax.ShapeDtypeStruct, (shape.batch, shape.kv_heads)
    pool = array((pages, shape.page, shape.head_dim), jnp.dtype(shape.dtype))
    q = array((shape.batch, shape.kv_heads * shape.group, shape.head_dim), jnp.dtype(shape.dtype))
    return q, pool, pool, *(array(s, jnp.int32) for s in ((*rows, shape.slots), rows, rows, (shape.batch,)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="rows run one after another on a CPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plain_implementation_needs_little_memory(dtype):
    million = Shape(1, 8, 4, 128, 128, 8192, dtype)
    compiled = jax.jit(functools.partial(paged_decode_attention, implementation="xla")).lower(*abstract(million, 70000)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**20


GOOD = dict(
    zip(
        ("q", "key_pages", "value_pages", "table", "used", "newest", "newest_tokens"),
        inputs(Shape(2, 2, 2, 64, 16, 3, "float32"), [[3, 1], [0, 0]], [[1, 0], [0, 0]], [7, 1]),
    )
)
ROWS = jnp.zeros((2, 2), jnp.int32)
BAD = [
    ({"q": 1.0}, "q is 1.0: accepted are arrays"),
    ({"q": jnp.zeros((2, 4))}, r"q has shape \(2, 4\): accepted are arrays \[B, N, H\]"),
    ({"table": jnp.zeros((2, 2, 0), jnp.int32)}, r"table has shape \(2, 2, 0\): .* none of the axes empty"),
    ({"q": jnp.zeros((2, 4, 64), jnp.int32)}, "q has dtype int32: accepted are bfloat16, float16, float32"),
    (
        {"value_pages": GOOD["value_pages"].astype(jnp.bfloat16)},
        "value_pages has dtype bfloat16: .* the same for q, key_pages and value_pages",
    ),
    ({"used": jnp.zeros((2, 2))}, "used has dtype float32: accepted are integers"),
    ({"key_pages": jnp.zeros((7, 24, 64))}, r"key_pages has shape \(7, 24, 64\): .* page a power of two from 16 to 4096"),
    ({"key_pages": jnp.zeros((7, 16, 32))}, r"key_pages has shape \(7, 16, 32\): .* accepted is \(P, page, 64\)"),
    ({"value_pages": jnp.zeros((8, 16, 64))}, r"value_pages has shape \(8, 16, 64\): accepted is \(7, 16, 64\)"),
    ({"table": jnp.zeros((3, 2, 3), jnp.int32)}, r"table has shape \(3, 2, 3\): .* accepted is \(2, K, M\), K a divisor of 4"),
    ({"table": jnp.zeros((2, 3, 3), jnp.int32)}, r"table has shape \(2, 3, 3\)"),
    ({"used": jnp.zeros((2, 4), jnp.int32)}, r"used has shape \(2, 4\): accepted is \(2, 2\)"),
    ({"newest": jnp.zeros((2,), jnp.int32)}, r"newest has shape \(2,\): accepted is \(2, 2\)"),
    ({"newest_tokens": ROWS}, r"newest_tokens has shape \(2, 2\): accepted is \(2,\)"),
    ({"scale": 0.0}, "scale=0.0: accepted are None and Python numbers above 0"),
    ({"implementation": "mosaic"}, "implementation='mosaic': accepted are None, reference, xla, triton"),
    ({"used": ROWS + 4}, "used holds 4: accepted are 0 to 3"),
    ({"used": ROWS - 1}, "used holds -1: accepted are 0 to 3"),
    ({"table": jnp.full((2, 2, 3), 7)}, "table holds 7 in a used slot: accepted are 0 to 6"),
    ({"newest": ROWS + 1}, "newest holds 1 where used is 1: accepted are 0 to used - 1"),
    ({"newest_tokens": jnp.asarray([17, 1])}, "newest_tokens holds 17: accepted are 1 to 16"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=range(len(BAD)))
def test_refuses_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(**GOOD | changes)


def test_kernels_are_taken_where_they_can_run(monkeypatch):
    q, *rest = abstract(Shape(1, 2, 2, 96, 16, 3, "bfloat16"), 7)
    call = lambda implementation, q=q, rest=rest: jax.eval_shape(
        functools.partial(paged_decode_attention, implementation=implementation), q, *rest
    )
    monkeypatch.setattr(device, "platform", lambda: "cpu")
    with pytest.raises(
        NotImplementedError, match="'triton' needs a CUDA GPU, and this is a cpu; accepted for this call are None, reference"
    ):
        call("triton")
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(device, "compute_capability", lambda: (9, 0))
    with pytest.raises(NotImplementedError, match="'triton' needs H of 64 or 128, and q has 96"):
        call("triton")
    assert call(None).shape == q.shape
    fitting = abstract(SHAPES[1], 7)
    for implementation, kernels in ((None, 2), ("triton", 2), ("xla", 0)):
        program = jax.make_jaxpr(functools.partial(paged_decode_attention, implementation=implementation))(*fitting)
        assert str(program).count("pallas_call") == kernels
    wide, *rest = abstract(Shape(1, 1, 65, 64, 16, 3, "bfloat16"), 7)
    with pytest.raises(NotImplementedError, match="'triton' needs at most 64 query heads per KV head, and these are 65"):
        call("triton", wide, rest)


# Pools of up to 20 GB, where offsets are 64-bit.
LOWERED = {
    "128K": (Shape(1, 8, 4, 128, 128, 1024, "bfloat16"), 40000),
    "1M": (Shape(1, 8, 4, 128, 128, 8192, "bfloat16"), 600000),
    "h64": (Shape(4, 3, 3, 64, 64, 100, "float16"), 1200),
    "pages of 16": (Shape(4, 2, 8, 128, 16, 33, "bfloat16"), 999),
    "large group": (Shape(1, 1, 64, 128, 128, 64, "bfloat16"), 99),
    "float32": (Shape(1, 8, 4, 128, 128, 64, "float32"), 999),
}


def lower(name, kind):
    shape, pages = LOWERED[name]
    return lower_cuda(functools.partial(decode_triton.attend, scale=0.1), *abstract(shape, pages), kind=kind)


@pytest.mark.parametrize("kind", [A100, H200])
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name, kind):
    assert lower(name, kind).as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize(("kind", "target"), [(A100, 80), (H200, 90)])
@pytest.mark.parametrize("name", LOWERED)
def test_fits_every_gpu(name, kind, target, monkeypatch):
    pytest.importorskip("triton.compiler", reason="needs the package triton, which compiles without a GPU")
    with triton_modules(monkeypatch) as modules:
        lowered = lower(name, kind)
    for module, launch in zip(modules, launches(lowered), strict=True):
        shared, spilled = resources(module, target, *launch)
        assert shared <= AMPERE_SHARED or (name == "large group" and target == 90)  # there 112 KiB of Hopper's 227
        assert spilled == 0


def test_more_stages_take_more_shared_memory(monkeypatch):
    """Loads of pages are pipelined although their numbers are read in the loop, and a stage is not spent on the numbers."""
    pytest.importorskip("triton.compiler", reason="needs the package triton, which compiles without a GPU")
    shared = []
    for stages in (2, 3):
        monkeypatch.setattr(decode_triton, "choose", lambda *_, stages=stages: DecodeConfig(64, 256, 256, 4, stages))
        with triton_modules(monkeypatch) as modules:
            lower("128K", A100)
        shared.append(resources(modules[0], 80, 4, stages)[0])
    assert shared[1] - shared[0] == 2 * 64 * 128 * 2, shared


GPU_SHAPES = {
    "ragged": (THREE, [[70, 3], [0, 33], [9, 69]], [[69, 1], [0, 7], [2, 60]], [5, 32, 1]),
    "128K": (Shape(1, 4, 4, 128, 128, 1024, "bfloat16"), [[1024, 1000, 17, 1]], [[1023, 4, 9, 0]], [77]),
    "f16": (Shape(2, 2, 7, 64, 128, 300, "float16"), [[300, 17], [5, 299]], [[299, 2], [4, 0]], [128, 1]),
    "f32": (Shape(2, 2, 2, 128, 64, 40, "float32"), [[40, 17], [5, 39]], [[39, 2], [4, 0]], [64, 1]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_SHAPES)
def test_gpu_agrees_with_the_reference_and_repeats(case):
    shape, *rows = GPU_SHAPES[case]
    arguments = inputs(shape, *rows)
    f = jax.jit(functools.partial(paged_decode_attention, implementation="triton"))
    jnp.full((256, 2**20), jnp.nan).block_until_ready().delete()  # what partial results are then likely to be made of
    out = f(*arguments)
    assert_close(out, paged_decode_attention(*arguments, implementation="reference"), shape.dtype, "forward")
    assert_same_bits(f(*arguments), out)


@pytest.mark.gpu
def test_gpu_rows_are_independent():
    shape, *rows = GPU_SHAPES["ragged"]
    assert_rows_are_independent(jax.jit(functools.partial(paged_decode_attention, implementation="triton")), inputs(shape, *rows))
