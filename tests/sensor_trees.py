"""Recorded trees of sensors, as /sys shows them on boards, and commands that stand in for NVIDIA's."""

from __future__ import annotations

from pathlib import Path

RAIL = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4"
ORIN_NX = {  # JetPack 5 and 6
    **{f"{RAIL}/in{n}_label": name for n, name in ((1, "VDD_IN"), (2, "VDD_CPU_GPU_CV"), (3, "VDD_SOC"))},
    f"{RAIL}/in7_label": "sum of shunt voltages",
    **{f"{RAIL}/in{n}_input": "5000" for n in (1, 2, 3, 7)},
    **{f"{RAIL}/curr{n}_input": str(amperes) for n, amperes in ((1, 1200), (2, 300), (3, 200), (4, 500))},
    f"{RAIL}/curr1_crit_alarm": "0",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
    "sys/class/thermal/thermal_zone0/temp": "47937",
    "sys/class/thermal/thermal_zone2/type": "cv0-thermal",
    "sys/class/thermal/thermal_zone2/temp": "-256000",
    "sys/class/thermal/thermal_zone10/type": "PMIC-Die",
    "sys/class/thermal/thermal_zone10/temp": "100000",
    "sys/class/thermal/cooling_device0/type": "pwm-fan",
    "sys/class/thermal/cooling_device0/cur_state": "3",
    "sys/class/thermal/cooling_device2/type": "cpu-throttle-alert",
    "sys/class/thermal/cooling_device2/cur_state": "0",
    "sys/class/thermal/cooling_device2/max_state": "1",
    "sys/class/hwmon/hwmon1/name": "soctherm_oc",
    "sys/class/hwmon/hwmon1/oc1_event_cnt": "7",
    "sys/class/hwmon/hwmon1/oc3_event_cnt": "2",
    "sys/class/devfreq/17000000.ga10b/cur_freq": "611000000",
    "sys/class/devfreq/17000000.ga10b/max_freq": "918000000",
    "sys/class/devfreq/15340000.vic/cur_freq": "729600000",
    "sys/devices/gpu.0/load": "320",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1984000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1984000",
}  # fmt: skip
IIO = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
NANO = {  # JetPack 4
    f"{IIO}/rail_name_0": "POM_5V_IN",
    f"{IIO}/in_power0_input": "2750",
    f"{IIO}/rail_name_1": "POM_5V_GPU",
    f"{IIO}/in_power1_input": "120",
    f"{IIO}/rail_name_2": "NC",
    f"{IIO}/in_power2_input": "0",
}
DESKTOP = {
    "sys/class/powercap/intel-rapl:0/name": "package-0",
    "sys/class/powercap/intel-rapl:0/energy_uj": "262143000000",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850",
    "sys/class/powercap/intel-rapl:0:0/name": "core",
    "sys/class/powercap/intel-rapl:0:0/energy_uj": "1",
    "sys/class/thermal/cooling_device0/type": "LCD",
    "sys/class/thermal/cooling_device0/cur_state": "5",
    "sys/class/thermal/cooling_device1/type": "Processor",
    "sys/class/thermal/cooling_device1/cur_state": "0",
}


def plant(root: Path, *trees: dict[str, str]) -> Path:
    """Write the files of `trees` below `root`."""
    for tree in trees:
        for path, value in tree.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(value + "\n")
    return root


def command(folder: Path, name: str, text: str) -> Path:
    """An executable sh script `folder`/NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path
