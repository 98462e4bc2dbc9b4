"""Ranks that can never go on are found, and no others: tried on simulated ranks that do at random what ranks do."""

import random
from collections import deque
from typing import Any

from mpi4dl.comm.watchdog import ExitNotification, RankState


class Sent:
    """A request that is complete when its message was taken."""

    def Test(self) -> bool:
        return True


class Mailbox:
    """What Farewell uses of a communicator: messages arrive late, but those of one sender in their order."""

    def __init__(self, rank: int, all_messages: dict[tuple[int, int, int], deque[Any]], delays: random.Random) -> None:
        self.comm, self.rank, self.messages, self.delays = self, rank, all_messages, delays

    @property
    def size(self) -> int:
        return NUM_RANKS

    def isend(self, value: Any, to: int, tag: int) -> Sent:
        self.messages.setdefault((self.rank, to, tag), deque()).append(value)
        return Sent()

    def Iprobe(self, source: int | None = None, tag: int = 0, status: Any = None) -> bool:
        senders = range(NUM_RANKS) if source is None else [source]
        for sender in senders:
            if self.messages.get((sender, self.rank, tag)) and self.delays.random() < 0.5:
                if status is not None:
                    status.Set_source(sender)
                return True
        return False

    def recv(self, source: int, tag: int) -> Any:
        return self.messages[source, self.rank, tag].popleft()


NUM_RANKS = 4
AT_WORK, WAITS, ENDED = "at work", "waits", "ended"


class Simulated:
    """Ranks that work, wait for a message of another, send one, or end; what is on its way is known to the test."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        messages: dict[tuple[int, int, int], deque[Any]] = {}
        self.exit_notifications = [ExitNotification(Mailbox(rank, messages, self.random)) for rank in range(NUM_RANKS)]  # type: ignore[arg-type]
        self.state = [AT_WORK] * NUM_RANKS
        self.waits_for = [0] * NUM_RANKS
        self.since = [0.0] * NUM_RANKS
        self.arrived = [[0] * NUM_RANKS for _ in range(NUM_RANKS)]

    def step(self, now: int) -> None:
        rank, other = self.random.sample(range(NUM_RANKS), 2)
        if self.state[rank] == WAITS and self.arrived[rank][self.waits_for[rank]]:
            self.arrived[rank][self.waits_for[rank]] -= 1
            self.state[rank] = AT_WORK
        elif self.state[rank] == AT_WORK:
            choice = self.random.random()
            if choice < 0.45:
                self.arrived[other][rank] += 1
            elif choice < 0.9:
                self.state[rank], self.waits_for[rank], self.since[rank] = WAITS, other, float(now)
            elif choice < 0.93:
                self.state[rank] = ENDED

    def hopeless(self) -> bool:
        """Whether nobody can ever do anything any more, though not all have ended."""
        can = [
            state == AT_WORK or (state == WAITS and self.arrived[rank][self.waits_for[rank]] > 0)
            for rank, state in enumerate(self.state)
        ]
        return not any(can) and WAITS in self.state and ENDED in self.state

    def look(self, rank: int) -> str | None:
        state = self.state[rank]
        if state == AT_WORK:
            return self.exit_notifications[rank].look(None, False)
        return self.exit_notifications[rank].look(
            RankState(state == ENDED, self.since[rank] * (state == WAITS), "in wait"),
            False,
        )


def test_whoever_waits_in_vain_is_found_and_nobody_else() -> None:
    found = 0
    for seed in range(60):
        job = Simulated(seed)
        hopeless_for = 0
        for now in range(1, 3000):
            for _ in range(job.random.randint(0, 2)):
                job.step(now)
            hopeless_for = hopeless_for + 1 if job.hopeless() else 0
            complaint = job.look(max(0, job.random.randint(-NUM_RANKS, NUM_RANKS - 1)))  # rank 0 more often
            if complaint is not None:
                assert hopeless_for > 0, f"seed {seed}: nobody waited in vain, but: {complaint}"
                found += 1
                break
            assert hopeless_for < 400, f"seed {seed}: nobody found out that all waited in vain"
            if set(job.state) == {ENDED}:
                break
    assert found > 10
