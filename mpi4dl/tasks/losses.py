"""What the training command minimises: cross entropy of images with one label each, or of tokens."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Refusal
from mpi4dl.models.experts import Penalized


def classification_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy with one label per image; auxiliary classifiers, as GoogLeNet has them in training, count 0.3 each.

    What the routing of a mixture of experts adds comes on top.

    Raises Refusal if the model's outputs are not one row of logits per image.
    """
    if isinstance(outputs, Penalized):
        return classification_loss(outputs.outputs, labels) + outputs.penalty.mean()
    require_logits(outputs)
    logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = F.cross_entropy(logits, labels)
    for other in auxiliary:
        if other is not None:
            loss = loss + 0.3 * F.cross_entropy(other, labels)
    return loss


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy of logits (N, T, vocabulary) with tokens (N, T), those that are -100 left out; in nats.

    What the routing of a mixture of experts adds comes on top.
    """
    if isinstance(outputs, Penalized):
        return token_loss(outputs.outputs, targets) + outputs.penalty.mean()
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def require_logits(outputs: Any) -> None:
    """Raise Refusal unless a model's outputs, or the first of them, are one row of logits per image."""
    logits = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
        raise Refusal(
            f"the model's output has {found}, but images with one label each need (batch, classes): choose another "
            "`model`, or write your own loop for dense predictions around mpi4dl.engine.Engine"
        )
