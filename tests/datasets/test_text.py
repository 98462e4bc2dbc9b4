"""Text: documents found, tokens and back, token files reused or made anew, samples by intervals, masks, the split."""

import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.text import corpus as corpus_module
from mpi4dl.datasets.text.corpus import (
    Document,
    TokenFile,
    TokenStream,
    encode_corpus,
    find_documents,
    pieces,
    split_documents,
)
from mpi4dl.datasets.text.dataset import IGNORED, MaskedTokenDataset, TokenDataset, bits_per_byte
from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from mpi4dl.geometry import Interval

TEXTS = {
    "a.txt": "Grüße aus Zürich, grüße aus Zürich.\r\n",
    "b.md": "",
    "c/d.py": "print('汉字 🙂 <|endoftext|> [MASK]')\n\n\tx = 1\n",
    "c/e.txt": "\ufeffWhere are the next tokens? Where are the next words?\n" * 3,
    "f.txt": "no line at the end",
}


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", TEXTS)


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(TEXTS.values(), 300)


def encoded(tmp_path: Path, texts: dict[str, str], tokenizer: Tokenizer | None = None) -> TokenFile:
    documents = find_documents(write(tmp_path / "corpus", texts))
    return encode_corpus(documents, tokenizer or ByteTokenizer(), tmp_path / "tokens")


def stream_of(tmp_path: Path, *lengths: int) -> TokenStream:
    """Documents of so many different bytes each."""
    alphabet = "".join(map(chr, range(1, 128))) * (1 + sum(lengths) // 127)
    texts, start = {}, 0
    for number, length in enumerate(lengths):
        texts[f"{number:03}.txt"] = alphabet[start : start + length]
        start += length
    return TokenStream(encoded(tmp_path, texts))


def test_a_folder_is_its_visible_text_sorted_by_name(folder: Path) -> None:
    write(folder, {".hidden.txt": "x", ".git/x.txt": "x", "c/image.png": "x", "c/UPPER.TXT": "x"})
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop").symlink_to(folder)
    found = find_documents(folder)
    assert [document.name for document in found] == sorted([*TEXTS, "c/UPPER.TXT"])
    assert found[0] == Document("a.txt", folder / "a.txt")


def test_sources_come_in_their_order_and_every_file_once(folder: Path) -> None:
    odd = folder / "odd.unknown"
    odd.write_text("x")
    found = find_documents(odd, folder / "c", folder)
    assert [document.name for document in found] == ["odd.unknown", "d.py", "e.txt", "a.txt", "b.md", "f.txt"]


def test_the_standard_library_is_its_own_sources() -> None:
    found = find_documents("stdlib")
    names = [document.name for document in found]
    assert {"os.py", "json/decoder.py"} < set(names)
    assert names == sorted(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"})
    assert found[0].path.is_relative_to(sysconfig.get_path("stdlib"))
    some = [document for document in found if document.name.startswith(("encodings/", "json/", "email/"))]
    assert all("".join(pieces(document)) for document in some if document.path.stat().st_size)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: no such file or folder; expected UTF-8 text, or 'stdlib'"),
        ("empty", "empty: has no text; files count as text if they end in .txt .text .md "),
        ("texts.jsonl", "texts.jsonl: holds records, whose braces and keys would be text too"),
    ],
)
def test_sources_without_text_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(DatasetError, match=message):
        find_documents(tmp_path / name)


def test_no_sources_are_refused() -> None:
    with pytest.raises(DatasetError, match="no source of text is named"):
        find_documents()


@given(text=st.text(st.characters(exclude_categories=["Cs"])), size=st.integers(1, 9))
def test_pieces_are_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_BYTES", size)
        found = list(pieces(Document("pieces.txt", path)))
    assert "".join(found) == text
    assert "" not in found


def test_pieces_end_with_lines_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 6)
    path = write(tmp_path, {"x": "one\ntwo\nthirteen\nx"}) / "x"
    assert list(pieces(Document("x", path))) == ["one\n", "two\n", "thirteen\n", "x"]


