"""What a trace does not see of a model's own forward: exact in stages and streamed, or refused before a step."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl._randomness import RandomStates
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline import checking
from mpi4dl.parallel.pipeline.checking import check_cut
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import NoRule
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.parallel.pipeline import unseen
from tests.parallel.pipeline.cutting import problem_of
from tests.pool.ranks import Ranks, on_ranks
from tests.support import short_runs
from tests.support.short_runs import Task

TWO = ((1, 1), (1, 1))
WAYS: dict[str, tuple[Plan, StreamOptions | None]] = {
    "stages": (Plan(TWO), None),
    "microbatches": (Plan(TWO, microbatches=2), None),
    "gems": (Plan(TWO, bidirectional=1), None),
    "streaming": (Plan(), StreamOptions((1, 2))),
    "tiles": (Plan(((1, 2),)), None),
    "zero3": (Plan(((1, 2),), zero=3), None),
}
AGAIN = "once more when torch.utils.checkpoint computes it again"
BUFFER = "changes its buffer"
REENTRANT = "use_reentrant=True"
# Beside those that are refused wherever a model is cut: what is, where, and why.
REFUSED = {
    "gems": {"Recomputing": AGAIN, "RecomputingReentrantly": AGAIN, "OldSpectralNorm": BUFFER, "Counting": BUFFER}
    | dict.fromkeys(("Turning", "TurningByAGlobal"), "copies in both directions differ")
    | {"Hooking": "changes its attribute backbone.is_hooked"},
    "streaming": {"Recomputing": AGAIN, "RecomputingReentrantly": AGAIN},
    "tiles": {"RecomputingReentrantly": REENTRANT},
    "zero3": {"Following": "with ZeRO 3", "RecomputingReentrantly": REENTRANT},
    "stages": {},
    "microbatches": {"Recomputing": AGAIN, "RecomputingReentrantly": AGAIN},
}


def outcomes_of(comm: Communicator, way: str) -> dict[str, str]:
    """By model what is wrong with its training, or why it is refused; nothing for what is exact."""
    plan, stream = WAYS[way]
    found = {}
    drawing = [unseen.Sampling] if way == "tiles" else []  # stages draw from streams of their own
    for kind in [*unseen.EXACT, *drawing, *unseen.REFUSED]:
        task = Task(kind, (20, 18), num_steps=2, stream=stream, loss=unseen.loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of reentrant checkpoints
            try:
                outcome = short_runs.train(comm, task, plan)
            except (NoRule, Refusal, ValueError) as refused:
                found[kind.__name__] = str(refused)
                continue
            if comm.rank == 0:
                try:
                    short_runs.assert_like(outcome, short_runs.plain(task, plan.num_microbatches))
                except AssertionError as error:
                    found[kind.__name__] = f"wrong: {error}"
    return found


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.exhaustive) if way in ("microbatches", "tiles") else way for way in WAYS],
)
def test_what_a_trace_does_not_see_is_exact_or_refused(ranks: Ranks, way: str) -> None:
    of_all = {kind.__name__: why for kind, why in unseen.REFUSED.items()} if way not in ("tiles", "zero3") else {}
    expected = {**REFUSED[way], **of_all}
    for found in ranks(WAYS[way][0].num_ranks).run(outcomes_of, way):
        assert found.keys() == expected.keys(), found
        for name, why in expected.items():
            assert why in found[name]


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_a_change_of_a_class_is_refused_on_all_ranks(comm: Communicator, num_ranks: int) -> None:
    """An attribute of a model's class changes between two steps."""
    found = []
    for plan, stream in WAYS.values():
        if plan.num_ranks != comm.size or (plan.num_stages == 1 and stream is None):
            continue
        task = Task(unseen.OfAClass, (20, 18), stream=stream)
        engine = short_runs.engine_of(comm, task, plan)
        short_runs.step(engine, task, 0)
        unseen.OfAClass.scale = 2.0
        try:
            short_runs.step(engine, task, 1)
        except Refusal as refused:
            found.append(str(refused))
        finally:
            unseen.OfAClass.scale = 1.0
    assert len(found) == 2 * num_ranks - 1  # streaming on one rank; stages, microbatches and GEMS on two
    assert all("the attribute scale of OfAClass has changed since the model was cut" in each for each in found)


