"""Numbers as people write them."""

import pytest

from mpi4dl._wording import aligned, counted, mebibytes, runs


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((4,), "4"), ((0, 1, 2, 3), "0-3"), ((4, 3, 2), "4-2"), ((0, 1, 5, 7, 6), "0-1,5,7-6"), ((), "")],
)
def test_numbers_in_short(numbers: tuple[int, ...], text: str) -> None:
    assert runs(numbers) == text


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(number, "rank reads", "ranks read") for number in (1, 3)] == ["1 rank reads", "3 ranks read"]


def test_a_table_has_numbers_on_the_right_and_no_trailing_spaces() -> None:
    rows = [["stage", "tiles"], ["0", "2x2"], ["11", "1x1 x 2"]]
    assert list(aligned(rows, left={"tiles"})) == ["stage  tiles", "    0  2x2", "   11  1x1 x 2"]


def test_bytes_are_mebibytes_with_one_decimal() -> None:
    assert mebibytes(1_234_567_890) == "1,177.4 MiB"
