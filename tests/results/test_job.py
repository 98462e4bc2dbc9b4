"""Jobs over many items go on: what is done by the same settings stays, all else is made anew, or refused by name."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpi4dl._files import make_folder
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import like, neutral, option, options_of
from mpi4dl.options.kinds import COUNT, NAME
from mpi4dl.results.formats import DamagedResult
from mpi4dl.results.job import MOST_READ, FolderJob, ItemInput, settings_of
from mpi4dl.results.names import JobKind

KIND = JobKind("made", "image")
KEEPING = JobKind("made", "image", keeps_others=True)


@dataclass(frozen=True)
class Making:
    height: int = option(3, "what counts", COUNT)
    speed: int = neutral(4, "what does not", COUNT)


@dataclass(frozen=True)
class Old:
    making: Making = field(default_factory=Making)


@dataclass(frozen=True)
class Added:
    added: str = option("here", "an option that nobody has thought of", NAME)
    same: int = like(Making, "height", changes_results=False)


@dataclass(frozen=True)
class New:
    making: Making = field(default_factory=Making)
    more: Added = field(default_factory=Added)


def test_a_new_option_counts_unless_its_declaration_says_otherwise() -> None:
    assert settings_of(Old(), weights="w") == {"height": 3, "weights": "w"}
    assert settings_of(New(), height=4) == {"height": 4, "added": "here"}


def test_options_of_training_count_but_for_the_plan_and_this_start() -> None:
    neutral_ones = {name for name, item in options_of(Config).items() if not item.changes_results}
    expected = {name for name, item in options_of(Config).items() if item.section in ("parallel", "run")}
    assert neutral_ones == (expected | {"num_workers"}) - {"stream_norm", "callbacks"}


class Work:
    """A folder of inputs, and jobs that copy each into another one."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.out = folder / "in", folder / "out"
        self.inputs.mkdir()
        for name in "abc":
            (self.inputs / name).write_text(name)

    def run(self, settings: dict[str, Any] | None = None, kind: JobKind = KIND, **more: Any) -> list[str]:
        """Do what is to be done; the names of these items."""
        told = more.pop("told", {})
        paths = {path.name: path for path in sorted(self.inputs.iterdir())}
        inputs = {name: ItemInput(path, told) for name, path in paths.items()}
        job = FolderJob(
            self.out, kind, {"height": 3} if settings is None else settings, inputs, columns=["image"], **more
        )
        try:
            todo = [name for name in inputs if name not in job.done]
            for name in todo:
                target = self.out / "files" / name
                target.parent.mkdir(exist_ok=True)
                target.write_text(paths[name].read_text() * 3)
                job.add({"image": name}, [target])
        finally:
            job.close()
        assert (self.out / "made.csv").read_text().splitlines()[0] == "image"
        return todo

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.out / "files").iterdir())

    def edit(self, old: str, new: str) -> None:
        path = self.out / "made.jsonl"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))


@pytest.fixture
def work(tmp_path: Path) -> Work:
    found = Work(tmp_path)
    assert found.run() == ["a", "b", "c"]
    assert found.run() == []
    return found


def test_items_are_done_by_their_input_and_their_files(work: Work) -> None:
    (work.inputs / "a").write_text("A")
    (work.out / "files" / "b").write_text("bb")  # cut off
    assert work.run() == ["a", "b"]
    assert (work.out / "files" / "a").read_text() == "AAA"
    lines = work.out / "made.jsonl"
    lines.write_bytes(lines.read_bytes()[:-9])  # as by a kill
    assert work.run() == ["b"]
    work.edit('"files"', '"error": "torn", "files"')
    assert len(work.run()) == 1
    assert work.run(told={"mpp": 0.5}) == ["a", "b", "c"]
    assert work.run(told={"mpp": 0.5}) == []


def test_an_input_of_zarr_is_what_all_its_chunks_are(tmp_path: Path) -> None:
    for number in range(3 * MOST_READ):
        path = tmp_path / "a.zarr" / "c" / str(number % 7) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(200))
    (tmp_path / "a.zarr" / "zarr.json").write_bytes(b"{}")
    given = ItemInput(tmp_path / "a.zarr")
    known, state = given.identity(), given.state()
    assert given.is_as_in(known)
    for chunk in (path, tmp_path / "a.zarr" / "c" / "0" / "0"):
        content = chunk.read_bytes()
        chunk.write_bytes(b"\1" * 200)
        assert not given.is_as_in(known)
        assert given.state() != state
        chunk.write_bytes(content)
        known, state = given.identity(), given.state()


