"""Text from a trained model: `mpirun -n 2 python -m mpi4dl.generate runs/mine --prompt "def " --tensor 2`.

It reads top to bottom: `main` starts MPI, `generate` builds the model, and rank 0 asks for what is wanted.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl._files import read_regular
from mpi4dl.generation.options import Batching, Ranks
from mpi4dl.generation.requests import Event, Sampling
from mpi4dl.options.declare import ConfigError, facts, option, parse_options
from mpi4dl.options.kinds import BOOLEAN, COUNT, COUNT_OR_ZERO, NAME, NOT_NEGATIVE, POSITIVE, SEED, TEXT, Kind, optional
from mpi4dl.options.words import speaking, spelling
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.generation.batcher import Batcher

USAGE = "mpirun -n RANKS python -m mpi4dl.generate RUN_OR_CHECKPOINT [--prompt TEXT] [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model go on with text."


def _stop_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return tuple(texts)


def _read_stop_texts(text: str) -> Any:
    return json.loads(text) if text.startswith("[") else text.replace("\\n", "\n").replace("\\t", "\t")


STOP = Kind(
    r'a text, in which \n is a line\'s end, or several, as in ["\n\n", "class "]',
    "TEXT",
    _stop_texts,
    read=_read_stop_texts,
    raw=list,
)


@dataclass(frozen=True)
class Prompts:
    prompt: str = option("", "what the model goes on with; empty: it begins a document", TEXT)
    prompt_file: str | None = option(None, "a file of UTF-8 that is the prompt; none: --prompt", optional(NAME))
    prompts: str | None = option(
        None, 'a file with a prompt in each line, as JSON: "def " or {"prompt": "def "}; none: --prompt', optional(NAME)
    )
    num_samples: int = option(1, "how many texts for each prompt, with seeds from --seed on", COUNT)
    json: bool = option(False, "print a JSON object for each text, on one line", BOOLEAN)


@dataclass(frozen=True)
class Choosing:
    max_tokens: int = option(128, "how many tokens are generated at most", COUNT)
    temperature: float = option(1.0, "what logits are divided by; 0: always the most probable token", NOT_NEGATIVE)
    top_k: int = option(0, "only so many of the most probable tokens are possible; 0: all", COUNT_OR_ZERO)
    top_p: float = option(1.0, "only the most probable tokens that have this probability together", POSITIVE)
    repetition_penalty: float = option(1.0, "what logits of tokens that occurred are divided by", POSITIVE)
    seed: int | None = option(None, "of the random numbers; none: others each time", optional(SEED))
    stop: tuple[str, ...] = option((), "text before which generation ends", STOP)

    def sampling(self, number: int = 0) -> Sampling:
        """Of sample `number` of a prompt. Raises ValueError."""
        values = asdict(self)
        return Sampling(**values | {"seed": None if self.seed is None else self.seed + number})


@dataclass(frozen=True)
class GenerateConfig:
    prompts: Prompts = field(default_factory=Prompts)
    choosing: Choosing = field(default_factory=Choosing)
    ranks: Ranks = field(default_factory=Ranks)
    batching: Batching = field(default_factory=Batching)


def main(argv: Sequence[str] | None = None) -> None:
    """Generate by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse_options(GenerateConfig, ["--help"], USAGE, DESCRIPTION)
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl.comm import world

        generate(world(), arguments)

    guard.run(begin)


@speaking(spelling(GenerateConfig))
def generate(comm: "Communicator", argv: Sequence[str]) -> None:
    """Load the model, each rank its part, and write what is asked for to standard output, from rank 0."""
    with comm.together((ValueError,)):
        source = argv[0] if argv and not argv[0].startswith("-") else None
        if source is None:
            raise ConfigError(f"name the folder of a run, or a checkpoint, first: {USAGE}")
        config = parse_options(GenerateConfig, argv[1:], USAGE, DESCRIPTION)
        config.choosing.sampling(config.prompts.num_samples - 1)
    comm.agree(None, source=source, **facts(config))

    from mpi4dl.generation.loading import find_trained, open_batcher

    with comm.together((ValueError, OSError)):
        prompts = read_prompts(config.prompts) if comm.rank == 0 else []
    comm.node.share_cores()
    trained = find_trained(comm, Path(source))
    batcher = open_batcher(comm, trained, config.ranks, config.batching)
    for remark in trained.remarks if comm.rank == 0 else ():
        print(f"mpi4dl: {remark}", file=sys.stderr)
    with comm.together((ValueError,)):
        if comm.rank == 0:
            submit_all(batcher, config, prompts)
    if comm.rank == 0:
        batcher.stop(drain=True)
        batcher.run()
    else:
        batcher.follow()


def read_prompts(options: Prompts) -> list[str]:
    """The prompts that are asked for, in order. Raises ConfigError, OSError."""
    named = [name for name in ("prompt", "prompt_file", "prompts") if getattr(options, name)]
    if len(named) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in named)
        raise ConfigError(f"{flags} both say what the prompt is: give one of them")
    path = options.prompt_file or options.prompts
    if path is None:
        return [options.prompt]
    try:
        text = read_regular(Path(path)).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
    if options.prompt_file is not None:
        return [text]
    return [_prompt_in(line, f"line {n} of {path}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _prompt_in(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    found = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(found, str):
        raise ConfigError(f'{where} is no prompt: it must be a text, such as "def ", or {{"prompt": "def "}}')
    return found


def submit_all(batcher: "Batcher", config: GenerateConfig, prompts: Sequence[str]) -> None:
    """Ask for all samples of all prompts, which are printed in this order. Raises ValueError for what cannot be."""
    wanted = [(prompt, number) for prompt in prompts for number in range(config.prompts.num_samples)]
    printer = Printer(wanted, config.prompts.json)
    for place, (prompt, number) in enumerate(wanted):
        tokens = batcher.tokenizer.encode(prompt).tolist()
        batcher.submit(tokens, config.choosing.sampling(number), partial(printer.hear, place))


class Printer:
    """Prints texts in order, the first that is not complete as it comes; as JSON each when it is complete."""

    def __init__(self, wanted: Sequence[tuple[str, int]], as_json: bool) -> None:
        self._wanted, self._as_json = wanted, as_json
        self._events: list[list[Event]] = [[] for _ in wanted]
        self._now = self._shown = 0  # which text is being printed, and how many of its events were

    def hear(self, place: int, event: Event) -> None:
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

    def _print(self, events: Sequence[Event], ended: bool) -> None:
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


if __name__ == "__main__":
    main()
