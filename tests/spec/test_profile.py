"""Profiles: the shipped ones resolve to the facts, and what a target cannot do is refused with key and reason."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgeopt.errors import ProfileError
from edgeopt.spec import jetpack
from edgeopt.spec.profile import jetpacks_of, load_profile, precisions_of, profile_names, schema
from edgeopt.spec.profile_values import ProfileFile

SHIPPED = [
    "arm64-cpu", "desktop-cuda", "nano", "orin-agx", "orin-nano", "orin-nx", "thor", "tx2", "x86-cpu", "xavier",
    "xavier-nx",
]  # fmt: skip
MODULES = [(m.name, j) for m in jetpack.MODULES for j in m.jetpacks]


@pytest.fixture
def write(tmp_path):
    def to(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return to


def refused(name: str, overrides=None) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        load_profile(name, overrides)
    assert caught.value.todo
    return caught.value


def test_the_shipped_profiles_are_these_and_all_load():
    assert profile_names() == SHIPPED
    for name in SHIPPED:
        profile = load_profile(name)
        assert profile.name == name
        for backend in profile.backends:
            assert "fp32" in precisions_of(profile, backend)


@pytest.mark.parametrize(("module", "version"), MODULES)
def test_every_jetpack_of_every_module_takes_its_row(module, version):
    profile = load_profile(f"{module}@{version}")
    row = jetpack.release(version)
    assert profile.name == f"{module}@{version}"
    assert profile.jetpack == version
    assert version in jetpacks_of(profile)
    target = profile.target
    assert (target.l4t, target.python, target.tensorrt, target.cuda) == (row.l4t, row.python, row.tensorrt, row.cuda)
    assert target.onnx_opset_max == jetpack.opset_max(row.tensorrt)
    assert profile.container.base == row.base_image
    has_strategy = jetpack.version_tuple(row.torch_max) >= (1, 11)
    assert ("fusion_strategy" in profile.fuser_flags) == (has_strategy and module not in ("nano", "tx2"))


def test_xavier_is_what_the_facts_say():
    profile = load_profile("xavier")
    target = profile.target
    assert (target.sm, target.arch, target.python, target.tensorrt) == ("7.2", "aarch64", "3.8", "8.5.2")
    assert (target.torch.min, target.torch.max, target.onnx_opset_max) == ("1.11", "2.1", 17)
    assert profile.precision.allowed == ("fp32", "fp16", "int8")
    assert profile.precision.mechanism == "explicit-qdq"
    assert profile.backends == ("tensorrt", "torchscript")
    assert precisions_of(profile, "tensorrt") == ("fp32", "fp16", "int8")
    assert precisions_of(profile, "torchscript") == ("fp32", "fp16")
    assert profile.quantization.activations == "int8-symmetric"
    assert profile.fuser_flags["fusion_strategy"] == [["STATIC", 2], ["DYNAMIC", 10]]


def test_an_older_jetpack_says_which_flag_its_torch_lacks():
    profile = load_profile("xavier@4.6")
    assert profile.target.onnx_opset_max == 13
    assert "fusion_strategy" not in profile.fuser_flags
    assert profile.notes == ("fusion.strategy left out: torch 1.10 is older than 1.11",)


def test_nvfuser_is_kept_only_where_torch_has_it():
    kept = load_profile("xavier", {"fuser.nvfuser": "on"})
    assert kept.fuser["nvfuser"] is True and kept.notes == ()
    for name in ("orin-nx@6.2", "xavier@4.6"):
        dropped = load_profile(name, {"fuser.nvfuser": "on"})
        assert "nvfuser" not in dropped.fuser
        assert any("nvFuser is usable from 1.11 to 2.1" in note for note in dropped.notes)


def test_no_shipped_profile_fuses_on_a_cpu_without_llvm():
    for name in SHIPPED:
        assert load_profile(name).fuser["fuse_on_cpu"] is False


@pytest.mark.parametrize(
    ("name", "overrides", "mechanism"),
    [
        ("x86-cpu", {}, "cpu"), ("nano", {}, "weak-flags"), ("xavier@4.6", {}, "explicit-qdq"),
        ("xavier", {"precision.allowed": "[fp32, fp16]"}, "weak-flags"), ("thor", {}, "explicit-qdq"),
        ("desktop-cuda", {}, "strong-typed"), ("desktop-cuda", {"target.tensorrt": "'10.9'"}, "explicit-qdq"),
        ("thor", {"precision.mechanism": "strong-typed"}, "strong-typed"),
    ],
)  # fmt: skip
def test_intent_becomes_the_mechanism_of_the_tensorrt_that_is_there(name, overrides, mechanism):
    assert load_profile(name, overrides).precision.mechanism == mechanism


def test_x86_weights_have_7_bits_unless_the_profile_says_vnni():
    assert load_profile("x86-cpu").quantization.weight_bits == 7
    assert load_profile("x86-cpu", {"target.vnni": "true"}).quantization.weight_bits == 8
    assert load_profile("x86-cpu", {"target.vnni": "false"}).quantization.weight_bits == 7
    assert load_profile("x86-cpu", {"quantization.weight_bits": "8"}).quantization.weight_bits == 8
    assert load_profile("arm64-cpu").quantization.weight_bits == 8


@pytest.mark.parametrize(
    ("flags", "bits"), [("[avx2]", 7), ("[avx2, avx512f]", 7), ("[avx2, avx_vnni]", 8), ("[avx512_vnni]", 8)]
)
def test_the_bits_follow_the_flags_of_the_targets_cpu(flags, bits):
    """Q02: of the target's, whatever this machine has."""
    profile = load_profile("x86-cpu", {"target.cpu_features": flags})
    assert (profile.quantization.weight_bits, profile.target.vnni) == (bits, bits == 8)
    stated = load_profile("x86-cpu", {"target.cpu_features": flags, "target.vnni": "false"})
    assert stated.quantization.weight_bits == 7
    forced = load_profile("x86-cpu", {"target.cpu_features": flags, "quantization.weight_bits": "8"})
    assert any("saturate" in note for note in forced.notes) == (bits == 7)


