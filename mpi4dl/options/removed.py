"""Options that there are no more, and what to do without them: the end of the error about such a flag, key or keyword.

A former name that still works is no entry here, but one of the `aliases` of its option.
"""

_AS_IN_TRAINING = "leave it out: it is as in training"
_FIXED = "leave it out: the server's own limit holds"

REMOVED = {
    "all-folds": "use --fold all",
    "allreduce": "leave it out: the algorithm follows from the number of ranks",
    "average": "leave it out: the average is used where there is one",
    "check-replicas": "leave it out, or call `engine.check_replicas()` in one of --callbacks",
    "compare-precision": "run the command once for each --precision",
    "curves": "leave it out: the file is scaling-strong.png or scaling-weak.png",
    "deterministic": _AS_IN_TRAINING,
    "dry-run": "leave it out: a folder that holds other files is not written",
    "experts": "leave it out: every rank of --replicas has all experts",
    "formats": "use `datasets.slides.compose.Cohort` in Python",
    "head-seconds": _FIXED,
    "idle-seconds": _FIXED,
    "max-body": _FIXED,
    "max-connections": _FIXED,
    "max-side": "leave it out: a run that needs more memory than there is does not begin",
    "microbatches": "leave it out: a batch goes through the stages as a whole",
    "moe": _AS_IN_TRAINING,
    "monitor-mode": "leave it out, or give a metric of your own an attribute `higher_is_better`",
    "name": "leave it out: the machine is called as its file",
    "no-average": "name the file model.safetensors in the folder of the run",
    "offload-folder": "set the variable TMPDIR",
    "page-size": "leave it out: a page of the cache has 16 tokens",
    "prefill-chunk": "leave it out: a step has at most 128 tokens of prompts",
    "prompt": "run mpi4dl generate RUN --prompt TEXT after the training",
    "prompt-file": 'use --prompt "$(cat FILE)"',
    "prompt-tokens": "run mpi4dl generate RUN --max-tokens N after the training",
    "rank-gflops": "leave it out, or describe the machine by --machine",
    "report-seconds": "leave it out: GET /metrics says how the server does",
    "token-folder": "leave it out: tokens are in the folder tokens beside the run",
}
