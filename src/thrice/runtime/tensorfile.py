"""Files of named tensors in the safetensors format, each written and read in one pass with its SHA-256.

The format (https://github.com/huggingface/safetensors): the header's length as 8 little-endian bytes, a JSON
header, the raw tensors. It is done here rather than by that library because its writer wants every tensor on
the host at once, its reader leaves the file mapped, and neither gives a sum along the way.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thrice.errors import CheckpointError
from thrice.files import sync

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def layout(group: str, named: Mapping[str, Tensor]) -> list[bytes | Tensor]:
    """The pieces of the file in order: the head, then the tensors, widest dtype first so all are aligned.

    Raises CheckpointError for a tensor the format cannot hold.
    """
    for name, tensor in named.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{group}: {name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which a "
                "safetensors file cannot hold → save it as dense tensors of a plain dtype"
            )
    names = sorted(named, key=lambda name: (-named[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + named[name].nbytes
        shape = list(named[name].shape)
        entries[name] = {"dtype": _NAMES[named[name].dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, *(named[name] for name in names)]


def write(path: Path, pieces: list[bytes | Tensor]) -> tuple[int, str]:
    """Write a new file and sync it; (bytes, SHA-256). Tensors come to the host one by one. Raises OSError."""
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("xb") as file:
        for piece in pieces:
            raw = _host_bytes(piece) if isinstance(piece, Tensor) else piece
            file.write(raw)
            digest.update(raw)
            size_bytes += len(raw)
            del raw  # before the next tensor comes to the host
        sync(file)
    return size_bytes, digest.hexdigest()


def _host_bytes(tensor: Tensor) -> memoryview:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a dimension of size 1 keeps its stride there, and any but 1 has no view as bytes.
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy().data


def read(path: Path, size_bytes: int) -> tuple[dict[str, Tensor], str]:
    """(tensors by name, on the host; SHA-256 of the file). Raises OSError; ValueError where it is damaged.

    The sum is known at the end only, so until then the header is trusted no further than the file's size.
    """
    tensors = {}
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), size_bytes))
        digest = hashlib.sha256(length + header)
        at = 0
        for name, dtype, shape, end in _entries(header):
            if not at <= end <= size_bytes or math.prod(shape) * dtype.itemsize != end - at:
                raise ValueError(f"{name} does not fit")
            raw = torch.empty(end - at, dtype=torch.uint8)
            file.readinto(raw.numpy().data)
            digest.update(raw.numpy().data)
            tensors[name] = raw.view(dtype).reshape(shape)
            at = end
        digest.update(file.read())
    return tensors, digest.hexdigest()


def _entries(header: bytes) -> list[tuple[str, torch.dtype, list[int], int]]:
    """(name, dtype, shape, end) of each tensor in file order; a tensor starts where the one before ends."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return [
            (name, _DTYPES[entry["dtype"]], list(map(int, entry["shape"])), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
        ]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("not a safetensors header") from error
