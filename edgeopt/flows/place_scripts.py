"""The scripts that work in ROOT/NAME on a device, each one step that may be repeated after a cut anywhere in it.

Every script that changes something is given the token of our lock and refuses where another one lies there by now.
A switch that is still to be proven leaves `pending`: what `current` and `previous` were, and how the old release is
started again. Whoever finds it without the operator who wrote it goes back: the lock's own process when its connection
ends, and else the next one to take the lock.
"""

from __future__ import annotations

from edgeopt.ports.posix import EXPAND, FLUSH, NOTE, RENAME, with_functions

NO_BLOB, NOTHING, LACKING, LOST, LOCKED = 66, 67, 69, 74, 75
AFTER_ACTIVATE_S = 120

# what the scripts call, but for flock and what hashes, for which there are others
PROGRAMS = "cat chmod cp date df find head ln ls mkdir mv readlink rm rmdir sed sleep sync tail wc"

_POINT = """\
point() {
  [ -n "$2" ] || { rm -f "$1"; return; }
  rm -f ".$1.new" && ln -s "releases/$2" ".$1.new" && rename ".$1.new" "$1"
}
"""

# fence TOKEN: ends the script where somebody else has taken the lock since
_FENCE = f"""\
fence() {{
  [ -z "$1" ] || [ "$(sed -n 2p "$place/lock")" = "$1" ] || {{ head -n 1 "$place/lock" >&2; exit {LOST}; }}
}}
"""

# newest DIGEST: what the clock of its day made newer than this release, which is the newest, gets a time that is older
_NEWEST = """\
newest() {
  minute=10
  ls -1tr "$releases" | sed -n "/^$1\\$/,\\$p" | sed 1d | while read -r ahead; do
    TZ=UTC0 touch -t "1970010100$minute" "$releases/$ahead"
    minute=$((minute + 1))
  done
}
"""

# undo: back to what `pending` says, if it is there. Links before the file, so that a cut in between repeats it. What
# it starts must not inherit the lock, which a service would then hold for ever.
_UNDO = f"""\
within() {{
  ( exec 8>&- 9>&- </dev/null >/dev/null 2>&1; cd "$place/releases/$old" && eval "exec $2" ) &
  job=$!
  ( exec 8>&- 9>&- </dev/null >/dev/null 2>&1; sleep "$1"; kill $job ) &
  timer=$!
  wait $job || result="$result; its after_activate failed"
  kill $timer 2>/dev/null
}}
undo() {{
  [ -f "$place/pending" ] || return 0
  {{ read -r old; read -r older; read -r unproven; again=$(cat); }} < "$place/pending"
  [ "$old" != - ] || old=
  [ "$older" != - ] || older=
  result="never proven, back to ${{old:-none}}"
  if [ -n "$old" ] && [ ! -f "$place/releases/$old/manifest.json" ]; then
    result="never proven, and $old is gone"
  else
    ( cd "$place" && point current "$old" && point previous "$older" && flush . ) || return 1
    [ -z "$old" ] || [ -z "$again" ] || within {AFTER_ACTIVATE_S} "$again"
  fi
  rm -f "$place/pending" && flush "$place"
  now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  said='{{"when": "%s", "who": "the device", "name": "%s", "step": "undo", "digest": "%s", "result": "%s"}}'
  note "$(printf "$said" "$now" "${{place##*/}}" "$unproven" "$result")"
}}
"""

