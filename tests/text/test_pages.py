"""Memory of keys and values grows by pages with what requests have, and is freed; how tokens are packed into rows."""

import pytest
import torch

from mpi4dl.comm import world
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.models.gpt import GPT
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.text.batcher import Batcher, Event
from mpi4dl.text.model import PagedModel, TokenPortion, pack
from mpi4dl.text.options import Sampling


def held() -> LocalStages:
    torch.manual_seed(0)
    return LocalStages.whole(GPT(257, 64, 2, 2, hidden=16), Plan.of(tiles=((1,),)), world())


def test_memory_grows_with_tokens() -> None:
    """To what is needed, at least by half of what is there then, and to no more than may come to be needed."""
    model = PagedModel(held(), world(), page_size=2)

    def after(request: int, start: int, stop: int, most: int, ended: tuple[int, ...] = ()) -> int:
        model.run([TokenPortion(0, request, start, (1,) * (stop - start), most, True)], ended)
        return model.num_pages

    assert model.num_pages == 0
    assert [after(7, start, start + 1, 13) for start in range(13)] == [1, 1, 2, 2, 4, 4, 4, 4, 7, 7, 7, 7, 7]
    assert after(8, 0, 5, 60) == 7 + 3
    assert after(8, 5, 6, 60) == 7 + 3
    assert after(8, 6, 7, 60, ended=(7,)) == 6
    model.run([], (8,))
    assert model.num_pages == 0


def test_a_request_has_memory_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are set aside for all that may come; memory is there for what came, and none is left when all is over."""
    batcher = Batcher(held(), world(), ByteTokenizer(), 64, page_size=4, max_batch=2)
    seen: list[tuple[int, int]] = []
    steps: list[int] = []
    run = batcher._model.run

    def counted(portions: list[TokenPortion], ended: tuple[int, ...] = ()) -> torch.Tensor | None:
        found = run(portions, ended)
        steps.append(batcher._model.num_pages)
        return found

    def look(event: Event) -> None:
        seen.append((batcher.stats().pages_used, batcher._model.num_pages))
        if len(seen) == 6:
            batcher.cancel(event.request_id)

    monkeypatch.setattr(batcher._model, "run", counted)
    batcher.submit((5, 6, 7), Sampling(max_tokens=60, temperature=0, seed=1), look)
    batcher.stop(drain=True)
    batcher.run()
    assert seen[:6] == [(16, 1), (16, 1), (16, 2), (16, 2), (16, 2), (16, 2)]
    assert steps[-1] == 0


def test_tokens_whose_next_is_wanted_come_first() -> None:
    portions = [
        TokenPortion(0, 1, 3, (30,), 9, True),
        TokenPortion(0, 2, 0, (10, 11, 12), 9, True),
        TokenPortion(1, 3, 5, (50, 51), 9, False),
        TokenPortion(0, 4, 9, (90,), 99, True),
    ]
    packed = pack(portions, 2, 8)
    assert packed.tokens.tolist() == [[30, 12, 90, 10, 11, 0, 0, 0], [50, 51, 0, 0, 0, 0, 0, 0]]
    assert packed.positions.tolist() == [[3, 2, 9, 0, 1, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]]
    assert packed.columns == ((0,), (3, 4, 1), (0, 1), (2,))
    assert packed.num_wanted == 3
    of_nine = [TokenPortion(0, 0, 0, (1,) * 9, 9, False)]
    assert [pack(of_nine, 1, multiple).tokens.shape for multiple in (1, 8)] == [(1, 9), (1, 16)]
