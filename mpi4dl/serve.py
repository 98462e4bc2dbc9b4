"""The server: `mpirun -n 2 mpi4dl serve runs/mine --tensor 2`, and OpenAI's clients at its address.

`serve` builds the model on all ranks. Rank 0 answers requests, and all ranks compute.
"""

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._files import read_regular
from mpi4dl._wording import to_install
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.declare import ConfigError, instead, like, option, same_as, saying
from mpi4dl.options.kinds import COUNT, COUNT_OR_ZERO, NAME, NOT_NEGATIVE, PORT, optional
from mpi4dl.options.sections.address import Address
from mpi4dl.runs.stopping import StopSignals
from mpi4dl.text.options import Batching, Ranks

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.text.batcher import Batcher

USAGE = "RUN_OR_CHECKPOINT [--port PORT] [--FLAG VALUE ...]"
DESCRIPTION = "Serve a trained model to clients of OpenAI's HTTP interface."
TOKEN_VARIABLE = "MPI4DL_TOKEN"
MOST_BODY_BYTES = 1 << 20  # of a request


@dataclass(frozen=True)
class Serving:
    """The address, limits of requests and connections, and how the server ends."""

    host: str = like(Address, "host")
    port: int = option(
        8000,
        "port to listen on; 0: any free port, which is printed",
        PORT,
        brief="the port to listen on; 0: any",
    )
    model_name: str | None = option(
        None,
        "name of the model in requests; none: the name of the served folder",
        optional(NAME),
        brief="what requests call the model",
        known_as=same_as("served-model-name"),
    )
    token_file: str | None = option(
        None,
        f"a file with what requests must bear as a token; none: what {TOKEN_VARIABLE} says, if set",
        optional(NAME),
        brief="a file with the token that requests must bear",
        known_as=instead("use {option} FILE, a file that holds the token", "api-key"),
    )
    max_queue: int = option(
        64, "largest number of texts that wait for a place in the batch; more are refused", COUNT_OR_ZERO
    )
    max_tokens: int | None = option(
        None,
        "largest number of tokens of a text; none: as many as the context has room for",
        optional(COUNT),
        brief="tokens of a text at most",
        known_as=same_as("max-model-len max-new-tokens"),
    )
    allowed_hosts: tuple[str, ...] | None = like(Address, "allowed_hosts")
    drain_seconds: float = option(30.0, "seconds that running requests may take when the server stops", NOT_NEGATIVE)
    threads: int | None = option(
        None,
        "number of threads of a rank; none: OMP_NUM_THREADS, or its share of the cores, less one for HTTP",
        optional(COUNT),
    )
    hang_timeout: float = option(
        600.0, "seconds that a step of the batch may take before all ranks end; 0: no limit", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class ServeConfig:
    serving: Serving = field(default_factory=Serving)
    ranks: Ranks = field(default_factory=Ranks)
    batching: Batching = field(default_factory=Batching)


@command(ServeConfig, USAGE, DESCRIPTION, source="the folder of a run, or a checkpoint")
def serve(comm: "Communicator", asked: CommandLine[ServeConfig]) -> None:
    """Load the model, each rank its part, and answer requests until a signal asks for the end."""
    config, source = asked.config, Path(asked.source)

    from mpi4dl.text.loading import find_trained, open_batcher

    with comm.together():
        opened = _open(config.serving) if comm.rank == 0 else None
    trained = find_trained(comm, source, config.ranks.trust_code)
    batcher = open_batcher(comm, trained, config.ranks, config.batching, config.serving.threads)
    # More threads than there are cores for, that of HTTP included, wait for each other in each layer.
    comm.node.share_cores(config.serving.threads, spare=int(comm.rank == 0))
    if opened is not None:
        name = config.serving.model_name or source.absolute().name
        _answer(batcher, config, name, *opened)
    else:
        with StopSignals():  # rank 0, which had the signal too, says when it is over
            failure.Watchdog(0).stop()  # nobody asking for anything is no reason to end
            batcher.follow()


def _open(options: Serving) -> tuple[socket.socket, str | None]:
    """The socket, and the token that requests must bear. Raises ValueError, OSError."""
    try:
        import mpi4dl.text.serving.app  # noqa: F401
        from mpi4dl._http import bind, is_loopback
    except ImportError as error:
        needed = to_install("starlette", "pydantic", "uvicorn", "prometheus_client")
        raise ConfigError(f"serving needs packages that are not installed ({error}); run {needed}") from None
    token = _token(options.token_file)
    if token is None and not is_loopback(options.host):
        print(
            f"mpi4dl: everybody who reaches {options.host} can use this server: require a token by --token-file",
            file=sys.stderr,
        )
    return bind(options.host, options.port), token


def _token(file: str | None) -> str | None:
    """The token that requests must have, without white space around it; None: no token. Raises ConfigError, OSError."""
    where, token = file or TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
    if file is not None:
        with saying(f"{file} is no text in UTF-8"):
            token = read_regular(Path(file)).decode()
    if token is None:
        return None
    token = token.strip()
    if not token:
        raise ConfigError(f"{where} holds no token: it is empty")
    if not token.isprintable():
        raise ConfigError(
            f"{where} holds a token of several lines or with control characters, which no header can have"
        )
    return token


def _answer(batcher: "Batcher", config: ServeConfig, name: str, listener: socket.socket, token: str | None) -> None:
    from mpi4dl._http import HttpServer, Limits
    from mpi4dl.text.serving.admission import Admission
    from mpi4dl.text.serving.app import api_error, make_app
    from mpi4dl.text.serving.server import LAST_WORDS_SECONDS, run_server

    options = config.serving
    front = Admission(batcher, options.max_queue, options.max_tokens)
    app = make_app(front, name, MOST_BODY_BYTES, token, (options.host, *(options.allowed_hosts or ())))
    server = HttpServer(app, api_error, Limits(), LAST_WORDS_SECONDS)
    run_server(server, front, listener, f"serving {name} at", options.drain_seconds, options.hang_timeout)


main = serve.main

if __name__ == "__main__":
    main()
