"""Linear layers of several groups in one call, each over its own rows: the experts of a mixture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.ops.check import (
    check_device,
    check_float,
    check_same,
    check_shape,
    check_tensors,
    refuse_gradient,
    require,
)
from rooftile.ops.operator import Operator, contents_checked


@dataclass(frozen=True)
class GroupedLinearCall:
    """The static properties that choose a kernel."""

    device: str
    dtype: torch.dtype


def grouped_linear(
    x: Tensor,  # [rows, in_features]
    weight: Tensor,  # [groups, out_features, in_features]
    group_sizes: Tensor,  # [groups] int32 or int64
    *,
    kernel: str = "auto",
) -> Tensor:
    """Each group's rows of x times its matrix, transposed -> [rows, out_features] in x's dtype.

    Rows come sorted by group: the first group_sizes[0] of them belong to group 0, and so on. A
    group may be empty. Accumulated in float32 or wider. Not differentiable.

    Args:
        x: [rows, in_features]
        weight: [groups, out_features, in_features]
        group_sizes: [groups] int32 or int64

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; and, where the contents are checked
            (on a CPU, or with ROOFTILE_CHECK=1), sizes below 0 or whose sum is not the rows of x.
        NotImplementedError: inputs that require a gradient.
    """
    name = "grouped_linear"
    check_tensors(name, x=x, weight=weight, group_sizes=group_sizes)
    check_float(name, x=x)
    check_same(name, x=x, weight=weight)
    check_device(name, x=x, group_sizes=group_sizes)
    require(
        weight.dim() == 3,
        lambda: (
            f"{name}: weight has shape {list(weight.shape)}; expected [groups, out_features, in_features]"
        ),
    )
    require(
        x.dim() == 2 and x.shape[1] == weight.shape[2],
        lambda: (
            f"{name}: x has shape {list(x.shape)}; expected [rows, in_features] with in_features = "
            f"{weight.shape[2]}, as the weight has"
        ),
    )
    check_shape(name, "group_sizes", group_sizes, (weight.shape[0],), "[groups]")
    require(
        group_sizes.dtype in (torch.int32, torch.int64),
        lambda: f"{name}: group_sizes has dtype {group_sizes.dtype}; convert it to torch.int64",
    )
    refuse_gradient(name, "call `linear` for each group, or ", x=x, weight=weight)
    if contents_checked(x):
        sizes = group_sizes.tolist()
        require(
            min(sizes, default=0) >= 0 and sum(sizes) == x.shape[0],
            lambda: (
                f"{name}: group_sizes is {sizes}; sizes must not be negative and their sum must be "
                f"the {x.shape[0]} rows of x"
            ),
        )
    return GROUPED_LINEAR.handle(x, weight, group_sizes, kernel)


GROUPED_LINEAR = Operator(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor group_sizes) -> Tensor",
    module="grouped_linear",
    families=("triton", "torch", "reference"),
    call=lambda x, *_: GroupedLinearCall(x.device.type, x.dtype),
    fake=lambda x, weight, _: x.new_empty((x.shape[0], weight.shape[1])),
)
