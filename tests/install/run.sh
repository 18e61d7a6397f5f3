#!/usr/bin/env bash
# Installs a build into an empty prefix and uses it as a user's program would: through find_package and
# pkg-config, shared and static, from C and C++, also after the tree has been moved. Then uses the source as a
# part of another project, through add_subdirectory and FetchContent.
#   run.sh CMAKE BUILD_DIR SOURCE_DIR
# A user names only the prefix. The installed files must find everything else that the libraries need.
set -euo pipefail

cmake=$1 build=$2 here=$3/tests/install
unset LIBRARY_PATH CMAKE_LIBRARY_PATH
work=$(mktemp -d "$build/install-XXXXXX")
trap 'rm -rf "$work"' EXIT

die() {
    echo "error: $*" >&2
    exit 1
}

"$cmake" --install "$build" --prefix "$work/first" >"$work/log" || die "cannot install: $(cat "$work/log")"
mv "$work/first" "$work/prefix" # no installed file may contain its first path
# Whole paths only: the clone /tmp/a is neither in /tmp/ab nor in /opt/tmp/a.
exact() { printf '%s' "$1" | sed 's/[][\.*^$]/\\&/g'; }
if grep -rIlE "(^|[^[:alnum:]_.-]|-[IL])($(exact "$work/first")|$(exact "$3"))($|[^[:alnum:]_.-])" "$work/prefix"; then
    die "installed text names a folder of this build"
fi

# The loader takes an empty element of a run path for the current folder.
while read -r file; do
    if readelf -d "$file" | grep -E 'RPATH|RUNPATH' | grep -E '\[:|::|:\]|\[\]'; then
        die "$file looks for libraries in the current folder"
    fi
done < <(find "$build/impl" "$work/prefix" -type f \( -name tandem -o -name 'libtandem*.so*' \))

"$cmake" -S "$here" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1 ||
    die "find_package fails: $(cat "$work/log")"
"$cmake" --build "$work/consumer" >"$work/log" 2>&1 || die "a consumer does not build: $(cat "$work/log")"
for program in shared static cxx; do
    "$work/consumer/$program" || die "find_package: the $program consumer fails"
done

# Another minor version may have another interface, so find_package must refuse this version for it.
mkdir "$work/other"
sed 's/find_package(tandem [0-9.]*/find_package(tandem 0.99/' "$here/CMakeLists.txt" >"$work/other/CMakeLists.txt"
if "$cmake" -S "$work/other" -B "$work/other/build" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1; then
    die "find_package(tandem 0.99) takes this version"
fi

PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name tandem.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir tandem)
read -ra cflags <<<"$(pkg-config --cflags tandem)"
read -ra libs <<<"$(pkg-config --libs tandem)"
read -ra all_libs <<<"$(pkg-config --static --libs tandem)"
cc=${CC:-cc}
"$cc" "$here/consumer.c" "${cflags[@]}" "${libs[@]}" -o "$work/pc-shared"
LD_LIBRARY_PATH=$libdir "$work/pc-shared" || die "pkg-config: the shared consumer fails"
"$cc" "$here/consumer.c" "${cflags[@]}" "${all_libs[@]/#-ltandem/-l:libtandem.a}" -o "$work/pc-static" ||
    die "pkg-config --static: does not link: ${all_libs[*]}"
"$work/pc-static" || die "pkg-config: the static consumer fails" # the loader does not find libtandem.so
# A part of another project is built with that project's flags and warnings, and does not change them.
part() {
    local build=$work/$1 target=$2
    shift 2
    "$cmake" -G Ninja -S "$here/parent" -B "$build" -DTANDEM="$here/../.." -DTANDEM_CUDA=OFF -DTANDEM_MPI=OFF -DTANDEM_GLOO=OFF \
        -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "$@" >"$work/log" 2>&1 ||
        die "does not configure: $(cat "$work/log")"
    grep -q '^CMAKE_BUILD_TYPE:STRING=$' "$build/CMakeCache.txt" || die "tandem chooses its parent's build type"
    if grep -E '"command".*(-Werror|-DNDEBUG| -O[0-9])' "$build/compile_commands.json"; then
        die "the parent asked for none of -Werror, -DNDEBUG and -O"
    fi
    "$cmake" --build "$build" --target "$target" >"$work/log" 2>&1 || die "does not build: $(tail -40 "$work/log")"
}
part subdirectory parent -DFETCH=OFF
"$work/subdirectory/parent" || die "add_subdirectory: the program fails"
part fetched td_base -DFETCH=ON

echo "installed, moved, found and run: find_package and pkg-config, shared and static, C and C++"
