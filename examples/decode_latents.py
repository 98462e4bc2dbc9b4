"""Decode one large latent by the decoder of diffusers' AutoencoderKL, in one of four ways, and compare them.

    python -m examples.decode_latents plain                           # the picture that others are compared with
    python -m examples.decode_latents tiling                          # the model's own enable_tiling()
    mpirun -n 4 python -m examples.decode_latents tiles --tiles 2x2   # a tile on each rank
    python -m examples.decode_latents stream --tiles 2x2              # one rank, one tile after the other

The weights are random: nothing is downloaded.
"""

import argparse
import resource
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import mpi4dl
from mpi4dl._torchvision import prepare_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.engine import Runner
from mpi4dl.parallel.streaming.leading_part import StreamOptions

prepare_torchvision()  # which diffusers may import: also a build for GPUs beside a torch for CPUs
from diffusers import AutoencoderKL  # noqa: E402

CHANNELS = "32,32,64,64"


def autoencoder(channels: str = CHANNELS, sample_size: int = 256) -> AutoencoderKL:
    """A small one, which makes 8 x 8 pixels of each place of a latent."""
    torch.manual_seed(0)  # the same weights on every rank
    sizes = tuple(map(int, channels.split(",")))
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    groups = min(8, *sizes)
    vae = AutoencoderKL(block_out_channels=sizes, norm_num_groups=groups, sample_size=sample_size, **kinds)
    return vae.eval().requires_grad_(False)


class Upper(nn.Module):
    """What follows the middle block of a decoder, from the resolution of the latent to that of the picture."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.blocks, self.norm = decoder.up_blocks, decoder.conv_norm_out
        self.act, self.out = decoder.conv_act, decoder.conv_out

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.act(self.norm(x)))


def streamed(vae: AutoencoderKL, latent: Tensor, counts: tuple[int, ...], comm: Communicator) -> Tensor:
    """The picture, tile by tile. The middle block, whose attention reads the whole latent, runs on all of it."""
    decoder, plan = vae.decoder, mpi4dl.Plan()
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latent)))
    upper = nn.Sequential(Upper(decoder), nn.Identity())  # the last module of a model is not streamed
    stream = StreamOptions(counts, until="0")
    stages = mpi4dl.split(lambda: upper, plan, comm, image=tuple(x.shape), stream=stream, check=False)
    (batch,) = Runner(stages, plan, comm=comm).predict([x])
    assert batch.whole is not None
    return batch.whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("plain", "tiling", "tiles", "stream"))
    parser.add_argument("--latent", type=int, default=128, help="sides; those of the picture are 8 times as long")
    parser.add_argument("--channels", default=CHANNELS, help="of each resolution; Stable Diffusion has 128,256,512,512")
    parser.add_argument("--tiles", default="2x2", help="rows x columns")
    parser.add_argument("--out", type=Path, default=Path("runs/decoded.pt"), help="the picture of plain PyTorch")
    options = parser.parse_args()
    vae, latent = autoencoder(options.channels), torch.randn(1, 4, options.latent, options.latent)
    if options.way == "tiling":
        vae.enable_tiling()
    if options.way == "tiles":
        mpi4dl.parallelize(vae.decoder, options.tiles)  # not vae: decode() calls its decoder
    comm = mpi4dl.world()
    begin, before = time.perf_counter(), mebibytes_now()
    with torch.no_grad():
        if options.way == "stream":
            picture = streamed(vae, latent, tuple(map(int, options.tiles.split("x"))), comm)
        else:
            picture = vae.decode(latent).sample
    seconds = time.perf_counter() - begin
    beyond = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    most = max(comm.all_gather_object(beyond))
    if comm.rank:
        return
    print(
        f"{options.way} on {comm.size} ranks: {seconds:.0f} s, {most:.0f} MiB for each rank beyond imports and weights"
    )
    if options.way == "plain":
        options.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(picture, options.out)
    else:
        plain = torch.load(options.out)
        error, scale = ((x.abs().max().item()) for x in (picture - plain, plain))
        print(f"largest error {error:.1e} in a picture whose largest value is {scale:.1f}")


def mebibytes_now() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
