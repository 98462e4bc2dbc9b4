"""How the images of a run are streamed, as the flags say, or as the limit of memory does."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpi4dl.forecast.dry_run import build_forecaster
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.parallel.costs.prices import Clockwork
from mpi4dl.parallel.pipeline.held import ChooseStream
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.choice import mebibytes, words
from mpi4dl.parallel.streaming.opening import StreamOptions


def stream_of(
    config: Config, plan: Plan, num_classes: int, channels: int, device: torch.device
) -> StreamOptions | ChooseStream | None:
    """How the images are streamed; None if they are not. Raises ConfigError where options contradict each other.

    Where that is to be chosen, it is what chooses for stages of so many atoms, alike on all ranks.
    """
    chosen, limit = config.parallel, config.parallel.memory_limit
    asked = chosen.stream
    if asked is None and chosen.stream_until is not None:
        raise ConfigError(f"`stream_until` {chosen.stream_until} says where streaming ends, but `stream` is missing")
    if asked == "auto" and limit is None:
        raise ConfigError("`stream` auto needs `memory_limit`: within what a rank's memory is to stay, such as 6GiB")
    if asked != "auto" and limit is not None:
        raise ConfigError(f"`memory_limit` {mebibytes(limit)} is for `stream` auto, which chooses the visits by it")
    if asked is None:
        return None
    if not isinstance(asked, str):
        return StreamOptions(asked, chosen.stream_until, chosen.stream_norm, chosen.stream_segments or 1)
    if plan.bidirectional and chosen.stream_norm != "exact":
        raise ConfigError("copies in both directions share their statistics later: stream with `stream_norm` exact")
    forecaster = build_forecaster(config, num_classes, channels, Clockwork.of_user(), device)

    def choose(cuttable: Cuttable, counts: Sequence[int]) -> StreamOptions:
        found = forecaster.visits(plan, counts, limit or 0, any_zero=False)
        foreseen = f"{mebibytes(found.num_bytes)} foreseen of {mebibytes(limit or 0)}"
        return replace(found.options, remark=f"`stream` auto: {words(found)}, {foreseen}")

    return choose
