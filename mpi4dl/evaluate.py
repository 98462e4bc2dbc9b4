"""Metrics of a trained model: `mpirun -n 4 mpi4dl evaluate runs/mine --images test`.

It prints metrics with intervals and the confusion matrix, of slides by slide and by patient. It writes them beside the
run, with a line for each image, curves and calibration.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4dl._commands import runs
from mpi4dl.comm import failure

if runs(__name__):
    failure.arm()  # before anything else that may fail on one rank alone

from mpi4dl._files import alone_in
from mpi4dl._wording import counted
from mpi4dl.inference.options import EvaluationOptions, Inference, others_of
from mpi4dl.options.command import CommandLine, command

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

USAGE = "RUN_OR_WEIGHTS [--images FOLDER] [--FLAG VALUE ...]"
DESCRIPTION = "Measure how well a trained model does on images with labels."


@dataclass(frozen=True)
class EvaluateConfig(Inference, EvaluationOptions):
    """The options of the command."""


@command(EvaluateConfig, USAGE, DESCRIPTION, source="the folder of a run, a checkpoint, or weights")
def evaluate(comm: "Communicator", asked: CommandLine[EvaluateConfig]) -> None:
    """Measure the model that `asked.source` names. Collective."""
    out = asked.config.evaluating.out
    with ExitStack() as closing:
        comm.from_first(lambda: None if out is None else closing.enter_context(alone_in(Path(out))))
        _evaluate(comm, asked)


def _evaluate(comm: "Communicator", asked: CommandLine[EvaluateConfig]) -> None:
    from mpi4dl.inference.images import framed_for, open_to_evaluate, seen_before
    from mpi4dl.inference.model import Predictor
    from mpi4dl.inference.scoring import about_evaluation, judging_by, score
    from mpi4dl.results.evaluations import file_of_evaluation, require_writable
    from mpi4dl.results.runs import fold_folders

    config, options = asked.config, asked.config.evaluating
    others = others_of(options.images, options)
    if comm.from_first(lambda: bool(fold_folders(Path(asked.source)))):
        from mpi4dl.inference.folds import summarise
        from mpi4dl.inference.samples import Judging

        given = others or options.images
        comm.agree(f"{asked.source} has folds: evaluate one of them, such as fold_0, on others" if given else None)
        for name in ("seams", "lpips"):
            comm.agree(f"`{name}`: {asked.source} has folds: evaluate one of them" if getattr(options, name) else None)
        summarise(comm, Path(asked.source), config, Judging(**vars(options)), asked.spell)
        return
    judging = judging_by(comm, asked.source, config, options, options.images)
    model = Predictor(asked.source, config, comm, partial(framed_for, comm, options, config.columns))
    images, which = open_to_evaluate(
        comm, model.trained, model.folder, options.images, config.columns, others is not None, options.part
    )
    warnings = comm.from_first(lambda: seen_before(images, model.folder) if others or options.images else [])
    for line in (*model.title(), f"evaluated on {which}", *warnings) if comm.rank == 0 else ():
        print(asked.spell(line), flush=True)
    out = None if options.out is None else Path(options.out)
    comm.from_first(lambda: require_writable(out or model.folder))
    scores = score(model, images, judging, speaks=True, seams=options.seams, lpips=options.lpips)
    told = about_evaluation(model, images, images=others or options.images, part=options.part, warnings=warnings)
    with comm.together():
        if comm.rank == 0:
            print("\n".join(scores.table()), flush=True)  # which stays, if the disk is full
            file = file_of_evaluation(model.folder, out, datetime.now())
            for remark in scores.write(file, told):
                print(remark)
            bad = f", {len(scores.bad)} could not be read" if scores.bad else ""
            print(f"{counted(scores.count, scores.what)} evaluated{bad}; see {file} and {file.stem}.csv")


main = evaluate.main

if __name__ == "__main__":
    main()
