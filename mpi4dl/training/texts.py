"""The text of a run: found and encoded by rank 0 for all, cut into samples, and what a loss says of it."""

from dataclasses import dataclass
from pathlib import Path

from mpi4dl._wording import counted
from mpi4dl.comm import Communicator
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.text import (
    BPETokenizer,
    ByteTokenizer,
    Document,
    MaskedTokenDataset,
    TokenDataset,
    TokenFile,
    Tokenizer,
    bits_per_byte,
    encode_corpus,
    find_documents,
    pieces,
    split_documents,
)
from mpi4dl.datasets.text.dataset import TokenBatches
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.training.data import BoxesOf

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Texts:
    """The texts of training and validation, and remarks on them: the same interface as `Images`."""

    training: TokenDataset | MaskedTokenDataset
    validation: TokenDataset | MaskedTokenDataset
    tokenizer: Tokenizer
    remarks: tuple[str, ...]
    classes: tuple[str, ...] = ()
    channels: int = 0

    def loaders(self, config: Config, training: BoxesOf, validation: BoxesOf) -> tuple[Loader, Loader]:
        """The loaders of this rank's tokens of both. Raises ValueError as Loader."""
        data, seed = config.data, config.training.seed
        return (
            Loader(
                TokenBatches(self.training),
                None,
                config.samples_per_step,
                training,
                seed=seed,
                shuffle=True,
                drop_last=True,
                num_workers=data.num_workers,
            ),
            Loader(TokenBatches(self.validation), None, data.batch_size, validation, num_workers=data.num_workers),
        )

    def record(self, comm: Communicator, folder: Path) -> None:
        """Keep a tokenizer that was trained in the folder of a run. Collective."""
        with comm.together((OSError,)):
            if comm.rank == 0 and isinstance(self.tokenizer, BPETokenizer):
                self.tokenizer.save(folder / TOKENIZER)

    def number_of_classes(self, config: Config) -> int:
        """The number of different tokens. Raises ConfigError if another one was asked for."""
        if config.model.num_classes is not None:
            raise ConfigError(
                f"`num_classes` {config.model.num_classes}: of text it is that of different tokens, "
                f"{self.training.vocabulary} here"
            )
        return self.training.vocabulary

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss, in nats for each token, in bits per byte; None if only some tokens are targets."""
        if isinstance(self.validation, MaskedTokenDataset):
            return None
        stream = self.validation.stream
        return bits_per_byte(loss, stream.num_tokens, stream.num_bytes)


def open_texts(comm: Communicator, config: Config) -> Texts:
    """The text that a configuration names, the same on all ranks. Collective; raises Refusal on all of them.

    Rank 0 encodes it, once for all runs, into a file that all ranks read.
    """
    found: tuple[Path, Tokenizer] | None = None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            found = _encoded(config)
    header, tokenizer = comm.broadcast_object(found)
    with comm.together((ValueError, OSError)):
        return _texts(config, header, tokenizer)


def open_text_alone(config: Config) -> Texts:
    """The same for a process that is no rank of a job. Raises ValueError and OSError."""
    return _texts(config, *_encoded(config))


def _encoded(config: Config) -> tuple[Path, Tokenizer]:
    """The header of the file with the tokens."""
    data = config.data
    assert data.text is not None
    documents = find_documents(*(source.strip() for source in data.text.split(",")))
    folder = Path(config.run.run_folder or "runs/RUN").parent / "tokens"  # which all runs beside each other share
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(data.tokenizer, documents, folder)
    return encode_corpus(documents, tokenizer, folder).path.with_suffix(".json"), tokenizer


def _texts(config: Config, header: Path, tokenizer: Tokenizer) -> Texts:
    data, seed = config.data, config.training.seed
    training, validation = split_documents(TokenFile(header), data.val_fraction, seed)
    parts = [
        MaskedTokenDataset(stream, data.context, seed) if data.task == "masked" else TokenDataset(stream, data.context)
        for stream in (training, validation)
    ]
    sizes = " + ".join(f"{part.stream.num_tokens:,}" for part in parts)
    remark = (
        f"{counted(len(training.names), 'document')} to train on + {len(validation.names)} to validate with: {sizes} "
        f"tokens of {parts[0].vocabulary:,} kinds, in samples of {data.context} ({len(parts[0])} + {len(parts[1])})"
    )
    return Texts(parts[0], parts[1], tokenizer, (remark,))


def _tokenizer(asked: str, documents: tuple[Document, ...], folder: Path) -> Tokenizer:
    """Bytes, or byte pairs, which are learnt of the text."""
    kind, _, size = asked.partition(":")
    if kind == "bytes" and not size:
        return ByteTokenizer()
    if kind == "bpe" and size.isdecimal():
        return BPETokenizer.train((piece for document in documents for piece in pieces(document)), int(size))
    raise ConfigError(f"`tokenizer` {asked}: must be bytes, or bpe: and the number of different tokens, as in bpe:8192")
