#!/usr/bin/env bash
# Brings what the build needs and is not there yet, and nothing else. Safe to run again and again.
#
# usage: tools/setup.sh [--no-torch] [--check]
#   --no-torch   only what the torch-free parts need (`make check`)
#   --check      install nothing: say what is missing, exit 1 if something is
#
# As root on Debian 12 or Ubuntu 24.04, missing packages come from apt. Without root the list and the command are
# printed, and whatever CMake finds by itself counts as present: put modules, conda or Spack prefixes on PATH and
# CMAKE_PREFIX_PATH. LibTorch comes from the torch 2.11 of `python3`, else from a virtual environment in
# ${XDG_CACHE_HOME:-~/.cache}/oomb, made once (about 3 minutes, 5 GB) and shared by all clones of this user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly cache="${XDG_CACHE_HOME:-$HOME/.cache}/oomb"
readonly torch_version=2.11
readonly venv_disk_mib=8000  # 5 GB installed, and the largest wheels while they are unpacked
readonly apt_seconds=900 pip_seconds=1500 lock_seconds=3600 tries=3
readonly min_cmake=3.25 min_gcc=11

# Programs: "command package".
readonly programs=(
  "c++ g++" "cmake cmake" "ninja ninja-build" "make make" "git git" "pkg-config pkg-config" "python3 python3"
  "mpirun openmpi-bin" "flock util-linux" "timeout coreutils")
# Libraries: "package CMake-name arguments of find_package". cmake/OombDependencies.cmake asks for the same ones.
readonly libraries=(
  "libopenmpi-dev MPI COMPONENTS C" "libboost-dev Boost 1.74" "libyaml-cpp-dev yaml-cpp" "libcli11-dev CLI11"
  "libspdlog-dev spdlog" "nlohmann-json3-dev nlohmann_json 3.9" "libgtest-dev GTest" "libucx-dev ucx CONFIG")
# Quicker rebuilds, where anything is installed at all; the build does without.
readonly optional=("ccache ccache")

want_torch=1 may_install=1
for argument in "$@"; do
  case "$argument" in
    --no-torch) want_torch=0 ;;
    --check) may_install=0 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' setup.sh; exit 0 ;;
    *) echo "setup: unknown argument '$argument'; see tools/setup.sh --help" >&2; exit 2 ;;
  esac
done

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
deb_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# retry SECONDS COMMAND...: a download may fail or hang once; it may not do so forever.
retry() {
  local seconds=$1 try
  shift
  for ((try = 1; try <= tries; try++)); do
    # In the foreground, so that Ctrl-C reaches the command.
    if timeout --foreground --kill-after=20 "$seconds" "$@"; then return 0; fi
    say "try $try of $tries failed: $*"
    if ((try < tries)); then sleep $((try * 3)); fi
  done
  return 1
}

# The Python that can make a virtual environment for torch, empty if there is none. PATH's comes first.
venv_python() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -c '
import sys, ensurepip, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
}

# Prints the CMake names, out of those given as "name arguments" lines on stdin, that CMake does not find.
unfound_by_cmake() {
  local folder name arguments
  folder=$(mktemp -d)
  {
    echo 'cmake_minimum_required(VERSION 3.25)'
    echo 'if(POLICY CMP0167)'
    echo '  cmake_policy(SET CMP0167 NEW)'
    echo 'endif()'
    echo 'project(probe LANGUAGES C CXX)'
    while read -r name arguments; do
      echo "find_package($name $arguments QUIET)"
      echo "if(NOT ${name}_FOUND)"
      echo "  message(NOTICE missing:$name)"
      echo 'endif()'
    done
  } >"$folder/CMakeLists.txt"
  if ! timeout 120 cmake -S "$folder" -B "$folder/build" >"$folder/log" 2>&1; then
    say "CMake itself fails:"
    cat "$folder/log" >&2
    rm -rf "$folder"
    return 1
  fi
  sed -n 's/^missing://p' "$folder/log"
  rm -rf "$folder"
}

# Sets missing=(packages). A program counts by its command, a library by its package or by CMake finding it.
find_missing() {
  local entry package name rest unknown="" unfound
  missing=()
  for entry in "${programs[@]}"; do
    read -r name package <<<"$entry"
    if ! have "$name"; then missing+=("$package"); fi
  done
  if ((want_torch)) && [ -z "$(venv_python)" ] && ! torch_of python3 >/dev/null; then missing+=(python3-venv); fi
  for entry in "${libraries[@]}"; do
    read -r package rest <<<"$entry"
    if ! deb_installed "$package"; then unknown+="$rest"$'\n'; fi
  done
  if [ -z "$unknown" ]; then return; fi
  if have cmake && have c++ && { have ninja || have make; }; then
    # Searching takes seconds: the answer "all found" is kept until the list or the search path changes.
    local key
    key=$(printf '%s\n' "$unknown" "$PATH" "${CMAKE_PREFIX_PATH:-}" "${CPATH:-}" "$(c++ -dumpfullversion)" | cksum)
    key="$cache/found-${key// /-}"
    if [ -e "$key" ]; then return; fi
    unfound=$(unfound_by_cmake <<<"${unknown%$'\n'}")
    if [ -z "$unfound" ]; then
      mkdir -p "$cache"
      : >"$key"
      return
    fi
  else
    unfound=$(cut -d ' ' -f 1 <<<"${unknown%$'\n'}")
  fi
  for entry in "${libraries[@]}"; do
    read -r package name rest <<<"$entry"
    if grep -qxF "$name" <<<"$unfound"; then missing+=("$package"); fi
  done
}

