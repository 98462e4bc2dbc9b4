"""The continuous batch: requests join and leave it at any token. Its face to callers on rank 0, and its loop."""

from collections.abc import Callable, Sequence
from typing import Any

from mpi4dl.comm import Communicator
from mpi4dl.datasets.text import Tokenizer
from mpi4dl.generation.requests import Event, Sampling, Stats

OnEvent = Callable[[Event], None]


class Batcher:
    """Generates text for many requests at once, by the model that `held` lays over the ranks of `comm`. Collective.

    Made on every rank. Rank 0 then calls `run`, all others `follow`. Only rank 0's other methods are for callers, from
    any thread; they never wait for MPI.

    Args:
        held: the model: this rank's stages, or parts of parameters. It is put in evaluation mode.
        comm: all ranks of the plan.
        tokenizer: what decodes tokens; its `end` ends a request.
        context: the most tokens that a prompt and what is generated may have.
        max_batch: how many requests run at once at most; others wait, first come, first served.
        page_size: how many tokens' keys and values a page holds.
        num_pages: how many pages there are on each data rank; None: enough for `max_batch` of half the context.
        prefill_chunk: how many tokens of prompts are worked on in a step at most, so that others go on.
    """

    def __init__(
        self,
        held: Any,
        comm: Communicator,
        tokenizer: Tokenizer,
        context: int,
        *,
        max_batch: int = 16,
        page_size: int = 16,
        num_pages: int | None = None,
        prefill_chunk: int = 128,
    ) -> None:
        raise NotImplementedError

    def submit(self, prompt_tokens: Sequence[int], sampling: Sampling, on_event: OnEvent) -> int:
        """Add a request; returns its id. `on_event` is called on the thread of `run`: it must be quick.

        An empty prompt stands for the end of a document. Generation ends at the context's end too ("length").

        Raises:
            ValueError: it can never fit (longer than the context, more pages than there are), or a token is unknown.
            RuntimeError: the batch is stopping.
        """
        raise NotImplementedError

    def cancel(self, request_id: int) -> None:
        """End a request, which gets an event "cancelled"; its pages are free before the next step. Unknown ids, as of
        those that have ended, are ignored.
        """
        raise NotImplementedError

    def run(self, until_idle: bool = False) -> None:
        """Make steps while there is something to do, else sleep, up to `stop`; or until nothing is left to do, after
        which it can be called again. On the main thread of rank 0.
        """
        raise NotImplementedError

    def follow(self) -> None:
        """Take part in the steps of rank 0 until it has stopped. On the main thread of all other ranks."""
        raise NotImplementedError

    def stop(self, drain: bool = True) -> None:
        """Accept no more requests; end `run` when those that are there have ended, or cancel them now."""
        raise NotImplementedError

    def stats(self) -> Stats:
        """What is under way, as of the last step."""
        raise NotImplementedError
