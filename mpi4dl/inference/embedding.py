"""Features of all tissue patches of slides by a frozen encoder, one HDF5 file a slide, over all ranks.

    ranks                 |     rank 0     |     rank 1     |     rank 2     |
    tissue, files         |    slide 0     |    slide 1     |    slide 2     |    a group of as many slides as ranks
    batches of patches    |  0  0  0  0  1 |  1  1  1  2  2 |  2  2  2  2  2 |    shared evenly, by number of slide

A batch has patches of one slide. Which ones does not depend on the number of ranks, and so neither do the features.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl._progress import ProgressOfImages
from mpi4dl._wording import counted
from mpi4dl.checkpoints.weights import load_weights
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.packing import Piece
from mpi4dl.datasets.base import BadImage, DatasetError, printable
from mpi4dl.datasets.files import WHOLE_SLIDES
from mpi4dl.datasets.loader import prefetched
from mpi4dl.datasets.samples import without_suffix
from mpi4dl.datasets.slides.dataset import Patches, SlideFolder
from mpi4dl.datasets.slides.features import Embedded, write_features
from mpi4dl.datasets.slides.slide import MPP_AT_1X, Slide
from mpi4dl.datasets.transform import NORMALISATIONS, View
from mpi4dl.engine.precision import AUTOCAST
from mpi4dl.geometry import Interval, ceil_div, even_cuts
from mpi4dl.inference.masks import bases_of
from mpi4dl.models.patches import headless
from mpi4dl.models.registry import OWN_MODELS, TIMM, described
from mpi4dl.options import parts
from mpi4dl.options.declare import ConfigError, options_of, value_of
from mpi4dl.options.kinds import AUTO, part_name
from mpi4dl.options.parts import is_own
from mpi4dl.options.presets import ENCODERS
from mpi4dl.options.sources import unstained
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.results.job import FolderJob, ItemInput, settings_of
from mpi4dl.results.names import FEATURES
from mpi4dl.runs.description import described_weights
from mpi4dl.runs.folder import better_weights
from mpi4dl.runs.stopping import HangTimeout
from mpi4dl.training.data import measure_stains, one_each, shared
from mpi4dl.training.trained import ModelOptions

ENDING = ".h5"
PRETRAINED = "pretrained"
NUM_OUTPUTS = 2  # of the classifier that an encoder is built with, and which is then left out
FINGERPRINT = 12  # characters
AHEAD = 2  # batches that each thread reads ahead
STAINS = ("stain_norm", "stain_reference")
OTHERWISE = {"weights", "patches", "mean", "std", "dry_run", *STAINS}  # which mean something else in training
TRAINED = ("model", "model_options", "mean", "std", *STAINS)  # options of the training of weights that matter here


@dataclass(frozen=True)
class Encoder:
    """A frozen model, which takes normalized patches (P, 3, patch, patch) and returns their features (P, D).

    `weights` is a fingerprint of its parameters and buffers.
    """

    model: nn.Module
    patch: int
    num_features: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: str
    device: torch.device
    precision: str

    @torch.no_grad()
    def __call__(self, patches: Tensor) -> Tensor:
        """The features (P, D) of patches, float32, on the host."""
        return _features(self.model, patches.to(self.device), self.precision).cpu()


def _features(model: nn.Module, patches: Tensor, precision: str) -> Tensor:
    lowered = AUTOCAST[precision]
    with torch.autocast(patches.device.type, lowered, enabled=lowered is not None):
        found = model(patches)
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != len(patches) or math.prod(found.shape[2:]) > 1:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"returns {shape} of {len(patches)} patches, but must return (patches, features)")
    return found.flatten(1).float()


def training_options(options: Any, comm: Communicator) -> ModelOptions:
    """The options of an embedding as those of a training, which builds models and reads slides.

    The normalization of stains is that of the training of the weights, unless options say another. Collective; raises
    Refusal on all ranks if there is no such reference.
    """
    num_ranks, patch = comm.size, options.encoder.patches
    usual = ModelOptions()
    shared = usual.names() & options_of(type(options)).keys() - OTHERWISE
    given = {name: value_of(options, name) for name in shared}
    given |= {"image_size": (patch, patch), "data": num_ranks, "batch_size": num_ranks}
    weights, model = options.encoder.weights, part_name(options.encoder.model)

    def stains() -> dict[str, Any]:
        asked = {name: value_of(options, name) for name in STAINS}
        if asked["stain_norm"] == AUTO:
            trained = _trained_options(weights, model) if weights not in (None, PRETRAINED) else None
            if asked["stain_reference"] is not None:
                raise ConfigError("`stain_reference` is for a `stain_norm`: choose macenko or reinhard")
            asked = {name: (trained or usual).value(name) for name in STAINS}
        found = usual.with_values({**given, **asked}).with_reference()
        return {name: found.value(name) for name in STAINS}

    return usual.with_values({**given, **comm.from_first(stains)})


def open_encoder(comm: Communicator, options: Any, model_options: ModelOptions) -> tuple[Encoder, list[str]]:
    """The model that the options name, with its weights, on each rank; and remarks. Collective.

    Raises:
        Refusal: on all ranks: there is no such model, not all of its weights are there, or it does not take patches.
    """
    assembly = model_options.assemble(comm, ("model",))
    chosen, name, patch = options.encoder, model_options.name, options.encoder.patches
    own = is_own(model_options.part)
    weights = None if own and chosen.weights == PRETRAINED else chosen.weights
    trained = comm.from_first(lambda: None if weights is None else _trained_options(weights, name))
    with comm.together((ValueError, TypeError)):
        model = model_options.build(NUM_OUTPUTS, 3)
        mean, std = _normalisation(model_options, model, trained, chosen.mean, chosen.std)
        try:
            headless(model, NUM_OUTPUTS)
        except ValueError as error:
            if not own:  # which may return features as they are
                raise ConfigError(f"`model` {name}: {error}") from None
    stages = LocalStages.whole(model, assembly.plan, comm, device=assembly.device)
    if weights is not None:
        try:
            remarks = [*load_weights(stages, weights, model=name, complete=True), *better_weights(Path(weights))]
        except Refusal as error:
            raise Refusal(f"{error}{_other_encoder(model_options, trained)}") from None
    elif own:
        remarks = [f"the weights are those that {name} made"]
    else:
        remarks = ["the encoder has random weights: its features mean little"]
    model.eval().requires_grad_(False)
    with comm.together((ValueError, TypeError, RuntimeError, AssertionError)):
        try:
            with torch.no_grad():
                tried = _features(
                    model, torch.zeros(1, 3, patch, patch, device=assembly.device), model_options.precision
                )
        except (ValueError, TypeError, RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"`model` {name} does not encode patches of {patch} x {patch} px ({reason}): choose other `patches`, "
                "or `model_options` such as img_size or dynamic_img_size"
            ) from None
    remarks = [*described(name, model_options.options), *remarks]
    print_of = comm.broadcast_object(_fingerprint(model) if comm.rank == 0 else "")
    found = Encoder(model, patch, tried.shape[1], mean, std, print_of, assembly.device, model_options.precision)
    return found, remarks


def _trained_options(weights: str, model: str) -> ModelOptions | None:
    """The options of the training whose weights these are, as far as they tell how pixels become inputs; None if they
    do not say them.

    Raises OSError, ValueError.
    """
    about = described_weights(weights, model)
    if about is None:
        return None
    options = about.options
    return ModelOptions.read({name: options[name] for name in TRAINED if name in options})


def _other_encoder(asked: ModelOptions, trained: ModelOptions | None) -> str:
    """What to choose instead, if the weights are of another encoder than the one that is asked for; else empty."""
    ours, theirs = (None if each is None else (each.name, dict(each.options)) for each in (asked, trained))
    if theirs is None or ours == theirs:
        return ""
    name, options = theirs
    listed = ",".join(f"{key}={value}" for key, value in options.items())
    return f"; that run trained `model` {name}" + (f" with `model_options` {listed}" if options else "") + ": use these"


def _normalisation(
    options: ModelOptions, model: nn.Module, trained: ModelOptions | None, mean: Any, std: Any
) -> tuple[tuple[float, ...], ...]:
    """The mean and the standard deviation of channels: as asked, or those that the model was `trained` with."""
    usual: tuple[Any, Any] = ("imagenet", "imagenet")
    name = options.part
    if trained is not None:
        usual = (trained.mean, trained.std)
    elif name in ENCODERS:
        usual = (ENCODERS[name]["mean"], ENCODERS[name]["std"])
    elif is_own(name) or name in OWN_MODELS:
        usual = (options.mean, options.std)
    elif name.startswith(TIMM):
        about = getattr(model, "pretrained_cfg", None) or {}
        usual = (about.get("mean") or "imagenet", about.get("std") or "imagenet")
    found = []
    for place, (option, asked) in enumerate((("mean", mean), ("std", std))):
        values = usual[place] if asked == AUTO else asked
        values = NORMALISATIONS[values][place] if isinstance(values, str) else tuple(map(float, values))
        if len(values) not in (1, 3):
            raise ConfigError(f"`{option}` has {len(values)} numbers, but slides have 3 channels: give one, or 3")
        found.append(values * 3 if len(values) == 1 else values)
    return found[0], found[1]


def _fingerprint(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:FINGERPRINT]


class PatchBatch(NamedTuple):
    """A batch: patches `start` to `stop` - 1 of a slide of a group."""

    slide: int
    start: int
    stop: int


class Embedding:
    """The slides that options name, of which files of features are written into a folder. Collective.

    `patience` ends the job if a rank is silent for too long. `close` lets other jobs into the folder.

    Attributes:
        paths: the file of each slide.
        done: the slides that are finished.
        remarks: on the slides, for people.
        bad: what is wrong with slides that cannot be embedded, by number.

    Raises:
        Refusal: on all ranks: there are no slides, or the folder has features by other settings.
    """

    def __init__(
        self, comm: Communicator, options: Any, trained: ModelOptions, encoder: Encoder, patience: HangTimeout
    ) -> None:
        self.comm, self.encoder, self.patience = comm, encoder, patience
        slides: Any = shared(comm, lambda: (trained.source.open_files(labelled=False),))[0]
        self.slides: SlideFolder = slides
        self.at_once, self.num_workers = trained.patches_at_once, options.work.num_workers
        self.names = [self.slides.name(index) for index in range(len(self.slides))]
        bases = [Path(without_suffix(name, WHOLE_SLIDES)) for name in self.names]
        if len({str(base).casefold() for base in bases}) < len(bases):
            bases = bases_of(self.names, ENDING)
        folder = Path(options.embedding.out)
        self.paths = [folder / base.with_name(f"{base.name}{ENDING}") for base in bases]
        self.bad: dict[int, str] = {}
        self.counts: dict[int, int] = {}
        self._places: dict[int, Patches] = {}
        self.job: FolderJob | None = None  # on rank 0
        self.settings, self.done = comm.from_first(lambda: self._begin(options, trained, folder))
        self.remarks = (*self.slides.remarks, *self.slides.first_slide())

    def _begin(self, options: Any, trained: ModelOptions, folder: Path) -> tuple[Any, set[int]]:
        """On rank 0, the settings and what is done. Raises ConfigError, ValueError, OSError."""
        source: Any = trained.source
        model, stains = trained.part, source.stains()
        settings = settings_of(
            options,
            model=part_name(model) + (f" (file {parts.print_of(model)})" if is_own(model) else ""),
            weights=self.encoder.weights,
            mean=self.encoder.mean,
            std=self.encoder.std,
            stain_norm=None if stains is None else stains.method,
            stain_reference=None if stains is None else stains.reference,
        )
        inputs = {
            name: ItemInput(
                self.slides.path(n), {**self.slides.told(n), "as": self.paths[n].relative_to(folder).as_posix()}
            )
            for n, name in enumerate(self.names)
        }
        how: Any = {"overwrite": options.embedding.overwrite, "dry_run": options.embedding.dry_run}
        self.job = FolderJob(folder, FEATURES, settings, inputs, writes=self.paths, **how)
        return self.job.settings, {n for n, name in enumerate(self.names) if name in self.job.done}

    def close(self) -> None:
        if self.job is not None:
            self.job.close()

    @property
    def todo(self) -> list[int]:
        """The slides that have no finished file, and can be read as far as is known."""
        return [index for index in range(len(self.slides)) if index not in self.done and index not in self.bad]

    def title(self) -> str:
        """What is embedded by what, in a line."""
        encoder, settings = self.encoder, self.settings
        done = f", {len(self.done)} done before" if self.done else ""
        dropped = 0 if self.job is None else len(self.job.dropped)
        done += f", {dropped} changed since and done again" if dropped else ""
        mean, std = (",".join(f"{value:g}" for value in values) for values in (encoder.mean, encoder.std))
        return (
            f"{counted(len(self.slides), 'slide')}{done}; {encoder.num_features} features of patches of "
            f"{encoder.patch} x {encoder.patch} px by {settings['model']} (weights {encoder.weights}), mean {mean}, "
            f"std {std}; {counted(self.comm.size, 'rank')}, {encoder.device}"
        )

    def listed(self) -> list[str]:
        """The slides to do, their numbers of patches and their files, a line each."""
        lines = [
            f"{self.slides.name(index)}: {counted(count, 'patch', 'patches')}, {self.paths[index]}"
            for index, count in self.counts.items()
            if index not in self.bad
        ]
        return [*lines, f"{counted(sum(self.counts.values()), 'patch', 'patches')} in {counted(len(lines), 'slide')}"]

    def measure_stains(self) -> None:
        """Measure the stains of all slides to do, each on one rank, if they are to be normalized."""
        measure_stains(self.comm, self.slides, self.todo, self.patience)
        self.unstained: list[str] = unstained(self.slides)

    def find_tissue(self) -> None:
        """Find the patches of all slides to do, each on one rank."""

        def find(index: int) -> int:
            self._places[index] = self.slides.tissue_patches(index, self.encoder.patch)
            return len(self._places[index])

        for index, found in one_each(self.comm, self.todo, find, self.patience, doing="finding tissue"):
            self.counts[index] = 0 if isinstance(found, BadImage) else found
            if isinstance(found, BadImage):
                self.bad[index] = printable(str(found))

    def run(self) -> None:
        wanted = [*self.counts]
        self._seen, total = 0, sum(self.counts.values())
        self._progress = ProgressOfImages(total, self.comm.rank == 0, "patch", many="patches")
        for first in range(0, len(wanted), self.comm.size):
            self._embed(wanted[first : first + self.comm.size])
        self._progress.close()

    def _embed(self, group: Sequence[int]) -> None:
        """Embed a group of slides, at most as many as ranks. Rank r found the patches of number r, and writes it."""
        comm = self.comm
        own = group[comm.rank] if comm.rank < len(group) else None
        places: list[Any] = comm.all_gather_object(self._places.pop(own, None) if own is not None else None)
        counts = [0 if index in self.bad else len(places[number]) for number, index in enumerate(group)]
        batches = [
            PatchBatch(number, start, min(start + self.at_once, count))
            for number, count in enumerate(counts)
            for start in range(0, count, self.at_once)
        ]
        shares = [batches[a:b] for a, b in pairwise(even_cuts(len(batches), comm.size))]  # neighbours, as many each
        with comm.together((DatasetError, OSError)), self.patience.working("patches"):
            found, problems = self._features_of(group, places, shares[comm.rank])
        for theirs in comm.all_gather_object(problems):
            self.bad |= {group[number]: printable(problem) for number, problem in theirs.items()}
        whole = self._at_writers(group, counts, shares, found)
        with comm.together((OSError, DatasetError)):
            if whole is not None and own is not None:
                with self.patience.working("writing"):
                    slide, patch = self.slides.image(own), self.encoder.patch
                    corners = [slide.in_level_0(row * patch, col * patch) for row, col in places[comm.rank].tolist()]
                    coords = np.rint(np.asarray(corners, np.float64)[:, ::-1]).astype(np.int64)  # x, y in level 0
                    about = _attributes(slide, patch, Path(self.paths[own]).stem)
                    write_features(self.paths[own], Embedded(whole, coords), about, self.settings)
        with comm.together((OSError,)):
            for index in group:
                if self.job is not None and index not in self.bad:
                    written = self.job.add({"slide": self.names[index]}, [self.paths[index]])
                    self.bad |= {index: written["error"]} if "error" in written else {}
        self.bad = comm.broadcast_object(self.bad)
        self._seen += sum(counts)
        self._progress.to(self._seen)

    def _features_of(
        self, group: Sequence[int], places: Sequence[Any], units: Sequence[PatchBatch]
    ) -> tuple[dict[int, list[Tensor]], dict[int, str]]:
        """The features of this rank's batches, by number of the slide in the group; and what cannot be read."""
        found: dict[int, list[Tensor]] = {}
        problems: dict[int, str] = {}

        def read(position: int) -> Tensor | BadImage:
            unit = units[position]
            try:
                wanted = places[unit.slide][unit.start : unit.stop]
                return self._read(self.slides.image(group[unit.slide]), wanted)
            except BadImage as error:
                return error

        done = 0
        ahead = prefetched(read, len(units), max(1, self.num_workers), AHEAD * max(1, self.num_workers))
        try:
            for unit, patches in zip(units, ahead, strict=True):
                if isinstance(patches, BadImage):
                    problems.setdefault(unit.slide, str(patches))
                elif unit.slide not in problems:
                    features = self.encoder(patches)
                    if not bool(features.isfinite().all()):
                        problems[unit.slide] = "the encoder's features are not finite: try `precision` fp32"
                    found.setdefault(unit.slide, []).append(features)
                self.patience.feed()
                done += unit.stop - unit.start
                self._progress.to(min(self._progress.total, self._seen + done * self.comm.size))
        finally:
            ahead.close()
        return found, problems

    def _read(self, slide: Slide, places: Patches) -> Tensor:
        """Normalized patches (P, 3, patch, patch) at these rows and columns of the grid of patches."""
        patch = self.encoder.patch
        frame = tuple(ceil_div(side, patch) * patch for side in slide.size)
        view = View(frame, "pad", mean=self.encoder.mean, std=self.encoder.std)
        found = torch.empty(len(places), 3, patch, patch)
        for (row, col), out in zip(places.tolist(), found, strict=True):
            space = (Interval(at * patch, (at + 1) * patch) for at in (row, col))
            view.tile(slide, *space, out=out.numpy())
        return found

    def _at_writers(
        self,
        group: Sequence[int],
        counts: Sequence[int],
        shares: Sequence[Sequence[PatchBatch]],
        found: Mapping[int, list[Tensor]],
    ) -> Any:
        """The features of the slide that this rank writes, from all ranks; None if it writes none."""
        rank, receives, whole = self.comm.rank, [], None
        good = [number for number, index in enumerate(group) if index not in self.bad]
        sends = [Piece(number, torch.cat(found[number])) for number in good if number in found]
        if rank in good:
            whole = torch.empty(counts[rank], self.encoder.num_features)
            mine = [[unit for unit in units if unit.slide == rank] for units in shares]
            receives = [Piece(n, whole[own[0].start : own[-1].stop]) for n, own in enumerate(mine) if own]
        self.comm.iexchange(sends, receives).wait()
        return None if whole is None else whole.numpy()


def _attributes(slide: Slide, patch: int, name: str) -> dict[str, Any]:
    """The attributes of coordinates as TRIDENT names them, and the microns per pixel; those that are known."""
    height, width = slide.file.size
    mpp = None if slide.mpp is None else slide.mpp / slide.downsample
    power = slide.file.magnification or (None if mpp is None else MPP_AT_1X / mpp)
    return {
        "patch_size": patch,
        "patch_size_level0": round(patch * slide.downsample),
        "patch_level": slide.level,
        "level0_magnification": power,
        "target_magnification": None if power is None else power / slide.downsample,
        "overlap": 0,
        "level0_width": width,
        "level0_height": height,
        "level0_mpp": mpp,
        "level0_aspect": None if slide.file.aspect == (1.0, 1.0) else slide.file.aspect,
        "name": name,
    }