def test_the_cpu_of_a_nano_has_int8_through_onnxruntime():
    wanted = {"precision.allowed": "[fp32, fp16, int8]", "backends": "[tensorrt, onnxruntime]"}
    profile = load_profile("nano", wanted)
    assert precisions_of(profile, "onnxruntime") == ("fp32", "int8")
    assert precisions_of(profile, "tensorrt") == ("fp32", "fp16")
    assert profile.quantization.placement == "onnxruntime-arm"
    assert profile.precision.mechanism == "weak-flags"


IMPOSSIBLE = [
    ("xavier", {"precision.allowed": "[fp32, bf16]"}, "precision.allowed", "sm_72 has no bf16"),
    ("xavier@4.6", {"precision.allowed": "[fp32, bf16]"}, "precision.allowed", "sm_72 has no bf16"),
    ("nano", {"precision.allowed": "[fp32, int8]"}, "precision.allowed", "sm_53 has no int8"),
    ("tx2", {"precision.allowed": "[fp32, int8]"}, "precision.allowed", "sm_62 has no int8"),
    ("orin-nx", {"precision.allowed": "[fp32, fp8]"}, "precision.allowed", "sm_87 has no fp8: it came with sm_89"),
    ("desktop-cuda", {"precision.allowed": "[fp32, fp8]"}, "precision.allowed", "sm_86 has no fp8"),
    ("thor", {"precision.allowed": "[fp32, fp8]"}, "precision.allowed", "edgeopt does not write it yet"),
    ("x86-cpu", {"precision.allowed": "[fp32, fp16]", "backends": "[torchscript]"}, "precision.allowed", "no fp16"),
    ("arm64-cpu", {"precision.allowed": "[fp32, bf16]"}, "precision.allowed", "no bf16 kernels"),
    ("orin-nx@5.1", {"precision.allowed": "[fp32, bf16]", "backends": "[tensorrt]"}, "precision.allowed", "with 9.0"),
    (
        "desktop-cuda",
        {"precision.allowed": "[fp32, bf16]", "backends": "[tensorrt, onnxruntime]"},
        "precision.allowed",
        "could prove it",
    ),
    ("xavier", {"precision.allowed": "[fp16]"}, "precision.allowed", "fp32 is missing"),
    ("xavier", {"backends": "[torchscript]"}, "precision.allowed", "int8 cannot run here"),
    ("xavier", {"target.onnx_opset_max": "20"}, "target.onnx_opset_max", "TensorRT 8.5.2 reads: at most 17"),
    ("xavier@4.6", {"target.onnx_opset_max": "17"}, "target.onnx_opset_max", "at most 13"),
    ("x86-cpu", {"dla": "on"}, "dla", "kind cpu has no DLA"),
    ("desktop-cuda", {"dla": "on"}, "dla", "kind desktop has no DLA"),
    ("nano", {"dla": "on"}, "dla", "module nano has no DLA"),
    ("orin-nano", {"dla": "on"}, "dla", "module orin-nano has no DLA"),
    ("thor", {"dla": "on"}, "dla", "module thor has no DLA"),
    ("xavier", {"dla": "on", "backends": "[onnxruntime]"}, "dla", "only TensorRT uses the DLA"),
    ("arm64-cpu", {"target.vnni": "true"}, "target.vnni", "VNNI is an x86 instruction set"),
    ("xavier", {"target.vnni": "true"}, "target.vnni", "VNNI is an x86 instruction set"),
    ("x86-cpu", {"backends": "[tensorrt]"}, "backends", "TensorRT needs an NVIDIA GPU"),
    ("x86-cpu", {"backends": "[onnxruntime, onnxruntime]"}, "backends", "stands twice"),
    ("xavier", {"target.arch": "x86_64"}, "target.arch", "a Jetson is aarch64"),
    ("x86-cpu", {"target.cpu_features": "[asimd]"}, "target.cpu_features", "an ARM feature"),
    ("arm64-cpu", {"target.cpu_features": "[avx2]"}, "target.cpu_features", "an x86 feature"),
    ("x86-cpu", {"target.sm": "'8.6'"}, "target.sm", "kind cpu has no GPU"),
    ("x86-cpu", {"target.kind": "desktop"}, "target.sm", "needs its compute capability"),
    ("x86-cpu", {"fuser.fuse_on_gpu": "on"}, "fuser.fuse_on_gpu", "no GPU"),
    ("x86-cpu", {"quantization.placement": "tensorrt"}, "quantization.placement", "no GPU"),
    ("x86-cpu", {"quantization.placement": "onnxruntime-arm"}, "quantization.placement", "the target is x86_64"),
    ("xavier", {"quantization.activations": "uint8-asymmetric"}, "quantization.activations", "zero point of 0"),
    ("desktop-cuda", {"precision.mechanism": "weak-flags"}, "precision.mechanism", "strongly typed only"),
    ("xavier", {"precision.mechanism": "strong-typed"}, "precision.mechanism", "needs TensorRT 10"),
    ("xavier", {"precision.mechanism": "weak-flags"}, "precision.mechanism", "calibration cache"),
    ("x86-cpu", {"precision.mechanism": "weak-flags"}, "precision.mechanism", "no TensorRT"),
]


