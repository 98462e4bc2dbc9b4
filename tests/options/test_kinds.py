"""Every kind of value: what it takes from a flag and from a file, what it refuses, and that TOML gives it back."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.options import kinds
from mpi4dl.options.kinds import Kind, dump
from tests.support.brute_force import patient


def from_flag(kind: Kind, text: str) -> Any:
    return kind.check(kind.read(text))


def through_toml(raw: Any) -> Any:
    return tomllib.loads(f"value = {dump(raw)}")["value"]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (kinds.COUNT, "7", 7),
        (kinds.COUNT_OR_ZERO, "0", 0),
        (kinds.NUMBER, "-3", -3.0),
        (kinds.NUMBER, "1e-4", 1e-4),
        (kinds.POSITIVE, ".5", 0.5),
        (kinds.PROPER_FRACTION, "0.5", 0.5),
        (kinds.TEXT, "", ""),
        (kinds.choice("auto", "cpu"), "cpu", "cpu"),
        (kinds.optional(kinds.COUNT), "None", None),
        (kinds.optional(kinds.COUNT), "5", 5),
        (kinds.IMAGE_SIZE, "1024", (1024,)),
        (kinds.IMAGE_SIZE, "768x1024", (768, 1024)),
        (kinds.IMAGE_SIZE, "96x64x32", (96, 64, 32)),
        (kinds.GRIDS, "2x3", ((2, 3),)),
        (kinds.GRIDS, "2x2, 1x2,1x1", ((2, 2), (1, 2), (1, 1))),
        (kinds.GRIDS, "2x2x1", ((2, 2, 1),)),
        (kinds.GRIDS, "4", ((4,),)),
        (kinds.COUNTS, "2", (2,)),
        (kinds.COUNTS, "1,1,2", (1, 1, 2)),
        (kinds.either(kinds.COUNTS, "auto", "flops"), "flops", "flops"),
        (kinds.either(kinds.COUNTS, "auto", "flops"), "3,4", (3, 4)),
        (kinds.either(kinds.COUNT, "epoch", "none"), "epoch", "epoch"),
        (kinds.either(kinds.COUNT, "epoch", "none"), "12", 12),
        (kinds.or_auto(kinds.NOT_NEGATIVE), "auto", "auto"),
        (kinds.or_auto(kinds.NOT_NEGATIVE), "0.5", 0.5),
        (kinds.or_auto(kinds.KEYWORDS), "a=1", {"a": 1}),
        (kinds.KEYWORDS, "", {}),
        (kinds.KEYWORDS, "depth=29,pool=max", {"depth": 29, "pool": "max"}),
        (kinds.KEYWORDS, "a=1.5, b=true, c=False, d=-1e-4", {"a": 1.5, "b": True, "c": False, "d": -1e-4}),
        (kinds.KEYWORDS, "a='x,y',b=\"1\"", {"a": "x,y", "b": "1"}),
        (kinds.KEYWORDS, "betas=(0.9,0.999),milestones=[30,60]", {"betas": [0.9, 0.999], "milestones": [30, 60]}),
        (kinds.KEYWORDS, "nested={'a': [1, 2]},path=a=b", {"nested": {"a": [1, 2]}, "path": "a=b"}),
    ],
)  # fmt: skip
def test_reads_a_flag(kind: Kind, text: str, value: Any) -> None:
    read = from_flag(kind, text)
    assert read == value
    assert type(read) is type(value)
    assert kind.check(through_toml(kind.raw(read))) == value


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (kinds.COUNT, ["0", "-1", "4.0", "four", ""]),
        (kinds.COUNT_OR_ZERO, ["-1"]),
        (kinds.NUMBER, ["nan", "inf", "x"]),
        (kinds.POSITIVE, ["0", "-1"]),
        (kinds.NOT_NEGATIVE, ["-0.1"]),
        (kinds.PROPER_FRACTION, ["1", "0", "-0.1"]),
        (kinds.NAME, ["", "  ", "\udcff"]),
        (kinds.choice("auto", "cpu"), ["gpu", "CPU", ""]),
        (kinds.optional(kinds.COUNT), ["0", "null"]),
        (kinds.IMAGE_SIZE, ["0", "12x", "x12", "1x2x3x4", "-5", "1 x 2", "2x0"]),
        (kinds.GRIDS, ["2x2x2x2", "0x2", "2x0", "axb", "", "1x1,", "1x1;1x1"]),
        (kinds.COUNTS, ["0", "", "1,", "a", "1.0", "-1"]),
        (kinds.either(kinds.COUNTS, "auto"), ["automatic", "3,", ""]),
        (kinds.either(kinds.COUNT, "none"), ["never", "0", "1.5", ""]),
        (kinds.KEYWORDS, ["a", "a=1,", "a=1,a=2", "1a=3", "=3", "a=None", "a={1,2}", "a=(1,2", "a=[x]", "a=b'c'"]),
    ],
)
def test_refuses_a_flag(kind: Kind, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ValueError):  # noqa: PT011
            from_flag(kind, text)


@pytest.mark.parametrize(
    ("kind", "raws"),
    [
        (kinds.COUNT, [True, 1.0, "1", [1]]),
        (kinds.NUMBER, [True, "1", float("nan"), float("inf")]),
        (kinds.BOOLEAN, [0, 1, "true"]),
        (kinds.TEXT, [1, True, ["a"]]),
        (kinds.GRIDS, [1.5, True, [2, 2]]),
        (kinds.IMAGE_SIZE, [0, True, 1.5, [2, 2]]),
        (kinds.KEYWORDS, ["a=1", [1], {"a b": 1}, {"a": object()}]),
        (kinds.choice("auto"), [1, ["auto"]]),
    ],
)
def test_refuses_what_a_file_says(kind: Kind, raws: list[Any]) -> None:
    for raw in raws:
        with pytest.raises(ValueError):  # noqa: PT011
            kind.check(raw)


def test_a_file_may_give_an_image_size_and_a_float_as_whole_numbers() -> None:
    assert kinds.IMAGE_SIZE.check(1024) == (1024,)
    value = kinds.NUMBER.check(3)
    assert value == 3.0
    assert isinstance(value, float)


raw_values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@patient
@given(raw_values)
def test_toml_gives_back_every_value(raw: Any) -> None:
    assert through_toml(raw) == raw


@patient
@given(st.dictionaries(st.text(), st.integers(), max_size=4))
def test_the_order_of_a_table_does_not_matter(table: dict[str, int]) -> None:
    assert dump(table) == dump(dict(reversed(table.items())))
