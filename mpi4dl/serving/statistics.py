"""How the server does: times to the first token and between tokens, tokens a second; for Prometheus and for a reader.

All of it is used by the thread of the event loop alone.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mpi4dl.generation.batcher import Batcher

LONGEST_SAMPLE = 1 << 16  # of the latest times, from which quantiles are taken
FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BETWEEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class Period:
    """What happened since the last report."""

    def __init__(self) -> None:
        self.requests = self.cancelled = self.refused = self.tokens = 0
        self.busy_seconds = 0.0  # while something was asked for and not answered yet
        self.first: deque[float] = deque(maxlen=LONGEST_SAMPLE)
        self.between: deque[float] = deque(maxlen=LONGEST_SAMPLE)

    def line(self) -> str:
        """What there is to say in one line."""
        said = f"{self.requests:,} requests, {self.cancelled:,} cancelled, {self.refused:,} refused"
        if self.tokens:
            said += f"; {self.tokens:,} tokens, {self.tokens / self.busy_seconds:,.1f} tokens/s"
        for name, times in (("to first token", self.first), ("between tokens", self.between)):
            if times:
                said += f"; {name} p50 {quantile(times, 0.5):.4f} s, p99 {quantile(times, 0.99):.4f} s"
        return said


class ServingStatistics:
    """Counts what is served, in Prometheus' terms and by intervals. Times are of time.perf_counter, in seconds."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        self.interval = Period()
        self._busy_since: float | None = None
        self._responses = Counter(
            "mpi4dl_http_responses", "HTTP responses by path and status", ["path", "status"], registry=self.registry
        )
        self._cancelled = Counter(
            "mpi4dl_requests_cancelled", "Requests whose client went away before the end", registry=self.registry
        )
        self._tokens = Counter("mpi4dl_tokens_generated", "Tokens generated", registry=self.registry)
        self._prompt_tokens = Counter("mpi4dl_prompt_tokens", "Tokens of prompts answered", registry=self.registry)
        self._first = Histogram(
            "mpi4dl_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_BUCKETS,
            registry=self.registry,
        )
        self._between = Histogram(
            "mpi4dl_time_between_tokens_seconds",
            "From one token of a request to the next",
            buckets=BETWEEN_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_UnderWay(batcher))

    def responded(self, path: str, status: int) -> None:
        """An HTTP response has begun."""
        self._responses.labels(path, str(status)).inc()
        self.interval.refused += status >= 400

    def asked(self) -> None:
        """A request for text was accepted."""
        self.interval.requests += 1

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)
        self.interval.first.append(seconds)
        self._count_token()

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)
        self.interval.between.append(seconds)
        self._count_token()

    def _count_token(self) -> None:
        self._tokens.inc()
        self.interval.tokens += 1

    def answered(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def cancelled(self) -> None:
        """The client of a request went away."""
        self._cancelled.inc()
        self.interval.cancelled += 1

    def work(self, under_way: bool) -> None:
        """Something is under way from now on, or nothing is."""
        now = time.perf_counter()
        if self._busy_since is not None:
            self.interval.busy_seconds += now - self._busy_since
        self._busy_since = now if under_way else None

    def report(self) -> str | None:
        """A line about the time since the last report, if anything happened."""
        self.work(self._busy_since is not None)
        told, self.interval = self.interval, Period()
        return told.line() if told.requests or told.refused or told.tokens else None

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _UnderWay(Collector):
    """What the batch says of itself when it is asked."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def collect(self) -> Iterator[Metric]:
        stats = self._batcher.stats()
        yield GaugeMetricFamily("mpi4dl_requests_waiting", "Requests that wait for a place in the batch", stats.waiting)
        yield GaugeMetricFamily("mpi4dl_requests_running", "Requests in the batch", stats.running)
        yield GaugeMetricFamily("mpi4dl_pages_used", "Pages of keys and values in use", stats.pages_used)
        yield GaugeMetricFamily("mpi4dl_pages_total", "Pages of keys and values there are", stats.pages_total)
