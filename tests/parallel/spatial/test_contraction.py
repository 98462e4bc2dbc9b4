"""Matrix products, einsum and linear layers over tiles are those over the whole image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, functions, table_test


def plain(*shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


SPREAD = {
    "matmul, channels last": lambda x: x.permute(0, 2, 3, 1) @ plain(4, 5),
    "matmul with a batch of matrices": lambda x: torch.matmul(x.permute(0, 2, 3, 1), plain(3, 1, 4, 2)),
    "matmul with a vector": lambda x: x.movedim(1, -1).matmul(plain(4)),
    "a plain tensor on the left": lambda x: plain(6, 4) @ x.permute(2, 0, 1, 3),
    "a plain tensor on the left, by torch.matmul": lambda x: torch.matmul(plain(1, 3, 7, 4), x.permute(2, 0, 1, 3)),
    "channels with channels": lambda x: x.permute(0, 2, 3, 1)[..., None, :] @ x.permute(0, 2, 3, 1)[..., None],
    "columns cropped": lambda x: x @ plain(x.shape[3], 3),
    "rows summed": lambda x: plain(3, x.shape[2]) @ x,
    "two images, columns summed": lambda x: x @ plain(*x.shape).mT,
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), plain(5, 4), plain(5)),
    "linear over columns": lambda x: F.linear(x, plain(5, x.shape[3]), plain(5)),
    "linear to one": lambda x: F.linear(x, plain(x.shape[3])),
    "bilinear": lambda x: F.bilinear(*[x.permute(0, 2, 3, 1)] * 2, plain(5, 4, 4), plain(5)),
    "bilinear over columns": lambda x: F.bilinear(x, plain(*x.shape[:3], 2), plain(5, x.shape[3], 2), plain(5)),
    "einsum of channels": lambda x: torch.einsum("nchw,kc->nkhw", x, plain(5, 4)),
    "einsum of two images": lambda x: torch.einsum("nchw, ndhw -> nhwcd", x, plain(*x.shape)),
    "einsum with dots": lambda x: torch.einsum("nc...,nc...->n...", x, x + 1),
    "einsum, implied": lambda x: torch.einsum("nchw,cd", x, plain(4, 2)),
    "einsum of one": lambda x: torch.einsum("nchw->whn", x),
    "rows with columns of another": lambda x: torch.einsum("nchw,nckw->nchk", x, plain(*x.shape)),
    "addmm": lambda x: torch.addmm(plain(3), x[0, 0], plain(x.shape[3], 3), beta=0.5, alpha=2),
    "addmm of integers": lambda x: torch.addmm(
        plain(3).long(), (9 * x[0, 0]).long(), (9 * plain(x.shape[3], 3)).long(), beta=1.5, alpha=2.5
    ),
    "baddbmm": lambda x: torch.baddbmm(x[:, 0, :, :1], x[:, 1], plain(3, x.shape[3], 3)),
    "bmm": lambda x: torch.bmm(x[:, 0], plain(3, x.shape[3], 3)),
    "mm": lambda x: x[0, 0].mm(plain(x.shape[3], 2)),
    "mm by name": lambda x: x[0, 0].mm(mat2=plain(x.shape[3], 2)),
    "mv": lambda x: x[0, 0].mv(plain(x.shape[3])),
    "tensordot": lambda x: torch.tensordot(x, plain(4, 3), dims=([1], [0])),
    "distances of pixels": lambda x: torch.cdist(x.permute(0, 2, 3, 1), plain(5, 4)),
    "distances of many pixels, flat": lambda x: torch.cdist(x.permute(0, 2, 3, 1).reshape(-1, 4), plain(5, 4), 1),
    "distances to pixels of each image": lambda x: torch.cdist(x.permute(0, 2, 3, 1), plain(3, 1, 30, 4)),
    "outer": lambda x: torch.outer(x[0, 0, :, 0], plain(3)),
}
WHOLE = {
    "Gram matrix": lambda x: torch.einsum("nchw,ndhw->cd", x, x),
    "sum of products": lambda x: torch.einsum("nchw,nchw->", x, plain(*x.shape)),
    "all summed": lambda x: torch.tensordot(x, plain(*x.shape), 4),
    "one dim summed, one cropped": lambda x: (plain(3, x.shape[2]) @ x @ plain(x.shape[3], 2)).sum(0),
}
CASES = functions(SPREAD) | functions(WHOLE, spread=False)

test_products_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS)