# take FILE: a lock where there is no flock, a link whose target is PID.STARTED.BOOT of who holds it; fails where that
# process lives. One that died, or that another boot had, is cleared away by one at a time.
TAKE = """\
boot=-
{ read -r boot < /proc/sys/kernel/random/boot_id; } 2>/dev/null ||
  boot=$(sysctl -n kern.boottime 2>/dev/null | tr -cd 0-9)
started() {
  stat=
  { read -r stat < "/proc/$1/stat"; } 2>/dev/null
  set -- ${stat##*) }
  echo "${20:--}"
}
identity() { echo "$1.$(started "$1").$boot"; }
lives() {
  kill -0 "${1%%.*}" 2>/dev/null || [ -d "/proc/${1%%.*}" ] || return 1
  [ "$1" = "$(identity "${1%%.*}")" ]
}
holder_of() { readlink "$1" 2>/dev/null; }
is_held() { held_by=$(holder_of "$1") && lives "$held_by"; }
take() {
  me=$(identity $$)
  ln -s "$me" "$1" 2>/dev/null && return
  was=$(holder_of "$1")
  [ -n "$was" ] || { ln -s "$me" "$1" 2>/dev/null; return; }
  ! lives "$was" || return 1
  mkdir "$1.clearing" 2>/dev/null || { find "$1.clearing" -mmin +1 -exec rmdir {} + 2>/dev/null; return 1; }
  [ "$(holder_of "$1")" != "$was" ] || rm -f "$1"
  rmdir "$1.clearing"
  ln -s "$me" "$1"
}
leave() { [ "$(holder_of "$1")" != "$me" ] || rm -f "$1"; }
"""

# $1 root, $2 name, $3 who locks, $4 'make' to make the folders, $5 token, $6 line for the journal, $7 after how many
# seconds without a line on stdin, once there was one, we count as gone.
# Holds the lock until its stdin ends, which it does with the connection. ROOT/.lock is shared by all who are at work,
# and taken alone by who collects garbage.
LOCK = with_functions(
    EXPAND,
    FLUSH,
    RENAME,
    NOTE,
    _POINT,
    _UNDO,
    TAKE,
    text=f"""\
lacking=
for program in {PROGRAMS}; do
  command -v $program >/dev/null || lacking="$lacking $program"
done
[ -z "$lacking" ] || {{ echo "$lacking" >&2; exit {LACKING}; }}
expand "$1"
made=
if [ "$4" = make ] && [ ! -d "$root/$2/releases" ]; then
  mkdir -p "$root/$2/releases" || exit 1
  made=1
fi
[ -d "$root/$2/releases" ] || exit {NOTHING}
root=$(cd "$root" && pwd) || exit 1
place=$root/$2
[ -z "$made" ] || flush "$place" "$root" "${{root%/*}}/"
if command -v flock >/dev/null; then
  exec 8>>"$root/.lock" 9>>"$place/lock" || exit 1
  flock -s -n 8 || {{ cat "$root/.lock" >&2; exit {LOCKED}; }}
  flock -n 9 || {{ head -n 1 "$place/lock" >&2; exit {LOCKED}; }}
else
  take "$place/lock.held" || {{ [ -w "$place" ] || exit 1; head -n 1 "$place/lock" >&2; exit {LOCKED}; }}
  trap 'leave "$place/lock.held"' EXIT
  ! is_held "$root/.lock.held" || {{ cat "$root/.lock" >&2; exit {LOCKED}; }}
fi
printf '%s\\n' "$3" "$5" > "$place/lock" || exit 1
undo || exit 1
rm -rf "$place"/releases/.staging-*
note "$6"
printf '%s\\n' "$root"
exec 3<&0
(
  exec 8>&- 9>&- >/dev/null 2>&1
  own=$(exec sh -c 'echo "$PPID"')
  timer=
  while read -r beat <&3; do
    [ -z "$timer" ] || kill "$timer"
    ( trap 'kill $nap; exit' TERM; sleep "$7" & nap=$!; wait $nap; kill "$own" ) &
    timer=$!
  done
  [ -z "$timer" ] || kill "$timer"
) &
wait $!
undo
""",
)

# $1 ROOT/NAME
STATE = """\
cd "$1" || exit 1
for link in current previous; do
  [ ! -L $link ] || echo "$link $(readlink $link)"
done
ls -1t releases | sed 's/^/release /'
"""

