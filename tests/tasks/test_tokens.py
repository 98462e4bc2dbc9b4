"""Losses of tokens that ranks share: those of the whole batch, and no rank ever has the logits of all tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Runner
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.formulas import OfHeads, TokenCrossEntropy
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close, tiles_of

VOCABULARY, LENGTH, HIDDEN = 96, 7, 4
IGNORED = -100
WEIGHTS = tuple(float(w) for w in torch.linspace(0.1, 2, VOCABULARY))


def flat_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.view(-1, VOCABULARY), targets.reshape(-1))


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """As models of Hugging Face have it, whose targets are their inputs: the first token has no prediction."""
    return F.cross_entropy(outputs[:, :-1].reshape(-1, VOCABULARY), targets[:, 1:].reshape(-1), label_smoothing=0.2)


def padded(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same by labels that are shifted, the last of which does not count."""
    wanted = F.pad(targets, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(outputs.float().double().flatten(0, 1), wanted.flatten())


def logarithms(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = F.log_softmax(outputs.reshape(-1, VOCABULARY), -1)
    return F.nll_loss(rows, targets.reshape(-1), weight=torch.tensor(WEIGHTS, dtype=rows.dtype))


def chosen(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy by hand, with a penalty of large sums (z-loss) and one of confidence."""
    rows, wanted = outputs.reshape(-1, VOCABULARY), targets.reshape(-1)
    counts = (wanted != IGNORED).to(rows.dtype)
    sums = rows.logsumexp(-1)
    surprise = sums - rows.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
    confidence = rows.softmax(-1).amax(-1) + rows.softmax(-1).square().sum(-1) + rows.std(-1)
    each = surprise + 1e-2 * sums.square() + 0.1 * confidence
    return (each * counts).sum() / counts.sum()


def by_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples of each one's mean over its tokens, from losses of single tokens."""
    each = F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none").view(targets.shape)
    return (each.sum(1) / (targets != IGNORED).sum(1)).mean()


def preferred(outputs: Tensor, targets: Tensor) -> Tensor:
    """By how much one half of the samples is likelier than the other, as in DPO."""
    logarithms = outputs[:, :-1].log_softmax(-1).gather(-1, targets[:, 1:, None]).squeeze(-1).sum(-1)
    first, second = logarithms.chunk(2)
    return -F.logsigmoid(first - second).mean()


def distilled(outputs: Tensor, targets: Tensor) -> Tensor:
    """How far the tokens are from a teacher's, whose logits are those before."""
    rows = outputs.reshape(-1, VOCABULARY)
    teacher = rows.detach().roll(1, 1)
    return F.kl_div(F.log_softmax(rows, -1), teacher.softmax(-1), reduction="batchmean") + F.mse_loss(rows, teacher)


@dataclass(frozen=True)
class Case:
    """A loss of one's own, or (`options`) that of the project, and how often a target does not count."""

    name: str
    loss: Callable[[Any, Tensor], Tensor] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    ignored: float = 0.0

    def objective(self) -> Any:
        return self.loss or OfHeads(TokenCrossEntropy(**dict(self.options)))

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss is not None:
            return self.loss(outputs, targets)
        options = dict(self.options)
        weights = options.pop("class_weights", None)
        weights = None if weights is None else torch.tensor(weights, dtype=outputs.dtype)
        return F.cross_entropy(outputs.movedim(-1, 1), targets, weights, **options)

    def batch(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < self.ignored] = IGNORED
        if self.ignored:
            targets[0, :4] = IGNORED
        return tokens[:, :-1], targets

    def __str__(self) -> str:
        return self.name


PLAIN = Case("cross_entropy")
ALL = Case("weights, ignored", options=(("class_weights", WEIGHTS),), ignored=0.4)
SMOOTH = Case("weights, ignored, smoothed", None, (("class_weights", WEIGHTS), ("label_smoothing", 0.1)), 0.4)
OWN = [
    Case("flat", flat_loss, ignored=0.2),
    Case("shifted", shifted),
    Case("padded", padded),
    Case("nll", logarithms, ignored=0.2),
    Case("by hand", chosen, ignored=0.2),
    Case("by sample", by_sample, ignored=0.2),
    Case("preferred", preferred),
    Case("distilled", distilled),
]
CASES = [PLAIN, ALL, SMOOTH, *OWN]
CONTEXT_2, CONTEXT_3 = Plan(((2,),)), Plan(((3,),))
PLANS = {
    "context 2": CONTEXT_2,
    "context 3": CONTEXT_3,
    "context 2, ways": Plan(((2,),), batch_ways=(2,)),
    "context 2, data 2, ZeRO 2": Plan(((2,),), data=2, zero=2),
    "context 2, data 2, ZeRO 3": Plan(((2,),), data=2, zero=3),
    "stages": Plan(((1,), (2,)), microbatches=2),
    "stages of context": Plan(((2,), (2,)), microbatches=3),
    "accumulation": Plan(((3,),), microbatches=2),
}
OF_PARTS = {  # of the vocabulary, and of the tokens between
    "context 2, tensor 2": Plan(((2,),), tensor=2),
    "context 2, tensor 2, sequence": Plan(((2,),), tensor=2, sequence=True),
}
COUNT = 6


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return models.build("gpt", vocabulary=VOCABULARY, hidden=HIDDEN, num_layers=2, num_heads=2, context=LENGTH).double()


def by_plain_pytorch(case: Case, num_parts: int) -> tuple[list[float], nn.Module]:
    """Two steps, and the loss of a validation. A function of one's own is the mean over microbatches."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(3):
        tokens, targets = case.batch(number, COUNT)
        parts = zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True)
        with torch.set_grad_enabled(number < 2):
            loss = torch.stack([case.plain(model(some), wanted) for some, wanted in parts]).mean()
        losses.append(float(loss.detach()))
        if number < 2:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses, model


class Largest(TorchDispatchMode):
    """The most tokens whose logits one tensor has, two halves of the vocabulary for one of them.

    The transposed weight of the last layer looks like HIDDEN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and not x.is_meta and x.dim() > 1 and x.shape[-1] in (VOCABULARY, VOCABULARY // 2):
                self.tokens = max(self.tokens, x.numel() // VOCABULARY)
        return result


def stages_of(comm: Communicator, plan: Plan) -> LocalStages:
    if plan.num_stages > 1:
        return split(model_of, plan, comm, seed=0, image=(COUNT, LENGTH))
    return LocalStages.whole(model_of(), plan, comm)


def on_ranks(comm: Communicator, case: Case, plan: Plan) -> tuple[list[float], Any, int]:
    held = stages_of(comm, plan)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.5), case.objective(), comm=comm)
    losses = []
    with Largest() as largest:
        for number in range(2):
            tokens, targets = case.batch(number, COUNT)
            losses.append(engine.step(tiles_of(tokens, engine), targets, (LENGTH,)).loss)
        tokens, targets = case.batch(2, COUNT)
        losses.append(engine.evaluate([(tiles_of(tokens, engine, training=False), targets)], (LENGTH,)).loss)
    engine.check_replicas()
    return losses, engine.gather_state(), largest.tokens


def agree(ranks: Ranks, case: Case, plan: Plan) -> None:
    parts = 1 if case.loss is None else plan.num_microbatches
    losses, model = by_plain_pytorch(case, parts)
    for found, state, num_tokens in ranks(plan.num_ranks).run(on_ranks, case, plan):
        assert found == pytest.approx(losses, rel=EXACT)
        for name, value in model.state_dict().items() if state else ():
            assert_close(state[name], value, EXACT, name)
        samples = COUNT // (plan.num_microbatches * plan.batch_ways[-1] * plan.data)
        assert num_tokens <= max(samples * -(-LENGTH // plan.tiles[-1][0]) // plan.tensor, HIDDEN)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rank_has_all_logits(ranks: Ranks, case: Case) -> None:
    agree(ranks, case, CONTEXT_3)


@pytest.mark.parametrize(
    ("case", "plan"), [(SMOOTH, "context 2, ways"), (ALL, "stages of context"), (OWN[1], "stages")], ids=str
)
def test_under_other_plans(ranks: Ranks, case: Case, plan: str) -> None:
    agree(ranks, case, PLANS[plan])


@pytest.mark.parametrize("plan", OF_PARTS)
@pytest.mark.parametrize("case", [PLAIN, ALL, SMOOTH, *OWN[:3]], ids=str)
@pytest.mark.sample(2)
def test_with_parts_of_the_vocabulary(ranks: Ranks, case: Case, plan: str) -> None:
    agree(ranks, case, OF_PARTS[plan])


class Hits:
    """How often the likeliest token is the next one."""

    def __init__(self) -> None:
        self.hits = self.count = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        counts = targets != IGNORED
        self.hits += int((logits.argmax(-1) == targets)[counts].sum())
        self.count += int(counts.sum())

    def merge_state(self, other: "Hits") -> None:
        self.hits, self.count = self.hits + other.hits, self.count + other.count

    def compute(self) -> float:
        return self.hits / self.count


def measure(comm: Communicator, plan: Plan) -> Any:
    engine = Runner(stages_of(comm, plan), plan, ALL.objective(), comm=comm)
    batches = [ALL.batch(number, COUNT - number) for number in range(2)]
    tiles = [(tiles_of(tokens, engine, training=False), targets) for tokens, targets in batches]
    return engine.evaluate(tiles, (LENGTH,), {"hits": Hits})


@pytest.mark.parametrize("plan", ["context 2, ways", "context 3", "stages of context"])
def test_a_metric_of_tokens(ranks: Ranks, plan: str) -> None:
    model, expected = model_of(), Hits()
    with torch.no_grad():
        for number in range(2):
            tokens, targets = ALL.batch(number, COUNT - number)
            expected.update(model(tokens), targets)
    for found in ranks(PLANS[plan].num_ranks).run(measure, PLANS[plan]):
        assert found.metrics == {"hits": pytest.approx(expected.compute())}


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_loss_under_every_plan(ranks: Ranks, case: Case, plan: str) -> None:
    if case.loss is not preferred or PLANS[plan].data * PLANS[plan].batch_ways[-1] == 1:  # it compares samples
        agree(ranks, case, PLANS[plan])
