"""Text from a trained model: `mpirun -n 2 mpi4dl generate runs/mine --prompt "def " --tensor 2`.

`generate` builds the model on all ranks, and rank 0 submits the prompts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._files import read_regular
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.config import Parallel
from mpi4dl.options.declare import ConfigError, like, saying
from mpi4dl.text.options import Batching, Prompts, Ranks, Sampling

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.text.batcher import Event

USAGE = "RUN_OR_CHECKPOINT [--prompt TEXT] [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model continue text."


@dataclass(frozen=True)
class Cores:
    """The CPU threads of a rank."""

    threads: int | None = like(Parallel, "threads")


@dataclass(frozen=True)
class GenerateConfig:
    prompts: Prompts = field(default_factory=Prompts)
    choosing: Sampling = field(default_factory=Sampling)
    ranks: Ranks = field(default_factory=Ranks)
    batching: Batching = field(default_factory=Batching)
    cores: Cores = field(default_factory=Cores)


@command(GenerateConfig, USAGE, DESCRIPTION, source="the folder of a run, or a checkpoint")
def generate(comm: "Communicator", asked: CommandLine[GenerateConfig]) -> None:
    """Load the model, each rank its part, and write what is asked for to standard output, from rank 0."""
    config = asked.config
    with comm.together((ValueError,)):
        config.choosing.of_sample(config.prompts.num_samples - 1)

    from mpi4dl.text.loading import find_trained, open_batcher

    with comm.together((ValueError, OSError)):
        prompts = read_prompts(config.prompts) if comm.rank == 0 else []
    trained = find_trained(comm, Path(asked.source), config.ranks.trust_code)
    batcher = open_batcher(comm, trained, config.ranks, config.batching, config.cores.threads)
    with comm.together((ValueError,)):
        if comm.rank == 0:
            wanted = [(prompt, number) for prompt in prompts for number in range(config.prompts.num_samples)]
            printer = Printer(wanted, config.prompts.json)
            for place, (prompt, number) in enumerate(wanted):
                tokens = batcher.tokenizer.encode(prompt).tolist()
                batcher.submit(tokens, config.choosing.of_sample(number), partial(printer.hear, place))
    if comm.rank == 0:
        batcher.stop(drain=True)
        batcher.run()
    else:
        batcher.follow()


def read_prompts(options: Prompts) -> list[str]:
    """The prompts that are asked for, in order. Raises ConfigError, OSError."""
    path = options.prompts
    if path is None:
        return [options.prompt]
    if options.prompt:
        raise ConfigError("--prompt and --prompts both say what the prompt is: give one of them")
    with saying(f"{path} is no text in UTF-8"):
        text = read_regular(Path(path)).decode()
    return [_prompt_in(line, f"line {n} of {path}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _prompt_in(line: str, where: str) -> str:
    with saying(f"{where} is no JSON", ValueError, RecursionError):
        found = json.loads(line)
    found = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(found, str):
        raise ConfigError(f'{where} is no prompt: it must be a text, such as "def ", or {{"prompt": "def "}}')
    return found


class Printer:
    """Prints texts in order, the first that is not complete as it comes; as JSON each when it is complete."""

    def __init__(self, wanted: Sequence[tuple[str, int]], as_json: bool) -> None:
        self._wanted, self._as_json = wanted, as_json
        self._events: list[list[Event]] = [[] for _ in wanted]
        self._now = self._shown = 0  # which text is being printed, and how many of its events were

    def hear(self, place: int, event: "Event") -> None:
        """Text number `place` goes on so."""
        self._events[place].append(event)
        while self._now < len(self._wanted):
            events = self._events[self._now]
            ended = bool(events) and events[-1].finish_reason is not None
            if self._as_json:
                if ended:
                    print(json.dumps(self._record(self._now), ensure_ascii=False), flush=True)
            else:
                self._print(events, ended)
            if not ended:
                return
            self._now, self._shown = self._now + 1, 0

    def _print(self, events: "Sequence[Event]", ended: bool) -> None:
        begins = not self._shown and bool(events)
        prompt, number = self._wanted[self._now]
        if begins and len(self._wanted) > 1:
            print(f"--- {prompt!r}, sample {number + 1}")
        text = (prompt if begins else "") + "".join(event.text for event in events[self._shown :])
        print(text, end="\n" if ended else "", flush=True)
        self._shown = len(events)

    def _record(self, place: int) -> dict[str, Any]:
        (prompt, number), events = self._wanted[place], self._events[place]
        return {
            "prompt": prompt,
            "sample": number,
            "text": "".join(event.text for event in events),
            "tokens": [event.token for event in events if event.token is not None],
            "finish_reason": events[-1].finish_reason,
            "usage": None if events[-1].usage is None else asdict(events[-1].usage),
        }


main = generate.main

if __name__ == "__main__":
    main()