@pytest.mark.parametrize(
    ("content", "where"),
    [(b"abc\xffdef", 3), ("äöü".encode()[:-1], 4), (b"x" * 7 + b"\xc3\xa4\xc3(", 9), (b"\xed\xa0\x80", 0)],
)
def test_text_that_is_not_utf8_is_refused_by_its_name(
    tmp_path: Path, content: bytes, where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    for size in (1, 2, 3, 1000):
        monkeypatch.setattr(corpus_module, "PIECE_BYTES", size)
        with pytest.raises(DatasetError, match=rf"bad.txt: is not UTF-8 text: byte {where} cannot be decoded"):
            list(pieces(Document("bad.txt", path)))
    with pytest.raises(DatasetError, match=r"bad.txt: is not UTF-8 text"):
        encode_corpus(find_documents(path), ByteTokenizer(), tmp_path / "tokens")
    with pytest.raises(DatasetError, match=r"bad.txt: is not UTF-8 text"):
        BPETokenizer.train(pieces(Document("bad.txt", path)), 300)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_document_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    gone = Document("gone.txt", tmp_path / "gone.txt")
    for read in (lambda: list(pieces(gone)), lambda: encode_corpus([gone], ByteTokenizer(), tmp_path)):
        with pytest.raises(DatasetError, match=r"gone.txt: cannot be read: No such file"):
            read()


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_encoded_is_decoded_again(bpe: BPETokenizer, text: str) -> None:
    tokenizers: tuple[Tokenizer, ...] = (ByteTokenizer(), bpe)
    for tokenizer in tokenizers:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode([*tokens, tokenizer.end]) == text
        assert not len(tokens) or tokens.max() < tokenizer.end == tokenizer.vocabulary - 1


def test_bytes_are_their_own_tokens() -> None:
    assert ByteTokenizer().encode("aä").tolist() == [97, 0xC3, 0xA4]
    assert ByteTokenizer().decode([97, 0xC3]) == "a\ufffd"


def test_bpe_learns_what_is_frequent_and_no_more_than_asked(bpe: BPETokenizer) -> None:
    assert 257 < bpe.vocabulary <= 300
    assert len(bpe.encode(TEXTS["c/e.txt"])) < len(TEXTS["c/e.txt"].encode()) / 2
    assert BPETokenizer.train(TEXTS.values(), 270).vocabulary == 270
    assert BPETokenizer.train([], 270).vocabulary == 257


def test_bpe_is_the_same_whenever_it_is_trained_and_from_its_file(bpe: BPETokenizer, tmp_path: Path) -> None:
    again = BPETokenizer.train(iter(TEXTS.values()), 300)
    bpe.save(tmp_path / "bpe.json")
    loaded = BPETokenizer.load(tmp_path / "bpe.json")
    assert bpe.fingerprint == again.fingerprint == loaded.fingerprint
    assert bpe.fingerprint != BPETokenizer.train(TEXTS.values(), 280).fingerprint
    assert loaded.vocabulary == bpe.vocabulary
    for text in TEXTS.values():
        assert np.array_equal(loaded.encode(text), bpe.encode(text))
    assert [path.name for path in tmp_path.iterdir()] == ["bpe.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "bpe.json: cannot be read: No such"), (b"{}", "bpe.json: holds no tokenizer"), (b"\xff", "no tokenizer")],
)
def test_files_that_are_no_tokenizers_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "bpe.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        BPETokenizer.load(path)


def test_bpe_has_all_bytes() -> None:
    with pytest.raises(DatasetError, match="vocabulary=256: BPE needs at least 257 tokens"):
        BPETokenizer.train([], 256)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError):
        importlib.import_module("tokenizers")
    for use in (lambda: BPETokenizer.train([], 300), lambda: BPETokenizer.load(tmp_path)):
        with pytest.raises(DatasetError, match=r"needs tokenizers; run .* -m pip install tokenizers"):
            use()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_token_file_is_all_documents_and_their_ends(folder: Path, tmp_path: Path, kind: str, bpe: Any) -> None:
    tokenizer = bpe if kind == "bpe" else ByteTokenizer()
    file = encode_corpus(find_documents(folder), tokenizer, tmp_path / "tokens")
    expected = [token for name in sorted(TEXTS) for token in [*tokenizer.encode(TEXTS[name]), tokenizer.end]]
    stream = TokenStream(file)
    assert stream.read(Interval(0, stream.num_tokens)).tolist() == expected
    assert file.tokens.dtype == np.uint16
    assert file.vocabulary == tokenizer.vocabulary
    assert stream.names == tuple(sorted(TEXTS))
    assert stream.num_bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert tokenizer.decode(expected) == "".join(TEXTS[name] for name in sorted(TEXTS))


