"""The kinds of value that an option can have: how each is read from a flag, checked, and written as TOML."""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpi4dl._patterns import split_patterns
from mpi4dl.geometry import SPACE

MOST_LEVELS = 20  # of lists and tables within each other
MOST_SEED = 2**63 - 1
AUTO = "auto"  # the value of options that follow from the task, until `options.tasks.with_task` chooses theirs


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """One kind of value; `read` and `check` raise ValueError for what is not `wanted`.

    A flag's text becomes what a TOML file would hold (`read`), that becomes the value that the program sees (`check`),
    and `raw` turns the latter back into the former. `switch`: what a file would hold for the flag without a value, and
    for its negation.
    """

    wanted: str
    metavar: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = _same
    raw: Callable[[Any], Any] = _same
    switch: tuple[Any, Any] | None = None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # A file name that is not UTF-8 could not be written to the run folder's config.toml.
    return value


def _nonempty_text(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


TEXT = Kind("text", "TEXT", _text)
NAME = Kind("text that is not empty", "TEXT", _nonempty_text)
BOOLEAN = Kind("true or false", "", _boolean, switch=(True, False))


def integer(wanted: str, accepts: Callable[[int], bool]) -> Kind:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not accepts(value):
            raise ValueError
        return value

    return Kind(wanted, "N", check, read=int)


def number(wanted: str, accepts: Callable[[float], bool]) -> Kind:
    def check(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError
        if not accepts(value):
            raise ValueError
        return float(value)

    return Kind(wanted, "X", check, read=float)


COUNT = integer("a whole number of at least 1", lambda n: n >= 1)
COUNT_OR_ZERO = integer("a whole number of at least 0", lambda n: n >= 0)
SEED = integer(f"a whole number from 0 to {MOST_SEED}", lambda n: 0 <= n <= MOST_SEED)
ZERO_STAGE = integer("0, 1, 2 or 3", lambda n: 0 <= n <= 3)
PORT = integer("a port from 0 to 65535", lambda port: 0 <= port <= 65535)
NUMBER = number("a number", lambda x: True)
POSITIVE = number("a number greater than 0", lambda x: x > 0)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
NAMED_THRESHOLD = re.compile(r"youden|(sensitivity|specificity)=(0?\.[0-9]+|[01](\.0*)?)")  # see tasks/curves.py


def _threshold(value: Any) -> float | str:
    if isinstance(value, str) and NAMED_THRESHOLD.fullmatch(value):
        return value
    return SHARE.check(value)


THRESHOLD = Kind(
    "a number from 0 to 1, youden, sensitivity=0.95 or specificity=0.95",
    "X|youden|sensitivity=X|specificity=X",
    _threshold,
    read=lambda text: text if NAMED_THRESHOLD.fullmatch(text) else float(text),
)
PROPER_FRACTION = number("a number between 0 and 1", lambda x: 0 < x < 1)
SHARE = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
ANGLE = number("a number of degrees from 0 to 180", lambda x: 0 <= x <= 180)


def _range(value: Any) -> tuple[float, float]:
    low, high = _several(value, POSITIVE)
    if low > high:
        raise ValueError
    return low, high


RANGE = Kind(
    "two numbers greater than 0, the smaller one first, such as 0.9,1.1",
    "LOW,HIGH",
    _range,
    raw=lambda found: ",".join(f"{each:g}" for each in found),
)


def _count_or_share(value: Any) -> int | float:
    if isinstance(value, float):
        return PROPER_FRACTION.check(value)
    return COUNT_OR_ZERO.check(value)


COUNT_OR_SHARE = Kind(
    "a whole number of at least 0, or a share between 0 and 1",
    "N|SHARE",
    _count_or_share,
    read=lambda text: float(text) if "." in text else int(text),
)


def _bytes(value: Any) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(value))
    if found is None or not float(found[1]):
        raise ValueError
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " "))


BYTES = Kind("a size such as 4GiB", "SIZE", _bytes, raw=lambda number: f"{number}B")


def _entries(value: Any) -> list[Any]:
    """The entries of text with commas between them, or of a list; anything else is one entry."""
    if isinstance(value, str):
        return value.split(",")
    return [*value] if type(value) in (list, tuple) else [value]


def _several(value: Any, kind: Kind) -> tuple[Any, ...]:
    """One value of this kind, or some, of text too."""
    found = tuple(kind.check(kind.read(each) if isinstance(each, str) else each) for each in _entries(value))
    if not found:
        raise ValueError
    return found


