"""Files that describe machines, in TOML: what `mpi4dl doctor --save` writes, and `mpi4dl plan --machine` reads."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mpi4dl.options.declare import ConfigError, config_from_tables, option, saying, tables_of_file, to_toml
from mpi4dl.options.kinds import BYTES, COUNT, COUNT_OR_ZERO, NAME, NOT_NEGATIVE, POSITIVE, TEXT, choice, optional
from mpi4dl.parallel.costs.machine import DISTRIBUTIONS, LinkLevel, Machine


@dataclass(frozen=True)
class _Ranks:
    """The section [machine]."""

    name: str = option("a machine", "name of the machine", NAME)
    source: str = option("", "where these numbers come from", TEXT)
    nodes: int = option(1, "number of nodes", COUNT)
    ranks_per_node: int = option(1, "ranks on each node: one for each GPU, or some for the cores", COUNT)
    device: str = option("CPU", "what a rank computes on", NAME)
    memory: int | None = option(None, "memory of a rank, such as 40GiB; none: no limit", optional(BYTES))
    flops_per_second: float | None = option(
        None,
        "what a rank reaches in convolutions and matrix products; none: units are timed, here or by `timings`",
        optional(POSITIVE),
    )
    bytes_per_second: float = option(8e9, "what a rank reads and writes elsewhere, as in the optimizer", POSITIVE)
    operator_seconds: float = option(0.0, "time in which an operator starts, beside `flops_per_second`", NOT_NEGATIVE)
    distribution: str = option(
        "block",
        "how ranks come to nodes: neighbours together (block), or each on the next (cyclic)",
        choice(*DISTRIBUTIONS),
    )
    message_seconds: float = option(5e-6, "time in which a rank hands over one message", NOT_NEGATIVE)


@dataclass(frozen=True)
class _Collectives:
    """The section [collectives]: how many times as long as by its formula an all-reduce takes, by algorithm."""

    library: float = option(1.0, "by the MPI library", POSITIVE)
    direct: float = option(1.0, "by a direct exchange", POSITIVE)
    ring: float = option(1.0, "around a ring", POSITIVE)
    two_level: float = option(1.0, "within nodes and between them", POSITIVE)


@dataclass(frozen=True)
class _Link:
    """One of the tables [[links]], from the nearest to the farthest."""

    name: str = option("a link", "name of the link", NAME)
    latency_seconds: float = option(5e-6, "time of a message without bytes", NOT_NEGATIVE)
    bytes_per_second: float = option(4e9, "rate of a port, each way", POSITIVE)
    ranks: int = option(0, "how many neighbouring ranks it joins; 0: all", COUNT_OR_ZERO)
    shared_by: int = option(1, "how many of them share a port", COUNT)


@dataclass(frozen=True)
class _File:
    machine: _Ranks = field(default_factory=_Ranks)
    collectives: _Collectives = field(default_factory=_Collectives)


@dataclass(frozen=True)
class _Links:
    links: _Link = field(default_factory=_Link)


def load_machine(path: str) -> Machine:
    """The machine that a TOML file describes. Raises ConfigError with the name of the file."""
    tables = tables_of_file(path, "--machine")
    links = tables.pop("links", [])
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise ConfigError(f"{path}: `links` are tables: begin each of them with [[links]]")
    found = config_from_tables(_File, tables, path)
    levels = [config_from_tables(_Links, {"links": link}, path).links for link in links]
    collectives = {name.replace("_", "-"): factor for name, factor in asdict(found.collectives).items()}
    with saying(path):
        links = tuple(LinkLevel(**asdict(level)) for level in levels)
        return Machine(links=links, collectives=collectives, **asdict(found.machine))


def machine_toml(machine: Machine) -> str:
    """The text of a file from which `load_machine` makes this machine."""
    factors = {name.replace("-", "_"): factor for name, factor in machine.collectives.items()}
    text = to_toml(_File(_section(_Ranks, machine), _Collectives(**factors)))
    return text + "".join(
        "\n" + to_toml(_Links(_section(_Link, link))).replace("[links]", "[[links]]", 1) for link in machine.links
    )


def _section(kind: Any, source: Any) -> Any:
    return kind(**{each.name: getattr(source, each.name) for each in fields(kind)})
