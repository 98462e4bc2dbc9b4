"""A trained model from the folder of its run, over ranks, with weights of 16, 8 or 4 bits."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpi4dl.checkpoints.huggingface import Checkpoint, is_checkpoint
from mpi4dl.comm import Communicator
from mpi4dl.datasets.text.tokenizer import BPETokenizer, ByteTokenizer, PretrainedTokenizer, Tokenizer
from mpi4dl.engine.precision import int8_of
from mpi4dl.models.experts import Experts
from mpi4dl.options.declare import ConfigError
from mpi4dl.options.parts import is_own
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.runs.description import FoundWeights, find_weights, folder_of, hold_trained
from mpi4dl.text.batcher import Batcher
from mpi4dl.text.options import Batching, Ranks
from mpi4dl.text.products import ROWS_OF_PRODUCTS, ReplacedWeight, exchange, pack_weights
from mpi4dl.training.texts import TOKENIZER
from mpi4dl.training.trained import ModelOptions

# Weights of fewer bits, for generation: bfloat16, or 8 or 4 bits of the matrices of linear layers and experts.
#
#     int8    a scale for each output      int4    a scale and an offset for each 32 inputs of an output
#
# Only matrices of linear layers and of experts become integers, as `QuantizedWeight` and `QuantizedExperts`; all else,
# as routers, is bfloat16. The products are PyTorch's own, in bfloat16, of a fixed number of rows at a time: so no
# request's depend on how many others there are.

Precision = Literal["fp32", "bf16", "int8", "int4"]
GROUP = 32  # inputs that share a scale in 4 bits
OUTPUTS = 16  # of which PyTorch takes multiples, in 4 bits
INPUTS = 16  # the same in 8 bits: its kernels read as many at once, of the next row or of none if a row has fewer


class QuantizedWeight(ReplacedWeight):
    """A matrix (outputs, inputs) of integers, to be multiplied with by F.linear and not to be looked at otherwise."""

    bits: int
    packed: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, shape: Sequence[int], bits: int, packed: Tensor, scales: Tensor) -> "QuantizedWeight":
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bfloat16, device=packed.device)
        self.bits, self.packed, self.scales = bits, packed, scales
        return self

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "QuantizedWeight":
        weight = weight.detach().float()
        if bits == 8:
            numbers, scales = int8_of(weight)
            numbers = F.pad(numbers, (0, -weight.shape[1] % INPUTS))
            return cls(weight.shape, bits, numbers, scales.bfloat16())
        grouped = weight.unflatten(1, (-1, GROUP))
        low, high = grouped.amin(2), grouped.amax(2)
        steps = ((high - low) / 15).clamp_(min=1e-8).bfloat16()
        middle = (low.bfloat16() + 8 * steps.float()).bfloat16()  # what the number 8 stands for
        numbers = ((grouped - middle.float()[..., None]) / steps.float()[..., None]).round_().add_(8).clamp_(0, 15)
        missing = -len(weight) % OUTPUTS  # outputs that PyTorch wants, and nobody sees
        packed = torch._convert_weight_to_int4pack_for_cpu(F.pad(numbers.flatten(1), (0, 0, 0, missing)).int(), 1)
        scales = F.pad(torch.stack([steps, middle], 2), (0, 0, 0, 0, 0, missing))
        return cls(weight.shape, bits, packed, scales.transpose(0, 1).contiguous())

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.packed.nbytes + self.scales.nbytes


class QuantizedExperts(ReplacedWeight):
    """The matrices (E, outputs, inputs) of experts, to be taken apart by `unbind` and not to be looked at otherwise."""

    matrices: tuple[QuantizedWeight, ...]

    @staticmethod
    def __new__(cls, matrices: Sequence[QuantizedWeight]) -> "QuantizedExperts":
        shape, device = (len(matrices), *matrices[0].shape), matrices[0].device
        # Of no type that rows have: groups of rows are then multiplied by one matrix after the other.
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.int8, device=device)
        self.matrices = tuple(matrices)
        return self

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "QuantizedExperts":
        return cls([QuantizedWeight.of(matrix, bits) for matrix in weight.detach()])

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(matrix.nbytes for matrix in self.matrices)


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x W' + b, for x of whatever number of rows, by blocks of 8."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, -rows.shape[1] % INPUTS, 0, -len(rows) % ROWS_OF_PRODUCTS))
    found = torch.cat([_product(block, weight) for block in padded.split(ROWS_OF_PRODUCTS)])
    found = found[: len(rows), : weight.shape[0]].reshape(*x.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


QuantizedWeight.uses = {F.linear: _linear}
QuantizedExperts.uses = {Tensor.unbind: lambda weight, dim=0: weight.matrices}


def _product(rows: Tensor, weight: QuantizedWeight) -> Tensor:
    if weight.bits == 8:
        return torch._weight_int8pack_mm(rows, weight.packed, weight.scales)
    return torch._weight_int4pack_mm_for_cpu(rows, weight.packed, GROUP, weight.scales)


def lower_weights(stages: LocalStages, precision: Precision) -> None:
    """Let the model have weights of this precision, in place; those of float32 are packed where that keeps bits.

    Raises:
        ValueError: 4 bits of a matrix whose inputs are no multiple of 32, or on a GPU.
    """
    if precision == "fp32":
        pack_weights(stages)
        return
    stages.to(torch.bfloat16)
    if precision == "bf16":
        return
    bits = int(precision.removeprefix("int"))
    kinds: dict[int, type[QuantizedExperts] | type[QuantizedWeight]] = {}
    places = []
    for path, module in stages.named_modules():
        for name in _matrices_of(module):
            whole = module._parameters.get(name)  # this rank's part, if it is cut
            if whole is None:
                continue
            if bits == 4 and not whole.is_cpu:
                raise ValueError(
                    "--precision int4 is for CPUs, whose kernels it uses: use int8 on a GPU, or --device cpu"
                )
            if bits == 4 and whole.shape[-1] % GROUP:
                raise ValueError(
                    f"{path} has {whole.shape[-1]} inputs on a rank, but --precision int4 takes multiples of {GROUP}: "
                    "use int8, or fewer ranks for --tensor"
                )
            kinds[id(whole)] = QuantizedExperts if isinstance(module, Experts) else QuantizedWeight
            places.append((module, name))
    exchange(stages, places, lambda whole, _: nn.Parameter(kinds[id(whole)].of(whole, bits), requires_grad=False))


def _matrices_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that become integers."""
    if isinstance(module, Experts):
        return "up", "gate", "output"
    return ("weight",) if isinstance(module, nn.Linear) else ()


