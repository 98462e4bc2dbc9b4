"""Signatures of what a user's own jobs wrote, by a secret key outside of all runs, in the user's state folder.

A file from elsewhere can name any place and any code. What a signature of this user stands under may be followed.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpi4dl._files import open_regular

KEY_BYTES = 32


def signature_of(content: Mapping[str, Any]) -> str:
    """This user's signature of JSON; empty if the user has no place for a key."""
    key = _key(create=True)
    return "" if key is None else _sign(key, content)


def is_signed(content: Mapping[str, Any], signature: object) -> bool:
    """Whether this user has signed it."""
    key = _key() if signature and isinstance(signature, str) else None
    return key is not None and hmac.compare_digest(_sign(key, content), str(signature))


def _sign(key: bytes, content: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(create: bool = False) -> bytes | None:
    """The secret by which this user's training signs; None if there is none, or others can read it."""
    with suppress(OSError, RuntimeError):  # there is no home, or nothing can be written there
        home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        file = Path(home).expanduser() / "mpi4dl" / "key"
        if create and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            try:
                with os.fdopen(handle, "wb") as written:
                    written.write(secrets.token_bytes(KEY_BYTES))
                with suppress(FileExistsError):  # another job was faster
                    os.link(name, file)
            finally:
                Path(name).unlink()
        with open_regular(file) as opened:
            about, key = os.fstat(opened.fileno()), opened.read(KEY_BYTES)
        private = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
        return key if private and len(key) == KEY_BYTES else None
    return None