def test_a_large_vocabulary_has_wider_tokens(folder: Path, tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocabulary, end, fingerprint = 65_537, 65_536, "wide"

    file = encode_corpus(find_documents(folder), Wide(), tmp_path / "tokens")
    assert file.tokens.dtype == np.uint32
    assert file.tokens[-1] == 65_536


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are encoded from now on."""
    seen: list[str] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: seen.append(text) or encode(self, text))
    return seen


def test_token_files_are_reused_until_something_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: BPETokenizer
) -> None:
    seen, tokens = count_encoded(monkeypatch), tmp_path / "tokens"

    def path() -> Path:
        return encode_corpus(find_documents(folder), ByteTokenizer(), tokens).path

    first = path()
    assert len(seen) == len(TEXTS) - 1
    seen.clear()
    os.utime(folder / "a.txt")
    assert path() == first
    assert not seen
    assert encode_corpus(find_documents(folder), bpe, tokens).path != first
    (folder / "f.txt").write_text("no Line at the end")  # of the same size
    second = path()
    (folder / "f.txt").rename(folder / "g.txt")
    third = path()
    (folder / "g.txt").unlink()
    assert len({first, second, third, path()}) == 4
    seen.clear()
    write(folder, TEXTS)
    assert path() == first
    assert not seen
    moved = folder.rename(tmp_path / "moved")
    assert encode_corpus(find_documents(moved), ByteTokenizer(), tokens).path == first


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path, content: path.unlink(),
        lambda path, content: path.write_bytes(b""),
        lambda path, content: path.write_bytes(content[:-1]),
        lambda path, content: path.write_bytes(content[:9]),
        lambda path, content: path.write_bytes(content.replace(b"<u2", b"<u4")),
        lambda path, content: path.write_bytes(b"[]"),
    ],
    ids=["missing", "empty", "one byte short", "beginning", "other type", "other content"],
)
def test_damaged_token_files_are_refused_and_made_anew(folder: Path, tmp_path: Path, suffix: str, damage: Any) -> None:
    documents, tokens = find_documents(folder), tmp_path / "tokens"
    file = encode_corpus(documents, ByteTokenizer(), tokens)
    expected, path = file.tokens[:].tolist(), file.path.with_suffix(suffix)
    damage(path, path.read_bytes())
    with pytest.raises(DatasetError, match=r"tokens-.*\.(npy|json): (cannot be read: No such|.* the file is damaged)"):
        TokenFile(file.path.with_suffix(".json"))
    assert encode_corpus(documents, ByteTokenizer(), tokens).tokens[:].tolist() == expected


def test_a_changed_token_is_found_and_made_anew(folder: Path, tmp_path: Path) -> None:
    documents, tokens = find_documents(folder), tmp_path / "tokens"
    file = encode_corpus(documents, ByteTokenizer(), tokens)
    assert file.is_intact()
    content = file.path.read_bytes()
    for place in (-1, -2):  # a token that may be, and one that may not
        file.path.write_bytes(flip(content, len(content) + place))
        assert not TokenFile(file.path.with_suffix(".json")).is_intact()
        assert encode_corpus(documents, ByteTokenizer(), tokens).is_intact()
        assert file.path.read_bytes() == content


def test_a_token_beyond_the_vocabulary_is_never_read(folder: Path, tmp_path: Path) -> None:
    file = encode_corpus(find_documents(folder), ByteTokenizer(), tmp_path / "tokens")
    content = file.path.read_bytes()
    file.path.write_bytes(content[:-1] + b"\xff")
    stream = TokenStream(TokenFile(file.path.with_suffix(".json")))
    stream.read(Interval(0, stream.num_tokens - 1))
    with pytest.raises(DatasetError, match=r"holds token 65280 of a vocabulary of 257: the file is damaged; remove it"):
        stream.read(Interval(3, stream.num_tokens))


def test_a_header_of_another_format_is_refused(folder: Path, tmp_path: Path) -> None:
    header = encode_corpus(find_documents(folder), ByteTokenizer(), tmp_path).path.with_suffix(".json")
    header.write_text(json.dumps(json.loads(header.read_text()) | {"format": 2}))
    with pytest.raises(DatasetError, match="has another format than 1"):
        TokenFile(header)


def test_a_document_that_changes_while_it_is_read_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ByteTokenizer.encode

    def meanwhile(self: ByteTokenizer, text: str) -> Any:
        (folder / "f.txt").write_text("another")
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", meanwhile)
    with pytest.raises(DatasetError, match=r"f.txt: has changed while it was read"):
        encode_corpus(find_documents(folder), ByteTokenizer(), tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from mpi4dl.datasets.text.corpus import encode_corpus, find_documents
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
class Dying(ByteTokenizer):
    def encode(self, text):
        if "no line" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)
encode_corpus(find_documents(sys.argv[1]), Dying(), Path(sys.argv[2]))
"""


@pytest.mark.exhaustive
def test_a_killed_writer_leaves_nothing_that_is_believed(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(tokens)], capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (-9, b"")
    (left,) = tokens.iterdir()
    assert left.suffix == ".new"
    file = encode_corpus(find_documents(folder), ByteTokenizer(), tokens)
    assert {path.suffix for path in tokens.iterdir()} == {".new", ".npy", ".json"}
    file.path.unlink()
    os.utime(left, (time.time() - 100_000,) * 2)
    encode_corpus(find_documents(folder), ByteTokenizer(), tokens)
    assert {path.suffix for path in tokens.iterdir()} == {".npy", ".json"}


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    with pytest.raises(FileExistsError, match=r"a.txt is a file, but .*a.txt must be a folder"):
        encode_corpus(find_documents(folder), ByteTokenizer(), folder / "a.txt")


def test_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, 50, 0, 33, 1, 70)
    dataset = TokenDataset(stream, 13)
    samples = [dataset.read(i) for i in range(len(dataset))]
    whole = stream.read(Interval(0, stream.num_tokens))
    covered = len(dataset) * 13
    assert np.concatenate([sample.tokens for sample in samples]).tolist() == whole[:covered].tolist()
    assert np.concatenate([sample.targets for sample in samples]).tolist() == whole[1 : covered + 1].tolist()
    assert stream.num_tokens - 1 - covered < 13
    ends = np.flatnonzero(whole == 256)
    for index, sample in enumerate(samples):
        numbers = [int((ends < place).sum()) for place in range(13 * index, 13 * (index + 1))]
        assert sample.documents.tolist() == [number - numbers[0] for number in numbers]


