#!/bin/bash
# Builds the emulator's libcuda.so, libnvrtc.so and libcublasLt.so for LD_LIBRARY_PATH: tests/emulator/build.sh DIR. driver.cpp, nvrtc.cpp and
# cublaslt.cpp say more.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
to=$(cd "$1" && pwd)
cd "$(dirname "$0")"
temporary=$(mktemp -d "$to/build-XXXXXX")
trap 'rm -rf "$temporary"' EXIT

headers=(emulator.h hopper.cuh image.h ptx.cuh)
# A misaligned access ends the kernel, as it does on a card.
kernel_flags="-std=c++17 -O1 -fPIC -mtls-dialect=gnu2 -Wno-psabi -fno-gnu-unique -fvisibility=hidden -fsanitize=alignment -fsanitize-undefined-trap-on-error"
stamp=$( (cat "${headers[@]}"; echo "$kernel_flags") | cksum | cut -d ' ' -f 1)

# Every kernel begins with this header. Precompiled, it takes a fifth of the time, which for most kernels is more than all else.
if [ ! -e "$to/emulator.h.gch" ] || [ emulator.h -nt "$to/emulator.h.gch" ] || [ build.sh -nt "$to/emulator.h.gch" ]; then
    # shellcheck disable=SC2086  # several flags
    g++ $kernel_flags -w -x c++-header emulator.h -o "$temporary/emulator.h.gch"
    mv "$temporary/emulator.h.gch" "$to/emulator.h.gch"
fi

# library NAME SYMLINK SOURCE...: makes libNAME.so unless it is newer than what it is made of.
library() {
    local name=$1 link=$2 file source
    shift 2
    file=$to/lib$name.so
    local old=
    for source in "$@" card.h "${headers[@]}" build.sh; do
        if [ ! -e "$file" ] || [ "$source" -nt "$file" ]; then old=yes; fi
    done
    if [ "$old" ]; then
        g++ -std=c++17 -O2 -Wall -Wno-psabi -shared -fPIC -Wl,-z,defs "-DEMULATOR_HEADERS=\"$PWD\"" "-DEMULATOR_BUILT=\"$to\"" \
            "-DEMULATOR_FLAGS=\"$kernel_flags\"" "-DEMULATOR_STAMP=${stamp}u" \
            "-Wl,-soname,lib$name.so" "$@" -o "$temporary/lib$name.so"
        mv "$temporary/lib$name.so" "$file"
    fi
    ln -s "lib$name.so" "$temporary/$link"
    mv -T "$temporary/$link" "$to/$link"
}

library cuda libcuda.so.1 driver.cpp emulator.cpp
library nvrtc libnvrtc.so.13 nvrtc.cpp
library cublasLt libcublasLt.so.13 cublaslt.cpp emulator.cpp
