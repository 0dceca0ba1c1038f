"""One safetensors file, written whole or not at all, with a digest of everything in it.

The layout is that of safetensors, so any reader of that format opens it. It's written here and not by that package for
two reasons: tensors go to disk one at a time, so saving needs no second copy of a cache that just fits; and the digest
of header and data is put into the header after both are written. Reading uses the package.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, offsets; "__metadata__" -> strings, among them the digest
    data      the tensors, contiguous, largest elements first so that each is aligned

Source of the layout: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO

import torch

DIGEST = "sha256"
BLANK_DIGEST = "0" * hashlib.sha256().digest_size * 2
HEADER_LIMIT_BYTES = 100_000_000
PIECE_BYTES = 1 << 24
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class CacheFileError(ValueError):
    """A cache file can't be used: it is damaged, foreign, or made with something else than what it's loaded for."""


def write_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and strings; `path` is replaced in one step after everything is on the disk.

    Args:
        path: The file; its folder must exist.
        tensors: Any shapes and devices, of the dtypes in `DTYPE_NAMES`.
        metadata: Strings that go into the header; `sha256` is added.

    Raises:
        OSError: If the folder is missing or the disk is full; a file that was there before stays as it was.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _encode_header(ordered, metadata)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            digest = hashlib.sha256(header)
            file.write(header)
            for _, tensor in ordered:
                data = tensor_bytes(tensor)
                digest.update(data)
                file.write(data)
            file.seek(_digest_position(header))
            file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in row-major order, copied to host memory where they aren't there."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _encode_header(ordered: list[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    """Returns the file's beginning, with a blank digest."""
    entries: dict[str, Any] = {"__metadata__": {**metadata, DIGEST: BLANK_DIGEST}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest_position(header: bytes) -> int:
    """Returns where the digest's digits begin."""
    key = f'"{DIGEST}":"'.encode()
    position = header.find(key)
    return position + len(key)


def _sync_folder(folder: Path) -> None:
    """Makes the new name durable, on systems where a folder can be opened for that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_metadata(path: Path, file_format: str) -> dict[str, str]:
    """Returns the strings of a file's header after checking the whole file against its digest.

    Args:
        path: The file.
        file_format: What the entry `format` must say.

    Raises:
        FileNotFoundError: If there is no such file.
        CacheFileError: If the file is truncated, of another format, or damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= HEADER_LIMIT_BYTES:
            raise CacheFileError(f"{path} isn't a safetensors file, so it can't be a saved cache")
        text = file.read(length)
        if len(text) < length:
            raise CacheFileError(f"{path} is truncated: {size} bytes, the header alone needs {8 + length}")
        entries = _parse_header(path, text)
        metadata = entries.pop("__metadata__", {})
        found = metadata.get("format") if isinstance(metadata, dict) else None
        if found != file_format:
            raise CacheFileError(f"{path} is a safetensors file, but not a saved cache: its `format` is {found!r}")
        expected = 8 + length + _data_bytes(path, entries)
        if size != expected:
            kind = "is truncated" if size < expected else "has something behind its end"
            raise CacheFileError(f"{path} {kind}: {size} bytes, the header says {expected}")
        _check_digest(path, file, start + text, metadata.get(DIGEST, ""))
    return metadata


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    """Returns the header's entries."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise CacheFileError(f"{path} isn't a safetensors file: its header isn't JSON ({error})") from None
    if not isinstance(entries, dict):
        raise CacheFileError(f"{path} isn't a safetensors file: its header is no table of tensors")
    return entries


def _data_bytes(path: Path, entries: dict[str, Any]) -> int:
    """Returns where the last tensor ends, counted from the end of the header."""
    ends = []
    for name, entry in entries.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(end, int) for end in offsets):
            raise CacheFileError(f"{path} is damaged: the header's entry {name!r} names no place in the file")
        ends.append(offsets[1])
    return max(ends, default=0)


def _check_digest(path: Path, file: BinaryIO, header: bytes, claimed: str) -> None:
    """Compares the digest of header and data with the one that the header names."""
    position = _digest_position(header)
    blank = header[:position] + BLANK_DIGEST.encode() + header[position + len(BLANK_DIGEST) :]
    digest = hashlib.sha256(blank)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    if digest.hexdigest() != claimed:
        raise CacheFileError(
            f"{path} is damaged: its content has the digest {digest.hexdigest()[:16]}..., its header says `{DIGEST}` "
            f"{claimed[:16]}...; save the cache again"
        )
