"""Doctor's checks of what there is room for on the device: folders, disks, memory, swap, power, and who may do what."""

from __future__ import annotations

import re

from edgeopt.device.doctor_case import Case, Said, fail, ok, skip, warn
from edgeopt.spec.facts import Disk, PowerMode

MIB, GIB = 1 << 20, 1 << 30
# An engine's build needs TensorRT's own libraries and some working memory: see onboard/trtexec.py
_ENGINE_MB = 1024
_LITTLE_DISK, _NO_DISK, _LITTLE_TMP = GIB, 64 * MIB, 64 * MIB
_DESKTOP_OFF = "sudo systemctl isolate multi-user.target"  # frees 250-800 MB of a Jetson (facts, 'Habits on devices')
_SWAP_FILE = (
    "sudo systemctl disable --now nvzramconfig; sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && "
    "sudo mkswap /swapfile && sudo swapon /swapfile && echo '/swapfile none swap sw 0 0' | sudo tee -a /etc/fstab"
)


def root_folder(case: Case) -> Said:
    probe = case.probe
    if probe.root_writes is None:
        return skip("not tried")
    if probe.root_writes:
        return ok(f"{probe.root} can be written")
    why = f": {probe.complaint}" if probe.complaint else ""
    user = case.facts.user or "$USER"
    return fail(
        f"nothing can be written below {probe.root_at}{why}",
        case.on_device(f"sudo install -d -o {user} /data/edgeopt") + "  # and --root /data/edgeopt",
    )


def root_runs(case: Case) -> Said:
    if case.probe.root_runs is None:
        return skip("not tried: it cannot be written")
    if case.probe.root_runs:
        return ok("programs and libraries may be loaded from the releases' folder")
    mend = case.on_device(f"sudo mount -o remount,exec {case.probe.root_at}")
    if case.needs.op_libraries or "aoti" in case.needs.backends:
        return fail(f"{case.probe.root_at} is mounted noexec: the artifact's libraries cannot be loaded there", mend)
    return warn(f"{case.probe.root_at} is mounted noexec: no op library and no aoti program loads from there", mend)


def root_disk(case: Case) -> Said:
    disk = _disk(case, case.probe.root_at, case.probe.root, case.facts.home)
    if disk is None or disk.free_bytes is None:
        return skip("the device does not say how much is free")
    # a release is staged beside the running one, and every file is written once
    need = case.needs.size_bytes or 0
    mend = case.on_device(f"df -h {disk.path}") + "  # older releases go by: edgeopt push ARTIFACT HOST --keep 1"
    if disk.free_bytes < need + _NO_DISK:
        return fail(f"{_mib(disk.free_bytes)} free at {disk.path}, and {_mib(need + _NO_DISK)} are needed", mend)
    if disk.free_bytes < need + _LITTLE_DISK:
        return warn(f"only {_mib(disk.free_bytes)} free at {disk.path}: engines and a second release may not fit", mend)
    return ok(f"{_mib(disk.free_bytes)} free at {disk.path}")


def tmp_folder(case: Case) -> Said:
    see = case.on_device("du -xsh /tmp/* /tmp/.[!.]* 2>/dev/null | sort -h | tail")
    if case.probe.tmp_writes is False:
        return fail("nothing can be written to the temporary folder: the runner keeps its answers there", see)
    disk = _disk(case, "/tmp")
    if disk is not None and disk.free_bytes is not None and disk.free_bytes < _LITTLE_TMP:
        return fail(f"{_mib(disk.free_bytes)} free in /tmp: the runner keeps its answers there", see)
    if case.probe.tmp_writes is None:
        return skip("not tried")
    return ok("the temporary folder can be written")


def tmp_runs(case: Case) -> Said:
    if case.probe.tmp_runs is None:
        return skip("not tried: it cannot be written")
    if case.probe.tmp_runs:
        return ok("programs may run from the temporary folder")
    return warn(
        "/tmp is mounted noexec: what unpacks a library there fails, such as torch's own compilers",
        case.on_device("sudo mount -o remount,exec /tmp"),
    )


