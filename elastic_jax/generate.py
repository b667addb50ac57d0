"""Generation: prompts or chats in; text, token counts, sparsity and timings out.

    model = ElasticModel.from_pretrained("path/to/model", router="runs/mine")
    answers = model.generate([[{"role": "user", "content": "..."}], "once upon"], max_new_tokens=200)
    print(answers.completions[0].text, answers.completions[0].msr, answers.timings)

The router decides once per prompt, at its end; decoding keeps that plan. Axis letters: L layers, B prompts, K KV heads.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.cache import PagedCache, PagePool, bucket, keeps_ring, page_bytes, pages_needed
from elastic_jax.checks import MAX_INT32, check_chat, check_number, check_text
from elastic_jax.data.chat import ChatEncoder
from elastic_jax.decoding import MAX_STEPS, first_token, generate_tokens
from elastic_jax.elastic import Arrays, ElasticModel, LayerBackbones
from elastic_jax.prefill import Prefilled, prefill
from elastic_jax.replicas import copy_to
from elastic_jax.sampling import Sampling, check_options
from elastic_jax.text_stream import TextStream, decode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from elastic_jax.conversation import Conversation

Chat = Sequence[dict[str, str]]
OnText = Callable[[int, str], None]

_STREAM_STEPS = 8  # steps between two pieces of streamed text
_USABLE = 0.8  # of the device's free memory, for a pool that has no size of its own; the rest is for activations
_POOL_SIZES = 8  # per octave, of pools of a call's own: few shapes to compile, at most a ninth wasted


class EncodedPrompt(NamedTuple):
    """A prompt in tokens. tokens: i32[n]. user_turn: first token and end (exclusive) of what the router pools."""

    tokens: np.ndarray
    user_turn: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt's result.

    Attributes:
      text: of the new tokens, special tokens left out.
      tokens: i32[n], the new tokens, the stop token included.
      prompt_tokens: tokens before them.
      finish_reason: "stop" at a stop token, "length" at max_new_tokens.
      is_full: bool[L, K], the plan: retrieval mode or sparse mode.
      esr: Omega_ESR of the prompt, averaged over layers; None for a turn of a conversation that kept an earlier plan.
    """

    text: str
    tokens: np.ndarray
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    is_full: np.ndarray
    esr: float | None

    @property
    def new_tokens(self) -> int:
        return len(self.tokens)

    @property
    def msr(self) -> float:
        """Omega_MSR: the share of sparse heads."""
        return 1.0 - float(self.is_full.mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Of a whole batch, in wall time; what a call compiles for the first time is in it.

    Attributes:
      prefill_seconds: until the first new token. decode_seconds: of the `steps` steps after it.
      cache_pages, cache_mib: what the plan needed. pool_mib: the pool that gave it. dense_cache_mib: what full heads alone would have.
    """

    prefill_seconds: float
    decode_seconds: float
    steps: int
    cache_pages: int
    cache_mib: float
    pool_mib: float
    dense_cache_mib: float

    @property
    def ms_per_token(self) -> float:
        """Of a step, which makes one token of every sequence; NaN where there was none."""
        return 1e3 * self.decode_seconds / self.steps if self.steps else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """completions: one per prompt, in order."""

    completions: list[Completion]
    timings: Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Checked options of one call for B sequences: see `Generator.request`.

    `sampling.first_stop` is 0: `Generator.decode`, which knows where the prompts end, adds `min_new_tokens`.
    """

    max_new_tokens: int
    min_new_tokens: int
    sampling: Sampling
    stops: np.ndarray  # i32[B, S], -1 where a sequence has fewer
    heads: np.ndarray | None  # f32[L, B, K]
    logit_bias: float
    on_text: OnText | None


class Generator:
    """A model with its weights, routers and tokenizer. Calls from several threads wait for each other.

    Args:
      backbones: from `split_layers`.
      router: the routers' arrays; None: only given plans can be run.
      stop_tokens: that end any text, beside the tokenizer's end of sequence.
      cache_gib: memory of one pool of pages for all calls and conversations, which are refused when it is used up. None: every call
        and conversation has a pool of its own, as large as its plan needs where that is given, else as full heads would need, but no
        more than 80 % of the device's free memory (where the device tells).
    """

    def __init__(
        self,
        model: ElasticModel,
        backbones: LayerBackbones,
        router: Arrays | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_tokens: Sequence[int] = (),
        cache_gib: float | None = None,
    ) -> None:
        self.model, self.backbones, self.router, self.tokenizer = model, backbones, router, tokenizer
        eos: Any = tokenizer.eos_token_id
        self._stop_tokens = {*stop_tokens, *([] if eos is None else [eos])}
        self._encoder: ChatEncoder | None = None
        embedding = model.output_embedding(backbones[-1])
        self._dtype, (self._device, *_) = embedding.dtype, embedding.devices()
        # Arrays that are bound to a device and arrays that are not would make two programs of one.
        self._bound = self._device if embedding.committed else None
        self._page_bytes = page_bytes(model.sparsity.block_size, model.config.head_dim, self._dtype)
        self.lock = threading.RLock()  # of whoever has the pool's pages; not of a thread's own calls, such as one made in `on_text`
        self._pool: PagePool | None = None
        self._cache_gib = cache_gib
        if cache_gib is not None:
            one_page = self._page_bytes / 2**30
            check_number("cache_gib", cache_gib, one_page, MAX_INT32 // 2 * one_page)
            try:
                self._pool = self._new_pool(int(cache_gib / one_page))
            except jax.errors.JaxRuntimeError as error:
                raise ValueError(f"cache_gib={cache_gib}: the device cannot give as much ({str(error).splitlines()[0]})") from error

    def on(self, devices: Sequence[Any]) -> list[Generator]:
        """A generator on each device, with weights, cache and tokenizer of its own, so that each may run in its own thread."""
        return [self if device == self._device else self._on(device) for device in devices]

    def _on(self, device: Any) -> Generator:
        backbones, router = copy_to(device, (self.backbones, self.router))
        tokenizer = copy.deepcopy(self.tokenizer)
        return Generator(self.model, backbones, router, tokenizer, stop_tokens=sorted(self._stop_tokens), cache_gib=self._cache_gib)

    @property
    def encoder(self) -> ChatEncoder:
        """Of chats; ValueError where the tokenizer has no chat template."""
        if self._encoder is None:
            self._encoder = ChatEncoder(self.tokenizer)
        return self._encoder

    def generate(
        self,
        prompts: Sequence[str | Chat | EncodedPrompt],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        stop: Sequence[int | str] | None = None,
        min_new_tokens: int = 0,
        heads: Literal["full", "sparse"] | np.ndarray | None = None,
        logit_bias: float = 0.0,
        on_text: OnText | None = None,
    ) -> Generation:
        """Continues prompts of any lengths in one batch.

        Neither the other prompts nor padding change what a prompt gets. Batches of other sizes are other matrix products, whose sums
        are rounded otherwise: in float32 no text differed, in bfloat16 a near-tie between two tokens may end the other way.

        Args:
          prompts: texts, which are taken as they are, or chats: lists of {"role", "content"} that end with the user's message, which
            the tokenizer's chat template writes (thinking off, as in training), or encoded prompts, which count as chats. The router
            pools keys of the whole text, of a chat up to the assistant's header.
          max_new_tokens: at most as many tokens each.
          temperature: 0 takes the best token; otherwise logits are divided by it.
          top_k, top_p: only the k best tokens (0: all); of these the fewest that hold this probability.
          seeds: one per prompt; a prompt's draws depend on its own seed only. None: 0, 1, 2, ...
          stop: tokens that end a text: ids, or strings that are one token. None: the tokenizer's end of sequence, those of the model's
            generation_config.json, and for chats the end of a turn in the chat template.
          min_new_tokens: tokens that end a text are not taken before it has as many.
          heads: a fixed plan instead of the router: "full" and "sparse" for all heads, or [L, K] or [B, L, K] with 1 for the setting's
            retrieval mode and 0 for its sparse mode.
          logit_bias: added to the router's logits for full: moves the sparsity without retraining.
          on_text: called with a prompt's index and the next piece of its text, a few tokens at a time; the pieces joined are the text.

        Raises:
          ValueError: an argument is not accepted, a prompt is empty or too long for the model's positions, or the cache does not fit:
            the text says what would do.
        """
        encoded = self.encode(prompts)
        request = self.request(
            [isinstance(prompt, str) for prompt in prompts],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=seeds,
            stop=stop,
            min_new_tokens=min_new_tokens,
            heads=heads,
            logit_bias=logit_bias,
            on_text=on_text,
        )
        with self.lock:
            started = time.perf_counter()
            cache = self.open_cache([len(tokens) for tokens, _ in encoded], request)
            try:
                result = self.prefill(encoded, cache, request)
                return self.decode(cache, result.logits, request, result.is_full, result.effective_sparsity.tolist(), started)
            finally:
                cache.free()

    def chat(self, *, system: str | None = None, reroute: bool = True) -> Conversation:
        """A conversation of several turns, see `Conversation`."""
        from elastic_jax.conversation import Conversation  # it is built on this file

        return Conversation(self, system=system, reroute=reroute)

    def encode(self, prompts: Sequence[str | Chat | EncodedPrompt]) -> list[EncodedPrompt]:
        """Tokens and the router's range of each prompt; arguments and errors as in `generate`."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | EncodedPrompt) or not prompts or isinstance(prompts[0], dict):
            raise ValueError(f"prompts={prompts!r}: accepted is a list of texts and chats, at least one")
        encoded = []
        for index, prompt in enumerate(prompts):
            name = f"prompts[{index}]"
            if isinstance(prompt, EncodedPrompt):
                encoded.append(self._check_encoded(name, prompt))
                continue
            if isinstance(prompt, str):
                check_text(name, prompt)
                ids: Any = self.tokenizer(prompt, verbose=False)["input_ids"] if prompt else []
                tokens = np.array(ids, np.int32)
                user_turn = 0, tokens.size
            else:
                check_chat(name, prompt)
                tokens, user_end = self.encoder.encode_prompt(list(prompt))
                user_turn = 0, user_end
            if not tokens.size:
                raise ValueError(f"{name}={prompt!r} is empty: at least one token is needed")
            encoded.append(self._check_encoded(name, EncodedPrompt(tokens, user_turn)))
        return encoded

    def _check_encoded(self, name: str, prompt: EncodedPrompt) -> EncodedPrompt:
        """Of a prompt that is in tokens: ValueError where tokens or range are none."""
        tokens, turn, size = np.asarray(prompt.tokens), prompt.user_turn, self.model.config.vocab_size
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
            raise ValueError(f"{name} has tokens of shape {tokens.shape} and type {tokens.dtype}: accepted are whole numbers [n], n from 1")
        if tokens.min() < 0 or tokens.max() >= size:
            raise ValueError(f"{name} has tokens from {tokens.min()} to {tokens.max()}: the model's are 0 to {size - 1}")
        whole = isinstance(turn, Sequence | np.ndarray) and len(turn) == 2 and all(isinstance(end, Integral) for end in turn)
        if not whole or not 0 <= turn[0] < turn[1] <= tokens.size:
            raise ValueError(f"{name} has user_turn={turn}: a range within its {tokens.size} tokens is needed")
        return EncodedPrompt(tokens.astype(np.int32), (int(turn[0]), int(turn[1])))

    def request(
        self,
        is_text: Sequence[bool],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seeds: Sequence[int] | None = None,
        stop: Sequence[int | str] | None = None,
        min_new_tokens: int = 0,
        heads: Any = None,
        logit_bias: float = 0.0,
        on_text: OnText | None = None,
    ) -> Request:
        """Checks options as in `generate`, for prompts that are texts or (False) chats."""
        batch = len(is_text)
        check_options(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            logit_bias=logit_bias,
            heads=heads,
            min_new_tokens=min_new_tokens,
        )
        seeds = range(batch) if seeds is None else seeds
        whole = isinstance(seeds, Sequence | np.ndarray) and all(isinstance(seed, Integral) for seed in seeds)
        if not whole or len(seeds) != batch or not all(0 <= seed < 2**32 for seed in seeds):
            raise ValueError(f"seeds={seeds!r}: accepted are {batch} whole numbers from 0 to 2**32 - 1, one per prompt")
        numbers = np.float32(temperature), np.int32(top_k), np.float32(top_p)
        sampling = Sampling(*numbers, seeds=np.array(seeds, np.uint32), first_stop=np.zeros(batch, np.int32))
        stops = [self._stops(stop, text) for text in is_text]
        width = -(-max(1, *map(len, stops)) // 4) * 4  # few widths, since each is a program
        padded = np.array([[*tokens, *[-1] * (width - len(tokens))] for tokens in stops], np.int32)
        return Request(
            max_new_tokens=int(max_new_tokens),
            min_new_tokens=int(min_new_tokens),
            sampling=sampling,
            stops=padded,
            heads=self._heads(heads, batch),
            logit_bias=logit_bias,
            on_text=on_text,
        )

    def default_stops(self, is_text: bool) -> list[int]:
        """Tokens that end a text or (False) the answer of a chat where a call names none."""
        end = None if is_text else self.encoder.end_of_turn()
        return sorted(self._stop_tokens | (set() if end is None else {end}))

    def _stops(self, stop: Sequence[int | str] | None, is_text: bool) -> list[int]:
        if stop is None:
            return self.default_stops(is_text)
        size = self.model.config.vocab_size
        if not isinstance(stop, Sequence) or isinstance(stop, str):
            raise ValueError(f"stop={stop!r}: accepted is a list of token ids and of strings that are one token")
        tokens = []
        for item in stop:
            if isinstance(item, str):
                check_text("stop", item)
            found: Any = self.tokenizer(item, add_special_tokens=False)["input_ids"] if isinstance(item, str) else [item]
            if len(found) != 1 or not isinstance(found[0], int | np.integer) or not 0 <= found[0] < size:
                what = f"is {len(found)} tokens" if isinstance(item, str) else "is no token"
                raise ValueError(f"stop: {item!r} {what}: accepted are ids from 0 to {size - 1} and strings that are exactly one token")
            tokens.append(int(found[0]))
        return tokens

    def _heads(self, heads: Any, batch: int) -> np.ndarray | None:
        """f32[L, B, K] of a given plan."""
        layers, kv_heads = self.model.config.num_layers, self.model.config.num_kv_heads
        if heads is None:
            if self.router is None:
                raise ValueError('heads=None: this model has no router, so a plan must be given: "full", "sparse" or an array')
            return None
        if isinstance(heads, str):
            if heads not in ("full", "sparse"):
                raise ValueError(f'heads={heads!r}: accepted are "full", "sparse", an array and None')
            return np.full((layers, batch, kv_heads), heads == "full", np.float32)
        try:
            plan = np.asarray(heads)
            if not any(jnp.issubdtype(plan.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
                raise TypeError
        except (TypeError, ValueError):
            raise ValueError(f"heads={heads!r}: accepted are 0 and 1 of shape ({layers}, {kv_heads}) or ({batch}, ...)") from None
        if plan.shape not in ((layers, kv_heads), (batch, layers, kv_heads)) or not np.isin(plan, (0, 1)).all():
            accepted = f"0 and 1 of shape ({layers}, {kv_heads}) or ({batch}, {layers}, {kv_heads})"
            raise ValueError(f"heads has shape {plan.shape}, values {np.unique(plan)[:4].tolist()}: accepted are {accepted}")
        plan = np.broadcast_to(plan, (batch, layers, kv_heads))
        return np.moveaxis(plan, 1, 0).astype(np.float32)

    def check_length(self, prompt_tokens: Sequence[int], max_new_tokens: int, name: str = "prompts[{}]") -> None:
        """ValueError where a prompt and its continuation are longer than the model's positions; says what factor would do.

        Args:
          name: of what is too long, {} its index.
        """
        config, (index, longest) = self.model.config, max(enumerate(prompt_tokens), key=lambda item: item[1])
        if (total := longest + max_new_tokens) > config.max_positions:
            raise ValueError(
                f"{name.format(index)} has {longest} tokens, with max_new_tokens={max_new_tokens} {total}: the model has "
                f"{config.max_positions} positions; loaded with yarn_factor={config.yarn_factor_for(total)} "
                "(RoPE scaled by that factor) it would have enough"
            )

    def open_cache(self, prompt_tokens: Sequence[int], request: Request) -> PagedCache:
        """An empty cache for prompts and what will follow them; errors as in `generate`."""
        self.check_length(prompt_tokens, request.max_new_tokens)
        config, sparsity = self.model.config, self.model.sparsity
        capacity = np.array(prompt_tokens) + request.max_new_tokens
        pool = self._pool
        if pool is not None:
            pool.recover()
        else:
            shape = (config.num_layers, len(capacity), config.num_kv_heads)
            ring = np.zeros(shape, bool) if request.heads is None else keeps_ring(request.heads, sparsity)
            needed = int(pages_needed(capacity[:, None], ring, sparsity).sum())
            size = bucket(needed, 1, per_octave=_POOL_SIZES)
            if (free := _free_bytes(self._device)) is not None:
                size = min(size, max(1, int(_USABLE * free / self._page_bytes)))
            pool = self._new_pool(size)
        return PagedCache(pool, config, sparsity, capacity.tolist())

    def make_room(self, cache: PagedCache, capacity: Sequence[int], ring: np.ndarray) -> None:
        """Before `cache.change` with these arguments: a pool of the cache's own grows to what it needs."""
        pool = cache.pool
        missing = cache.missing(capacity, ring) - pool.num_free
        if pool is not self._pool and missing > 0:
            pool.grow(bucket(pool.num_pages + missing, 1, per_octave=_POOL_SIZES) - pool.num_pages)

    def _new_pool(self, pages: int) -> PagePool:
        return PagePool(pages, self.model.sparsity.block_size, self.model.config.head_dim, self._dtype, device=self._bound)

    def prefill(self, encoded: Sequence[tuple[np.ndarray, tuple[int, int]]], cache: PagedCache, request: Request) -> Prefilled:
        tokens, user_turns = zip(*encoded)
        return prefill(
            self.model, self.backbones, self.router, tokens, user_turns, cache, heads=request.heads, logit_bias=request.logit_bias
        )

    def decode(
        self,
        cache: PagedCache,
        logits: jax.Array,
        request: Request,
        is_full: np.ndarray,
        esr: Sequence[float | None],
        started: float,
    ) -> Generation:
        """Goes on from the logits f32[B, V] after what the cache holds; `is_full` bool[L, B, K] and `esr` are for the results."""
        if (damaged := np.flatnonzero(~np.asarray(_are_finite(logits)))).size:
            raise ValueError(f"the logits of sequence {damaged[0]} are not finite: are the model's weights or its RoPE settings damaged?")
        prompt_tokens, batch = cache.lengths.copy(), len(cache.lengths)
        stops, streams = request.stops, [TextStream(self.tokenizer) for _ in cache.lengths]
        tokens: list[list[int]] = [[] for _ in streams]
        done = np.zeros(batch, bool)

        def take(new: np.ndarray) -> None:
            """New tokens i32[B, n]."""
            for row in np.flatnonzero(~done):
                (ends,) = np.nonzero(np.isin(new[row], stops[row]))
                done[row] = ends.size > 0
                fresh = new[row, : ends[0] + 1 if ends.size else None].tolist()
                tokens[row] += fresh
                last = done[row] or len(tokens[row]) == request.max_new_tokens
                if request.on_text is None:
                    continue
                # The stop token is no part of the text, even where it is no special one.
                piece = streams[row].push(fresh[:-1] if done[row] else fresh) + (streams[row].flush() if last else "")
                if piece:
                    request.on_text(int(row), piece)

        position = prompt_tokens.astype(np.int32)
        sampling = request.sampling._replace(first_stop=position + np.int32(request.min_new_tokens))
        state = first_token(logits, position, sampling, stops)
        first = np.asarray(state.token)[:, None]
        decoding = time.perf_counter()
        take(first)
        made, at_once = 1, MAX_STEPS if request.on_text is None else _STREAM_STEPS
        while made < request.max_new_tokens and not done.all():
            wanted = min(at_once, request.max_new_tokens - made)
            state, new = generate_tokens(self.model, self.backbones, cache, state, sampling, stops, wanted)
            made += new.shape[1]
            take(new)
        ended = time.perf_counter()
        dense = (
            pages_needed(cache.capacity, False, self.model.sparsity).sum() * self.model.config.num_layers * self.model.config.num_kv_heads
        )
        return Generation(
            completions=[
                Completion(
                    text=decode_text(self.tokenizer, tokens[row][:-1] if done[row] else tokens[row]),
                    tokens=np.array(tokens[row], np.int32),
                    prompt_tokens=int(prompt_tokens[row]),
                    finish_reason="stop" if done[row] else "length",
                    is_full=is_full[:, row],
                    esr=esr[row],
                )
                for row in range(batch)
            ],
            timings=Timings(
                prefill_seconds=decoding - started,
                decode_seconds=ended - decoding,
                steps=made - 1,
                cache_pages=cache.num_pages,
                cache_mib=cache.num_pages * self._page_bytes / 2**20,
                pool_mib=cache.pool.num_pages * self._page_bytes / 2**20,
                dense_cache_mib=int(dense) * self._page_bytes / 2**20,
            ),
        )


@jax.jit
def _are_finite(logits: jax.Array) -> jax.Array:
    return jnp.isfinite(logits).all(axis=1)


def _free_bytes(device: Any) -> int | None:
    """Memory that the device can still give; None where it does not tell."""
    stats = device.memory_stats()
    return None if not stats or "bytes_limit" not in stats else stats["bytes_limit"] - stats["bytes_in_use"]
