#!/usr/bin/env bash
# The long forms of tests whose short forms run everywhere, with other seeds on each run. Prints what to commit to
# docs/results/soak.md. RETAPE_CASES: how many; RETAPE_FUZZ_SECONDS: how long each fuzzer runs.
set -euo pipefail
cd "$(dirname "$0")/.."
cases=${RETAPE_CASES:-3000}
seconds=${RETAPE_FUZZ_SECONDS:-180}
export RETAPE_CASES=$cases RETAPE_SEED=${RETAPE_SEED:-$RANDOM}
cargo build --release --workspace --tests 2>/dev/null
start=$(date +%s)
cargo test --release -q -p retape-tests --test random_programs --test gpt_curve
echo "random programs: $cases graphs, each about 14 times on the CPU and in a dry run: $(($(date +%s) - start)) s"
start=$(date +%s)
RETAPE_CASES=$((cases / 30)) cargo test --release -q -p retape-tests --test planner
cargo test --release -q -p retape-policy --test planner
echo "planner: $((cases / 30)) programs, each planned 16 times and run on the CPU," \
    "$cases graphs against brute force: $(($(date +%s) - start)) s"
# The tables of docs/results/planner.md.
RETAPE_ILP_SECONDS=${RETAPE_ILP_SECONDS:-60} cargo test --release -q -p retape-policy --test ilp -- --nocapture

cargo test --release -q -p retape-tests --test properties --test fuzz
echo "properties: seed $RETAPE_SEED, $((cases / 150)) times their usual number of cases: $(($(date +%s) - start)) s"

# The memory that every op takes from the system at 64 MiB, forward and backward: the table of docs/results/resident.md.
start=$(date +%s)
RETAPE_RESIDENT=all cargo test --release -q -p retape-tests --test resident_ops -- --nocapture | grep '^|'
echo "resident memory of every op: $(($(date +%s) - start)) s"

# CUDA on the emulator: threads and blocks in other orders, then kernels under sanitizers.
start=$(date +%s)
on_emulator=(cargo test --release -q -p retape-cuda-emulator
    --test conformance --test attention --test rows --test products)
for order in reverse "$RETAPE_SEED"; do RETAPE_EMULATOR_ORDER=$order "${on_emulator[@]}"; done
echo "emulated kernels: in reverse order and with seed $RETAPE_SEED: $(($(date +%s) - start)) s"
for sanitizer in address thread; do
    start=$(date +%s)
    # The test of cuBLASLt starts a process of its own, which a sanitizer's library can't follow.
    scripts/sanitize-kernels.sh $sanitizer "${on_emulator[@]}" -- --skip cublaslt
    echo "emulated kernels: $sanitizer sanitizer: $(($(date +%s) - start)) s"
done

# Undefined behaviour, by Miri: core, policy, the CPU backend's parts, and small samples of every op on its kernels.
# What is left out compiles large regular expressions, or tries millions of numbers.
if cargo +nightly miri --version >/dev/null 2>&1; then
    start=$(date +%s)
    # Kernels get addresses as numbers, from a backend's buffers; and rayon's queues break Miri's older rules of
    # borrowing.
    export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-tree-borrows"
    miri=(cargo +nightly miri test -q --target-dir target/miri)
    "${miri[@]}" -p retape-core
    "${miri[@]}" -p retape-policy --lib --test rules -- --skip long_patterns
    "${miri[@]}" -p retape-cpu --lib -- --skip f32_functions_are_accurate
    "${miri[@]}" -p retape-tests --test interpreted -- --nocapture
    echo "Miri: no report: $(($(date +%s) - start)) s"
else
    echo "Miri: not run, it needs rustup component add miri rust-src --toolchain nightly"
fi

# Data races between the CPU backend's threads, and between users' threads.
if [ -d "$(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src" ]; then
    start=$(date +%s)
    RUSTFLAGS=-Zsanitizer=thread cargo +nightly test -q --release -Zbuild-std --target x86_64-unknown-linux-gnu \
        --target-dir target/tsan -p retape-cpu -p retape-tests --lib --test rows --test indexing --test attention \
        --test interpreted --test misuse
    echo "ThreadSanitizer on the CPU backend: no report: $(($(date +%s) - start)) s"
else
    echo "ThreadSanitizer: not run, it needs rustup component add rust-src --toolchain nightly"
fi

if ! cargo +nightly --version >/dev/null 2>&1 || ! cargo fuzz --version >/dev/null 2>&1; then
    echo "fuzzers: not run, they need the nightly toolchain and cargo-fuzz (cargo install cargo-fuzz)"
    exit 0
fi
# With AddressSanitizer, debug assertions and overflow checks; on what earlier runs found, and the committed seeds.
cargo +nightly fuzz build -O -a 2>/dev/null
for target in layout ops tape rules; do
    mkdir -p "fuzz/corpus/$target"
    cargo +nightly fuzz run -O -a "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_len=512 -max_total_time="$seconds" -print_final_stats=1 2>&1 |
        sed -n -e "s/^stat::number_of_executed_units: */fuzzer $target: no failure in executions: /p" \
            -e "/ERROR\|SUMMARY\|panicked/p"
done
