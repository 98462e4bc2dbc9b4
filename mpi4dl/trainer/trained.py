"""What a run left: where its weights are, what they are of.

runs/mine                           the newest whole checkpoint, or the weights that it ended with
runs/mine/checkpoints/step-...      that checkpoint
runs/mine/model.safetensors         these weights
runs/mine/ema.safetensors           their average, of a run with --ema; checkpoints have it beside the optimizer's state
weights.safetensors, weights.pt     what mpi4dl.export wrote
"""

from dataclasses import dataclass
from pathlib import Path

from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.manifest import ABOUT, AVERAGE, MODEL, candidates_at
from mpi4dl.checkpoints.saved import newest_whole
from mpi4dl.checkpoints.weight_files import open_weights
from mpi4dl.checkpoints.weights import average_of
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.options.config import ConfigError
from mpi4dl.trainer.description import Description, described_by

WEIGHTS = (".pt", ".pth", ".safetensors")
RAW = "these are the weights of the last step"
AVERAGED = (
    "these are averages of the weights (ema), which validations measured; --no-average, or average=False from Python, "
    "takes the weights of the last step"
)


@dataclass(frozen=True)
class FoundWeights:
    """Where weights are; `remarks` are about damaged ones, and about their average.

    `average`: a file of a checkpoint that has the average of parameters, which is to be taken instead.
    """

    weights: Path
    remarks: tuple[str, ...]
    average: Path | None = None


def folder_of(comm: Communicator, source: Path) -> Path:
    """The folder of the run that `source` is, or is a checkpoint of; of a file of weights the one that it is in.

    Collective. Raises Refusal on all ranks if there is no such folder or file.
    """
    with comm.together((ValueError, OSError)):
        if source.suffix in WEIGHTS and source.is_file():
            return source.absolute().parent
        folder = next((path for path in (source, *source.absolute().parents[:2]) if _is_run(path)), None)
        if folder is None:
            raise ConfigError(f"{source} is neither a run of mpi4dl.train with weights nor a checkpoint of one")
    assert folder is not None
    return folder


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def find_weights(comm: Communicator, source: Path, average: bool = True) -> FoundWeights:
    """The newest whole checkpoint of a run, or without any the weights that it ended with, or the file. Collective.

    Of a run with `ema` the `average` of the weights is taken, which its validations measured. A file is taken as it is.

    Raises:
        Refusal: on all ranks: there are no weights, or no checkpoint is whole.
    """
    if comm.broadcast_object(source.is_file()):
        beside = source.with_name(AVERAGE)
        other = comm.broadcast_object(source.name == MODEL and beside.is_file())
        return FoundWeights(source, (f"these are the weights of the last step; their average is {beside}",) * other)
    with refusing():
        chosen, skipped = newest_whole(candidates_at(source), comm)
    if chosen is None and skipped:
        raise Refusal(f"no checkpoint is whole: {'; '.join(skipped)}")
    weights = (chosen or source) / MODEL
    comm.agree(None if weights.is_file() else f"{source} has no weights yet: there is no checkpoint, and no {MODEL}")
    remarks = [f"skipped {one}" for one in skipped]
    there = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            there = average_of(chosen or source)
    there = comm.broadcast_object(there)
    if there is None:
        return FoundWeights(weights, tuple(remarks))
    if not average:
        return FoundWeights(weights, (*remarks, f"{RAW}; their average is left out, as asked for"))
    told = (*remarks, AVERAGED)
    return FoundWeights(there, told) if there.name == AVERAGE else FoundWeights(weights, told, there)


def description_of(weights: Path, folder: Path) -> Description:
    """What weights are of, as they say themselves, or the run that they lie in. Raises ConfigError, OSError."""
    told = open_weights(str(weights)).metadata.get(ABOUT)
    found = described_by(folder) if told is None else Description.read(told, str(weights))
    if found is None:
        raise ConfigError(
            f"{weights} does not say what it is of: name a run of mpi4dl.train, or weights of one by mpi4dl.export"
        )
    return found
