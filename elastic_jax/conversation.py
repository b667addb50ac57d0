"""A conversation of several turns over one model.

The router's plan belongs to a prompt, and a conversation's prompt grows. Two ways to go on, chosen once:

reroute=True   each turn decides a new plan. The whole conversation is run again under it, so heads that become full have all their keys
               and the cache is always that of the plan. Costs a prefill of the whole conversation per turn.
reroute=False  the first turn's plan stays, and with it the cache: only the new tokens are run. A turn may give other heads; one that
               would keep every key again while some of its keys are gone is refused.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_jax.cache import PagedCache, bucket, keeps_ring
from elastic_jax.checks import check_text
from elastic_jax.decoding import feed_tokens

if TYPE_CHECKING:
    from elastic_jax.generate import Completion, Generator, Request, Timings

_FEED = 16  # tokens: the buffer of given tokens is padded to a bucket of these


class Conversation:
    """Made by `Generator.chat`; to be used in a `with` statement or closed, where it keeps a cache.

    Attributes:
      messages: so far, answers included.
      timings: of the last turn.
    """

    def __init__(self, generator: Generator, *, system: str | None, reroute: bool) -> None:
        self._generator, self._reroute = generator, reroute
        if system is not None:
            if not isinstance(system, str):
                raise ValueError(f"system={system!r}: a text is needed")
            check_text("system", system)
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.timings: Timings | None = None
        self._cache: PagedCache | None = None
        self._is_full = np.zeros(0, bool)  # [L, 1, K]
        self._pending: list[int] = []  # tokens of the last answer that the cache does not hold
        self._closed = False

    def send(self, text: str, **options: Any) -> Completion:
        """The answer to a user's message.

        Args:
          text: the message.
          options: as in `Generator.generate`. Without rerouting `heads` of a later turn, [L, K], change the plan from there on, and
            there is no `logit_bias` then.

        Raises:
          ValueError: as in `Generator.generate`; heads that would need keys that are gone; a closed conversation. The conversation is
            as before then. (What `on_text` raises closes one that keeps its cache.)
        """
        if not isinstance(text, str) or not text:
            raise ValueError(f"text={text!r}: a message that is not empty is needed")
        check_text("text", text)
        with self._generator.lock:
            if self._closed:
                raise ValueError("this conversation was closed and its cache freed: start another")
            messages = [*self.messages, {"role": "user", "content": text}]
            if self._reroute:
                result = self._generator.generate([messages], **options)
            elif self._cache is None:
                result = self._begin(messages, options)
            else:
                result = self._go_on(self._cache, messages, options)
            (completion,), self.timings = result.completions, result.timings
            # A stop token is not part of the answer: the template ends the turn.
            self._pending = [] if completion.finish_reason == "stop" else completion.tokens[-1:].tolist()
            self.messages = [*messages, {"role": "assistant", "content": completion.text}]
            return completion

    def _begin(self, messages: list[dict[str, str]], options: dict[str, Any]) -> Any:
        generator, started = self._generator, time.perf_counter()
        encoded = generator.encode([messages])
        request = generator.request([False], **options)
        cache = generator.open_cache([len(encoded[0][0])], request)
        try:
            result = generator.prefill(encoded, cache, request)
            self._is_full = result.is_full
            generation = generator.decode(cache, result.logits, request, result.is_full, result.effective_sparsity.tolist(), started)
        except BaseException:
            cache.free()
            raise
        self._cache = cache
        return generation

    def _go_on(self, cache: PagedCache, messages: list[dict[str, str]], options: dict[str, Any]) -> Any:
        generator, started = self._generator, time.perf_counter()
        if options.get("logit_bias"):
            raise ValueError(f"logit_bias={options['logit_bias']}: a later turn of reroute=False keeps the plan; give heads to change it")
        options = options | {"heads": self._is_full[:, 0] if options.get("heads") is None else options["heads"]}
        request: Request = generator.request([False], **options)
        assert request.heads is not None
        new = np.array([*self._pending, *generator.encoder.encode_next(messages)], np.int32)
        length = int(cache.lengths[0]) + new.size
        generator.check_length([length], request.max_new_tokens, "the conversation")
        capacity, ring = [length + request.max_new_tokens], keeps_ring(request.heads, generator.model.sparsity)
        generator.make_room(cache, capacity, ring)
        cache.change(capacity, ring)
        self._is_full = request.heads > 0.5
        padded = np.pad(new, (0, bucket(new.size, _FEED) - new.size))[None]
        try:
            logits = feed_tokens(generator.model, generator.backbones, cache, padded, np.array([new.size]))
            return generator.decode(cache, logits, request, self._is_full, [None], started)
        except BaseException:
            self.close()  # the cache holds part of a turn
            raise

    def close(self) -> None:
        """Frees the cache; nothing can be sent any more."""
        with self._generator.lock:
            if self._cache is not None:
                self._cache.free()
                self._cache = None  # and with it a pool of its own
            self._closed = True

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
