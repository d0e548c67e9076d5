"""Weights from a GGUF file, dequantised row by row into the dtype that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from rooftile.models.gguf import GGUFFile, GGUFTensor
from rooftile.models.places import Place
from rooftile.models.weights import WHOLE, Blocks

# Values dequantised at a time: enough that numpy's work outweighs the calls, few enough that the
# float32 temporaries stay in the L2 cache (with whole tensors memory traffic is most of the time).
CHUNK = 1 << 16
BLOCKS_OF_32 = ("Q4_0", "Q4_1", "Q8_0")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class GGUFWeights:
    """The tensors of `file` under our names.

    places: of our tensors. `shapes` has the stored tensors, `unexpected` those that no part of the
        model uses.
    interleaved: our names of tensors, and their number of heads, whose rows llama.cpp has reordered
        so that each head's rotary pairs lie side by side; the order is undone while reading.
    norm_offset: llama.cpp has added it to the weights of norms; it is taken off while reading.
    ignored: the file's names that may be there unused.

    Raises:
        ValueError: a tensor of a type that cannot be dequantised; names them all.
    """

    def __init__(
        self,
        file: GGUFFile,
        places: Mapping[str, Place],
        *,
        interleaved: Mapping[str, int],
        norm_offset: float = 0.0,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self._file = file
        self._places = places
        self._interleaved = interleaved
        self._norm_offset = norm_offset
        known = {place.tensor for place in places.values()}
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        self.unexpected = tuple(
            name for name in file.tensors if name not in known and name not in ignored
        )
        unreadable = [
            f"{tensor.name} ({tensor.type_name})"
            for tensor in file.tensors.values()
            if tensor.name in known and tensor.type_name not in PLAIN and not _has_codec(tensor)
        ]
        if unreadable:
            raise ValueError(
                f"{file.path}: tensors of types that cannot be dequantised: "
                f"{', '.join(unreadable)}; convert the model to a type such as Q8_0 or Q4_K"
            )

    def read(self, name: str, out: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        if out.device.type != "cpu":  # one transfer for each tensor, not one for each chunk
            staged = torch.empty(out.shape, dtype=out.dtype)
            self.read(name, staged, rows, columns)
            out.copy_(staged)
            return
        place = self._places[name]
        tensor = self._file.tensors[place.tensor]
        first, last, _ = rows.indices(place.rows)
        first, last = first + place.first_row, last + place.first_row
        if len(tensor.shape) == 1:
            values = self._vector(name, tensor)[first:last]
            out.copy_(values - self._norm_offset if name.endswith("norm") else values)
            return
        target = out
        heads = self._interleaved.get(name)
        if heads is not None:
            head_dim = place.rows // heads
            # [heads, pair, half, in] as the file orders them <- [heads, half, pair, in].
            target = out.view(-1, 2, head_dim // 2, out.shape[1]).transpose(1, 2)
            step = head_dim * max(1, CHUNK // (head_dim * tensor.shape[-1]))
        else:
            step = max(1, CHUNK // tensor.shape[-1])
        for start in range(first, last, step):
            end = min(start + step, last)
            values = read_rows(self._file, tensor, start, end)[:, columns]
            if heads is None:
                target[start - first : end - first] = values
            else:
                block = target[(start - first) // head_dim : (end - first) // head_dim]
                block.copy_(values.reshape(block.shape))

    def blocks(self, name: str, rows: slice = WHOLE) -> Blocks | None:
        """A matrix's rows as they are stored, where its type has blocks of 32 columns."""
        import numpy as np

        place = self._places[name]
        tensor = self._file.tensors[place.tensor]
        if tensor.type_name not in BLOCKS_OF_32 or len(tensor.shape) < 2:
            return None
        first, last, _ = rows.indices(place.rows)
        row_bytes = tensor.nbytes // prod(tensor.shape[:-1])
        stored = np.frombuffer(self._file.data, np.uint8, tensor.nbytes, tensor.start)
        data = stored.reshape(-1, row_bytes)[place.first_row : place.first_row + place.rows]
        heads = self._interleaved.get(name)
        if heads is None:
            return Blocks(tensor.type_name, data[first:last], None)
        # Ours: [heads, half, pair]; the file's: [heads, pair, half].
        order = np.arange(place.rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return Blocks(tensor.type_name, data, np.ascontiguousarray(order[first:last]))

    def _vector(self, name: str, tensor: GGUFTensor) -> Tensor:
        values = read_vector(self._file, tensor)
        heads = self._interleaved.get(name)
        if heads is None:
            return values
        return values.view(heads, -1, 2).transpose(1, 2).flatten()


def read_vector(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """All values of a one-dimensional tensor."""
    row = GGUFTensor(tensor.name, (1, *tensor.shape), tensor.type_name, tensor.start, tensor.nbytes)
    return read_rows(file, row, 0, 1)[0]


def read_rows(file: GGUFFile, tensor: GGUFTensor, start: int, end: int) -> Tensor:
    """Rows [start, end), over all dimensions but the last, in float32, or as stored where the file has plain numbers."""
    import numpy as np

    row_bytes = tensor.nbytes // prod(tensor.shape[:-1])
    raw = np.frombuffer(
        file.data, np.uint8, (end - start) * row_bytes, tensor.start + start * row_bytes
    )
    if tensor.type_name in PLAIN:
        # A copy: torch takes memory that is mapped read-only under protest.
        return torch.from_numpy(raw.copy()).view(PLAIN[tensor.type_name]).view(end - start, -1)
    from gguf.quants import dequantize

    values = dequantize(raw.reshape(end - start, row_bytes), _ggml_type(tensor))
    return torch.from_numpy(np.ascontiguousarray(values))


def _ggml_type(tensor: GGUFTensor) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType[tensor.type_name]


def _has_codec(tensor: GGUFTensor) -> bool:
    """Whether the gguf package can dequantise this type: it says so only when it is tried."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = _ggml_type(tensor)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return tensor.type_name[0] != "I" or tensor.type_name.startswith("IQ")
