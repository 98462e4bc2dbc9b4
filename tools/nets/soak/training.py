"""A training that is disturbed, and started again as by a batch system, ends as if nothing had been.

Each time a random rank, or the launcher, or a file is disturbed at a random moment. A job must then go on, or end
within its limit, with one message and no process left. It is resumed, and so on; the last time it is left alone.
Weights must have the bits of an undisturbed run, and each step and validation must have been reported once.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.nodes import HOSTS, Cluster, ip
from mpi4dl.checkpoints.manifest import checkpoints_in
from tests.pool.job import start
from tests.pool.zygote import launcher
from tests.support.commands import write_images
from tests.support.interrupted import assert_the_same_run
from tests.text.serving.command import children, words_of

HANG_SECONDS = 20
END_SECONDS = 90.0  # for a job to end in that was disturbed so that it cannot go on
PLANS = {
    "tiles": (2, "--tiles 1x2"),
    "ZeRO 3": (2, "--data 2 --zero 3 --ema 0.9"),
    "stages": (2, "--stages 2 --microbatches 2"),
    "GEMS": (2, "--stages 2 --bidirectional 1"),
    "streamed": (2, "--tiles 1x2 --stream 2x1 --stream-until stage2_block1"),
    "on disk": (1, "--offload disk"),
}
OVER_NODES = {"two nodes, tiles": (2, "--tiles 1x2"), "two nodes, replicas": (4, "--tiles 1x2 --data 2 --zero 2")}
FLAGS = (
    "--model small_resnet --model-options num_filters=4 --image-size 32 --batch-size 4 --val-fraction 0.25 --epochs 12 "
    f"--num-workers 1 --optimizer AdamW --jitter 0.2 --no-tensorboard --log-interval 5 --save-every 7 "
    f"--hang-timeout {HANG_SECONDS}"
).split()


class Job:
    """A job of the training command, and its ranks; on both nodes of a cluster, if there is one."""

    def __init__(self, work: str, images: Path, folder: Path, cluster: Cluster | None = None) -> None:
        num_ranks, plan = {**PLANS, **OVER_NODES}[work]
        self.num_ranks, self.images, self.folder, self.cluster = num_ranks, images, folder, cluster
        launch = [launcher(), "-n", str(num_ranks)]
        if cluster is not None:
            launch = cluster.launch(num_ranks // len(HOSTS))
        flags = [*FLAGS, *plan.split(), "--images", str(images), "--run-folder", str(folder), "--resume", "auto"]
        self.process = start([*launch, sys.executable, "-m", "mpi4dl.train", *flags])

    def ranks(self) -> list[int]:
        """The processes of ranks that there are by now."""
        return [pid for pid in children(self.process.pid) if b"mpi4dl.train" in _words(pid)]

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _words(pid: int) -> list[bytes]:
    with suppress(OSError):
        return words_of(pid)
    return []


def _send(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    def disturb(job: Job, draws: random.Random) -> None:
        ranks = job.ranks()
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(draws.choice(ranks), number)

    return disturb


def _launcher(number: signal.Signals) -> Callable[[Job, random.Random], None]:
    def disturb(job: Job, draws: random.Random) -> None:
        job.process.send_signal(number)

    return disturb


def _pauses(job: Job, draws: random.Random) -> None:
    """A rank that is slow: it stands still again and again."""
    ranks = job.ranks()
    rank = draws.choice(ranks) if ranks else None
    for _ in range(6):
        with suppress(ProcessLookupError):
            if rank is not None:
                os.kill(rank, signal.SIGSTOP)
                time.sleep(draws.uniform(0.1, 1.0))
                os.kill(rank, signal.SIGCONT)
        time.sleep(0.1)


def _freezes(job: Job, draws: random.Random) -> None:
    """A rank that stands still until all others are gone."""
    ranks = job.ranks()
    if not ranks:
        return
    frozen = draws.choice(ranks)
    with suppress(ProcessLookupError):
        os.kill(frozen, signal.SIGSTOP)
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end and set(job.ranks()) - {frozen} and not job.wait(0.2):
            pass
        os.kill(frozen, signal.SIGCONT)


def _full(job: Job, draws: random.Random) -> None:
    """A disk that is full for one rank: no file of it can grow beyond some size."""
    for rank in draws.sample(job.ranks(), min(1, len(job.ranks()))):
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (draws.choice([0, 1000, 20_000]), resource.RLIM_INFINITY))


def _vanishes(job: Job, draws: random.Random) -> None:
    """The images are gone for a while."""
    elsewhere = job.images.with_name("elsewhere")
    job.images.rename(elsewhere)
    job.wait(draws.uniform(0.5, 4.0))
    elsewhere.rename(job.images)


def _damages(job: Job, draws: random.Random) -> None:
    """A rank is killed, and of the newest checkpoint a file is cut short, or bytes in it are others."""
    _send(signal.SIGKILL)(job, draws)
    job.wait(END_SECONDS)
    saved = checkpoints_in(job.folder / "checkpoints") if (job.folder / "checkpoints").exists() else []
    if len(saved) < 2:
        return  # there is nothing to fall back to
    files = sorted(path for path in saved[0].rglob("*") if path.is_file() and path.stat().st_size)
    path = draws.choice(files)
    content = bytearray(path.read_bytes())
    if draws.random() < 0.5:
        path.write_bytes(content[: len(content) // 2])
    else:
        content[draws.randrange(len(content))] ^= 0x40
        path.write_bytes(content)


def _node_dies(job: Job, draws: random.Random) -> None:
    """All processes of a node are gone at once: of the first, or of the one that the launcher is not on."""
    assert job.cluster is not None
    for pid in map(int, ip("netns", "pids", job.cluster.prefix + draws.choice(HOSTS)).split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _cable_breaks(job: Job, draws: random.Random) -> None:
    """Nothing goes from one node to the other, for a moment or until the job has ended."""
    assert job.cluster is not None
    end = ["-n", job.cluster.prefix + HOSTS[0], "link", "set", job.cluster.cables[0]]
    ip(*end, "down")
    job.wait(draws.choice([0.5, 3.0, END_SECONDS]))
    ip(*end, "up")


class Disturbance(NamedTuple):
    """What is done to a job; whether the job may go on as if nothing had been."""

    do: Callable[[Job, random.Random], None]
    endures: bool = False


DISTURBANCES = {
    "a rank is killed": Disturbance(_send(signal.SIGKILL)),
    "a rank crashes": Disturbance(_send(signal.SIGSEGV)),
    "a rank is asked to stop": Disturbance(_send(signal.SIGTERM)),
    "a rank gets SIGUSR1": Disturbance(_send(signal.SIGUSR1)),
    "the launcher is asked to stop": Disturbance(_launcher(signal.SIGTERM)),
    "Ctrl-C": Disturbance(_launcher(signal.SIGINT)),
    "the launcher is killed": Disturbance(_launcher(signal.SIGKILL)),
    "a rank is slow": Disturbance(_pauses, endures=True),
    "a rank freezes": Disturbance(_freezes),
    "the disk of a rank is full": Disturbance(_full, endures=True),
    "the images are gone for a while": Disturbance(_vanishes, endures=True),
    "a rank is killed, and a file of the newest checkpoint damaged": Disturbance(_damages),
}
OF_NODES = {
    "a node dies": Disturbance(_node_dies),
    "the cable between the nodes breaks": Disturbance(_cable_breaks, endures=True),
}


def disturb(work: str, name: str, job: Job, draws: random.Random, seconds: float) -> str | None:
    """What is wrong with how a job bears a disturbance after so many seconds; its process has ended afterwards."""
    disturbance = {**DISTURBANCES, **OF_NODES}[name]
    if not job.wait(draws.uniform(0.0, seconds)):
        disturbance.do(job, draws)
    ended = job.wait(5 * seconds + END_SECONDS if disturbance.endures else END_SECONDS + HANG_SECONDS)
    left = [pid for pid in _alive(job.folder) if pid != job.process.pid]
    deadline = time.monotonic() + END_SECONDS
    while ended and left and time.monotonic() < deadline:
        time.sleep(0.2)
        left = _alive(job.folder)
    if not ended or left:
        for pid in [*left, *children(job.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.kill()
    stdout, stderr = job.process.communicate()
    said = f"{work}, {name}: code {job.process.returncode}\n{stdout[-1500:]}\n{stderr[-3000:]}"
    if not ended:
        return f"it did not end: {said}"
    if left:
        return f"processes {left} were left: {said}"
    if stderr.count("Traceback (most recent call last)") > 1:
        return f"more than one message: {said}"
    return None


def _alive(folder: Path) -> list[int]:
    """The processes that have this folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        words = _words(pid)
        if str(folder).encode() in words and b"mpi4dl.train" in words and pid != os.getpid():
            found.append(pid)
    return found


