"""Cases that went wrong once."""

from collections.abc import Mapping

from mpi4dl.parallel.plan import Plan
from tests.parallel.spatial.comparing import Arrangement
from tools.nets.fuzz.networks import Network
from tools.nets.fuzz.operators import Statements
from tools.nets.fuzz.texts import Text
from tools.nets.fuzz.trainings import Part, Training

TILES = Plan(((1, 2),))
CONVOLUTION = ("convolution", {"kernel": 3, "stride": 1, "dilation": 1, "groups": 1, "mode": "zeros", "how": "plain"})

TRAININGS: Mapping[str, Training] = {
    # The gradient of an output that all tiles have was lost between two statistics of the backward pass.
    "streamed, two outputs": Training(
        Network((6, 6), (("activation", {"kind": "gelu"}),), "auxiliary"), (Part(TILES, stream=(1, 1)),), batch=2
    ),
    # That of an output that is cut along the batch alone was given to each tile.
    "streamed, a mean of each image": Training(
        Network((6, 6), (CONVOLUTION,), "mean"), (Part(Plan(batch_ways=(2,)), stream=(1, 2)),), batch=2
    ),
    "streamed, a mean of each replica's images": Training(
        Network((6, 6), (("activation", {"kind": "gelu"}),), "mean"), (Part(Plan(data=2), stream=(1, 2)),), batch=2
    ),
    # Streamed parts could hand on neither numbers nor tokens.
    "streamed, the size of the image is used behind it": Training(
        Network((6, 6), (("activation", {"kind": "gelu"}),), "dense"), (Part(Plan(), stream=(1, 1)),), batch=2
    ),
    "streamed, tokens": Training(
        Network((6, 6), (("activation", {"kind": "gelu"}),), "token"), (Part(Plan(), stream=(1, 2)),), batch=2
    ),
    # PyTorch's kernel read the format of one image and of its gradient from dims of one entry.
    "an instance norm of channels that come last": Training(
        Network(
            (6, 6),
            (("norm", {"kind": "layer", "still": False}), ("norm", {"kind": "instance", "still": False})),
            "mean",
        ),
        (Part(Plan(data=2)),),
        batch=2,
    ),
    # A function that is given a module of Python, such as torch.nn.functional, could not be copied.
    "streaming of a function that is given a module of Python": Training(
        Network((6, 6), (CONVOLUTION,), "pooled"), (Part(Plan(), stream=(1, 2)),), batch=2
    ),
}
GPT = Text(3, (("num_layers", 1), ("num_heads", 2), ("hidden", 8), ("tied", False)))
TEXTS: Mapping[str, Training] = {
    # A rank whose tokens all go nowhere used fewer parameters in the backward pass, where others gathered them.
    "experts without tokens under ZeRO 3": Training(
        Text(
            5,
            (
                *(("num_layers", 2), ("num_heads", 2), ("hidden", 8), ("num_experts", 3), ("top_k", 1), ("every", 2)),
                *(("capacity_factor", 0.7), ("balance", 0.0), ("balance_over", "batch")),
            ),
        ),
        (Part(Plan(((2,), (2,)), microbatches=2, bidirectional=1, zero=3), bucket_bytes=40),),
        batch=6,
    ),
    # Of a frozen norm PyTorch's checkpoint kept the parameter, which had no values any more in the backward pass.
    "frozen layers that are recomputed under ZeRO 3": Training(
        GPT, (Part(Plan(((1,),), data=2, zero=3), recompute=True),), batch=2, still=("blocks.0",)
    ),
}
REFUSED: Mapping[str, Training] = {
    "changes its inputs in place": Training(
        Network((6, 6), (("activation", {"kind": "relu in place"}),), "mean"), (Part(Plan(), recompute=True),), batch=2
    ),
}
OPERATORS: Mapping[str, Statements] = {
    "logsumexp of integers": Statements(("x = x.logsumexp(-1)",), (1, 1, 5), Arrangement(2), dtype="int64"),
    "local response norm of integers": Statements(
        ("x = F.local_response_norm(x, 2)",), (1, 1, 1, 1), Arrangement(1, 2), dtype="int64"
    ),
    "joined beside a flat dim": Statements(
        ("x = x.flatten(0, 2)", "x = torch.cat([x, x[..., :1]], -1)"), (1, 2, 2, 1), Arrangement(2, 2)
    ),
    "windows of truth values": Statements(
        ("x = x.unfold(0, 1, 1)", "x = x.unfold(-2, 1, 1)"), (1, 1, 1, 1), Arrangement(1, 2), dtype="bool"
    ),
    "writes in place to what was resampled": Statements(
        ("x = F.interpolate(x, scale_factor=2, mode='nearest')", "y = x[..., 1:]; y += 1"),
        (1, 1, 1, 1),
        Arrangement(1, 2),
        both=False,
    ),
    "columns of truth values": Statements(("x = x.any(0)", "x = F.unfold(x, 1)"), (1, 1, 1, 1), Arrangement(1, 2)),
}
