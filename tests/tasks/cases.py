"""Models, batches and plain PyTorch's losses that the tests of tasks share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.datasets.transformed import WeightedLabels
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.formulas import BatchLoss, OfHeads
from mpi4dl.tasks.losses import build_loss
from tests.support.short_runs import tiles_of

torchvision = import_torchvision()
transforms = torchvision.transforms
create_feature_extractor = import_module("torchvision.models.feature_extraction").create_feature_extractor

NUM_CLASSES = 3
SIZE = (25, 23)
IGNORED = 7
WEIGHTS = (0.2, 1.0, 3.0)


class Dense(nn.Module):
    """A prediction for each pixel, and a second head, as torchvision's models of segmentation return them."""

    def __init__(self, auxiliary: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.last, self.auxiliary = nn.Conv2d(6, NUM_CLASSES, 1), nn.Conv2d(6, NUM_CLASSES, 1) if auxiliary else None

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        y = self.last(self.second(x).tanh())
        return y if self.auxiliary is None else {"out": y, "aux": self.auxiliary(x)}


class Small(nn.Module):
    """So many numbers for each image."""

    def __init__(self, num_outputs: int = NUM_CLASSES) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A loss by name and options, of which targets, and the same of a whole batch by plain PyTorch."""

    name: str
    options: tuple[tuple[str, Any], ...]
    targets: str
    plain: Callable[[Tensor, Any], Tensor]
    auxiliary: bool = False
    sample_weights: bool = False

    def loss(self) -> BatchLoss:
        options = {name: value() if callable(value) else value for name, value in self.options}
        return OfHeads(build_loss(self.name, **options))

    def model(self) -> nn.Module:
        dense = self.targets in ("mask", "masks", "map")
        model = Dense(self.auxiliary) if dense else Small(1 if self.targets == "times" else NUM_CLASSES)
        return model.double()

    def __str__(self) -> str:
        more = ["sample_weights"] * self.sample_weights
        return "-".join([self.name, self.targets, *(name for name, _ in self.options), *more])

    def to_train(self, count: int, seed: int) -> Any:
        """The targets of a step."""
        targets = targets_of(self.targets, count, seed)
        weights = torch.tensor([2.0, 0.5, 0.0, 2.0, 1.25, 0.3, 3.0, 0.0, 1.0], dtype=torch.float64)[:count]
        return WeightedLabels(targets, weights) if self.sample_weights else targets


def targets_of(kind: str, count: int, seed: int = 0) -> Any:
    """Targets of so many images; of masks the first sample has none that counts, and the last few have many."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "mask":
        masks = torch.randint(NUM_CLASSES, (count, *SIZE), generator=generator).to(torch.uint8)
        masks[torch.rand(masks.shape, generator=generator) < 0.3] = IGNORED
        masks[0] = IGNORED
        masks[-1, :6] = 2
        return masks
    if kind == "masks":
        masks = torch.randint(2, (count, NUM_CLASSES, *SIZE), generator=generator).to(torch.uint8)
        masks[torch.rand(masks.shape, generator=generator) < 0.2] = IGNORED
        return masks
    if kind == "map":
        return torch.randn(count, NUM_CLASSES, *SIZE, generator=generator, dtype=torch.float64)
    if kind == "labels":
        labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
        labels[0] = IGNORED
        return labels
    times = torch.tensor([2.0, 1.0, 2.0, 2.0, 5.0, torch.inf, 1.0, 3.0, 2.0])[:count]
    return times, torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0])[:count]


def images_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of_classes() -> Tensor:
    return torch.tensor(WEIGHTS, dtype=torch.float64)


def plain_dice(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """As MONAI's DiceLoss, without what is ignored; or a weighted mean over classes."""
    if targets.dim() == outputs.dim():
        counted = targets != IGNORED
        wanted, shares = torch.where(counted, targets, 0).double() * counted, outputs.sigmoid() * counted
    else:
        counted = (targets != IGNORED)[:, None]
        wanted = F.one_hot(torch.where(counted[:, 0], targets, 0).long(), NUM_CLASSES).movedim(-1, 1) * counted
        shares = outputs.softmax(1) * counted
    both, each = (wanted * shares).sum((2, 3)), (wanted + shares).sum((2, 3))
    loss = 1 - (2 * both + 1e-5) / (each + 1e-5)
    return loss.mean() if weights is None else (loss * weights).sum(1).mean() / weights.sum()


def plain_weighted_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    return plain_dice(outputs, targets, weights_of_classes())


def plain_both(outputs: Tensor, targets: Tensor) -> Tensor:
    return plain_dice(outputs, targets) + F.cross_entropy(outputs, targets.long(), ignore_index=IGNORED)


def plain_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.long(), weights_of_classes(), ignore_index=IGNORED)


def plain_smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    options = {"ignore_index": IGNORED, "label_smoothing": 0.1}
    return F.cross_entropy(outputs, targets.long(), weights_of_classes(), **options)


