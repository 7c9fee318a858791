"""Operators of the user's own at capture: libraries that load or say why not, fakes and schemas that tell the truth."""

from __future__ import annotations

import platform
import re
import shutil

import numpy as np
import pytest
import torch

from edgeopt.capture import serialise
from edgeopt.errors import CaptureError, ModelError, ProjectError
from edgeopt.program import ExportedGraph, custom_ops, graph
from tests.capture.support import captured, project, run
from tests.native import compiled, compiler, ort_library, torch_library

INPUTS = {"x": {"shape": ["n", 4]}}
AXES = {"n": {"min": 1, "opt": 2, "max": 8}}
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]

MODEL = """
import {name}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return {name}.scale(self.layer(x), 3.0) + 1
"""
SCALE = """
import torch
@torch.library.custom_op("{name}::scale", mutates_args=())
def scale(x: torch.Tensor, alpha: float = 2.0) -> torch.Tensor:
    return {body}
"""
FAKE = """
@scale.register_fake
def _(x, alpha=2.0):
    return {fake}
"""


def write(folder, name: str, *, body: str = "x * alpha", fake: str | None = "torch.empty_like(x)", more: str = ""):
    folder.mkdir(parents=True, exist_ok=True)
    code = SCALE.format(name=name, body=body) + (FAKE.format(fake=fake) if fake else "") + more
    (folder / f"{name}.py").write_text(code)
    return folder


def capture_with(folder, name: str, **keys) -> ExportedGraph:
    keys.setdefault("op_libraries", f"[{name}.py]")
    return captured(folder, MODEL.format(name=name), INPUTS, AXES, **keys)


def test_an_operator_stays_one_node_and_keeps_its_axis(tmp_path):
    program = capture_with(write(tmp_path, "cap_plain"), "cap_plain")
    assert isinstance(program, ExportedGraph)
    nodes = [n for n in program.module.graph.nodes if n.target is torch.ops.cap_plain.scale.default]
    assert len(nodes) == 1
    for size in (1, 5, 8):
        x = np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)
        state = {k: v.numpy() for k, v in program.module.state_dict().items()}
        wanted = (x @ state["layer.weight"].T + state["layer.bias"]) * 3 + 1
        np.testing.assert_allclose(run(program, x=x)["output"], wanted, atol=1e-5)


def test_a_cached_program_is_read_where_the_operators_are_loaded(tmp_path):
    program = capture_with(write(tmp_path, "cap_cached"), "cap_cached")
    serialise.save(program, tmp_path / "saved")
    loaded = serialise.load(tmp_path / "saved")
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(run(loaded, x=x)["output"], run(program, x=x)["output"])


def test_a_missing_fake_is_refused_with_one_that_works(tmp_path):
    write(tmp_path, "cap_nofake", fake=None)
    with pytest.raises(CaptureError) as caught:
        capture_with(tmp_path, "cap_nofake")
    assert "cap_nofake::scale has no fake" in caught.value.what
    assert re.fullmatch(r"model\.py, line \d+", caught.value.where)
    line = int(caught.value.where.rpartition(" ")[2])
    assert "scale(" in (tmp_path / "model.py").read_text().splitlines()[line - 1]
    snippet = caught.value.todo.partition("\n")[2]
    assert snippet == (
        '@torch.library.register_fake("cap_nofake::scale")\ndef _(x, alpha=2.0):\n    return torch.empty_like(x)'
    )
    exec(snippet, {"torch": torch})
    assert isinstance(capture_with(tmp_path, "cap_nofake"), ExportedGraph)


# operator's schema and body -> what the fake that is proposed returns
SNIPPETS = {
    "same": ("(Tensor q, Tensor k) -> Tensor", "lambda q, k: q + k.sum()", "torch.empty_like(q)"),
    "product": ("(Tensor q, Tensor k) -> Tensor", "lambda q, k: q @ k", "q.new_empty((q.shape[0], k.shape[1]))"),
    "other dtype": ("(Tensor q, Tensor k) -> Tensor", "lambda q, k: q > 0", "torch.empty_like(q, dtype=torch.bool)"),
    "two": (
        "(Tensor q, Tensor k) -> (Tensor, Tensor)", "lambda q, k: (q + 1, k + 1)",
        "torch.empty_like(q), torch.empty_like(k)",
    ),
    "list": (
        "(Tensor q, Tensor k) -> Tensor[]", "lambda q, k: [q + 1, k + 1]", "[torch.empty_like(q), torch.empty_like(k)]"
    ),
    "fixed": ("(Tensor q, Tensor k) -> Tensor", "lambda q, k: q.new_zeros(7)", "q.new_empty((7,))"),
    "default": ("(Tensor q, Tensor k, int n=2) -> Tensor", "lambda q, k, n=2: q * n", "torch.empty_like(q)"),
}  # fmt: skip


