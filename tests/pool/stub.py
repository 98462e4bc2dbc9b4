"""What mpirun starts in place of a rank: it hands over all that it was given, and ends as the rank ends.

    python -I -S stub.py EVEN ODD program...        the sockets of the zygotes for even and odd ranks; see zygote.py

The rank gets its files, environment, folder, cores and signals; this process only waits. It imports nothing slow.
"""

import marshal
import os
import resource
import signal
import socket
import sys

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MAX_FILES = 250  # that one message can carry
MAX_PRINTED = 4000  # characters of what a zygote has printed


def main(even: str, odd: str, *arguments: str) -> None:
    """Have a zygote run `python *arguments`; what it cannot, the interpreter runs itself."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *arguments])
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if number <= 2 or is_inherited(number)][:MAX_FILES]
    zygote, address = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), odd if rank % 2 else even
    try:
        zygote.connect(address)
    except ConnectionRefusedError:
        sys.exit(why_it_ended(address) or "The process that forks ranks for the tests was killed. Out of memory?")
    cores, open_files = list(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE)
    words = marshal.dumps((arguments, dict(os.environ), os.getcwd(), ignored, cores, open_files, files))
    socket.send_fds(zygote, [words], files)
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, _: zygote.send(marshal.dumps(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    said = receive(zygote)
    if not said:
        sys.stderr.write(why_it_ended(address))
    end_like(said)


def why_it_ended(address: str) -> str:
    """What the zygote of this address had printed when it ended; nothing if it was silent, as when pytest ends it."""
    try:
        with open(f"{address}.txt", errors="replace") as printed:
            text = printed.read()[-MAX_PRINTED:]
    except FileNotFoundError:  # pytest has gone
        return ""
    return f"The process that forks ranks for the tests ended. It had printed:\n{text}" if text else ""


def receive(other: socket.socket) -> bytes:
    """The next message; nothing if the other side has gone, also if it went with a message of ours unread."""
    try:
        return other.recv(64)
    except ConnectionError:
        return b""


def is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # the listing's own, closed since
        return False


def end_like(said: bytes) -> None:
    """End with the rank's exit code or by its signal; by SIGKILL, as the rank did, if the zygote has gone."""
    code = marshal.loads(said) if said else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
