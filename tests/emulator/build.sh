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
stamp=$(cat "${headers[@]}" | cksum | cut -d ' ' -f 1)

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
        g++ -std=c++17 -O2 -Wall -Wno-psabi -shared -fPIC -Wl,-z,defs "-DEMULATOR_HEADERS=\"$PWD\"" "-DEMULATOR_STAMP=${stamp}u" \
            "-Wl,-soname,lib$name.so" "$@" -o "$temporary/lib$name.so"
        mv "$temporary/lib$name.so" "$file"
    fi
    ln -s "lib$name.so" "$temporary/$link"
    mv -T "$temporary/$link" "$to/$link"
}

library cuda libcuda.so.1 driver.cpp emulator.cpp
library nvrtc libnvrtc.so.13 nvrtc.cpp
library cublasLt libcublasLt.so.13 cublaslt.cpp emulator.cpp
