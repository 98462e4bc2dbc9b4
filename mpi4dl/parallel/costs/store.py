"""The cache of costs: values of JSON by facts of JSON, in the user's folder; or in one file, for another machine."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mpi4dl
from mpi4dl._files import Replacement, read_regular

CPUINFO = Path("/proc/cpuinfo")
ANYWHERE = ("on", "torch", "mpi4dl")  # facts of timings that a file from elsewhere leaves open


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mpi4dl" / "timings"


def machine(device: torch.device) -> dict[str, Any]:
    """The machine on which times depend."""
    if device.type == "cuda":
        return {"on": torch.cuda.get_device_name(device)}
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"on": [next(names, "a CPU"), torch.get_num_threads()]}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "mpi4dl": mpi4dl.__version__}


class Store:
    """Values by facts: in a `folder` with a small file for each, or in memory, from where `save` writes one file.

    Processes that write to a folder at the same time do each other no harm: each file is written beside its place and
    renamed. An entry that cannot be read counts as missing, and one that cannot be written is left out. Timings of a
    file that was loaded, from `path`, hold for any machine and version. Counts do not: each version can count them.
    """

    def __init__(self, folder: Path | None = None, measured_on: str = "", path: Path | None = None) -> None:
        self.folder, self.measured_on, self.path = folder, measured_on, path
        self._entries: dict[str, Any] = {}
        self.found: dict[Any, Any] = {}  # of this process, by keys that are no JSON

    @classmethod
    def load(cls, path: str | Path) -> "Store":
        """What `save` wrote. Raises ValueError if it is no such file, OSError if it cannot be read."""
        try:
            found = json.loads(read_regular(Path(path)).decode())
            store = cls(None, str(found["measured on"]), Path(path))
            for each in found["timings"]:
                store.put(each["facts"], each["value"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"--timings {path} is no file of timings, as --time-only writes it") from None
        return store

    def save(self, path: str | Path) -> None:
        """Write what is in memory to one file. Raises OSError."""
        found = {"measured on": self.measured_on, "timings": list(self._entries.values())}
        with Replacement(Path(path), shared=True) as temporary:
            temporary.write_text(json.dumps(found, indent=1))

    def get(self, facts: Mapping[str, Any]) -> Any:
        """The value for these facts; None if there is none."""
        try:
            key = self._key(facts)
            found = self._entries[key] if self.folder is None else json.loads((self.folder / key).read_text())
            return found["value"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, facts: Mapping[str, Any], value: Any) -> None:
        entry = {"facts": dict(facts), "value": value}
        if self.folder is None:
            self._entries[self._key(facts)] = entry
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with Replacement(self.folder / self._key(facts), shared=True) as temporary:
                temporary.write_text(json.dumps(entry))
        except OSError:
            return

    def _key(self, facts: Mapping[str, Any]) -> str:
        left_open = ANYWHERE if self.path is not None and "on" in facts else ()
        text = json.dumps({name: value for name, value in facts.items() if name not in left_open}, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
