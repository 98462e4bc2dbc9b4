"""Where a server of the package can be reached."""

from dataclasses import dataclass

from mpi4dl.options.declare import option, same_as
from mpi4dl.options.kinds import NAME, NAMES, optional


@dataclass(frozen=True)
class Address:
    """The address of a server, and the names that its clients may use."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; the default is reachable from this machine only",
        NAME,
        brief="the address to listen on",
        known_as=same_as("bind"),
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "host names that clients may use, such as gpu7.example.org or '*.example.org'; none: localhost, the machine's "
        "name, --host, and addresses",
        optional(NAMES),
    )
