"""A TorchScript file with only what loading needs, and the same bytes for the same program in every process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from edgeopt.errors import LoweringError

# `___torch_mangle_7`: a count of the classes that this process has compiled before.
_MANGLED = re.compile(rb"___torch_mangle_(\d+)")
_NOT_ASCII = re.compile(r"\w*[^\W\x00-\x7f]\w*")
_WRITTEN_BY_THE_WRITER = (".data/serialization_id",)


def normalise(path: Path) -> None:
    """Rewrite the TorchScript file at `path` without debug records (stack traces with this machine's paths).

    Names of classes that the process's history numbers are numbered from 0, and local names outside ASCII replaced.
    Raises LoweringError for an attribute or a class whose name is not ASCII.
    """
    reader = torch._C.PyTorchFileReader(str(path))
    names = [n for n in reader.get_all_records() if not n.endswith(".debug_pkl") and n not in _WRITTEN_BY_THE_WRITER]
    records = {name: reader.get_record(name) for name in names}
    del reader
    records = _in_ascii(records, path)
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


def _in_ascii(records: dict[str, bytes], path: Path) -> dict[str, bytes]:
    """The records with local names outside ASCII replaced, which torch writes and cannot read (pytorch issue 73608)."""
    return {
        name: _local_names(name, data.decode(), path).encode() if name.startswith("code/") else data
        for name, data in records.items()
    }


def _local_names(name: str, code: str, path: Path) -> str:
    if not name.isascii():
        raise _refused(name, path)
    for i, word in enumerate(dict.fromkeys(_NOT_ASCII.findall(code))):
        # an attribute's name stands in the pickled data as well, and text in quotes is the model's own
        if re.search(rf"\.{word}\b|^ *{word} :|\"[^\"\n]*{word}", code, re.MULTILINE):
            raise _refused(word, path)
        code = re.sub(rf"\b{word}\b", f"renamed_{i}", code)
    return code


def _refused(word: str, path: Path) -> LoweringError:
    return LoweringError(
        f"the name '{word}' is not ASCII, and torch cannot load such a file again",
        where=path.name,
        todo="rename it in the model",
    )
