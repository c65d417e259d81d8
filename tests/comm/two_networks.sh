#!/usr/bin/env bash
# Two ranks in two network namespaces, joined by a virtual cable: all pages must go over it (its byte counters say so), and
# a cut cable must be told as a lost peer. Needs root and namespaces; exits 77 and says why where they are not permitted.
#
# usage: two_networks.sh PROGRAM_OF_comm_cable
set -euo pipefail
program=$1
tag=oc$$
readonly a=${tag}a b=${tag}b cable_a=${tag}va cable_b=${tag}vb

skip() { echo "SKIPPED: $*"; exit 77; }
command -v ip >/dev/null || skip "no ip command (iproute2)"
[ "$(id -u)" = 0 ] || skip "not root"
folder=$(mktemp -d)
clean() {
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$folder"
}
trap clean EXIT
ip netns add "$a" 2>"$folder/why" || skip "network namespaces are not permitted: $(cat "$folder/why")"
ip netns add "$b"
ip link add "$cable_a" netns "$a" type veth peer name "$cable_b" netns "$b" 2>"$folder/why" ||
  skip "virtual cables are not permitted: $(cat "$folder/why")"
ip -n "$a" addr add 10.79.0.1/24 dev "$cable_a"
ip -n "$b" addr add 10.79.0.2/24 dev "$cable_b"
for side in "$a lo" "$b lo" "$a $cable_a" "$b $cable_b"; do
  read -r name device <<<"$side"
  ip -n "$name" link set "$device" up
done
for ((try = 0; try < 100; try++)); do
  if ip -n "$a" -br link show "$cable_a" | grep -qw UP && ip -n "$b" -br link show "$cable_b" | grep -qw UP; then break; fi
  sleep 0.05
done

# TCP only: the two share a machine, and UCX would find its shared memory.
export UCX_TLS=tcp,self UCX_WARN_UNUSED_ENV_VARS=n
received() { ip netns exec "$a" cat "/sys/class/net/$cable_a/statistics/rx_bytes"; }

# cable MODE: both ranks; `cut` cuts the cable when rank 0 says that it is waiting.
cable() {
  local mode=$1 first=0 second=0
  UCX_NET_DEVICES=$cable_b ip netns exec "$b" timeout 60 "$program" "$mode" 1 "$folder/$mode" >"$folder/$mode.1" 2>&1 &
  local other=$!
  UCX_NET_DEVICES=$cable_a ip netns exec "$a" timeout 60 "$program" "$mode" 0 "$folder/$mode" >"$folder/$mode.0" 2>&1 &
  local own=$!
  if [ "$mode" = cut ]; then
    for ((try = 0; try < 600; try++)); do
      if [ -e "$folder/cut.waiting" ]; then break; fi
      sleep 0.05
    done
    ip -n "$b" link set "$cable_b" down
  fi
  wait "$own" || first=$?
  wait "$other" || second=$?
  sed 's/^/[0] /' "$folder/$mode.0"
  sed 's/^/[1] /' "$folder/$mode.1"
  if ((first || second)); then
    echo "$mode: rank 0 ended with $first, rank 1 with $second"
    exit 1
  fi
}

before=$(received)
cable read
moved=$(($(received) - before))
asked=$(sed -n 's/^read \([0-9]*\) bytes$/\1/p' "$folder/read.0")
echo "rank 0 read $asked bytes, the cable brought $moved"
if ((moved < asked || moved > asked + asked / 5)); then
  echo "the pages did not go over the cable, or far more did"
  exit 1
fi
cable cut
