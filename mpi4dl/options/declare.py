"""Options as dataclass fields: each is at once a flag, a key of a TOML file, a line of the help, and a check.

A section is a frozen dataclass whose fields are made by `option`, a config is a frozen dataclass of sections, and the
functions here work on any such config. The name of an option is unique over all sections.
"""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from mpi4dl._commands import is_first
from mpi4dl._files import read_regular
from mpi4dl._wording import aligned, printable, quoted
from mpi4dl.options.kinds import BOOLEAN, Kind, dump
from mpi4dl.options.removed import REMOVED

T = TypeVar("T")

CLOSE = 0.75  # of 1 for equal names: a slip of the pen, not another word
HELP = ("-h", "--help")
ALL = "all"  # the topic of --help that shows every option
SAME = "use {option} {value}"
LONGEST_METAVAR = 12
LONGEST_VALUE = 300  # characters of a value that is shown in a message


class ConfigError(ValueError):
    """The user's request cannot be done; the message says why, and what to do.

    Values that come from files are in it as `printable` shows them.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


@contextmanager
def saying(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds, or a ValueError, becomes a ConfigError that begins with this."""
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise ConfigError(f"{what}: {getattr(error, 'strerror', None) or error}") from None


@dataclass(frozen=True)
class Option:
    """One option, as declared; `per_rank` ones may differ from rank to rank, `flag_only` ones are no key of a file.

    `changes_results`: a job goes on only with the same value. Others change results by rounding alone, or none.
    `brief`: its line in the overview of `--help`, for the options that most people use; empty: it is not there.
    `known_as`: what other tools call it, and what to do instead, with `{option}` and `{value}` in place of ours.
    `called`: the name that users see, if it is not that of the field, which still works.
    `needs`: options without any of which it has no effect. `not_with`: options with any of which it has none.
    """

    name: str
    section: str
    default: Any
    help: str
    kind: Kind
    per_rank: bool = False
    flag_only: bool = False
    brief: str = ""
    known_as: Mapping[str, str] = field(default_factory=dict)
    changes_results: bool = True
    called: str = ""
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()

    @property
    def public(self) -> str:
        """Its name for users, as a key of a file has it."""
        return self.called or self.name

    @property
    def flag(self) -> str:
        return "--" + self.public.replace("_", "-")

    @property
    def former_flags(self) -> list[str]:
        """The flags of its former name, which still work."""
        return ["--" + self.name.replace("_", "-")] if self.called else []

    @property
    def negation(self) -> str:
        """The flag that switches off an option whose kind has a switch."""
        return self.flag.replace("--", "--no-", 1)

    @property
    def flags(self) -> list[str]:
        return [self.flag] if self.kind.switch is None else [self.flag, self.negation]

    def of(self, config: Any) -> Any:
        """The value of the option in a config."""
        return getattr(getattr(config, self.section), self.name)

    def add_to(self, parser: Any, help: str | None = None) -> None:
        """Add the flags to a parser of argparse, or to a group of one."""
        if self.kind is BOOLEAN:
            parser.add_argument(self.flag, help=help, action=argparse.BooleanOptionalAction)
        elif self.kind.switch is None:
            parser.add_argument(self.flag, help=help, metavar=self.kind.metavar, dest=self.name)
            for flag in self.former_flags:
                parser.add_argument(flag, help=argparse.SUPPRESS, metavar=self.kind.metavar, dest=self.name)
        else:
            on, off = self.kind.switch
            parser.add_argument(self.flag, help=help, metavar=self.kind.metavar, nargs="?", const=on)
            without = {"dest": self.name, "action": "store_const", "const": off}
            parser.add_argument(self.negation, help=f"as {self.flag} {off}", **without)

    def words(self, value: Any) -> list[str]:
        """The words of a command line that give the option this value."""
        if self.kind is BOOLEAN:
            return [self.flag if value else self.negation]
        raw = self.kind.raw(value)
        text = ",".join(f"{key}={each!r}" for key, each in raw.items()) if isinstance(raw, dict) else str(raw)
        return [self.flag, text]

    @property
    def default_shown(self) -> str:
        raw = self.kind.raw(self.default)
        return raw if isinstance(raw, str) and raw else dump(raw)


def option(default: Any, help: str, kind: Kind, **more: Any) -> Any:
    """Declare a field of a section; `more` are others of `Option`."""
    metadata = {"help": help, "kind": kind, **more}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


neutral = partial(option, changes_results=False)


