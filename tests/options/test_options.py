"""The mechanism behind the options, on a config of two options: one line declares an option, and it is everywhere."""

from dataclasses import dataclass, field

import pytest

from mpi4dl.options.declare import Option, option, options_of, parse_options, to_toml
from mpi4dl.options.kinds import BOOLEAN, COUNT


@dataclass(frozen=True)
class Kitchen:
    num_ovens: int = option(2, "how many ovens, 100 % electric", COUNT)


@dataclass(frozen=True)
class Garden:
    roses: bool = option(True, "whether there are roses", BOOLEAN, per_rank=True)


@dataclass(frozen=True)
class House:
    kitchen: Kitchen = field(default_factory=Kitchen)
    garden: Garden = field(default_factory=Garden)


@dataclass(frozen=True)
class HouseWithTwoKitchens(House):
    second: Kitchen = field(default_factory=Kitchen)


def test_one_line_declares_an_option() -> None:
    assert options_of(House) == {
        "num_ovens": Option("num_ovens", "kitchen", 2, "how many ovens, 100 % electric", COUNT, False, False),
        "roses": Option("roses", "garden", True, "whether there are roses", BOOLEAN, True, False),
    }
    assert parse_options(House, ["--num-ovens", "3", "--no-roses"], "", "") == House(Kitchen(3), Garden(False))
    assert to_toml(House()) == "[kitchen]\nnum_ovens = 2\n\n[garden]\nroses = true\n"


def test_a_percent_sign_in_a_help_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(House, ["--help"], "house [--FLAG VALUE ...]", "Build a house.")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: house [--FLAG VALUE ...] Build a house.")
    assert "--num-ovens N how many ovens, 100 % electric (default: 2)" in text


def test_an_option_that_is_declared_twice_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="num_ovens is declared twice"):
        options_of(HouseWithTwoKitchens)
