"""The continuous batch against a plain loop: the whole model on the whole text, token by token, in float64."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Refusal, world
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.models.bert import BERT
from mpi4dl.models.experts import Mixture
from mpi4dl.models.gpt import GPT
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.text.batcher import Batcher, Event, Usage
from mpi4dl.text.model import PagedModel, TokenPortion
from mpi4dl.text.options import Sampling
from tests.pool.ranks import Ranks, on_ranks

CONTEXT, END = 24, ByteTokenizer.end
LEARNED = {"num_heads": 4, "hidden": 16}
ROTARY = {"num_heads": 4, "num_kv_heads": 2, "hidden": 24, "positions": "rotary", "activation": "swiglu"}
FOUR_KEYS = {**ROTARY, "num_heads": 8, "num_kv_heads": 4, "hidden": 32, "tied": False}
APART = {**LEARNED, "separator": END}
MIXED = {**LEARNED, "mixture": Mixture(4, shared_experts=1, every=2, expert_dim=12)}
GREEDY = Sampling(max_tokens=7, temperature=0)
PROMPTS = ((5, 17, 200), (9,) * 11 + (3,), (), (77, END, 8, 9, END, 4, 5), (1, 2, 3, 4, 5, 6), (250, 60))


def build(options: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    model = GPT(257, CONTEXT, num_layers=2, **options).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # so that no two tokens are nearly as probable
    return model


def hold(comm: Communicator, plan: Plan, options: dict[str, Any]) -> LocalStages:
    if plan.num_stages == 1:
        return LocalStages.whole(build(options), plan, comm)
    return split(lambda: build(options), plan, comm, image=(1, CONTEXT))


@torch.no_grad()
def plain(model: GPT, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What a loop without a cache generates."""
    tokens = list(prompt) or [END]
    start = len(tokens)
    while len(tokens) < min(CONTEXT, start + num_tokens) and (len(tokens) == start or tokens[-1] != END):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[start:]


def generated(
    comm: Communicator, numbers: dict[str, Any], options: dict[str, Any], **batching: Any
) -> list[list[Event]] | None:
    """What all prompts get, each of which joins at another token of those before; afterwards all pages are free."""
    batcher = Batcher(
        hold(comm, Plan.of(tiles=((1,),), **numbers), options),
        comm,
        ByteTokenizer(),
        CONTEXT,
        page_size=4,
        separator=options.get("separator"),
        **batching,
    )
    if comm.rank:
        batcher.follow()
        return None
    heard: list[list[Event]] = [[] for _ in PROMPTS]

    def join(number: int) -> None:
        def hear(event: Event) -> None:
            heard[number].append(event)
            if len(heard[number]) == 1 + number % 3 or event.finish_reason:
                join_next()

        batcher.submit(PROMPTS[number], GREEDY, hear)

    waiting = iter(range(len(PROMPTS)))

    def join_next() -> None:
        number = next(waiting, None)
        if number is None:
            batcher.stop(drain=True)
        else:
            join(number)

    join_next()
    batcher.run()
    stats = batcher.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
    return heard


def check(heard: list[list[Event]], options: dict[str, Any]) -> None:
    model = build(options)
    for prompt, events in zip(PROMPTS, heard, strict=True):
        expected = plain(model, prompt, GREEDY.max_tokens)
        assert [event.token for event in events] == expected
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == ("stop" if expected[-1] == END else "length")
        assert events[-1].usage == Usage(len(prompt) or 1, len(expected))
        assert "".join(event.text for event in events) == ByteTokenizer().decode(expected)


@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ({"tensor": 2}, ROTARY),
        ({"stages": 2}, APART),
        ({"data": 2}, ROTARY),
        ({"experts": 2}, MIXED),
        pytest.param({"experts": 4}, MIXED, marks=pytest.mark.exhaustive),
        pytest.param({"experts": 2, "data": 2}, MIXED, marks=pytest.mark.exhaustive),
        pytest.param({"experts": 2, "stages": 2}, MIXED, marks=pytest.mark.exhaustive),
        pytest.param({"experts": 2, "tensor": 2}, MIXED, marks=pytest.mark.exhaustive),
        pytest.param({"experts": 2, "tensor": 2, "moe": "expert"}, MIXED, marks=pytest.mark.exhaustive),
        pytest.param({"tensor": 2}, APART, marks=pytest.mark.exhaustive),
        pytest.param({"data": 2}, APART, marks=pytest.mark.exhaustive),
        pytest.param({"tensor": 4}, LEARNED, marks=pytest.mark.exhaustive),
        pytest.param({"tensor": 4}, FOUR_KEYS, marks=pytest.mark.exhaustive),
        pytest.param({"stages": 2, "tensor": 2}, FOUR_KEYS, marks=pytest.mark.exhaustive),
        pytest.param({"stages": 2, "data": 2}, LEARNED, marks=pytest.mark.exhaustive),
        pytest.param({"data": 2, "tensor": 2}, ROTARY, marks=pytest.mark.exhaustive),
        pytest.param({"stages": 4}, LEARNED, marks=pytest.mark.exhaustive),
    ],
)
def test_by_every_plan(ranks: Ranks, numbers: dict[str, Any], options: dict[str, Any]) -> None:
    num_ranks = Plan.of(tiles=((1,),), **numbers).num_ranks
    check(ranks(num_ranks).run(generated, numbers, options)[0], options)