def same_as(names: str) -> dict[str, str]:
    """For `known_as`: names of other tools for an option that takes the same values, with spaces between them."""
    return instead(SAME, names)


def instead(remedy: str, names: str) -> dict[str, str]:
    """For `known_as`: names of other tools, with spaces between them, and what to do instead of each."""
    return dict.fromkeys(names.split(), remedy)


def like(section: type, name: str, **more: Any) -> Any:
    """Declare a field of a section as another section declares the field of that name, but for `more`."""
    found = next(each for each in fields(section) if each.name == name)
    metadata = {**found.metadata, **more}
    if found.default is MISSING:
        return field(default_factory=found.default_factory, metadata=metadata)
    return field(default=found.default, metadata=metadata)


def sections_of(config_type: type) -> dict[str, type]:
    """The sections of a config by name, in the order of their declaration."""
    hints = get_type_hints(config_type)
    return {each.name: hints[each.name] for each in fields(config_type)}


def options_of(config_type: type) -> dict[str, Option]:
    """All options of a config by name, in the order of their declaration."""
    options: dict[str, Option] = {}
    for section, section_type in sections_of(config_type).items():
        for leaf in fields(section_type):
            assert leaf.name not in options, f"{leaf.name} is declared twice"
            default = leaf.default if leaf.default_factory is MISSING else leaf.default_factory()
            options[leaf.name] = Option(leaf.name, section, default, **leaf.metadata)
    return options


def _parser(config_type: type, usage: str = "", description: str = "", section: str = "") -> argparse.ArgumentParser:
    """The parser of the flags of a config, or of one section. It raises ArgumentError."""
    parser = argparse.ArgumentParser(
        usage=usage,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        exit_on_error=False,
    )
    if len(sections_of(config_type)) < 2:
        parser.add_argument(*HELP, action="store_true", help="show this help")
    elif not section:
        parser.add_argument(*HELP, metavar="GROUP", nargs="?", help="show the most used options, one group, or all")
    if not section and sections_of(config_type):
        parser.add_argument("--config", metavar="FILE", help="read options from a TOML file; flags override it")
    groups: dict[str, Any] = {}
    for item in options_of(config_type).values():
        if section not in ("", item.section):
            continue
        if item.section not in groups:
            groups[item.section] = parser.add_argument_group(item.section)
        item.add_to(groups[item.section], f"{item.help} (default: {item.default_shown})".replace("%", "%%"))
    return parser


def asked_topic(argv: Sequence[str]) -> str | None:
    """The topic of `--help` in a command line: a group, all, or empty for the overview; None without `--help`."""
    for place, word in enumerate(argv):
        flag, equals, topic = word.partition("=")
        if flag in HELP:
            following = "".join(argv[place + 1 : place + 2])
            return topic if equals else "" if following.startswith("-") else following
    return None


def help_text(config_type: type, topic: str, usage: str, description: str) -> str:
    """The text of `--help TOPIC`: of few options always all. Raises ConfigError for a topic that is no group."""
    sections = {name: (found.__doc__ or "").partition("\n")[0] for name, found in sections_of(config_type).items()}
    if topic in sections:
        return _parser(config_type, usage, sections[topic], topic).format_help()
    if topic == ALL or (not topic and len(sections) < 2):
        return _parser(config_type, usage, description).format_help()
    if topic:
        known = (*sections, ALL)
        hint = nearest(topic, known) or f"; the groups are {', '.join(known)}"
        raise ConfigError(f"--help {topic}: there is no group {topic}{hint}")
    common = [item for item in options_of(config_type).values() if item.brief]
    rows = {"--config FILE": "read options from a TOML file; flags override it"}
    for item in common:
        plain, shown = item.kind.metavar.partition("|")[0], item.default_shown
        value = plain if len(plain) <= LONGEST_METAVAR and not plain.startswith("{") else "VALUE"
        if item.kind is BOOLEAN:
            rows[item.negation if item.default else item.flag] = item.brief
        else:
            rows[f"{item.flag} {value}"] = item.brief + f" [{shown}]" * (shown not in ("none", "{}", '""', ""))
    lines = [f"usage: {usage}", "", description, "", "options that most people use [default]:", *_columns(rows)]
    lines += ["", "groups of options:", *_columns({**sections, ALL: "Every option of all groups."})]
    return (
        "\n".join([*lines, "", "--help GROUP shows the options of one group, as in --help " + next(iter(sections))])
        + "\n"
    )


