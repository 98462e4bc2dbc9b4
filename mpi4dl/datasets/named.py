"""Transforms of torchvision and albumentations by name, with random numbers that are the same on all ranks.

    --augment "ColorJitter(brightness=0.2,hue=0.05),albumentations.RandomGamma"

A transform of single pixels takes any box of an image. Others need all of a patch, or of an image. Trying a transform
shows which one it is.
"""

import ast
import copy
import difflib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
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

ALBUMENTATIONS = "albumentations"
GEOMETRY = "._geometry"  # the module of torchvision's transforms that move pixels
NAMED_STREAM = 6  # beside the streams of datasets.augment
EXAMPLE = "RandomPosterize(bits=4)"
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

    `apply(pixels, seed)` makes the same of the same pixels and seed. `pointwise`: each pixel follows from the same one.
    `moves`: pixels change their places, which masks would not.
    """

    name: str
    apply: Callable[[Values, int], Values]
    pointwise: bool
    moves: bool

    def __call__(self, pixels: Values, key: tuple[int, ...], number: int) -> Values:
        """The pixels of a box as the sample of this key has them; `number` is the place among several transforms."""
        return self.apply(pixels, _seed(NAMED_STREAM, TRANSFORM_STREAM, number, *key))


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def named_transform(text: str, channels: int = 3) -> NamedTransform:
    """The transform that a text such as `RandomPosterize(bits=4)` or `albumentations.RandomGamma` names.

    torchvision must be ready for import: see `mpi4dl._torchvision`.

    Raises:
        DatasetError: there is no such transform, or it does not take these arguments or pictures.
    """
    own = _made(text, None)
    surely = _made(text, 1.0)  # so that none of the tries leaves all as it is
    random = np.random.default_rng(0)
    noise: npt.NDArray[Any] = random.integers(0, 256, (TRIED_PX, TRIED_PX, channels), np.uint8)
    rising = np.repeat(np.arange(TRIED_PX, dtype=np.uint8)[:, None, None] * 4, TRIED_PX, 1).repeat(channels, 2)
    half, randomness = TRIED_PX // 2, DatasetRandomness()
    boxes = (np.s_[:half], np.s_[half:, : half - 3], np.s_[5:6, -7:])
    pointwise, moves = True, False
    for number in range(TRIES):
        for whole in (noise, rising):
            with randomness.seeded(0):
                made = surely(whole, _seed(number))
            if randomness.drawn:
                raise DatasetError(
                    f"{text} draws from {' and '.join(sorted(randomness.drawn))}, which other ranks draw from at other "
                    "times: choose another transform"
                )
            pointwise = pointwise and all(_alike(surely(whole[box], _seed(number)), made[box]) for box in boxes)
        moves = moves or _moves(surely, _seed(number), channels)
    return NamedTransform(text, own, pointwise, moves)


def _alike(found: Values, expected: Values) -> bool:
    return int(np.abs(found.astype(np.int16) - expected.astype(np.int16)).max()) <= ROUNDED


def _moves(apply: "_Apply", seed: int, channels: int) -> bool:
    """Whether a mask changes with its image; of transforms that take no masks, it is not known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return apply.moves_masks(seed, channels)
        except (TypeError, ValueError, KeyError, RuntimeError, NotImplementedError):
            return True


class _Apply:
    """A transform of a package on arrays; `text` is how the user named it."""

    def __init__(self, text: str, transform: Any) -> None:
        self._text, self._transform = text, transform

    def __call__(self, pixels: Values, seed: int) -> Values:
        """Raises DatasetError if it fails, or makes another size or type."""
        try:
            made = self.run(pixels.copy(), seed)
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(
                f"{self._text} cannot transform {pixels.dtype} of shape {pixels.shape}: {error or type(error).__name__}"
            ) from error
        if made.shape != pixels.shape or made.dtype != pixels.dtype:
            raise DatasetError(
                f"{self._text} makes {made.dtype} of shape {made.shape} from {pixels.dtype} of {pixels.shape}: it must "
                "keep size and type"
            )
        return made

    def run(self, pixels: Values, seed: int) -> Any:
        raise NotImplementedError

    def moves_masks(self, seed: int, channels: int) -> bool:
        """Whether a mask changes with its image."""
        raise NotImplementedError


