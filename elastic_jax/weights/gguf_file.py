"""The GGUF container: metadata and tensors. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is parsed here rather than with the `gguf` package: its reader takes 2.3 s for SmolLM2's 98,000 strings (this one 0.13 s), and
meets a truncated file with whatever error numpy raises first. The package's dequantization is used.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from elastic_jax.checks import check_number

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. `shape` is in numpy's order, the reverse of the file's."""

    shape: tuple[int, ...]
    kind: int  # of GGMLQuantizationType
    start: int
    stop: int


class GgufFile:
    """A GGUF file opened for reading; tensors are read when asked for.

    Attributes:
      path: of the file.
      metadata: value of every key; arrays are lists.
      tensors: every tensor's place, by name.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the header.

        Raises:
          FileNotFoundError: no such file.
          ValueError: it is not a whole GGUF file of version 2 or 3, or one part of a split model.
        """
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise ValueError(f"{self.path} is empty")
        self._data = np.memmap(self.path, mode="r")
        try:
            self.metadata, self.tensors = _parse(self._data)
        except struct.error as error:
            raise ValueError(f"{self.path} is truncated: its {self._data.size} bytes end inside the header") from error
        except (ValueError, RecursionError) as error:  # an array of an array of an array ...
            raise ValueError(f"{self.path} is not a GGUF file this code can read: {error}") from error
        beyond = [name for name, tensor in self.tensors.items() if tensor.stop > self._data.size]
        if beyond:
            needed = max(tensor.stop for tensor in self.tensors.values())
            raise ValueError(
                f"{self.path} is truncated: it has {self._data.size} bytes and its tensors need {needed}; "
                f"{len(beyond)} of {len(self.tensors)} tensors lie beyond its end, {beyond[0]} first"
            )
        parts = self.metadata.get("split.count", 1)
        check_number(f"{self.path}: split.count", parts, 0, 2**16 - 1, whole=True)
        if parts > 1:
            raise ValueError(f"{self.path} is one of {parts} parts: merge them first (llama.cpp's gguf-split --merge)")

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantized to f32[*shape].

        Raises:
          KeyError: no such tensor.
          ValueError: a quantization that the `gguf` package cannot undo.
        """
        import gguf

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        rows = self._data[tensor.start : tensor.stop].reshape(*tensor.shape[:-1], -1)
        try:
            return gguf.dequantize(rows, kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name} is quantized as {kind.name}, which the gguf package cannot undo") from error


class _Cursor:
    """Reads little-endian values one after the other; raises struct.error at the end of the file."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.data
        self.at = 0

    def unpack(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        size = self.unpack("<Q")
        if size > len(self.data) - self.at:
            raise struct.error("string beyond the end")
        self.at += size
        return str(self.data[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"metadata has the unknown type {kind}")
        element, size = self.unpack("<I"), self.unpack("<Q")
        if size > len(self.data) - self.at:  # an element takes at least a byte
            raise struct.error("array beyond the end")
        return [self.value(element) for _ in range(size)]


def _parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    import gguf

    cursor = _Cursor(data)
    if bytes(cursor.data[:4]) != b"GGUF":
        raise ValueError(f"it starts with {bytes(cursor.data[:4])!r} instead of b'GGUF'")
    cursor.at = 4
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}: accepted are 2 and 3, little-endian")
    num_tensors, num_keys = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("<I"))

    heads = []
    for _ in range(num_tensors):
        name = cursor.string()
        dims = [cursor.unpack("<Q") for _ in range(cursor.unpack("<I"))]
        heads.append((name, tuple(reversed(dims)), cursor.unpack("<I"), cursor.unpack("<Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in heads:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name} has the unknown quantization {kind}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} is not made of blocks of {block}")
        size = math.prod(shape) // block * block_bytes
        tensors[name] = GgufTensor(shape=shape, kind=kind, start=base + offset, stop=base + offset + size)
    return metadata, tensors
