"""Packing: what every pack must satisfy, and random access to the stream of packs."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.data.batch import PackedBatch
from elastic_jax.data.dataset import PackedDataset
from elastic_jax.data.documents import Document, Documents
from elastic_jax.data.packing import fill_pack, permutation, plan_packs
from elastic_jax.data.rows import Reason, RejectionReport
from elastic_jax.data.tasks import TaskClass
from tests.data_helpers import make_document


@st.composite
def document_sets(draw):
    block = draw(st.sampled_from([1, 4, 16]))
    pack = block * draw(st.integers(1, 12))
    documents = [
        make_document(n, seed=i, task=TaskClass(i % 5), id=str(i), masked=i % 3)
        for i, n in enumerate(draw(st.lists(st.integers(1, pack), max_size=40)))
    ]
    return documents, block, pack


def check_pack(pack: PackedBatch, members: list[Document], block: int, loss_on: str) -> None:
    """Every statement of `PackedBatch`'s docstring, checked the slow way."""
    size, start = pack.tokens.size, 0
    for number, document in enumerate(members):
        n = len(document.tokens)
        blocks = -(-n // block)
        assert start % block == 0
        here = slice(start, start + n)
        assert np.array_equal(pack.tokens[here], document.tokens)
        assert np.array_equal(pack.positions[here], np.arange(n))
        for t in range(n):
            has_next = t + 1 < n
            assert pack.targets[start + t] == (document.tokens[t + 1] if has_next else 0)
            in_answer = document.answer[0] <= t + 1 < document.answer[1]
            counts = has_next and document.labelled[t + 1] and (loss_on == "all" or in_answer)
            assert pack.loss_weights[start + t] == float(counts)
        own = slice(start // block, start // block + blocks)
        assert (pack.document[own] == number).all()
        assert (pack.first_block[own] == start // block).all()
        assert pack.task[number] == document.task
        assert pack.span[number].tolist() == [start, start + n]
        assert pack.user_turn[number].tolist() == [start + document.user_turn[0], start + document.user_turn[1]]
        padding = slice(start + n, start + blocks * block)
        assert not pack.tokens[padding].any()
        assert not pack.loss_weights[padding].any()
        start += blocks * block
    assert start <= size
    assert not pack.tokens[start:].any()
    assert not pack.loss_weights[start:].any()
    assert (pack.document[start // block :] == -1).all()
    assert np.array_equal(pack.first_block[start // block :], np.arange(start // block, size // block))
    assert (pack.task[len(members) :] == -1).all()
    assert not pack.span[len(members) :].any()
    assert not pack.user_turn[len(members) :].any()


@settings(max_examples=60, deadline=None)
@given(document_sets(), st.integers(1, 6), st.integers(0, 3), st.sampled_from(["all", "answer"]))
def test_packs_hold_every_document_once_and_whole(case, max_documents, seed, loss_on):
    documents, block, size = case
    lengths = np.array([len(d.tokens) for d in documents], np.int64)
    plan = plan_packs(lengths, pack_tokens=size, block_size=block, max_documents=max_documents, seed=seed)
    assert sorted(i for members in plan for i in members) == list(range(len(documents)))
    for number, indices in enumerate(plan):
        assert 1 <= len(indices) <= max_documents
        members = [documents[i] for i in indices]
        pack = fill_pack(members, pack_tokens=size, block_size=block, max_documents=max_documents, loss_on=loss_on, index=number)
        assert pack.index == number
        check_pack(pack, members, block, loss_on)


def test_shapes_and_types_are_those_of_packed_batch():
    pack = fill_pack([make_document(9)], pack_tokens=32, block_size=8, max_documents=3, loss_on="all", index=5)
    expected = {
        "tokens": ((32,), np.int32),
        "targets": ((32,), np.int32),
        "loss_weights": ((32,), np.float32),
        "positions": ((32,), np.int32),
        "document": ((4,), np.int32),
        "first_block": ((4,), np.int32),
        "task": ((3,), np.int32),
        "span": ((3, 2), np.int32),
        "user_turn": ((3, 2), np.int32),
        "index": ((), np.int32),
    }
    found = {field.name: getattr(pack, field.name) for field in dataclasses.fields(pack)}
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == expected


def test_gaps_are_filled_by_later_short_documents():
    lengths = np.array([48] * 20 + [16] * 20)
    plan = plan_packs(lengths, pack_tokens=64, block_size=16, max_documents=4, seed=0)
    assert len(plan) <= 22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack_tokens": 60}, "multiple of block_size=16"),
        ({"pack_tokens": 0}, "multiple of block_size=16"),
        ({"max_documents": 0}, "max_documents=0"),
        ({"pack_tokens": 32}, "document 1 has 40 tokens"),
    ],
)
def test_bad_sizes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        plan_packs(np.array([8, 40]), **{"pack_tokens": 64, "block_size": 16, "max_documents": 2, "seed": 0} | change)


def test_fill_pack_refuses_what_does_not_fit():
    sizes = {"pack_tokens": 32, "block_size": 16, "max_documents": 2, "loss_on": "all"}
    with pytest.raises(ValueError, match="at most max_documents=2"):
        fill_pack([make_document(3)] * 3, **sizes)
    with pytest.raises(ValueError, match="document 'd' of 17 tokens"):
        fill_pack([make_document(16), make_document(17)], **sizes)


def test_permutation_is_frozen():
    assert permutation(8, 3, 1).tolist() == permutation(8, 3, 1).tolist()
    assert permutation(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]  # a change breaks resuming of old runs


def make_dataset(seed: int = 0, **options) -> PackedDataset:
    documents = [make_document(5 + 7 * i % 40, seed=i, task=TaskClass(i % 4), id=str(i)) for i in range(30)]
    report = RejectionReport()
    report.kept = len(documents)
    sizes = {"pack_tokens": 64, "block_size": 16, "max_documents": 3} | options
    return PackedDataset(Documents(documents, report), seed=seed, **sizes)


def same(a: PackedBatch, b: PackedBatch) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_any_pack_can_be_read_directly():
    stream, other = make_dataset(), make_dataset()
    packs = [stream.pack(i) for i in range(3 * len(stream))]
    for i in reversed(range(len(packs))):
        assert same(packs[i], other.pack(i))
        assert packs[i].index == i
    with pytest.raises(ValueError, match="index=-1"):
        stream.pack(-1)


def test_each_epoch_has_all_packs_in_another_order():
    data = make_dataset()
    epochs = [[data.pack(e * len(data) + i).tokens.tobytes() for i in range(len(data))] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(set(epochs[0])) == len(data)


def test_seed_changes_the_packs():
    assert not same(make_dataset(0).pack(0), make_dataset(1).pack(0))
    assert same(make_dataset(1).pack(0), make_dataset(1).pack(0))


def test_batches_follow_each_other():
    data = make_dataset()
    for step in range(2):
        batch = data.batch(step, (2, 3))
        assert batch.tokens.shape == (2, 3, 64)
        assert batch.user_turn.shape == (2, 3, 3, 2)
        assert batch.index.tolist() == [[6 * step + 3 * a + b for b in range(3)] for a in range(2)]
        assert np.array_equal(batch.tokens[1, 2], data.pack(6 * step + 5).tokens)


def test_fill_is_the_share_of_document_tokens():
    data = make_dataset()
    packs = [data.pack(i) for i in range(len(data))]
    used = sum(int((pack.tokens != 0).sum()) for pack in packs)
    assert data.fill == pytest.approx(used / (64 * len(data)))


def test_documents_are_a_list_and_know_their_classes():
    documents = make_dataset().documents
    assert len(documents) == 30
    assert documents[-1].id == documents[29].id == "29"
    assert [d.id for d in documents[2:5]] == ["2", "3", "4"]
    assert np.array_equal(documents[7].tokens, make_document(5 + 7 * 7 % 40, seed=7).tokens)
    assert documents[7].user_turn == (0, documents[7].answer[0])
    assert make_dataset().num_documents == make_dataset().report.kept == 30
    assert make_dataset().class_counts == documents.class_counts == dict(zip(TaskClass, [8, 8, 7, 7, 0]))
    assert documents.lengths.tolist() == [len(d.tokens) for d in documents]
    with pytest.raises(IndexError):
        documents[30]


def test_nothing_left_shows_the_report():
    report = RejectionReport()
    report.reject(Reason.TOO_LONG, "only")
    with pytest.raises(ValueError, match=r"none is left(.|\n)*too long +1 +only"):
        PackedDataset(Documents([], report), pack_tokens=64, block_size=16, max_documents=3, seed=0)
