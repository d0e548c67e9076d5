"""Paged KV memory. Free of torch; the tensors are in `rooftile.kvcache.storage`."""

from rooftile.kvcache.cache import KVCache
from rooftile.kvcache.page_table import PageCopy, PageTable
from rooftile.kvcache.pool import NO_PAGE, OutOfPages, PagePool
from rooftile.kvcache.prefix import PrefixTree
from rooftile.kvcache.spec import KVGroup, group_layers
from rooftile.kvcache.stats import KVStats, PageCounts

__all__ = [
    "NO_PAGE",
    "KVCache",
    "KVGroup",
    "KVStats",
    "OutOfPages",
    "PageCopy",
    "PageCounts",
    "PagePool",
    "PageTable",
    "PrefixTree",
    "group_layers",
]
