"""Decoders of two families, Qwen3 and Llama, and nothing about training or files."""

from elastic_jax.models.config import PRESETS, ModelConfig, preset
from elastic_jax.models.decoder import SAVE_ATTENTION, AttendFn, Decoder
from elastic_jax.models.rope import RopeConfig

__all__ = ["PRESETS", "SAVE_ATTENTION", "AttendFn", "Decoder", "ModelConfig", "RopeConfig", "preset"]
