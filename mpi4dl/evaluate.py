"""How well a trained model does: `mpirun -n 4 python -m mpi4dl.evaluate runs/mine --images test`.

It prints metrics with intervals and the confusion matrix, and writes them, with a line for each image, beside the run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl.comm import guard

if __name__ == "__main__":
    guard.arm()  # before anything else that may fail on one rank alone

from mpi4dl._wording import counted
from mpi4dl.inference.options import Inference, Inputs, Placing
from mpi4dl.options.declare import ConfigError, facts, option, parse_options
from mpi4dl.options.kinds import COUNT_OR_ZERO, NAME, PROPER_FRACTION, optional
from mpi4dl.options.words import speaking, spelling
from mpi4dl.trainer.stopping import die_by_ctrl_c

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "mpirun -n RANKS python -m mpi4dl.evaluate RUN_OR_WEIGHTS [--images FOLDER] [--FLAG VALUE ...]"
DESCRIPTION = "Measure how well a trained model does on images with labels."


@dataclass(frozen=True)
class Evaluating:
    images: str | None = option(
        None,
        "a folder with one subfolder per class, with labels.csv, or with images and masks; an .npz file; none: what "
        "validated in training",
        optional(NAME),
    )
    out: str | None = option(
        None,
        "the folder that evaluation.json and evaluation.csv are written to; none: that of the run, with the date in "
        "their names",
        optional(NAME),
    )
    resamples: int = option(
        1000, "how often images are drawn anew for the intervals of metrics; 0: no intervals", COUNT_OR_ZERO
    )
    level: float = option(0.95, "the share of resampled metrics that an interval holds", PROPER_FRACTION)


@dataclass(frozen=True)
class EvaluateConfig:
    evaluating: Evaluating = field(default_factory=Evaluating)
    inputs: Inputs = field(default_factory=Inputs)
    placing: Placing = field(default_factory=Placing)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate by the command line `argv`, on all ranks of the MPI job."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "-h" in arguments or "--help" in arguments:
        parse_options(EvaluateConfig, ["--help"], USAGE, DESCRIPTION)
    die_by_ctrl_c()

    def begin() -> None:
        from mpi4dl._memory import within_limits
        from mpi4dl.comm import world

        comm = world()
        within_limits(lambda: evaluate(comm, arguments), comm.rank)

    guard.run(begin)


@speaking(spelling(EvaluateConfig))
def evaluate(comm: "Communicator", argv: Sequence[str]) -> None:
    """Evaluate as the command line says. Collective; raises Refusal on all ranks, in the words of the command."""
    with comm.together((ValueError,)):
        if not argv or argv[0].startswith("-"):
            raise ConfigError(f"name the folder of a run, a checkpoint, or weights first: {USAGE}")
        config = parse_options(EvaluateConfig, argv[1:], USAGE, DESCRIPTION)
    comm.agree(None, source=argv[0], **facts(config))

    from mpi4dl.inference.images import open_labelled
    from mpi4dl.inference.model import SeeingModel
    from mpi4dl.inference.scoring import file_names, score

    asked, spell = config.evaluating, spelling(EvaluateConfig)
    model = SeeingModel(argv[0], Inference(config.inputs, config.placing), comm)
    images, which = open_labelled(comm, model.config, model.about, asked.images)
    for line in (*model.title(), f"evaluated on {which}") if comm.rank == 0 else ():
        print(spell(line), flush=True)
    scores = score(model, images, resamples=asked.resamples, level=asked.level, speaks=True)
    files = file_names(model.folder, None if asked.out is None else Path(asked.out), datetime.now())
    told = {"source": argv[0], "weights": str(model.weights), "images": asked.images, "plan": str(model.plan)}
    with comm.together():
        if comm.rank == 0:
            scores.write(*files, told, asked.level)
            print("\n".join(scores.table(asked.level)))
            bad = f", {len(scores.bad)} could not be read" if scores.bad else ""
            print(f"{counted(scores.count, 'image')} evaluated{bad}; see {files[0]} and {files[1].name}")


if __name__ == "__main__":
    main()
