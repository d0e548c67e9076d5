"""Reference-counted page ids."""

from __future__ import annotations

NO_PAGE = -1  # stands where a page has been given back


class OutOfPages(RuntimeError):
    """Neither free nor evictable pages suffice; whoever raised it has changed nothing."""


class PagePool:
    """Page ids 0..num_pages-1 of one KV group, each free or held by one or more holders."""

    __slots__ = ("_free", "_refcounts", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"PagePool: num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self._refcounts = [0] * num_pages
        # A stack: the page freed last is the one most likely still in the processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def allocate(self) -> int:
        """A free page, now with one holder. Raises OutOfPages when there is none."""
        if not self._free:
            raise OutOfPages(f"all {self.num_pages} pages are held")
        page = self._free.pop()
        self._refcounts[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more holder of a held page; returns how many there are now."""
        count = self._refcounts[page]
        if count == 0:
            raise ValueError(f"page {page} is free and cannot be shared; allocate it first")
        self._refcounts[page] = count + 1
        return count + 1

    def release(self, page: int) -> int:
        """One holder less; the page is free when none is left. Returns how many are left."""
        count = self._refcounts[page] - 1
        if count < 0:
            raise ValueError(f"page {page} is free already; it was released once too often")
        self._refcounts[page] = count
        if count == 0:
            self._free.append(page)
        return count
