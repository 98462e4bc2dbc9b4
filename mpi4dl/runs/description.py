"""The description of a trained model: all that building it and transforming its images need; and its weights.

    model.json                      in the folder of a run, from its start on
    metadata of model.safetensors   the same text, under the key `mpi4dl`; in weights that are exported too

    {"options": {"model": ""resnet18"", "image_size": ""224x224"", ...}, "task": "classify", "num_outputs": 2,
     "classes": ["benign", "tumour"], "channels": 3, "fit": "resize",
     "own": {"model": {"file": "/home/me/my_code.py", "digest": "0123456789abcdef"}}, "signature": "..."}

Options are those of a configuration, as a TOML file has them. `own` are files of the user's that the model needs.

Anybody can write such a text into a file and name code in it. So training signs a text that names code of the user's,
with a secret key that it keeps outside of all runs, in the user's state folder. Code that a text names is loaded only
if that signature is right, or if the user asks for it.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpi4dl._files import read_regular, write_durably
from mpi4dl._numbers import typed
from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.manifest import ABOUT, AVERAGE, MODEL
from mpi4dl.checkpoints.weights import average_of, load_weights, open_weights, weights_in
from mpi4dl.comm import Communicator
from mpi4dl.datasets.transform import Fit, as_fit
from mpi4dl.models.registry import without_loading
from mpi4dl.options import parts
from mpi4dl.options.config import Config, ConfigError, shared_options
from mpi4dl.options.declare import nearest, options_of, saying, with_options
from mpi4dl.options.kinds import part_name
from mpi4dl.options.sources import source_of
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.results.formats import as_object, parse_object, reading
from mpi4dl.results.names import CONFIG
from mpi4dl.runs.assembly import OWN_PARTS, ModelAssembly
from mpi4dl.tasks.task import TASKS

FILE = "model.json"
MOST = 1 << 31  # outputs or channels that a model may have

SECTIONS = ("model", "data", "slides")
MORE = ("loss", "loss_options", "stream_norm", "deterministic", "tf32", "lora")
OF_THE_TASK = ("task", "text")
OWN = ("model", "transforms", "dataset")  # what may be code of the user's


@dataclass(frozen=True)
class Description:
    """All that was decided about a model and its images when it was trained."""

    options: Mapping[str, str]
    task: str
    num_outputs: int
    classes: tuple[str, ...]
    channels: int
    fit: Fit
    own: Mapping[str, Mapping[str, str | None]]
    values: str | None = None  # what values of volumes are read as
    largest: tuple[int, ...] | None = None  # size of the images that training saw whole, as far as it looked at them
    signature: str = ""
    input_values: str | None = None  # the depth of pictures that others are made of

    @classmethod
    def of(cls, config: Config, images: Any, num_outputs: int) -> "Description":
        """Of a run that trains on these images, or texts."""
        wanted = {name for name, item in options_of(Config).items() if item.section in SECTIONS or name in MORE}
        options = {name: value for name, value in shared_options(config).items() if name in wanted}
        asked, source = config.data.task, source_of(config)
        task = asked if asked in TASKS and TASKS[asked].of_text == source.of_text else source.task_of(images.training)
        found = {name: _own(getattr(getattr(config, OWN_PARTS[name]), name, None)) for name in OWN}
        return cls(
            {name: value for name, value in options.items() if name not in OF_THE_TASK},
            task,
            num_outputs,
            tuple(images.classes),
            images.channels,
            getattr(images, "fit", "resize"),
            {name: each for name, each in found.items() if each is not None},
            getattr(getattr(images, "training", None), "values", None),
            getattr(images, "largest", None),
            input_values=getattr(getattr(images, "training", None), "input_values", None),
        )

    @property
    def text(self) -> str:
        return as_object(asdict(self))

    @classmethod
    def read(cls, text: str, where: str) -> "Description":
        """Raises ConfigError for what is no such text; `where` it was found."""
        plain = parse_object(text, where)
        with reading(where):
            found: Description = typed(cls, {**plain, "fit": as_fit(plain["fit"])}, "its object")
            if not (0 < found.num_outputs <= MOST and found.channels <= MOST):  # text has no channels
                raise ValueError(f"{found.num_outputs} outputs of {found.channels} channels")
        return found

    def record(self, comm: Communicator, folder: Path) -> "Description":
        """Sign it and put it into the folder of a run, from rank 0. Collective; raises Refusal if that cannot be."""

        def written() -> Description:
            signed = self.signed()
            write_durably(folder / FILE, signed.text.encode())
            return signed

        return comm.from_first(written, (OSError,))

    def signed(self) -> "Description":
        """The same with this user's signature, if it names code and the user has a place for a key."""
        if not self.own:
            return self
        from mpi4dl._signatures import signature_of

        return replace(self, signature=signature_of(self._unsigned))

    def without(self, option: str) -> "Description":
        """The same but for an option, signed if this is."""
        left = replace(self, options={name: value for name, value in self.options.items() if name != option})
        return left.signed() if left != self and self.is_ours() else left

    def is_ours(self) -> bool:
        """Whether training by this user signed it."""
        from mpi4dl._signatures import is_signed

        return is_signed(self._unsigned, self.signature)

    @property
    def _unsigned(self) -> dict[str, Any]:
        found = asdict(replace(self, signature=""))
        if self.input_values is None:  # runs of earlier versions were signed without it
            del found["input_values"]
        return found

    @property
    def metadata(self) -> dict[str, str]:
        return {ABOUT: self.text}

    def config(self, where: str, trusted: bool, asked: bool = False, **instead: Any) -> Config:
        """The configuration by which the model is built; `instead` of a part that is the user's own, another one.

        Code that it names is loaded if it is `trusted` (this user's training signed it), or `asked` for. A dataset that
        must not be loaded, or is gone, is refused once something opens it. Raises ConfigError if other code must not be
        loaded, is gone, or other than it was.
        """
        with saying(f"{where}: was trained by another version of mpi4dl"):
            config = with_options(Config(), self.options)
        if isinstance(config.model.model, str):  # its weights come from `where`, not from files that options name
            options = without_loading(config.model.model, config.model.model_options)
            config = replace(config, model=replace(config.model, model_options=options))
        for name in OWN:
            section = getattr(config, OWN_PARTS[name])
            text, part = getattr(section, name), instead.get(name)
            named = text is not None and (name == "dataset" or parts.is_own(text))
            if part is not None and not named:
                passed = f"`{name}` {part_name(part)}"
                raise ConfigError(f"{passed}: training had no own one, and what it had is taken again: leave it out")
            if part is None and named:
                try:
                    part = self.part(name, text, where, trusted, asked)
                except ConfigError as problem:
                    if name != "dataset":
                        raise
                    part = _refused(str(problem))
            if part is not None:
                config = replace(config, **{OWN_PARTS[name]: replace(section, **{name: part})})
        return config

    def part(self, name: str, text: str, where: str, trusted: bool, asked: bool) -> str:
        """Where the code is that this names `text` as the part `name`. Raises ConfigError if it must not be loaded."""
        if not (trusted or asked):
            raise untrusted(where, name, text)
        return self._found(name, text) if name in self.own else text

    def _found(self, name: str, text: str) -> str:
        """Where the code of an own part is now, which is as it was."""
        then, (where, _, what) = self.own[name], text.rpartition(":")
        if then["file"] is None or where == "__main__" or not what.isidentifier():
            again = "`images`" if name == "dataset" else f"`{name}`"
            raise ConfigError(f"the `{name}` was an object of a program, {text}: pass it again as {again}")
        asked = f"`{name}` {text}"
        module = None
        with suppress(ImportError, ValueError):
            module = None if where.endswith(".py") else find_spec(where)
        if module is not None:
            parts.load(name, text)
            candidates = {text: parts.print_of(text)}
        else:
            near = [where] if where.endswith(".py") else []
            candidates = {f"{file}:{what}": parts.print_of(f"{file}:{what}") for file in (then["file"], *near)}
        there = {part: digest for part, digest in candidates.items() if digest is not None}
        if not there:
            raise ConfigError(
                f"{asked} made the model, but {then['file']} is gone: put it back, or name where it is by `{name}`"
            )
        for part, digest in there.items():
            if digest == then["digest"]:
                return part
        part, digest = next(iter(there.items()))
        raise ConfigError(
            f"{asked}: {part.rpartition(':')[0]} is not as it was in training (digest {digest} now, {then['digest']} "
            f"then): put it back as it was, or say `{name}` {part} to take it as it is"
        )


