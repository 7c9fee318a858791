"""ROOT/.journal on a device: who did what to which release, and how it ended.

A line is a JSON object with `when` (UTC; the operator's clock, since a device's may be wrong), `who`, `name`, `step`,
`digest` and `result`. Lines are appended and flushed by the step that they tell of. Past 256 KiB the file becomes
.journal.1, in place of the one before. A torn line, as a power cut leaves, is skipped.
"""

from __future__ import annotations

import getpass
import json
import socket
import time
from dataclasses import asdict, dataclass

_LONGEST_RESULT = 300


@dataclass(frozen=True)
class Entry:
    """A line of the journal."""

    when: str
    who: str
    name: str
    step: str
    digest: str | None
    result: str

    def as_dict(self) -> dict:
        return asdict(self)


def ourselves() -> str:
    """user@host of who runs this."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def line(name: str, step: str, digest: str | None, result: str) -> str:
    """The line that says so, of us and now."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entry = Entry(when, ourselves(), name, step, digest, " ".join(result.split())[:_LONGEST_RESULT])
    return json.dumps(entry.as_dict())


def parse(text: str) -> list[Entry]:
    """The entries of a journal, oldest first; what is no whole line is left out."""
    entries = []
    for found in text.splitlines():
        try:
            data = json.loads(found.strip("\0 "))
            digest = data["digest"] or None
            entry = Entry(data["when"], data["who"], data["name"], data["step"], digest, data["result"])
        except (ValueError, KeyError, TypeError):
            continue
        if all(isinstance(value, str) for value in entry.as_dict().values() if value is not None):
            entries.append(entry)
    return entries
