"""Timelines as text, by literal equality, and as pictures, by what is in them."""

from textwrap import dedent
from xml.etree.ElementTree import fromstring

from mpi4dl._palette import IDLE, WORK
from mpi4dl.parallel.tables.drawing import as_image, as_svg, as_text
from mpi4dl.parallel.tables.schedules import Placement, table_for
from mpi4dl.parallel.tables.simulator import Costs, Simulation, simulate


def simulated(name: str, placement: Placement, num_microbatches: int, costs: Costs) -> Simulation:
    return simulate(table_for(name, placement, num_microbatches), placement, costs)


def test_a_backward_is_drawn_as_long_as_it_takes() -> None:
    simulation = simulated("gpipe", Placement.row([1, 1]), 2, Costs.equal(2, activation_bytes=3 * 2**20))
    drawn = """\
        rank 0 |F0 F1          B0--- B1---
        rank 1 |   F0 F1 B0--- B1---
        9 s, bubble 33.3 % over all ranks, at most 6 MiB of activations on a rank"""
    assert as_text(simulation) == dedent(drawn)


def test_the_mirrored_copy_is_drawn_in_small_letters() -> None:
    simulation = simulated("zero-bubble", Placement.row([2, 1], 2), 1, Costs.equal(2))
    drawn = """\
        rank 0 |F0       I0 W0    f0 i0 w0
        rank 1 |F0       I0 W0 f0       i0 w0
        rank 2 |   F0 I0 W0    f0       i0 w0
        10 s, bubble 40.0 % over all ranks, at most 1 B of activations on a rank"""
    assert as_text(simulation) == dedent(drawn)


def test_stages_are_named_where_a_rank_holds_several() -> None:
    simulation = simulated("interleaved", Placement.row((1,) * 1, chunks=2), 1, Costs.equal(2, 1.0, 1.0))
    assert as_text(simulation).splitlines()[0] == "rank 0 |F0.0 F1.0 B1.0 B0.0"


def test_numbers_of_ranks_are_aligned() -> None:
    lines = as_text(simulated("gpipe", Placement.row([1] * 11), 1, Costs.equal(11))).splitlines()
    assert lines[2].startswith("rank  2 |")
    assert lines[10].startswith("rank 10 |")


def test_what_is_too_short_for_its_name_shows_its_letter() -> None:
    costs = Costs((8.0, 0.001), (8.0, 4.0), (0.0,), (1, 1))
    simulation = simulated("gpipe", Placement.row([1, 1]), 1, costs)
    assert as_text(simulation, max_columns=5).splitlines()[:2] == ["rank 0 |F0 B0", "rank 1 |  B"]


def test_a_drawing_is_no_wider_than_asked() -> None:
    simulation = simulated("1f1b", Placement.row([1] * 8), 64, Costs.equal(8))
    assert max(len(line) for line in as_text(simulation, max_columns=100).splitlines()) <= 100 + len("rank 0 |")


def test_a_timeline_in_a_page_shows_when_each_rank_does_what() -> None:
    placement = Placement.row([2, 1], 2)
    simulation = simulated("zero-bubble", placement, 2, Costs.equal(2))
    root = fromstring(as_svg(simulation))
    boxes = [box for box in root.iter("rect") if box.get("fill") != IDLE]
    spans = [span for row in simulation.rows for span in row]
    assert [box.get("fill") for box in boxes] == [WORK[span.action.kind, span.action.direction] for span in spans]
    assert [box[0].text for box in boxes] == [f"{action}: {start:.4g} to {end:.4g} s" for action, start, end in spans]
    # One scale for all of them.
    long = [float(box.get("width", 0)) for box in boxes]
    scale = {round(width / (end - start)) for width, (_, start, end) in zip(long, spans, strict=True)}
    assert len(scale) == 1
    words = [text.text for text in root.iter("text")]
    assert {f"{100 * bubble:.0f} % idle" for bubble in simulation.bubbles} | {"rank 2", "0 s", "1"} <= set(words)
    picture = as_image(simulation)
    colours = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in picture.getcolors(1 << 24)}
    assert colours >= {WORK[kind, way] for kind in ("forward", "input", "weight") for way in (0, 1)} | {IDLE}


def test_a_table_that_takes_no_time_has_a_picture_too() -> None:
    for simulation in (simulated("gpipe", Placement.row([1]), 1, Costs.equal(1, 0.0, 0.0)), Simulation(((),), (0,))):
        assert as_text(simulation).startswith("rank 0 |\n0 s, bubble ")
        assert as_svg(simulation).count("rank 0") == 1
        assert as_image(simulation).width > 300
