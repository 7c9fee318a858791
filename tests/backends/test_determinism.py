"""The same program gives the same bytes in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from edgeopt import digest
from edgeopt.backends import torchscript

WRITE = """
import json, sys
from pathlib import Path
from edgeopt import digest
from edgeopt.backends import onnx_export, torchscript
from tests.backends.programs import build
out = Path(sys.argv[1])
onnx_export.write(build("integer").program, out, opset_max=17)
onnx_export.write(build("transformer").program, out, opset_max=13)
torchscript.save(build("transformer").program, out / "float.pt")
print(json.dumps({f.name: digest.of_file(f) for f in out.iterdir() if not f.name.startswith(".")}))
"""


def test_two_processes_write_the_same_bytes(case, written, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    here = tmp_path / "here" / "float.pt"
    here.parent.mkdir()
    torchscript.save(case("transformer").program, here)
    assert there == {
        "int8.onnx": digest.of_file(written("integer", 17)[1]),
        "float.onnx": digest.of_file(written("transformer", 13)[1]),
        "float.pt": digest.of_file(here),
    }
