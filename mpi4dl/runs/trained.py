"""The results of a run: its weights, and the description of their model.

runs/mine                           the newest whole checkpoint, or the weights that it ended with
runs/mine/checkpoints/step-...      that checkpoint
runs/mine/model.safetensors         these weights
runs/mine/ema.safetensors           their average, of a run with --ema; checkpoints have it beside the optimizer's state
weights.safetensors, weights.pt     written by mpi4dl export
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.manifest import ABOUT, AVERAGE, MODEL
from mpi4dl.checkpoints.weights import average_of, load_weights, open_weights, weights_in
from mpi4dl.comm import Communicator
from mpi4dl.options.config import Config, ConfigError, shared_options
from mpi4dl.options.parts import is_own
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.runs.assembly import ModelAssembly
from mpi4dl.runs.description import FILE, Description, described_by, untrusted

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
            why = "name the --run-folder of the training" if source.exists() else "there is no such file or folder"
            raise ConfigError(f"{source} is neither a run of mpi4dl train with weights nor a checkpoint of one: {why}")
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
        weights, skipped = weights_in(source, comm)
    comm.agree(None if weights.is_file() else f"{source} has no weights yet: there is no checkpoint, and no {MODEL}")
    remarks = [f"skipped {one}" for one in skipped]
    there = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            there = average_of(weights.parent)
    there = comm.broadcast_object(there)
    if there is None:
        return FoundWeights(weights, tuple(remarks))
    if not average:
        return FoundWeights(weights, (*remarks, f"{RAW}; their average is left out, as asked for"))
    told = (*remarks, AVERAGED)
    return FoundWeights(there, told) if there.name == AVERAGE else FoundWeights(weights, told, there)


def hold_trained(
    assembly: ModelAssembly, found: FoundWeights, num_outputs: int, channels: int
) -> tuple[LocalStages, list[str]]:
    """The model over ranks with these weights, in evaluation mode; and what there is to say of them. Collective."""
    held = assembly.hold(num_outputs, channels).eval().requires_grad_(False)
    return held, load_weights(held, str(found.weights), strict=True, average=found.average)[1:]


def description_of(comm: Communicator, weights: Path, folder: Path) -> tuple[Description, bool]:
    """The description of the model of weights, from their metadata or their run; and whether this user signed it.

    Rank 0 reads it for all. Collective. Raises Refusal on all ranks.
    """
    found = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            told = open_weights(str(weights)).metadata.get(ABOUT)
            about = described_by(folder) if told is None else Description.read(told, str(weights))
            if about is None:
                raise ConfigError(
                    f"{weights} does not say what it is of: name a run of mpi4dl train, or weights of one by "
                    "mpi4dl export"
                )
            found = about, about.is_ours()
    answer: tuple[Description, bool] = comm.broadcast_object(found)
    return answer


def with_own_model(comm: Communicator, config: Config, folder: Path, asked: bool) -> Config:
    """The configuration that a run's folder has, with its own model where that is now, if it is one.

    The file of options is not signed: code that it names counts as the user's if the run's description, which is, names
    it with the same options. Collective. Raises Refusal on all ranks for code that must not be loaded.
    """
    text = config.model.model
    if not is_own(text):
        return config
    found = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            about, options, where = described_by(folder), shared_options(config), str(folder)
            if about is None and not asked:
                raise untrusted(where, "model", text)
            if about is None:
                found = text
            else:
                same = all(about.options.get(name) == options[name] for name in ("model", "model_options"))
                found = about.part("model", text, str(folder / FILE), same and about.is_ours(), asked)
    return replace(config, model=replace(config.model, model=comm.broadcast_object(found)))
