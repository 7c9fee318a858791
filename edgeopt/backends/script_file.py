"""A TorchScript file with only what loading needs, and the same bytes for the same program in every process."""

from __future__ import annotations

import io
import re

import torch

from edgeopt.errors import LoweringError

# `___torch_mangle_7`: a count of the classes that this process has compiled before.
_MANGLED = re.compile(rb"___torch_mangle_(\d+)")
_NOT_ASCII = re.compile(r"\w*[^\W\x00-\x7f]\w*")
_WRITTEN_BY_THE_WRITER = (".data/serialization_id",)
TORCH_RECORD = "extra/torch_version"  # an extra file, which loading ignores: compared with the device's before a push


def normalised(data: bytes) -> bytes:
    """A TorchScript file without debug records, which are stack traces with paths of this machine, and with the
    version of the torch that wrote it.

    Names of classes that the process's history numbers are numbered from 0, and local names outside ASCII replaced.
    Raises LoweringError for an attribute or a class whose name is not ASCII.
    """
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    own = (*_WRITTEN_BY_THE_WRITER, TORCH_RECORD)
    names = [n for n in reader.get_all_records() if not n.endswith(".debug_pkl") and n not in own]
    records = _in_ascii({name: reader.get_record(name) for name in names})
    numbers = _numbers(records)
    written = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(written)
    for name, record in records.items():
        if name.startswith("code/") or name.endswith(".pkl"):
            name, record = _renumber(name.encode(), numbers).decode(), _renumber(record, numbers)
        writer.write_record(name, record, len(record))
    version = torch.__version__.split("+")[0].encode()
    writer.write_record(TORCH_RECORD, version, len(version))
    writer.write_end_of_file()
    return written.getvalue()


def _numbers(records: dict[str, bytes]) -> dict[bytes, bytes]:
    found = set()
    for name, data in records.items():
        if name.startswith("code/") or name.endswith(".pkl"):
            found.update(_MANGLED.findall(name.encode()), _MANGLED.findall(data))
    return {number: str(i).encode() for i, number in enumerate(sorted(found, key=int))}


def _renumber(text: bytes, numbers: dict[bytes, bytes]) -> bytes:
    return _MANGLED.sub(lambda m: b"___torch_mangle_" + numbers[m.group(1)], text)


def _in_ascii(records: dict[str, bytes]) -> dict[str, bytes]:
    """The records with local names outside ASCII replaced, which torch writes and cannot read (pytorch issue 73608)."""
    return {
        name: _local_names(name, data.decode()).encode() if name.startswith("code/") else data
        for name, data in records.items()
    }


def _local_names(name: str, code: str) -> str:
    if not name.isascii():
        raise _refused(name)
    for i, word in enumerate(dict.fromkeys(_NOT_ASCII.findall(code))):
        # an attribute's name stands in the pickled data as well, and text in quotes is the model's own
        if re.search(rf"\.{word}\b|^ *{word} :|\"[^\"\n]*{word}", code, re.MULTILINE):
            raise _refused(word)
        code = re.sub(rf"\b{word}\b", f"renamed_{i}", code)
    return code


def _refused(word: str) -> LoweringError:
    return LoweringError(
        f"the name '{word}' is not ASCII, and torch cannot load such a file again",
        todo="rename it in the model",
    )
