"""Bytes of atoms as they will be kept: on the tile that a rank of their stage has, with its padded copies.

Counted on meta tensors, on one rank of a grid of which no other need exist. Nothing is computed, nothing allocated, but
for an atom that looks at values, such as a router's: it runs once on the CPU, with made-up ones.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpi4dl._randomness import forked
from mpi4dl.parallel.costs.meter import KnownValues, SavedTensors, TensorMeter, made_up_part, needs_values
from mpi4dl.parallel.costs.timing import Site, as_received, cut_at, imagined, input_at, local_part
from mpi4dl.parallel.inputs import of_tokens
from mpi4dl.parallel.pipeline.program import map_leaves, pack
from mpi4dl.parallel.pipeline.split import Cuttable, shapes_of
from mpi4dl.parallel.pipeline.stage import Stage, made_up_stage
from mpi4dl.parallel.spatial.tensor import SpatialTensor

# Attention on the meta device as devices compute it: fused, so that nothing of the size of its weights is kept.

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class FusedAttention(TorchFunctionMode):
    """Within it, attention of meta tensors is the kernel that PyTorch chooses on CPUs wherever it can.

    On the meta device PyTorch computes it by products, and keeps the weights of all pairs of tokens for backward. Where
    tokens are spread it stays so: there the rule computes attention again in backward, and keeps its inputs alone.
    """

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in ATTENTION:
            return function(*args, **kwargs)
        spread = [x for x in args if isinstance(x, SpatialTensor)]
        if any(x.layout.cut(x.dim() - 2) for x in spread):
            return function(*args, **kwargs)
        if spread:
            with self:  # for what the rule calls
                return SpatialTensor.__torch_function__(function, tuple(types), args, kwargs)
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == value.shape[-1]
    trained = attn_mask is not None and attn_mask.requires_grad
    if not alike or not query.is_meta or dropout_p or trained or 0 in (*query.shape, *key.shape):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]
    return attended


class AtomBytes(NamedTuple):
    """The memory of a unit on a rank for a microbatch, in bytes.

    `kept` is what autograd keeps of its forward pass, and `handed` what is needed behind it, of which `unkept` is kept
    by no atom from there on. `forward` and `backward` are the most that it has beside what is kept while it computes,
    and `largest` the largest tensor of all. Those who share features sum up `summed` of them, forward and backward.
    """

    kept: int
    handed: int
    unkept: int
    forward: int
    backward: int
    largest: int = 0
    summed: int = 0


class StageBytes(NamedTuple):
    """The memory of a stage on a rank, in bytes: `kept` for each microbatch under way, `working` once.

    Kept is also what the stage before handed on. Its gradients are there while the stage works; so is what is handed
    on, which others may not have received yet, with its gradients. The largest tensor has `largest` bytes.
    Those who share features sum up `summed` of them for each microbatch, forward and backward.
    """

    kept: int
    working: int
    largest: int = 0
    summed: int = 0


def count_atoms(cuttable: Cuttable, site: Site) -> tuple[AtomBytes, ...]:
    """The bytes of every unit at a site, with the last one the loss of tokens. Shared tensors count for the first."""
    grid, model = imagined(site), cuttable.model
    empty = shapes_of(model)
    saved = SavedTensors(empty.values())
    found: list[AtomBytes] = []
    handed_on: list[list[torch.UntypedStorage]] = []

    def count(atom: Stage, received: tuple[Any, ...], with_loss: bool) -> tuple[AtomBytes, list[Tensor], Any]:
        saved.disregard(atom.parameters())
        before, summed = saved.num_bytes, grid.comm.counts["over_features"]
        meter = TensorMeter()
        grid.foresight.begin()
        with torch.enable_grad(), meter, FusedAttention():
            with saved.counting():
                results = atom(*received)
                results = _with_loss(results) if with_loss else results
                grid.foresight.pay()
            tensors = [local_part(t) for t in pack((results,))[0]]
            kept, handed = saved.num_bytes - before, sum(tensor.nbytes for tensor in tensors)
            forward, lasting = meter.peak_bytes, meter.live_bytes
            meter.peak_bytes = lasting
            roots = [tensor for tensor in tensors if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
            backward = meter.peak_bytes
        for parameter in atom.parameters():
            parameter.grad = None
        grid.foresight.settle()
        beside = max(0, forward - kept), max(0, backward - kept)
        summed = grid.comm.counts["over_features"] - summed
        return AtomBytes(kept, handed, 0, *beside, meter.largest_bytes, summed), tensors, results

    with KnownValues() as known:
        values: tuple[Any, ...] = (input_at(site, grid, model, torch.device("meta")),)
        for i in range(len(cuttable)):
            saved.turn = i
            with_loss = i == len(cuttable) - 1 and of_tokens(site.image)
            atom = cut_at(site, deepcopy(cuttable.atom(i), {**empty}).train(), grid)
            try:
                bytes_of, tensors, results = count(atom, map_leaves(as_received, values), with_loss)
                values = map_leaves(as_received, results)
            except (RuntimeError, ValueError, TypeError) as error:
                if not needs_values(error) and not of_tokens(site.image):
                    raise
                with forked():
                    torch.default_generator.manual_seed(0)
                    stage = deepcopy(cuttable.atom(i), {**empty})
                    atom = cut_at(site, made_up_stage(stage, torch.device("cpu")), grid)
                    made = map_leaves(partial(_made_up, known), values)
                    bytes_of, tensors, results = count(atom, made, with_loss)
                values = map_leaves(_on_meta, results)
            found.append(bytes_of)
            handed_on.append([tensor.untyped_storage() for tensor in tensors])
    return tuple(
        atom._replace(unkept=sum(s.nbytes() for s in storages if saved.turns.get(s._cdata, place) <= place))
        for place, (atom, storages) in enumerate(zip(found, handed_on, strict=True))
    )


def _made_up(known: KnownValues, leaf: Any) -> Any:
    if isinstance(leaf, SpatialTensor):
        return SpatialTensor(made_up_part(known.value, leaf.local), leaf.layout)
    return made_up_part(known.value, leaf) if isinstance(leaf, Tensor) else leaf


def _on_meta(leaf: Any) -> Any:
    """The inputs of the next unit from a unit that ran on the CPU."""
    if isinstance(leaf, SpatialTensor):
        return SpatialTensor(_on_meta(leaf.local), leaf.layout)
    return leaf.detach().to("meta").requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _with_loss(outputs: Any) -> Any:
    """The loss of logits for each token, which for many kinds of tokens takes more than a block; others as they are."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 3:
        return outputs
    targets = torch.zeros(outputs.shape[:2], dtype=torch.int64, device=outputs.device)
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def stage_bytes(atoms: Sequence[AtomBytes], before: AtomBytes | None, is_last: bool) -> StageBytes:
    """The memory of a stage of these units, whose inputs come from the unit `before` them.

    While an atom computes, forward or backward, only those before it are kept of the same microbatch.
    """
    kept = list(accumulate(atom.kept for atom in atoms))
    most = max(sofar + max(atom.forward, atom.backward) for sofar, atom in zip(kept, atoms, strict=True))
    received, unkept = (0, 0) if before is None else (before.handed, before.unkept)
    handed = 0 if is_last else atoms[-1].handed
    largest, summed = max(atom.largest for atom in atoms), sum(atom.summed for atom in atoms)
    return StageBytes(kept[-1] + unkept, max(0, most - kept[-1]) + received + 2 * handed, largest, summed)


def bytes_of_stages(counts: Sequence[int], columns: Sequence[tuple[AtomBytes, ...]]) -> tuple[StageBytes, ...]:
    """Those of stages of so many atoms; `columns[s]` are all atoms' on a rank of stage s."""
    bounds = pairwise(accumulate(counts, initial=0))
    return tuple(
        stage_bytes(column[start:stop], column[start - 1] if start else None, stop == len(column))
        for column, (start, stop) in zip(columns, bounds, strict=True)
    )
