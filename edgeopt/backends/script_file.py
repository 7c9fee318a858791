"""A TorchScript file with only what loading needs, and the same bytes for the same program in every process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from edgeopt.errors import LoweringError

# `___torch_mangle_7`: a count of the classes that this process has compiled before.
_MANGLED = re.compile(rb"___torch_mangle_(\d+)")
_WRITTEN_BY_THE_WRITER = (".data/serialization_id",)


def normalise(path: Path) -> None:
    """Rewrite the TorchScript file at `path` without debug records (stack traces with this machine's paths).

    The names of classes that the process's history numbers are numbered from 0. Raises LoweringError where the code
    holds a name outside ASCII, which torch cannot read back (pytorch issue 73608).
    """
    reader = torch._C.PyTorchFileReader(str(path))
    names = [n for n in reader.get_all_records() if not n.endswith(".debug_pkl") and n not in _WRITTEN_BY_THE_WRITER]
    records = {name: reader.get_record(name) for name in names}
    del reader
    _refuse_non_ascii(records, path)
    numbers = _numbers(records)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # The writer names the archive's root folder after the file.
        part = Path(folder) / path.name
        writer = torch._C.PyTorchFileWriter(str(part))
        for name, data in records.items():
            if name.startswith("code/") or name.endswith(".pkl"):
                name, data = _renumber(name.encode(), numbers).decode(), _renumber(data, numbers)
            writer.write_record(name, data, len(data))
        writer.write_end_of_file()
        part.replace(path)


def _numbers(records: dict[str, bytes]) -> dict[bytes, bytes]:
    found = set()
    for name, data in records.items():
        if name.startswith("code/") or name.endswith(".pkl"):
            found.update(_MANGLED.findall(name.encode()), _MANGLED.findall(data))
    return {number: str(i).encode() for i, number in enumerate(sorted(found, key=int))}


def _renumber(text: bytes, numbers: dict[bytes, bytes]) -> bytes:
    return _MANGLED.sub(lambda m: b"___torch_mangle_" + numbers[m.group(1)], text)


def _refuse_non_ascii(records: dict[str, bytes], path: Path) -> None:
    for name, data in records.items():
        if name.startswith("code/") and not (name + data.decode("utf-8", "replace")).isascii():
            word = re.search(r"\w*[^\x00-\x7f]+\w*", name + data.decode("utf-8", "replace"))
            raise LoweringError(
                f"the name '{word.group(0) if word else name}' is not ASCII, and torch cannot load such a file again",
                where=path.name, todo="rename it in the model",
            )  # fmt: skip
