#!/usr/bin/env python3
"""Starts comm_ranks under mpirun and checks that every rank did what it should and that nothing is left behind.

usage: run_ranks.py PROGRAM RANKS TRANSPORTS step SEED
       run_ranks.py PROGRAM RANKS TRANSPORTS fault WHERE HOW
TRANSPORTS is UCX_TLS, or `any`.
"""
import glob
import os
import subprocess
import sys
import time

DEADLINE_SECONDS = 100


def environment(transports):
    settings = dict(os.environ)
    settings.update({
        # As coordinator/launch/rank_environment.cpp sets them for ranks of one machine.
        "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_oob_tcp_if_include": "lo", "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y", "UCX_NET_DEVICES": "lo",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        # Only here: survivors have to live to tell.
        "OMPI_MCA_orte_enable_recovery": "1",
        # Open MPI leaves memory behind on purpose.
        "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0",
    })
    settings.pop("UCX_TLS", None)
    if transports != "any":
        settings["UCX_TLS"] = transports
    return settings


def mapped_by_someone(path):
    for maps in glob.glob("/proc/[0-9]*/maps"):
        try:
            with open(maps) as file:
                if path in file.read():
                    return True
        except OSError:
            pass
    return False


def left_in_shared_memory(before):
    """Names that are new since `before` and that no living process uses: others may run on this machine too."""
    return [name for name in set(os.listdir("/dev/shm")) - before if not mapped_by_someone("/dev/shm/" + name)]


def alive_with(marker):
    """Processes, zombies aside, that carry our marker in their environment."""
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(folder + "/environ", "rb") as file:
                if marker in file.read():
                    found.append(int(os.path.basename(folder)))
        except OSError:
            pass
    return found


def main():
    program, ranks, transports, mode, *rest = sys.argv[1:]
    survivors = int(ranks) - (mode == "fault")
    before = set(os.listdir("/dev/shm"))
    marker = f"OOMB_COMM_TEST={os.getpid()}-{time.monotonic_ns()}"
    settings = environment(transports)
    name, value = marker.split("=")
    settings[name] = value
    run = subprocess.Popen(["mpirun", "-np", ranks, "--oversubscribe", program, mode, *rest], env=settings, text=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in alive_with(marker.encode()):
            os.kill(pid, 9)
        output, _ = run.communicate()
        print(output)
        sys.exit(f"not done after {DEADLINE_SECONDS} s")
    print(output)
    ok = [f"rank {rank} ok" in output for rank in range(survivors)]
    if not all(ok):
        sys.exit(f"ranks without their 'ok': {[rank for rank, good in enumerate(ok) if not good]}")
    if mode == "step" and run.returncode != 0:
        sys.exit(f"mpirun ended with {run.returncode}")
    for _ in range(50):
        alive, left = alive_with(marker.encode()), left_in_shared_memory(before)
        if not alive and not left:
            return
        time.sleep(0.1)
    sys.exit(f"left behind: processes {alive}, in /dev/shm {left}")


main()
