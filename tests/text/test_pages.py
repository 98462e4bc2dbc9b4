"""Pages have one owner each, are neighbours where possible, and all come back; how tokens are packed into rows."""

from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.text.model import PagePool, TokenPortion, pack, pages_for


@given(st.lists(st.integers(-3, 6), max_size=40), st.integers(1, 20))
def test_every_page_has_one_owner(asked: list[int], num_pages: int) -> None:
    """Positive: take so many; negative: one of those who have some gives them back."""
    pool, owners = PagePool(num_pages), []
    for count in asked:
        if count > 0:
            pages, free = pool.take(count), num_pages - sum(map(len, owners))
            assert (pages is None) == (count > free)
            owners += [] if pages is None else [pages]
        elif owners:
            pool.give_back(owners.pop(count % len(owners)))
        owned = [page for pages in owners for page in pages]
        assert len(set(owned)) == len(owned) == pool.num_used
        assert set(owned) <= set(range(num_pages))


def test_neighbours_where_possible() -> None:
    pool = PagePool(10)
    first, second, third = pool.take(4), pool.take(3), pool.take(3)
    assert (first, second, third) == ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))
    pool.give_back((1, 2, 4, 5, 6))
    assert pool.take(2) == (1, 2)  # the run that fits best
    pool.give_back((1, 2, 9))
    assert pool.take(4) == (4, 5, 6, 1)  # no run is long enough
    assert pool.take(3) is None
    assert [pages_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_tokens_whose_next_is_wanted_come_first() -> None:
    portions = [
        TokenPortion(0, 3, (30,), (0,), True),
        TokenPortion(0, 0, (10, 11, 12), (1,), True),
        TokenPortion(1, 5, (50, 51), (0,), False),
        TokenPortion(0, 9, (90,), (2,), True),
    ]
    packed = pack(portions, 2)
    assert packed.tokens.tolist() == [[30, 12, 90, 10, 11, 0, 0, 0], [50, 51, 0, 0, 0, 0, 0, 0]]
    assert packed.positions.tolist() == [[3, 2, 9, 0, 1, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]]
    assert packed.columns == ((0,), (3, 4, 1), (0, 1), (2,))
    assert packed.num_wanted == 3
    assert pack([TokenPortion(0, 0, (1,) * 9, (0,), False)], 1).tokens.shape == (1, 16)
