"""Run benchmarks and compare their results: `python -m benchmarks list`, `run NAME --help`, `compare OLD NEW`."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import options as declared
from benchmarks.common.compare import compare, read
from mpi4dl._commands import one_message

DESCRIPTION = """Benchmarks of mpi4dl. They start mpirun themselves, and need the checkout of the repository.

    python -m benchmarks list                          all benchmarks
    python -m benchmarks run NAME [--FLAG VALUE ...]   one of them; run NAME --help shows its options
    python -m benchmarks run --all [--quick]           all, each with its defaults; --quick: tiny sizes
    python -m benchmarks compare OLD.json NEW.json     ratios of two results
"""


def main(argv: Sequence[str]) -> None:
    """Do what a command line asks for."""
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command == "list":
        with one_message():
            width = max(map(len, declared.names()))
            for name in declared.names():
                print(f"{name:<{width}}  {declared.description(declared.load(name))}")
    elif command == "run" and rest and not rest[0].startswith("-"):
        run(rest[0], rest[1:])
    elif command == "run":
        run_all(rest)
    elif command == "compare":
        with one_message():
            compare_files(rest)
    else:
        print(DESCRIPTION, end="")
        if command not in ("--help", "-h", "help"):
            raise SystemExit(2)


def run(name: str, argv: Sequence[str]) -> None:
    """Run a benchmark, or one of its contestants."""
    if name not in declared.names():
        print(f"there is no benchmark {name}: choose of {', '.join(declared.names())}", file=sys.stderr)
        raise SystemExit(2)
    options = declared.parse(name, argv)
    module = declared.load(name)
    if options.worker is None:
        module.run(options)
    else:
        module.work(options)


def run_all(argv: Sequence[str]) -> None:
    """Run each benchmark in a process of its own; go on after one that fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks run", description="Run all benchmarks.")
    parser.add_argument("--all", action="store_true", required=True, help="or name one benchmark: run NAME")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    options = parser.parse_args(argv)
    failed = []
    for name in declared.names():
        needs = getattr(declared.load(name), "NEEDS", None)
        if needs is not None:
            print(f"{name}: left out, since it needs {needs}", flush=True)
            continue
        print(f"\n{name}", flush=True)
        quick = ["--quick"] if options.quick else []
        command = [sys.executable, "-m", "benchmarks", "run", name, *quick, "--out", str(options.out / name)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def compare_files(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=compare.__doc__)
    parser.add_argument("old", type=Path, help="a result: the .json file that a benchmark saved")
    parser.add_argument("new", type=Path, help="a later result of the same benchmark")
    parser.add_argument("--only", default="", help="numbers whose names contain this, such as seconds")
    options = parser.parse_args(argv)
    print(compare(read(options.old), read(options.new), options.only))


if __name__ == "__main__":
    main(sys.argv[1:])
