"""Weights for plain PyTorch: `mpi4dl export runs/mine weights.pt` needs no MPI to write or to read.

model.load_state_dict(torch.load("weights.pt"))
model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

from mpi4dl._files import Replacement, naming
from mpi4dl.options.command import CommandLine, LocalCommand
from mpi4dl.options.declare import ConfigError

USAGE = "RUN_OR_WEIGHTS OUT"
DESCRIPTION = "Write the weights of a run as a state_dict for plain PyTorch. No MPI needed."
SUFFIXES = (".pt", ".safetensors")


@dataclass(frozen=True)
class ExportConfig:
    """No options: the suffix of OUT chooses the format."""


def export(source: Path, out: Path) -> list[str]:
    """Write the state_dict of the newest whole checkpoint in `source`, or of a run without any, its weights.

    Of a run with `ema` parameters are their average. A file of weights, such as a run's best.safetensors, is taken as
    it is. Adapters are merged: the model is the plain one. Every value has all of its names, and the file says what it
    is of. Returns what there is to say. Raises OSError, and ValueError without weights, or with only damaged ones.
    """
    import torch

    from mpi4dl._numbers import Damaged
    from mpi4dl.checkpoints.manifest import ABOUT, CLASSES, MANIFEST
    from mpi4dl.checkpoints.storage import Spec, StorageLayout, write
    from mpi4dl.checkpoints.weights import average_of, open_weights, weights_in, with_average, without_adapters
    from mpi4dl.parallel.replicas.buckets import Shard
    from mpi4dl.results.runs import no_run
    from mpi4dl.runs.description import FILE, Description, described_by
    from mpi4dl.runs.folder import BEST

    of_file = source.is_file() and source.suffix in SUFFIXES
    if not source.is_dir() and not of_file:
        what = "is another file" if source.exists() else "no such file or folder"
        raise ValueError(f"{source}: {what}; name a run, one of its checkpoints, or a file of weights, such as {BEST}")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")
    file, skipped = (source, []) if of_file else weights_in(source)
    if not file.is_file():
        raise ValueError(no_run(source))
    stored, of_average = open_weights(str(file)), None if of_file else average_of(file.parent)
    for name, first in stored.metadata.items():
        if name not in (CLASSES, ABOUT) and stored.ties.get(name) != first:
            raise Damaged(f"{file}: {name!r} is declared equal to {first!r}")
    state = {name: stored.read(name) for name in stored.shapes if name not in stored.ties}
    if of_average is not None:
        averages = with_average(stored, of_average)
        state = {name: averages.read(name).to(value.dtype) for name, value in state.items()}
    plain = without_adapters(replace(stored, read=state.__getitem__))
    state = {name: plain.read(name) for name in state if name in plain.shapes}
    runs = (folder for folder in (source, *source.absolute().parents[:2]) if (folder / FILE).is_file())
    described = described_by(next(runs, source))
    about = {name: stored.metadata[name] for name in (CLASSES, ABOUT) if name in stored.metadata}
    if described is None and ABOUT in about:
        described = Description.read(about[ABOUT], str(file))
    if described is not None:
        about |= {CLASSES: json.dumps(described.classes), ABOUT: described.without("lora").text}
    same = out.suffix == ".pt"  # torch.save keeps what is tied, safetensors wants copies
    state |= {name: state[first] if same else state[first].clone() for name, first in stored.ties.items()}
    with naming(out), Replacement(out) as temporary:
        if same:
            with temporary.open("wb") as opened:  # which says why, if the disk is full
                values = OrderedDict(state)
                values._metadata = {ABOUT: about}  # type: ignore[attr-defined]  # where PyTorch has what is not a value
                try:
                    torch.save(values, opened)
                except RuntimeError as error:  # of closing the archive, after the disk was full
                    raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        else:
            layout = StorageLayout.of(
                {name: Spec(tuple(value.shape), value.dtype) for name, value in state.items()}, about
            )
            write(temporary, layout, [Shard(name, 0, value.reshape(-1)) for name, value in state.items()], header=True)
    checked = " (without checksums: this run has no checkpoints)"
    checked = "" if of_file or (file.parent / MANIFEST).is_file() else checked
    of = "" if of_average is None else f"; averages of the weights (ema), of {of_average}"
    return [*(f"skipped {text}" for text in skipped), f"{out}: {len(state)} values of {file}{of}{checked}"]


def _export(_: CommandLine[ExportConfig], source: Path, out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out} must end in {' or '.join(SUFFIXES)}")
    for line in export(source, out):
        print(line)


main = LocalCommand("export", _export, ExportConfig, USAGE, DESCRIPTION).main

if __name__ == "__main__":
    main()
