#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds for this machine's GPU, runs every op's CPU twin against its CUDA kernel, the
# pipeline on the GPU against the double-precision oracle. Usage: tools/gpu-check.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build-gpu}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
cmake -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DOOMB_CUDA=ON -DOOMB_TORCH=ON ${OOMB_PYTHON:+-DOOMB_PYTHON="$OOMB_PYTHON"} >"$build.configure.log" 2>&1 ||
  { cat "$build.configure.log"; exit 1; }
cmake --build "$build" --parallel
ctest --test-dir "$build" --output-on-failure --no-tests=error -R 'kernels|pipeline_gpu'
