"""The program of one rank of the pool: it connects to the test process and runs the bodies that it is sent.

Every rank has a connection of its own, so that idle ranks sleep in a read instead of spinning in MPI, and so that a
rank that fails can say so while the others still wait for it.
"""

import ctypes
import faulthandler
import os
import pickle
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, TextIO

import torch
from mpi4py import MPI

from mpi4dl._memory import keep_freed_memory
from mpi4dl.comm import Communicator
from mpi4dl.comm.node import Node
from tests.pool.ranks import Report, Request

ORPHAN_SECONDS = 30.0


def perform(comm: Communicator, call: bytes) -> Report:
    """Run a body as if it were the first in this process."""
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            body, args = load(call)  # which may import a module, and that may draw, on ranks that did not know it
            torch.manual_seed(0)
            warnings.simplefilter("error")
            return Report(pickle.dumps(body(comm, *args)), None)
    except BaseException as error:  # also SystemExit, and what pytest.raises raises
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        shown = "".join(traceback.format_exception(error.with_traceback(trace)))
        return Report(None, shown + (values(error) if isinstance(error, AssertionError) else ""))


def values(error: AssertionError) -> str:
    """Those of the names in the line that failed: no pytest rewrites an assertion here."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    named = {name: repr(frame.f_locals[name]) for name in re.findall(r"\w+", line) if name in frame.f_locals}
    return "".join(
        f"  {name} = {' '.join(text.split())[:300]}\n" for name, text in named.items() if " at 0x" not in text
    )


def load(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return pickle.loads(call)


def serve(connection: Connection, node: Node, stack: TextIO) -> None:
    """Run what comes in until the test process hangs up."""
    world = MPI.COMM_WORLD
    while True:
        try:
            request: Request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if world.rank >= request.num_ranks:
            continue
        faulthandler.dump_traceback_later(request.timeout + ORPHAN_SECONDS, exit=True)
        faulthandler.unregister(signal.SIGUSR1)  # a body may have had a handler of its own
        faulthandler.register(signal.SIGUSR1, file=stack)
        members = world.group.Range_incl([(0, request.num_ranks - 1, 1)])
        comm = Communicator(world.Create_group(members), node)
        report = perform(comm, request.call)
        if report.error is not None:
            connection.send_bytes(pickle.dumps(report))
        comm.barrier()
        if report.error is None:
            if comm.mpi.Iprobe():
                report = Report(None, "the body returned, but a message that was sent to this rank was never received")
            connection.send_bytes(pickle.dumps(report))
        comm.pool.free()
        comm.mpi.Free()
        node.underway.clear()
        give_memory_back()
        faulthandler.cancel_dump_traceback_later()


def give_memory_back() -> None:
    """What a body freed: a pool's ranks would all keep what the largest body took."""
    with suppress(AttributeError):  # without glibc
        ctypes.CDLL(None).malloc_trim(0)


def main(address: str, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    rank = MPI.COMM_WORLD.rank
    node = Node.of(MPI.COMM_WORLD)
    with Path(folder, f"stack{rank}.txt").open("w") as stack, Client(address, family="AF_UNIX") as connection:
        faulthandler.register(signal.SIGUSR1, file=stack)
        connection.send_bytes(pickle.dumps((rank, os.getpid())))
        serve(connection, node, stack)


if __name__ == "__main__":
    main(*sys.argv[1:])