def _columns(rows: Mapping[str, str]) -> list[str]:
    return [f"  {line}" for line in aligned([*rows.items()])]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: `; did you mean ...?`, or nothing where no known name is close.

    Dashes in front are no part of a name: all flags have them.
    """
    candidates = {candidate.lower().lstrip("-"): candidate for candidate in known}
    wanted = name.lower().lstrip("-")
    close = [candidates[match] for match in difflib.get_close_matches(wanted, candidates, n=1, cutoff=CLOSE)]
    return f"; did you mean {close[0]}?" if close else ""


def in_our_words(name: str, value: str, options: Mapping[str, Option], spell: Callable[[Option], str]) -> str:
    """The end of an error about a name that other tools have for something of ours, or that we had: what to do."""
    foreign = name.lower().lstrip("-").replace("_", "-")
    for item in reversed([*options.values()]):  # what a command adds to the options of training counts first
        if foreign in item.known_as:
            given = value or item.kind.metavar
            return "; " + item.known_as[foreign].format(option=spell(item), value=given).rstrip()
    return f"; {REMOVED[foreign]}" if foreign in REMOVED else ""


def _refuse_unknown_argument(unknown: Sequence[str], argv: Sequence[str], options: Mapping[str, Option]) -> NoReturn:
    """`unknown`: the words of the command line `argv` that belong to no option, in their order."""
    (name, _, value), following = unknown[0].partition("="), [*unknown[1:2], "-"][0]
    if not name.startswith("-"):
        raise ConfigError(_misplaced(unknown[0], argv, options))
    if not value and not following.startswith("-"):
        value = following
    flags = ["--help", "--config", *(flag for item in options.values() for flag in item.flags)]
    ours = in_our_words(name, value, options, lambda item: item.flag)
    raise ConfigError(f"there is no flag {name}{ours or nearest(name, flags) or '; --help all lists every flag'}")


def _misplaced(word: str, argv: Sequence[str], options: Mapping[str, Option]) -> str:
    """The error about a word that is the value of no flag."""
    before = argv[: argv.index(word)] if word in argv else ()
    flag = next((each.partition("=")[0] for each in reversed(before) if each.startswith("--")), None)
    for item in options.values():
        if item.kind is BOOLEAN and flag in item.flags:
            return f"{flag} takes no value, but {word!r} follows it: write {item.flag} or {item.negation} alone"
        if flag in (item.flag, *item.former_flags):
            return f"{flag} takes one value, but {word!r} follows it: it must be {item.kind.wanted}"
    return f"the argument {word!r} belongs to no flag; values follow their flag, as in --epochs 3"


def _parse_flags(config_type: type, argv: list[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """The values of all flags as text. Raises ConfigError."""
    try:
        given, unknown = _parser(config_type).parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").partition("/")[0]
        flags = {flag: item for item in options.values() for flag in (*item.flags, *item.former_flags)}
        if flag not in flags:
            raise ConfigError(f"{error}; --help all lists every flag") from None
        named = flags[flag]
        if named.kind is BOOLEAN or flag == named.negation:
            raise ConfigError(f"{flag} takes no value: write {named.flag} or {named.negation} alone") from None
        raise ConfigError(f"{named.flag} has no value: it must be {named.kind.wanted}") from None
    if unknown:
        _refuse_unknown_argument(unknown, argv, options)
    return vars(given)


def _type_name(value: Any) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    return dump(value) if isinstance(value, bool | int | float | str | list | dict) else str(value)


@contextmanager
def _wanted(item: Option, said: str) -> Iterator[None]:
    """A value that cannot be ends in a ConfigError that says so, and what the option must be."""
    try:
        yield
    except (ValueError, RecursionError):
        raise ConfigError(f"{said}, but must be {item.kind.wanted}") from None


def _short(text: str, most: int = 60) -> str:
    """A text of somebody's file in one line, its beginning."""
    return printable(text if len(text) <= most else f"{text[:most]}...")