def choice(*choices: str, switch: tuple[str, str] | None = None) -> Kind:
    """One of these words. `switch`: those that the flag alone, or `true`, and `--no-FLAG`, or `false`, stand for."""

    def check(value: Any) -> str:
        if switch is not None and isinstance(value, bool):
            value = switch[not value]
        if value not in choices:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(choices)}", "{" + ",".join(choices) + "}", check, switch=switch)


def some_of(*choices: str) -> Kind:
    """Some of these words, each once, with commas between them."""

    def check(value: Any) -> tuple[str, ...]:
        found = tuple(_text(each).strip() for each in _entries(value) if each != "")
        if not {*found} <= {*choices}:
            raise ValueError
        return tuple(each for each in choices if each in found)

    return Kind(f"some of {', '.join(choices)}, with commas between them", "{" + ",".join(choices) + "},...", check,
                raw=",".join)  # fmt: skip


def optional(kind: Kind) -> Kind:
    """The same kind, or `none`, which is spelled out because TOML has no null."""
    return _or_word(kind, "none", None)


def or_auto(kind: Kind) -> Kind:
    """The same kind, or AUTO: what suits the task."""
    return _or_word(kind, AUTO, AUTO)


def _or_word(kind: Kind, word: str, meaning: Any) -> Kind:
    def is_word(value: Any) -> bool:
        return isinstance(value, str) and value == word

    return replace(
        kind,
        wanted=f"{kind.wanted}, or {word}",
        check=lambda value: meaning if is_word(value) else kind.check(value),
        read=lambda text: word if text.lower() == word else kind.read(text),
        raw=lambda value: word if value is meaning or is_word(value) else kind.raw(value),
    )


def either(kind: Kind, *words: str) -> Kind:
    """One of these words, or a value of this kind."""
    return Kind(
        f"one of {', '.join(words)}, or {kind.wanted}",
        "{" + ",".join(words) + "}|" + kind.metavar,
        lambda value: value if value in words else kind.check(value),
        read=lambda text: text if text in words else kind.read(text),
        raw=lambda value: value if isinstance(value, str) else kind.raw(value),
    )


def some_numbers(wanted: str, kind: Kind) -> Kind:
    """Numbers of this kind, with commas between them."""
    return Kind(
        wanted,
        f"{kind.metavar},...",
        lambda value: _several(value, kind),
        raw=lambda found: ",".join(repr(each).removesuffix(".0") for each in found),
    )


def per_channel(kind: Kind, *words: str) -> Kind:
    """One of these words, a number of this kind for all channels, or one for each."""
    several = some_numbers(f"{kind.wanted}, one for each channel such as 0.4,0.5,0.6", kind)
    return either(replace(several, raw=lambda found: found[0] if len(found) == 1 else several.raw(found)), *words)


MEANS = per_channel(NUMBER, "imagenet", "half")
DEVIATIONS = per_channel(POSITIVE, "imagenet", "half")
CHANNELS = either(some_numbers("numbers of channels such as 4,3,2, counted from 1", COUNT), "auto", "rgb", "all")