@pytest.mark.parametrize("options", [LEARNED, APART, ROTARY, MIXED])
@pytest.mark.parametrize("batching", [{}, {"prefill_chunk": 5}, {"max_batch": 1}, {"num_pages": 7}])
def test_whoever_else_is_in_the_batch(options: dict[str, Any], batching: dict[str, int]) -> None:
    """All in one batch, by parts of prompts, one after another, or waiting for pages."""
    heard = generated(world(), {}, options, **batching)
    assert heard is not None
    check(heard, options)


@pytest.mark.parametrize("options", [LEARNED, ROTARY])
def test_logits_of_a_text_in_parts(options: dict[str, Any]) -> None:
    model = PagedModel(hold(world(), Plan.of(tiles=((1,),)), options), world(), page_size=2)
    tokens = torch.tensor([[7, 3, 99, 3, 120, 8]])

    def after(start: int, stop: int) -> Tensor | None:
        return model.run([TokenPortion(0, 0, start, tuple(tokens[0, start:stop].tolist()), 6, stop > 3)])

    assert after(0, 3) is None
    found = [after(3, 5), after(5, 6)]
    with torch.no_grad():
        whole = build(options)(tokens)[0]
    for logits, expected in zip(found, whole[4:], strict=True):
        assert logits is not None
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-12)


def test_a_model_is_given_back_as_it_was() -> None:
    held = hold(world(), Plan.of(tiles=((1,),)), LEARNED).train()
    Batcher(held, world(), ByteTokenizer(), CONTEXT).close()
    tokens = torch.tensor([[7, 3, 99]])
    assert held.training
    assert torch.equal(held.modules_of[0].eval()(tokens), build(LEARNED)(tokens))


class Listening:
    """A batch on one rank, and what was heard of each request."""

    def __init__(self, **batching: Any) -> None:
        held = hold(world(), Plan.of(tiles=((1,),)), LEARNED)
        self.batcher = Batcher(held, world(), ByteTokenizer(), CONTEXT, page_size=4, **batching)
        self.heard: dict[int, list[Event]] = {}

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, then: Any = lambda event: None) -> int:
        def hear(event: Event) -> None:
            self.heard.setdefault(event.request_id, []).append(event)
            then(event)

        return self.batcher.submit(prompt, sampling, hear)

    def run(self) -> None:
        self.batcher.stop(drain=True)
        self.batcher.run()


def test_cancelling_frees_pages_for_others() -> None:
    there = Listening(num_pages=8)
    used: list[int] = []

    def cancel_both(event: Event) -> None:
        used.append(there.batcher.stats().pages_used)
        if len(used) == 3:
            there.batcher.cancel(long)
            there.batcher.cancel(waits)

    long = there.submit((5, 17), replace(GREEDY, max_tokens=20), cancel_both)  # 21 tokens are kept, in 6 pages
    waits = there.submit((5, 17), replace(GREEDY, max_tokens=20))  # has no room beside it
    last = there.submit((5, 17), GREEDY, lambda event: used.append(there.batcher.stats().pages_used))
    there.batcher.cancel(99)
    there.run()
    expected = plain(build(LEARNED), (5, 17), 20)
    assert [event.token for event in there.heard[long]] == [*expected[:3], None]
    assert there.heard[long][-1].finish_reason == "cancelled"
    assert there.heard[long][-1].usage == Usage(2, 3)
    assert [(e.token, e.finish_reason, e.usage) for e in there.heard[waits]] == [(None, "cancelled", Usage(2, 0))]
    assert [event.token for event in there.heard[last]] == expected[:7]
    assert used == [6, 6, 6] + [2] * 7 + [0]  # the last one joined in the step behind the cancellation