def tables_of_file(path: str, flag: str) -> dict[str, Any]:
    """The tables of a TOML file that was given by a flag. Raises ConfigError."""
    try:
        return tomllib.loads(read_regular(Path(path)).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {_short(str(error), 300)}") from None


def config_from_tables(config_type: type[T], tables: Mapping[str, Any], file: str) -> T:
    """The config of the tables of a file. Raises ConfigError for what is unknown, or cannot be."""
    options = options_of(config_type)
    return _made(config_type, options, _values_from_tables(tables, options, file))


def _values_from_tables(tables: Mapping[str, Any], options: dict[str, Option], path: str) -> dict[str, Any]:
    allowed = {name: item for name, item in options.items() if not item.flag_only}
    sections = list(dict.fromkeys(item.section for item in options.values()))
    values: dict[str, Any] = {}
    by_name = {item.public: name for name, item in options.items()}
    for section, table in tables.items():
        if section not in sections:
            if section in allowed and not isinstance(table, dict):
                raise ConfigError(f"{path}: the key {section} belongs in the section [{allowed[section].section}]")
            hint = nearest(section, sections) or f"; the sections are {', '.join(sections)}"
            raise ConfigError(f"{path}: there is no section [{_short(section)}]{hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: [{section}] must be a section, but is {_shown(table)} ({_type_name(table)})")
        for key, raw in table.items():
            name = str(by_name.get(key, key))
            if name in allowed and allowed[name].section == section:
                with _wanted(allowed[name], f"{path}: {key} in [{section}] is {_shown(raw)} ({_type_name(raw)})"):
                    values[name] = allowed[name].kind.check(raw)
            elif name in allowed:
                raise ConfigError(f"{path}: the key {key} belongs in [{allowed[name].section}], not [{section}]")
            elif name in options:
                raise ConfigError(f"{path}: {key} is a flag only; give {options[name].flag} on the command line")
            else:
                ours = in_our_words(name, _shown(raw), options, lambda item: f"{item.public} of [{item.section}]:")
                raise ConfigError(
                    f"{path}: there is no key {_short(name)} in [{section}]{ours or nearest(name, allowed)}"
                )
    return values


def _with_preset(config_type: type, options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and below them those that the config has as `below` them, if it has."""
    below: Callable[[Mapping[str, Any]], Mapping[str, Any]] = getattr(config_type, "below", lambda _: {})
    defaults = below(values)
    return {**{name: options[name].kind.check(raw) for name, raw in defaults.items()}, **values}


def parse_options(config_type: type[T], argv: Sequence[str], usage: str, description: str) -> T:
    """Defaults, overridden by a preset, by the file that `--config` names, and by flags, in this order.

    Raises ConfigError for whatever is unknown, of the wrong type, or out of range. Only `--help` exits.
    """
    topic = asked_topic(argv)
    if topic is not None:
        shown = help_text(config_type, topic, usage, description)
        print(shown if is_first() else "", end="")
        sys.exit(0)
    options = options_of(config_type)
    flags = _parse_flags(config_type, list(argv), options)
    file = flags.pop("config", None)
    values: dict[str, Any] = {}
    if file is not None:
        values = _values_from_tables(tables_of_file(file, "--config"), options, file)
    for item, given in ((options[name], given) for name, given in flags.items() if name in options):
        former = "".join(f" (formerly {flag})" for flag in item.former_flags)
        with _wanted(item, f"{item.flag}{former} is {quoted(given, LONGEST_VALUE)}"):
            values[item.name] = item.kind.check(item.kind.read(given) if isinstance(given, str) else given)
    values = _with_preset(config_type, options, values)
    return _made(config_type, options, values)


def _made(config_type: type[T], options: Mapping[str, Option], values: Mapping[str, Any]) -> T:
    """The config with these values, and defaults for the other options."""
    sections = {
        section: section_type(**{name: value for name, value in values.items() if options[name].section == section})
        for section, section_type in sections_of(config_type).items()
    }
    return config_type(**sections)


def to_toml(config: Any) -> str:
    """Write every option but the `flag_only` ones, section by section; reading it back gives the same values."""
    lines: list[str] = []
    section = ""
    for item in options_of(type(config)).values():
        if item.section != section:
            lines += [""] * bool(lines) + [f"[{item.section}]"]
            section = item.section
        if not item.flag_only:
            lines.append(f"{item.public} = {dump(item.kind.raw(item.of(config)))}")
    return "\n".join(lines) + "\n"


def from_keywords(config_type: type[T], values: Mapping[str, Any]) -> T:
    """The config of options given as Python has them, or as a flag's text: `tiles=(2, 2)`, or `tiles="2x2"`.

    Raises ConfigError for what is unknown, or cannot be.
    """
    options = options_of(config_type)
    by_name = {item.public: name for name, item in options.items()}
    values = {by_name.get(name, name): value for name, value in values.items()}
    unknown = next((name for name in values if name not in options), None)
    if unknown is not None:
        ours = in_our_words(unknown, str(values[unknown]), options, lambda item: f"`{item.public}`")
        raise ConfigError(f"there is no option `{unknown}`{ours or nearest(unknown, options)}")
    given = {name: _value_from_python(options[name], value) for name, value in values.items()}
    return _made(config_type, options, _with_preset(config_type, options, given))


def _value_from_python(item: Option, given: Any) -> Any:
    """As a flag has it, as a file has it, as the program has it, or one entry of the latter."""
    ways: list[Callable[[], Any]] = [lambda: item.kind.read(given) if isinstance(given, str) else given]
    if given is None or isinstance(given, tuple | list):
        ways += [lambda: item.kind.raw(given), lambda: item.kind.raw((given,))]
    for way in ways:
        with suppress(ValueError, TypeError, AttributeError):
            return item.kind.check(way())
    raise ConfigError(f"`{item.name}` is {quoted(given, LONGEST_VALUE)}, but must be {item.kind.wanted}")


def with_options(config: T, values: Mapping[str, str]) -> T:
    """The config with other values for the options of these names, as `shared_options` gives them.

    Raises ConfigError for what no such option can be.
    """
    found = {}
    for item in options_of(type(config)).values():
        if item.name in values:
            with _wanted(item, f"`{item.name}` is {quoted(values[item.name], LONGEST_VALUE)}"):
                found[item.name] = item.kind.check(tomllib.loads(f"value = {values[item.name]}")["value"])
    return with_values(config, found)


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """The config with other values for the options of these names, as the program has them."""
    options = options_of(type(config))
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(options[name].section, {})[name] = value
    changed = {section: replace(getattr(config, section), **found) for section, found in sections.items()}
    return replace(config, **changed)  # type: ignore[type-var]


def value_of(config: Any, name: str) -> Any:
    return options_of(type(config))[name].of(config)


def without_effect(config: Any, changes_results: bool) -> Iterator[str]:
    """What is wrong with each given option that has no effect beside the others, of those that change results or not.

    An option is given if it has another value than its default. Names are in backquotes.
    """
    options, default = options_of(type(config)), type(config)()

    def given(item: Option) -> bool:
        return item.of(config) != item.of(default)

    for item in options.values():
        if item.changes_results != changes_results or not given(item):
            continue
        beside = [name for name in item.not_with if given(options[name])]
        said = " ".join([f"`{item.name}`", *map(_short, item.words(item.of(config))[1:])])
        if item.needs and not any(given(options[name]) for name in item.needs):
            yield f"{said} has no effect without {' or '.join(f'`{name}`' for name in item.needs)}"
        elif beside:
            yield f"{said} has no effect beside `{beside[0]}`"


def require_effect(config: Any) -> None:
    """Raise ConfigError for a given option that would change results, but has no effect beside the others."""
    problem = next(without_effect(config, changes_results=True), None)
    if problem is not None:
        raise ConfigError(f"{problem}: leave it out")


def flags_for(config: Any, wanted: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give the options of these names these values, where `config` has others."""
    options = options_of(type(config))
    items = [(options[name], value) for name, value in wanted.items()]
    return [word for item, value in items if item.of(config) != value for word in item.words(value)]


def without_flags(config_type: type, argv: Sequence[str], names: Iterable[str]) -> list[str]:
    """The words of a command line but for those that give the options of these names a value."""
    options = options_of(config_type)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        options[name].add_to(parser)
    return parser.parse_known_args(list(argv))[1]


def shared_options(config: Any) -> dict[str, str]:
    """Every option that all ranks must agree on, by its name, as it would be written."""
    return {
        item.name: dump(item.kind.raw(item.of(config)))
        for item in options_of(type(config)).values()
        if not item.per_rank
    }


def facts(config: Any) -> dict[str, str]:
    """The same, named as messages name them: for `Communicator.agree`."""
    return {f"`{name}`": value for name, value in shared_options(config).items()}


# How messages name options: the library says `batch_size`, as scripts pass it, and commands say --batch-size.

NAMED = re.compile(r"`([a-z][a-z0-9_]*)`")


def spelling(config_type: type) -> Callable[[str], str]:
    """A function that writes options of a config in a message as flags."""
    options = options_of(config_type).values()
    flags = {name: item.flag for item in options for name in (item.name, item.public)}

    def flag(found: re.Match[str]) -> str:
        return flags.get(found[1], found[0])

    return lambda message: NAMED.sub(flag, message)


@contextmanager
def speaking(spell: Callable[[str], str]) -> Iterator[None]:
    """Whatever is refused in here is refused in these words."""
    try:
        yield
    except ValueError as problem:
        if len(problem.args) == 1:
            problem.args = (spell(str(problem)),)
        raise
