"""PagePool: a page is free exactly when nobody holds it."""

from __future__ import annotations

import pytest

from rooftile.kvcache import OutOfPages, PagePool


def test_every_page_is_handed_out_once_and_comes_back_after_its_last_holder() -> None:
    pool = PagePool(3)
    pages = [pool.allocate() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    assert pool.num_free == 0
    assert pool.share(pages[1]) == 2
    assert pool.release(pages[1]) == 1
    assert (pool.num_free, pool.refcount(pages[1])) == (0, 1)
    assert pool.release(pages[1]) == 0
    assert (pool.num_free, pool.refcount(pages[1])) == (1, 0)
    assert pool.allocate() == pages[1]


def test_misuse_is_an_error() -> None:
    pool = PagePool(1)
    with pytest.raises(ValueError, match="page 0 is free and cannot be shared"):
        pool.share(0)
    with pytest.raises(ValueError, match="page 0 is free already"):
        pool.release(0)
    page = pool.allocate()
    with pytest.raises(OutOfPages, match="all 1 pages are held"):
        pool.allocate()
    pool.release(page)
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)
