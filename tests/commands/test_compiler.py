"""PyTorch's compiler is imported by who compiles, and by nobody else."""

import subprocess
import sys

import pytest

START = "import sys; from mpi4dl._compiler import PART, defer_compiler\ndefer_compiler()\nimport torch\n"
STEP = """
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
assert weight.tolist() == [0.5] * 3 and weight.grad is None
"""
CASES = {
    "an optimizer": STEP + "assert PART not in sys.modules",
    "compiling after an optimizer's step": STEP
    + """
seen = []
@torch.compiler.disable
def untraced(x):
    seen.append(torch.compiler.is_compiling())
    return x + 1
assert PART not in sys.modules
double = torch.compile(lambda x: untraced(x) * 2, backend="eager")
assert double(torch.ones(2)).tolist() == [4.0, 4.0] and seen == [False]
assert PART in sys.modules and torch._dynamo.eval_frame
"""
    + STEP,
    "a part of it": "import torch._dynamo.config as config\nassert PART in sys.modules and config.verbose is False",
    "a name of it": "from torch._dynamo import OptimizedModule\nassert PART in sys.modules and OptimizedModule",
    "a name that it has not": "assert not hasattr(torch._dynamo, 'nothing') and PART in sys.modules",
    "who looks through all modules": "import inspect, sys\n"
    "assert [getattr(each, '__file__', None) for each in list(sys.modules.values())]\n"
    "assert inspect.getmodule(STAND := torch.nn.Linear) and PART not in sys.modules",
    "recomputation": """
x = torch.ones(2, requires_grad=True)
torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
assert torch.allclose(x.grad, x.detach().exp())
""",
}


QUICK = ("an optimizer",)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_the_compiler_is_there_for_who_asks_for_it(case: str) -> None:
    ended = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", START + CASES[case]], capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
