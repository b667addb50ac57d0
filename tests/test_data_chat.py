"""Rows to tokens: text, template, ranges, faults, threads."""

import dataclasses
import json

import numpy as np
import pytest

from elastic_jax.data.chat import ChatEncoder, tokenize_rows, user_text
from elastic_jax.data.rows import Reason, RejectionReport, Row
from elastic_jax.data.tasks import TaskClass
from tests.data_helpers import CHATML, byte_tokenizer

ROW = Row(context="\ufeffThe sky is blue. \n", question="\n Which colour?", answer="blue", task=TaskClass.SINGLE_QA, id="r")
THINKING = CHATML.replace("assistant\n", "assistant\n{% if not enable_thinking %}<think></think>{% endif %}").replace(
    "{{ message.content }}", "{% if message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}"
)


def test_question_goes_after_or_before_the_context():
    assert user_text(ROW) == "\nThe sky is blue.\n\nWhich colour?"
    assert user_text(dataclasses.replace(ROW, is_prefix=True)) == "\nWhich colour?\n\nThe sky is blue."


@pytest.mark.parametrize("task", list(TaskClass))
def test_summaries_and_code_bring_an_instruction(task):
    text = user_text(dataclasses.replace(ROW, task=task))
    assert text.startswith("\n") == (task not in (TaskClass.SUMMARIZATION, TaskClass.CODE))
    assert text.endswith("Summary:") == (task is TaskClass.SUMMARIZATION)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_ranges_are_those_of_the_rendered_conversation(template):
    tokenizer = byte_tokenizer(template)
    document = ChatEncoder(tokenizer).encode(ROW)
    decode = lambda start, end: tokenizer.decode(document.tokens[start:end])
    assert decode(*document.user_turn) == "<|turn|>user\n\nThe sky is blue.\n\nWhich colour?<|end|>\n"
    header = "<|turn|>assistant\n" + "<think></think>" * (template == THINKING)
    assert decode(document.user_turn[1], document.answer[0]) == header
    assert decode(*document.answer) == "blue<|end|>"
    # The template goes on with a line break, so the end-of-sequence token is appended after it.
    assert decode(document.answer[1], len(document.tokens)) == "\n<|end|>"
    assert document.labelled.all()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": user_text(ROW)}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert tokenizer.decode(document.tokens[: document.answer[0]]) == prompt


def test_end_of_sequence_is_not_doubled():
    template = CHATML.replace("<|end|>\n", "<|end|>")
    document = ChatEncoder(byte_tokenizer(template)).encode(ROW)
    assert document.answer[1] == len(document.tokens)
    assert np.flatnonzero(document.tokens == 0).tolist() == [document.user_turn[1] - 1, len(document.tokens) - 1]


def test_template_without_end_of_turn_gets_one():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = byte_tokenizer(template)
    document = ChatEncoder(tokenizer).encode(ROW)
    assert tokenizer.decode(document.tokens[slice(*document.answer)]) == "blue\n<|end|>"


def test_an_answer_that_begins_with_a_space_leaves_the_prompt_as_it_is():
    tokenizer = byte_tokenizer()
    document = ChatEncoder(tokenizer).encode(dataclasses.replace(ROW, answer="  return x"))
    merged = tokenizer.convert_tokens_to_ids("ĊĠ")
    assert merged in tokenizer("\n  return x")["input_ids"]
    assert merged not in document.tokens[document.user_turn[1] :]
    assert tokenizer.decode(document.tokens[slice(*document.answer)]) == "  return x<|end|>"


