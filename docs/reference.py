"""Makes the reference of the public names as pages that open in a browser: `make docs`, then open site/index.html."""

from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render

import mpi4dl

FOLDER = Path(__file__).parent.parent / "site"
MODULES = (
    "mpi4dl",
    "mpi4dl.datasets",
    "mpi4dl.models",
    "mpi4dl.tasks",
    "mpi4dl.trainer.callbacks",
    "mpi4dl.engine",
    "mpi4dl.checkpoints",
    "mpi4dl.parallel.plan",
    "mpi4dl.parallel.spatial",
    "mpi4dl.comm",
    "mpi4dl.comm.backend",
    "mpi4dl.options.config",
)


def main() -> None:
    """Write the pages."""
    for module in map(import_module, MODULES):
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # where it comes when it is first used
    pdoc.render.configure(docformat="google", footer_text=f"mpi4dl {mpi4dl.__version__}", search=True)
    pdoc.pdoc(*MODULES, output_directory=FOLDER)
    print(f"open {FOLDER / 'index.html'}")


if __name__ == "__main__":
    main()
