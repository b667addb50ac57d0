"""Pretrained weights: Hugging Face safetensors and GGUF files, in and out."""

from elastic_jax.weights.load import LoadedModel, load_model, load_stop_tokens, load_tokenizer
from elastic_jax.weights.safetensors import save_safetensors

__all__ = ["LoadedModel", "load_model", "load_stop_tokens", "load_tokenizer", "save_safetensors"]
