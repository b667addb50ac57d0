"""Generation as a user calls it, on a tiny model with a byte tokenizer: text, plans, streams, conversations, refusals."""

import concurrent.futures
import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from elastic_jax import decoding
from elastic_jax.checkpoints import RunDirectory
from elastic_jax.elastic import ElasticModel, split_layers
from elastic_jax.generate import EncodedPrompt, Generator
from elastic_jax.models.decoder import Decoder
from elastic_jax.text_stream import TextStream
from elastic_jax.trainer import TrainConfig, init_state
from elastic_jax.weights.safetensors import save_safetensors
from tests.tiny import BLOCK, SPARSITY, lively_model, tiny_config

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)
EOS, START, END = 256, 257, 258
# Tests share few shapes, since each is compiled: 128 padded tokens, rows of 12 slots, pools of one size.
LONG = "A text of more than one window: streaming heads have lost its middle when the answer begins. OK"
NEW = 40
POOL_PAGES = 200
POOL_GIB = POOL_PAGES * 2 * BLOCK * 16 * 4 / 2**30


def byte_tokenizer():
    """Token n is byte n; the byte-level code shows printable bytes as themselves and the others as characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(other)}
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], chat_template=TEMPLATE)


TOKENIZER = byte_tokenizer()


@functools.cache
def generator(router=True, setting="fa_ssa", cache_gib=POOL_GIB, stop_tokens=()):
    model, backbone, routers = lively_model(changes={"vocab_size": VOCABULARY}, sparsity=dataclasses.replace(SPARSITY, setting=setting))
    return Generator(model, split_layers(backbone), routers if router else None, TOKENIZER, cache_gib=cache_gib, stop_tokens=stop_tokens)


def user(text):
    return [{"role": "user", "content": text}]


def stop_after(completion, count):
    """A token that ends this completion no earlier than after `count` tokens, and where it does."""
    tokens = completion.tokens.tolist()
    at = next(i for i in range(count, len(tokens)) if tokens.index(tokens[i]) == i)
    return tokens[at], at


def test_what_comes_back():
    model = generator()
    result = model.generate([LONG, user(LONG)], max_new_tokens=NEW, stop=[])
    for completion, prompt in zip(result.completions, (LONG, f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n")):
        assert completion.text == model.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        assert completion.prompt_tokens == len(model.tokenizer(prompt)["input_ids"])
        assert (completion.new_tokens, completion.finish_reason) == (NEW, "length")
        assert completion.is_full.shape == (3, 2)
        assert 0 < completion.msr < 1
        assert 0 < completion.esr < completion.msr
    timings = result.timings
    assert timings.steps == NEW - 1
    assert timings.ms_per_token == pytest.approx(1e3 * timings.decode_seconds / (NEW - 1))
    blocks = [-(-(completion.prompt_tokens + NEW) // BLOCK) for completion in result.completions]
    full = [int(completion.is_full.sum()) for completion in result.completions]
    assert timings.cache_pages == sum(f * b + (6 - f) * 3 for f, b in zip(full, blocks))
    assert timings.cache_mib == timings.cache_pages * 2 * BLOCK * 16 * 4 / 2**20
    assert timings.dense_cache_mib == 6 * sum(blocks) * 2 * BLOCK * 16 * 4 / 2**20
    assert model.generate([LONG], max_new_tokens=1, stop=[]).timings.steps == 0


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa", "xa_ssa"])
def test_a_batch_gives_each_prompt_its_own_text(setting):
    model = generator(setting=setting)
    prompts = {7: "a", 8: user("short"), 9: LONG}
    options = {"max_new_tokens": NEW, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
    run = lambda *seeds: model.generate([prompts[s] for s in seeds], seeds=seeds, **options).completions
    expected = dict(zip((9, 7), run(9, 7)))
    batches = [(8, 9), (7, 9)] + [(9,)] * (setting == "fa_ssa")
    for seeds in batches:
        for seed, completion in zip(seeds, run(*seeds)):
            if seed in expected:
                assert completion.text == expected[seed].text
                np.testing.assert_array_equal(completion.tokens, expected[seed].tokens)
                np.testing.assert_array_equal(completion.is_full, expected[seed].is_full)
                assert completion.esr == pytest.approx(expected[seed].esr, abs=1e-6)
    twice = model.generate([LONG, LONG], **options).completions
    assert twice[0].text != twice[1].text  # seeds differ
    assert expected[9].is_full.any()
    assert not expected[9].is_full.all()


def test_plans_of_ones_own():
    model = generator()
    run = lambda **options: model.generate([LONG, "b"], max_new_tokens=NEW, stop=[], **options)
    dense, sparse, routed = run(heads="full"), run(heads="sparse"), run()
    assert [c.msr for c in dense.completions] == [0, 0]
    assert [c.esr for c in dense.completions] == [0, 0]
    assert [c.msr for c in sparse.completions] == [1, 1]
    assert dense.timings.cache_pages > routed.timings.cache_pages > sparse.timings.cache_pages
    assert dense.timings.cache_mib == dense.timings.dense_cache_mib
    texts = lambda result: [c.tokens.tolist() for c in result.completions]
    assert texts(run(logit_bias=np.inf)) == texts(dense)
    assert texts(run(logit_bias=-np.inf)) == texts(sparse)
    assert texts(run(heads=np.stack([c.is_full for c in routed.completions]))) == texts(routed)
    assert texts(run(heads=np.ones((3, 2)))) == texts(dense)
    assert texts(dense)[0] != texts(sparse)[0]
    assert texts(dense)[1] == texts(sparse)[1]  # all within the window


def test_stop_tokens():
    model = generator()
    free = model.generate([LONG, "b"], max_new_tokens=NEW, stop=[]).completions
    token, at = stop_after(free[0], 4)
    for stop in ([token], [EOS, token]):
        stopped, other = model.generate([LONG, "b"], max_new_tokens=NEW, stop=stop).completions
        np.testing.assert_array_equal(stopped.tokens, free[0].tokens[: at + 1])
        assert stopped.finish_reason == "stop"
        assert stopped.text == model.tokenizer.decode(free[0].tokens[:at], skip_special_tokens=True)
        assert token not in free[1].tokens
        np.testing.assert_array_equal(other.tokens, free[1].tokens)


def test_fewest_new_tokens():
    """Until then the stop token is the one thing that is not chosen."""
    model = generator()
    free = model.generate([LONG, "b"], max_new_tokens=NEW, stop=[]).completions
    token, at = stop_after(free[0], 4)
    for fewest in (at, at + 1, at + 4):
        first, other = model.generate([LONG, "b"], max_new_tokens=NEW, stop=[token], min_new_tokens=fewest).completions
        np.testing.assert_array_equal(first.tokens[:at], free[0].tokens[:at])
        assert (first.tokens[at] == token) == (fewest == at)
        assert token not in first.tokens[:fewest]
        np.testing.assert_array_equal(other.tokens, free[1].tokens)
    even = range(0, 256, 2)
    with model.chat(reroute=False) as chat:  # counted from where the answer of a turn begins
        for text in (LONG, "?"):
            answer = chat.send(text, max_new_tokens=NEW, stop=even, min_new_tokens=5, temperature=1.0)
            assert len(answer.tokens) > 5
            assert not np.isin(answer.tokens[:5], even).any()


def test_a_stop_given_as_text_ends_a_text():
    model = generator()
    free = model.generate([LONG], max_new_tokens=NEW, stop=[], temperature=1.0).completions[0]
    at = next(i for i, token in enumerate(free.tokens) if 32 < token < 127 and token not in free.tokens[:i])
    stopped = model.generate([LONG], max_new_tokens=NEW, stop=[chr(free.tokens[at])], temperature=1.0).completions[0]
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: at + 1])
    assert stopped.finish_reason == "stop"


def test_default_stop_tokens():
    model = generator(stop_tokens=(65,))
    stops = model.request([True, False], max_new_tokens=1).stops
    assert [sorted(set(row) - {-1}) for row in stops.tolist()] == [[65, EOS], [65, EOS, END]]
    assert model._stops(["<|im_end|>", "A", 3], True) == [END, model.tokenizer("A")["input_ids"][0], 3]


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=60) | st.binary(max_size=90),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    special=st.lists(st.integers(0, 60), max_size=3),
)
def test_pieces_of_a_stream_are_whole_characters(text, cuts, special):
    tokenizer = TOKENIZER
    tokens = list(text if isinstance(text, bytes) else text.encode("utf-8"))
    for place in special:
        tokens.insert(min(place, len(tokens)), END)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    stream, pieces, start = TextStream(tokenizer), [], 0
    for cut in [*cuts, len(tokens)]:
        pieces.append(stream.push(tokens[start : start + cut]))
        start += cut
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + stream.flush() == whole
    if isinstance(text, str):
        assert whole == text


def byte_fallback_tokenizer():
    """As Llama 2's: bytes are tokens, and what decodes them checks the bytes that follow each other as a whole."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


