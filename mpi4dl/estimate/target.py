"""The machine that a training is planned for: this one, or another one, described by a file, with its own timings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpi4dl.options.declare import ConfigError, option
from mpi4dl.options.kinds import NAME, choice, optional

if TYPE_CHECKING:
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.costs.machine import Machine
    from mpi4dl.parallel.costs.scaled import TimingsFile

FEW = 64  # ranks of this machine, up to which each shape of tile is timed as it is


@dataclass(frozen=True)
class OnMachine:
    """Another machine, and what is known of computation there."""

    machine: str | None = option(
        None,
        "TOML file that describes the machine, as `mpi4dl doctor --save` writes it; none: this one",
        optional(NAME),
        flag_only=True,
    )
    timings: str | None = option(
        None,
        "file of the times of the model's layers, made elsewhere by --time-only; none: timed here, or by the machine's "
        "rates",
        optional(NAME),
        flag_only=True,
    )
    time_only: str | None = option(
        None, "time the model's layers on small tiles, write them to this file, and end", optional(NAME), flag_only=True
    )
    scaling: str | None = option(
        None,
        "curves of the fastest plans from few ranks to --ranks: strong, of the same batch, or weak, whose batch grows "
        "with the ranks; none: no curves",
        optional(choice("strong", "weak")),
        flag_only=True,
    )
    curves: str = option("scaling.png", "file for the picture of --scaling", NAME, flag_only=True)


@dataclass(frozen=True)
class PlanTarget:
    """Where a training is planned to be: on this machine, or on another one, whose layers were timed elsewhere."""

    machine: "Machine | None" = None
    timings: "TimingsFile | None" = None

    @classmethod
    def of(cls, asked: OnMachine) -> "PlanTarget":
        """Raises ConfigError for files that cannot be read, or are none of these."""
        machine = None
        if asked.machine is not None:
            from mpi4dl.estimate.machine_file import load_machine

            machine = load_machine(asked.machine)
        if asked.timings is None:
            return cls(machine)
        from mpi4dl.parallel.costs.scaled import TimingsFile

        try:
            return cls(machine, TimingsFile.load(asked.timings))
        except OSError as error:
            raise ConfigError(f"--timings {asked.timings}: {error.strerror}") from None

    @property
    def num_ranks(self) -> int | None:
        """How many the machine has, if it is another one."""
        return None if self.machine is None else self.machine.num_ranks

    @property
    def told(self) -> "tuple[Machine, str] | None":
        """The machine, with words about its links."""
        return None if self.machine is None else (self.machine, f"the links of {self.machine.name}")

    def most_bytes(self, asked: int | None) -> int | None:
        """The memory of a rank."""
        return asked if asked is not None or self.machine is None else self.machine.memory

    def profiler(self, profiler: "Profiler", num_ranks: int) -> "Profiler":
        """What finds the costs of units there, of which few are timed where there are many ranks."""
        from mpi4dl.parallel.costs.scaled import for_machine

        if self.machine is None and self.timings is None and num_ranks <= FEW:
            return profiler
        return for_machine(profiler, self.machine, self.timings)

    def words(self) -> Iterator[str]:
        if self.machine is not None:
            yield self.machine.describe()
