"""Models of Hugging Face's diffusers as they are, from small configurations, on tiles: exact in float64."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.pool.ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")
EXACT = 1e-10
Wrap = Callable[[nn.Module], nn.Module]
UNET = {"sample_size": 32, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
UNET |= {"attention_head_dim": 8}
PLAIN = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
RESNETS = {
    "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "downsample_type": "resnet",
    "upsample_type": "resnet",
}
SKIPS: dict[str, Any] = {
    "block_out_channels": (32, 64),  # it has norms of 32 groups
    "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
    "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 24,
}
UNETS: dict[str, dict[str, Any]] = {  # the options of a UNet2DModel; with text, of a UNet2DConditionModel
    "dropout": PLAIN | {"dropout": 0.1},
    "resnets": RESNETS,
    "fourier": PLAIN | {"time_embedding_type": "fourier", "resnet_time_scale_shift": "scale_shift"},
    "skips": SKIPS,
    "text": CROSS,
    "text, linear": CROSS | {"use_linear_projection": True},
}
SCHEDULERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DDIM that draws": ("DDIMScheduler", {}, {"eta": 1.0}),
    "DDPM of quantiles": ("DDPMScheduler", {"thresholding": True}, {}),
    "DDIM": ("DDIMScheduler", {}, {}),
    "DDPM": ("DDPMScheduler", {"variance_type": "fixed_small_log", "prediction_type": "v_prediction"}, {}),
    "Euler": ("EulerAncestralDiscreteScheduler", {}, {}),
    "Heun": ("HeunDiscreteScheduler", {}, {}),
    "LMS": ("LMSDiscreteScheduler", {}, {}),
    "PNDM": ("PNDMScheduler", {}, {}),
    "DPM++": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "thresholding": True}, {}),
    "LCM": ("LCMScheduler", {}, {}),
}


def diffusers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers as found

        _ = found.AutoencoderKL, found.UNet2DModel, found.UNet2DConditionModel, found.DDPMScheduler
    return found


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(3)
    return getattr(diffusers(), kind)(**options)


def autoencoder() -> Any:
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return made("AutoencoderKL", block_out_channels=(16, 32), norm_num_groups=8, sample_size=32, **kinds)


def unet(options: dict[str, Any]) -> Any:
    return made("UNet2DConditionModel" if "cross_attention_dim" in options else "UNet2DModel", **UNET | options)


def same(ours: list[Tensor], plain: list[Tensor]) -> None:
    ours = [spatial.gather(x) if isinstance(x, spatial.SpatialTensor) else x for x in ours]
    assert len(ours) == len(plain) > 0
    assert max((a - b).abs().max().item() for a, b in zip(ours, plain, strict=True)) < EXACT


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def decoding(wrap: Wrap) -> list[Tensor]:
    """A picture of a latent, and gradients of the latent and the decoder, whose blocks are computed again."""
    vae = autoencoder().train()
    vae.enable_gradient_checkpointing()
    wrap(vae.decoder)
    latent = torch.randn(1, 4, 14, 9, requires_grad=True)
    picture = vae.decode(latent).sample
    F.mse_loss(picture, torch.randn(picture.shape)).backward()
    assert latent.grad is not None
    return [picture.detach(), latent.grad, *gradients(vae.decoder)]


def whole_autoencoder(wrap: Wrap) -> list[Tensor]:
    """It draws noise within the model: of the latent, which is on tiles there."""
    vae = wrap(autoencoder())
    images = torch.randn(1, 3, 28, 18)
    picture = vae(images, sample_posterior=True).sample
    F.mse_loss(picture, images).backward()
    return [picture.detach(), *gradients(vae)]


def denoising(wrap: Wrap, options: dict[str, Any], recomputes: bool = False) -> list[Tensor]:
    model = wrap(unet(options).train())
    if recomputes:
        model.enable_gradient_checkpointing()
    text = {"encoder_hidden_states": torch.randn(2, 7, 24)} if "cross_attention_dim" in options else {}
    scheduler = diffusers().DDPMScheduler(num_train_timesteps=100)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        images = torch.randn(2, model.config.in_channels, 12, 10)
        noise, times = torch.randn_like(images), torch.randint(0, 100, (2,))
        loss = F.mse_loss(model(scheduler.add_noise(images, noise, times), times, **text).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *gradients(model)]


def sampling(wrap: Wrap, name: str) -> list[Tensor]:
    kind, options, of_step = SCHEDULERS[name]
    model, scheduler = wrap(unet(PLAIN).eval()), getattr(diffusers(), kind)(num_train_timesteps=100, **options)
    scheduler.set_timesteps(4)  # the fewest of PNDM
    x = torch.randn(1, 3, 12, 10) * scheduler.init_noise_sigma
    with torch.no_grad():
        for time in scheduler.timesteps:
            found = model(scheduler.scale_model_input(x, time), time).sample
            x = scheduler.step(found, time, x, **of_step).prev_sample
    return [x]


def compare(tiles: str, comm: Communicator, loop: Callable[..., list[Tensor]], *args: Any, **options: Any) -> None:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers()
        plain = loop(lambda model: model, *args)
        ours = loop(lambda model: mpi4dl.parallelize(model, tiles, comm=comm, **options), *args)
    same(ours, plain)


@on_ranks(2)
def test_a_latent_is_decoded_and_its_gradients_are_those_of_one_process(comm: Communicator) -> None:
    for outputs in ("whole", "spread"):
        compare("1x2", comm, decoding, outputs=outputs)
    compare("2x1", comm, whole_autoencoder)


@on_ranks(2)
def test_denoising_trains_as_in_one_process_with_the_same_noise_and_dropout(comm: Communicator) -> None:
    compare("1x2", comm, denoising, UNETS["dropout"])


@pytest.mark.parametrize("name", list(SCHEDULERS)[:2])
@on_ranks(2)
def test_steps_of_a_sampler_on_tiles_make_the_plain_images(comm: Communicator, name: str) -> None:
    for outputs in ("whole", "spread"):  # spread ones stay on tiles from step to step
        compare("1x2", comm, sampling, name, outputs=outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiles", ["2x2", "1x4"])
@on_ranks(4)
def test_all_of_it_on_four_tiles(comm: Communicator, tiles: str) -> None:
    compare(tiles, comm, decoding)
    compare(tiles, comm, decoding, outputs="spread")
    compare(tiles, comm, whole_autoencoder, outputs="spread")
    for options in UNETS.values():
        compare(tiles, comm, denoising, options)
        if "dropout" not in options:
            compare(tiles, comm, denoising, options, True)
    for name in SCHEDULERS:
        compare(tiles, comm, sampling, name, outputs="spread")


@on_ranks(1)
def test_a_latent_is_decoded_tile_by_tile(comm: Communicator) -> None:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from examples.decode_latents import autoencoder, streamed

        vae, latent = autoencoder(), torch.randn(1, 4, 8, 6)
        with torch.no_grad():
            same([streamed(vae, latent, (2, 2), comm)], [vae.decode(latent).sample])
