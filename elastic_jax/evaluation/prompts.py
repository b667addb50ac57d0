"""From a benchmark's sample to the tokens that the model reads."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from elastic_jax.evaluation.samples import Sample
from elastic_jax.generate import EncodedPrompt, Generator


class SamplePrompt(NamedTuple):
    """prompt: what the model reads. cut_tokens: tokens of the user's text that were left out of its middle."""

    prompt: EncodedPrompt
    cut_tokens: int

    @property
    def hash(self) -> str:
        """Of the tokens and of what the router pools: two prompts with the same hash are the same to the model."""
        digest = hashlib.sha256(np.asarray(self.prompt.user_turn, "<i4").tobytes())
        digest.update(self.prompt.tokens.astype("<i4").tobytes())
        return digest.hexdigest()[:16]


def encode_sample(generator: Generator, sample: Sample, max_prompt_tokens: int | None = None) -> SamplePrompt:
    """Writes a sample with the chat template (thinking off) or, where it is no chat, as it is; then comes its answer prefix.

    A prompt longer than `max_prompt_tokens`, or than the model's positions leave beside the answer, loses tokens from the middle of
    the user's text: first and last half of that text stay, and so do the template, the system message, the assistant's header and the
    answer prefix, whole. The router pools what it would without the prefix, less what was cut.

    Raises:
      ValueError: what may not be cut is too long by itself, a sample that is no chat has a system message, or the tokenizer has no
        chat template for one that is.
    """
    if sample.chat:
        messages = [] if sample.system is None else [{"role": "system", "content": sample.system}]
        messages.append({"role": "user", "content": sample.prompt})
        ((tokens, (start, end)),) = generator.encode([messages])
    elif sample.system is not None:
        raise ValueError(f"sample {sample.id!r} has a system message, but is no chat")
    else:
        ((tokens, (start, end)),) = generator.encode([sample.prompt])
    prefix = generator.tokenizer(sample.answer_prefix, add_special_tokens=False)["input_ids"] if sample.answer_prefix else []
    positions = generator.model.config.max_positions
    limit, reason = positions - sample.max_new_tokens, f"the model's {positions} positions less max_new_tokens={sample.max_new_tokens}"
    if max_prompt_tokens is not None and max_prompt_tokens < limit:
        limit, reason = max_prompt_tokens, f"{max_prompt_tokens=}"
    cut = max(0, len(tokens) + len(prefix) - limit)
    if cut:
        first, last = generator.encoder.text_range(messages) if sample.chat else (0, len(tokens))
        kept = last - first - cut
        if kept < 1:
            raise ValueError(
                f"sample {sample.id!r}: {len(tokens) + len(prefix)} tokens cannot be cut to {max(0, limit)} ({reason}), since only "
                f"{last - first} of them are the user's text, of which at least one must stay"
            )
        middle = first + -(-kept // 2)
        tokens = np.concatenate([tokens[:middle], tokens[middle + cut :]])
        end -= cut
    return SamplePrompt(EncodedPrompt(np.concatenate([tokens, np.array(prefix, np.int32)]), (start, end)), cut)
