"""A page of runs: sound HTML that needs no network, with the numbers of runs, whatever is wrong with their folders."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from mpi4dl.parallel.tables.schedules import Placement, table_for
from mpi4dl.parallel.tables.simulator import Costs, simulate
from mpi4dl.report import main
from mpi4dl.reports.page import log_ticks, results, thinned, ticks
from mpi4dl.reports.reading import extremes, judged, read_runs
from mpi4dl.results.evaluations import evaluations_in
from mpi4dl.results.formats import as_object
from mpi4dl.results.names import PORTRAIT
from mpi4dl.runs.folder import RunSnapshot

EVIL = '<script>alert("x")</script> & {{ title }}'
VOID = ("meta", "br", "img")
ENDS = ("value", "low", "high", "level")


class Checked(HTMLParser):
    """What stands in a page; fails where tags are not closed in their order, or something outside is referred to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert (value or "").startswith("data:image/"), value
        assert tag not in ("script", "link", "iframe", "object", "base")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            assert "url(" not in data
            assert "@import" not in data
        else:
            self.text += data


def report(capsys: pytest.CaptureFixture[str], *runs: Path) -> Checked:
    out = runs[0].parent / "page.html"
    main([*map(str, runs), "--out", str(out)])
    assert f"{out}: {len(runs)} run" in capsys.readouterr().out
    return Checked(out.read_text(encoding="utf-8"))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpi4dl: ")
    return line


def write_run(folder: Path, lr: float = 0.1, losses: tuple[Any, ...] = (2.345, 1.678), scheduler: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[model]\nmodel = "small_resnet"\n[optimizer]\nlr = {lr}\nscheduler = "{scheduler}"\n'
    )
    common = {
        "images_per_second": 12.5,
        "data_wait": 0.25,
        "peak_memory_bytes": 3 << 20,
        "learning_rate/0": lr,
        "learning_rate/1": lr / 2,
    }
    lines = [{"phase": "train", "step": 10 * i + 10, "epoch": i + 1, "loss": x} | common for i, x in enumerate(losses)]
    lines.append({"phase": "validation", "step": 20, "epoch": 2, "loss": 1.9, "accuracy": 0.625})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "versions.json").write_text(as_object({"torch": "2.99", "command": ["python", "a b"]}))
    (folder / "log-rank0.txt").write_text("2026-01-01 10:00:00,1 INFO mpi4dl: done: 20 steps in 3 s; see there\n")
    placement = Placement.row([2, 1])
    timeline = simulate(table_for("1f1b", placement, 4, 1), placement, Costs.equal(2))
    memory = ({"parameters": 5 << 20, "gradients": 1 << 20},) * 3
    modules = ((EVIL, 1234567, 7654321),)
    portrait = RunSnapshot(f"title of {folder.name}", "stages(2)", 20, modules, memory, "units timed", timeline)
    (folder / PORTRAIT).write_text(as_object(portrait.content()))
    return folder


def write_evaluation(path: Path, rows: str, task: str = "classify", **told: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".csv").write_text(rows)
    common: dict[str, Any] = {"task": task, "what": "image", "metrics": {}, "classes": [], "confusion": None}
    path.write_text(as_object({**common, "root": None, "images": None, **told}))


def test_a_page_has_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", 0.7, (2.3, "nan"), "StepLR")
    page = report(capsys, one, two)
    for word in (
        "title of one", "done: 20 steps in 3 s", "2.345", "1.678 at step 20", "2.3 at step 10", "0.625", "12.5", "1.9",
        "train loss is not finite in 1 report, the first at step 20", "python 'a b'", "1,234,567", "6 MiB", "rank 2",
        "learning rate/1", "StepLR",
    ):  # fmt: skip
        assert word in page.text, word
    rows = re.findall(r"<tr class=\"marked\"><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>", _raw(tmp_path))
    assert ("optimizer.lr", "0.1", "0.7") in rows
    assert "model.model" not in dict((name, 0) for name, *_ in rows)
    charts = [attributes["aria-label"] or "" for tag, attributes in page.tags if tag == "svg"]
    assert charts[:2] == ["loss by step", "accuracy by step"]
    assert len([chart for chart in charts if "bubble" in chart]) == 2
    # 2 stages, of which rank 0 and 1 share one: 4 microbatches forward and backward on each of 3 ranks, in 2 runs.
    boxes = [attributes for tag, attributes in page.tags if tag == "rect" and attributes["fill"] != "#dcdcdc"]
    assert len(boxes) == 2 * 3 * 8


