"""The rival of the inference benchmarks: Hugging Face transformers on the same device, a model of the same shape with random weights.

The weights need not be ours, since times do not depend on them. PyTorch with CUDA is optional, as in `rivals`.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax

from elastic_jax.models.config import ModelConfig
from experiments.bench.timing import TorchCall


class HuggingFace:
    """The model with SDPA attention.

    Raises:
      ImportError: there is no PyTorch. RuntimeError: it does not see the GPU that JAX has. ValueError: transformers has no such model.
    """

    def __init__(self, config: ModelConfig, dtype: str):
        import torch
        import transformers

        self._cuda = jax.default_backend() == "gpu"
        if self._cuda and not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        self._device, self._dtype, self._config = torch.device("cuda" if self._cuda else "cpu"), getattr(torch, dtype), config
        described = config.to_hf()
        hf_config = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
        with self._device:  # initialised where it stays
            self._model: Any = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=self._dtype, attn_implementation="sdpa")
        self._model.eval()
        # What newer versions of transformers 5 call it.
        name = "cache" if "cache" in inspect.signature(type(self._model).forward).parameters else "past_key_values"
        self._options = lambda cache: {name: cache, "use_cache": True, "logits_to_keep": 1}

    def prefill(self, tokens: int, batch: int) -> TorchCall:
        """Prompts of random tokens into a new cache; logits of the last position only, so nothing larger than ours has to be made."""
        import torch
        from transformers import DynamicCache

        prompts = torch.randint(self._config.vocab_size, (batch, tokens), device=self._device)

        def run() -> Any:
            with torch.no_grad():
                return self._model(prompts, **self._options(DynamicCache(config=self._model.config))).logits

        return TorchCall(run, self._cuda)

    def decode(self, tokens: int, batch: int, steps: int, *, static: bool) -> TorchCall:
        """`steps` greedy steps behind a cache of `tokens` random keys and values.

        Args:
          static: with a cache of fixed size and a compiled step with CUDA graphs, transformers' fastest way; else the default, which
            copies the cache in every step.
        """
        import torch
        from transformers import DynamicCache, StaticCache

        torch.compiler.reset()  # frees what it keeps of other lengths, and their number would reach the limit of what is compiled
        config = self._config
        random = lambda: torch.randn((batch, config.num_kv_heads, tokens, config.head_dim), device=self._device, dtype=self._dtype)
        cache: Any = StaticCache(self._model.config, tokens + steps) if static else DynamicCache(config=self._model.config)
        for layer in range(config.num_layers):
            cache.update(random(), random(), layer)
        model = torch.compile(self._model, mode="reduce-overhead", dynamic=False) if static else self._model
        first = torch.zeros((batch, 1), dtype=torch.int64, device=self._device)

        def rewind() -> None:
            for layer in cache.layers:
                if static:
                    layer.cumulative_length.fill_(tokens)
                else:
                    layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]

        def run() -> Any:
            with torch.no_grad():
                rewind()
                token = first
                for _ in range(steps):
                    token = model(token, **self._options(cache)).logits[:, -1].argmax(-1, keepdim=True)
                return token

        return TorchCall(run, self._cuda)
