#!/usr/bin/env bash
# Checks that machines do.
#
# usage: tools/lint.sh [CHECK...]     default: format includes headers tidy
#   format     every C++ and CUDA file is as clang-format 14 writes it
#   includes   includes point one way (tools/check_includes.py)
#   headers    every torch-free header compiles by itself
#   tidy       clang-tidy over the C++ files of kernels, comm and configs (needs `make check` once)
#   fix        not a check: formats the files in place
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly clang_format_major=14
readonly venv="${XDG_CACHE_HOME:-$HOME/.cache}/oomb/venv"
readonly compile_commands=build-check
jobs=$(nproc)
readonly jobs

die() { echo "lint: $*" >&2; exit 2; }

# sources SUFFIX...: our files with these suffixes, NUL-separated; new ones that git does not know yet count too.
sources() {
  local patterns=("${@/#/*.}")
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard -- "${patterns[@]}"
  else
    local names=() pattern
    for pattern in "${patterns[@]}"; do names+=(-o -name "$pattern"); done
    find kernels comm configs coordinator worker tests -type f \( "${names[@]:1}" \) -print0
  fi | while IFS= read -r -d '' file; do
    if [ -f "$file" ]; then printf '%s\0' "$file"; fi  # git lists what was deleted but not committed
  done
}

# Another version formats otherwise, so it has to be this one.
clang_format() {
  local candidate
  for candidate in "clang-format-$clang_format_major" clang-format "$venv/bin/clang-format"; do
    if [[ "$("$candidate" --version 2>/dev/null)" == *"version $clang_format_major."* ]]; then
      echo "$candidate"
      return
    fi
  done
  die "no clang-format $clang_format_major: 'make deps' brings it, or python3 -m pip install clang-format==14.0.6"
}

check_format() {
  local program
  program=$(clang_format) || return 1
  sources h cpp cu cuh | xargs -0 -r -n 16 -P "$jobs" "$program" --dry-run -Werror
}

fix_format() {
  local program
  program=$(clang_format) || return 1
  sources h cpp cu cuh | xargs -0 -r -n 16 -P "$jobs" "$program" -i
}

check_includes() {
  tools/check_includes.py --self-test && tools/check_includes.py
}

# Include folders and macros beyond the compiler's own: MPI, and CUDA where there is a toolkit.
header_flags() {
  echo "-DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX"  # the C interface only, as in the build
  mpicc --showme:compile 2>/dev/null || mpicc -compile_info 2>/dev/null | tr ' ' '\n' | grep '^-I' || true
  local nvcc
  if nvcc=$(command -v nvcc); then echo "-I$(dirname "$(dirname "$(readlink -f "$nvcc")")")/include"; fi
}

check_headers() {
  local flags
  read -r -d '' -a flags < <(header_flags; printf '\0')
  export -f compile_header
  # A header that is CUDA's, torch's or, where it is not installed, UCX's, directly or through another one of ours, is
  # compiled by the build alone.
  sources h | grep -zv '^tests/' | xargs -0 -r -n 1 -P "$jobs" bash -c 'compile_header "$@"' _ "${flags[@]}"
}

# compile_header FLAGS... HEADER
compile_header() {
  local header=${*: -1}
  local command=(c++ -std=c++20 -I. "${@:1:$#-1}" -x c++)
  local depends
  if ! depends=$("${command[@]}" -M -MG - <<<"#include \"$header\"") || grep -qE '(^| )(torch|ATen|c10|ucp)/' <<<"$depends"; then
    return 0
  fi
  if [[ $depends == *cuda_runtime.h* ]] && ! command -v nvcc >/dev/null; then return 0; fi
  "${command[@]}" -fsyntax-only -Wall -Wextra -Werror - <<<"#include \"$header\"" || {
    echo "$header does not compile by itself" >&2
    return 1
  }
}

check_tidy() {
  command -v clang-tidy >/dev/null || die "no clang-tidy: install the package clang-tidy"
  [ -e "$compile_commands/compile_commands.json" ] || die "no $compile_commands/: run 'make check' first"
  # clang 14 does not announce the coroutine support that Asio looks for.
  sources cpp | grep -zE '^(kernels|comm|configs)/' |
    xargs -0 -r -n 1 -P "$jobs" clang-tidy -p "$compile_commands" --quiet --warnings-as-errors='*' \
      --extra-arg=-D__cpp_impl_coroutine=201902L --extra-arg=-DBOOST_ASIO_HAS_CO_AWAIT \
      --extra-arg=-DBOOST_ASIO_HAS_STD_COROUTINE --extra-arg=-Wno-unknown-warning-option
}

if (($# == 0)); then set -- format includes headers tidy; fi
for check in "$@"; do
  case "$check" in
    format | includes | headers | tidy) "check_$check" || die "the $check check failed" ;;
    fix) fix_format ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "tools/lint.sh" ;;
    *) die "unknown check '$check'; see tools/lint.sh --help" ;;
  esac
done
