"""Text that a model goes on with, token by token, under any plan: for a reader to see what it has learnt."""

import torch
from torch import Tensor

from mpi4dl.datasets.text import Tokenizer
from mpi4dl.engine import Engine
from mpi4dl.parallel import spatial
from mpi4dl.tasks.heads import main_output

TEMPERATURE = 0.8


def continued(engine: Engine, tokenizer: Tokenizer, prompt: str, context: int, num_tokens: int, seed: int = 0) -> str:
    """`prompt`, and so many tokens after it, each drawn by softmax(logits / 0.8); it may end before. Collective.

    The model sees the last `context` tokens, as in training. Tokens behind them, which are there to fill the sample,
    are not seen by causal attention.
    """
    tokens = [int(token) for token in tokenizer.encode(prompt)] if prompt else [tokenizer.end]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        shares = (_next_logits(engine, tokens[-context:], context) / TEMPERATURE).softmax(0)
        tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
        if tokens[-1] == tokenizer.end:
            break
    return tokenizer.decode(tokens)


def _next_logits(engine: Engine, tokens: list[int], context: int) -> Tensor:
    """The logits of the token after these, on all ranks."""
    size = (context,)
    sample = torch.tensor([tokens + [0] * (context - len(tokens))])
    tiles = [sample[tuple(slice(*side) for side in read.box)] for read in engine.reads(1, size, training=False)]
    last = len(tokens) - 1
    (outputs,) = engine.predict([(tiles, 1)], size, lambda logits: spatial.gather(main_output(logits))[:, last])
    return engine.comm.broadcast_object(None if outputs.whole is None else outputs.whole[0].double())
