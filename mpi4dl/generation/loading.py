"""A trained model from the folder of its run: built by the run's own options, over ranks that each read their part."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mpi4dl.checkpoints.checkpoints import refusing
from mpi4dl.checkpoints.manifest import MODEL, candidates_at
from mpi4dl.checkpoints.saved import newest_whole
from mpi4dl.checkpoints.storage import Reader
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.text import BPETokenizer, ByteTokenizer, Tokenizer
from mpi4dl.generation.batcher import Batcher
from mpi4dl.generation.options import Batching, Ranks
from mpi4dl.generation.precision import lower_weights
from mpi4dl.options.config import Config, ConfigError, parse
from mpi4dl.options.models import hold_model
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.trainer.texts import TOKENIZER


@dataclass(frozen=True)
class Trained:
    """What a run left: its options, its tokenizer, the file of its weights. `remarks` are about damaged checkpoints."""

    config: Config
    tokenizer: Tokenizer
    weights: Path
    remarks: tuple[str, ...]

    @property
    def context(self) -> int:
        """How many tokens the model can look at."""
        return int(self.config.model.model_options.get("context", self.config.data.context))

    @property
    def separator(self) -> int | None:
        """The token behind which nothing of before is seen, if the model was trained so."""
        return self.tokenizer.end if self.config.data.document_mask else None


def find_trained(comm: Communicator, source: Path) -> Trained:
    """What is in the folder of a run of mpi4dl.train, or one of its checkpoints. Collective.

    The newest whole checkpoint counts, or of a run without any the weights that it wrote at its end.

    Raises:
        Refusal: on all ranks: there is no such folder, it has no weights, or it is of a model that writes no text.
    """
    with comm.together((ValueError, OSError)):
        folder = next((path for path in (source, *source.absolute().parents[:2]) if _is_run(path)), None)
        if folder is None:
            raise ConfigError(f"{source} is neither a run of mpi4dl.train with weights nor a checkpoint of one")
        config = parse(["--config", str(folder / "config.toml")])
        if config.data.text is None or config.data.task not in ("auto", "language"):
            trained_on = "images" if config.data.text is None else "masked tokens"
            raise ConfigError(f"{source}: --model {config.model_name} was trained on {trained_on}: it writes no text")
        has_bytes = config.data.tokenizer == "bytes"
        tokenizer: Tokenizer = ByteTokenizer() if has_bytes else BPETokenizer.load(folder / TOKENIZER)
    with refusing():
        chosen, skipped = newest_whole(candidates_at(source), comm)
    if chosen is None and skipped:
        raise Refusal(f"no checkpoint is whole: {'; '.join(skipped)}")
    weights = (chosen or source) / MODEL
    comm.agree(None if weights.is_file() else f"{source} has no weights yet: there is no checkpoint, and no {MODEL}")
    return Trained(config, tokenizer, weights, tuple(f"skipped {one}" for one in skipped))


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def hold_trained(comm: Communicator, trained: Trained, ranks: Ranks) -> Held:
    """The model over ranks, with its weights. Collective.

    Raises:
        Refusal: on all ranks: the plan does not fit to the number of ranks or to the model, or the weights are not its.
    """
    with comm.together((ValueError,)):
        plan = ranks.plan()
    comm.agree(plan.wrong_world(comm.size))
    config = trained.config
    with comm.together((ValueError, TypeError)):
        device = comm.node.device(ranks.device)
        parallel = replace(config.parallel, balance="flops", stream=None)
        own = replace(config, parallel=parallel)
        held = hold_model(own, plan, trained.tokenizer.vocabulary, 0, comm, device).eval().requires_grad_(False)
    with comm.together((ValueError, OSError)), Reader(trained.weights) as reader:
        load_weights(held, reader)
        lower_weights(held, ranks.precision)
    return held


def load_weights(held: Held, reader: Reader) -> None:
    """Read this rank's part of all parameters and buffers from a file of whole ones. Raises ValueError, OSError."""
    specs = reader.layout.specs
    for name, value in _values(held):
        stored, shape = held.ties.get(name, name), held.shapes[name][0]
        if stored not in specs or specs[stored].shape != shape:
            there = f"has shape {specs[stored].shape}" if stored in specs else "is not there"
            raise ValueError(f"{reader.path} is of another model: {name} {there}, but has shape {shape} here")
        parts = [reader.read(stored, run.start, run.stop) for run in held.runs(name, 0, value.numel())]
        value.copy_(torch.cat(parts).view(value.shape))


def _values(held: Held) -> Iterator[tuple[str, Tensor]]:
    for module in held.modules_of.values():
        saved = module.state_dict()
        yield from ((name, value) for name, value in saved.items() if isinstance(value, Tensor))


def open_batcher(comm: Communicator, trained: Trained, ranks: Ranks, batching: Batching) -> Batcher:
    """What generates text by the trained model. Collective. Raises Refusal, on all ranks, as what it calls."""
    return Batcher(
        hold_trained(comm, trained, ranks),
        comm,
        trained.tokenizer,
        trained.context,
        max_batch=batching.max_batch,
        page_size=batching.page_size,
        num_pages=batching.pages,
        prefill_chunk=batching.prefill_chunk,
        separator=trained.separator,
    )