class _Torchvision(_Apply):
    def run(self, pixels: Values, seed: int) -> Any:
        with _Drawing(seed), torch.no_grad():
            planes = self._transform(torch.from_numpy(pixels).permute(2, 0, 1))
        return planes.permute(1, 2, 0).numpy()

    def moves_masks(self, seed: int, channels: int) -> bool:
        from torchvision import tv_tensors

        if type(self._transform).__module__.endswith(GEOMETRY):  # perhaps by less than half a pixel
            return True
        mask = _mask()
        image = torch.zeros((channels, *mask.shape), dtype=torch.uint8)
        with _Drawing(seed), torch.no_grad():
            _, moved = self._transform(tv_tensors.Image(image), tv_tensors.Mask(torch.from_numpy(mask)))
        return not np.array_equal(moved.numpy(), mask)


class _Albumentations(_Apply):
    def __init__(self, text: str, transform: Any) -> None:
        super().__init__(text, transform)
        self._own = threading.local()  # a transform keeps its generator

    def _seeded(self, seed: int) -> Any:
        if not hasattr(self._own, "transform"):
            self._own.transform = copy.deepcopy(self._transform)
        self._own.transform.set_random_seed(seed % 2**32)
        return self._own.transform

    def run(self, pixels: Values, seed: int) -> Any:
        return self._seeded(seed)(image=pixels)["image"]

    def moves_masks(self, seed: int, channels: int) -> bool:
        return isinstance(self._transform, _albumentations(self._text).DualTransform)


def _mask() -> npt.NDArray[np.uint8]:
    """A mask without symmetry."""
    return np.random.default_rng(3).integers(0, 5, (TRIED_PX, TRIED_PX), np.uint8)


def _made(text: str, p: float | None) -> _Apply:
    """A transform by its text; with the probability `p` if it has one."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DatasetError(f"{text}: is no name of a transform with arguments, such as {EXAMPLE}") from None
    kind: type[_Apply]
    call = node.func if isinstance(node, ast.Call) else node
    if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == ALBUMENTATIONS:
        package, name, kind = _albumentations(text), call.attr, _Albumentations
    elif isinstance(call, ast.Name):
        package, name, kind = _torchvision(), call.id, _Torchvision
    else:
        named = f", such as {EXAMPLE}" if not isinstance(call, ast.Attribute) else f": {_without_package(call.attr)}"
        raise DatasetError(f"{text}: is no name of a transform{named}")
    made = _class_of(package, name, text)
    positional, options = _arguments(node, text)
    try:
        transform = made(*positional, **options)
        if p is not None and hasattr(transform, "p"):
            transform.p = p
    except Exception as error:
        raise DatasetError(f"{text}: {error}") from error
    return kind(text, transform)


def _without_package(name: str) -> str:
    """How to write a name behind the name of a package or module, such as A."""
    return f"write {name} for that of torchvision, and {ALBUMENTATIONS}.{name} for that of albumentations"


def _arguments(node: ast.expr, text: str) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(node, ast.Call):
        return [], {}
    given = [*node.args, *(each.value for each in node.keywords)]
    if any(isinstance(each, ast.Call) for argument in given for each in ast.walk(argument)):
        raise DatasetError(
            f"{text}: an argument cannot be a call, such as another transform: name transforms one after the other, "
            f"each with a probability of its own if it takes one, such as {EXAMPLE[:-1]},p=0.3)"
        )
    try:
        if any(each.arg is None for each in node.keywords):
            raise ValueError("**")
        return (
            [ast.literal_eval(each) for each in node.args],
            {str(each.arg): ast.literal_eval(each.value) for each in node.keywords},
        )
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise DatasetError(f"{text}: its arguments must be numbers, texts, or tuples of them") from None


def _class_of(package: ModuleType, name: str, text: str) -> Any:
    """The class of this name. Raises DatasetError, which names the nearest ones."""
    known = [each for each, value in vars(package).items() if isinstance(value, type) and not each.startswith("_")]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f": did you mean {', '.join(close)}?" if close else ""
        raise DatasetError(f"{text}: {package.__name__} has no transform {name}{hint}")
    return getattr(package, name)


def _torchvision() -> ModuleType:
    try:
        return import_module("torchvision.transforms.v2")
    except ImportError as error:
        raise DatasetError(f"transforms by name need torchvision; run {to_install('torchvision')}") from error


def _albumentations(text: str) -> ModuleType:
    try:
        return import_module(ALBUMENTATIONS)
    except ImportError as error:
        raise DatasetError(f"{text}: albumentations is not installed; run {to_install(ALBUMENTATIONS)}") from error
