"""What was timed on this machine, kept for the next start: a folder with a small file for each thing.

A file is written beside its place and then renamed, so that processes that write at the same time do each other no
harm: what is read is whole, and one of them was last. What cannot be written or read is as if it had not been timed.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mpi4dl

CPUINFO = Path("/proc/cpuinfo")


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mpi4dl" / "timings"


def machine(device: torch.device) -> dict[str, Any]:
    """What seconds depend on, beside what is computed."""
    if device.type == "cuda":
        where: Any = torch.cuda.get_device_name(device)
    else:
        where = [_processor(), torch.get_num_threads()]
    return {"on": where}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "mpi4dl": mpi4dl.__version__}


def _processor() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")


@dataclass(frozen=True)
class Remembered:
    """Values of JSON by facts of JSON, in `folder`."""

    folder: Path

    def get(self, facts: Mapping[str, Any]) -> Any:
        """What was kept for just these facts; None if nothing is."""
        try:
            known = json.loads(self._file(facts).read_text())
            return known["value"] if known["facts"] == _plain(facts) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, facts: Mapping[str, Any], value: Any) -> None:
        file = self._file(facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "w") as written:
                    json.dump({"facts": facts, "value": value}, written)
                Path(name).replace(file)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return

    def _file(self, facts: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def _plain(facts: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(facts))
