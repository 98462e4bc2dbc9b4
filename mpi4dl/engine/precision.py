"""Mixed precision (Micikevicius et al., ICLR 2018): weights of low precision, and the loss scaling of fp16.

The loss is scaled by the norm of the gradient, which all ranks know. PyTorch's GradScaler looks at the gradients of
one rank: where stages differ, ranks would skip different steps.
"""

import os

import torch
from torch import Tensor, nn

from mpi4dl.parallel.pipeline.stage import Stage

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 65536.0
SMALLEST_SCALE = 2.0**-24
GROWTH_INTERVAL = 2000  # steps
MAX_SKIPPED = 20  # steps in a row: by then it is no longer the scale that is wrong
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def choose_kernels(deterministic: bool, tf32: str) -> None:
    """Let GPUs compute in TF32 what `tf32` says: "none", "convolutions" or "all"; and by no kernel that leaves bits to
    chance.
    """
    torch.backends.cudnn.allow_tf32 = tf32 != "none"
    torch.backends.cuda.matmul.allow_tf32 = tf32 == "all"
    if deterministic:  # https://docs.pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def kernels_chosen() -> str:
    """What `choose_kernels` chose, for the first lines of a run."""
    of = {(True, False): "convolutions", (True, True): "convolutions and products", (False, True): "products"}
    chosen = of.get((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
    told = f"float32 {chosen} in TF32" if chosen else "float32 without TF32"
    same = torch.are_deterministic_algorithms_enabled()
    return f"{told}, {'the same bits in every run' if same else 'bits that may differ from run to run'}"


def lower_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Turn the float32 parameters of all but normalization layers, few and sensitive, into `dtype`."""
    for part in module.modules():
        if isinstance(part, Stage):
            for looked in part.looked.values():
                looked.lower(dtype)
        if not isinstance(part, NORMS):
            for p in part.parameters(recurse=False):
                if p.dtype is torch.float32:
                    p.data = p.data.to(dtype)


def int8_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of 8 bits, from -127 to 127, nearest to each row (outputs, inputs), and the scale of each row."""
    scales = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


class LossScaler:
    """`scale` is what the loss is multiplied by: halved after a step that overflows, doubled after many that do not.

    Steps that overflow are skipped: `num_skipped` so far, `skipped_in_a_row` up to now.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.finite_steps = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def update(self, finite: bool) -> None:
        """After a step whose gradient was finite, or was not."""
        if not self.enabled:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if not finite:
            self.num_skipped += 1
            self.scale = max(self.scale / 2, SMALLEST_SCALE)
        elif self.finite_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.finite_steps = 0
