"""Functions in POSIX sh that the scripts on a device share: what differs between coreutils, busybox, toybox and BSD.

Each constant is text to put before a script; `script` of ports.connection makes the argv of it.

A name that becomes visible is always renamed into place, and in this order: the file's bytes are flushed (fsync), it
is renamed, the folder is flushed. After a power cut there is either the old name or the new one, with all its bytes,
as far as the device's disk keeps what it was told to flush.
"""

from __future__ import annotations

JOURNAL = ".journal"
JOURNAL_BYTES = 256 << 10  # then it becomes .journal.1, which replaces the one before

# Nobody else may write below the root, whatever the user's umask allows; what it forbids stays forbidden.
_COMMON = """\
LC_ALL=C; export LC_ALL
umask g-w,o-w
"""

# expand ROOT: sets `root`; `~` is the device's home
EXPAND = """\
expand() {
  case $1 in "~") root=$HOME ;; "~/"*) root=$HOME/${1#??} ;; *) root=$1 ;; esac
}
"""

# flush PATH...: to the disk, file or folder. A sync that takes no file flushes everything; one that says that the disk
# has failed is believed.
FLUSH = """\
flush() {
  for path; do
    said=$(sync "$path" 2>&1) && continue
    case $said in
      *"nput/output error"* | *"o space left"* | *"uota exceeded"*) echo "$said" >&2; return 1 ;;
    esac
    sync || return 1
  done
}
"""

# rename FROM TO: in one step, also where TO is a link to a folder. Without -T an ordinary mv would move FROM into that
# folder; BSD's mv has -h for it, and rename(2) is what Python and Perl call.
RENAME = """\
lacks() {
  case $(mv "$1" 2>&1) in
    *"nvalid option"* | *"llegal option"* | *"nknown option"* | *"nrecognized option"*) return 0 ;;
  esac
  return 1
}
rename() {
  if ! lacks -T; then mv -fT "$1" "$2"; return; fi
  if [ -d "$2" ] && [ ! -L "$2" ]; then echo "$2: a directory is in the way" >&2; return 1; fi
  if ! lacks -h; then mv -fh "$1" "$2"; return; fi
  if [ ! -L "$2" ]; then mv -f "$1" "$2"; return; fi
  if command -v python3 >/dev/null; then python3 -c 'import os, sys; os.rename(*sys.argv[1:])' "$1" "$2"; return; fi
  if command -v perl >/dev/null; then perl -e 'rename($ARGV[0], $ARGV[1]) or die "$!\\n"' "$1" "$2"; return; fi
  echo "no mv with -T or -h, python3 or perl, to switch a link in one step" >&2
  return 1
}
"""

# hash_of FILE: sets `sum`. openssl first: Debian's sha256sum does not use the CPU's SHA instructions and takes six
# times as long.
HASH = """\
blob_of() { blob=$root/blobs/sha256/${1%"${1#??}"}/$1; }
hash_of() {
  sum=$(openssl dgst -sha256 -r < "$1" 2>/dev/null || sha256sum < "$1" 2>/dev/null ||
    shasum -a 256 < "$1" 2>/dev/null || python3 -c '
import hashlib, sys
h = hashlib.sha256()
for piece in iter(lambda: sys.stdin.buffer.read(1 << 20), b""):
    h.update(piece)
print(h.hexdigest())' < "$1") || { echo "no openssl, sha256sum, shasum or python3 to hash with" >&2; exit 1; }
  sum=${sum%% *}
}
"""

# note LINE: appended to the journal of `root`. Best effort: a full disk must not undo what has been done. A line that
# a power cut has torn gets its end first. Two that move a full journal at once would lose one of the two files.
NOTE = f"""\
note() {{
  [ -n "$1" ] || return 0
  journal=$root/{JOURNAL}
  [ ! -s "$journal" ] || [ -z "$(tail -c 1 "$journal")" ] || echo >> "$journal"
  printf '%s\\n' "$1" >> "$journal" && flush "$journal"
  if [ "$(wc -c < "$journal")" -gt {JOURNAL_BYTES} ] && mkdir "$journal.moving" 2>/dev/null; then
    [ "$(wc -c < "$journal")" -le {JOURNAL_BYTES} ] || mv -f "$journal" "$journal.1"
    rmdir "$journal.moving"
  fi
}}
"""


def with_functions(*functions: str, text: str) -> str:
    """The script `text` with the functions that it calls."""
    return _COMMON + "".join(functions) + text
