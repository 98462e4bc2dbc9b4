"""mpi4dl.comm.watchdog: a rank's last words are taken before it ends all others."""

import os
import select
import threading
import time

from mpi4dl.comm.watchdog import drain


def test_what_was_printed_into_a_pipe_is_waited_for() -> None:
    read, write = os.pipe()
    os.write(write, b"the last words")
    reader = threading.Thread(target=lambda: (time.sleep(0.2), os.read(read, 100)))
    reader.start()
    drain([write], 600.0)
    assert select.select([read], [], [], 0)[0] == []
    reader.join()


def test_nothing_is_waited_for_where_nobody_reads_or_it_is_no_pipe() -> None:
    read, write = os.pipe()
    os.write(write, b"the last words")
    closed = os.dup(write)
    os.close(closed)
    with open(os.devnull, "w") as nowhere:
        drain([nowhere.fileno(), closed], 600.0)
    drain([write], 0.01)
    assert os.read(read, 100) == b"the last words"
