"""Adversarial and perceptual losses on tiles, in a loop of your own: `mpirun -n 2 python -m examples.gan`.

The generator, a PatchGAN discriminator (Isola et al. 2017) and the first layers of a VGG run on tiles. Features and
patches stay there; losses and weights are those of one process, up to rounding. The images are random.
"""

import torch
from torch import nn
from torch.nn import functional as F

import mpi4dl
from mpi4dl import models

torch.manual_seed(0)  # the same weights, and here the same images, on every rank
generator = models.build("unet", num_classes=3, in_channels=1, num_filters=8, depth=2, norm="instance")
discriminator = nn.Sequential(
    nn.Conv2d(4, 16, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, 2, 1, bias=False),
    nn.InstanceNorm2d(32),
    nn.LeakyReLU(0.2),
    nn.Conv2d(32, 1, 4, 1, 1),
)
vgg = models.build("ssd300_vgg16.backbone")  # in your own run torchvision.models.vgg16(weights="DEFAULT")
features = vgg.features[:9].requires_grad_(False)
generator = mpi4dl.parallelize(generator)
discriminator = mpi4dl.parallelize(discriminator, outputs="spread")
features = mpi4dl.parallelize(features, outputs="spread")
optimizers = [torch.optim.Adam(each.parameters(), 2e-4, betas=(0.5, 0.999)) for each in (generator, discriminator)]


def judged(inputs: torch.Tensor, images: torch.Tensor, value: float) -> torch.Tensor:
    """How far the discriminator is from saying `value` of each patch (LSGAN: Mao et al. 2017)."""
    patches = discriminator(torch.cat((inputs, images), 1))
    return F.mse_loss(patches, torch.full_like(patches, value))


inputs, targets = torch.rand(2, 1, 64, 64), torch.rand(2, 3, 64, 64)
for _ in range(3):
    made = generator(inputs)
    optimizers[1].zero_grad()
    loss = judged(inputs, targets, 1.0) + judged(inputs, made.detach(), 0.0)
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    perceptual = F.l1_loss(features(made), features(targets))
    total = judged(inputs, made, 1.0) + 100 * F.l1_loss(made, targets) + perceptual
    total.backward()
    optimizers[0].step()
    if mpi4dl.world().rank == 0:
        print(f"discriminator {loss.item():.6f}, generator {total.item():.6f}")
