"""How ranks share the work: tiles, stages, replicas, tensors, experts."""

from dataclasses import dataclass

from mpi4dl.options.declare import instead, neutral, option, same_as
from mpi4dl.options.kinds import (
    BOOLEAN,
    BYTES,
    COUNT,
    COUNT_OR_ZERO,
    COUNTS,
    GRIDS,
    NAME,
    NOT_NEGATIVE,
    SIDES,
    ZERO_STAGE,
    choice,
    either,
    optional,
)


@dataclass(frozen=True)
class Parallel:
    """How ranks share the work: tiles, stages, replicas, tensors, experts."""

    tiles: tuple[tuple[int, ...], ...] = neutral(
        ((1, 1),),
        "grid of tiles of every image, one tile per rank: for all stages, or for each",
        GRIDS,
        brief="grid of tiles of each image",
        known_as=instead("use {option} with a grid of as many tiles, such as 2x2", "num-spatial-parts spatial-parts")
        | instead("use {option}: 2x2 is square, 1x4 vertical, 4x1 horizontal", "slice-method")
        | instead("use {option} with a grid such as 2x2: tiles are counted, not measured", "tile-size")
        | instead("use {option} with a grid for each of --stages, such as 2x2,1x1", "spatial-size")
        | instead("leave it out; in a script, spatial.widen fetches one wide halo by hand", "halo-d2 fused-layers"),
    )
    plan: str | None = neutral(
        None,
        "auto: the fastest plan that fits into memory, for the ranks of mpirun, instead of --tiles and others",
        optional(choice("auto")),
        brief="auto: the fastest plan that fits, for the ranks of mpirun",
    )
    stages: int = neutral(
        1,
        "number of pipeline stages of the model",
        COUNT,
        brief="number of pipeline stages",
        known_as=same_as("pp pp-size pipeline-parallel-size pipeline-model-parallel-size split-size num-stages"),
    )
    batch_ways: tuple[int, ...] = neutral(
        (1,),
        "number of ranks that split the batch of a stage: for all stages, or for each",
        COUNTS,
        known_as=instead("use {option} with a number for each of --stages, such as 1,{value}", "local-dp"),
    )
    data: int = neutral(
        1,
        "number of data replicas that share the batch",
        COUNT,
        brief="number of data replicas, which share the batch",
        called="replicas",
        known_as=same_as("dp dp-size data-parallel-size num-replicas")
        | instead("use {option} N for replicas, --zero to shard their state, --tiles for large images", "strategy")
        | instead("leave it out: sums travel while others are computed", "enable-master-comm-opt")
        | instead("leave it out: batch norm takes its statistics over all ranks", "sync-bn sync-batchnorm"),
    )
    microbatches: int = neutral(
        1,
        "number of microbatches of a batch, in each wave",
        COUNT,
        known_as=same_as("num-microbatches parts gradient-accumulation-chunks")
        | instead("use {option} N, which counts the microbatches of a batch", "micro-batch-size"),
    )
    schedule: str = neutral(
        "1f1b",
        "order of microbatches in the stages",
        choice("layer", "gpipe", "1f1b", "interleaved", "zero-bubble"),
        needs=("stages",),
    )
    bidirectional: int = neutral(
        0,
        "GEMS: number of pairs of waves through the model and a mirrored copy; 0: no copy",
        COUNT_OR_ZERO,
        known_as=instead("use {option} with half as many: it counts pairs of waves", "times"),
    )
    chunks: int = neutral(1, "number of stages of each rank with the interleaved schedule", COUNT)
    tensor: int = neutral(
        1,
        "tensor parallelism: number of ranks that share the parameters and features of each layer",
        COUNT,
        known_as=same_as("tp tp-size tensor-parallel-size tensor-model-parallel-size"),
    )
    sequence: bool = neutral(
        False,
        "sequence parallelism: the ranks of --tensor share tokens between the layers that they cut",
        BOOLEAN,
        known_as=instead("use {option}", "sequence-parallel"),
    )
    tensor_styles: str | None = neutral(
        None,
        'a TOML file with the cuts of parameters, such as "blocks.*.up" = "column"; none: the table or plan of the '
        "model",
        optional(NAME),
        needs=("tensor", "experts"),
    )
    experts: int = neutral(
        1,
        "number of ranks that share experts; they split the batch as those of --replicas do",
        COUNT,
        known_as=same_as("ep ep-size expert-parallel-size expert-model-parallel-size"),
    )
    moe: str = neutral(
        "tensor",
        "what the ranks of --tensor hold of experts: a part of each, or whole ones",
        choice("tensor", "expert"),
        needs=("tensor",),
    )
    zero: int = neutral(
        0,
        "ZeRO: ranks share the optimizer's state (1), the gradients, too (2), the parameters, too (3)",
        ZERO_STAGE,
        brief="ZeRO: share optimizer state (1), gradients (2), all (3)",
        known_as=same_as("zero-stage")
        | instead("use {option} 3", "fsdp")
        | instead("use {option} 1, 2 or 3", "deepspeed sharding"),
    )
    offload: str = neutral(
        "none",
        "where to keep master weights and optimizer state: on the device (none), the host, or disk, in TMPDIR",
        choice("none", "cpu", "disk"),
        known_as=instead("use {option} cpu", "cpu-offload offload-optimizer"),
    )
    balance: str | tuple[int, ...] = neutral(
        "auto",
        "how to cut the model into stages: by times, measured once (auto) or on all ranks (measured), by FLOPs or "
        "memory, or by the number of units of each stage",
        either(COUNTS, "auto", "flops", "memory", "measured"),
        needs=("stages",),
    )
    check: bool = neutral(
        True,
        "compare a model in stages, or streamed, with the plain model on small samples before the first step",
        BOOLEAN,
    )
    stream: tuple[int, ...] | str | None = neutral(
        None,
        "process each rank's part of an image in this grid of tiles, one after the other, to save memory; none: all "
        "at once; auto: as few tiles as fit into --memory-limit",
        optional(either(SIDES, "auto")),
        brief="grid of tiles that each rank processes in turn",
    )
    memory_limit: int | None = neutral(
        None,
        "limit of every rank's peak memory for --stream auto, such as 6GiB",
        optional(BYTES),
        known_as=same_as("max-memory"),
    )
    stream_until: str | None = neutral(
        None, "the last streamed module; none: as far as margins are small beside tiles", optional(NAME)
    )
    stream_norm: str = option(
        "exact",
        "batch norm while streaming: exact: by the statistics of the whole batch, with further passes over all tiles; "
        "running or frozen: by the running statistics, which are updated or not",
        choice("exact", "running", "frozen"),
        needs=("stream", "patches", "features"),
    )
    stream_segments: int | str | None = neutral(
        None,
        "number of segments of the streamed part, or norms: each norm is a segment of its own; their outputs are kept, "
        "so less is computed again; none: one, or with --stream auto the number with the least work",
        optional(either(COUNT, "norms")),
        needs=("stream", "patches", "features"),
    )
    stream_keep: str | None = neutral(
        None,
        "where to keep the outputs of segments until the backward pass: on the device, the host, or disk, in "
        "TMPDIR; none: on the device, or with --stream auto where it takes the least time",
        optional(choice("device", "host", "disk")),
        needs=("stream", "patches", "features"),
    )
    no_rule: str = neutral(
        "error",
        "what to do with an operator without a rule for tiles; gather: compute it whole on every rank",
        choice("error", "gather"),
    )
    threads: int | None = neutral(
        None,
        "number of threads of each rank; none: OMP_NUM_THREADS, or its share of the cores",
        optional(COUNT),
        per_rank=True,
    )
    device: str = neutral(
        "auto",
        "the device; auto: a GPU if there is one",
        choice("auto", "cpu", "cuda"),
        known_as=same_as("accelerator")
        | instead(
            "start one rank for each GPU or group of cores, as in mpirun -n {value}",
            "gpus devices num-gpus n-gpus nproc-per-node num-processes world-size np n num-ranks",
        )
        | instead(
            "name the hosts to mpirun, or let the cluster's scheduler choose them",
            "num-nodes nnodes hosts hostfile num-machines",
        )
        | instead(
            "leave it out: mpirun tells each rank its place",
            "local-rank rank node-rank master-addr master-port rdzv-endpoint rdzv-backend dist-url "
            "dist-backend backend",
        )
        | instead("use {option} cuda", "gpu cuda use-cuda")
        | instead("use {option} cpu", "cpu use-cpu no-cuda"),
    )
    deterministic: bool = neutral(
        False,
        "on GPUs, only kernels that give the same bits in every run: slower, and an operator without one is refused",
        BOOLEAN,
    )
    tf32: str = neutral(
        "convolutions",
        "what a GPU computes of float32 with 10 bits of mantissa (TF32): PyTorch's own default is convolutions",
        choice("none", "convolutions", "all"),
    )
    gpu_wire: str = neutral(
        "auto",
        "how GPU tensors travel: by MPI directly, by MPI with copies on the host (staged), or by NCCL where the order "
        "is fixed",
        choice("auto", "direct", "staged", "nccl"),
    )
    keep_freed_memory: bool = neutral(
        True,
        "keep the memory of freed tensors for the next step: faster on CPUs, but a process may grow to three times its "
        "need",
        BOOLEAN,
    )
    memory_check: str = neutral(
        "error",
        "what to do with a run that needs more memory than its nodes have; error: refuse a run that cannot fit, warn "
        "if it may not",
        choice("error", "warn", "none"),
    )
    hang_timeout: float = neutral(
        3600.0,
        "seconds without progress after which the job ends; less, once its work has needed less; 0: never",
        NOT_NEGATIVE,
    )
