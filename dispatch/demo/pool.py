"""Pages of one KV cache: who holds which."""

from __future__ import annotations

from attnmux.dispatch.errors import complaint


class PagePool:
    """Hands out pages by number. A page has one holder at a time.

    Args:
        num_pages: pages in the cache.
        page_size: keys a page holds.

    Attributes:
        peak: the most pages that were held at once.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(complaint(name, value, "at least 1"))
        self.num_pages = num_pages
        self.page_size = page_size
        self.peak = 0
        self._free = list(reversed(range(num_pages)))  # a stack: pages that were used last are used next
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._held)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many keys."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """``count`` pages of whatever content.

        Raises:
            ValueError: fewer are free.
        """
        if count > self.free:
            raise ValueError(complaint("count", count, f"at most the {self.free} free pages"))
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        self.peak = max(self.peak, self.used)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Return pages and empty the list.

        Raises:
            ValueError: a page is not held, or named twice; none is returned then.
        """
        if len(set(pages)) != len(pages) or not self._held.issuperset(pages):
            raise ValueError(complaint("pages", pages, f"distinct pages among the {self.used} held ones"))
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
        pages.clear()
