"""Which products the kernels for few rows take (linear.py). Needs neither torch nor Triton."""

MOST_ROWS = 4


def takes(rows: int, in_features: int) -> bool:
    """Whether they take a product; the vendor's, or another kernel of ours, takes the others."""
    return 0 < rows <= MOST_ROWS and in_features > 0 and in_features % 16 == 0
