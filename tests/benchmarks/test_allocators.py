"""benchmarks.allocators: names become environments, and contestants run with each of them."""

from pathlib import Path

import pytest

from benchmarks import allocators
from benchmarks.allocators import environments, least_memory, with_each
from benchmarks.turns import Contestant


def test_settings_need_no_library_and_files_are_preloaded(tmp_path: Path) -> None:
    library = tmp_path / "libmine.so"
    library.touch()
    assert environments(f"default,keep,mine={library}") == {
        "default": {},
        "keep": {},
        "mine": {"LD_PRELOAD": str(library)},
    }


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(allocators, "find_library", lambda stem: "libjemalloc.so.2" if stem == "jemalloc" else None)
    monkeypatch.setattr(allocators, "FOLDERS", ())
    assert environments("keep,tcmalloc,jemalloc") == {"keep": {}, "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"}}
    assert capsys.readouterr().err == "tcmalloc is not installed: left out\n"
    with pytest.raises(ValueError, match="tcmalloc: none of them is installed"):
        environments("tcmalloc")


def test_what_the_linker_does_not_know_is_found_in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libtcmalloc_minimal.so.4").touch()
    monkeypatch.setattr(allocators, "find_library", lambda stem: None)
    monkeypatch.setattr(allocators, "FOLDERS", (str(tmp_path),))
    assert environments("tcmalloc") == {"tcmalloc": {"LD_PRELOAD": str(tmp_path / "libtcmalloc_minimal.so.4")}}


@pytest.mark.parametrize("names", ["hoard", "mine=/nowhere/lib.so"])
def test_others_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match=names):
        environments(names)


def test_contestants_are_told_their_allocator_in_turn() -> None:
    pair = [Contestant("plain", 1, ["-m", "it", "--x"]), Contestant("1x2", 2, ["-m", "it", "--x"])]
    found = with_each(pair, "default,keep")
    assert [each.label for each in found] == ["plain, default", "1x2, default", "plain, keep", "1x2, keep"]
    assert found[2].arguments == ["-m", "it", "--allocator=keep", "--x"]
    assert [each.label for each in with_each(pair, "keep")] == ["plain", "1x2"]


def test_the_least_memory_is_that_of_plain_pytorch() -> None:
    peaks = {"default": (5, 1), "keep": (4, 2)}
    found = [
        Contestant(name, 1, [], [{"peak_bytes": peak}], allocator=allocator)
        for allocator, both in peaks.items()
        for name, peak in zip(("plain", "1x2"), both, strict=True)
    ]
    assert least_memory(found) == 4
