"""What a trained model says of new images: `mpirun -n 4 python -m mpi4dl.predict runs/mine --images new`.

It writes a line for each image as it comes, and masks; started again, it goes on with what is left.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted
from mpi4dl.inference.options import Inference, Inputs, Placing
from mpi4dl.options.declare import ConfigError, facts, option, parse_options
from mpi4dl.options.kinds import NAME, optional
from mpi4dl.options.words import speaking, spelling
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "mpirun -n RANKS python -m mpi4dl.predict RUN_OR_WEIGHTS --images FOLDER [--FLAG VALUE ...]"
DESCRIPTION = "Let a trained model predict of images without labels."


@dataclass(frozen=True)
class ToPredict:
    images: str | None = option(
        None,
        "a folder, of which all images below it are taken; an image; a pattern such as 'new/*.png'; or a .txt file "
        "with a path in each line",
        optional(NAME),
    )
    out: str | None = option(
        None,
        "the folder for predictions.csv, predictions.jsonl and masks; images that have a line there are not looked at "
        "again; none: predictions-IMAGES in that of the run",
        optional(NAME),
    )


@dataclass(frozen=True)
class PredictConfig:
    predicting: ToPredict = field(default_factory=ToPredict)
    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


def main(argv: Sequence[str] | None = None) -> None:
    """Predict by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse_options(PredictConfig, ["--help"], USAGE, DESCRIPTION)
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl._memory import within_limits
        from mpi4dl.comm import world

        comm = world()
        within_limits(lambda: predict(comm, arguments), comm.rank)

    guard.run(begin)


@speaking(spelling(PredictConfig))
def predict(comm: "Communicator", argv: Sequence[str]) -> None:
    """Predict as the command line says. Collective; raises Refusal on all ranks, in the words of the command."""
    with comm.together((ValueError,)):
        if not argv or argv[0].startswith("-"):
            raise ConfigError(f"name the folder of a run, a checkpoint, or weights first: {USAGE}")
        config = parse_options(PredictConfig, argv[1:], USAGE, DESCRIPTION)
        if config.predicting.images is None:
            raise ConfigError("`images` is missing: a folder, an image, a pattern, or a .txt file with paths")
    source, where = argv[0], config.predicting.images
    comm.agree(None, source=source, **facts(config))

    from mpi4dl.inference.images import open_any
    from mpi4dl.inference.model import SeeingModel
    from mpi4dl.inference.predicting import Predicting

    model, spell = SeeingModel(source, Inference(config.inputs, config.placing), comm), spelling(PredictConfig)
    images = open_any(comm, model.config, model.about, where)
    name = f"predictions-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(where).absolute().name).strip('-')}"
    out = model.folder / name if config.predicting.out is None else Path(config.predicting.out)
    predicting = Predicting(model, images, where, out, speaks=True)
    for line in (*model.title(), *predicting.remarks) if comm.rank == 0 else ():
        print(spell(line), flush=True)
    count = sum(1 for _ in predicting)
    if comm.rank == 0:
        for problem in predicting.bad[:10]:
            print(f"could not be read: {problem}")
        bad = f", {len(predicting.bad)} of which could not be read" if predicting.bad else ""
        print(f"{counted(count, 'image')} looked at{bad}; see {out}", flush=True)


if __name__ == "__main__":
    main()
