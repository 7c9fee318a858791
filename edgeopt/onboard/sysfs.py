"""Sensors that Linux shows as files: power rails, temperatures, cooling, over-current counters, clocks, energy.

`find(root)` gives columns, `Reader` reads them all at once: one line a sample, a value a column, '-' for one that
cannot be read now. What the values mean is the host's business. A column:

    {"kind": one of KINDS, "name": rail, zone or device, "file": its path, "max": a limit that goes with it or None}

Sources: kernel Documentation/hwmon/ina3221.rst (in1..3 are the channels, 4..6 shunts), power/powercap and
driver-api/thermal/sysfs-api; NVIDIA's kernels of JetPack 4 (iio:device*/rail_name_N) and 5 (soctherm_oc's
ocN_event_cnt); rbonghi/jetson_stats (where a GPU's devfreq and load lie).
"""

import glob
import os
import re

KINDS = (
    "rail_mv", "rail_ma", "rail_mw", "current_alarm", "zone_mc", "cooling", "over_current", "gpu_hz", "gpu_load",
    "cpu_khz", "energy_uj",
)  # fmt: skip
_VALUE_BYTES = 64
_GPU = re.compile(r"gpu|gpc|gp10b|gv11b|ga10b|gb10b")
_SLOWS = re.compile(
    r"-throttle-alert$|^hot-surface-alert$|^(thermal-)?(cpufreq|devfreq)|-balanced$|heavy|^Processor$|^intel_powerclamp$"
)
_LOADS = ("sys/devices/gpu.0/load", "sys/devices/platform/gpu.0/load", "sys/devices/platform/*/*.gpu/load")


def find(root="/"):
    """(columns of everything below `root` that can be read, {path: why not} of what cannot)."""
    found, refused = [], {}
    for finder in (_hwmon_rails, _iio_rails, _zones, _cooling, _over_currents, _gpu, _cpus, _energy):
        for kind, name, path, most in finder(root):
            why = _unreadable(path)
            if why:
                refused[path] = why
            else:
                found.append({"kind": kind, "name": name, "file": path, "max": most})
    return found, refused


def throttled(columns, lines, since, until):
    """Names of the columns that show in `lines`, [seconds, line], that the device slowed itself down meanwhile.

    Strong evidence only: clocks are judged by the host. An alert or an alarm counts while it is on, an over-current
    counter where it is higher than before `since`.
    """
    inside = [text.split() for at, text in lines if since <= at <= until]
    before = [text.split() for at, text in lines if at < since][-1:]
    names = []
    for index, column in enumerate(columns):
        values = [int(row[index]) for row in inside if row[index].isdigit()]
        if column["kind"] in ("cooling", "current_alarm"):
            on = any(value > 0 for value in values)
        elif column["kind"] == "over_current":
            first = [int(row[index]) for row in before if row[index].isdigit()] + values[:1]
            on = bool(values) and max(values) > first[0]
        else:
            continue
        if on:
            names.append("%s %s" % (column["kind"], column["name"]))
    return names


class Reader:
    """Keeps every file open: a sample is one read a file, and no path is looked up again."""

    def __init__(self, columns):
        self._handles = [os.open(column["file"], os.O_RDONLY | os.O_CLOEXEC) for column in columns]

    def line(self):
        """The values of all columns, with a blank between."""
        return " ".join([_value(handle) for handle in self._handles])

    def close(self):
        """Close the files."""
        while self._handles:
            os.close(self._handles.pop())


def _value(handle):
    try:
        words = os.pread(handle, _VALUE_BYTES, 0).split()
    except OSError:  # a sensor that is off, or a device that has gone
        return "-"
    return words[0].decode("ascii", "replace") if len(words) == 1 else "-"


