#!/usr/bin/env bash
# Every public header stands alone and speaks both languages: C11 and C++17, without a warning.
#   headers.sh CC CXX base/status.h ...
set -euo pipefail

impl=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../impl" && pwd)
cc=$1 cxx=$2
shift 2
[ $# -gt 0 ] || { echo "no headers given" >&2; exit 1; }
command -v "$cxx" >/dev/null || { echo "skipped: no C++ compiler ($cxx)"; exit 77; }

warnings=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "$impl")
for header; do
    echo "#include \"$header\"" | "$cc" -std=c11 -Wstrict-prototypes "${warnings[@]}" -x c -
    echo "#include \"$header\"" | "$cxx" -std=c++17 "${warnings[@]}" -x c++ -
done
echo "headers: $# stand alone in C and C++"
