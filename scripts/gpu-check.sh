#!/usr/bin/env bash
# What can only be known on a GPU.
#
#   scripts/gpu-check.sh build     here: compiles the kernels, the tests and the benchmark into .gpu/ (50 MB)
#   scripts/gpu-check.sh run       where the GPU is, from a copy of this folder: runs them, at most 4 minutes; results
#   go to
#                                  $OUT (default: .gpu/out): gpu.txt to read, gpu.json with all figures, for
#                                  docs/results/
#   scripts/gpu-check.sh rehearse  as run, on the emulator and with tiny sizes: needs no GPU
#
# The machine with the GPU needs its driver (580 or later) and glibc 2.34, and torch for the comparison, nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
gpu=$PWD/.gpu

# Test programs of the emulator's package that run on a GPU as well; the others look into the emulator.
tests=(machine conformance attention rows products training)

build() {
    scripts/install-nvcc.sh
    rm -rf "$gpu" && mkdir -p "$gpu/kernels" "$gpu/programs"
    # Code for an H200, and PTX for what else there may be.
    ls kernels/*.cu | xargs -P "$(nproc)" -I{} sh -c \
        '.cuda/nvcc -std=c++17 -O3 -fatbin \
            -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_80,code=compute_80 \
            -o "$0/kernels/$(basename {} .cu).fatbin" {}' "$gpu"
    # Without kernels in them: they are read from the folder.
    export NVCC=none
    cargo build --release -p retape-cli
    cp target/release/retape "$gpu/programs/"
    local messages
    messages=$(cargo test --release --no-run --message-format=json -p retape-cuda-emulator "${tests[@]/#/--test=}")
    copy_programs "$messages" test-
    messages=$(cargo build --release --message-format=json -p retape-cuda --example speed)
    copy_programs "$messages" ""
    strip "$gpu"/programs/*
    cp scripts/gpu-torch.py "$gpu/"
    cp -r tests/fixtures/gpt_curve "$gpu/"
    emulator=$(ls -t target/release/build/retape-cuda-emulator-*/out/libcudaemu.so | head -1)
    cp "$emulator" "$gpu/"
    # Packed: the folder is to be carried.
    tar -C "$gpu" -czf "$gpu/programs.tar.gz" programs && rm -r "$gpu/programs"
    du -sh "$gpu"
}

# Copies the programs that cargo's messages name, by the names of their targets.
copy_programs() {
    echo "$1" | python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    kinds = message.get("target", {}).get("kind", [])
    if message.get("executable") and ("test" in kinds or "example" in kinds):
        shutil.copy(message["executable"], sys.argv[1] + message["target"]["name"])
' "$gpu/programs/$2"
}

# One part of the check: its name, its limit in seconds, its command. Its status and time go to the summary, what it
# says to a log of its own, and the lines with results to gpu.txt.
part() {
    local name=$1 limit=$2 start status=ok
    local figures='test |f32|bf16|f16|copy|gelu|softmax|layer_norm|quantize|dequantize|cross|adamw|matmul'
    figures+='|attention|torch|error|w1|tiny|gpt2|flash|explicit'
    shift 2
    start=$(date +%s)
    echo "== $name" | tee -a "$out/gpu.txt"
    timeout $((limit * patience)) "$@" >"$out/$name.log" 2>&1 || status="failed ($?)"
    grep -E "^($figures)|panicked" "$out/$name.log" >>"$out/gpu.txt" || true
    summary+=("$(printf '%-14s %-14s %4d s' "$name" "$status" $(($(date +%s) - start)))")
    [ "$status" = ok ] || failed=1
}

run() {
    out=${OUT:-$gpu/out} failed=0 summary=()
    mkdir -p "$out" && : >"$out/gpu.txt"
    tar -C "$gpu" -xzf "$gpu/programs.tar.gz"
    export RETAPE_CUDA_KERNELS=$gpu/kernels RETAPE_GPT_CURVE=$gpu/gpt_curve
    {
        date -u +%F
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || echo "no nvidia-smi"
    } >>"$out/gpu.txt" 2>&1
    local small=() model=(--model gpt2-small) threads=() patience=1
    if [ "${1:-}" = small ]; then
        small=(--small) threads=(--test-threads 2) patience=20
        model=(--model tiny --layers 1 --dim 32 --heads 2 --seq 32 --batch 1)
    fi
    # In this order: what the rest stands on comes first.
    part machine 10 "$gpu/programs/test-machine"
    part conformance 40 "$gpu/programs/test-conformance" "${threads[@]}"
    part attention 30 "$gpu/programs/test-attention" "${threads[@]}"
    part rows 20 "$gpu/programs/test-rows" "${threads[@]}"
    part products 20 "$gpu/programs/test-products" "${threads[@]}"
    part training 25 "$gpu/programs/test-training" "${threads[@]}" --nocapture
    part step 15 "$gpu/programs/retape" step "${model[@]}" --dtype bf16 --device cuda:0 --steps 3 --json
    part frontier 30 "$gpu/programs/retape" frontier "${model[@]}" --dtype bf16 --device cuda:0 --steps 3 \
        --policies none,full_per_layer,selective,int8_all --out "$out/frontier"
    part speed 30 "$gpu/programs/speed" "${small[@]}" --json "$out/speed.json"
    if [ ${#small[@]} = 0 ]; then
        part torch 30 python3 "$gpu/gpu-torch.py" --json "$out/torch.json"
    fi
    # All figures in one file: each part's status, and what step, frontier, speed and torch wrote.
    printf '%s\n' "${summary[@]}" | python3 -c '
import json, os, sys
out = sys.argv[1]
def read(name):
    path = os.path.join(out, name)
    try:
        return json.load(open(path))
    except (OSError, ValueError):
        return None
parts = [dict(zip(("part", "status", "seconds"), (l[:14].strip(), l[15:29].strip(), int(l[30:34])))) for l in sys.stdin]
files = {"step": "step.log", "frontier": "frontier/frontier.json", "speed": "speed.json", "torch": "torch.json"}
document = {"machine": open(os.path.join(out, "gpu.txt")).read().splitlines()[:2], "parts": parts}
document |= {key: read(name) for key, name in files.items()}
json.dump(document, open(os.path.join(out, "gpu.json"), "w"), indent=1)
' "$out"
    echo | tee -a "$out/gpu.txt"
    printf '%s\n' "${summary[@]}" | tee -a "$out/gpu.txt"
    return $failed
}

case ${1:-} in
build) build ;;
run) RETAPE_TEST_GPU=1 run ;;
rehearse)
    export RETAPE_CUDA_DRIVER=$gpu/libcudaemu.so RETAPE_CUBLASLT=none
    run small
    ;;
*)
    echo "usage: scripts/gpu-check.sh build|run|rehearse" >&2
    exit 2
    ;;
esac
