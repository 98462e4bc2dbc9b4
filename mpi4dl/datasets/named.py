"""Transforms of torchvision and albumentations by name, with random numbers that are the same on all ranks.

    --augment "ColorJitter(brightness=0.2,hue=0.05),albumentations.RandomGamma"

A transform of single pixels takes any box of an image. Others need all of a patch, or of an image. Trying a transform
shows which one it is.
"""

import ast
import copy
import difflib
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpi4dl._wording import to_install
from mpi4dl.datasets.augment import TRANSFORM_STREAM
from mpi4dl.datasets.base import DatasetError, Values
from mpi4dl.datasets.randomness import DatasetRandomness

TORCHVISION, ALBUMENTATIONS = "torchvision.transforms.v2", "albumentations"
MOVING = ("_geometry", "_auto_augment")  # the modules of torchvision's transforms that move pixels
NAMED_STREAM = 6  # beside the streams of datasets.augment
TRIED_PX = 64  # sides of what a transform is tried on
TRIES = 12
ROUNDED = 1  # by which a pixel may differ in another box

# Functions of PyTorch that draw, which get a generator of their own.
DRAWS = (
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
    *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_, Tensor.multinomial),
)
DRAWS_LIKE = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_}


class _Drawing(TorchFunctionMode):
    """What draws in this thread takes numbers from one generator, and the global one of the process stays as it is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            kwargs = {**kwargs, "generator": self._generator}
        elif func in DRAWS_LIKE:
            return DRAWS_LIKE[func](torch.empty_like(*args, **kwargs), generator=self._generator)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class NamedTransform:
    """A transform (rows, columns, channels) -> the same shape, by its name and arguments.

    `pointwise`: each pixel follows from the same one. `moves`: pixels change their places, which masks would not.
    """

    name: str
    transform: Any
    of_torchvision: bool
    moves: bool
    pointwise: bool = False

    def __call__(self, pixels: Values, key: tuple[int, ...], number: int) -> Values:
        """The pixels of a box as the sample of this key has them; `number` is the place among several transforms."""
        return self.apply(pixels, _seed(NAMED_STREAM, TRANSFORM_STREAM, number, *key))

    def apply(self, pixels: Values, seed: int) -> Values:
        """The same of the same pixels and seed. Raises DatasetError if it fails, or makes another size or type."""
        try:
            if self.of_torchvision:
                with _Drawing(seed), torch.no_grad():
                    made = self.transform(torch.from_numpy(pixels.copy()).permute(2, 0, 1)).permute(1, 2, 0).numpy()
            else:
                own = copy.deepcopy(self.transform)  # it keeps its generator, and threads apply it at once
                own.set_random_seed(seed % 2**32)
                made = own(image=pixels.copy())["image"]
        except Exception as error:
            raise DatasetError(
                f"{self.name} cannot transform {pixels.dtype} of shape {pixels.shape}: {error or type(error).__name__}"
            ) from error
        if made.shape != pixels.shape or made.dtype != pixels.dtype:
            raise DatasetError(
                f"{self.name} makes {made.dtype} of shape {made.shape} from {pixels.dtype} of {pixels.shape}: it must "
                "keep size and type"
            )
        return made


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def named_transform(text: str, channels: int = 3) -> NamedTransform:
    """The transform that a text such as `RandomPosterize(bits=4)` or `albumentations.RandomGamma` names.

    torchvision must be ready for import: see `mpi4dl._torchvision`.

    Raises:
        DatasetError: there is no such transform, or it does not take these arguments or pictures.
    """
    found = _made(text)
    surely = replace(found, transform=copy.deepcopy(found.transform))
    if hasattr(surely.transform, "p"):
        surely.transform.p = 1.0  # so that none of the tries leaves all as it is
    random = np.random.default_rng(0)
    noise: npt.NDArray[Any] = random.integers(0, 256, (TRIED_PX, TRIED_PX, channels), np.uint8)
    rising = np.repeat(np.arange(TRIED_PX, dtype=np.uint8)[:, None, None] * 4, TRIED_PX, 1).repeat(channels, 2)
    half, randomness, pointwise = TRIED_PX // 2, DatasetRandomness(), True
    boxes = (np.s_[:half], np.s_[half:, : half - 3], np.s_[5:6, -7:])
    for number in range(TRIES):
        for whole in (noise, rising):
            with randomness.seeded(0):
                made = surely.apply(whole, _seed(number))
            if randomness.drawn:
                raise DatasetError(
                    f"{text} draws from {' and '.join(sorted(randomness.drawn))}, which other ranks draw from at other "
                    "times: choose another transform"
                )
            pointwise = pointwise and all(
                np.abs(surely.apply(whole[box], _seed(number)).astype(int) - made[box]).max() <= ROUNDED
                for box in boxes
            )
    return replace(found, pointwise=pointwise)


def _made(text: str) -> NamedTransform:
    """A transform by its text, not yet tried."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        package, _, name = ast.unparse(call.func).rpartition(".")
        positional = [ast.literal_eval(each) for each in call.args]
        options = {each.arg or "**": ast.literal_eval(each.value) for each in call.keywords}
        if package not in ("", ALBUMENTATIONS) or not name.isidentifier():
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise DatasetError(
            f"{text}: write a name of torchvision's, or {ALBUMENTATIONS}.NAME, with numbers, texts or tuples as "
            "arguments, such as RandomPosterize(bits=4,p=0.3). No transform takes others: list them one by one"
        ) from None
    try:
        module = import_module(package or TORCHVISION)
    except ImportError as error:
        needed = package or "torchvision"
        raise DatasetError(f"{text}: {needed} is not installed; run {to_install(needed)}") from error
    known = [each for each, value in vars(module).items() if isinstance(value, type) and not each.startswith("_")]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f": did you mean {', '.join(close)}?" if close else ""
        raise DatasetError(f"{text}: {module.__name__} has no transform {name}{hint}")
    kind = getattr(module, name)
    moves = issubclass(kind, module.DualTransform) if package else kind.__module__.endswith(MOVING)
    try:
        return NamedTransform(text, kind(*positional, **options), not package, moves)
    except Exception as error:
        raise DatasetError(f"{text}: {error}") from error