def untrusted(where: str, name: str, text: str) -> ConfigError:
    """The warning about code that a file names, if this user's training did not write it."""
    remedy = "" if name == "dataset" else f"pass `{name}` {text} yourself, or "
    return ConfigError(
        f"{where} names code to load: `{name}` {text}. Files from others can name any code, and this one bears no "
        f"signature of a training by you on this machine: {remedy}say `trust_code` if you trust it"
    )


def _refused(problem: str) -> Callable[..., Any]:
    def dataset(**options: Any) -> Any:
        raise ConfigError(problem)

    return dataset


def _own(part: Any) -> dict[str, str | None] | None:
    """The file of a part of the user's, and its digest; None if it is a name of ours."""
    if isinstance(part, tuple):  # a pair of datasets
        return {"file": None, "digest": None}
    if part is None or not parts.is_own(part):
        return None
    digest, made = parts.print_of(part), isinstance(part, str) or inspect.isclass(part) or inspect.isroutine(part)
    # A model that is one already is made by nothing that could be called again.
    return {"file": parts.file_of(part) if made and digest is not None else None, "digest": digest}


def described_by(folder: Path) -> Description | None:
    """The description of its model in the folder of a run; None if there is none. Raises ConfigError, OSError."""
    path = folder / FILE
    return Description.read(read_regular(path).decode(), str(path)) if path.is_file() else None


