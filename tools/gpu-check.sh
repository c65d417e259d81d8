#!/usr/bin/env bash
# Everything that needs a GPU, in one go: builds for this machine's GPU, runs every op's CPU twin against its CUDA kernel,
# the pipeline on the GPU against the double-precision oracle, bf16 gradients against transformers', and a GPU that is full.
# Usage: tools/gpu-check.sh [--sanitizer] [BUILD_FOLDER]      --sanitizer: also compute-sanitizer's memcheck and racecheck
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=
if [[ ${1:-} == --sanitizer ]]; then
  sanitizer=1
  shift
fi
build=${1:-build-gpu}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
cmake -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DOOMB_CUDA=ON -DOOMB_TORCH=ON ${OOMB_PYTHON:+-DOOMB_PYTHON="$OOMB_PYTHON"} >"$build.configure.log" 2>&1 ||
  { cat "$build.configure.log"; exit 1; }
cmake --build "$build" --parallel
ctest --test-dir "$build" --output-on-failure --no-tests=error -R 'kernels|pipeline_gpu|parity_bf16|^nccl'
python=${OOMB_PYTHON:-python3}
"$python" tests/cli/gpu_memory_full.py "$build/bin/oomb"
if [[ $sanitizer ]]; then
  for tool in memcheck racecheck; do
    for tests in elementwise pages; do
      compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 "$build/tests/kernels/test_kernels_$tests"
    done
  done
  compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5 "$build/tests/worker/test_pipeline_gpu" --gtest_filter='*SinglePrecision:*TiersAgree'
fi
