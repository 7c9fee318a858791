"""ROOT/NAME on a device: the lock, which releases lie there, and what `current` and `previous` point to.

    ROOT/NAME/lock
    ROOT/NAME/releases/DIGEST/        files as in the artifact, hard links to ROOT/blobs, plus selection.json
    ROOT/NAME/current, previous       symlinks to releases/DIGEST, switched by rename

The scripts are POSIX sh plus `flock` (util-linux, busybox) and `mv -T` (coreutils, busybox).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from edgeopt.errors import DeviceError, EdgeoptError, LockedError, UsageError
from edgeopt.ports.connection import CommandEnded, Connection, script, transfer_error

DEFAULT_ROOT = "~/.edgeopt"
_NO_FLOCK, _LOCKED, _NO_BLOB, _NOTHING = 69, 75, 66, 67

# $1 root, $2 name, $3 who locks, $4 'make' to make the folders.
# Holds the lock until its stdin ends, which it does with the connection.
_LOCK = f"""\
LC_ALL=C; export LC_ALL
case $1 in "~") root=$HOME ;; "~/"*) root=$HOME/${{1#??}} ;; *) root=$1 ;; esac
[ "$4" != make ] || mkdir -p "$root/$2/releases" || exit 1
[ -d "$root/$2/releases" ] || exit {_NOTHING}
root=$(cd "$root" && pwd) && exec 9>>"$root/$2/lock" || exit 1
command -v flock >/dev/null || exit {_NO_FLOCK}
flock -n 9 || {{ cat "$root/$2/lock" >&2; exit {_LOCKED}; }}
printf '%s\\n' "$3" > "$root/$2/lock" || exit 1
printf '%s\\n' "$root"
cat > /dev/null
"""

# $1 ROOT/NAME
_STATE = """\
cd "$1" || exit 1
for link in current previous; do
  [ ! -L $link ] || echo "$link $(readlink $link)"
done
ls -1t releases | sed 's/^/release /'
"""

# $1 ROOT, $2 NAME, $3 DIGEST, $4 token; stdin: "HASH PATH" lines, a line ".", then selection.json or nothing
_STAGE = f"""\
LC_ALL=C; export LC_ALL
releases=$1/$2/releases
staging=$releases/.staging-$4
rm -rf "$releases"/.staging-*
trap 'rm -rf "$staging"' EXIT
mkdir "$staging" || exit 1
while IFS= read -r line && [ "$line" != . ]; do
  hash=${{line%% *}} path=${{line#* }}
  blob=$1/blobs/sha256/${{hash%"${{hash#??}}"}}/$hash
  [ -f "$blob" ] || exit {_NO_BLOB}
  case $path in */*) mkdir -p "$staging/${{path%/*}}" || exit 1 ;; esac
  ln "$blob" "$staging/$path" 2>/dev/null || cp "$blob" "$staging/$path" || exit 1
done
[ "$line" = . ] || {{ echo "only a part of the list arrived" >&2; exit 1; }}
cat > "$staging/selection.json" || exit 1
[ -s "$staging/selection.json" ] || rm -f "$staging/selection.json"
find "$staging" '(' -type d -o -name selection.json ')' -exec sync {{}} + 2>/dev/null || sync
mv -T "$staging" "$releases/$3" || exit 1
sync "$releases" 2>/dev/null || sync
"""

# $1 ROOT, $2 NAME, then DIGESTs. A blob without a release is left for an hour: somebody may be about to link it.
_PRUNE = """\
root=$1 releases=$1/$2/releases
shift 2
for release; do
  mv -T "$releases/$release" "$releases/.staging-pruned-$release" && rm -rf "$releases/.staging-pruned-$release"
done
find "$root/blobs/sha256" -type f -links 1 -mmin +60 ! -name '*.part' -exec rm -f {} +
"""

# $1 ROOT/NAME, $2 DIGEST of current, $3 of previous; an empty one removes the link
_POINT = """\
LC_ALL=C; export LC_ALL
cd "$1" || exit 1
point() {
  [ -n "$2" ] || { rm -f "$1"; return; }
  rm -f ".$1.new" && ln -s "releases/$2" ".$1.new" && mv -T ".$1.new" "$1"
}
[ -z "$2" ] || [ -f "releases/$2/manifest.json" ] || { echo "the release is gone" >&2; exit 1; }
point previous "$3" && point current "$2" || exit 1
sync . 2>/dev/null || sync
"""


@dataclass(frozen=True)
class State:
    """What a device holds of a name: digests, the releases newest first."""

    current: str | None
    previous: str | None
    releases: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """ROOT/NAME on a device, `root` absolute, locked by us while `locked(...)` lasts."""

    connection: Connection
    root: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.root}/{self.name}"

    def release(self, digest: str) -> str:
        """Where the release `digest` lies on the device."""
        return f"{self.path}/releases/{digest}"

    @property
    def where(self) -> str:
        return f"{self.connection.label}:{self.path}"

    def state(self) -> State:
        """What lies there. One round trip."""
        links: dict[str, str] = {}
        releases = []
        for line in self.connection.run(script(_STATE, self.path)).text.splitlines():
            kind, _, target = line.partition(" ")
            digest = target.removeprefix("releases/")
            if not re.fullmatch("[0-9a-f]{64}", digest):
                continue
            if kind == "release":
                releases.append(digest)
            else:
                links[kind] = digest
        return State(links.get("current"), links.get("previous"), tuple(releases))

    def stage(self, digest: str, files: dict[str, str], selection: bytes) -> bool:
        """Make the release `digest` of `files` (path -> blob); False where a blob has gone in the meantime."""
        lines = "".join(f"{sha256} {path}\n" for path, sha256 in sorted(files.items()))
        argv = script(_STAGE, self.root, self.name, digest, secrets.token_hex(8))
        done = self.connection.run(argv, stdin=lines.encode() + b".\n" + selection, timeout_s=300, check=False)
        if done.status == _NO_BLOB:
            return False
        if done.status != 0:
            raise transfer_error(done, "cannot stage the release", where=self.where)
        return True

    def prune(self, digests: list[str]) -> None:
        """Remove releases, and the blobs that no release links to any more."""
        self.connection.run(script(_PRUNE, self.root, self.name, *digests), timeout_s=300)

    def point(self, current: str | None, previous: str | None) -> None:
        """Switch the links, `previous` first; each goes from the old target to the new one by a rename."""
        argv = script(_POINT, self.path, current or "", previous or "")
        done = self.connection.run(argv, timeout_s=120, check=False)
        if done.status != 0:
            raise transfer_error(done, "cannot switch the release", where=self.where)

    def find(self, release: str | None, state: State) -> str:
        """The digest that starts with `release`; without one, the only release that is there."""
        found = [digest for digest in state.releases if digest.startswith(release or "")]
        if len(found) == 1:
            return found[0]
        if not found:
            what = f"no release {release[:12]} is there" if release else "no release is there"
            raise DeviceError(what, where=self.where, todo="push it first: edgeopt push ARTIFACT HOST")
        shown = ", ".join(digest[:12] for digest in found)
        raise UsageError(f"several releases are meant: {shown}", where=self.where, todo="give more of the digest")


@contextlib.contextmanager
def locked(connection: Connection, root: str | None, name: str, *, make: bool = True) -> Iterator[Place]:
    """The place of `name` below `root` (None: ~/.edgeopt), ours alone for the time of the block.

    It is made where it is missing; with `make` False that is a DeviceError.

    The lock is held by a process on the device that ends with the connection, so it cannot be left behind.
    Raises LockedError where somebody else holds it, DeviceError where the folder cannot be made.
    """
    root = root or DEFAULT_ROOT
    with contextlib.ExitStack() as stack:
        try:
            argv = script(_LOCK, root, name, _ourselves(), "make" if make else "")
            absolute = stack.enter_context(connection.hold(argv))
        except CommandEnded as ended:
            raise _not_locked(ended, f"{connection.label}:{root}/{name}") from None
        yield Place(connection, absolute, name)


def _ourselves() -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}, since {now}"


def _not_locked(ended: CommandEnded, where: str) -> EdgeoptError:
    done = ended.result
    if done.status == _LOCKED:
        return LockedError(
            f"somebody else is at work there: {done.complaint}", where=where,
            todo="wait until it ends; the lock goes with its connection",
        )  # fmt: skip
    if done.status == _NOTHING:
        return DeviceError(
            "nothing of that name is there", where=where,
            todo="check name and --root, or push it first: edgeopt push ARTIFACT HOST",
        )  # fmt: skip
    if done.status == _NO_FLOCK:
        return DeviceError("the device has no 'flock'", where=where, todo="install util-linux or busybox there")
    return transfer_error(done, "cannot use the folder for releases", where=where)
