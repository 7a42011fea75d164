#!/usr/bin/env bash
# Runs tests with the emulated kernels under sanitizers: of addresses and undefined behaviour, or of races between
# threads of a block and between blocks.
#
#   scripts/sanitize-kernels.sh address|thread COMMAND...
#
# COMMAND is a test's binary and its arguments, or `cargo test` with its arguments. RETAPE_EMULATOR_ORDER sets the
# order of CUDA threads. Only the kernels are compiled with sanitizers: cargo's own build stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: $0 address|thread COMMAND..."
mode=${1:?$usage}
shift
: "${1:?$usage}"
case $mode in
address)
    flags=(-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined)
    libraries=(libasan.so libubsan.so)
    export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
    ;;
thread)
    flags=(-fsanitize=thread)
    libraries=(libtsan.so)
    # Rust's locks are none that TSan knows: what is compiled without it is left out.
    export TSAN_OPTIONS=ignore_noninstrumented_modules=1 RUST_TEST_THREADS=1
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac

compiler=${CXX:-g++}
built=$(cargo build --release --locked -q -p retape-cuda-emulator --message-format json | python3 -c '
import json, sys
messages = [json.loads(line) for line in sys.stdin]
built = [m for m in messages if m["reason"] == "build-script-executed" and "cuda-emulator" in m["package_id"]]
print(built[0]["out_dir"])')
objects=$built/objects
[[ -f $objects/flags ]] || { echo "there is no emulator to compile again: $built" >&2; exit 1; }
out=${CARGO_TARGET_DIR:-target}/emulator-$mode
mkdir -p "$out"
for unit in "$objects"/*.unit.cpp; do
    object=$out/$(basename "$unit" .cpp).o
    [[ $object -nt $objects/flags ]] ||
        echo "$compiler @$objects/flags -O1 -fno-omit-frame-pointer ${flags[*]} -c $unit -o $object"
done | xargs -r -P "$(nproc)" -I{} bash -c '{}'
own=("$objects"/*.o)
for unit in "$objects"/*.unit.o; do own=("${own[@]/$unit/}"); done
# shellcheck disable=SC2068
"$compiler" -shared -Wl,-Bsymbolic -Wl,-z,nodelete "${flags[@]}" ${own[@]} "$out"/*.unit.o \
    -o "$out/libcudaemu.so" -ldl -lpthread

preload=
for library in "${libraries[@]}"; do preload+=${preload:+:}$("$compiler" -print-file-name="$library"); done
RETAPE_CUDA_DRIVER=$(realpath "$out/libcudaemu.so")
export RETAPE_CUDA_DRIVER
if [[ $1 == cargo ]]; then
    # Not cargo and rustc, but what they run.
    export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_PRELOAD=$preload"
    exec "$@"
fi
LD_PRELOAD=$preload exec "$@"
