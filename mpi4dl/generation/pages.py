"""Which pages of the cache are whose: integers only.

    page     0  1  2  3  4  5  6  7  8 ...      each holds keys and values of `page_size` tokens, of every layer
    owner    A  A  A  .  B  B  .  .  C ...

A request has all the pages that it may ever need from its admission on, so that those that run never wait for each
other, and gives them back at its end. They are neighbours where possible: keys and values are then read in place.
"""

from collections.abc import Sequence


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold so many tokens."""
    return -(-num_tokens // page_size)


class PagePool:
    """Pages 0 to `num_pages` - 1, those that are free and those that are not."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(num_pages))

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many pages: the shortest run of free neighbours that has them, or else any; None if there are not so
        many.
        """
        if count > len(self._free):
            return None
        runs: list[list[int]] = []
        for page in sorted(self._free):
            if runs and runs[-1][-1] == page - 1:
                runs[-1].append(page)
            else:
                runs.append([page])
        fitting = [run for run in runs if len(run) >= count]
        longest_first = [page for run in sorted(runs, key=len, reverse=True) for page in run]
        pages = tuple((min(fitting, key=len) if fitting else longest_first)[:count])
        self._free.difference_update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """These pages are free again."""
        assert self._free.isdisjoint(pages), "a page was given back twice"
        self._free.update(pages)