@pytest.mark.parametrize("case", SNIPPETS)
def test_the_snippet_is_right_for_the_operator(tmp_path, case):
    schema, body, wanted = SNIPPETS[case]
    name = "snip_" + case.replace(" ", "_")
    code = f"import torch\nlib = torch.library.Library('{name}', 'DEF')\nlib.define('op{schema}')\n"
    code += f"lib.impl('op', {body}, 'CPU')\n"
    (tmp_path / f"{name}.py").write_text(code)
    model = f"""
    import {name}
    class Model(nn.Module):
        def forward(self, q, k):
            found = torch.ops.{name}.op(q, k)
            return list(found) if isinstance(found, (tuple, list)) else found
    """
    inputs = {"q": {"shape": ["n", 4]}, "k": {"shape": [4, 3]}}
    with pytest.raises(CaptureError) as caught:
        captured(tmp_path, model, inputs, AXES, op_libraries=f"[{name}.py]")
    snippet = caught.value.todo.partition("\n")[2]
    assert snippet.endswith(f"return {wanted}")
    exec(snippet, {"torch": torch})
    program = captured(tmp_path, model, inputs, AXES, op_libraries=f"[{name}.py]")
    assert isinstance(program, ExportedGraph)


WRONG = {
    "shape": ("x * alpha", "x.new_empty((x.shape[0],))", "Shapes"),
    "dtype": ("x * alpha", "torch.empty_like(x, dtype=torch.float64)", "Dtypes"),
    "data": ("x * alpha", "torch.empty_like(x) if x.sum() > 0 else x", "the fake implementation of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_fake_that_is_not_the_operator_is_refused(tmp_path, case):
    body, fake, said = WRONG[case]
    name = f"cap_wrong_{case}"
    write(tmp_path, name, body=body, fake=fake)
    with pytest.raises(CaptureError) as caught:
        capture_with(tmp_path, name)
    assert said.lower() in caught.value.what.lower() and f"{name}::scale" in caught.value.what
    assert caught.value.where.startswith("model.py, line")


LIES = {
    "writes": ("x.mul_(alpha).clone()", "mutated"),
    "returns its argument": ("x", "alias"),
}


@pytest.mark.parametrize("case", LIES)
def test_an_operator_that_does_what_its_schema_does_not_say_is_refused(tmp_path, case):
    """Passes believe the schema: a write that it does not declare would be moved or dropped."""
    body, said = LIES[case]
    name = f"cap_lie_{case.replace(' ', '_')}"
    code = f"import torch\nlib = torch.library.Library('{name}', 'DEF')\n"
    code += "lib.define('scale(Tensor x, float alpha=2.0) -> Tensor')\n"
    code += f"lib.impl('scale', lambda x, alpha=2.0: {body}, 'CPU')\n"
    code += f"torch.library.register_fake('{name}::scale', lambda x, alpha=2.0: torch.empty_like(x))\n"
    code += f"scale = torch.ops.{name}.scale\n"
    (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(CaptureError) as caught:
        capture_with(tmp_path, name)
    assert "does not keep to its schema" in caught.value.what and said in caught.value.what


def test_an_error_in_a_python_library_names_the_users_line(tmp_path):
    write(tmp_path, "cap_error", more="\nvalue = 1 / 0\n")
    with pytest.raises(ModelError) as caught:
        capture_with(tmp_path, "cap_error")
    assert "ZeroDivisionError" in caught.value.what
    line = int(re.fullmatch(r"cap_error\.py, line (\d+)", caught.value.where)[1])
    assert "1 / 0" in (tmp_path / "cap_error.py").read_text().splitlines()[line - 1]


@pytest.mark.parametrize("style", ["custom_op", "Library"])
def test_two_libraries_that_define_one_operator_are_refused(tmp_path, style):
    name = f"cap_twice_{style}"
    code = SCALE.format(name=name, body="x * alpha") + FAKE.format(fake="torch.empty_like(x)")
    if style == "Library":
        code = f"import torch\nlib = torch.library.Library('{name}', 'FRAGMENT')\n"
        code += "lib.define('scale(Tensor x) -> Tensor')\n"
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / f"{name}_b.py").write_text(code)
    with pytest.raises(ModelError) as caught:
        capture_with(tmp_path, name, op_libraries=f"[{name}.py, {name}_b.py]")
    assert f"{name}" in caught.value.what and f"{name}_b.py" in str(caught.value)


def test_a_library_in_a_package_is_run_once_under_the_name_that_the_model_imports(tmp_path):
    write(tmp_path / "cap_pack", "cap_inner")
    (tmp_path / "cap_pack" / "__init__.py").touch()
    code = MODEL.format(name="cap_inner").replace("import cap_inner", "from cap_pack import cap_inner")
    program = captured(tmp_path, code, INPUTS, AXES, op_libraries="[cap_pack/cap_inner.py]")
    assert isinstance(program, ExportedGraph)


def test_a_compiled_library_and_a_python_one_that_completes_it(tmp_path):
    """In the order of the key: the fake implementation is for an operator that the file before defines."""
    (tmp_path / "native_fake.py").write_text(
        "import torch\n@torch.library.register_fake('native_ops::twice')\ndef _(x):\n    return torch.empty_like(x)\n"
    )
    code = """
    class Model(nn.Module):
        def forward(self, x):
            return torch.ops.native_ops.twice(x)
    """
    program = captured(tmp_path, code, INPUTS, AXES, op_libraries=f"[{torch_library()}, native_fake.py]")
    assert isinstance(program, ExportedGraph)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(program, x=x)["output"], 2 * x)


def test_a_compiled_library_that_defines_an_operator_again_is_an_answer_and_no_abort(tmp_path):
    shutil.copy(torch_library(), tmp_path / "libb.so")
    with pytest.raises(ModelError) as caught:
        captured(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries=f"[{torch_library()}, libb.so]")
    assert "native_ops" in caught.value.what and caught.value.where == "libb.so"


BAD_FILES = {
    "text": (b"not a library", "neither"),
    "empty": (b"", "neither"),
    "truncated": (b"\x7fELF\x02\x01", "neither"),
    "object file": (b"\x7fELF\x02\x01" + bytes(10) + b"\x01\x00\x3e\x00", "no shared library"),
}


def test_a_copy_of_what_another_project_loaded_in_this_process_is_an_answer_too(tmp_path):
    given = project(tmp_path / "first", "Model = nn.Identity", INPUTS, AXES, op_libraries=f"[{torch_library()}]")
    custom_ops.load(custom_ops.of(given))
    (tmp_path / "second").mkdir()
    shutil.copy(torch_library(), tmp_path / "second" / "libc.so")
    with pytest.raises(ModelError) as caught:
        captured(tmp_path / "second", "Model = nn.Identity", INPUTS, AXES, op_libraries="[libc.so]")
    assert caught.value.where == "libc.so"


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_library_is_refused(tmp_path, case):
    data, said = BAD_FILES[case]
    (tmp_path / "libbad.so").write_bytes(data)
    with pytest.raises(ProjectError) as caught:
        captured(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries="[libbad.so]")
    assert said in caught.value.what and "libbad.so" in caught.value.where


def test_a_library_with_a_missing_symbol_is_refused_with_its_name(tmp_path):
    """Built for this machine, and not linked against what it needs."""
    code = "extern int edgeopt_absent(void);\nint call(void) { return edgeopt_absent(); }\n"
    code += "static int (*const now)(void) = edgeopt_absent;\nint (*keep(void))(void) { return now; }\n"
    compiled(code, tmp_path / "libmissing.so", [compiler(platform.machine(), "c")])
    with pytest.raises(ModelError) as caught:
        captured(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries="[libmissing.so]")
    assert "edgeopt_absent" in caught.value.what and caught.value.where == "libmissing.so"


def test_a_library_for_another_machine_alone_is_refused(tmp_path):
    shutil.copy(torch_library(OTHER), tmp_path / "libnative.so")
    with pytest.raises(ProjectError) as caught:
        captured(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries="[libnative.so]")
    assert OTHER in caught.value.what and platform.machine() in caught.value.todo


def test_one_library_for_two_machines_is_told_by_the_files_headers(tmp_path):
    """The names lie: what counts is the ELF header."""
    shutil.copy(torch_library(), tmp_path / f"libnative-{OTHER}.so")
    shutil.copy(torch_library(OTHER), tmp_path / "libnative.so")
    given = project(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries=f"[libnative.so, libnative-{OTHER}.so]")
    own = custom_ops.of(given)
    here, there = own.for_torch(platform.machine()), own.for_torch(OTHER)
    assert [o.given for o in here] == [f"libnative-{OTHER}.so"] and [o.given for o in there] == ["libnative.so"]
    assert own.missing_in_torch(OTHER) is None
    assert "riscv64" in own.missing_in_torch("riscv64")


def test_two_files_of_one_library_for_one_machine_are_refused(tmp_path):
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "libnative.so", tmp_path / "old" / "libnative.so"):
        shutil.copy(torch_library(), path)
    given = project(tmp_path, "Model = nn.Identity", INPUTS, AXES, op_libraries="[libnative.so, old/libnative.so]")
    with pytest.raises(ProjectError, match="the same library"):
        custom_ops.of(given)


def test_a_python_library_outside_of_the_project_is_refused(tmp_path):
    write(tmp_path, "cap_outside")
    with pytest.raises(ProjectError, match="must lie in the project's folder"):
        capture_with(tmp_path / "project", "cap_outside", op_libraries="[../cap_outside.py]")


def test_a_shared_library_may_lie_anywhere(tmp_path):
    shutil.copy(torch_library(), tmp_path / "libnative.so")
    given = project(tmp_path / "project", "Model = nn.Identity", INPUTS, AXES, op_libraries="[../libnative.so]")
    assert custom_ops.of(given).libraries[0].arch == platform.machine()


def test_a_path_that_is_not_ascii(tmp_path):
    folder = tmp_path / "größe"
    write(folder, "cap_umlaut")
    shutil.copy(ort_library(), folder / "libnätive.so")
    program = capture_with(folder, "cap_umlaut", op_libraries="[cap_umlaut.py, libnätive.so]")
    assert [o.artifact_path for o in program.custom_ops.libraries] == [
        "ops/cap_umlaut.py", f"ops/{platform.machine()}/libn-tive.so",
    ]  # fmt: skip
    assert graph.export(program) is not None