# $1 ROOT, $2 NAME, $3 DIGEST, $4 our token, $5 line for the journal; stdin: "HASH PATH" lines, a line ".", then
# selection.json or nothing
STAGE = with_functions(
    FLUSH,
    RENAME,
    NOTE,
    _FENCE,
    _NEWEST,
    text=f"""\
root=$1 place=$1/$2
releases=$place/releases
fence "$4"
staging=$releases/.staging-$$-$4
[ ! -f "$releases/$3/manifest.json" ] || exit 0
trap 'rm -rf "$staging"' EXIT
mkdir "$staging" || exit 1
copied=
while IFS= read -r line && [ "$line" != . ]; do
  hash=${{line%% *}} path=${{line#* }}
  blob=$1/blobs/sha256/${{hash%"${{hash#??}}"}}/$hash
  [ -f "$blob" ] || exit {NO_BLOB}
  case $path in */*) mkdir -p "$staging/${{path%/*}}" || exit 1 ;; esac
  ln "$blob" "$staging/$path" 2>/dev/null || {{ cp "$blob" "$staging/$path" && copied=1; }} || exit 1
done
[ "$line" = . ] || {{ echo "only a part of the list arrived" >&2; exit 1; }}
cat > "$staging/selection.json" || exit 1
[ -s "$staging/selection.json" ] || rm -f "$staging/selection.json"
if [ -n "$copied" ]; then
  find "$staging" -exec sync {{}} + 2>/dev/null || sync
else
  find "$staging" '(' -type d -o -name selection.json ')' -exec sync {{}} + 2>/dev/null || sync
fi
fence "$4"
rename "$staging" "$releases/$3" && flush "$releases" || exit 1
newest "$3"
note "$5"
""",
)

# $1 ROOT, $2 NAME, $3 our token, $4 line for the journal, then DIGESTs. A blob without a release is left for an hour:
# somebody may be about to link it.
PRUNE = with_functions(
    FLUSH,
    RENAME,
    NOTE,
    _FENCE,
    text="""\
root=$1 place=$1/$2 line=$4
releases=$place/releases
fence "$3"
shift 4
for release; do
  [ -d "$releases/$release" ] || continue
  rename "$releases/$release" "$releases/.staging-pruned-$release" && rm -rf "$releases/.staging-pruned-$release"
done
find "$root/blobs/sha256" -type f -links 1 -mmin +60 ! -name '*.part' -exec rm -f {} +
note "$line"
""",
)

# $1 ROOT, $2 NAME, $3 our token, $4 line for the journal, $5 DIGEST of current, $6 of previous; an empty one removes
# the link. $7 'try' where it is still to be proven: then $8 and $9 are what current and previous are now, '-' for
# none, and ${10} the shell words that start the old release again.
POINT = with_functions(
    FLUSH,
    RENAME,
    NOTE,
    _POINT,
    _FENCE,
    text="""\
root=$1 place=$1/$2
cd "$place" || exit 1
fence "$3"
[ -z "$5" ] || [ -f "releases/$5/manifest.json" ] || { echo "the release is gone" >&2; exit 1; }
if [ "$7" = try ]; then
  printf '%s\\n' "$8" "$9" "$5" "${10}" > .pending.new && flush .pending.new && mv -f .pending.new pending &&
    flush . || exit 1
fi
before=$(readlink previous 2>/dev/null)
if ! { point previous "$6" && point current "$5"; }; then
  point previous "${before#releases/}"
  rm -f pending
  exit 1
fi
flush . || exit 1
note "$4"
""",
)

# $1 ROOT, $2 NAME, $3 our token, $4 line for the journal: what was tried stands now, one way or the other
SETTLE = with_functions(
    FLUSH,
    NOTE,
    _FENCE,
    text="""\
root=$1 place=$1/$2
fence "$3"
[ ! -f "$place/pending" ] || { rm -f "$place/pending" && flush "$place"; } || exit 1
note "$4"
""",
)

# as SETTLE, where nothing is decided by it
NOTE_ONLY = with_functions(
    FLUSH,
    NOTE,
    _FENCE,
    text="""\
root=$1 place=$1/$2
fence "$3"
note "$4"
""",
)
