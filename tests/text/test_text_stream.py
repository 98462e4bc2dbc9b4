"""Text as tokens come: whole characters only, nothing that may yet turn out to be a stop string."""

import pytest

from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.text.batcher import TextStream


def pieces_of(data: bytes, *stop: str) -> tuple[list[str], str, bool]:
    """What each byte shows, what the end shows, whether it stopped."""
    stream = TextStream(ByteTokenizer(), stop)
    return [stream.add(byte) for byte in data], stream.end(), stream.stopped


def test_characters_are_shown_whole() -> None:
    pieces, end, _ = pieces_of("né€😀x".encode())
    assert pieces == ["n", "", "é", "", "", "€", "", "", "", "😀", "x"]
    assert end == ""


@pytest.mark.parametrize("data", [b"\xff\xfea", b"a\xe2\x82", b"\xe2\x82a", b"\xf0\x9f\xf0\x9f\x98\x80", b"\x80" * 9])
def test_what_is_no_text_is_shown_as_by_the_tokenizer(data: bytes) -> None:
    pieces, end, _ = pieces_of(data)
    assert "".join(pieces) + end == data.decode(errors="replace")


def test_a_tokenizer_that_decodes_each_byte_of_a_part_of_a_character() -> None:
    """As Llama's does."""

    class EachByte(ByteTokenizer):
        def decode(self, tokens: object) -> str:
            try:
                return bytes(tokens).decode()  # type: ignore[call-overload]
            except UnicodeDecodeError:
                return "\N{REPLACEMENT CHARACTER}" * len(tokens)  # type: ignore[arg-type]

    stream = TextStream(EachByte(), ())
    assert [stream.add(byte) for byte in "n€😀x".encode()] == ["n", "", "", "€", "", "", "", "😀", "x"]


def test_stop_strings_over_tokens() -> None:
    assert pieces_of(b"ab\n\ncd", "\n\n") == (["a", "b", "", "", "", ""], "", True)
    assert pieces_of(b"a\nb", "\n\n") == (["a", "", "\nb"], "", False)  # it was none
    assert pieces_of(b"a\n", "\n\n") == (["a", ""], "\n", False)  # it came no further
    assert pieces_of(b"xaab", "aaa", "ab") == (["x", "", "", "a"], "", True)  # a beginning within another
    assert pieces_of("aé".encode(), "é")[0] == ["a", "", ""]


def test_the_first_of_several_stop_strings_counts() -> None:
    class Words(ByteTokenizer):
        def decode(self, tokens: object) -> str:
            return "one, two. three"

    stream = TextStream(Words(), (".", ",", "three"))
    assert (stream.add(0), stream.end(), stream.stopped) == ("one", "", True)