def plain_focal(outputs: Tensor, targets: Tensor) -> Tensor:
    counted = targets != IGNORED
    known = targets[counted].long()
    right = outputs.movedim(1, -1)[counted].softmax(-1).gather(-1, known[:, None])[:, 0]
    weights = weights_of_classes()[known]
    return (weights * -((1 - right) ** 1.5) * right.log()).sum() / weights.sum()


def plain_binary_focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of the probabilities of what is right, each by the weight of its class."""
    counted, ones = targets != IGNORED, outputs.sigmoid()
    right = torch.where(targets == 1, ones, 1 - ones)
    each = weights_of_classes().view(-1, 1, 1) * -((1 - right) ** 2) * right.log()
    return each[counted].mean()


def plain_binary(outputs: Tensor, targets: Tensor) -> Tensor:
    more = weights_of_classes().view(-1, 1, 1).expand(outputs.shape)
    counted = targets != IGNORED
    wanted = targets[counted].double()
    return F.binary_cross_entropy_with_logits(outputs[counted], wanted, pos_weight=more[counted])


def plain_cox(outputs: Tensor, targets: tuple[Tensor, Tensor], ties: str = "efron") -> Tensor:
    """Term by term, as in the textbook."""
    risk, (time, event) = outputs[:, 0], targets
    total = torch.zeros((), dtype=torch.float64)
    for t in time[event == 1].unique():
        deaths, there = (time == t) & (event == 1), time >= t
        total = total - risk[deaths].sum()
        for i in range(int(deaths.sum())):
            part = i / int(deaths.sum()) if ties == "efron" else 0.0
            total = total + (risk[there].exp().sum() - part * risk[deaths].exp().sum()).log()
    return total / event.sum()


def plain_auxiliary(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return plain_cross_entropy(outputs["out"], targets) + 0.5 * plain_cross_entropy(outputs["aux"], targets)


def plain_breslow(outputs: Tensor, targets: Any) -> Tensor:
    return plain_cox(outputs, targets, "breslow")


def plain_of_samples(outputs: Any, targets: Any) -> Tensor:
    """The mean over what counts, by weights of classes and of samples, with a head that counts one half."""
    if isinstance(outputs, dict):
        return plain_of_samples(outputs["out"], targets) + 0.5 * plain_of_samples(outputs["aux"], targets)
    labels, samples = targets if isinstance(targets, tuple) else (targets, torch.ones(len(targets)))
    each = F.cross_entropy(outputs, labels.long(), weights_of_classes(), ignore_index=IGNORED, reduction="none")
    known = labels[labels != IGNORED].long()
    return (each.reshape(len(labels), -1) * samples[:, None]).sum() / weights_of_classes()[known].sum()


def plain_dice_of_samples(outputs: Tensor, targets: Any) -> Tensor:
    labels, samples = targets if isinstance(targets, tuple) else (targets, torch.ones(len(targets)))
    each = [plain_dice(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
    return (torch.stack(each) * samples).mean()


def plain_squares_of_samples(outputs: Tensor, targets: Any) -> Tensor:
    labels, samples = targets if isinstance(targets, tuple) else (targets, torch.ones(len(targets)))
    return ((outputs - labels) ** 2 * samples.view(-1, 1, 1, 1)).mean()


def plain_charbonnier(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.sqrt((outputs - targets) ** 2 + 1e-6).mean()


def plain_ssim(outputs: Tensor, targets: Tensor, scales: int = 1) -> Tensor:
    """Every window of every channel by itself, with weights of two dims."""
    places = torch.arange(-5, 6, dtype=torch.float64)
    weights = torch.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2)).flatten()
    weights, found = weights / weights.sum(), []
    for x, y in zip(outputs.flatten(0, 1), targets.flatten(0, 1), strict=True):
        value, powers = 1.0, torch.tensor([0.0448, 0.2856, 0.3001], dtype=torch.float64)[:scales]
        for scale, power in enumerate((powers / powers.sum()).tolist()):
            a, b = (F.unfold(each[None, None], 11)[0].T for each in (x, y))
            ma, mb = a @ weights, b @ weights
            va, vb = ((a - ma[:, None]) ** 2) @ weights, ((b - mb[:, None]) ** 2) @ weights
            cross = ((a - ma[:, None]) * (b - mb[:, None])) @ weights
            alike = (2 * cross + 0.03**2) / (va + vb + 0.03**2)
            bright = (2 * ma * mb + 0.01**2) / (ma**2 + mb**2 + 0.01**2)
            mean = (alike * bright if scale == scales - 1 else alike).mean()
            value = value * (mean if scales == 1 else mean.clamp(min=1e-6) ** power)
            x, y = (F.avg_pool2d(each[None], 2)[0] for each in (x, y))
        found.append(1 - value)
    return torch.stack(found).mean()


def plain_l1_and_ms_ssim(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.l1_loss(outputs, targets) + plain_ssim(outputs, targets, 2)


@cache
def vgg16_weights() -> dict[str, Tensor]:
    """Weights by which no layer dies, and which no file has."""
    torch.manual_seed(1)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in torchvision.models.vgg16().features.state_dict().items()}
    return {
        f"features.{name}": torch.randn(shape, dtype=torch.float64) / math.sqrt(shape[1:].numel() or 1)
        for name, shape in shapes.items()
    }


def plain_l1_and_perceptual(outputs: Tensor, targets: Tensor) -> Tensor:
    vgg = torchvision.models.vgg16().double()
    vgg.load_state_dict(vgg16_weights(), strict=False)
    normalized = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    ends = {"3": "relu1_2", "8": "relu2_2"}
    seen = create_feature_extractor(vgg.features.eval(), ends)
    made, wanted = (seen(normalized(x)) for x in (outputs, targets))
    return F.l1_loss(outputs, targets) + 0.5 * sum(F.l1_loss(made[name], wanted[name]) for name in ends.values())


COUNTED = (("class_weights", WEIGHTS), ("ignore_index", IGNORED))
IGNORING = (("ignore_index", IGNORED),)
BINARY = (*IGNORING, ("binary", True))
WEIGHTED = Case("cross_entropy", COUNTED, "mask", plain_auxiliary, auxiliary=True)
BOTH = Case("dice+cross_entropy", IGNORING, "mask", plain_both)
SMOOTH = Case("cross_entropy", (*COUNTED, ("label_smoothing", 0.1)), "labels", plain_smooth)
EFRON = Case("cox", (), "times", plain_cox)
OF_SAMPLES = Case("cross_entropy", COUNTED, "mask", plain_of_samples, auxiliary=True, sample_weights=True)
CLASSES_OF_SAMPLES = Case("cross_entropy", COUNTED, "labels", plain_of_samples, sample_weights=True)
DICE_OF_SAMPLES = Case("dice", IGNORING, "mask", plain_dice_of_samples, sample_weights=True)
CHARBONNIER = Case("charbonnier", (), "map", plain_charbonnier)
SSIM = Case("ssim", (), "map", plain_ssim)
MS_SSIM = Case("l1+ms_ssim", (("scales", 2),), "map", plain_l1_and_ms_ssim)
PERCEPTUAL = Case(
    "l1+perceptual",
    (("vgg", vgg16_weights), ("layers", "relu1_2+relu2_2"), ("factor", 0.5)),
    "map",
    plain_l1_and_perceptual,
)
CASES = [
    PERCEPTUAL,
    SSIM,
    MS_SSIM,
    OF_SAMPLES,
    CLASSES_OF_SAMPLES,
    DICE_OF_SAMPLES,
    Case("mse", (), "map", plain_squares_of_samples, sample_weights=True),
    WEIGHTED,
    BOTH,
    SMOOTH,
    EFRON,
    Case("cox", (("ties", "breslow"),), "times", plain_breslow),
    Case("cross_entropy", (*COUNTED, ("label_smoothing", 0.1)), "mask", plain_smooth),
    Case("focal", (*COUNTED, ("gamma", 1.5)), "mask", plain_focal),
    Case("focal", (*COUNTED, ("gamma", 1.5)), "labels", plain_focal),
    Case("focal", (*COUNTED, ("binary", True)), "masks", plain_binary_focal),
    Case("dice", BINARY, "masks", plain_dice),
    Case("dice", COUNTED, "mask", plain_weighted_dice),
    Case("bce", COUNTED, "masks", plain_binary),
    Case("huber", (("delta", 0.7),), "map", partial(F.huber_loss, delta=0.7)),
    Case("l1", (), "map", F.l1_loss),
    CHARBONNIER,
    Case("mse", (), "map", F.mse_loss),
]


def by_plain_pytorch(case: Case, count: int) -> tuple[list[float], nn.Module]:
    """Two steps, and the loss of all validation images at once."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        loss = case.plain(model(images_of(count, number)), case.to_train(count, number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(case.plain(model(images_of(count)), targets_of(case.targets, count))))
    return losses, model


def on_ranks(comm: Communicator, case: Case, plan: Plan, count: int) -> tuple[list[float], Any]:
    """The same on ranks; validation comes in batches of 4."""
    if plan.num_stages > 1:
        held = split(case.model, plan, comm, seed=0, image=(count, 3, *SIZE))
    else:
        torch.manual_seed(0)
        held = LocalStages.whole(case.model(), plan, comm)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), case.loss(), comm=comm)
    losses = []
    for number in range(2):
        targets = case.to_train(count, number)
        losses.append(engine.step(tiles_of(images_of(count, number), engine), targets, SIZE).loss)
    losses.append(engine.evaluate(in_batches(engine, images_of(count), targets_of(case.targets, count)), SIZE).loss)
    return losses, engine.gather_state()


def in_batches(engine: Engine, images: Tensor, targets: Any, batch: int = 4) -> list[tuple[list[Tensor], Any]]:
    """Tiles and targets of batches, of which the last may be smaller."""

    def some(x: Any, start: int) -> Any:
        return tuple(some(y, start) for y in x) if isinstance(x, tuple) else x[start : start + batch]

    starts = range(0, len(images), batch)
    return [(tiles_of(images[s : s + batch], engine, training=False), some(targets, s)) for s in starts]
