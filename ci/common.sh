# Paths and functions that the commands of ci/ share.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/build/venv
python=$venv/bin/python
jobs=$(nproc)
export PATH="$venv/bin:$PATH"
# Python compiles the modules of build/venv at their first import and keeps the result (ci/setup compiles
# none). If the environment forbade that, each of hundreds of processes would compile PyTorch again.
unset PYTHONDONTWRITEBYTECODE

# Open MPI and LaTeX need a home folder, and the environment of a container may name none.
[ -n "${HOME:-}" ] || HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
export HOME

# Whether cmake is at least the 3.24 that CMakeLists.txt asks for. Ubuntu 22.04 has an older one.
new_cmake() { printf '3.24\n%s\n' "$(cmake --version | sed -n '1s/[^0-9]*//p')" | sort -CV; }

say() { printf '\n==> %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The project's files that match, tracked or new.
files() {
    local file

    git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r file; do
        [ ! -f "$file" ] || printf '%s\n' "$file"
    done
}

# A build contains absolute paths, so a copied or moved build is refused.
for cache in build/*/CMakeCache.txt; do
    [ -f "$cache" ] || continue
    home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
    [ "$home" -ef "$root" ] ||
        die "$root/build was made for $home: this clone was copied or moved. Remove it (rm -rf $root/build) and try again"
done

# build PRESET [OPTIONS...] [--target TARGETS...] configures one preset of CMakePresets.json, with cmake's
# options, and builds it, or these targets alone.
build() {
    local preset=$1 options=()
    shift

    say "build: preset $preset"
    while [ $# -gt 0 ] && [ "$1" != --target ]; do
        options+=("$1")
        shift
    done
    cmake --preset "$preset" -DTANDEM_PYTHON="$python" "${options[@]}"
    cmake --build --preset "$preset" -j "$jobs" "$@"
}

# test_preset PRESET ARGUMENTS... runs ctest on a preset's build. Prints failed tests, and the lines that say
# why, at the end.
test_preset() {
    local preset=$1 logs=$root/build/$1/Testing/Temporary status=0
    shift

    say "test: preset $preset"
    rm -f "$logs/LastTestsFailed.log"
    # Two more jobs than processors, because many tests mostly wait.
    ctest --preset "$preset" -j "$((jobs + 2))" "$@" || status=$?
    [ "$status" -ne 0 ] || return 0
    say "test: preset $preset failed; the lines that say why"
    grep -E '^\[ *(ERROR|LINE|FAILED) *\]|Error:|ERROR:|runtime error|^FAIL' "$logs/LastTest.log" | head -60 || true
    sed 's/^/failed: /' "$logs/LastTestsFailed.log" 2>/dev/null || true
    return "$status"
}
