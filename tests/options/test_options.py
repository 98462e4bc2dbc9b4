"""The mechanism behind the options, on a config of two options: one line declares an option, and it is everywhere."""

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from mpi4dl.options.declare import (
    ConfigError,
    Option,
    from_keywords,
    instead,
    option,
    options_of,
    parse_options,
    same_as,
    to_toml,
)
from mpi4dl.options.kinds import BOOLEAN, COUNT


@dataclass(frozen=True)
class Kitchen:
    """Where food is cooked."""

    num_ovens: int = option(
        2,
        "how many ovens, 100 % electric",
        COUNT,
        brief="ovens",
        known_as=same_as("stoves") | instead("use {option} 1", "stove"),
    )


@dataclass(frozen=True)
class Garden:
    """What grows."""

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
        "num_ovens": Option(
            "num_ovens",
            "kitchen",
            2,
            "how many ovens, 100 % electric",
            COUNT,
            False,
            False,
            "ovens",
            {"stoves": "use {option} {value}", "stove": "use {option} 1"},
        ),
        "roses": Option("roses", "garden", True, "whether there are roses", BOOLEAN, True, False),
    }
    assert parse_options(House, ["--num-ovens", "3", "--no-roses"], "", "") == House(Kitchen(3), Garden(False))
    assert to_toml(House()) == "[kitchen]\nnum_ovens = 2\n\n[garden]\nroses = true\n"


def test_a_percent_sign_in_a_help_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(House, ["--help", "all"], "house [--FLAG VALUE ...]", "Build a house.")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: house [--FLAG VALUE ...] Build a house.")
    assert "--num-ovens N how many ovens, 100 % electric (default: 2)" in text


def test_one_process_of_a_job_shows_help(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("PMI_RANK", rank)
        with pytest.raises(SystemExit):
            parse_options(House, ["--help"], "house", "Build a house.")
        assert ("usage" in capsys.readouterr().out) == shown


def test_help_is_an_overview_a_group_or_everything(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for topic in ([], ["kitchen"], ["all"]):
        with pytest.raises(SystemExit) as stop:
            parse_options(House, ["--no-roses", "--help", *topic], "house", "Build a house.")
        assert stop.value.code == 0
        shown["".join(topic)] = capsys.readouterr().out
    assert shown[""] == dedent("""\
        usage: house

        Build a house.

        options that most people use [default]:
          --config FILE  read options from a TOML file; flags override it
          --num-ovens N  ovens [2]

        groups of options:
          kitchen  Where food is cooked.
          garden   What grows.
          all      Every option of all groups.

        --help GROUP shows the options of one group, as in --help kitchen
        """)
    assert ["--roses" in shown[topic] for topic in ("", "kitchen", "all")] == [False, False, True]
    assert "100 % electric" in shown["kitchen"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--stoves 3", "there is no flag --stoves; use --num-ovens 3"),
        ("--STOVES=3", "there is no flag --STOVES; use --num-ovens 3"),
        ("--stoves", "there is no flag --stoves; use --num-ovens N"),
        ("--stove --roses", "there is no flag --stove; use --num-ovens 1"),
    ],
)
def test_a_name_of_other_tools_leads_to_ours(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(House, argv.split(), "", "")
    assert str(caught.value) == message


def test_it_does_so_in_files_and_in_python_too(tmp_path: Path) -> None:
    (tmp_path / "house.toml").write_text("[kitchen]\nstoves = 3\n")
    with pytest.raises(ConfigError, match=r"there is no key stoves in \[kitchen\]; use num_ovens of \[kitchen\]: 3"):
        parse_options(House, ["--config", str(tmp_path / "house.toml")], "", "")
    with pytest.raises(ConfigError, match="there is no option `stoves`; use `num_ovens` 3"):
        from_keywords(House, {"stoves": 3})


def test_an_option_that_is_declared_twice_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="num_ovens is declared twice"):
        options_of(HouseWithTwoKitchens)