def described_weights(weights: str, model: str = "") -> Description | None:
    """The description of the model of weights, as `open_weights` takes them, from their metadata or the run that they
    lie in; None if there is none. Raises OSError, ValueError.
    """
    told, path = open_weights(weights, model).metadata.get(ABOUT), Path(weights)
    if told is not None:
        return Description.read(told, weights)
    places = [path, *path.absolute().parents[:2]] if path.exists() else []
    return next(filter(None, map(described_by, places)), None)


# Where the weights are, and what they are of.
#
# runs/mine                           the newest whole checkpoint, or the weights that it ended with
# runs/mine/checkpoints/step-...      that checkpoint
# runs/mine/model.safetensors         these weights
# runs/mine/ema.safetensors           their average, of a run with --ema; checkpoints have it beside the optimizer
# weights.safetensors, weights.pt     written by mpi4dl export

WEIGHTS = (".pt", ".pth", ".safetensors")
AVERAGED = (
    f"these are averages of the weights (ema), which validations measured; {MODEL} beside them has the weights of the "
    "last step"
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
        if not source.exists():
            beside = [each.name for each in source.parent.iterdir()] if source.parent.is_dir() else []
            raise ConfigError(f"{source}: there is no such file or folder{nearest(source.name, beside)}")
        folder = next((path for path in (source, *source.absolute().parents[:2]) if (path / CONFIG).is_file()), None)
        if folder is None:
            from mpi4dl.results.runs import no_run

            raise ConfigError(no_run(source))
    assert folder is not None
    return folder


def find_weights(comm: Communicator, source: Path) -> FoundWeights:
    """The newest whole checkpoint of a run, or without any the weights that it ended with, or the file. Collective.

    Of a run with `ema` the average of the weights is taken, which its validations measured. A file is taken as it is.

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
    there = comm.from_first(lambda: average_of(weights.parent))
    if there is None:
        return FoundWeights(weights, tuple(remarks))
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

    def found() -> tuple[Description, bool]:
        told = open_weights(str(weights)).metadata.get(ABOUT)
        about = described_by(folder) if told is None else Description.read(told, str(weights))
        if about is None:
            raise ConfigError(
                f"{weights} does not say what it is of: name a run of mpi4dl train, or weights of one by mpi4dl export"
            )
        return about, about.is_ours()

    return comm.from_first(found)
