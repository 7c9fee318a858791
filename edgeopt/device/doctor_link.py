"""Doctor's checks of the way to the device: login shell, sessions, the tools that push needs, the clock."""

from __future__ import annotations

from pathlib import PurePosixPath

from edgeopt.device.doctor_case import Case, Said, fail, ok, skip, warn

_SKEW_S = 60  # a device without a battery for its clock is years behind, one with it seconds
_QUIET_BASH = "sed -i '1i case $- in *i*) ;; *) return ;; esac' ~/.bashrc"
_QUIET_FISH = "grep -rn 'echo\\|printf' ~/.config/fish"


def shell(case: Case) -> Said:
    name = PurePosixPath(case.facts.shell or "").name
    noise = case.probe.noise.strip()
    if noise:
        first = "".join(c for c in noise.splitlines()[0] if c.isprintable())[:60]
        mend = case.on_device(_QUIET_FISH if name == "fish" else _QUIET_BASH)
        return warn(f"the login shell prints '{first}' before every command: edgeopt copes, scp and rsync break", mend)
    if not name:
        return skip("the device does not say which login shell it has")
    if name in ("nologin", "false"):
        return fail(f"the login shell is {name}", case.on_device(f"sudo chsh -s /bin/sh {case.facts.user or 'USER'}"))
    aside = "" if name in ("sh", "bash", "dash", "zsh", "ash", "busybox") else "; commands are run by sh all the same"
    return ok(f"login shell {name}{aside}")


def sessions(case: Case) -> Said:
    said = case.probe.second_session
    if said is None:
        return skip("not tried")
    if said == "":
        return ok("a second command runs beside one that is held")
    mend = (
        "sudo sed -i 's/^[# ]*MaxSessions.*/MaxSessions 10/' /etc/ssh/sshd_config && sudo systemctl reload ssh; "
        "grep MaxSessions /etc/ssh/sshd_config"
    )
    return fail(
        f"no second command runs while one is held, as push and deploy need it: {said}; sshd has MaxSessions 1",
        case.on_device(mend),
    )


def lock(case: Case) -> Said:
    if case.probe.locks is None:
        return skip("not tried: there is no folder that may be written")
    if case.probe.locks:
        return ok("flock takes a lock")
    return fail("flock is missing or does not work: push locks by it", _install(case, "util-linux"))


def rename(case: Case) -> Said:
    if case.probe.renames is None:
        return skip("not tried: there is no folder that may be written")
    if case.probe.renames:
        return ok("mv -T switches a link in one step")
    return fail("mv has no -T: a release cannot be switched in one step", _install(case, "coreutils"))


def hashes(case: Case) -> Said:
    if case.probe.hashes is None:
        return skip("not tried")
    if case.probe.hashes:
        return ok("sha256 is computed there")
    return fail(
        "there is neither sha256sum, shasum, openssl nor Python: what arrives cannot be checked",
        _install(case, "coreutils"),
    )


def clock(case: Case) -> Said:
    skew = case.facts.clock_skew_s
    if skew is None:
        return skip("the device does not say what time it is")
    if abs(skew) <= _SKEW_S:
        return ok(f"the clocks are {abs(skew):.0f} s apart")
    days = abs(skew) / 86400
    much = f"{days:.0f} days" if days >= 2 else f"{abs(skew) / 60:.0f} minutes"
    way = "ahead" if skew > 0 else "behind"
    set_it = "sudo timedatectl set-ntp true"
    if case.host is not None:  # without internet there, our clock is the nearest
        set_it = f"{case.on_device(set_it)}  # without internet there: ssh -t {case.host} sudo date -u -s @$(date +%s)"
    return warn(f"the device's clock is {much} {way}: certificates, signatures and logs are wrong there", set_it)


def selinux(case: Case) -> Said:
    if case.probe.selinux is None:
        return ok("no SELinux")
    if not case.probe.selinux:
        return ok("SELinux is permissive")
    return warn(
        "SELinux enforces its rules: it may refuse programs below the releases' folder",
        case.on_device("sudo ausearch -m avc -ts recent"),
    )


def emulation(case: Case) -> Said:
    if case.facts.emulated is None:
        return ok("a real machine")
    return warn(
        f"it is emulated ({case.facts.emulated}): nothing that is timed there is evidence",
        "edgeopt validate ARTIFACT HOST  # on the real device, for latency",
    )


def _install(case: Case, package: str) -> str:
    return case.on_device(f"sudo apt install -y {package}")
