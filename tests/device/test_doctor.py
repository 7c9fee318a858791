"""Doctor's checks on composed devices of every generation: each fault is told, and a device in order is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgeopt
from edgeopt.device import doctor, doctor_here, doctor_probe, facts
from edgeopt.device.doctor_case import Case, Needs, Probe, needs_of
from edgeopt.device.doctor_here import Engine, HereFacts
from edgeopt.errors import HostError
from edgeopt.spec.facts import DeviceFacts, Disk, PowerMode
from edgeopt.spec.profile import load_profile, profile_names

GIB, MIB = 1 << 30, 1 << 20
DISKS = (Disk(path="/home/nvidia/.edgeopt", free_bytes=20 * GIB), Disk(path="/tmp", free_bytes=20 * GIB))
MODES = (PowerMode(name="MAXN", id=0), PowerMode(name="MODE_10W", id=1), PowerMode(name="MODE_30W_ALL", id=3))
COMMON = {
    "arch": "aarch64", "memory_bytes": 30 * GIB, "memory_available_bytes": 20 * GIB, "disks": DISKS, "user": "nvidia",
    "shell": "/bin/bash", "home": "/home/nvidia", "clock_skew_s": 0.4, "power_mode": MODES[0], "power_modes": MODES,
    "commands": {"nvpmodel": "/usr/sbin/nvpmodel", "jetson_clocks": "/usr/bin/jetson_clocks"},
}  # fmt: skip
GOOD = Probe(
    root="/home/nvidia/.edgeopt", root_at="/home/nvidia/.edgeopt", root_writes=True, root_runs=True, tmp_writes=True,
    tmp_runs=True, renames=True, locks=True, hashes=True, sudo=True, trtexec="/usr/src/tensorrt/bin/trtexec",
    libraries=("libcuda", "libcudart", "libnvinfer"), groups=("video",), gpu_node=True, numpy_status=0,
    second_session="",
)  # fmt: skip
# generation -> (profile, its own facts): what a board of that generation in order says
GENERATIONS = {
    "R32": ("nano", {
        "module": "nano", "soc": "tegra210", "sm": "5.3", "l4t": "32.7.6", "jetpack": "4.6", "cuda": "10.2",
        "tensorrt": "8.2.1", "python": "3.6.9", "packages": {"torch": "1.10.0", "numpy": "1.19.4"},
        "torch_cuda": "10.2",
    }),
    "R35": ("xavier", {
        "module": "xavier", "soc": "tegra194", "sm": "7.2", "l4t": "35.6.4", "jetpack": "5.1", "cuda": "11.4",
        "tensorrt": "8.5.2", "python": "3.8.10", "packages": {"torch": "2.1.0a0+41361538.nv23.06", "numpy": "1.23.5"},
        "torch_cuda": "11.4",
    }),
    "R36": ("orin-agx@6.2", {
        "module": "orin-agx", "soc": "tegra234", "sm": "8.7", "l4t": "36.5.0", "jetpack": "6.2", "cuda": "12.6",
        "tensorrt": "10.3.0", "python": "3.10.12", "packages": {"torch": "2.8.0", "numpy": "1.26.4"},
        "torch_cuda": "12.6",
    }),
    "R39": ("orin-agx@7.2", {
        "module": "orin-agx", "soc": "tegra234", "sm": "8.7", "l4t": "39.2.1", "jetpack": "7.2", "cuda": "13.2",
        "tensorrt": "10.16.2", "python": "3.12.3", "packages": {"torch": "2.12.0", "numpy": "2.1.0"},
        "torch_cuda": "13.2",
    }),
    "Thor": ("thor@7.0", {
        "module": "thor", "soc": "tegra264", "sm": "11.0", "l4t": "38.2.2", "jetpack": "7.0", "cuda": "13.0",
        "tensorrt": "10.13.3", "python": "3.12.3", "packages": {"torch": "2.9.0", "numpy": "2.1.0"},
        "torch_cuda": "13.0",
    }),
}  # fmt: skip


def case_of(generation: str = "R35", *, probe: dict | None = None, needs: dict | None = None, **changes) -> Case:
    """A board of that generation in order, with what `changes` replaces."""
    name, own = GENERATIONS[generation]
    profile = load_profile(name)
    return Case(
        DeviceFacts(**{**COMMON, **own, **changes}), GOOD.model_copy(update=probe or {}),
        needs_of(profile).model_copy(update=needs or {}), profile, "jetson",
    )  # fmt: skip


def said(case: Case, name: str):
    return next(f for f in doctor.examine(case) if f.name == name)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_board_in_order_is_left_alone(generation):
    wrong = [f for f in doctor.examine(case_of(generation)) if f.verdict in ("warn", "fail")]
    assert wrong == []


FAULTS = [
    # check, verdict, in the sentence, in the command, what is wrong
    ("login shell", "warn", "'Welcome to Jetson'", ".bashrc", {"probe": {"noise": "Welcome to Jetson\nhave fun\n"}}),
    ("login shell", "warn", "'hi'", "fish", {"shell": "/usr/bin/fish", "probe": {"noise": "hi\n"}}),
    ("login shell", "fail", "nologin", "chsh", {"shell": "/usr/sbin/nologin"}),
    ("sessions", "fail", "MaxSessions 1", "sshd_config", {"probe": {"second_session": "the connection broke"}}),
    ("lock", "fail", "flock", "util-linux", {"probe": {"locks": False}}),
    ("rename", "fail", "mv has no -T", "coreutils", {"probe": {"renames": False}}),
    ("hash", "fail", "sha256sum", "coreutils", {"probe": {"hashes": False}}),
    ("clock", "warn", "20454 days behind", "date -u -s @", {"clock_skew_s": -20454 * 86400.0}),
    ("clock", "warn", "3 minutes ahead", "set-ntp", {"clock_skew_s": 180.0}),
    ("selinux", "warn", "SELinux", "ausearch", {"probe": {"selinux": True}}),
    ("emulation", "warn", "qemu-user 7.2", "real device", {"emulated": "qemu-user 7.2"}),
    ("architecture", "fail", "x86_64", "--profile x86-cpu", {"arch": "x86_64"}),
    ("module", "fail", "sm_53", "--profile nano", {"module": "nano", "sm": "5.3", "soc": "tegra210"}),
    ("module", "warn", "xavier-nx", "--profile xavier-nx", {"module": "xavier-nx"}),
    ("jetpack", "warn", "JetPack 4.6", "--profile xavier@4.6", {"l4t": "32.7.6"}),
    ("jetpack", "warn", "no table", "detect", {"l4t": "77.1.0"}),
    ("python", "fail", "does not run", "apt install -y python3", {"python": None}),
    ("python", "fail", "3.5.2 is older", "--python", {"python": "3.5.2"}),
    ("python", "warn", "made for Python 3.8", "python3.8", {"python": "3.10.4"}),
    ("runtimes", "warn", "left is tensorrt", "cp38", {"packages": {}}),
    ("runtimes", "fail", "no runtime", "pip install", {"packages": {}, "tensorrt": None}),
    ("numpy", "fail", "illegal instruction", "OPENBLAS_CORETYPE=ARMV8", {"probe": {"numpy_status": 132}}),
    ("numpy", "warn", "cannot be imported", "--force-reinstall numpy", {"probe": {"numpy_status": 1}}),
    ("torch", "warn", "1.11 to 2.1", "cp38", {"packages": {"torch": "2.5.1"}}),
    ("torch", "warn", "1.11 to 2.1", "JetPack 5.1", {"packages": {"torch": "1.10.2"}}),
    ("torch and cuda", "warn", "CPU", "torch.version.cuda", {"torch_cuda": None}),
    ("torch and cuda", "fail", "built for CUDA 12.6", "cp38", {"torch_cuda": "12.6"}),
    ("tensorrt", "warn", "8.6.1", "profile.target.tensorrt=8.6.1", {"tensorrt": "8.6.1"}),
    ("tensorrt", "warn", "8.6", "profile.target.tensorrt=8.6.0", {"tensorrt": "8.6"}),  # 8.6 would be read as a number
    ("tensorrt", "fail", "another way", "tensorrt=11.1.0", {"tensorrt": "11.1.0"}),
    ("tensorrt", "warn", "left is torchscript", "apt install -y tensorrt", {"tensorrt": None}),
    ("tensorrt", "fail", "not installed", "tensorrt", {"tensorrt": None, "packages": {}}),
    ("opset", "fail", "TensorRT 8.2.1 up to 13", "onnx_opset_max=13", {"tensorrt": "8.2.1"}),
    ("opset", "fail", "opset 18 is written", "=17", {"needs": {"onnx_opset": 18, "exact": True}}),
    ("trtexec", "warn", "no trtexec", "libnvinfer-bin", {"probe": {"trtexec": None}}),
    ("gpu", "fail", "group video", "usermod -aG video", {"probe": {"gpu_node": False}}),
    ("gpu", "fail", "no CUDA driver", "nvidia-jetpack", {"cuda": None, "probe": {"libraries": ()}}),
    ("root folder", "fail", "Read-only file system", "--root /data/edgeopt",
     {"probe": {"root_writes": False, "complaint": "mktemp: Read-only file system"}}),
    ("root runs programs", "warn", "noexec", "remount,exec", {"probe": {"root_runs": False}}),
    ("root runs programs", "fail", "libraries", "remount,exec",
     {"probe": {"root_runs": False}, "needs": {"op_libraries": True}}),
    ("root disk", "fail", "30 MiB free", "df -h",
     {"disks": (Disk(path="/home/nvidia/.edgeopt", free_bytes=30 * MIB),)}),
    ("root disk", "fail", "are needed", "df -h", {"needs": {"size_bytes": 40 * GIB}}),
    ("root disk", "warn", "500 MiB", "df -h", {"disks": (Disk(path="/", free_bytes=500 * MIB),)}),
    ("tmp folder", "fail", "temporary folder", "du -xsh", {"probe": {"tmp_writes": False}}),
    ("tmp folder", "fail", "1 MiB free in /tmp", "du -xsh", {"disks": (*DISKS[:1], Disk(path="/tmp", free_bytes=MIB))}),
    ("tmp runs programs", "warn", "noexec", "remount,exec /tmp", {"probe": {"tmp_runs": False}}),
    ("memory", "fail", "limit of the artifact", "multi-user.target",
     {"memory_available_bytes": 300 * MIB, "needs": {"peak_rss_mb": 400.0}}),
    ("memory", "warn", "build an engine", "multi-user.target", {"memory_available_bytes": 300 * MIB}),
    ("swap", "warn", "zram", "mkswap", {"memory_bytes": 4 * GIB, "probe": {"swaps": ("/dev/zram0", "/dev/zram1")}}),
    ("swap", "warn", "no swap", "mkswap", {"memory_bytes": 4 * GIB}),
    ("sudo", "warn", "password", "NOPASSWD: /usr/sbin/nvpmodel, /usr/bin/jetson_clocks", {"probe": {"sudo": False}}),
    ("power mode", "warn", "MAXN is the fastest", "nvpmodel -m 0", {"power_mode": MODES[1]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "verdict", "sentence", "mend", "changes"), FAULTS)
def test_a_fault_is_told_with_what_mends_it(name, verdict, sentence, mend, changes):
    found = said(case_of(**changes), name)
    assert (found.verdict, found.name) == (verdict, name), found
    assert sentence in found.sentence and "\n" not in found.sentence
    assert mend in found.mend
    assert said(case_of(), name).verdict in ("ok", "skip")


def test_every_check_can_find_something():
    assert {name for name, _ in doctor.CHECKS} - {row[0] for row in FAULTS} == {"cpu"}  # below: x86 alone
    plain = Case(DeviceFacts(arch="x86_64", cpu_flags=("sse4_2",)), GOOD, Needs(), load_profile("x86-cpu"))
    assert said(plain, "cpu").verdict == "fail" and "avx2" in said(plain, "cpu").sentence
    vnni = Case(
        DeviceFacts(arch="x86_64", cpu_flags=("avx2",)), GOOD, Needs(),
        load_profile("x86-cpu", {"target.vnni": "true"}),
    )  # fmt: skip
    assert "VNNI" in said(vnni, "cpu").sentence and "vnni=false" in said(vnni, "cpu").mend


def test_numpy_of_jetpack_4_is_told_where_it_was_not_tried():
    old = {"packages": {"torch": "1.10.0", "numpy": "1.19.5"}, "probe": {"numpy_status": None}}
    assert said(case_of("R32", **old), "numpy").verdict == "warn"
    assert said(case_of("R35", **old), "numpy").verdict == "skip"


def test_a_torch_without_kernels_for_thor_is_told():
    assert "sm_110" in said(case_of("Thor", torch_cuda="12.8"), "torch and cuda").sentence


def test_the_last_onnxruntime_for_an_old_python_is_named():
    profile = load_profile("arm64-cpu")
    facts_ = DeviceFacts(arch="aarch64", python="3.6.9", packages={"onnxruntime": "1.6.0"})
    found = said(Case(facts_, GOOD, Needs(backends=("openvino",)), profile), "runtimes")
    assert found.verdict == "fail" and "pip install openvino" in found.mend
    found = said(Case(DeviceFacts(python="3.6.9"), GOOD, Needs(backends=("onnxruntime",)), profile), "runtimes")
    assert found.mend.endswith("pip install onnxruntime==1.10.0")


@pytest.mark.parametrize(
    ("now", "modes", "best"),
    [
        ("15W", ("MAXN_SUPER", "15W", "25W", "MAXN"), "MAXN_SUPER"),
        ("MODE_15W_2CORE", ("MODE_10W", "MODE_15W_2CORE", "MODE_20W_6CORE"), "MODE_20W_6CORE"),
        ("5W", ("MAXN", "5W"), "MAXN"),
    ],
)
def test_the_fastest_power_mode_is_known_by_its_name(now, modes, best):
    modes = tuple(PowerMode(name=name, id=i) for i, name in enumerate(modes))
    assert (
        f"{best} is the fastest"
        in said(case_of(power_mode=PowerMode(name=now), power_modes=modes), "power mode").sentence
    )


RECORDINGS = sorted(
    p for p in (Path(edgeopt.__file__).parent / "testing" / "recordings").iterdir() if p.is_dir()
)  # fmt: skip


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda p: p.name)
def test_a_recorded_device_is_judged_against_every_profile(folder):
    known = facts.recorded(folder)
    for name in profile_names():
        profile = load_profile(name)
        for probe in (Probe(), GOOD):
            findings = doctor.examine(Case(known, probe, needs_of(profile), profile, "jetson"))
            assert [f.name for f in findings] == [name for name, _ in doctor.CHECKS]
            assert all(f.sentence and bool(f.mend) == (f.verdict in ("warn", "fail")) for f in findings)
    own = {name: load_profile(name) for name in profile_names()}
    same = [p for p in own.values() if known.module and p.target.module == known.module]
    for profile in same:
        findings = {f.name: f for f in doctor.examine(Case(known, GOOD, needs_of(profile), profile, "jetson"))}
        assert findings["architecture"].verdict == findings["module"].verdict == "ok"


def test_a_device_that_says_nothing_is_skipped_and_not_failed_for_what_it_hides():
    verdicts = {f.name: f.verdict for f in doctor.examine(Case(DeviceFacts(), Probe()))}
    assert [name for name, verdict in verdicts.items() if verdict == "fail"] == ["python"]


def test_an_unreachable_device_is_a_finding():
    findings = doctor.unreachable(HostError("the key has changed", where="jetson:22", todo="ssh-keygen -R jetson"))
    assert findings[0].verdict == "fail" and findings[0].mend == "ssh-keygen -R jetson"
    assert {f.verdict for f in findings[1:]} == {"skip"} and len(findings) == len(doctor.CHECKS) + 1


HERE = HereFacts(
    python="3.11.7", arch="x86_64", ssh="OpenSSH_9.2p1", keys=("id_ed25519",), disk_free_bytes=50 * GIB, disk_path="/w",
    packages={"torch": "2.13.0+cpu", "onnxruntime": "1.32.0", "torchao": "0.18.0", "onnx": "1.20"},
    engines=(Engine(name="podman", version="4.3"),), binfmt="/usr/bin/qemu-aarch64-static",
    binfmt_flags="F", qemu="7.2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "verdict", "sentence", "mend", "changes"),
    [
        ("python", "fail", "3.14.0", "venv", {"python": "3.14.0"}),
        ("packages", "fail", "torchao is missing", "install --upgrade torchao onnxruntime",
         {"packages": {"torch": "2.13.0", "onnxruntime": "1.17.0", "onnx": "1.20"}}),
        ("container engine", "warn", "no container engine", "podman", {"engines": ()}),
        ("container engine", "warn", "permission denied", "usermod -aG docker",
         {"engines": (Engine(name="docker", complaint="permission denied while connecting"),)}),
        ("container engine", "warn", "Cannot connect", "systemctl start docker",
         {"engines": (Engine(name="docker", complaint="Cannot connect to the Docker daemon"),)}),
        ("qemu and binfmt", "warn", "do not run here", "update-binfmts --enable qemu-aarch64", {"binfmt": None}),
        ("qemu and binfmt", "warn", "does not run", "qemu-user-static", {"qemu": None}),
        ("qemu and binfmt", "warn", "no flag F", "binfmt-support", {"binfmt_flags": "OC"}),
        ("ssh", "warn", "no ssh client", "openssh-client", {"ssh": None}),
        ("keys", "warn", "no key", "ssh-keygen", {"keys": (), "agent_keys": 0}),
        ("disk", "fail", "0.1 GiB", "df -h", {"disk_free_bytes": 100 * MIB}),
        ("disk", "warn", "1.0 GiB", "df -h", {"disk_free_bytes": GIB}),
        ("disk", "fail", "cannot be written", "chown", {"disk_writable": False}),
    ],
)  # fmt: skip
def test_a_fault_of_this_machine_is_told(name, verdict, sentence, mend, changes):
    profile = load_profile("xavier")
    whole = {f.name: f for f in doctor_here.examine(HERE, profile, needs_of(profile), login="fails")}
    assert {name: f.verdict for name, f in whole.items() if f.verdict != "ok"} == {"torch against the target": "warn"}
    found = doctor_here.examine(HERE.model_copy(update=changes), profile, needs_of(profile), login="fails")
    found = next(f for f in found if f.name == name)
    assert found.verdict == verdict and sentence in found.sentence and mend in found.mend


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "enabled\ninterpreter /usr/bin/qemu-aarch64-static\nflags: OCF\noffset 0\n",
            ("/usr/bin/qemu-aarch64-static", "OCF"),
        ),
        ("enabled\ninterpreter /q\nflags: \n", ("/q", "")),
        ("disabled\ninterpreter /q\nflags: F\n", (None, "")),
        ("", (None, "")),
    ],
)
def test_binfmt_files_are_read(text, found):
    assert doctor_here.parse_binfmt(text) == found


@given(st.text())
def test_whatever_a_device_prints_makes_a_probe(text):
    assert isinstance(doctor_probe.parse(text), Probe)


def test_the_lines_of_the_command_become_a_probe():
    text = "root=/r\nroot_at=/\nroot_writes=no\ncomplaint=mktemp: no\nswap=/dev/zram0\nswap=/swapfile\nselinux=1\n"
    found = doctor_probe.parse(text + "groups=sudo video\nnumpy_status=132\nlibrary=libcuda\nhalf", "hello")
    assert found == Probe(
        noise="hello", root="/r", root_at="/", root_writes=False, complaint="mktemp: no", hashes=False, selinux=True,
        swaps=("/dev/zram0", "/swapfile"), groups=("sudo", "video"), numpy_status=132, libraries=("libcuda",),
    )  # fmt: skip
