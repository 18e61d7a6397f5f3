#!/usr/bin/env bash
# Checks that every C file of impl/ compiles for aarch64, without warnings; nothing is linked or run. It uses
# this machine's headers of libraries. Files that include headers of CUDA, NCCL, CUPTI or NVTX are left out if
# a file with these headers alone does not compile. Files in templates/ are not complete.
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

flags=(-std=c11 -D_GNU_SOURCE -Wall -Wextra -Wpedantic -Werror -fopenmp -fsyntax-only '-DTANDEM_CUPTI_FOLDER=""' -Iimpl -I.
    "${headers[@]}")
left_out=()
for header in cuda_runtime_api.h cublasLt.h nccl.h cupti.h nvtx3/nvToolsExt.h nvrtc.h; do
    "$cc" "${flags[@]}" -x c - <<<"#include <$header>" 2>/dev/null || left_out+=("$header")
done

# Whether a file includes a header that is left out. -MG names headers that are not found, as all of these.
needs() {
    [ ${#left_out[@]} -gt 0 ] && "$cc" -M -MG -Iimpl -I. "$1" | tr ' ' '\n' |
        grep -xF "$(printf '%s\n' "${left_out[@]}")" >/dev/null
}
compiled=()
while read -r file; do
    if needs "$file"; then echo "left out: $file"; else compiled+=("$file"); fi
done < <(files 'impl/*.c' | grep -v /templates/)
printf '%s\n' "${compiled[@]}" | xargs -P "$jobs" -I{} "$cc" "${flags[@]}" {}
echo "aarch64: ${#compiled[@]} files compile, ${#left_out[@]} headers of CUDA do not: ${left_out[*]}"
