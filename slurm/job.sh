#!/bin/bash
# What the batch scripts run inside their job.
#
# usage: job.sh train RUN.yaml [options of oomb train]
#        job.sh eval RUN.yaml CHECKPOINT...
#
# train: prints the resolved run, then trains with a worker for each task of the job. The warning that Slurm sends before
# the time limit (--signal=B:USR1@120) ends the run with a checkpoint, and the job goes back into the queue; so it does,
# up to OOMB_MAX_REQUEUES (3) restarts, when workers were lost. A job that starts again goes on from the newest whole
# checkpoint. Exit status: that of oomb.
#
# OOMB: the program; else `oomb` of PATH, else build/bin/oomb below the folder the job was submitted from.
set -u

say() { printf '%s job %s: %s\n' "$(date +%FT%T)" "${SLURM_JOB_ID:-}" "$*" >&2; }
fail() { say "error: $*"; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || fail "not inside a Slurm job; submit it with sbatch"

# Processes whose slurmstepd is gone are beyond Slurm's reach: end, rather than train beside the job's next start.
bind=()
if command -v setpriv >/dev/null; then
  bind=(setpriv --pdeathsig KILL)
  if [ -z "${OOMB_JOB_BOUND:-}" ]; then
    export OOMB_JOB_BOUND=1
    exec "${bind[@]}" "$BASH" "$0" "$@"
  fi
  unset OOMB_JOB_BOUND
fi

oomb=${OOMB:-$(command -v oomb)}
[ -n "$oomb" ] || oomb="${SLURM_SUBMIT_DIR:-.}/build/bin/oomb"
[ -x "$oomb" ] || fail "no program $oomb; put oomb on PATH, or set OOMB"
[ $# -ge 2 ] || fail "usage: $(basename "$0") train|eval RUN.yaml ..."
mode=$1 run=$2
shift 2
tasks=${SLURM_NTASKS:-1}
restarts=${SLURM_RESTART_COUNT:-0}

evaluate() {
  local index=${SLURM_ARRAY_TASK_ID:-0}
  if ((index >= $#)); then fail "array index $index, but $# checkpoint(s) are given; allowed: --array=0-$(($# - 1))"; fi
  shift "$index"
  set -- "$run" --set "topology.workers=$tasks" --set "checkpoint.resume=$1"
  "$oomb" config "$@" >&2 || exit
  exec "${bind[@]}" "$oomb" eval "$@" --json
}

# train OPTIONS...: sets status, warned (the time is nearly over) and ended (Slurm ends the job).
train() {
  local child
  warned=0 ended=0
  "${bind[@]}" "$oomb" train "$@" &
  child=$!
  # SIGUSR1 asks oomb for a checkpoint and its end, however often it comes; further signals of other kinds would end it
  # at once.
  trap 'warned=1; kill -USR1 "$child"' USR1
  trap 'ended=1; kill -USR1 "$child"' TERM
  # A trap ends the wait early; the status of a child that has ended is kept for the last one.
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  wait "$child"
  status=$?
}

requeue() {
  say "$1; back into the queue"
  trap 'exit "$status"' TERM
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "Slurm does not take it back; submit it again to go on"
    exit "$status"
  fi
  # Slurm ends this script.
  sleep 300 &
  wait "$!"
  exit "$status"
}

case "$mode" in
  eval) evaluate "$@" ;;
  train) ;;
  *) fail "'$mode': allowed: train, eval" ;;
esac

# The user's options come after the first ones and win; a restart goes on, whatever the first start was told.
options=("$run" --set "topology.workers=$tasks" --set timeouts.stop_seconds=90 "$@")
if ((restarts > 0)); then options+=(--set checkpoint.resume=auto); fi
say "start $((restarts + 1)) on ${SLURM_JOB_NODELIST:-?}, $tasks task(s)"
"$oomb" config "${options[@]}" || exit
train "${options[@]}"
say "oomb ended with status $status"
if ((status == 138 && warned)); then requeue "the time is nearly over"; fi
if ((status == 1 && !ended && restarts < ${OOMB_MAX_REQUEUES:-3})); then requeue "workers were lost"; fi
exit "$status"
