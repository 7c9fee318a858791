"""nvpmodel's answers as values, and the scripts that ask it and that put a mode back on the device itself.

`nvpmodel -q` prints 'NV Power Mode: MODE_15W_6CORE' and the id on a line below; some releases put 'NV Fan Mode:' first,
and without root complaints may stand around both. Modes are listed by `nvpmodel -p --verbose` ('POWER_MODEL: ID=0
NAME=MAXN') and in /etc/nvpmodel.conf ('< POWER_MODEL ID=0 NAME=MAXN >'). Ids are per board: a mode is meant by name.
Source: NVIDIA's developer guides ("Power mode controls"). A change can fail silently, such as that of the number of
cores: the mode is read again after each.
"""

from __future__ import annotations

import re

from edgeopt.spec.facts import PowerMode

_QUERY = re.compile(r"NV Power Mode\s*:\s*([\w.+-]{1,60})", re.ASCII)
_MODE = re.compile(r"POWER_MODEL:?\s+ID=([0-9]{1,4})\s+NAME=([\w.+-]{1,60})", re.ASCII)
_ID = re.compile(r"^\s*([0-9]{1,4})\s*$", re.MULTILINE)
_REBOOT = re.compile(r"reboot", re.IGNORECASE)

NONE, NO_SUDO, UNREADABLE = 69, 77, 65  # exit statuses of the scripts

# `nvpmodel` and `jetson_clocks` are looked for where root has them too, and ended where they hang: nvpmodel asks
# questions, to which the answer is no. $as is what makes us root.
_COMMON = f"""\
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin; export PATH
command -v nvpmodel >/dev/null || exit {NONE}
as=; [ "$(id -u)" = 0 ] || as='sudo -n'
within() {{
  if command -v timeout >/dev/null; then timeout -k 5 "$@"; else shift; "$@"; fi
}}
query() {{ within 20 nvpmodel -q 2>&1 </dev/null; }}
clocks() {{
  cat /sys/devices/system/cpu/online /sys/devices/system/cpu/cpu*/cpufreq/scaling_max_freq \\
    /sys/class/devfreq/*/max_freq 2>/dev/null
}}
"""

LOOK = f"""\
{_COMMON}
query; echo --; within 20 nvpmodel -p --verbose 2>&1 </dev/null; cat /etc/nvpmodel.conf 2>/dev/null
exit 0
"""

# $1 the id, $2 the guard's folder, $3 seconds after which nvpmodel hangs. Prints what nvpmodel says, '--', and the mode
# that it then has, once the clocks' limits stand still.
SWITCH = f"""\
{_COMMON}
[ -z "$as" ] || $as -l nvpmodel >/dev/null 2>&1 || exit {NO_SUDO}
exec 9>>"$2/switching" && flock 9 || exit 1
printf 'no\\nno\\n' | within "$3" $as nvpmodel -m "$1" 2>&1 9>&-
flock -u 9
echo --
before= tries=0
while now=$(clocks) && [ "$now" != "$before" ] && [ $tries -lt 20 ]; do
  before=$now tries=$((tries + 1))
  sleep 0.5
done
query
exit 0
"""

# The fastest clocks of the mode. Prints what jetson_clocks says.
CLOCKS = f"""\
{_COMMON}
within 60 $as jetson_clocks 2>&1 </dev/null
"""

# $1 'clocks' where jetson_clocks is to be stored and restored, $2 seconds after which nobody can still be measuring, as
# behind a link that is dead and does not say so, $3 as above. Prints the mode's id and a folder; then waits for the end
# of its stdin, which comes with the end of whoever measures, however that ends, and puts back what was. A switch that
# is under way is waited for, and what silently fails is tried again.
GUARD = f"""\
{_COMMON}
[ -z "$as" ] || $as -l nvpmodel >/dev/null 2>&1 || exit {NO_SUDO}
mode() {{ query | sed -n '/NV Power Mode/,$p' | grep -E '^ *[0-9]+ *$' | head -n 1 | tr -d ' '; }}
trap '' HUP INT TERM PIPE
old=$(mode); [ -n "$old" ] || {{ query >&2; exit {UNREADABLE}; }}
kept=$(mktemp -d) || exit 1
if [ "$1" = clocks ]; then
  within 60 $as jetson_clocks --store "$kept/clocks" >&2 </dev/null || {{ rm -rf "$kept"; exit 1; }}
fi
printf '%s %s\\n' "$old" "$kept"
within "$2" cat > /dev/null
exec 9>>"$kept/switching" && flock 9
tries=0
until [ "$(mode)" = "$old" ] || [ $tries -ge 6 ]; do
  tries=$((tries + 1))
  printf 'no\\nno\\n' | within "$3" $as nvpmodel -m "$old" >/dev/null 2>&1 9>&-
done
[ "$1" != clocks ] || within 60 $as jetson_clocks --restore "$kept/clocks" >/dev/null 2>&1 </dev/null
rm -rf "$kept"
"""


def parse_query(text: str) -> PowerMode | None:
    """The mode that `nvpmodel -q` names; None where it names none."""
    found = _QUERY.search(text)
    if found is None:
        return None
    number = _ID.search(text, found.end())
    return PowerMode(name=found.group(1), id=int(number.group(1)) if number else None)


def parse_modes(text: str) -> tuple[PowerMode, ...]:
    """The modes of `nvpmodel -p --verbose` or of nvpmodel.conf, each once, in their order."""
    found = dict.fromkeys((int(number), name) for number, name in _MODE.findall(text))
    return tuple(PowerMode(name=name, id=number) for number, name in found)


def asks_for_a_reboot(text: str) -> bool:
    """Whether `nvpmodel -m` said that the mode comes with a reboot only."""
    return _REBOOT.search(text) is not None
