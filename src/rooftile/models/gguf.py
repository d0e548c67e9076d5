"""The header of a GGUF file (versions 2 and 3, little-endian), read from a memory map.

Own reader because start-up time is part of the product: it takes about 0.1 s for a file whose
token lists cost the `gguf` package two seconds. Nothing that the file says is trusted: every
offset and count is held against the file's size before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
MAX_DIMENSIONS = 4  # of ggml


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: `shape` with the fastest dimension last, bytes [start, start + nbytes)."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # as ggml names it: F32, Q4_1, ...
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """The metadata and tensor table of one file; `data` is the whole file, memory-mapped."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    data: memoryview


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a file's header and table of tensors; tensor data stay on disk until they are used.

    Raises:
        ValueError: not a GGUF file, an unsupported version, or damaged; says what is wrong and where.
    """
    path = Path(path)
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty, not a GGUF file")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    reader = _Reader(path, data)
    magic = bytes(data[:4])
    if magic != MAGIC:
        raise ValueError(f"{path}: starts with {magic!r}, not {MAGIC!r}: it is not a GGUF file")
    reader.offset = 4
    version = reader.scalar("I", "the version")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise ValueError(
            f"{path}: GGUF version {version}{hint}; this reader knows little-endian versions "
            f"{' and '.join(map(str, VERSIONS))}; convert the file again with current llama.cpp"
        )
    num_tensors = reader.count("the tensor count", least_bytes=24)
    num_fields = reader.count("the metadata count", least_bytes=13)
    metadata: dict[str, Any] = {}
    for index in range(num_fields):
        key = reader.string(f"the name of metadata field {index}")
        if key in metadata:
            raise reader.error(f"metadata field {key!r} occurs twice")
        metadata[key] = reader.value(key)
    if metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"{path}: one part of {metadata['split.count']!r:.80}; merge the parts first with "
            f"llama.cpp's `llama-gguf-split --merge`"
        )
    entries = [reader.tensor(index) for index in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}; it must be a power of two")
    start = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name!r} occurs twice in the table of tensors")
        tensors[name] = _place(path, name, shape, type_id, start + offset, len(data))
    return GGUFFile(path, metadata, tensors, data)


def _place(
    path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int, size: int
) -> GGUFTensor:
    # `gguf` costs a tenth of a second to import; only this and dequantisation need it.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(
            f"{path}: tensor {name!r} has type {type_id}, which the installed gguf package does not "
            f"know; update it or convert the model to a known type such as Q8_0"
        ) from None
    if shape[-1] % block:
        raise ValueError(
            f"{path}: tensor {name!r} has rows of {shape[-1]} values, not a multiple of the "
            f"{block} values in a block of {kind.name}"
        )
    nbytes = prod(shape) // block * block_bytes
    if start + nbytes > size:
        raise ValueError(
            f"{path}: tensor {name!r} ends at byte {start + nbytes}, but the file has {size} bytes; "
            f"it is truncated or damaged: download it again"
        )
    return GGUFTensor(name, shape, kind.name, start, nbytes)


class _Reader:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what} (near byte {self.offset} of {len(self.data)})")

    def require(self, nbytes: int, what: str) -> None:
        if nbytes > len(self.data) - self.offset:
            raise self.error(
                f"{what} needs {nbytes} bytes and only {len(self.data) - self.offset} are left; "
                f"the file is truncated or damaged: download it again"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.require(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += size
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """A number of entries that take at least `least_bytes` each."""
        value = self.scalar("Q", what)
        if value * least_bytes > len(self.data) - self.offset:
            raise self.error(f"{what} is {value}, more than fits in the file; it is damaged")
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q", f"the length of {what}")
        self.require(length, what)
        raw = bytes(self.data[self.offset : self.offset + length])
        self.offset += length
        return self.decode(raw, what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not valid UTF-8: {raw[:40]!r}") from None

    def value(self, key: str) -> Any:
        kind = self.scalar("I", f"the type of {key!r}")
        if kind == STRING:
            return self.string(repr(key))
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.error(f"metadata field {key!r} has unknown type {kind}")
        return self.scalar(SCALARS[kind], repr(key))

    def array(self, key: str) -> list[Any]:
        kind = self.scalar("I", f"the element type of {key!r}")
        if kind == STRING:
            return self.strings(key, self.count(f"the length of {key!r}", least_bytes=8))
        if kind not in SCALARS:
            raise self.error(f"metadata field {key!r} is an array of unsupported type {kind}")
        size = struct.calcsize("<" + SCALARS[kind])
        count = self.count(f"the length of {key!r}", least_bytes=size)
        values = struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, self.offset)
        self.offset += count * size
        return list(values)

    def strings(self, key: str, count: int) -> list[str]:
        # One tight loop: this is where a header's time goes.
        data, offset, size = self.data, self.offset, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        raws: list[bytes] = []
        for _ in range(count):
            if offset + 8 > size or (length := unpack(data, offset)[0]) > size - offset - 8:
                self.offset = offset
                raise self.error(
                    f"string {len(raws)} of {key!r} runs past the end of the file; "
                    f"it is truncated or damaged: download it again"
                )
            offset += 8 + length
            raws.append(bytes(data[offset - length : offset]))
        self.offset = offset
        return [self.decode(raw, f"string {index} of {key!r}") for index, raw in enumerate(raws)]

    def tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(f"the name of tensor {index}")
        dimensions = self.scalar("I", f"the number of dimensions of tensor {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {dimensions} dimensions; 1 to 4 are allowed")
        dims = [self.scalar("Q", f"a dimension of tensor {name!r}") for _ in range(dimensions)]
        if min(dims) == 0:
            raise self.error(f"tensor {name!r} has a dimension of 0")
        type_id = self.scalar("I", f"the type of tensor {name!r}")
        offset = self.scalar("Q", f"the offset of tensor {name!r}")
        return name, tuple(reversed(dims)), type_id, offset