FALLBACK = byte_fallback_tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text("abcé漢字😀", min_size=1, max_size=60), st.integers(1, 128))
def test_pieces_of_a_stream_with_byte_fallback(text, at_once):
    tokens = list(text.encode("utf-8"))
    stream = TextStream(FALLBACK)
    pieces = [stream.push(tokens[i : i + at_once]) for i in range(0, len(tokens), at_once)]
    assert "".join([*pieces, stream.flush()]) == text


def test_a_call_that_fails_with_the_pages_loses_them_for_all(monkeypatch):
    model = generator(cache_gib=POOL_GIB)
    texts = lambda: [c.text for c in model.generate(["a", LONG], max_new_tokens=NEW).completions]
    expected = texts()
    with model.chat(reroute=False) as chat:
        chat.send("x", max_new_tokens=4)

        def fail(model, backbones, pages, *rest):
            jax.tree.map(lambda x: x.delete(), pages)
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(decoding, "_run", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                model.generate(["a"], max_new_tokens=NEW)
        assert texts() == expected
        with pytest.raises(ValueError, match="the pages of this cache were lost"):
            chat.send("y", max_new_tokens=4)
    assert model._pool.num_free == model._pool.num_pages


def test_streamed_text_is_the_text():
    model = generator()
    pieces = {0: [], 1: []}
    prompts, options = [LONG, "b"], {"max_new_tokens": NEW, "temperature": 1.5, "seeds": [3, 4]}
    result = model.generate(prompts, on_text=lambda index, text: pieces[index].append(text), **options)
    silent = model.generate(prompts, **options)
    for index, completion in enumerate(result.completions):
        assert "".join(pieces[index]) == completion.text == silent.completions[index].text
        assert len(pieces[index]) > 3
        assert all(pieces[index])


def test_a_conversation_decides_anew_at_each_turn():
    model = generator()
    chat = model.chat(system="Be brief.")
    options = {"max_new_tokens": 15, "stop": ["<|im_end|>"]}
    first, second = chat.send(LONG, **options), chat.send("And?", **options)
    history = [{"role": "system", "content": "Be brief."}, *user(LONG), {"role": "assistant", "content": first.text}, *user("And?")]
    (again,) = model.generate([history], **options).completions
    assert again.text == second.text
    np.testing.assert_array_equal(again.is_full, second.is_full)
    assert chat.messages == [*history, {"role": "assistant", "content": second.text}]
    assert chat.timings.steps <= 14
    assert second.prompt_tokens > first.prompt_tokens + first.new_tokens
    assert chat.send("Go on", heads="sparse", **options).msr == 1


@pytest.mark.parametrize(("stops", "own_pool"), [(False, False), (True, False), (False, True)])
def test_a_conversation_that_keeps_its_cache_runs_new_tokens_only(stops, own_pool):
    """Every answer is that of one prefill of all tokens so far under the first turn's plan. A pool of its own grows."""
    shared = generator()
    model = generator(cache_gib=None) if own_pool else shared
    free = shared.generate([user(LONG)], max_new_tokens=15, stop=[]).completions[0]
    stop = [stop_after(free, 3)[0]] if stops else []
    with model.chat(reroute=False) as chat:
        tokens, plan = shared.encode([user(LONG)])[0][0], free.is_full
        for number, text in enumerate((LONG, "?", "\u00e9")[: 2 if own_pool else 3]):
            completion = chat.send(text, max_new_tokens=15, stop=stop)
            if number:
                assert completion.esr is None
                header = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
                tokens = np.concatenate([tokens, TOKENIZER(header)["input_ids"]])
            np.testing.assert_array_equal(completion.is_full, plan)
            assert completion.prompt_tokens == tokens.size
            np.testing.assert_array_equal(completion.tokens, continued(shared, tokens, plan, stop))
            answer = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
            tokens = np.concatenate([tokens, answer])
    with pytest.raises(ValueError, match="closed and its cache freed"):
        chat.send("x", max_new_tokens=1)
    assert shared._pool.num_free == POOL_PAGES


def continued(model, tokens, plan, stop):
    """What follows tokens under a given plan, from one prefill."""
    request = model.request([True], max_new_tokens=15, stop=stop, heads=plan)
    cache = model.open_cache([tokens.size], request)
    logits = model.prefill([(tokens, (0, 1))], cache, request).logits
    result = model.decode(cache, logits, request, plan[:, None], [None], 0.0).completions[0].tokens
    cache.free()
    return result


def test_a_kept_cache_refuses_heads_whose_keys_are_gone():
    model = generator()
    options = {"max_new_tokens": 5, "stop": []}
    with model.chat(reroute=False) as chat:
        chat.send(LONG, heads="sparse", **options)
        messages = list(chat.messages)
        with pytest.raises(ValueError, match="would keep every key again.*reroute=True"):
            chat.send("x", heads="full", **options)
        assert chat.messages == messages
        assert chat.send("x", **options).msr == 1
    with model.chat(reroute=False) as chat:
        assert chat.send("x", heads="sparse", **options).msr == 1
        assert chat.send("y", heads="full", **options).msr == 0  # all keys are still there
        assert chat.send(LONG, heads=np.zeros((3, 2)), **options).msr == 1
        with pytest.raises(ValueError, match="later turn of reroute=False keeps the plan"):
            chat.send("x", logit_bias=1.0, **options)

    def fail(index, text):
        raise RuntimeError("no")

    chat = model.chat(reroute=False)
    with pytest.raises(RuntimeError, match="no"):
        chat.send("x", on_text=fail, **options)
    chat.send("x", **options)
    with pytest.raises(RuntimeError, match="no"):
        chat.send("x", on_text=fail, **options)
    with pytest.raises(ValueError, match="closed"):
        chat.send("x", **options)


def test_a_shared_pool_that_is_used_up_says_what_would_do():
    model, options = generator(), {"max_new_tokens": NEW, "stop": []}
    other = model.open_cache([400], model.request([True], max_new_tokens=16, heads="full"))
    for layer in range(3):
        other.allocate(layer, np.zeros((1, 2), bool))
    used, needed = 6 * 26, 6 * -(-(len(LONG) + NEW) // BLOCK)
    assert model._pool.num_free == POOL_PAGES - used < needed
    for plan in ({"heads": "full"}, {"logit_bias": np.inf}):
        with pytest.raises(ValueError, match=rf"pool has {POOL_PAGES} pages .* are needed now: .* would do") as error:
            model.generate([LONG], **plan, **options)
        gib = float(str(error.value).split("now: ")[1].split(" GiB")[0])
        assert gib * POOL_PAGES / POOL_GIB == pytest.approx(used + needed, rel=0.01)
        assert model._pool.num_free == POOL_PAGES - used
    chat = model.chat(reroute=False)
    options["max_new_tokens"] = 5
    chat.send("x", heads="sparse", **options)
    other.free()
    other = model.open_cache([430], model.request([True], max_new_tokens=50, heads="full"))
    for layer in range(3):
        other.allocate(layer, np.zeros((1, 2), bool))
    with pytest.raises(ValueError, match="would do"):
        chat.send(LONG, heads="full", **options)
    other.free()
    assert chat.send(LONG, **options).msr == 1
    chat.close()
    assert model._pool.num_free == POOL_PAGES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": "text"}, "accepted is a list of texts and chats"),
        ({"prompts": user("text")}, "accepted is a list of texts and chats"),
        ({"prompts": []}, "at least one"),
        ({"prompts": ["a", ""]}, r"prompts\[1\]='' is empty"),
        ({"prompts": [[]]}, r"prompts\[0\]=\[\]: accepted is a text, or a list"),
        ({"prompts": [[{"role": "robot", "content": "x"}]]}, "roles system, user, assistant"),
        ({"prompts": [[{"role": "user", "content": None}]]}, "texts as content"),
        ({"prompts": [[*user("x"), {"role": "assistant", "content": "y"}]]}, "the last one must be the user's"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: a whole number from 1"),
        ({"prompts": ["a" * 500], "max_new_tokens": 13}, r"500 tokens, with max_new_tokens=13 513: the model has 512.*yarn_factor=2"),
        ({"prompts": ["a" * 5000]}, "yarn_factor=10"),
        ({"min_new_tokens": 3}, "min_new_tokens=3: a whole number from 0 to 2 is needed"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0: a number from 1e-09 to 1 is needed"),
        ({"seeds": [1, 2]}, r"seeds=\[1, 2\]: accepted are 1 whole numbers"),
        ({"seeds": [-1]}, "seeds"),
        ({"stop": ["two"]}, "stop: 'two' is 3 tokens"),
        ({"stop": [""]}, "stop: '' is 0 tokens"),
        ({"stop": [VOCABULARY]}, f"stop: {VOCABULARY} is no token: accepted are ids from 0 to {VOCABULARY - 1}"),
        ({"stop": "x"}, "accepted is a list of token ids"),
        ({"heads": "half"}, "heads='half'"),
        ({"heads": np.ones((2, 2))}, r"heads has shape \(2, 2\)"),
        ({"heads": np.full((3, 2), 0.5)}, "0 and 1 of shape"),
        ({"heads": np.ones((3, 2)) * 1j}, "0 and 1 of shape"),
        ({"heads": [["1", "0"]] * 3}, "0 and 1 of shape"),
        ({"prompts": None}, "accepted is a list of texts and chats"),
        ({"prompts": (text for text in "x")}, "accepted is a list of texts and chats"),
        ({"prompts": EncodedPrompt(np.array([1]), (0, 1))}, "accepted is a list of texts and chats"),
        ({"prompts": ["\ud800x"]}, r"prompts\[0\] is not valid UTF-8 \(half of a surrogate pair at character 0\)"),
        ({"prompts": [user("x\ud800")]}, "half of a surrogate pair at character 1"),
        ({"stop": ["\ud800"]}, "stop is not valid UTF-8"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_p": "1"}, "top_p='1'"),
        ({"logit_bias": None}, "logit_bias=None"),
        ({"logit_bias": float("nan")}, "logit_bias=nan"),
        ({"logit_bias": 1.0, "heads": "full"}, "none where heads are given"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        generator().generate(**({"prompts": ["x"], "max_new_tokens": 2} | changes))


@pytest.mark.parametrize(
    ("tokens", "turn", "message"),
    [
        ([-1, 2], (0, 2), f"tokens from -1 to 2: the model's are 0 to {VOCABULARY - 1}"),
        ([1, VOCABULARY], (0, 2), f"tokens from 1 to {VOCABULARY}"),
        ([1.9, 2], (0, 2), "type float64: accepted are whole numbers"),
        ([True], (0, 1), "type bool"),
        ([[1, 2]], (0, 2), r"shape \(1, 2\)"),
        ([], (0, 0), r"shape \(0,\)"),
        ("ab", (0, 2), "accepted are whole numbers"),
        ([1, 2], (1, 1), r"user_turn=\(1, 1\): a range within its 2 tokens"),
        ([1, 2], (0, 1, 2), "user_turn"),
        ([1, 2], None, "user_turn=None"),
    ],
)
def test_refuses_what_are_no_tokens(tokens, turn, message):
    with pytest.raises(ValueError, match=message):
        generator().generate([EncodedPrompt(tokens, turn)], max_new_tokens=2)


def test_threads_that_share_a_pool_wait_for_each_other():
    model = generator(cache_gib=POOL_GIB)
    prompts = ["a", "bc", LONG, "d" * 60]
    answer = lambda prompt: model.generate([prompt], max_new_tokens=NEW, stop=[]).completions[0].text
    expected = [answer(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answer, prompts * 4)) == expected * 4
    nested = []
    model.generate(["a"], max_new_tokens=NEW, stop=[], on_text=lambda *_: nested.append(answer("bc")))
    assert set(nested) == {expected[1]}


def test_damaged_weights_give_no_text():
    model = copy.copy(generator())
    model.backbones = tuple(jax.tree.map(lambda x: x * np.nan, backbone) for backbone in model.backbones)
    with pytest.raises(ValueError, match="the logits of sequence 0 are not finite"):
        model.generate(["a"], max_new_tokens=2)
    assert model._pool.num_free == POOL_PAGES


def test_refuses_what_the_model_lacks():
    with pytest.raises(ValueError, match="this model has no router, so a plan must be given"):
        generator(router=False).generate(["x"], max_new_tokens=2)
    assert generator(router=False).generate([LONG], max_new_tokens=NEW, heads="full").completions[0].msr == 0
    for size in (1e-9, 1e12, "1", float("nan")):
        with pytest.raises(ValueError, match=f"cache_gib={size!r}: a number from 1.90735e-06 to 2048 is needed"):
            generator(cache_gib=size)
    model, backbone, routers = lively_model(changes={"vocab_size": VOCABULARY}, sparsity=SPARSITY)
    model = Generator(model, split_layers(backbone), routers, PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer))
    with pytest.raises(ValueError, match="has no chat_template"):
        model.generate([user("x")], max_new_tokens=2)


def test_from_a_folder_with_the_router_of_a_run(tmp_path):
    from flax import nnx

    config = tiny_config(vocab_size=VOCABULARY)
    decoder = Decoder(config, rngs=nnx.Rngs(params=0), param_dtype=jnp.float32)
    save_safetensors(decoder, tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    sparsity = SPARSITY
    model, backbone = ElasticModel.create(decoder, config, sparsity=sparsity)
    state = init_state(model, TrainConfig(seed=3))
    names = {field.name: getattr(sparsity, field.name) for field in dataclasses.fields(sparsity)}
    with RunDirectory(tmp_path / "run", keep=1) as run:
        run.claim(names | {"router_width": 4, "pooling": "boundary", "yarn_factor": None})
        with pytest.raises(ValueError, match="holds no checkpoint yet"):
            ElasticModel.from_pretrained(tmp_path / "model", router=tmp_path / "run")
        run.save(state)
    loaded = ElasticModel.from_pretrained(tmp_path / "model", router=tmp_path / "run", cache_gib=POOL_GIB)
    assert loaded.model.sparsity == sparsity
    assert loaded._stop_tokens == {3, 4, EOS}
    jax.tree.map(np.testing.assert_array_equal, loaded.router, state.trainable["router"])
    by_hand = Generator(model, split_layers(backbone), state.trainable["router"], TOKENIZER, stop_tokens=[3, 4], cache_gib=POOL_GIB)
    prompts = [user(LONG), "b"]
    for one, two in zip(*(m.generate(prompts, max_new_tokens=NEW).completions for m in (loaded, by_hand))):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.is_full, two.is_full)
    wide = ElasticModel.from_pretrained(tmp_path / "model", yarn_factor=4, sparsity=dataclasses.replace(SPARSITY, sink_tokens=99))
    assert (wide.model.config.max_positions, wide.model.sparsity.sink_blocks, wide.router) == (2048, 7, None)
    wide.check_length([2000], 48)
    other = Decoder(tiny_config(vocab_size=VOCABULARY, num_layers=2), rngs=nnx.Rngs(params=0), param_dtype=jnp.float32)
    save_safetensors(other, tmp_path / "model")
    with pytest.raises(ValueError, match="holds routers of another model"):
        ElasticModel.from_pretrained(tmp_path / "model", router=tmp_path / "run")
