"""A tokenizer of single bytes with a chat template, and documents, for the data tests."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from elastic_jax.data.documents import Document
from elastic_jax.data.tasks import TaskClass

CHATML = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Tokens are bytes, <|end|> (0), <|turn|> (1), and one merge of line break and space, to see where texts are joined."""
    words = ["<|end|>", "<|turn|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĠ"]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[("Ċ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=["<|turn|>"])
    tokenizer.chat_template = chat_template
    return tokenizer


def make_document(length: int, *, seed: int = 0, task: TaskClass = TaskClass.CODE, id: str = "d", masked: int = 0) -> Document:
    """A document of random tokens whose second half is the answer and whose first `masked` tokens have no label."""
    tokens = np.random.default_rng(seed).integers(1, 1000, length).astype(np.int32)
    middle = max(1, length // 2)
    return Document(
        tokens=tokens,
        labelled=np.arange(length) >= masked,
        user_turn=(0, middle),
        answer=(middle, length),
        task=task,
        id=id,
    )
