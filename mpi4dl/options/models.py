"""The model that a configuration names, and what its options say of how ranks hold it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpi4dl import models
from mpi4dl._randomness import seed_python
from mpi4dl._wording import counted
from mpi4dl.engine.tuning import freeze, keep_in_evaluation
from mpi4dl.models.registry import option_of_channels, require_known, takes
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.data import normalisation
from mpi4dl.options.declare import saying
from mpi4dl.options.kinds import part_name
from mpi4dl.options.parts import call, is_own, load
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.options.sources import source_of
from mpi4dl.parallel.inputs import copied
from mpi4dl.parallel.spatial import gathering

if TYPE_CHECKING:
    from mpi4dl.models.patches import PatchModel

RGB = ("red", "green", "blue")


def build_model(config: Config, num_classes: int, channels: int) -> nn.Module:
    """The whole model, the same on every rank that uses the same seed; for so many channels if it has the option.

    It is in training mode, and trained, but for what is to be in evaluation mode, or frozen.
    """
    model, chosen = _drawn(config, num_classes, channels).train(), config.tuning
    if chosen.lora is not None:
        from mpi4dl.models.lora import add_lora

        if "base" in chosen.lora and config.parallel.tensor > 1:
            raise ConfigError("`lora` base=int8 is for whole weights, but `tensor` cuts them: leave out one of the two")
        with saying(f"`lora` of `model` {config.model_name}"):
            add_lora(model, **chosen.lora)
    with saying(f"`freeze` {','.join(chosen.freeze)}"):
        freeze(model, chosen.freeze)
    with saying(f"`eval_mode` {','.join(chosen.eval_mode)}"):
        keep_in_evaluation(model, chosen.eval_mode)
    return model


def _drawn(config: Config, num_classes: int, channels: int) -> nn.Module:
    torch.manual_seed(config.training.seed)
    seed_python(config.training.seed)
    chosen, source = config.model, source_of(config)
    beside = {"num_covariates": sum(each.width for each in config.slides.covariates)}
    if source.reads_features:
        from mpi4dl.models.patches import AGGREGATORS, PatchModel

        aggregator = AGGREGATORS[chosen.aggregator](channels, num_classes, **beside)
        return PatchModel(nn.Flatten(), aggregator, 1, norm=_feature_norm(config, channels), **beside)
    made = own_model if is_own(chosen.model) else partial(_known_model, config)
    model = made(chosen.model, chosen.model_options, num_classes, channels)
    return _of_patches(config, model, num_classes, channels, beside) if chosen.sees_patches else model


def _known_model(config: Config, name: str, options: Mapping[str, Any], num_classes: int, channels: int) -> nn.Module:
    source = source_of(config)
    if takes(name) != source.inputs:
        require_known(name)
        raise ConfigError(f"`model` {name} takes {takes(name)}, {source.other_model}")
    if source.of_text:
        options = {"vocabulary": num_classes, "context": config.data.context, **options}
        if config.data.document_mask:  # the end of a document is the last of the tokenizer's, before the mask
            options["separator"] = num_classes - (2 if config.data.task == "masked" else 1)
    elif (option := option_of_channels(name)) is not None:
        options = {option: channels, **options}
    elif channels != len(RGB):
        raise ConfigError(
            f"`model` {name} takes images of 3 channels, and these have {channels}: choose one of mpi4dl, timm/ or "
            "smp/, or 3 channels by `channels`"
        )
    with saying(f"`model` {name} does not take these options {dict(options)}", TypeError):
        return models.build(name, None if source.of_text else num_classes, **options)


def own_model(part: Any, options: Mapping[str, Any], num_classes: int, channels: int) -> nn.Module:
    """A model of the user's, or a copy of it if it is one already. Raises ConfigError."""
    made = load("model", part)
    if isinstance(made, nn.Module):
        if options:
            raise ConfigError(f"`model_options` {dict(options)} are for what makes a model, but `model` is one already")
        return copied(made)
    known = {"num_classes": num_classes, "in_channels": channels}
    model = call("model", part, known={n: v for n, v in known.items() if n not in options}, **options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` {part_name(part)} made a {type(model).__name__}, which is no torch.nn.Module")
    return model


def _of_patches(
    config: Config, encoder: nn.Module, num_classes: int, channels: int, beside: Mapping[str, int]
) -> "PatchModel":
    """The model that looks at patches by this encoder. Raises ConfigError if it cannot."""
    from mpi4dl.models.patches import AGGREGATORS, COLOUR, PatchModel, headless, patches_in

    chosen, patch = config.model, config.model.patches
    assert patch is not None
    min_tissue = 0.0 if source_of(config).of_slides else chosen.min_tissue  # slides find theirs, on a thumbnail
    if min_tissue and channels != len(RGB):
        raise ConfigError(
            f"`min_tissue` {chosen.min_tissue}: tissue is found by its colour, and images have "
            f"{counted(channels, 'channel')}"
        )
    with saying(f"`patches` {patch} of `model` {config.model_name}"):
        patches_in(config.data.image_size, patch)
        num_features = headless(encoder, num_classes)
    aggregator = AGGREGATORS[chosen.aggregator](num_features, num_classes, **beside)
    mean, std = normalisation(config.data, channels)
    if min_tissue and max(len(set(mean)), len(set(std))) > 1:
        raise ConfigError(
            f"`min_tissue` {chosen.min_tissue} compares channels: set one `mean` and one `std` for all, not "
            f"{','.join(map(str, mean))} and {','.join(map(str, std))}"
        )
    norm = _feature_norm(config, num_features)
    return PatchModel(encoder, aggregator, patch, min_tissue, COLOUR / std[0], norm, **beside)


def _feature_norm(config: Config, num_features: int) -> nn.Module | None:
    """A layer between an encoder of patches and the aggregator; None if there is none."""
    return None if config.model.feature_norm == "none" else nn.BatchNorm1d(num_features, affine=False)


def without_rules(parallel: Parallel) -> AbstractContextManager[None]:
    """Within it, operators without a rule are gathered or refused, as `no_rule` says."""
    return gathering() if parallel.no_rule == "gather" else nullcontext()