@pytest.mark.parametrize("kind", [KIND, KEEPING])
def test_what_is_asked_for_no_longer_goes_unless_the_kind_keeps_it(work: Work, kind: JobKind) -> None:
    (work.inputs / "a").unlink()
    assert work.run(kind=kind) == []
    assert work.files() == (["a", "b", "c"] if kind.keeps_others else ["b", "c"])
    assert ('"a"' in (work.out / "made.jsonl").read_text()) == kind.keeps_others


def test_other_settings_are_refused_by_name_or_made_anew(work: Work) -> None:
    before = (work.out / "made.jsonl").read_text()
    for settings, told in (
        ({"height": 5}, "`height` 3, not 5"),
        ({"height": 3, "new": 1}, "`new` None, not 1"),
        ({}, "`height` 3, not None"),
    ):
        with pytest.raises(ConfigError, match=f"{told}: choose another `out`, or say `overwrite`"):
            work.run(settings)
    assert (work.out / "made.jsonl").read_text() == before
    assert work.run({"height": 5}, overwrite=True) == ["a", "b", "c"]
    assert work.run({"height": 5}) == []


def test_files_of_something_else_are_not_replaced(work: Work) -> None:
    (work.out / "made.json").unlink()
    with pytest.raises(ConfigError, match=r"made\.jsonl was written by something else"):
        work.run()
    (work.out / "made.jsonl").unlink()
    with pytest.raises(ConfigError, match="files/a was written by something else"):
        work.run(writes=[work.out / "files" / "a"])
    assert work.run(writes=[work.out / "files" / "a"], overwrite=True) == ["a", "b", "c"]


def test_settings_may_change_while_nothing_is_done(tmp_path: Path) -> None:
    for height in (1, 2):
        FolderJob(tmp_path, KIND, {"height": height}, {}).close()
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match="height"):  # which a killed job left
        FolderJob(tmp_path, KIND, {"height": 3}, {}, writes=[tmp_path / "a"])


@pytest.mark.parametrize(
    ("name", "content"),
    [("made.json", "{"), ("made.json", "[]"), ("made.json", '{"settings": {}}'), ("made.jsonl", "{\n{}\n"),
     ("made.json", '{"version": 2, "settings": {}}'), ("made.json", '{"version": 1}'),
     ("made.json", '{"version": 1, "settings": []}'), ("made.jsonl", '{"image": "a"}\n')],
)  # fmt: skip
def test_a_damaged_file_is_an_error_that_names_it(work: Work, name: str, content: str) -> None:
    (work.out / name).write_text(content)
    with pytest.raises(DamagedResult, match=name):
        work.run()
    assert work.run(overwrite=True) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["../in/a", "/etc/hostname", "link/a"])
def test_a_record_leads_to_no_file_outside(work: Work, name: str) -> None:
    (work.out / "link").symlink_to(work.inputs)
    work.edit("files/a", name)
    (work.inputs / "a").write_text("other")
    with pytest.raises(DamagedResult, match="outside"):
        work.run()
    assert (work.inputs / "a").exists()


def test_an_input_that_changes_meanwhile_is_an_error_and_done_again(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpi4dl._files.LOCK_SECONDS", 0.0)
    job = FolderJob(work.out, KIND, {"height": 3}, {"d": ItemInput(work.inputs / "a", {"other": 1})})
    (work.inputs / "a").write_text("longer")
    assert "was changed" in job.add({"image": "d"})["error"]
    with pytest.raises(ValueError, match="another job"):
        FolderJob(work.out, KIND, {"height": 3}, {})
    job.close()
    assert json.loads((work.out / "made.json").read_text()) == {"version": 1, "settings": {"height": 3}}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert FolderJob(tmp_path / "out", KIND, {}, {}, dry_run=True).done == {}
    assert not (tmp_path / "out").exists()


def test_an_item_that_nothing_tells_from_others_is_never_done(work: Work) -> None:
    job = FolderJob(work.out, KIND, {"height": 3}, {"a": None})
    job.close()
    assert job.done == {}


@pytest.mark.parametrize("name", ["taken", "taken/below/it"])
@pytest.mark.parametrize("what", ["file", "link to nothing"])
def test_a_file_where_a_folder_is_to_be_is_named(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "taken").touch() if what == "file" else (tmp_path / "taken").symlink_to("nothing")
    with pytest.raises(OSError, match=rf"taken is a {what}, but .*taken.* must be a folder"):
        make_folder(tmp_path / name)
