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

# Configures and builds one preset of CMakePresets.json.
build() {
    say "build: preset $1"
    cmake --preset "$1" -DTANDEM_PYTHON="$python"
    cmake --build --preset "$1" -j "$jobs"
}
