"""The text of a run: found and encoded by rank 0 for all, cut into samples, and what a loss says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpi4dl._wording import counted
from mpi4dl.comm import Communicator
from mpi4dl.datasets.text.corpus import Document, TokenFile, encode_corpus, find_documents, pieces, split_documents
from mpi4dl.datasets.text.dataset import MaskedTokenDataset, TokenDataset, bits_per_byte
from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from mpi4dl.options.declare import ConfigError
from mpi4dl.options.sections.run import Run
from mpi4dl.options.sources import TextSource
from mpi4dl.runs.samples import RunSamples
from mpi4dl.training.data import before, folders_before

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

    def record(self, comm: Communicator, folder: Path) -> None:
        """Keep the table of documents in the folder of a run, and a tokenizer that was trained. Collective."""
        with comm.together((ValueError, OSError)):
            if comm.rank == 0:
                _table(self.training, self.validation).write(folder)
                if isinstance(self.tokenizer, BPETokenizer):
                    self.tokenizer.save(folder / TOKENIZER)

    def bits_per_byte(self, loss: float) -> float | None:
        """A validation loss, in nats for each token, in bits per byte; None if only some tokens are targets."""
        if isinstance(self.validation, MaskedTokenDataset):
            return None
        stream = self.validation.stream
        return bits_per_byte(loss, stream.num_tokens, stream.num_bytes)


def open_texts(comm: Communicator, source: TextSource, run: Run | None = None) -> Texts:
    """The text of a source, the same on all ranks. Collective; raises Refusal on all of them.

    Rank 0 encodes it, once for all runs, into a file that all ranks read. A `run` that is resumed keeps its tokenizer,
    and the part of each document.
    """
    recorded = comm.from_first(lambda: None if run is None else before(run))
    header, tokenizer = comm.from_first(lambda: _encoded(source, run))
    with comm.together((ValueError, OSError)):
        texts = _texts(source, header, tokenizer, {} if recorded is None else recorded.samples.validating())
    changes = () if recorded is None else recorded.samples.changes(_table(texts.training, texts.validation))
    return replace(texts, remarks=(*texts.remarks, *changes))


def open_text_alone(source: TextSource) -> Texts:
    """The same for a process that is no rank of a job. Raises ValueError and OSError."""
    return _texts(source, *_encoded(source))


def _encoded(source: TextSource, run: Run | None = None) -> tuple[Path, Tokenizer]:
    """The header of the file with the tokens, and the tokenizer, which a run that is resumed has already."""
    data, folder = source.data, source.token_folder
    documents = find_documents(*data.corpus)
    kept = [] if run is None else [each / TOKENIZER for each in folders_before(run) if (each / TOKENIZER).is_file()]
    trained = bool(kept) and data.tokenizer.startswith("bpe:")
    tokenizer = BPETokenizer.load(kept[0]) if trained else _tokenizer(data.tokenizer, documents)
    return encode_corpus(documents, tokenizer, folder).path.with_suffix(".json"), tokenizer


def _texts(source: TextSource, header: Path, tokenizer: Tokenizer, known: Mapping[str, bool] | None = None) -> Texts:
    data, seed = source.data, source.seed
    training, validation = split_documents(TokenFile(header), data.val_fraction, seed, known)
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


def _table(*parts: TokenDataset | MaskedTokenDataset) -> RunSamples:
    return RunSamples.of_documents(dict(zip(("train", "val"), (part.stream.sizes for part in parts), strict=True)))


def _tokenizer(asked: str, documents: tuple[Document, ...]) -> Tokenizer:
    """Bytes, or byte pairs, which are learnt of the text."""
    kind, _, size = asked.partition(":")
    if kind == "bytes" and not size:
        return ByteTokenizer()
    if kind == "bpe" and size.isdecimal():
        return BPETokenizer.train((piece for document in documents for piece in pieces(document)), int(size))
    raise ConfigError(f"`tokenizer` {asked}: must be bytes, or bpe: and the number of different tokens, as in bpe:8192")
