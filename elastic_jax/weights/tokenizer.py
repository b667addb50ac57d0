"""A tokenizer from a GGUF file's metadata, without torch and without the model's original tokenizer.json.

transformers can convert one too, but its conversion keeps a generic pre-tokenizer: SmolLM2's digits are then no longer split off, and
white space before a digit becomes other tokens than those the model was trained on.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from elastic_jax.checks import check_number, errors_name
from elastic_jax.weights.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

# The published patterns of GPT-4's tokenizer, which Qwen2 (single digits) and Llama 3 (up to three digits) took over.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Builds the fast tokenizer that a GGUF file describes, chat template included.

    Raises:
      ValueError: the file has no tokenizer, a damaged one, or not a byte-level BPE with a known pre-tokenizer.
    """
    with errors_name(file.path):
        return _tokenizer(file)


def _tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    def find(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}", default)

    if absent := [key for key in ("model", "pre", "tokens", "merges", "token_type") if find(key) is None]:
        raise ValueError(f"it has no usable tokenizer: tokenizer.ggml.{', tokenizer.ggml.'.join(absent)} missing")
    if find("model") != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={reprlib.repr(find('model'))}: only 'gpt2' (byte-level BPE) is supported")
    tokens = find("tokens")
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        if not isinstance(find(key), list) or not all(type(item) is kind for item in find(key)):
            raise ValueError(f"tokenizer.ggml.{key}={reprlib.repr(find(key))}: a list of {kind.__name__} is needed")
    if len(find("token_type")) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(find('token_type'))} entries: one for each of {len(tokens)} tokens is needed")
    tokenizer = _byte_level_bpe(tokens, find("merges"), find("token_type"), find("pre"))

    special = {}
    for name, key in _SPECIAL.items():
        if (index := find(f"{key}_token_id")) is not None:
            check_number(f"tokenizer.ggml.{key}_token_id", index, 0, len(tokens) - 1 if key == "eos" else 2**32 - 1, whole=True)
            if index < len(tokens):  # there are files whose padding token is none
                special[name] = tokens[index]
    template, add_bos = file.metadata.get("tokenizer.chat_template"), find("add_bos_token", find("pre") == "llama-bpe")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template={reprlib.repr(template)}: a text is needed")
    if not isinstance(add_bos, bool):
        raise ValueError(f"tokenizer.ggml.add_bos_token={reprlib.repr(add_bos)}: a bool is needed")
    if add_bos:  # llama.cpp's default for Llama 3
        from tokenizers.processors import TemplateProcessing

        if (bos := special.get("bos_token")) is None:
            raise ValueError(
                "tokenizer.ggml.bos_token_id is missing or no token: texts begin with that token (tokenizer.ggml.add_bos_token)"
            )
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, find("bos_token_id"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        model_max_length=file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], kinds: list[int], pre: str) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    pre_tokenizer = {
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        ),
        "qwen2": lambda: split(_WORDS % ""),
        "llama-bpe": lambda: split(_WORDS % "{1,3}"),
    }
    if not isinstance(pre, str) or pre not in pre_tokenizer:
        raise ValueError(f"tokenizer.ggml.pre={reprlib.repr(pre)}: accepted are {', '.join(pre_tokenizer)}")

    # Unused entries only pad the table to the size of the model's embedding.
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    if len(vocabulary) < sum(kind != _UNUSED for kind in kinds):
        twice = next(token for index, token in enumerate(tokens) if kinds[index] != _UNUSED and vocabulary[token] != index)
        raise ValueError(f"tokenizer.ggml.tokens holds {reprlib.repr(twice)} twice: every token must be another")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ValueError(
                f"tokenizer.ggml.merges holds {reprlib.repr(f'{left} {right}')}: two tokens whose text together is one are needed"
            )
    # Llama 3's vocabulary holds whole words that its merges do not reach.
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizer[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kinds[index] == _CONTROL, normalized=False)
            for index, token in enumerate(tokens)
            if kinds[index] in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
