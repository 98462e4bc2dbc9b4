"""Keys and values that all ranks share, for torch.distributed: MPI says where, so nobody has to name an address."""

import os
import socket
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from mpi4dl.comm.node import Node

LOCAL = "127.0.0.1"
STORE_PATIENCE = timedelta(seconds=20)


class Peers(Protocol):
    """Ranks that meet: what a communicator, which is built on this, can do for them."""

    rank: int
    size: int
    node: Node

    def all_gather_object(self, value: Any) -> list[Any]: ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...

    def agree(self, error: str | None = None) -> None: ...

    def together(self, kinds: tuple[type[Exception], ...]) -> AbstractContextManager[None]: ...


def open_store(comm: Peers) -> tuple[dist.Store | None, str]:
    """A store that rank 0 keeps; None on all ranks, and why, where they cannot reach rank 0 by TCP. Collective.

    It asks nobody who he is: so rank 0 listens where the others are, on this machine alone or on the way to theirs.
    """
    hosts = comm.all_gather_object(socket.gethostname())
    store: dist.Store | None = None
    address, port, error = "", 0, ""
    if comm.rank == 0:
        try:
            others = set(hosts) - {hosts[0]}
            address = _address_towards(others) if others else LOCAL
            with socket.create_server((address, 0), backlog=comm.size) as listener:
                port = listener.getsockname()[1]
                options: Any = {"master_listen_fd": os.dup(listener.fileno())}
                store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, **options)
        except (OSError, RuntimeError) as problem:
            error = str(problem)
    address, port = comm.broadcast_object((address, port))
    if comm.rank and port:
        try:
            store = dist.TCPStore(address, port, timeout=STORE_PATIENCE)
        except RuntimeError as problem:
            error = str(problem)
    errors = [error for error in comm.all_gather_object(error) if error]
    if errors:
        return None, f"ranks cannot reach {address}:{port} ({errors[0]})"
    return store, ""


def _address_towards(hosts: Iterable[str]) -> str:
    """The address under which other machines reach this one. No message is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((min(hosts), 9))
        return probe.getsockname()[0]
