"""The first process of a virtual device, in namespaces of its own: mounts its file system, runs sshd, ends with stdin.

    unshare --mount --pid --uts --ipc --fork --kill-child python -I inside.py SPEC.json

Its mounts are seen by nobody else and vanish with it; all that runs there ends with it. Standard library only: it is
run as a file. SPEC.json: see `Spec` in namespace.py.
"""

import glob
import json
import os
import select
import socket
import subprocess
import sys

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def main(spec):
    root = spec["root"]
    socket.sethostname(spec["hostname"])
    os.makedirs(root, exist_ok=True)
    mount_root(spec)
    mount("-t", "proc", "proc", f"{root}/proc")
    for name, path in spec["proc"].items():
        if os.path.exists(f"{root}/proc/{name}"):
            mount("--bind", path, f"{root}/proc/{name}")
    mount_dev(root)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{root}/run")
    os.mkdir(f"{root}/run/sshd")
    if spec["tmp_mb"] is not None:
        mount("-t", "tmpfs", "-o", f"mode=1777,size={spec['tmp_mb']}m", "tmpfs", f"{root}/tmp")
    for pattern in spec["removed"]:
        subprocess.run(["rm", "-rf", "--", *glob.glob(f"{root}/{pattern}")], check=True)
    if spec["read_only_home"]:
        mount("--bind", f"{root}/{spec['home']}", f"{root}/{spec['home']}")
        mount("-o", "remount,bind,ro", f"{root}/{spec['home']}")
    for name in ("passwd", "group", "shadow"):  # the users that sshd knows are the device's
        if os.path.exists(f"/etc/{name}"):
            mount("--bind", f"{root}/etc/{name}", f"/etc/{name}")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd insists on it
    sshd = subprocess.Popen(spec["sshd"], stdin=subprocess.DEVNULL)
    serve(sshd.pid, spec["until_stdin_ends"])


def mount_root(spec):
    """The cached layers below, what this device writes above: in a folder, or in memory of a size where it has one."""
    upper, work, lower = spec["upper"], spec["work"], ":".join(spec["layers"])
    if spec["disk_mb"] is not None:
        upper, work = in_memory(spec, f"size={spec['disk_mb']}m")
    options = "lowerdir={},upperdir={},workdir={}"
    try:
        mount("-t", "overlay", "-o", options.format(lower, upper, work), "overlay", spec["root"])
    except subprocess.CalledProcessError:  # the folder may lie on an overlay itself, as in a container
        if spec["disk_mb"] is not None:
            raise
        upper, work = in_memory(spec, "size=4g")
        mount("-t", "overlay", "-o", options.format(lower, upper, work), "overlay", spec["root"])


def in_memory(spec, options):
    base = spec["work"]
    mount("-t", "tmpfs", "-o", f"mode=755,{options}", "tmpfs", base)
    subprocess.run(["cp", "-a", spec["upper"], f"{base}/upper"], check=True)
    os.mkdir(f"{base}/work")
    return f"{base}/upper", f"{base}/work"


def mount_dev(root):
    mount("-t", "tmpfs", "-o", "mode=755,size=64k", "tmpfs", f"{root}/dev")
    for name in DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        mount("--bind", f"/dev/{name}", f"{root}/dev/{name}")
    for name, kind, options in (("pts", "devpts", "newinstance,ptmxmode=0666"), ("shm", "tmpfs", "mode=1777")):
        os.mkdir(f"{root}/dev/{name}")
        mount("-t", kind, "-o", options, kind, f"{root}/dev/{name}")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")


def mount(*argv):
    subprocess.run(["mount", *argv], check=True, stdin=subprocess.DEVNULL)


def serve(sshd, until_stdin_ends):
    """Until sshd ends, or stdin does: whoever holds its other end has ended, however that was."""
    poll = select.poll()
    if until_stdin_ends:
        poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        if until_stdin_ends and poll.poll(200) and not os.read(0, 1):
            os._exit(0)
        if not until_stdin_ends:
            poll.poll(200)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)  # orphans of the device are ours
            except ChildProcessError:
                os._exit(1)
            if pid == sshd:
                os._exit(1)
            if pid == 0:
                break


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