class Large(unseen.Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2] < 100:
            raise ValueError("too small")
        return super().forward(x)


class Deciding(unseen.Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if x.shape[2] < 50 else x)


@pytest.mark.parametrize("kind", [unseen.Base, Large, Deciding])
def test_the_smallest_samples_that_a_model_takes_are_tried(kind: type[nn.Module], monkeypatch: Any) -> None:
    tried: list[tuple[int, ...]] = []
    made_up = checking.made_up
    monkeypatch.setattr(checking, "made_up", lambda *args: tried.append(args[1]) or made_up(*args))
    assert problem_of(kind, 2, (4, 3, 200, 180)) == ""
    assert tried[-1] == (2, 3, *{unseen.Base: (32, 32), Large: (128, 128), Deciding: (64, 64)}[kind])


def test_a_large_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MOST_PARAMETERS", 10)
    cuttable = Cuttable(outline(unseen.Base), image=(4, 3, 20, 18))
    found = check_cut(cuttable, [[cuttable.part(0, len(cuttable))]], unseen.Base, 0, (4, 3, 20, 18))
    assert found.left_out == "it has more than 10 parameters"


def test_a_model_that_takes_too_much_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "memory_of_node", lambda: 4000)
    cuttable = Cuttable(outline(unseen.Base), image=(4, 3, 20, 18))
    found = check_cut(cuttable, [[cuttable.part(0, len(cuttable))]], unseen.Base, 0, (4, 3, 20, 18))
    assert found.left_out == "2 copies of it would take more than half of this node's memory"


class Evaluating(unseen.Remembering):
    """Python that no trace sees, in evaluation alone."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else super().middle(x)


class Failing(unseen.Base):
    """Cannot evaluate."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x.view(7)


class Drawing(unseen.Base):
    """Draws where it is cut open, and in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.drop = unseen.Noise(), nn.Dropout(0.5)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.drop(self.noise(x)), 0.5, self.training)


def test_evaluation_is_compared_too() -> None:
    assert "an output differs in evaluation" in problem_of(Evaluating, 2, (4, 3, 20, 18))
    assert problem_of(Failing, 2, (4, 3, 20, 18)) == ""


def test_random_draws_are_no_difference_and_nothing_is_changed_or_held() -> None:
    made: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = Drawing()
        made.append(weakref.ref(model))
        return model

    before = RandomStates.now().digests()
    assert problem_of(build, "second", (4, 3, 20, 18)) == ""
    assert RandomStates.now().digests() == before
    gc.collect()
    assert len(made) == 4  # on the meta device, plain, and for each of two stages
    assert not any(each() is not None for each in made)


def test_differences_count_beside_the_largest_number() -> None:
    a = torch.tensor([1.0, -1000.0])
    assert not checking.differ(a, a + 1e-3)
    assert checking.differ(a, a + 1.0)
    assert checking.differ(a, None)
    assert checking.differ(a, a[:1])
    assert checking.differ(a, a.double())
    assert checking.differ(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert checking.differ(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0]))
    assert not checking.differ(torch.tensor([1e-9]), torch.tensor([0.0]), 1.0)
    assert not checking.differ(None, None)


@on_ranks(2)
def test_without_the_comparison_there_is_a_warning(comm: Communicator) -> None:
    """A model that the comparison would refuse is cut, with a warning."""
    expected = "Remembering in stages is not compared with the plain model"
    kind = unseen.Remembering
    with pytest.raises(ValueError, match="does not compute what it computes in one piece"):
        split(kind, Plan(TWO), comm, image=(2, 3, 20, 18))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split(kind, Plan(TWO), comm, image=(2, 3, 20, 18), check=False)
    assert "".join(str(each.message) for each in caught) == [expected, ""][comm.rank]
