"""The scripts behind `edgeopt status`: one that looks, and one that collects garbage while nobody is at work."""

from __future__ import annotations

from edgeopt.flows.place_scripts import LOCKED, NOTHING, TAKE
from edgeopt.ports.posix import EXPAND, FLUSH, JOURNAL, NOTE, with_functions

# loose: the paths of blobs that no release needs
_LOOSE = """\
loose() {
  find blobs/sha256 -type f -links 1 ! -name '*.part' | while IFS= read -r blob; do
    grep -qF "${blob##*/}" ./*/releases/*/manifest.json 2>/dev/null || echo "$blob"
  done
}
"""

# $1 ROOT, $2 NAME or nothing for all. Changes nothing and takes no lock. Prints a line a fact, words apart by a space,
# a path or free text last; 'manifest' and 'journal' are followed by as many bytes as the line says.
LOOK = with_functions(
    EXPAND,
    TAKE,
    _LOOSE,
    text=f"""\
expand "$1"
[ -d "$root" ] || exit {NOTHING}
root=$(cd "$root" && pwd) || exit 1
cd "$root" || exit 1
when() {{ stat -c %Y "$1" 2>/dev/null || stat -f %m "$1" 2>/dev/null || echo 0; }}
kilobytes() {{ set -- $(du -sk "$1" 2>/dev/null); echo "${{1:-0}}"; }}
at_work() {{
  if is_held "$1.held"; then echo held; return; fi
  command -v flock >/dev/null || {{ echo free; return; }}
  [ -r /proc/locks ] || {{ flock -s -n "$1" true && echo free || echo held; return; }}
  set -- $(ls -i "$1")
  if grep -q ":$1 " /proc/locks; then echo held; else echo free; fi
}}
echo "root $root"
echo "used $(kilobytes .)"
echo "inodes $(stat -f -c '%d %c' . 2>/dev/null)"
for place in ./*; do
  name=${{place#./}}
  [ -d "$name/releases" ] || continue
  [ -z "$2" ] || [ "$name" = "$2" ] || continue
  echo "name $name"
  for link in current previous; do
    [ ! -L "$name/$link" ] || echo "link $name $link $(readlink "$name/$link")"
  done
  [ ! -f "$name/pending" ] || echo "pending $name $(sed -n 3p "$name/pending")"
  [ ! -f "$name/lock" ] || echo "lock $name $(at_work "$name/lock") $(head -n 1 "$name/lock")"
  ls -1At "$name/releases" | while IFS= read -r release; do
    folder=$name/releases/$release
    [ -d "$folder" ] || continue
    signed=no
    if [ -f "$folder/manifest.sig" ]; then
      signed=$(sed -n 's/^version \\([1-9][0-9]*\\)$/\\1/p;6q' "$folder/manifest.signed")
      signed=${{signed:-yes}}
    fi
    echo "release $name $(when "$folder") $signed ${{folder##*/}}"
    [ -f "$folder/manifest.json" ] || continue
    echo "manifest $name $(wc -c < "$folder/manifest.json") ${{folder##*/}}"
    cat "$folder/manifest.json"
  done
done
if [ -d blobs/sha256 ]; then
  find blobs/sha256 -type f -name '*.part' | while IFS= read -r part; do
    echo "part $(wc -c < "$part") $(when "$part") $part"
  done
  loose | while IFS= read -r blob; do echo "loose $(wc -c < "$blob") $blob"; done
fi
for state in engines/*/state.json; do
  [ -f "$state" ] || continue
  folder=${{state%/*}}
  status=$(sed -n 's/.*"status": *"\\([a-z]*\\)".*/\\1/p' "$state" | head -n 1)
  candidate=$(sed -n 's/.*"candidate": *"\\([^"]*\\)".*/\\1/p' "$folder/job.json" 2>/dev/null | head -n 1)
  echo "engine ${{folder##*/}} ${{status:--}} $(kilobytes "$folder") ${{candidate:--}}"
done
for file in {JOURNAL}.1 {JOURNAL}; do
  [ -f $file ] || continue
  echo "journal $(tail -n 200 $file | wc -c)"
  tail -n 200 $file
done
echo "df $(df -Pk . | tail -n 1)"
""",
)

# $1 ROOT, $2 who, $3 line for the journal. Alone on the device while it runs: a push holds ROOT/.lock together with
# others, this takes it for itself or leaves it. Prints "KIND KB PATH" of what it removed.
COLLECT = with_functions(
    EXPAND,
    FLUSH,
    NOTE,
    TAKE,
    _LOOSE,
    text=f"""\
expand "$1"
[ -d "$root" ] || exit {NOTHING}
root=$(cd "$root" && pwd) || exit 1
cd "$root" || exit 1
if command -v flock >/dev/null; then
  exec 8>>.lock || exit 1
  flock -n 8 || exit {LOCKED}
else
  take "$root/.lock.held" || {{ [ -w "$root" ] || exit 1; exit {LOCKED}; }}
  trap 'leave "$root/.lock.held"' EXIT
  for place in ./*; do
    ! is_held "$place/lock.held" || exit {LOCKED}
  done
fi
printf '%s\\n' "$2" > .lock
gone() {{
  set -- "$1" "$2" $(du -sk "$2" 2>/dev/null)
  rm -rf "$2" && printf '%s %s %s\\n' "$1" "${{3:-0}}" "$2"
}}
for staging in ./*/releases/.staging-*; do
  [ ! -d "$staging" ] || gone staging "$staging"
done
rm -f ./*/.current.new ./*/.previous.new ./*/.pending.new
[ ! -d {JOURNAL}.moving ] || rmdir {JOURNAL}.moving
if [ -d blobs/sha256 ]; then
  find blobs/sha256 -type f -name '*.part' | while IFS= read -r part; do gone part "$part"; done
  loose | while IFS= read -r blob; do gone blob "$blob"; done
fi
sync
note "$3"
: > .lock
""",
)
