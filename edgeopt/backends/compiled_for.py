"""The machine that native code is compiled on: torch, architecture, CPU and compiler, found without importing torch."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import Any

from edgeopt.onboard import environment
from edgeopt.spec.jetpack import version_tuple
from edgeopt.spec.profile import Profile

COMPILER = "g++"
# The names in /proc/cpuinfo of x86 instructions that `-march=native` lets the compiler use; the rest of that line tells
# of the machine (hypervisor, nopl, arch_capabilities) and differs between equal CPUs. On ARM the line has only those.
_X86_INSTRUCTIONS = re.compile(
    r"^(avx|amx|sse|ssse|fma|bmi|f16c|adx|aes|vaes|v?pclmul|gfni|sha_ni|sha512|sm[34]|movbe|popcnt|abm|xsave|cldemote|"
    r"movdir|clflushopt|clwb|clzero|rdrand|rdseed|rdpid|serialize|cx16|lahf_lm|fsgsbase|3dnowprefetch|waitpkg)"
)


def here() -> dict[str, Any]:
    """What a package that is compiled now is bound to: {"torch", "arch", "cpu_flags"}; the flag of its candidate."""
    arch, flags = platform.machine(), environment.describe()["cpu_flags"]
    if arch == "x86_64":
        flags = [flag for flag in flags if _X86_INSTRUCTIONS.match(flag)]
    return {"torch": environment.version("torch"), "arch": arch, "cpu_flags": flags}


def compiler() -> str | None:
    """The first line of the compiler's `--version`; None where there is none."""
    path = shutil.which(COMPILER)
    if path is None or shutil.which("strip") is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


def of_stage_key(profile: Profile) -> dict[str, Any] | None:
    """What the files of the profile's backends depend on beside program and profile; None where none is compiled."""
    return {**here(), "compiler": compiler()} if "aoti" in profile.backends else None


def elsewhere(profile: Profile) -> str | None:
    """Why this machine is not the profile's target, so that code compiled here is none for it; None where it is."""
    target, machine = profile.target, platform.machine()
    if target.kind != "cpu":
        return "it would be compiled for this machine's CPU, and the target has a GPU"
    if target.arch != machine:
        return f"it is compiled on the machine that it runs on: the target is {target.arch}, this machine {machine}"
    lacking = sorted(set(target.cpu_features) - set(environment.describe()["cpu_flags"]))
    if lacking:
        return f"it is compiled on the machine that it runs on, and this one has no {', '.join(lacking)}"
    torch, wanted = environment.version("torch"), target.torch
    if wanted is not None:
        low, high, has = (version_tuple(v)[:2] if v else None for v in (wanted.min, wanted.max, torch))
        if (low and has < low) or (high and has > high):
            return f"a package runs with the torch that compiled it: here {torch}, on the target another"
    return None
