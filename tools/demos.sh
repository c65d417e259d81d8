#!/usr/bin/env bash
# Runs the demos and measures each against what it has to reach. Exit 1 if one does not.
#
# usage: tools/demos.sh BIN [--short]
#   BIN       the folder of oomb, such as build/bin
#   --short   the form that CI runs: fewer steps and wider bounds
#
# local   a model trained from scratch on byte-level text: held-out loss below a trigram model's
# copy    the second half of a sequence repeats the first, farther back than a chunk, and only it counts: loss below a
#         tenth of ln(alphabet) with dense attention, below a quarter with retrieved pages, and near ln(alphabet) when no
#         page may be retrieved, so that the pages, not luck, carry it
# Each run has a deadline; results and logs are in runs/demos/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=${1:?usage: tools/demos.sh BIN [--short]}
bin=$(cd "$bin" && pwd)
short=0
if [ "${2:-}" = --short ]; then short=1; fi
readonly minutes=10
readonly out=runs/demos
failures=0

# number JSON KEY: the value of KEY.
number() { python3 -c 'import json, sys; print(float(json.loads(sys.argv[1])[sys.argv[2]]))' "$1" "$2"; }
# holds EXPRESSION: arithmetic of real numbers, as Python writes it.
holds() { python3 -c "import math, sys; sys.exit(not ($1))"; }

# train NAME RUN.yaml [--set ...]: trains anew in runs/demos/NAME and sets result to what `oomb eval --json` says.
train() {
  local name=$1 run=$2 begun=$SECONDS
  shift 2
  local settings=(--set "run.dir=$PWD/$out/$name" "$@")
  rm -rf "${out:?}/$name"
  mkdir -p "$out"
  timeout --kill-after=30 "${minutes}m" "$bin/oomb" train "$run" "${settings[@]}" >"$out/$name.log" 2>&1 || {
    tail -n 20 "$out/$name.log" >&2
    echo "demos: $name: training failed or took more than $minutes minutes; log: $out/$name.log" >&2
    exit 1
  }
  result=$("$bin/oomb" eval "$run" "${settings[@]}" --json)
  echo "$name: trained in $((SECONDS - begun)) s: $result"
}

# expect WHAT EXPRESSION
expect() {
  if holds "$2"; then
    echo "  reached: $1 ($2)"
  else
    echo "  MISSED: $1 ($2)"
    failures=$((failures + 1))
  fi
}

local_demo() {
  local steps=() bound
  if ((short)); then steps=(--set train.stop_after=12 --set eval.sequences=1); fi
  train local configs/local.yaml "${steps[@]}"
  if ((short)); then
    expect "12 steps: below ln(256) - 1" "$(number "$result" loss) < math.log(256) - 1"
  else
    bound=$(number "$("$bin/../oomb-trigram" configs/local.yaml)" loss)
    expect "held-out loss below a trigram model's" "$(number "$result" loss) < $bound"
  fi
}

copy_demo() {
  local alphabet steps=() dense="/ 10" topk="/ 4"
  alphabet=$("$bin/oomb" config configs/copy.yaml | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"]["copy"]["alphabet"])')
  # The short form stops where the copying has begun: half of the way is enough to know that pages carry it.
  if ((short)); then
    steps=(--set train.stop_after=180 --set eval.sequences=2)
    dense="/ 4" topk="* 0.75"
  fi
  train copy-dense configs/copy.yaml --set attention.kind=dense "${steps[@]}"
  expect "dense: below ln($alphabet) $dense" "$(number "$result" loss) < math.log($alphabet) $dense"
  train copy-topk configs/copy.yaml --set attention.kind=topk "${steps[@]}"
  expect "topk: below ln($alphabet) $topk" "$(number "$result" loss) < math.log($alphabet) $topk"
  train copy-no-pages configs/copy.yaml --set attention.kind=topk --set attention.budget_pages=0 "${steps[@]}"
  expect "no pages: near ln($alphabet)" "$(number "$result" loss) > 0.95 * math.log($alphabet)"
}

local_demo
copy_demo
if ((failures)); then
  echo "demos: $failures of the bounds missed"
  exit 1
fi
echo "demos: all bounds reached"