CONTEXT = 16
INTERVALS = st.lists(st.integers(0, CONTEXT), min_size=2, max_size=2).map(sorted).map(lambda pair: Interval(*pair))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStream, TokenStream]:
    texts = {f"{i}.txt": chr(97 + i % 26) * (i * 7 % 40) for i in range(60)}
    return split_documents(encoded(tmp_path_factory.mktemp("parts"), texts), 0.3)


@given(index=st.integers(0, 20), interval=INTERVALS, epoch=st.integers(0, 3))
def test_an_interval_is_that_part_of_the_sample(
    parts: tuple[TokenStream, TokenStream], index: int, interval: Interval, epoch: int
) -> None:
    for stream in parts:
        plain, masked = TokenDataset(stream, CONTEXT), MaskedTokenDataset(stream, CONTEXT, seed=5)
        for whole, part in (
            (plain.read(index % len(plain)), plain.read(index % len(plain), interval)),
            (masked.read(index % len(masked), epoch=epoch), masked.read(index % len(masked), interval, epoch)),
        ):
            for all_of_it, some in zip(whole, part, strict=True):
                assert some.tolist() == all_of_it[slice(*interval)].tolist()
                assert some.dtype == np.int64


class Recorded:
    """An array that notes which of its entries are read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read = inner, []

    def __getitem__(self, places: slice) -> Any:
        self.read += range(places.start, places.stop)
        return self.inner[places]


def test_no_other_tokens_are_read(tmp_path: Path) -> None:
    file = encoded(tmp_path, {f"{i}.txt": "x" * 10 for i in range(9)})
    recorded: Any = Recorded(file.tokens)
    file.tokens = recorded
    stream = TokenStream(file, [1, 3, 4, 8])  # tokens 11 to 21, 33 to 54 and 88 to 98
    TokenDataset(stream, 20).read(0, Interval(8, 13))
    assert recorded.read == [19, 20, 21, 33, 34, 35]
    recorded.read.clear()
    MaskedTokenDataset(stream, 20).read(1, Interval(12, 15))
    assert recorded.read == [54, 88, 89]
    recorded.read.clear()
    for empty in (Interval(0, 0), Interval(20, 20)):
        assert [len(x) for x in TokenDataset(stream, 20).read(0, empty)] == [0, 0, 0]
    assert not recorded.read


@pytest.mark.parametrize("kind", [TokenDataset, MaskedTokenDataset])
def test_what_is_not_in_a_dataset_is_refused(tmp_path: Path, kind: Any) -> None:
    stream = stream_of(tmp_path, 20)
    dataset = kind(stream, 10)
    assert len(dataset) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            dataset.read(index)
    with pytest.raises(IndexError, match="positions 4 to 11 of a sample of 10"):
        dataset.read(0, Interval(4, 11))
    with pytest.raises(DatasetError, match="context=0: a sample needs at least one token"):
        kind(stream, 0)
    with pytest.raises(
        DatasetError, match=r"21 tokens in 1 documents do not make one sample of context=22: needs 2[23];"
    ):
        kind(stream, 22)
    assert kind is not TokenDataset or len(TokenDataset(stream, 20)) == 1


def test_masks_are_of_the_shares_of_the_paper(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, 40_000)
    dataset = MaskedTokenDataset(stream, 200, seed=1)
    assert (dataset.mask, dataset.vocabulary) == (257, 258)
    shown, targets, plain = [], [], []
    for index in range(len(dataset)):
        sample = dataset.read(index, epoch=2)
        chosen = sample.targets != IGNORED
        assert chosen.sum() == 30
        original = stream.read(Interval(200 * index, 200 * (index + 1)))
        assert np.array_equal(sample.tokens[~chosen], original[~chosen])
        assert np.array_equal(sample.targets[chosen], original[chosen])
        shown.append(sample.tokens[chosen])
        targets.append(sample.targets[chosen])
        plain.append(chosen)
    after, before = np.concatenate(shown), np.concatenate(targets)
    masked, same = (after == dataset.mask).mean(), (after == before).mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert same == pytest.approx(0.1, abs=0.015)
    others = after[(after != dataset.mask) & (after != before)]
    assert len(others) / len(after) == pytest.approx(0.1, abs=0.015)
    assert 0 <= others.min() < 20
    assert 240 < others.max() < 257
    per_place = np.mean(plain, axis=0)
    assert 0.02 < per_place.min() < per_place.max() < 0.3


def test_masks_follow_from_seed_epoch_and_sample(tmp_path: Path) -> None:
    stream = TokenStream(encoded(tmp_path, {"a.txt": "x" * 1000}))

    def drawn(seed: int, epoch: int, index: int) -> str:
        sample = MaskedTokenDataset(stream, 100, seed).read(index, epoch=epoch)
        return hashlib.sha256(sample.tokens.tobytes() + sample.targets.tobytes()).hexdigest()

    places = [(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]


def test_a_short_sample_has_a_target_too(tmp_path: Path) -> None:
    dataset = MaskedTokenDataset(stream_of(tmp_path, 9), 2)
    assert all((dataset.read(index).targets != IGNORED).sum() == 1 for index in range(len(dataset)))


def test_the_split_is_disjoint_and_a_new_document_moves_no_other(tmp_path: Path) -> None:
    texts = {f"{i}.txt": f"text {i}" for i in range(100)}
    file = encoded(tmp_path, texts)
    before = split_documents(file, 0.2)
    assert set(before[0].names).isdisjoint(before[1].names)
    assert {*before[0].names, *before[1].names} == set(texts)
    assert 5 <= len(before[1].names) <= 35
    for stream in before:
        tokens = stream.read(Interval(0, stream.num_tokens))
        assert ByteTokenizer().decode(tokens) == "".join(texts[name] for name in stream.names)
        assert stream.num_bytes == stream.num_tokens - len(stream.names)
    after = split_documents(encoded(tmp_path, {"000 new.txt": "new", "zzz/new.md": "new"}), 0.2)
    assert {*after[0].names, *after[1].names} == {*texts, "000 new.txt", "zzz/new.md"}
    for old, new in zip(before, after, strict=True):
        assert set(old.names) <= set(new.names)
    assert split_documents(file, 0.2, seed=1)[1].names != before[1].names


def test_bits_per_byte() -> None:
    # Bytes that a model takes for alike cost 8 bits each; tokens of two bytes that cost 4 bits, 2 bits a byte.
    assert bits_per_byte(math.log(256), 100, 100) == pytest.approx(8)
    assert bits_per_byte(4 * math.log(2), 50, 100) == pytest.approx(2)
    with pytest.raises(ValueError, match="num_bytes=0: bits per byte need a text"):
        bits_per_byte(1.0, 1, 0)