@dataclass(frozen=True)
class Trained:
    """The results of a run: its options, its tokenizer, and where its weights are."""

    run: ModelOptions
    tokenizer: Tokenizer
    found: FoundWeights

    @property
    def context(self) -> int:
        """How many tokens the model can look at."""
        return int(self.run.options.get("context", self.run.source.tokens))

    @property
    def separator(self) -> int | None:
        """The token behind which nothing of before is seen, if the model was trained so."""
        return self.tokenizer.end if self.run.source.data.document_mask else None


def find_trained(comm: Communicator, source: Path, trust_code: bool = False) -> Trained:
    """The content of the folder of a run of `mpi4dl train`, or of one of its checkpoints. Collective.

    The newest whole checkpoint counts, or of a run without any the weights that it wrote at its end. Of a run with
    `ema` it is their average. Or the content of a folder that transformers wrote, with GPT-2 or Llama.

    Raises:
        Refusal: on all ranks: there is no such folder, it has no weights, it is of a model that writes no text, or it
            names code of others without `trust_code`.
    """
    if comm.broadcast_object(is_checkpoint(source)):
        return _find_pretrained(comm, source)
    folder = folder_of(comm, source)
    with comm.together((ValueError, OSError)):
        run = ModelOptions.of_run(folder)
        chosen, of_text = run.source.data, run.source.of_text
        if not of_text or chosen.task not in ("auto", "language"):
            trained_on = "masked tokens" if of_text else "images"
            raise ConfigError(f"{source}: --model {run.name} was trained on {trained_on}: it writes no text")
        has_bytes = chosen.tokenizer == "bytes"
        tokenizer: Tokenizer = ByteTokenizer() if has_bytes else BPETokenizer.load(folder / TOKENIZER)
    return Trained(run.with_own_model(comm, folder, trust_code), tokenizer, find_weights(comm, source))


def _find_pretrained(comm: Communicator, source: Path) -> Trained:
    with comm.together((ValueError, OSError)):
        checkpoint = Checkpoint(source)
        options = checkpoint.options
        tokenizer = PretrainedTokenizer(
            source / TOKENIZER, options["vocabulary"], checkpoint.ends, checkpoint.has_chats
        )
        named = {"model": "gpt", "model_options": options, "text": str(source), "context": options["context"]}
    return Trained(ModelOptions().with_values(named), tokenizer, FoundWeights(source, ()))


class _Undrawn(TorchFunctionMode):
    """Leaves parameters without their random values: of a model of this package a checkpoint has all of them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        x = args[0] if args else (kwargs or {}).get("tensor")  # as nn.init passes it on
        draws = function in (Tensor.normal_, Tensor.uniform_) or getattr(function, "__module__", "") == nn.init.__name__
        return x if draws and isinstance(x, nn.Parameter) else function(*args, **kwargs or {})


def hold_text_model(
    comm: Communicator, trained: Trained, ranks: Ranks, threads: int | None = None
) -> tuple[LocalStages, list[str]]:
    """The model over ranks, with its weights; and what there is to say of these. Collective.

    Raises:
        Refusal: on all ranks: the plan does not fit to the number of ranks or to the model, or the weights are not its.
    """
    placed = trained.run.with_values(ranks.instead_of(trained.run, threads))
    assembly = placed.assemble(comm, ("model",))
    # A model in several stages is compared with the whole one first.
    undrawn = assembly.plan.num_stages == 1 and not is_own(trained.run.part)
    with _Undrawn() if undrawn else nullcontext():
        stages, remarks = hold_trained(assembly, trained.found, trained.tokenizer.vocabulary, 0)
    with comm.together((ValueError,)):
        lower_weights(stages, ranks.precision)
    return stages, [*trained.found.remarks, *remarks]


def open_batcher(
    comm: Communicator, trained: Trained, ranks: Ranks, batching: Batching, threads: int | None = None
) -> Batcher:
    """The batcher of the trained model, on so many `threads` of each rank; rank 0 prints remarks on the weights.

    Collective. Raises Refusal, on all ranks, as what it calls.
    """
    stages, remarks = hold_text_model(comm, trained, ranks, threads)
    batcher = Batcher(
        stages,
        comm,
        trained.tokenizer,
        trained.context,
        max_batch=batching.max_batch,
        num_pages=batching.pages,
        separator=trained.separator,
    )
    for remark in remarks if comm.rank == 0 else ():
        print(f"mpi4dl: {remark}", file=sys.stderr)
    return batcher
