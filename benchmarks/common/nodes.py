"""Two nodes made of network namespaces, joined by a cable; a job starts on the first and reaches the other.

Processes of both see the same files and cores. To MPI they are two machines, that speak TCP through the cable, which
may carry so many megabytes a second at most. It takes root and iproute2.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB_SECONDS = 600.0
HOSTS = ("nodea", "nodeb")
# UCX and libfabric would find that both nodes share memory.
TRANSPORTS = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
NUMBERS = itertools.count()  # of the pairs of nodes of this process
BURST_BYTES, QUEUE_BYTES = 1 << 17, 1 << 23  # of the cable: what may go at once, and what waits

# What Hydra starts in place of ssh: options, a host, a command.
LAUNCHER = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
exec ip netns exec {prefix}$host unshare -u bash -c "hostname $host; exec $*"
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60, text=True).stdout


@dataclass(frozen=True)
class Cluster:
    """Both nodes. `prefix` and a host's name make the name of its namespace, `cables` are the ends of their cable."""

    prefix: str
    cables: tuple[str, str]
    launcher: Path

    def carried_bytes(self) -> int:
        """The bytes that the first node has sent through the cable."""
        shown = ip("-n", self.prefix + HOSTS[0], "-s", "-j", "link", "show", "dev", self.cables[0])
        (found,) = json.loads(shown)
        return int(found["stats64"]["tx"]["bytes"])

    def run(self, ranks_per_node: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A job of Python on both nodes, with so many ranks on each."""
        with self.start(ranks_per_node, *arguments) as job:
            out, error = job.communicate(timeout=JOB_SECONDS)
        return subprocess.CompletedProcess(arguments, job.returncode, out, error)

    @contextlib.contextmanager
    def start(self, ranks_per_node: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [*self.launch(ranks_per_node), sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def launch(self, ranks_per_node: int) -> list[str]:
        """The words that start a program on both nodes, with so many ranks on each."""
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert mpirun is not None
        inside = ["ip", "netns", "exec", self.prefix + HOSTS[0], "unshare", "-u"]
        inside += ["bash", "-c", f'hostname {HOSTS[0]}; exec "$@"', "job"]
        job = [mpirun, "-launcher", "ssh", "-launcher-exec", str(self.launcher), "-hosts", ",".join(HOSTS)]
        job += [word for name, value in TRANSPORTS.items() for word in ("-genv", name, value)]
        return [*inside, *job, "-ppn", str(ranks_per_node), "-n", str(len(HOSTS) * ranks_per_node)]


class NoNodes(RuntimeError):
    """This machine lets nobody make nodes."""


@contextlib.contextmanager
def two_nodes(folder: Path, megabytes: float | None = None) -> Iterator[Cluster]:
    """Two nodes, as long as the context lasts. `folder` is for what it takes. Raises NoNodes where it cannot be.

    `megabytes`: as many go through the cable a second, each way; the kernel's token bucket filter sees to it.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "bash", "hostname"))):
        raise NoNodes("two nodes on one machine take root and iproute2")
    number = (8 * os.getpid() + next(NUMBERS)) % 60000
    prefix, network = f"mpi4dl{number}", f"10.{100 + number // 250 % 100}.{number % 250}"
    cables = (f"m{number}a", f"m{number}b")
    names = [prefix + host for host in HOSTS]
    hosts = "127.0.0.1 localhost\n" + "".join(f"{network}.{i + 1} {host}\n" for i, host in enumerate(HOSTS))
    launcher = folder / "launch.sh"
    launcher.write_text(LAUNCHER.format(prefix=prefix))
    launcher.chmod(0o755)
    try:
        try:
            _connect(names, cables, network, hosts)
            if megabytes is not None:
                _limit(names, cables, megabytes)
        except subprocess.CalledProcessError as refused:
            raise NoNodes(f"this machine has no network namespaces: {refused.stderr.strip()}") from None
        yield Cluster(prefix, cables, launcher)
    finally:
        for name in names:
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _connect(names: Sequence[str], cables: Sequence[str], network: str, hosts: str) -> None:
    for name in names:
        ip("netns", "add", name)
        folder_of_node = Path("/etc/netns") / name
        folder_of_node.mkdir(parents=True)
        (folder_of_node / "hosts").write_text(hosts)
    ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
    for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
        ip("link", "set", cable, "netns", name)
        ip("-n", name, "addr", "add", f"{network}.{i + 1}/24", "dev", cable)
        ip("-n", name, "link", "set", cable, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("netns", "exec", name, "unshare", "-u", "hostname", name)


def _limit(names: Sequence[str], cables: Sequence[str], megabytes: float) -> None:
    rate = f"{round(8e6 * megabytes)}bit"
    for name, cable in zip(names, cables, strict=True):
        bucket = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
        command = ["tc", "-n", name, "qdisc", "add", "dev", cable, "root", *bucket]
        subprocess.run(command, check=True, capture_output=True, timeout=60, text=True)