def _hwmon_rails(root):
    """INA3221 from JetPack 5 on: volts and amperes of each channel with a label."""
    for label in _glob(root, "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*/in*_label"):
        number = re.match(r"in(\d+)_label$", os.path.basename(label))
        name = _read(label)
        if number is None or not name or "shunt" in name.lower() or name == "NC":
            continue
        stem = os.path.join(os.path.dirname(label), "curr" + number.group(1))
        if os.path.exists(stem + "_input"):
            yield "rail_mv", name, label[: -len("label")] + "input", None
            yield "rail_ma", name, stem + "_input", None
        if os.path.exists(stem + "_crit_alarm"):
            yield "current_alarm", name, stem + "_crit_alarm", None


def _iio_rails(root):
    """INA3221 of JetPack 4: milliwatts of each channel with a name."""
    for label in _glob(root, "sys/bus/i2c/drivers/ina3221*/*/iio:device*/rail_name_*"):
        name = _read(label)
        path = os.path.join(os.path.dirname(label), "in_power%s_input" % label.rpartition("_")[2])
        if name and name != "NC" and os.path.exists(path):
            yield "rail_mw", name, path, None


def _zones(root):
    for path in _glob(root, "sys/class/thermal/thermal_zone*/temp"):
        name = _read(os.path.join(os.path.dirname(path), "type"))
        # PMIC-Die is a constant 100 degrees, and no sensor
        if name and not name.upper().startswith("PMIC"):
            yield "zone_mc", name, path, None


def _cooling(root):
    """Cooling devices that slow something down while their state is above 0. Fans do not, and a screen dims."""
    for path in _glob(root, "sys/class/thermal/cooling_device*/cur_state"):
        folder = os.path.dirname(path)
        name = _read(os.path.join(folder, "type"))
        if name and _SLOWS.search(name):
            yield "cooling", name, path, _number(_read(os.path.join(folder, "max_state")))


def _over_currents(root):
    for path in _glob(root, "sys/class/hwmon/hwmon*/name"):
        if _read(path) == "soctherm_oc":
            folder = os.path.dirname(path)
            for count in _glob("", os.path.join(glob.escape(folder), "oc*_event_cnt")):
                yield "over_current", os.path.basename(count).partition("_")[0], count, None


def _gpu(root):
    for path in _glob(root, "sys/class/devfreq/*/cur_freq"):
        folder = os.path.dirname(path)
        if _GPU.search(os.path.basename(folder)):
            yield "gpu_hz", os.path.basename(folder), path, _number(_read(os.path.join(folder, "max_freq")))
    for pattern in _LOADS:
        for path in _glob(root, pattern):
            yield "gpu_load", "gpu", path, 1000  # in thousandths


def _cpus(root):
    """A clock for each CPU that may differ: those that share a policy share its file."""
    seen = set()
    for path in _glob(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"):
        folder = os.path.dirname(path)
        if os.path.realpath(folder) not in seen:
            seen.add(os.path.realpath(folder))
            most = _number(_read(os.path.join(folder, "scaling_max_freq")))
            yield "cpu_khz", os.path.basename(os.path.dirname(folder)), path, most


def _energy(root):
    """RAPL's counters, which since 2020 only root may read; `max` is where they begin anew."""
    for path in _glob(root, "sys/class/powercap/*rapl:*/energy_uj"):
        folder = os.path.dirname(path)
        name = _read(os.path.join(folder, "name"))
        if name:
            most = _number(_read(os.path.join(folder, "max_energy_range_uj")))
            yield "energy_uj", "%s %s" % (os.path.basename(folder), name), path, most


def _glob(root, pattern):
    """The paths in the order of the numbers in them: hwmon10 after hwmon2."""
    found = glob.glob(os.path.join(glob.escape(root), pattern) if root else pattern)
    return sorted(found, key=lambda path: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", path)])


def _unreadable(path):
    """Why a file cannot be opened, None where it can: a sensor that is off now may be on later."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror
    return None


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read().strip("\0 \n")
    except OSError:
        return None


def _number(text):
    return int(text) if text and text.isdigit() else None
