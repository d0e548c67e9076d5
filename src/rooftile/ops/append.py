"""Writing new keys and values into their pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.ops.check import (
    check_device,
    check_flags,
    check_integers,
    check_rotary_table,
    check_same,
    check_shape,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import Operator, contents_checked
from rooftile.ops.paged_check import check_pages, check_scales, check_slots


@dataclass(frozen=True)
class AppendCall:
    """The static properties that choose a kernel of append_kv."""

    device: str
    dtype: torch.dtype
    heads: int
    k_dim: int
    v_dim: int
    page_size: int
    rotary_dim: int  # 0: no rotation
    interleaved: bool
    kv_dtype: torch.dtype | None = None  # of the pages, where it is not k's


def append_kv(
    k: Tensor,  # [tokens, heads, k_dim]
    v: Tensor,  # [tokens, heads, v_dim]
    k_pages: Tensor,  # [num_pages, heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, heads, page_size, v_dim]
    slots: Tensor,  # [tokens] int64 or int32
    *,
    positions: Tensor | None = None,  # [tokens] int64 or int32
    cos_sin: Tensor | None = None,  # [max_position, 2, rotary_dim / 2] float32
    interleaved: bool = False,
    k_scale: Tensor | None = None,  # [heads] float32
    v_scale: Tensor | None = None,  # [heads] float32
    kernel: str = "auto",
) -> None:
    """Write each token's key and value into its slot, page * page_size + offset, in place.

    A token with slot -1 is not written and its row may hold anything. With `cos_sin`, keys are
    first rotated as `rotary_embedding` does, by the angles at `positions`, which need not follow
    the slots. Slots of one call must differ, except -1. Pages may be torch.float8_e4m3fn: they
    then get k / k_scale[head] and v / v_scale[head], cut to +-448.

    Args:
        k: [tokens, heads, k_dim]
        v: [tokens, heads, v_dim]
        k_pages: [num_pages, heads, page_size, k_dim]
        v_pages: [num_pages, heads, page_size, v_dim]
        slots: [tokens] int64 or int32
        positions: [tokens] int64 or int32
        cos_sin: [max_position, 2, rotary_dim / 2] float32
        k_scale: [heads] float32
        v_scale: [heads] float32

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; and, where the contents
            are checked (on a CPU, or with ROOFTILE_CHECK=1), slots outside the pages, repeated
            slots, or positions outside the table.
        NotImplementedError: inputs that require a gradient.
    """
    name = "append_kv"
    check_pages(name, k, "k", k_pages, v_pages)
    for tensor_name, tensor, pages in (("k", k, k_pages), ("v", v, v_pages)):
        expected = (k.shape[0], pages.shape[1], pages.shape[3])
        check_shape(name, tensor_name, tensor, expected, "[tokens, heads, dim] of its pages")
    check_same(name, k=k, v=v)
    check_scales(name, k_pages, v_pages, k_scale, v_scale)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    pools = {"k_pages": k_pages, "v_pages": v_pages}
    refuse_gradient(name, "", k=k, v=v, **pools, cos_sin=cos_sin, **scales)
    check_flags(name, interleaved=interleaved)
    for pages_name, pages in pools.items():
        require(
            all(pages.stride(i) or pages.shape[i] < 2 for i in range(4)),
            lambda pages_name=pages_name: (  # type: ignore[misc]
                f"{name}: {pages_name} is expanded, so that several slots are one place in memory; "
                f"give pages of their own"
            ),
        )
    check_integers(name, "slots", slots, k, "k")
    check_shape(name, "slots", slots, (k.shape[0],), "[tokens]")
    require(
        (positions is None) == (cos_sin is None),
        lambda: (
            f"{name}: {'positions' if cos_sin is None else 'cos_sin'} is given alone; "
            f"give both positions and cos_sin to rotate k, or neither"
        ),
    )
    if positions is not None and cos_sin is not None:
        check_integers(name, "positions", positions, k, "k")
        check_shape(name, "positions", positions, (k.shape[0],), "[tokens]")
        check_device(name, k=k, cos_sin=cos_sin)
        check_rotary_table(name, cos_sin, k.shape[-1])
    if contents_checked(slots):
        check_slots(name, slots, k_pages.shape[0] * k_pages.shape[2], positions, cos_sin)
    APPEND_KV.handle(
        *(k, v, k_pages, v_pages, slots, positions, cos_sin, interleaved),
        *(k_scale, v_scale, kernel),
    )


APPEND_KV = Operator(
    "append_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots,"
    " Tensor? positions, Tensor? cos_sin, bool interleaved, Tensor? k_scale, Tensor? v_scale)"
    " -> ()",
    module="paged",
    families=("triton", "cpu", "torch", "reference"),
    call=lambda k, v, k_pages, v_pages, slots, positions, cos_sin, interleaved, *_: AppendCall(
        k.device.type,
        k.dtype,
        k.shape[1],
        k.shape[2],
        v.shape[2],
        k_pages.shape[2],
        rotary_dim=0 if cos_sin is None else 2 * cos_sin.shape[2],
        interleaved=interleaved,
        kv_dtype=None if k_pages.dtype == k.dtype else k_pages.dtype,
    ),
    fake=lambda *_: None,
)
