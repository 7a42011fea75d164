#!/usr/bin/env bash
# The long forms of tests whose short forms run everywhere. Prints what to commit to docs/results/soak.md.
set -euo pipefail
cd "$(dirname "$0")/.."
cases=${RETAPE_CASES:-3000}
export RETAPE_CASES=$cases
cargo build --release --workspace --tests 2>/dev/null
start=$(date +%s)
cargo test --release -q -p retape-tests --test random_programs
echo "random programs: $cases graphs, each about 14 times on the CPU and in a dry run: $(($(date +%s) - start)) s"
start=$(date +%s)
RETAPE_CASES=$((cases / 30)) cargo test --release -q -p retape-tests --test planner
cargo test --release -q -p retape-policy --test planner
echo "planner: $((cases / 30)) programs, each planned 16 times and run on the CPU, $cases graphs against brute force: $(($(date +%s) - start)) s"
# The tables of docs/results/planner.md.
RETAPE_ILP_SECONDS=${RETAPE_ILP_SECONDS:-60} cargo test --release -q -p retape-policy --test ilp -- --nocapture
