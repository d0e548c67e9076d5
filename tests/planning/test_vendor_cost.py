"""What the vendor's library is predicted to take."""

from __future__ import annotations

import pytest

from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Product
from rooftile.planning.vendor_cost import Vendor, seconds_of


def vendor(sharpness: float) -> Vendor:
    return Vendor(8e-6, 185e12, 8.1e-6, 0.93e12, 0.24e-6, 0.01, sharpness, 2.1e12, 26.0)


@pytest.mark.parametrize("sharpness", [62.6, 81.0, 300.0])
def test_times_that_hardly_add_up_are_the_longer_one(sharpness: float) -> None:
    """Powers of microseconds that are too small for a number: the sum was 0 and took no time."""
    product = Product(68, 147, 141)
    longer = seconds_of(vendor(20.0), product, H200, 2, 0.5)
    found = seconds_of(vendor(sharpness), product, H200, 2, 0.5)
    assert longer / 2 ** (1 / 20) <= found <= longer


def test_less_sharp_costs_add_up_further() -> None:
    product = Product(1000, 1000, 1001)
    times = [seconds_of(vendor(s), product, H200, 2, 0.5) for s in (1.0, 2.0, 8.0, 60.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] <= 2 * times[-1]
