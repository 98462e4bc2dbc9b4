"""Shows a mutant to tests, in processes that stay with their pools of ranks, and says what became of it."""

import json
import os
import signal
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tests.pool.zygote import AT_START
from tools.nets.mutation import swap
from tools.nets.mutation.mutants import Mutant

KILLED, SURVIVED, UNSEEN, VOID = "killed", "survived", "no test calls it", "void: its test fails without it"


class Verdict(NamedTuple):
    """What became of a mutant; `by` are the tests that it was shown to, of which the last one noticed it if any did."""

    mutant: Mutant
    outcome: str
    seconds: float
    by: tuple[str, ...]


class TooLong(BaseException):
    """A test has not ended in its time."""


class Judge:
    """The tests of one process, and its pools of ranks, which stay."""

    def __init__(self, limit: float) -> None:
        from tests.pool import ranks

        outer = self
        self.limit = limit

        class Staying(ranks.Ranks):
            """Pools that outlive a run of pytest."""

            def __call__(self, num_ranks: int, timeout: float = ranks.BODY_SECONDS) -> ranks.Team:
                return super().__call__(num_ranks, min(timeout, outer.limit))

            def stop(self) -> None:
                pass

        self.pools = Staying()
        ranks.Ranks = lambda: self.pools  # type: ignore[assignment,misc]
        signal.signal(signal.SIGALRM, self._too_long)

    def _too_long(self, number: int, frame: Any) -> None:
        raise TooLong

    def passes(self, tests: Sequence[str]) -> tuple[bool, int]:
        """Whether all of these tests pass, one after the other, and how many of them did."""
        import pytest

        limit = round(2 * self.limit)

        class Counter:
            """Counts the tests that have passed, and gives each its time."""

            passed = 0

            def pytest_runtest_logstart(self) -> None:
                signal.alarm(limit)

            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                self.passed += report.when == "call" and report.passed

        counter = Counter()
        try:
            # What a mutant leaves open is warned of at some later time, when no test is there that could fail of it.
            without = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
            flags = ["-x", "-q", "-m", "", "--no-header", "-rN", *(f"-pno:{name}" for name in without)]
            code = pytest.main([*flags, *tests], plugins=[counter])
        except TooLong:
            return False, counter.passed
        finally:
            signal.alarm(0)
        return code == 0, counter.passed

    def judge(self, mutant: Mutant, tests: Sequence[str]) -> Verdict:
        if not tests:
            return Verdict(mutant, UNSEEN, 0.0, ())
        began = time.monotonic()
        os.environ |= {swap.VARIABLE: json.dumps(mutant), AT_START: f"{swap.__name__}:put_in_from_environment"}
        self._everywhere(swap.put_in, mutant)
        try:
            passes, count = self.passes(tests)
        finally:
            for name in (swap.VARIABLE, AT_START):
                del os.environ[name]
            self._everywhere(swap.take_out, mutant)
        shown, outcome = tuple(tests) if passes else tuple(tests[: count + 1]), SURVIVED if passes else KILLED
        if not passes and not self.passes(shown[-1:])[0]:
            outcome = VOID
            for pool in self.pools.pools.values():
                pool.stop(kill=True)
        return Verdict(mutant, outcome, time.monotonic() - began, shown)

    def _everywhere(self, body: Any, mutant: Mutant) -> None:
        from tests.pool.ranks import RanksFailed

        body(None, mutant)
        for pool in self.pools.pools.values():
            if pool.running:
                try:
                    pool.run(pool.size, body, (mutant,))
                except RanksFailed:  # a mutant may have left a message behind that nobody received
                    pool.stop(kill=True)


@cache
def _judge(limit: float) -> Judge:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    return Judge(limit)


def judged(told: tuple[Mutant, tuple[str, ...], float]) -> Verdict:
    mutant, tests, limit = told
    return _judge(limit).judge(mutant, tests)