@pytest.mark.parametrize(("name", "overrides", "key", "reason"), IMPOSSIBLE)
def test_what_the_target_cannot_do_is_refused_when_it_is_read(name, overrides, key, reason):
    why = refused(name, overrides)
    assert f"key '{key}'" in why.what
    assert reason in why.what
    assert f"{name.split('@')[0]}.yaml" in why.where
    assert all(f"--set profile.{k}={v}" in why.where for k, v in overrides.items())


def test_int8_on_a_nano_names_the_way_out():
    why = refused("nano", {"precision.allowed": "[fp32, int8]"})
    assert "add onnxruntime to backends" in why.todo


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("xavir", "did you mean 'xavier'?"), ("x86", "there is no profile 'x86'"), ("", "there is no profile ''"),
        ("Xavier-NX", "did you mean 'xavier-nx'?"), ("xavier@", "names no JetPack"), ("@4.6", "no profile ''"),
        ("../secret", "no such profile file"), ("nowhere/mine.yaml", "no such profile file"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered(name, part):
    assert part in refused(name).what


@pytest.mark.parametrize(
    ("name", "lists"),
    [("nano@5.1", "4.6.0, 4.6"), ("xavier@6.2", "4.6.0, 4.6, 5.0, 5.1"), ("thor@4.6", "7.0, 7.1, 7.2")],
)
def test_an_unknown_jetpack_lists_those_that_the_module_has_had(name, lists):
    why = refused(name)
    assert name.split("@")[1] in why.what
    assert lists in why.todo


def test_a_machine_without_jetpack_says_so():
    assert "no Jetson module" in refused("x86-cpu@4.6").what


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("module: xavier\nprecison: {allowed: [fp32]}", "unknown key 'precison', did you mean 'precision'?"),
        ("module: xavier\nprecision: {alowed: [fp32]}", "unknown key 'precision.alowed', did you mean 'allowed'?"),
        ("module: xavir", "key 'module': there is no module 'xavir', did you mean 'xavier'?"),
        ("module: xavier\njetpack: 5.1", 'in quotes, as in "5.1"'),
        ("target: {kind: cpu, arch: x86_64, python: 3.10}", "key 'target.python': a version must be in quotes"),
        ("module: xavier\ndla: 1", "key 'dla': Input should be a valid boolean"),
        ("module: xavier\npasses: {fold: maybe}", "key 'passes.fold': 'maybe' is neither on, off, nor"),
        ("module: xavier\nprecision: {allowed: [fp64]}", "key 'precision.allowed.0'"),
        ("module: xavier\nbackends: []", "key 'backends'"),
        ("module: xavier\nfusion: {strategy: [[FAST, 2]]}", "key 'fusion.strategy.0.0'"),
        ("module: xavier\ntarget: {memory_gb: lots}", "key 'target.memory_gb': Input should be a valid integer"),
        ("title: x", "missing key 'target.kind'"),
        ("target: {kind: cpu}", "missing key 'target.arch'"),
        ("base: xavir", "did you mean 'xavier'?"),
        ("base: ./mine.yaml", "it names a shipped profile"),
        ("[1]", "the file holds a list"),
    ],
)
def test_a_wrong_file_names_key_and_reason(write, text, part):
    why = refused(write(text))
    assert part in why.what


