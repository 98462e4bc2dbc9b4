"""The part of a model on one rank: its stages, each with the grid of the ranks that share it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.pipeline.decisions import Watch, changed, hidden_tensors
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas.groups import Elements
from mpi4dl.parallel.spatial.grid import Grid, Layout, PartPlace
from mpi4dl.parallel.tensor.styles import NOT_CUT, Cuts, Cutting, Styles, cutting_of, names_by_first

if TYPE_CHECKING:
    from mpi4dl.parallel.costs.cost_model import StageCosts

# Holders of the same parameters: the ranks of a stage, of several stages that use one, or those with the same part.
#
# stage 0    embedding  blocks                   ranks 0 1      its own: blocks, on 0 1
# stage 1                       blocks  head     ranks 2 3      its own: blocks, on 2 3
#                |________ tied _________|                      of both: embedding = head, on 0 2 1 3


class ParameterGroup(NamedTuple):
    """Parameters, by name, that the ranks of `comm` hold alike, since each of them works on some of `stages`.

    `zero` and `copies` are how these ranks share them out, as Plan.zero_at says. Where parameters are cut, `across` are
    the ranks that have all parts of them, this one among them, in the order of the parts.
    """

    stages: tuple[int, ...]
    comm: Communicator
    parameters: list[tuple[str, nn.Parameter]]
    zero: int
    copies: int
    across: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One stage of one direction on this rank. `plain`: it works on plain tensors, not on SpatialTensors."""

    direction: int
    stage: int
    module: nn.Module
    grid: Grid
    plain: bool

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that it hands on."""
        return self.module.stage_program.outputs if isinstance(self.module, Stage) else ()


class LocalStages(nn.Module):
    """This rank's stages of a model that is laid over `comm` by `plan`; `parameters()` are those to optimize.

    `outline` is the whole model, of which names and shapes count, not values. Copies of a stage that one rank holds in
    both directions are one module. `shared` are the stages of each parameter that several use, by the first name that
    it has in the model. To `device` they are moved once they are cut, so that it never has the whole of what is.
    Collective.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        outline: nn.Module,
        plan: Plan,
        comm: Communicator,
        counts: tuple[int, ...] = (),
        names: tuple[str, ...] = (),
        costs: "StageCosts | None" = None,
        stream: Any = None,
        styles: Styles | None = None,
        shared: Mapping[str, tuple[int, ...]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        with comm.together((ValueError,)):
            self._describe(modules, outline, plan, comm)
        comm.agree(None, plan=plan)  # by which ranks form groups
        self.counts, self.names, self.costs, self.stream = counts, names, costs, stream
        self.watched: list[tuple[Watch, Any, Any]] = []
        self.parts: dict[tuple[int, int], Part] = {}
        for direction in range(plan.num_directions):
            for stage in range(plan.num_stages):
                ranks = plan.partners(comm.rank, direction, stage)
                if comm.rank in ranks:
                    grid = plan.grid_of(stage, comm.subset(ranks))
                    grid.halo_prefetch.steps = True
                    part = Part(direction, stage, self.modules_of[stage], grid, plan.is_plain(stage))
                    self.parts[direction, stage] = part
        # Those who hold a stage, in either direction, hold the same parameters.
        # Ranks of both directions come to the ends of their stages in opposite orders.
        ordered = not plan.bidirectional
        self.groups = {stage: comm.subset(plan.holders(stage), ordered) for stage in sorted(self.modules_of)}
        self.cutting = NOT_CUT  # how parameters are cut
        self.layouts: dict[str, Layout] = {}  # of those that modules see whole
        self.shared = dict(shared or {})
        with comm.together((ValueError,)):
            cutting = cutting_of(outline, styles, plan.degrees) if plan.num_ranks > 1 else NOT_CUT
            for module in self.modules_of.values() if cutting else ():
                cut = {id(module.get_parameter(name)): name for name in cutting.of(module)}
                kept = next((cut[id(x)] for x in hidden_tensors(module) if id(x) in cut), None)
                if kept is not None:
                    raise ValueError(
                        f"ranks are to have parts of {kept}, but the model has it also in an attribute that is no "
                        "parameter: read it from its module in each call"
                    )
        if cutting:
            self._cut(cutting)
        if device is not None:
            self.to(device)
        self.together = tuple(self._sharing())

    def _describe(self, modules: Mapping[int, nn.Module], outline: nn.Module, plan: Plan, comm: Communicator) -> None:
        """Take what is known without other ranks: the modules of this one, and what the whole model consists of."""
        if plan.num_ranks != comm.size:
            raise Refusal(plan.wrong_world(comm.size))
        self.plan, self.comm = plan, comm
        self.modules_of = dict(modules)
        self.stages = nn.ModuleList(modules.values())
        if next(self.parameters(), None) is None:
            self.nothing = nn.Parameter(torch.empty(0))  # optimizers want at least one
        state = outline.state_dict()
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise Refusal(
                    f"{name} of the model is no tensor ({type(value).__name__}): extra state is not supported"
                )
            if nn.parameter.is_lazy(value):
                raise Refusal(f"{name} of the model has no shape yet: run the model once before it is split over ranks")
        self.shapes = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        self.ties = _ties(outline)
        self.names_of = names_by_first(outline)  # all names of each parameter
        self.trained = frozenset(name for name, p in outline.named_parameters() if p.requires_grad)
        self.num_parameters = sum(p.numel() for p in outline.parameters())

    @property
    def _place(self) -> PartPlace:
        return next(iter(self.parts.values())).grid.place

    def _cut(self, cutting: Cutting) -> None:
        """Cut the parameters of all stages, which come from rank 0."""
        from mpi4dl.parallel.tensor.cutting import cut_parameters

        found: dict[str, Cuts] = {}
        for same in self.names_of.values():  # a tied one is cut alike wherever it is
            how = next((cuts for name, cuts in cutting.parameters.items() if name in same), None)
            if how is not None:
                found |= dict.fromkeys(same, how)
        self.cutting = replace(cutting, parameters=found)
        for stage, module in self.modules_of.items():
            for value in [*module.parameters(), *module.buffers()]:
                self.groups[stage].broadcast(value.data)
            grid = next(part.grid for (_, number), part in self.parts.items() if number == stage)
            self.layouts |= cut_parameters(module, self.cutting, grid)

    def _sharing(self) -> Iterator[ParameterGroup]:
        """This rank's parameters, in an order in which all ranks come to those they have in common. Collective."""
        axes, place, shared = self.cutting.axes, self._place, self.shared
        several = {name for first in shared for name in self.names_of[first]}
        cut = [axis for axis, (_, count) in place._asdict().items() if count > 1]
        parts = [along for number in range(len(cut) + 1) for along in combinations(cut, number)]
        for stage, module in self.modules_of.items():
            own = [(name, p) for name, p in module.named_parameters() if name not in several]
            for along in parts:
                yield self._with_holders((stage,), along, [(name, p) for name, p in own if axes(name) == along])
        for stages in sorted({each for each in shared.values() if not self.modules_of.keys().isdisjoint(each)}):
            for along in parts:
                firsts = [first for first in self.names_of if shared.get(first) == stages and axes(first) == along]
                named = [(first, p) for first in firsts if (p := self._become_one(first)) is not None]
                if firsts:
                    yield self._with_holders(stages, along, named)

    def _with_holders(
        self, stages: tuple[int, ...], along: Sequence[str], named: list[tuple[str, nn.Parameter]]
    ) -> ParameterGroup:
        """Parameters of these stages, cut along these axes, with the ranks that have this rank's part of them."""
        every = product(*(range(getattr(self._place, axis)[1]) for axis in along))
        parts = {numbers: dict(zip(along, numbers, strict=True)) for numbers in every}
        own = tuple(getattr(self._place, axis)[0] for axis in along)
        holders = {numbers: self.plan.holders(*stages, part=part) for numbers, part in parts.items()}
        number = holders[own].index(self.comm.rank)
        across = tuple(ranks[number] for ranks in holders.values())
        if len(stages) == 1 and not along:
            comm = self.groups[stages[0]]
        else:
            comm = self.comm.subset(holders[own], ordered=not self.plan.bidirectional)
        return ParameterGroup(stages, comm, named, *self.plan.zero_at(*stages, part=parts[own]), across)

    def _become_one(self, first: str) -> nn.Parameter | None:
        """Let all stages of this rank that use a parameter, by whatever name, have the same; None if none does."""
        found: nn.Parameter | None = None
        for module in self.modules_of.values():
            for name in self.names_of[first]:
                path, _, leaf = name.rpartition(".")
                try:
                    holder = module.get_submodule(path)
                except AttributeError:
                    continue
                known = holder._parameters.get(leaf)
                if known is not None:
                    found = known if found is None else found
                    holder._parameters[leaf] = found
        return found

    def runs(self, name: str, start: int, stop: int) -> Iterator[Elements]:
        """Where elements of what this rank has of a parameter, flattened, are in the whole."""
        cuts = self.cutting.parameters.get(name, ())
        if not cuts:
            return iter([Elements(0, start, stop)])
        from mpi4dl.parallel.tensor.cutting import ParameterPart

        return ParameterPart.of(cuts, self.shapes[name][0], self._place).runs(start, stop)

    @classmethod
    def whole(
        cls,
        model: nn.Module,
        plan: Plan,
        comm: Communicator,
        stream: Any = None,
        styles: Styles | None = None,
        device: torch.device | str | None = None,
    ) -> "LocalStages":
        """The whole model, for a plan of one stage. It need not be traceable. `stream` says how it streams images.

        `styles` say how parameters are cut under tensor parallelism (None: by the table for models of this class),
        before what is left of the model goes to `device` (None: it stays where it is).
        """
        if plan.num_stages != 1:
            raise Refusal(f"{plan} cuts the model: pass what mpi4dl.split returns, not the model")
        return cls({0: model}, model, plan, comm, stream=stream, styles=styles, device=device)

    def watch(self, model: nn.Module, watched: Sequence[Watch]) -> None:
        """Have those attributes of a model that its forward read, so that a change of them is refused."""
        for watch in watched:
            if watch.place is None and not watch.path and not hasattr(self, watch.names[0]):
                setattr(self, watch.names[0], getattr(model, watch.names[0]))
                self.watched.append((watch, None, watch.now(self)))
                if watch.names[0] not in vars(model):  # an attribute of the class
                    self.watched.append((watch, type(model), watch.now(type(model))))

    def changes(self) -> Iterator[str]:
        """Messages about values of Python that changed since the model was cut."""
        yield from (changed(watch) for watch, place, found in self.watched if watch.now(place or self) != found)
        for module in self.modules_of.values():
            if isinstance(module, Stage):
                yield from module.changes()

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def own_state(self) -> dict[str, Tensor]:
        """The state of this rank's stages, under the model's own names."""
        return {name: value for module in self.modules_of.values() for name, value in module.state_dict().items()}


def _ties(model: nn.Module) -> dict[str, str]:
    """Names of values that are the same tensor as one of another name: that name, the first in the alphabet."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {name: min(same) for same in names.values() for name in same if name != min(same)}