def test_a_template_that_rewrites_the_past_is_refused():
    template = "{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match="row 'r': the chat template"):
        ChatEncoder(byte_tokenizer(template)).encode(ROW)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ nobody.name }}", "UndefinedError: 'nobody' is undefined"),
        ("{{ 1 + 'x' }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_named_as_the_cause(template, reason):
    with pytest.raises(ValueError, match=rf"the tokenizer's chat template cannot be used \({reason}"):
        ChatEncoder(byte_tokenizer(template)).encode_prompt([{"role": "user", "content": "x"}])


def test_lone_surrogates_are_refused():
    encoder, messages = ChatEncoder(byte_tokenizer()), [{"role": "user", "content": json.loads('"half \\ud83d"')}]
    for encode in (encoder.encode_prompt, encoder.text_range):
        with pytest.raises(ValueError, match="the conversation is not valid UTF-8"):
            encode(messages)


def test_tokenizer_without_template_is_refused():
    with pytest.raises(ValueError, match="no chat_template"):
        ChatEncoder(byte_tokenizer(None))


def test_a_truncation_stored_with_the_tokenizer_does_not_cut():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    plain = ChatEncoder(byte_tokenizer()).encode(ROW)
    assert np.array_equal(ChatEncoder(tokenizer).encode(ROW).tokens, plain.tokens)


FAULTS = [
    ({"context": " \n"}, Reason.EMPTY_CONTEXT),
    ({"question": ""}, Reason.EMPTY_QUESTION),
    ({"answer": "\t"}, Reason.EMPTY_ANSWER),
    ({"context": json.loads('"half \\ud83d"')}, Reason.BROKEN_UNICODE),
    ({"answer": "caf\ufffd"}, Reason.BROKEN_UNICODE),
    ({"context": "see <|end|> here"}, Reason.SPECIAL_TOKEN),
    ({"context": "long " * 100}, Reason.TOO_LONG),
    ({"context": "x", "question": "y"}, Reason.TOO_SHORT),
]


def test_every_fault_is_counted_under_its_reason():
    rows = [dataclasses.replace(ROW, id=f"bad{i}", **change) for i, (change, _) in enumerate(FAULTS)]
    rows.insert(3, ROW)
    report = RejectionReport()
    length = len(ChatEncoder(byte_tokenizer()).encode(ROW).tokens)
    kept = list(tokenize_rows(rows, byte_tokenizer(), report=report, min_tokens=length, max_tokens=length + 20))
    assert [document.id for document in kept] == ["r"]
    assert report.kept == 1
    assert report.rejected == len(FAULTS)
    for reason in {reason for _, reason in FAULTS}:
        ids = [f"bad{i}" for i, (_, other) in enumerate(FAULTS) if other is reason]
        assert report.counts[reason] == len(ids)
        assert report.examples[reason] == ids
        assert f"{reason}" in str(report)
    assert str(report).splitlines()[0].split() == ["read", "9"]


def test_report_names_only_the_first_few():
    report = RejectionReport()
    for i in range(5):
        report.reject(Reason.TOO_LONG, f"id{i}")
    assert str(report).splitlines()[-1].split(maxsplit=3)[2:] == ["5", "id0, id1, id2, ..."]


@pytest.mark.parametrize("task", [TaskClass.SUMMARIZATION, TaskClass.CODE])
def test_classes_with_an_instruction_need_no_question(task):
    row = dataclasses.replace(ROW, question="", task=task)
    assert len(list(tokenize_rows([row], byte_tokenizer(), report=RejectionReport(), max_tokens=500))) == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_documents_do_not_depend_on_the_number_of_workers(workers):
    rows = [dataclasses.replace(ROW, context=f"word {i} " * (i % 7 + 1), id=str(i)) for i in range(600)]
    one, many = RejectionReport(), RejectionReport()
    expected = list(tokenize_rows(rows, byte_tokenizer(), report=one, max_tokens=100))
    found = list(tokenize_rows(rows, byte_tokenizer(), report=many, max_tokens=100, workers=workers))
    assert [d.id for d in found] == [d.id for d in expected]
    assert all(np.array_equal(a.tokens, b.tokens) and a.answer == b.answer for a, b in zip(found, expected))
    assert str(one) == str(many)
    assert one.counts[Reason.TOO_LONG] > 0