def test_a_file_of_ones_own_works_by_path_and_on_another_jetpack(write):
    intent = "precision: {allowed: [fp32, fp16]}\nbackends: [tensorrt]\npasses: {fold: off, fuse: on}\n"
    path = write("title: my board\nmodule: xavier\n" + intent)
    profile = load_profile(path)
    assert (profile.name, profile.title, profile.jetpack) == ("mine", "my board", "5.1")
    assert profile.passes == {"fold": False, "fuse": True}
    assert load_profile(path + "@4.6").target.tensorrt == "8.2.1"


def test_a_base_is_laid_under_the_file(write):
    profile = load_profile(write("base: xavier@4.6\nroot: /data/models\nfuser: {texpr_fuser: off}\n"))
    assert (profile.title, profile.jetpack, profile.root) == ("Jetson AGX Xavier", "4.6", "/data/models")
    assert profile.fuser["texpr_fuser"] is False and profile.fuser["fuse_on_gpu"] is True


def test_commands_are_lists_of_words(write):
    profile = load_profile(
        write("base: nano\nafter_activate: [systemctl, --user, restart, app]\nhealth: [/bin/true]\n")
    )
    assert profile.after_activate == ("systemctl", "--user", "restart", "app")
    assert "key 'health'" in refused(write("base: nano\nhealth: /bin/true\n")).what


def test_the_schema_is_for_the_file_and_accepts_every_shipped_one():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema of the dev extra is not installed")
    from edgeopt.spec.profile import _folder
    from edgeopt.spec.yaml_file import read_mapping

    jsonschema.Draft202012Validator.check_schema(schema())
    check = jsonschema.Draft202012Validator(schema())
    for name in SHIPPED:
        assert list(check.iter_errors(read_mapping(_folder() / f"{name}.yaml", error=ProfileError))) == []
    assert list(check.iter_errors({"module": "xavier", "passes": {"fold": "off"}})) == []
    for wrong in ({"precison": {}}, {"dla": 1}, {"jetpack": 5.1}, {"precision": {"allowed": ["fp64"]}}):
        assert list(check.iter_errors(wrong)), wrong


def test_every_key_of_the_format_is_described():
    def undescribed(node, path=""):
        for key, value in node.get("properties", {}).items():
            if "description" not in value and "$ref" not in value and "anyOf" not in value:
                yield f"{path}{key}"

    whole = schema()
    assert [*undescribed(whole), *(u for d, n in whole["$defs"].items() for u in undescribed(n, d + "."))] == []


_KEYS = st.sampled_from([*ProfileFile.model_fields, "kind", "arch", "sm", "allowed", "min", "tensorrt", "x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["xavier", "nano", "fp32", "int8", "cpu", "jetson", "x86_64", "5.1", "4.6", "8.6", "tensorrt"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4), max_leaves=10,
)  # fmt: skip


@given(
    data=st.binary(max_size=200) | st.dictionaries(_KEYS, _VALUES, max_size=6).map(lambda d: yaml.safe_dump(d).encode())
)
def test_any_file_gives_a_profile_or_a_profile_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "any.yaml"
    path.write_bytes(data)
    try:
        load_profile(str(path))
    except ProfileError as why:
        assert why.what and why.todo
