"""What ranks have of the values of an engine: shard by shard as they own them, or whole on rank 0."""

from collections.abc import Iterator

from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import ReadShard, ReplicaGroups, Shard
from mpi4dl.parallel.replicas.groups import disagreement
from mpi4dl.parallel.replicas.whole import assemble


class Values:
    """Parameters, buffers, gradients and the optimizer's state of what `held` is, which `groups` share out."""

    held: Held
    groups: ReplicaGroups
    comm: Communicator
    plan: Plan

    def shards(self) -> Iterator[Shard]:
        """The parameters that this rank owns, with the optimizer's state; those of all ranks are each once."""
        return self.groups.shards()

    def load_shards(self, read: ReadShard) -> None:
        """Take the parameters and the optimizer's state from `read(name, start, stop)`. Collective.

        It is asked for every part that this rank works on, and gives its values, flat, and the state as in a Shard.
        """
        self.groups.load(read)

    def gather_state(self) -> dict[str, Tensor] | None:
        """The state of the whole model on rank 0, on the host, under its own names and in its own order. Collective."""
        held = self.held
        parts = list(self.shards())
        parts += [Shard(name, 0, value) for name, value in self.buffers().items()]
        found = assemble(self.comm, parts, held.shapes)
        if found is None:
            return None
        of_root = {held.ties.get(name, name): value for name, value in found.items()}
        return {name: of_root[held.ties.get(name, name)] for name in held.shapes}

    def gather_gradients(self) -> dict[str, Tensor | None] | None:
        """The gradient of each trained parameter in the last step, on rank 0; None where it had none. Collective."""
        found = assemble(self.comm, self.groups.gradients(), self.held.shapes)
        return (
            None if found is None else {name: found.get(name) for name in self.held.shapes if name in self.held.trained}
        )

    def check_replicas(self) -> None:
        """Raise `Refusal` on all ranks unless those that hold the same weights and buffers have the same bits of them.

        Under ZeRO 3 there is one copy of a parameter, and only buffers are compared. Collective.
        """
        problems = list(self.groups.problems())
        for stage, module in self.held.modules_of.items():
            problems.append(disagreement(self.held.groups[stage], dict(module.named_buffers())))
        problem = next((problem for problem in problems if problem), None)
        self.comm.agree(None if problem is None else f"replicas have come apart: {problem}")

    def buffers(self) -> dict[str, Tensor]:
        """Those of stages whose first holder is this rank."""
        held, learnt = self.held, {name for same in self.held.names_of.values() for name in same}
        return {
            name: value
            for stage, module in held.modules_of.items()
            if self.plan.ranks(0, stage)[0] == self.comm.rank
            for name, value in module.state_dict().items()
            if name not in learnt and name not in held.ties
        }