def test_requests_that_are_cancelled_before_they_run() -> None:
    there = Listening()
    left = 2000  # more than a stack has room for

    def ask_and_cancel(event: Event) -> None:
        nonlocal left
        left -= 1
        if left:
            there.batcher.cancel(there.submit((5,), GREEDY, ask_and_cancel))
        else:
            there.batcher.stop()

    there.batcher.cancel(there.submit((5,), GREEDY, ask_and_cancel))
    there.batcher.run()
    assert left == 0
    assert there.batcher.stats().steps == 0


def test_the_context_is_the_end() -> None:
    there = Listening()
    full = there.submit((8,) * (CONTEXT - 2), replace(GREEDY, max_tokens=9))
    there.run()
    assert [e.token for e in there.heard[full]] == plain(build(LEARNED), (8,) * (CONTEXT - 2), 9)
    assert len(there.heard[full]) == 2
    assert there.heard[full][-1].finish_reason == "length"


def test_stop_strings_end_a_request() -> None:
    tokens = plain(build(LEARNED), (5, 17), 7)
    text = ByteTokenizer().decode(tokens)
    there = Listening()
    found = there.submit((5, 17), replace(GREEDY, stop=(text[3:5], "never")))
    there.run()
    assert there.heard[found][-1].finish_reason == "stop"
    assert "".join(event.text for event in there.heard[found]) == text[: text.index(text[3:5])]


def test_draws_are_of_the_request_alone() -> None:
    sampling = Sampling(max_tokens=7, seed=4, temperature=1.5)
    alone, together = Listening(), Listening()
    one = alone.submit((5, 17), sampling)
    alone.run()
    for seed in (1, 2):
        together.submit((9, 9, 9), replace(sampling, seed=seed))
    same, other = together.submit((5, 17), sampling), together.submit((5, 17), replace(sampling, seed=5))
    together.run()

    def tokens(events: list[Event]) -> list[int | None]:
        return [event.token for event in events]

    assert tokens(alone.heard[one]) == tokens(together.heard[same]) != tokens(together.heard[other])
    with torch.no_grad():
        shares = build(LEARNED)(torch.tensor([[5, 17]]))[0, -1].log_softmax(0)
    first = alone.heard[one][0]
    assert first.logprob == pytest.approx(float(shares[first.token]), abs=1e-10)


def late(comm: Communicator) -> list[int]:
    """Requests that come when nothing is under way, from another thread; the last one is cut by a stop."""
    batcher = Batcher(hold(comm, Plan.of(tiles=((1,),), tensor=comm.size), LEARNED), comm, ByteTokenizer(), CONTEXT)
    if comm.rank:
        batcher.follow()
        return []
    tokens: list[int] = []

    def ask() -> None:
        for _ in range(2):
            ended = threading.Event()

            def hear(event: Event, ended: threading.Event = ended) -> None:
                tokens.append(-1 if event.token is None else event.token)
                if event.finish_reason:
                    ended.set()

            batcher.submit((5, 17), GREEDY, hear)
            ended.wait()
        batcher.submit((5, 17), GREEDY, lambda event: batcher.stop(drain=False))

    thread = threading.Thread(target=ask)
    thread.start()
    batcher.run()
    thread.join()
    with pytest.raises(RuntimeError, match="stopping"):
        batcher.submit((1,), GREEDY, print)
    return tokens


def test_requests_that_come_later(ranks: Ranks) -> None:
    assert ranks(2).run(late)[0] == plain(build(LEARNED), (5, 17), 7) * 2


def test_what_can_never_fit() -> None:
    batcher = Listening(num_pages=3).batcher
    with pytest.raises(ValueError, match="has 24 tokens, but prompt and generated tokens together can be 24"):
        batcher.submit((1,) * CONTEXT, GREEDY, print)
    with pytest.raises(ValueError, match="need 4 pages of 4 tokens, but there are 3"):
        batcher.submit((1,) * 8, GREEDY, print)
    with pytest.raises(ValueError, match="token 257 is unknown: tokens are from 0 to 256"):
        batcher.submit((1, 257), GREEDY, print)


@on_ranks(2)
def test_models_and_plans_that_write_no_text(comm: Communicator) -> None:
    tiles, both_ways = Plan.of(tiles=((2,),)), Plan.of(tiles=((1,),), data=2)
    for plan, model, said in (
        (tiles, build(LEARNED), "cuts sequences, but text is generated by stages, tensor and data ranks alone"),
        (both_ways, BERT(9, 8, 1, 2, hidden=8), "attention looks back only; this model is none"),
    ):
        with pytest.raises(Refusal, match=said):
            Batcher(LocalStages.whole(model, plan, comm), comm, ByteTokenizer(), CONTEXT)
