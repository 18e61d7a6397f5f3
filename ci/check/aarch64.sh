#!/usr/bin/env bash
# Checks that every C file of impl/ compiles for aarch64, without warnings; nothing is linked or run. It uses
# this machine's headers of libraries. If headers of CUDA, NCCL, CUPTI or NVTX are missing, files that include
# them are left out. Files in templates/ are not complete.
source "$(dirname "$0")/../common.sh"

cc=aarch64-linux-gnu-gcc
if ! command -v "$cc" >/dev/null; then
    echo "aarch64: left out, there is no $cc (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)"
    exit 0
fi
headers=()
for folder in /usr/include "/usr/include/$(cc -print-multiarch)" "/usr/lib/$(cc -print-multiarch)/openmpi/include" \
    /usr/local/cuda/include "$venv"/lib/python3*/site-packages/nvidia/{cu13,nccl}/include; do
    headers+=(-idirafter "$folder") # after the headers of the other processor
done

check() {
    local file=$1 said
    shift
    if said=$("$cc" -std=c11 -D_GNU_SOURCE -Wall -Wextra -Wpedantic -Werror -fopenmp -fsyntax-only \
        '-DTANDEM_CUPTI_FOLDER=""' -Iimpl -I. "$@" "$file" 2>&1); then
        return 0
    fi
    grep -qE 'error: (cuda|cublas|nccl|cupti|nvtx|nvrtc)[^ ]*: No such file' <<<"$said" && echo "left out: $file" && return 0
    echo "$said" >&2
    return 1
}
export -f check
export cc
files 'impl/*.c' | grep -v /templates/ | xargs -P "$jobs" -I{} bash -c 'check "$@"' check {} "${headers[@]}"
echo "aarch64: every other file compiles"
