#!/usr/bin/env bash
# Every public header compiles alone, in C11 and in C++17, without a warning.
#   headers.sh CC CXX FOLDER base/status.h ...      FOLDER has the headers as tandem/status.h
set -euo pipefail

cc=$1 cxx=$2 folder=$3
shift 3
[ $# -gt 0 ] || { echo "no headers given" >&2; exit 1; }
command -v "$cxx" >/dev/null || { echo "skipped: no C++ compiler ($cxx)"; exit 77; }

warnings=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "$folder")
for header; do
    echo "#include <tandem/${header##*/}>" | "$cc" -std=c11 -Wstrict-prototypes "${warnings[@]}" -x c -
    echo "#include <tandem/${header##*/}>" | "$cxx" -std=c++17 "${warnings[@]}" -x c++ -
done
echo "headers: $# stand alone in C and C++"
