"""LPIPS, the learned perceptual distance of what a model makes from its target, by a network on tiles of them.

Zhang et al. 2018, "The unreasonable effectiveness of deep features as a perceptual metric".
"""

import warnings
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from mpi4dl._torchvision import import_torchvision
from mpi4dl._wording import to_install
from mpi4dl.checkpoints.weights import features_in
from mpi4dl.comm import Communicator
from mpi4dl.parallel.own_loop import parallelize


class PerceptualDistance:
    """LPIPS of images (1 or 3 channels, height, width) with values from 0 to 1, as the package lpips has it.

    `file` has the weights of torchvision's alexnet, vgg16 or squeezenet1_1, which decide the network. Collective;
    raises Refusal on all ranks for another file, and without the package.
    """

    def __init__(self, comm: Communicator, device: torch.device, file: str) -> None:
        with comm.together((ValueError, OSError)):
            network = _network(file).to(device)
        self._comm, self._device = comm, device
        self._network = parallelize(network, comm=comm)

    def of(self, pair: tuple[Tensor, Tensor] | None) -> float:
        """The distance of two images, which rank 0 brings. Collective."""
        shape = self._comm.broadcast_object(None if pair is None else pair[0].shape)
        both = torch.empty(2, *shape) if pair is None else torch.stack(pair).float()
        self._comm.broadcast(both)
        made, target = both.to(self._device).split(1)
        with torch.no_grad():
            return float(self._network(made, target, normalize=True))


def _network(file: str) -> nn.Module:
    """The network of LPIPS with these weights. Raises ValueError, OSError."""
    if find_spec("lpips") is None:
        raise ValueError(f"`lpips` needs a package that is not installed: {to_install('lpips')}")
    own = {name.removeprefix("features."): value for name, value in features_in(file, "`lpips`").items()}
    first = own.get("0.weight", torch.empty(0))
    kind = "alex" if first.shape[-1] == 11 else "squeeze" if "3.squeeze.weight" in own else "vgg"
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that torchvision has other names for now
        network = import_module("lpips").LPIPS(net=kind, pnet_rand=True, verbose=False)
    trunk = {name: (value.shape, own.get(name.partition(".")[2])) for name, value in network.net.state_dict().items()}
    if any(value is None or value.shape != shape for shape, value in trunk.values()):
        raise ValueError(f"`lpips` {file} has not the weights of torchvision's alexnet, vgg16 or squeezenet1_1")
    network.net.load_state_dict({name: value for name, (_, value) in trunk.items()})
    return network.requires_grad_(False)
