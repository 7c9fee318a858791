"""aoti: `float.pt2`, the program compiled to machine code by torch's AOTInductor, for this machine and no other.

The compiler runs in a process of its own, which may die or be ended. What comes out is cut down to what loading needs
(`normalised`): without the C++ sources, debug records and paths of this machine, so the same program gives the same
bytes on the same CPU with the same torch and compiler. Another CPU or compiler gives other bytes and another artifact;
the stage cache counts both in.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import edgeopt
from edgeopt.backends import compiled_for, script_reload
from edgeopt.backends.backend import Lowered, precision_of, refusal
from edgeopt.errors import LoweringError, first_line
from edgeopt.program import ExportedGraph, Program, graph, own_operators
from edgeopt.program.parts import parts_of
from edgeopt.spec.manifest import Candidate
from edgeopt.spec.profile import Profile

runtime = "aoti"
FILE_NAME = "float.pt2"
TIMEOUT_S = 1800  # of the compiler
_ARCHIVE_FORMAT = b"pt2"  # torch/export/pt2_archive/constants.py
# sys.path[0] would be the working directory, where any json.py would be imported in place of the library's
_START = (
    "import sys; sys.path[0] = sys.argv[1];"
    " from edgeopt.backends import aoti_compile; aoti_compile.main(sys.argv[2], sys.argv[3])"
)


def refusals(program: Program, profile: Profile) -> tuple[str, ...]:
    """What is no float graph of torch's own operators, a target that is not this machine, and no compiler here."""
    if not isinstance(program, ExportedGraph):
        return ("AOTInductor compiles exported graphs, and the model was captured as something else",)
    precision = precision_of(program)
    if precision == "int8":
        return ("integer programs ship as ONNX with Q/DQ; AOTInductor would compute them in float between conversions",)
    if precision != "fp32":
        return (f"AOTInductor is offered for fp32 only, not for {precision}",)
    if reason := compiled_for.elsewhere(profile):
        return (reason,)
    if parts_of(program.module):
        return ("parts of the model are kept as TorchScript, which AOTInductor does not compile",)
    for name in own_operators.own_names(program.module):
        return (f"the operator {name} is not torch's own, and a package cannot carry it",)
    if compiled_for.compiler() is None:
        return (
            f"there is no C++ compiler here ({compiled_for.COMPILER} and strip): install it (Debian: g++, which brings "
            "binutils) or remove aoti from backends",
        )
    return ()


def lower(program: Program, profile: Profile, out: Path, *, target_python: str | None = None) -> Lowered:
    """The candidate 'aoti-fp32', once its package gave the program's outputs in another process."""
    name = f"{runtime}-{precision_of(program)}"
    if reasons := refusals(program, profile):
        return refusal(name, reasons[0])
    path = out / FILE_NAME
    flags = {"compiled_for": compiled_for.here()}
    try:
        path.write_bytes(compiled(program))
        script_reload.check(program, path, python=sys.executable, runtime=runtime, flags=flags)
    except LoweringError as why:
        path.unlink(missing_ok=True)
        return refusal(name, why)
    candidate = Candidate(name=name, runtime=runtime, precision="fp32", file=path.name, flags=flags)
    return Lowered(files=(path.name,), candidates=(candidate,))


def compiled(program: ExportedGraph) -> bytes:
    """The bytes of the package. LoweringError where torch cannot export or compile the program."""
    with tempfile.TemporaryDirectory(prefix="edgeopt-aoti-") as name:
        folder = Path(name)
        given, made = folder / "program.pt2", folder / "model.pt2"
        try:
            torch.export.save(graph.export(program), given)
        except Exception as why:  # what torch's export and its serialisation raise has no common base
            raise LoweringError(f"torch cannot export the program: {first_line(why)}", where=FILE_NAME) from why
        root = str(Path(edgeopt.__file__).resolve().parents[1])
        argv = [sys.executable, "-c", _START, root, str(given), str(made)]
        try:
            done = subprocess.run(argv, cwd=folder, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as why:
            raise LoweringError(f"AOTInductor was ended after {TIMEOUT_S} s", where=FILE_NAME) from why
        if done.returncode != 0 or not made.exists():
            raise LoweringError(f"AOTInductor cannot compile the program: {_last_words(done)}", where=FILE_NAME)
        return normalised(made.read_bytes(), folder)


def normalised(data: bytes, folder: Path) -> bytes:
    """A package that was made in `folder`, with its one library and the library's facts only, under fixed names."""
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    records = {name: reader.get_record(name) for name in sorted(reader.get_all_records())}
    libraries = [name for name in records if name.endswith(".so")]
    facts = [name for name in records if name.endswith(".wrapper_metadata.json")]
    if len(libraries) != 1 or len(facts) != 1:
        raise LoweringError(f"torch wrote a package of {len(libraries)} libraries, and one is known", where=FILE_NAME)
    written = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(written)
    for name, record in (
        ("archive_format", _ARCHIVE_FORMAT),
        ("archive_version", records["archive_version"]),
        ("data/aotinductor/model/model.wrapper.so", _without_traces(_stripped(records[libraries[0]]), folder)),
        ("data/aotinductor/model/model.wrapper_metadata.json", records[facts[0]]),
    ):
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return written.getvalue()


def _stripped(library: bytes) -> bytes:
    """The library without symbols, debug records and its build id, which is a hash of those."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.so"
        path.write_bytes(library)
        argv = ["strip", "--strip-all", "--remove-section=.note.gnu.build-id", "--remove-section=.comment", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise LoweringError(f"strip fails on the compiled library: {done.stderr.strip()}", where=FILE_NAME)
        return path.read_bytes()


def _without_traces(library: bytes, folder: Path) -> bytes:
    """Paths of this machine and addresses of this process overwritten by dots; both stand in texts for people only.

    Of what lay in `folder` the names go too: they are hashes of sources that hold such addresses.
    """
    installed = Path(torch.__file__).parents[1]
    made = b"|".join(re.escape(str(path).encode()) for path in (folder.resolve(), folder))
    others = b"|".join(re.escape(str(path).encode()) for path in (installed.resolve(), installed))
    traces = re.compile(rb"(?:%b)[^\0]*|%b|(?<= at 0x)[0-9a-f]+(?=>)" % (made, others))
    return traces.sub(lambda found: b"." * len(found.group()), library)


def _last_words(done: subprocess.CompletedProcess) -> str:
    """The line of stderr that says most: the last that names an error."""
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it said nothing")[:500]
