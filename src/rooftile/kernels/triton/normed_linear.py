"""Norm, linear layer and gate in one launch for few rows: see linear.py beside this."""

from rooftile.kernels.triton.linear import NORMED as KERNELS

__all__ = ["KERNELS"]