class Soak:
    """Trainings in turns, some on a cluster if there is one; what undisturbed ones left, and how long they took."""

    def __init__(self, folder: Path, seed: int, cluster: Cluster | None = None) -> None:
        self.folder, self.draws, self.cluster = folder, random.Random(seed), cluster
        self.works = [*PLANS, *(OVER_NODES if cluster is not None else ())]
        self.images = write_images(folder / "images", count=16)
        self.undisturbed: dict[str, tuple[Path, float]] = {}
        self.counts: dict[str, int] = {}
        self.number = 0

    def _job(self, work: str, folder: Path) -> Job:
        return Job(work, self.images, folder, self.cluster if work in OVER_NODES else None)

    def _plain(self, work: str) -> tuple[Path, float]:
        if work not in self.undisturbed:
            folder, begin = self.folder / f"undisturbed-{len(self.undisturbed)}", time.monotonic()
            job = self._job(work, folder)
            stdout, stderr = job.process.communicate()
            assert job.process.returncode == 0, stdout + stderr
            self.undisturbed[work] = folder, time.monotonic() - begin
        return self.undisturbed[work]

    def round(self, most: int = 5) -> list[str]:
        """One training with some disturbances: what is wrong."""
        work = self.works[self.number % len(self.works)]
        expected, seconds = self._plain(work)
        folder, wrong = self.folder / f"run-{self.number}", []
        self.number += 1
        # Half of what is done to jobs on nodes is done to the nodes.
        of_work = [*DISTURBANCES, *(6 * [*OF_NODES] if work in OVER_NODES else ())]
        names = [self.draws.choice(of_work) for _ in range(self.draws.randint(1, most))]
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1
            said = disturb(work, name, self._job(work, folder), self.draws, seconds)
            wrong += [said] if said else []
        job = self._job(work, folder)
        stdout, stderr = job.process.communicate()
        if job.process.returncode:
            wrong.append(f"{work} after {names} does not go on: {stdout[-1500:]}{stderr[-3000:]}")
        else:
            try:
                assert_the_same_run(folder, expected)
            except AssertionError as error:
                wrong.append(f"{work} after {names} ends otherwise: {str(error)[:1500]}")
        if not wrong:
            shutil.rmtree(folder)
        return wrong