def _joined(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def _sides(value: Any) -> tuple[int, ...]:
    """A number for each axis of space, such as 2x2."""
    if not re.fullmatch(r"\d+(x\d+)*", str(value), re.ASCII):
        raise ValueError
    found = tuple(COUNT.check(int(side)) for side in str(value).split("x"))
    if len(found) not in SPACE:
        raise ValueError
    return found


IMAGE_SIZE = Kind(
    "a size in pixels such as 768x1024 (height x width), 96x96x64 (depth first), or 1024 of all sides",
    "HxW",
    _sides,
    raw=_joined,
)
SIDES = Kind(
    "numbers along the axes of space, such as 4x4 (rows x columns), 2x2x1 (depth first) or 8 of sequences",
    "RxC",
    _sides,
    raw=_joined,
)

GRIDS = Kind(
    "grids such as 2x2 (rows x columns), or 2x2x1 (depth first) of volumes and 4 of sequences, or one for each stage "
    "such as 2x2,1x2,1x1",
    "RxC,...",
    lambda value: tuple(_sides(each.strip()) for each in str(value).split(",")),
    raw=lambda grids: ",".join(map(_joined, grids)),
)
COUNTS = some_numbers("whole numbers of at least 1, such as 2 or 1,1,2", COUNT)


def _split_at_commas(text: str) -> list[str]:
    """Split `a=1,b=(2,3)` at the commas that are outside brackets and quotes."""
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quote:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _literal(text: str) -> Any:
    """A Python literal such as 0.9, (0.9, 0.999) or True; anything else that does not look like one is text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        if text[:1] in tuple("([{\"'"):
            raise ValueError(text) from None
        return text


def _read_keywords(text: str) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for piece in _split_at_commas(text) if text.strip() else []:
        name, equals, value = piece.partition("=")
        if not equals or name.strip() in keywords:
            raise ValueError
        keywords[name.strip()] = _literal(value.strip())
    return keywords


def _check_keyword_value(value: Any, levels: int = MOST_LEVELS) -> Any:
    if not levels:
        raise ValueError
    if isinstance(value, list | tuple):
        return [_check_keyword_value(item, levels - 1) for item in value]
    if isinstance(value, dict):
        return {_text(key): _check_keyword_value(item, levels - 1) for key, item in value.items()}
    return value if isinstance(value, bool | int | float) else _text(value)


def _check_keywords(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(_text(name).isidentifier() for name in value):
        raise ValueError
    return _check_keyword_value(value)


KEYWORDS = Kind(
    'keyword arguments such as depth=29,pool=max, with _ for - in names (in a file: { depth = 29, pool = "max" })',
    "K=V,...",
    _check_keywords,
    read=_read_keywords,
)


WEIGHTS = either(some_numbers("a number of at least 0 for each class, such as 1,2.5", NOT_NEGATIVE), "balanced")


def part_name(part: Any) -> str:
    """How files of a run and messages name a part: by the text that was given, or by where the object comes from."""
    if isinstance(part, str):
        return part
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"


def _part(value: Any) -> Any:
    if isinstance(value, str):
        return _nonempty_text(value)
    if value is None or type(value) in (bool, int, float, list, tuple, dict):
        raise ValueError
    return value


PART = Kind("a name, or an own one such as my_code.py:build", "NAME", _part, raw=part_name)
PART_OR_PAIR = Kind(
    "an own one such as my_code.py:Slides",
    "NAME",
    lambda value: tuple(map(_part, value)) if type(value) in (list, tuple) and len(value) == 2 else _part(value),
    raw=lambda part: " and ".join(map(part_name, part)) if isinstance(part, tuple) else part_name(part),
)
NAMES = Kind(
    "names with commas between them",
    "NAME,...",
    lambda value: tuple(_nonempty_text(each).strip() for each in _entries(value)),
    raw=",".join,
)


def _covariates(value: Any) -> tuple[Any, ...]:
    entries = [each for each in _entries(value) if each != ""]
    if not entries:
        return ()
    from mpi4dl.datasets.covariates import Covariate

    found = tuple(each if isinstance(each, Covariate) else Covariate.read(each) for each in entries)
    if len({each.column for each in found}) < len(found):
        raise ValueError
    return found


def _raw_covariates(value: Any) -> Any:
    if any(each.fit for each in value):
        return [[each.text, *each.fit] for each in value]
    return ",".join(each.text for each in value)


COVARIATES = Kind(
    "names of columns with commas between them, such as age,sex, with :class behind one whose numbers are classes",
    "NAME,...",
    _covariates,
    raw=_raw_covariates,
)
CALLS = Kind(
    "names with arguments in brackets where needed, with commas between them, such as "
    "RandomPosterize(bits=4),RandomGrayscale",
    "NAME(K=V,...),...",
    lambda value: tuple(
        _nonempty_text(each).strip()
        for each in (_split_at_commas(value) if isinstance(value, str) and value.strip() else _entries(value))
        if each != ""
    ),
    raw=",".join,
)
PARTS = Kind(
    "names with commas between them, own ones such as my_code.py:Counter among them",
    "NAME,...",
    lambda value: tuple(
        _part(each.strip() if isinstance(each, str) else each) for each in _entries(value) if each != ""
    ),
    raw=lambda parts: ",".join(map(part_name, parts)),
)


def dump(raw: Any) -> str:
    """Write a value as TOML, on one line, with the keys of a table in order."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, str):
        return json.dumps(raw, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(raw, Sequence):
        return f"[{', '.join(map(dump, raw))}]"
    if isinstance(raw, dict):
        keys = {key: key if re.fullmatch(r"[\w-]+", key, re.ASCII) else dump(key) for key in sorted(raw)}
        pairs = ", ".join(f"{shown} = {dump(raw[key])}" for key, shown in keys.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return repr(raw)


# Kinds of value that go by patterns of names: which ones, numbers for some, and from which epoch on.


LORA_KEYS = ("r", "alpha", "targets", "dropout", "train", "base")


def _patterns(value: Any) -> tuple[str, ...]:
    if type(value) not in (str, list, tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError
    found = split_patterns(value)
    "".join(found).encode()
    return found


def _pairs(value: Any, sign: str) -> list[tuple[str, str]]:
    """Key and value of each piece, split at its last separator."""
    pieces = [piece.rpartition(sign) for piece in _patterns(value)]
    if not all(left.strip() and right.strip() for left, _, right in pieces):
        raise ValueError
    return [(left.strip(), right.strip()) for left, _, right in pieces]


def _numbers(value: Any) -> dict[str, float]:
    pairs = list(value.items()) if isinstance(value, Mapping) else _pairs(value, "=")
    found: dict[str, float] = {}
    for pattern, number in pairs:
        if not isinstance(pattern, str) or isinstance(number, bool) or pattern in found:
            raise ValueError
        found[pattern] = float(number)
        if not math.isfinite(found[pattern]) or found[pattern] < 0:
            raise ValueError
    return found


def _read_lora(text: str) -> dict[str, Any]:
    """`r=16,targets=qkv,proj`: a piece without an equals sign belongs to the key before it."""
    found: dict[str, list[str]] = {}
    for piece in split_patterns(text):
        name, equals, rest = (part.strip() for part in piece.partition("="))
        if (equals and name in found) or not (equals or found):
            raise ValueError
        found.setdefault(name if equals else [*found][-1], []).append(rest if equals else name)
    return {
        name: values if name in ("targets", "train") else _literal(",".join(values)) for name, values in found.items()
    }


def _lora(value: Any) -> dict[str, Any]:
    """The arguments of `mpi4dl.models.lora.add_lora`, all of them."""
    if not isinstance(value, Mapping) or not {"r", "targets"} <= value.keys() <= {*LORA_KEYS}:
        raise ValueError
    rank, names = COUNT.check(value["r"]), {name: _patterns(value.get(name, ())) for name in ("targets", "train")}
    alpha, dropout = POSITIVE.check(value.get("alpha", rank)), NOT_NEGATIVE.check(value.get("dropout", 0.0))
    if not names["targets"] or dropout >= 1 or value.get("base", "int8") not in ("int8", None):
        raise ValueError
    found = {"r": rank, "alpha": alpha, "targets": [*names["targets"]], "dropout": dropout, "train": [*names["train"]]}
    return found | ({"base": "int8"} if value.get("base") else {})


def _epochs(value: Any) -> tuple[tuple[int, str], ...]:
    if isinstance(value, Mapping):
        pairs = [(epoch, pattern) for epoch, some in value.items() for pattern in _patterns(some)]
    elif type(value) in (list, tuple) and all(type(each) in (list, tuple) and len(each) == 2 for each in value):
        pairs = [(epoch, pattern) for epoch, pattern in value]
    else:
        split = [piece.partition(":") for piece in _patterns(value)]
        pairs = [(int(epoch), pattern.strip()) for epoch, _, pattern in split]
    for epoch, pattern in pairs:
        if type(epoch) is not int or epoch < 1 or not isinstance(pattern, str) or not pattern:
            raise ValueError
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


PATTERNS = Kind(
    "patterns of names with commas between them, such as layer1.*,bn*",
    "PATTERN,...",
    _patterns,
    raw=",".join,
)
LORA = Kind(
    "adapters such as r=16,alpha=32,targets=qkv,proj, with dropout=0.1, train=norm and base=int8 if wanted",
    "K=V,...",
    _lora,
    read=_read_lora,
)
NUMBERS = Kind(
    "numbers of at least 0 by patterns of names, such as head.*=0.01,*.bias=0",
    "PATTERN=X,...",
    _numbers,
    raw=lambda numbers: ",".join(f"{pattern}={number!r}" for pattern, number in numbers.items()),
)
EPOCHS = Kind(
    "patterns of names behind the number of an epoch from 1 on, such as 3:layer4.*,5:layer3.*",
    "N:PATTERN,...",
    _epochs,
    raw=lambda pairs: ",".join(f"{epoch}:{pattern}" for epoch, pattern in pairs),
)