# quietly COMMAND...: its output only if it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" </dev/null >"$log" 2>&1 || status=$?
  if ((status)); then cat "$log" >&2; fi
  rm -f "$log"
  return "$status"
}

install_packages() {
  local wanted=("$@") entry package name
  local options=(-o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
  export DEBIAN_FRONTEND=noninteractive
  say "installing with apt (about a minute): $*"
  quietly retry "$apt_seconds" apt-get "${options[@]}" update || die "apt-get update failed"
  for entry in "${optional[@]}"; do
    read -r name package <<<"$entry"
    # Left out where this release does not carry it.
    if ! have "$name" && apt-cache show "$package" >/dev/null 2>&1; then wanted+=("$package"); fi
  done
  quietly retry "$apt_seconds" apt-get "${options[@]}" install -y --no-install-recommends "${wanted[@]}" ||
    die "apt-get install failed: ${wanted[*]}"
}

ensure_packages() {
  local missing version
  find_missing
  if ((${#missing[@]})); then
    if ((may_install)) && [ "$(id -u)" = 0 ] && have apt-get; then
      install_packages "${missing[@]}"
      find_missing
      if ((${#missing[@]})); then die "still missing after the installation: ${missing[*]}"; fi
    else
      say "missing, by their Debian and Ubuntu names:"
      printf '  %s\n' "${missing[@]}" >&2
      say "either have them installed:  sudo apt-get install --no-install-recommends ${missing[*]}"
      say "or bring them from modules, conda or Spack: programs on PATH, libraries on CMAKE_PREFIX_PATH; then run again"
      exit 1
    fi
  fi
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  if older "$version" "$min_cmake"; then die "cmake $version is too old: $min_cmake or newer is needed"; fi
  version=$(c++ -dumpversion)
  if c++ --version | grep -qiE 'gcc|g\+\+|free software foundation' && older "$version" "$min_gcc"; then
    die "g++ $version is too old for C++20: $min_gcc or newer is needed (set CXX after installing one)"
  fi
}

# torch_of PYTHON: prints the torch version if it is the wanted one with its C++ libraries. Nothing is imported.
torch_of() {
  "$1" -c "
import importlib.util as u, os, re, sys
root = os.path.dirname(u.find_spec('torch').origin)
version = re.search(r\"__version__ = '([^']+)'\", open(os.path.join(root, 'version.py')).read()).group(1)
if not version.startswith('$torch_version.') or not os.path.exists(os.path.join(root, 'lib', 'libtorch_cpu.so')):
    sys.exit(1)
print(version)" 2>/dev/null
}

has_test_packages() {
  "$1" -c "
import importlib.util as u, sys
sys.exit(any(u.find_spec(n) is None for n in ('transformers', 'safetensors', 'numpy')))" 2>/dev/null
}

# A virtual environment counts once it holds the requirements it was made from: written last, so a killed run has none.
venv_whole() {
  cmp -s requirements.txt "$cache/venv/oomb-requirements.txt" && torch_of "$cache/venv/bin/python" >/dev/null &&
    has_test_packages "$cache/venv/bin/python"
}

# Under the lock. `venv` is a link that is moved to the new folder once that is whole: nobody ever sees a half of it.
make_venv() {
  local python free folder leftover
  python=$(venv_python)
  if [ -z "$python" ]; then die "no python3 (3.10 to 3.14) with its venv module: install python3-venv"; fi
  for leftover in "$cache"/venv-*; do
    if [ -d "$leftover" ] && [ "$(readlink -f "$cache/venv")" != "$(readlink -f "$leftover")" ]; then rm -rf "$leftover"; fi
  done
  free=$(df -Pm "$cache" | awk 'NR == 2 {print $4}')
  if ((free < venv_disk_mib)); then
    die "$cache has $free MiB free, torch needs $venv_disk_mib MiB: make room, or set XDG_CACHE_HOME to another disk"
  fi
  folder="$(readlink -f "$cache")/venv-$(date +%Y%m%d-%H%M%S)-$$"
  say "making $folder: $("$python" --version), torch, what the tests compare with (about 3 minutes, 5 GB)"
  "$python" -m venv "$folder"
  retry "$pip_seconds" "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
    --retries 5 --timeout 60 --only-binary :all: -r requirements.txt </dev/null >&2 ||
    die "pip could not install tools/requirements.txt"
  cp requirements.txt "$folder/oomb-requirements.txt"
  sync -f "$folder/oomb-requirements.txt"
  if [ -d "$cache/venv" ] && [ ! -L "$cache/venv" ]; then rm -rf "$cache/venv"; fi
  ln -sfn "$(basename "$folder")" "$cache/venv.new"
  mv -T "$cache/venv.new" "$cache/venv"
  # The one it replaces stays until the next time: a run that has it open may still load from it.
  venv_whole || die "the new $cache/venv is not usable"
}

ensure_torch() {
  if torch_of python3 >/dev/null; then
    if ! has_test_packages python3; then
      say "using the torch of $(command -v python3); the comparisons with Hugging Face models also need:" \
        "python3 -m pip install $(sed -n '/^torch=/d;/^#/d;p' requirements.txt | tr '\n' ' ')"
    fi
    return
  fi
  if venv_whole; then return; fi
  if ((!may_install)); then
    say "missing: torch $torch_version.0 (python3 has none; $cache/venv is not there or not whole)"
    exit 1
  fi
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  if ! flock -n 9; then
    say "waiting for another set-up that holds $cache/lock"
    flock -w "$lock_seconds" 9 || die "$cache/lock is still held after $lock_seconds s"
  fi
  if ! venv_whole; then make_venv; fi
  exec 9>&-
}

ensure_packages
if ((want_torch)); then ensure_torch; fi
