# Shared by the commands of ci/: where things are, and how they say what they are doing.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/build/venv
python=$venv/bin/python
jobs=$(nproc)
export PATH="$venv/bin:$PATH"

say() { printf '\n==> %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The project's files that match, as they lie here, tracked or new.
files() {
    local file

    git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r file; do
        [ ! -f "$file" ] || printf '%s\n' "$file"
    done
}

# Configures and builds one preset of CMakePresets.json.
build() {
    say "build: preset $1"
    cmake --preset "$1" -DTANDEM_PYTHON="$python"
    cmake --build --preset "$1" -j "$jobs"
}