def _raw(folder: Path) -> str:
    return (folder / "page.html").read_text(encoding="utf-8")


def test_names_are_anybodys_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of classes, images, folders, options and log lines: `Checked` fails at a script."""
    run = write_run(tmp_path / "<b>run & <i>co")
    with (run / "config.toml").open("a") as file:
        file.write(f"[data]\nimages = '{EVIL}'\n")
    with (run / "log-rank0.txt").open("a") as file:
        file.write(f"2026-01-01 10:00:00,1 INFO mpi4dl: ended by {EVIL}\n")
    columns = f'image,label,prediction,"probability {EVIL.replace(chr(34), chr(34) * 2)}"'
    quoted = '"' + EVIL.replace('"', '""') + '"'
    write_evaluation(run / "evaluation.json", f"{columns}\n{quoted},{quoted},{quoted},0.75\n")
    page = report(capsys, run)
    assert page.text.count(EVIL) >= 6
    assert "75.0 % for <script>" in page.text
    assert "<b>run & <i>co" in page.text
    assert "<script" not in _raw(tmp_path)


def test_images_are_judged_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, images = write_run(tmp_path / "run"), tmp_path / "images"
    images.mkdir()
    for number in range(10):
        PIL.Image.fromarray(np.full((20, 30, 3), 20 * number, np.uint8)).save(images / f"{number}.png")
    (images / "3.png").write_bytes(b"no picture")
    # Images 0 to 5 are cats, of which 4 and 5 are taken for dogs; image 9 could not be read.
    lines = ["image,label,prediction,probability cat,probability dog,error"]
    for number in range(9):
        label, cat = ("cat" if number < 6 else "dog"), 0.9 - number / 10 if number < 6 else 0.2
        lines.append(f"{number}.png,{label},{'cat' if cat > 0.5 else 'dog'},{cat:.2f},{1 - cat:.2f},")
    file, confusion = run / "evaluation-test" / "evaluation.json", [[4, 2], [0, 3]]
    metrics = {"auc": {"value": 0.75, "low": 0.5, "high": 0.875, "level": 0.9}, "loss": dict.fromkeys(ENDS, "nan")}
    told = {"images": str(images), "confusion": confusion, "classes": ["cat", "dog"], "metrics": metrics}
    write_evaluation(file, "\n".join([*lines, "9.png,,,,,it is damaged"]) + "\n", **told)
    (found,) = evaluations_in(run)
    best, worst = extremes(judged(found), 3)
    assert [one.image for one in best] == ["0.png", "1.png", "6.png"]
    assert [one.image for one in worst] == ["5.png", "4.png", "3.png"]
    page = report(capsys, run)
    assert sum(tag == "img" for tag, _ in page.tags) == 8
    assert "0.5 to 0.875" in page.text
    assert "90 % of resamples" in page.text
    assert page.text.count("no picture") == 1
    write_evaluation(file, "image,dice,error\na.png,0.5,\nb.png,0.75,\n", "segment", confusion=[[[1]]])
    (masks,) = evaluations_in(run)
    assert [one.image for some in extremes(judged(masks), 1) for one in some] == ["b.png", "a.png"]
    page = report(capsys, run)
    assert "dice 0.750" in page.text
    assert "Input, made image and target" not in page.text
    write_evaluation(file, "image,psnr,ssim,mae,error\na.png,20,0.5,0.1,\nb.png,30,0.25,0.2,\n", "image")
    PIL.Image.fromarray(np.zeros((20, 60, 3), np.uint8)).save(file.with_name("examples.jpg"))
    page = report(capsys, run)
    assert "ssim 0.500" in page.text
    assert "Input, made image and target" in page.text
    alt = "Inputs, images that the model made, and their targets"
    assert [tag for tag, attributes in page.tags if attributes.get("alt") == alt] == ["img"]


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = write_run(tmp_path / "killed")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 30, "lo')
    (killed / "log-rank0.txt").write_bytes(b"2026-01-01 10:00:00,1 INFO mpi4dl: step 20\n\xff")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").touch()
    page = report(capsys, killed, bare)
    for word in ("no end is recorded after step 20: it is still running, or was killed", "1.678", "before its first"):
        assert word in page.text, word


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "3\n"),
        ("metrics.jsonl", '{"phase": "train", "step": 10\n{"phase": "train", "step": 20}\n'),
        ("config.toml", "[model"),
        ("versions.json", "\x00"),
        ("versions.json", '{"torch": "2.99"}'),
        (PORTRAIT, '{"version": 1, "timeline": [[["sideways", 0, 0, 0, 0, 1]]]}'),
        ("evaluation.json", "{"),
        ("evaluation.csv", "image,label\na.png\n"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    run = write_run(tmp_path / "run")
    write_evaluation(run / "evaluation.json", "image,label,prediction\na.png,1,1\n")
    (run / name).write_text(content)
    assert f"{run / name}: is damaged" in refusal(capsys, str(run), "--out", str(tmp_path / "page.html"))


ABSURD = ("9" * 400, "1e308", "-1e308", "1e-320", "NaN", "null")
NUMBER = re.compile(r"-?\b[0-9]+(?:\.[0-9]+)?\b")


@pytest.mark.parametrize("name", ["metrics.jsonl", PORTRAIT, "evaluation.json", "evaluation.csv"])
def test_absurd_numbers_in_any_place_leave_a_page_or_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = write_run(tmp_path / "run")
    told = {"metrics": {"auc": {"value": 0.75, "low": 0.5, "high": 0.875, "level": 0.9}}, "confusion": [[1, 2], [3, 4]]}
    rows = "image,label,prediction,probability 1\na.png,1,1,0.75\nb.png,1,2,0.25\n"
    write_evaluation(run / "evaluation.json", rows, **told)
    text = (run / name).read_text()
    places = [found.span() for found in NUMBER.finditer(text)]
    for number in ABSURD:
        for first, last in places[:: max(1, len(places) // 3)]:
            (run / name).write_text(text[:first] + number + text[last:])
            try:
                main([str(run), "--out", str(tmp_path / "page.html")])
                assert "title of run" in Checked(_raw(tmp_path)).text
            except SystemExit:
                assert str(run / name) in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refusal(capsys, str(tmp_path / "gone"))
    assert "is no folder of a run: it has neither config.toml nor metrics.jsonl" in refusal(
        capsys, str(tmp_path / "empty")
    )
    assert "there is no folder" in refusal(capsys, str(run), "--out", str(tmp_path / "gone" / "a.html"))
    assert "is a folder: name a file in it" in refusal(capsys, str(run), "--out", str(tmp_path))


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / each / "run") for each in ("a", "b")]
    page = report(capsys, *runs, runs[0])
    assert {"a/run", "b/run", "a/run (2)"} <= set(re.findall(r"[ab]/run(?: \(2\))?", page.text))


def test_folds_are_named_by_their_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fold in (0, 1, 10):
        write_run(tmp_path / "cv" / f"fold_{fold}")
    rows = "image,label,prediction,probability 1\na.png,1,1,0.75\nb.png,1,2,0.25\n"
    write_evaluation(tmp_path / "cv" / "evaluation-1.json", rows)
    main([str(tmp_path / "cv"), "--out", str(tmp_path / "page.html")])
    assert "3 runs" in capsys.readouterr().out
    text = Checked(_raw(tmp_path)).text
    assert text.index("fold_0") < text.index("fold_1") < text.index("fold_10")
    assert "all folds: evaluation-1" in text


def test_axes_and_many_points() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(90, 350, 4) == [100, 200, 300]
    assert log_ticks(-3, 3) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10, 100, 1000])
    points = [(step, float(step % 7)) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    few = thinned(points)
    assert len(few) <= 320
    assert (4321, 99.0) in few
    assert [step for step, _ in few] == sorted(step for step, _ in few)


def of_task(folder: Path, task: str, values: dict[str, list[float]], told: dict[str, bool], loss: str = "") -> Path:
    run = write_run(folder)
    with (run / "config.toml").open("a") as file:
        file.write(f'[training]\nloss = "{loss}"\n')
    (run / "model.json").write_text(as_object({"task": task, "classes": []}))
    (run / "measures.json").write_text(as_object({"higher_is_better": told}))
    steps = range(len(next(iter(values.values()))))
    lines = [
        {"phase": "validation", "step": s + 1, "epoch": 1, **{name: each[s] for name, each in values.items()}}
        for s in steps
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_best_is_of_one_task_and_in_the_direction_of_the_run(tmp_path: Path) -> None:
    runs = [
        of_task(tmp_path / "a", "classify", {"loss": [0.5, 0.7], "pearson_error": [0.1, 0.9]}, {"pearson_error": True}),
        of_task(tmp_path / "b", "classify", {"loss": [0.6, 0.9], "auc": [0.5, 0.8]}, {"auc": True}),
        of_task(tmp_path / "c", "language", {"loss": [0.1, 0.2], "strange": [1.0, 2.0]}, {}),
        of_task(tmp_path / "d", "segment", {"loss": [0.2, 0.1], "dice": [0.7, 0.6]}, {"dice": True}, "dice"),
    ]
    found = {row["name"]: row for row in results(read_runs(runs))}
    best = {name: [cell["best"] for cell in row["cells"]] for name, row in found.items()}
    assert best["validation loss"] == ["0.5 at step 1", "0.6 at step 1", "0.1 at step 1", "0.1 at step 2"]
    assert [cell["top"] for cell in found["validation loss"]["cells"]] == [True, False, False, False]
    assert best["validation pearson error"][0] == "0.9 at step 2"
    assert best["validation strange"] == ["-"] * 4
    assert found["validation strange"]["direction"] == "no direction is known"
    assert best["validation dice"][3] == "0.7 at step 1"


@pytest.mark.parametrize("name", ["private.png", "../../private/private.png", "ABSOLUTE", "link.png", "x" * 300])
def test_pictures_outside_are_shown_only_where_the_user_names_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As of a run that somebody else sent: a report of it must not take pictures of this machine along."""
    private, here = tmp_path / "private", tmp_path / "sent"
    run = write_run(here / "run")
    private.mkdir()
    monkeypatch.chdir(here)
    PIL.Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(private / "private.png")
    (run / "link.png").symlink_to(private / "private.png")
    name = str(private / "private.png") if name == "ABSOLUTE" else name
    for told in ({"root": str(private)}, {"images": str(private)}, {"root": str(private), "images": "/"}):
        write_evaluation(run / "evaluation.json", f"image,dice,error\n{name},0.5,\n", "segment", **told)
        assert "img" not in [tag for tag, _ in report(capsys, run).tags]
    main([str(run), "--out", str(here / "page.html"), "--images", str(private)])
    assert ("<img" in (here / "page.html").read_text()) == (len(name) < 300)


@pytest.mark.parametrize("part", ["val/images", "test/images", "images", "Validation/images", "val"])
@pytest.mark.parametrize("recorded", [True, False])
def test_pictures_of_masked_sets_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, recorded: bool
) -> None:
    run, images = write_run(tmp_path / "run"), tmp_path / "set" / part
    images.mkdir(parents=True)
    PIL.Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(images / "a.png")
    masked = images.name == "images"  # beside masks
    root = {"root": str(images.parent if masked else images)} if recorded else {"images": str(tmp_path / "set")}
    write_evaluation(run / "evaluation.json", f"image,dice,error\n{'images/' * masked}a.png,0.5,\n", "segment", **root)
    page = report(capsys, run)
    assert [tag for tag, _ in page.tags].count("img") == 1
    assert "no picture" not in page.text
