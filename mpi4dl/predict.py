"""Predictions of a trained model for new images: `mpirun -n 4 mpi4dl predict runs/mine --images new`.

It writes a line for each image as soon as it is ready, and masks. Started again, it continues with the rest.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._commands import run_command, runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted
from mpi4dl.inference.options import Inference, PredictionOptions, others_of
from mpi4dl.options.command import CommandLine, command
from mpi4dl.options.declare import ConfigError, neutral
from mpi4dl.options.kinds import NAME, optional

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator
    from mpi4dl.datasets.split import Named

USAGE = "RUN_OR_WEIGHTS --images FOLDER [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model predict of images without labels."
FEATURES = "--features-out"


@dataclass(frozen=True)
class Features:
    """Features of slides instead of predictions."""

    features_out: str | None = neutral(
        None,
        "write the features of tissue patches by the run's encoder into this folder; all other flags are then those of "
        "mpi4dl embed",
        optional(NAME),
    )


@dataclass(frozen=True)
class PredictConfig(Inference, PredictionOptions):
    embedding: Features = field(default_factory=Features)


@command(PredictConfig, USAGE, DESCRIPTION, source="the folder of a run, a checkpoint, or weights")
def predict(comm: "Communicator", asked: CommandLine[PredictConfig]) -> None:
    """Let the model that `asked.source` names look at images. Collective."""
    config, chosen = asked.config, asked.config.predicting
    where = chosen.images or chosen.slides or chosen.features
    with comm.together((ConfigError,)):
        if config.embedding.features_out is not None:
            raise ConfigError("`features_out` is a task of mpi4dl embed: start `mpi4dl embed`")
        if where is None:
            raise ConfigError(
                "`images` is missing: a folder, an image, a pattern, or a .txt file with paths; or `slides`, or "
                "`features`"
            )
    others = others_of(chosen.images, chosen)

    from mpi4dl.inference.images import framed_for, open_any, open_any_slides
    from mpi4dl.inference.model import Predictor
    from mpi4dl.inference.predicting import predictions_of

    framed = partial(framed_for, comm, chosen, config.columns)
    model = Predictor(asked.source, config, comm, framed)
    images: Named = open_any_slides(comm, model.trained) if others else open_any(comm, model.trained, where)
    name = f"predictions-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(where).absolute().name).strip('-')}"
    out = model.folder / name if chosen.out is None else Path(chosen.out)
    predicting = predictions_of(model, images, where, out, (config,), speaks=True)
    for line in (*model.title(), *predicting.remarks) if comm.rank == 0 else ():
        print(asked.spell(line), flush=True)
    count = sum(1 for _ in predicting)
    if comm.rank == 0:
        for problem in predicting.bad[:10]:
            print(f"could not be read: {problem}")
        for line in predicting.summary():
            print(line)
        bad = f", {len(predicting.bad)} of which could not be read" if predicting.bad else ""
        print(f"{counted(count, predicting.noun)} looked at{bad}; see {out}", flush=True)
    nothing = count > 0 and len(predicting.bad) == count == len(images)
    comm.agree(f"none of {counted(count, predicting.noun)} can be read: {predicting.bad[0]}" if nothing else None)


def main(argv: Sequence[str] | None = None) -> None:
    """The command: `RUN --features-out FOLDER --slides TABLE` is `mpi4dl embed --weights RUN --out FOLDER`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = [word.partition("=")[0] for word in arguments]
    if FEATURES not in flags:
        predict.main(arguments)
        return
    place = flags.index(FEATURES)
    arguments[place] = arguments[place].replace(FEATURES, "--out")
    run_command("embed", [*(["--weights"] if not arguments[0].startswith("-") else []), *arguments])


if __name__ == "__main__":
    main()
