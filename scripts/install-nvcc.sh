#!/usr/bin/env bash
# Puts the pinned CUDA compiler, and the tools that read what it made, into .cuda/ (ignored by git; 150 MB to download).
# No system CUDA is needed. 13.0, because later compilers emit PTX that a driver of the 580 series doesn't load.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "python3 with venv is needed to install nvcc" >&2; exit 1; }
if [ ! -x .cuda/nvcc ]; then
    rm -rf .cuda && mkdir .cuda
    python3 -m venv .cuda/compiler
    .cuda/compiler/bin/pip install --quiet --disable-pip-version-check --no-deps nvidia-cuda-nvcc==13.0.88 \
        nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    # Of another release, so that they can't replace parts of the compiler.
    python3 -m venv .cuda/readers
    .cuda/readers/bin/pip install --quiet --disable-pip-version-check --no-deps nvidia-cuda-cuobjdump==13.2.86 \
        nvidia-cuda-nvdisasm==13.2.86
    # Small programs instead of links: nvcc looks for its own parts beside the path that it is called by.
    for tool in cuobjdump nvdisasm nvcc; do
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$(find "$PWD/.cuda" -name $tool -type f | head -1)" >.cuda/$tool.new
        chmod +x .cuda/$tool.new
    done
    for tool in cuobjdump nvdisasm nvcc; do mv .cuda/$tool.new .cuda/$tool; done
fi
.cuda/nvcc --version | tail -2
