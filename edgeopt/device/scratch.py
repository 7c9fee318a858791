"""A temporary folder on a device, where there is room for it: /tmp may be full, or 16 MB of RAM."""

from __future__ import annotations

from edgeopt.ports.connection import script

ENOUGH_KB = 64 << 10  # requests and raw outputs take less; more is no reason to leave /tmp

# $1 a folder on the disk of the releases, or nothing. The first that has enough room, else the roomiest.
_MAKE = f"""\
LC_ALL=C; export LC_ALL
best= most=-1
for folder in "${{TMPDIR:-/tmp}}" "$1" /var/tmp "$HOME"; do
  [ -n "$folder" ] && [ -d "$folder" ] && [ -w "$folder" ] || continue
  free=$(df -Pk "$folder" 2>/dev/null | sed -n '$s/.*[^0-9-]\\(-\\{{0,1\\}}[0-9][0-9]*\\)  *[0-9-]*% .*/\\1/p')
  [ "${{free:-0}}" -gt "$most" ] && made=$(mktemp -d "$folder/.edgeopt-XXXXXX" 2>/dev/null) || continue
  [ -z "$best" ] || rmdir "$best"
  best=$made most=${{free:-0}}
  [ "$most" -lt {ENOUGH_KB} ] || break
done
[ -n "$best" ] || {{ echo "neither ${{TMPDIR:-/tmp}}, ${{1:+$1, }}/var/tmp nor $HOME can be written to" >&2; exit 1; }}
printf '%s\\n' "$best"
"""


def make(beside: str = "") -> list[str]:
    """The argv that makes such a folder, its owner's alone, and prints its path."""
    return script(_MAKE, beside)
