"""A trained model from the folder of its run: built by the run's own options, over ranks that each read their part."""

from dataclasses import dataclass, replace
from pathlib import Path

from mpi4dl.checkpoints.weights import load_weights
from mpi4dl.comm import Communicator
from mpi4dl.datasets.text import BPETokenizer, ByteTokenizer, Tokenizer
from mpi4dl.generation.batcher import Batcher
from mpi4dl.generation.options import Batching, Ranks
from mpi4dl.generation.precision import lower_weights
from mpi4dl.options.config import Config, ConfigError, parse
from mpi4dl.options.models import hold_model
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.trainer.texts import TOKENIZER
from mpi4dl.trainer.trained import find_weights, folder_of, with_own_model


@dataclass(frozen=True)
class Trained:
    """What a run left: its options, its tokenizer, the file of its weights. `remarks` are about damage."""

    config: Config
    tokenizer: Tokenizer
    weights: Path
    remarks: list[str]
    average: Path | None = None

    @property
    def context(self) -> int:
        """How many tokens the model can look at."""
        return int(self.config.model.model_options.get("context", self.config.data.context))

    @property
    def separator(self) -> int | None:
        """The token behind which nothing of before is seen, if the model was trained so."""
        return self.tokenizer.end if self.config.data.document_mask else None


def find_trained(comm: Communicator, source: Path, average: bool = True, trust_code: bool = False) -> Trained:
    """What is in the folder of a run of mpi4dl.train, or one of its checkpoints. Collective.

    The newest whole checkpoint counts, or of a run without any the weights that it wrote at its end. Of a run with
    `ema` it is their `average`.

    Raises:
        Refusal: on all ranks: there is no such folder, it has no weights, it is of a model that writes no text, or it
            names code of others without `trust_code`.
    """
    folder = folder_of(comm, source)
    with comm.together((ValueError, OSError)):
        config = parse(["--config", str(folder / "config.toml")])
        if config.data.text is None or config.data.task not in ("auto", "language"):
            trained_on = "images" if config.data.text is None else "masked tokens"
            raise ConfigError(f"{source}: --model {config.model_name} was trained on {trained_on}: it writes no text")
        has_bytes = config.data.tokenizer == "bytes"
        tokenizer: Tokenizer = ByteTokenizer() if has_bytes else BPETokenizer.load(folder / TOKENIZER)
    config = with_own_model(comm, config, folder, trust_code)
    found = find_weights(comm, source, average)
    return Trained(config, tokenizer, found.weights, list(found.remarks), found.average)


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
    trained.remarks.extend(load_weights(held, str(trained.weights), strict=True, average=trained.average)[1:])
    with comm.together((ValueError,)):
        lower_weights(held, ranks.precision)
    return held


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