def memory(case: Case) -> Said:
    free, limit = case.facts.memory_available_bytes, case.needs.peak_rss_mb
    if free is None:
        return skip("the device does not say how much memory is free")
    mend = case.on_device(_DESKTOP_OFF if case.jetson else "ps -eo rss,comm --sort=-rss | head")
    if limit is not None and free < limit * MIB:
        return fail(f"{_mib(free)} of memory are free, and the limit of the artifact is {limit:.0f} MiB", mend)
    least = max(_ENGINE_MB * MIB if "tensorrt" in case.needs.backends else 256 * MIB, (case.needs.size_bytes or 0) * 2)
    if free < least:
        for_what = "to build an engine" if "tensorrt" in case.needs.backends else "to load the model"
        return warn(f"{_mib(free)} of memory are free: that may be too little {for_what}", mend)
    return ok(f"{_mib(free)} of memory are free")


def swap(case: Case) -> Said:
    total = case.facts.memory_bytes
    if "tensorrt" not in case.needs.backends and not case.jetson:
        return skip("only engines' builds go by it")
    if total is None or total > 9 * GIB:
        return skip("there is memory enough" if total else "the device does not say how much memory it has")
    swaps = case.probe.swaps
    real = [name for name in swaps if "zram" not in name]
    if real:
        return ok(f"swap on {', '.join(real)}")
    what = "the only swap is zram, which is memory itself" if swaps else "there is no swap"
    return warn(f"{what}: building an engine on {total / GIB:.0f} GiB may be killed", case.on_device(_SWAP_FILE))


def sudo(case: Case) -> Said:
    if case.probe.sudo is None:
        return skip("the device has no nvpmodel")
    if case.probe.sudo:
        return ok("sudo -n runs nvpmodel")
    commands = case.facts.commands
    allowed = ", ".join(
        commands.get(name, f"/usr/{folder}/{name}") for name, folder in (("nvpmodel", "sbin"), ("jetson_clocks", "bin"))
    )
    rule = f"{case.facts.user or 'USER'} ALL=(root) NOPASSWD: {allowed}"
    return warn(
        "sudo asks for a password: power modes cannot be switched, nor clocks fixed",
        case.on_device(f"echo '{rule}' | sudo tee /etc/sudoers.d/edgeopt && sudo visudo -c"),
    )


def power_mode(case: Case) -> Said:
    mode, modes = case.facts.power_mode, case.facts.power_modes
    if mode is None:
        return skip("the device has no power modes" if not case.jetson else "nvpmodel does not say the power mode")
    best = max(modes, key=_power, default=mode)
    if _power(mode) >= _power(best):
        unsure = "" if modes or _power(mode)[0] > 0 else "; the others are not known"
        return ok(f"power mode {mode.name}{unsure}")
    id_ = best.id if best.id is not None else f"$(grep -F 'NAME={best.name}' /etc/nvpmodel.conf | tr -dc 0-9)"
    return warn(
        f"power mode {mode.name}, and {best.name} is the fastest: what is measured is of the slower one",
        case.on_device(f"sudo nvpmodel -m {id_} && nvpmodel -q"),
    )


def _power(mode: PowerMode) -> tuple[int, float]:
    """How fast a mode is by its name: MAXN_SUPER, MAXN, then the watts ('MODE_15W_6CORE', '25W')."""
    name = mode.name.upper()
    if "MAXN" in name:
        return (3 if "SUPER" in name else 2), 0
    watts = re.search(r"(\d+(?:\.\d+)?)\s*W", name)
    return (1, float(watts.group(1))) if watts else (0, 0)


def _disk(case: Case, *paths: str | None) -> Disk | None:
    """The disk that the first of the paths lies on: of those that the device names, the longest one above it."""
    for path in filter(None, paths):
        above = [d for d in case.facts.disks if path == d.path or path.startswith(d.path.rstrip("/") + "/")]
        if above:
            return max(above, key=lambda d: len(d.path))
    return None


def _mib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
