"""What a search for plans found, in words: a table of the fastest, and the command that starts each of them."""

import shlex
from collections.abc import Sequence

from mpi4dl._wording import aligned, counted
from mpi4dl.forecast.search import Ranking

SHOWN = 10


def ranked(
    found: Ranking, num_ranks: int, most_bytes: int | None, flags: Sequence[str], num_tokens: int | None = None
) -> list[str]:
    """The lines. `flags` are those of the command that are for the training; each plan replaces what it decides.

    Samples of text have so many tokens, of which its users count those that are trained each second.
    """
    too_large = f", {found.num_too_large} of which need more than {_mebibytes(most_bytes)}" if most_bytes else ""
    lines = [f"{counted(found.num_plans, 'plan')} for {counted(num_ranks, 'rank')} looked at{too_large}"]
    if not found.best:
        return [
            *lines,
            f"none fits; the smallest needs {_mebibytes(found.smallest.num_bytes)}: {found.smallest}",
        ]
    rows = [["", "tokens/s" if num_tokens else "images/s", "memory", "plan"]]
    best = found.best[:SHOWN]
    rows += [
        [str(i + 1), f"{each.samples_per_second * (num_tokens or 1):.3g}", _mebibytes(each.num_bytes), str(each)]
        for i, each in enumerate(best)
    ]
    timed = "atoms timed on this machine" if all(each.timed for each in best) else "by counted FLOPs where not timed"
    lines += [f"the fastest, simulated ({timed}; ranks with a core each), with the memory of the rank that needs most:"]
    lines += list(aligned(rows, left={"plan"}))
    if not num_tokens:
        lines += ["batch norm sees a microbatch: fewer of them train as one device would on more images at a time"]
    for i, each in enumerate(best):
        command = ["mpirun", "-n", str(num_ranks), "python", "-m", "mpi4dl.train", *each.flags(flags)]
        lines.append(f"{i + 1}: {shlex.join(command)}")
    return lines


def _mebibytes(num_bytes: int | None) -> str:
    return f"{(num_bytes or 0) / 2**20:,.0f} MiB"
