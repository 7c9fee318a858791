"""What a device is: values that `detect` reads and that doctor, validation and the choice of a profile go by.

None means that the device does not say, never that it has none; an empty tuple or dict means that there is none.
"""

from __future__ import annotations

from edgeopt.spec.values import Value


class PowerMode(Value):
    """A mode of nvpmodel. Ids are per board, names are what people mean, so a mode is selected by name."""

    name: str
    id: int | None = None


class Disk(Value):
    """The file system that a path lies on."""

    path: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    writable: bool | None = None


class DeviceFacts(Value):
    """Facts of one device; every field may be unknown. Versions as text, sizes in bytes, temperatures in °C."""

    model: str | None = None  # 'NVIDIA Jetson AGX Xavier'
    module: str | None = None  # a name of spec.jetpack.MODULES
    soc: str | None = None  # 'tegra194'
    sm: str | None = None  # '7.2'
    gpus: tuple[str, ...] = ()
    l4t: str | None = None  # '35.6.1'
    jetpack: str | None = None  # '5.1', the line of spec.jetpack.RELEASES
    cuda: str | None = None
    cudnn: str | None = None
    tensorrt: str | None = None

    arch: str | None = None  # 'aarch64', 'x86_64'
    system: str | None = None  # 'Ubuntu 20.04.6 LTS', from os-release
    kernel: str | None = None
    libc: str | None = None  # glibc's version
    cpu_model: str | None = None
    cpu_flags: tuple[str, ...] = ()
    cpu_count: int | None = None
    cpu_online: int | None = None

    python: str | None = None
    packages: dict[str, str] = {}  # torch, onnxruntime, openvino, tensorrt, numpy: version, of that Python
    torch_cuda: str | None = None  # the CUDA that its torch was built for

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_bytes: int | None = None
    disks: tuple[Disk, ...] = ()  # of the releases' root, of the home, of /tmp

    power_mode: PowerMode | None = None
    power_modes: tuple[PowerMode, ...] = ()
    clocks_mhz: dict[str, float] = {}  # 'cpu', 'gpu', 'emc': current
    clocks_max_mhz: dict[str, float] = {}
    temperatures_c: dict[str, float] = {}  # thermal zone -> now; sensors that are off are left out
    rails: tuple[str, ...] = ()  # power rails that can be read
    sensors: tuple[str, ...] = ()  # 'tegrastats', 'ina3221', 'thermal', 'devfreq', 'nvidia-smi', 'rapl'

    user: str | None = None
    shell: str | None = None
    home: str | None = None
    clock_skew_s: float | None = None  # the device's clock less ours
    commands: dict[str, str] = {}  # a command that we know -> its path, where it is there: 'flock', 'trtexec', 'docker'
    container: str | None = None  # 'docker', 'podman', 'lxc' where it runs in one
    emulated: str | None = None  # 'qemu-user 7.2', 'qemu-system': nothing that is timed here is evidence
