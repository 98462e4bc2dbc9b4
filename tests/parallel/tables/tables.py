"""Tables for tests: read from a drawing, drawn at random, and played by ranks of random speed."""

from random import Random

from hypothesis import strategies as st

from mpi4dl.parallel.tables.schedules import SCHEDULES, Action, Kind, Placement, Table, gems, needs

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def read(drawing: str, placement: Placement) -> Table:
    """One line a rank: F3 is the forward of microbatch 3, f3 of the mirrored copy, F2.3 of stage 2."""
    lines = drawing.strip().splitlines()
    return tuple(
        tuple(_action(word, rank, placement) for word in line.rpartition("|")[2].split())
        for rank, line in enumerate(lines)
    )


def _action(word: str, rank: int, placement: Placement) -> Action:
    direction = int(word[0].islower())
    stage, _, microbatch = word[1:].rpartition(".")
    (only, *_) = (held for way, held in placement.held_by(rank) if way == direction)
    return Action(KINDS[word[0].upper()], direction, int(stage or only), int(microbatch))


@st.composite
def placements(draw: st.DrawFn, directions: int) -> Placement:
    """Stages of several tiles on neighbours or anywhere, overlapping or not, mirrored or not."""
    if draw(st.booleans()):
        return Placement.row(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)), directions)
    num_ranks, num_stages = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    some = st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True).map(tuple)
    holders = []
    for _ in range(directions):
        stages = draw(st.lists(some, min_size=num_stages - 1, max_size=num_stages - 1))
        left = tuple(set(range(num_ranks)) - {rank for ranks in stages for rank in ranks}) or (0,)
        stages.insert(draw(st.integers(0, num_stages - 1)), left)
        holders.append(tuple(stages))
    return Placement(tuple(holders))


@st.composite
def tables(draw: st.DrawFn, max_microbatches: int = 9) -> tuple[Table, Placement]:
    """Any schedule that the package has, on any placement that suits it."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    num_microbatches = draw(st.integers(1, max_microbatches))
    directions = draw(st.integers(1, 2))
    if name == "interleaved":
        groups = Placement.row(draw(st.lists(st.integers(1, 2), min_size=1, max_size=4)), directions).holders
        chunks = draw(st.integers(2, 3))
        placement = Placement(tuple(stages * chunks for stages in groups))
    else:
        placement = draw(placements(directions))
    if directions == 2:
        return gems(placement, num_microbatches, draw(st.integers(1, 3)), SCHEDULES[name]), placement
    return SCHEDULES[name](placement, num_microbatches), placement


def can_be_played(table: Table, placement: Placement, seed: int) -> bool:
    """Let a rank at random do its next action, if all who share it have come to it and its messages have arrived."""
    random = Random(seed)
    position, done = [0] * len(table), set()
    while True:
        heads = {rank: row[position[rank]] for rank, row in enumerate(table) if position[rank] < len(row)}
        if not heads:
            return True
        able = [
            action
            for action in heads.values()
            if all(heads.get(rank) == action for rank in placement.ranks_of(action))
            and done.issuperset(needs(action, placement.num_stages))
        ]
        if not able:
            return False
        action = random.choice(able)
        done.add(action)
        for rank in placement.ranks_of(action):
            position[rank] += 1
