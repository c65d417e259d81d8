"""A real Slurm of virtual nodes on this machine, for tests: munged, slurmctld and a slurmd for each node.

Everything lies in one folder; every daemon is a child of this process and runs in the foreground, so that stop() ends
exactly what start() began. Needs root and Debian's or Ubuntu's packages slurm-wlm, munge and libpmix-dev.

By hand: python3 tests/slurm/cluster.py FOLDER [NODES] runs one until Ctrl-C and prints how to reach it.
"""
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time

START_SECONDS = 60  # until all nodes are idle; a tenth of a second on an idle machine
STOP_SECONDS = 15
SEARCH_PATH = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "scancel")


def missing():
    """Why no cluster can be started here; empty when one can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH_PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "the daemons of virtual nodes need root"
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as configuration:
        configuration.write("ClusterName=probe\nSlurmctldHost=localhost\n")
        configuration.flush()
        plugins = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=60,
                                 env={**os.environ, "SLURM_CONF": configuration.name})
    if "pmix" not in plugins.stdout + plugins.stderr:
        return "this Slurm has no PMIx plugin"
    return ""


def free_ports(count):
    """Ports that nobody listens on now. They are let go before the daemons take them, so a start may have to be tried
    again."""
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def children_of(pid):
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # PID (name) STATE PPID ...; the name may hold anything.
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(folder.name))
    return found


class Cluster:
    def __init__(self, folder, nodes=2, cpus=8, gpus=2, environment=None):
        self.folder = pathlib.Path(folder).resolve()
        self.nodes = [f"node{i}" for i in range(1, nodes + 1)]
        self.cpus, self.gpus = cpus, gpus
        # The daemons hand their environment on to what they start.
        self.base = {**(os.environ if environment is None else environment), "PATH": SEARCH_PATH}
        self.daemons = {}

    @property
    def environment(self):
        """For sbatch and its like."""
        inherited = {key: value for key, value in self.base.items() if not key.startswith("SLURM")}
        return {**inherited, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    # ---- start and stop

    def start(self):
        for attempt in range(3):
            if self._start_once():
                return
            self.stop()
        raise RuntimeError(f"no Slurm cluster came up; the last lines of its logs:\n{self.logs()}")

    def _start_once(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("etc", "state", "log", "run", "munge", "dev"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o700)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(parents=True)
            (self.folder / "tmp" / node).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._write_configuration()
        # By force: everybody here is root, so a private folder above the socket is no fault.
        self._run("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._munge_socket()}",
                  f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/munge/log",
                  f"--seed-file={self.folder}/munge/seed")
        deadline = time.monotonic() + START_SECONDS
        if not self._until(deadline, self._munge_socket().exists):
            return False
        self._run("slurmctld", "slurmctld", "-D", "-c", "-f", self.environment["SLURM_CONF"])
        for node in self.nodes:
            self.start_node(node)
        return self._until(deadline, lambda: self.idle_nodes() == len(self.nodes))

    def _until(self, deadline, condition):
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons.values()):
                return False
            time.sleep(0.05)
        return True

    def _munge_socket(self):
        return self.folder / "run" / "munge.socket"

    def _run(self, key, *command):
        with open(self.folder / "log" / f"{key}.out", "ab") as log:
            self.daemons[key] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                 env=self.environment, cwd=self.folder, start_new_session=True)

    def start_node(self, node):
        self._run(node, "slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", node)

    def stop(self):
        """Ends all daemons, nodes first. Jobs must have been ended before, or are left to the caller."""
        for key in sorted(self.daemons, key=lambda name: name in ("slurmctld", "munged")):
            daemon = self.daemons[key]
            daemon.terminate()
            try:
                daemon.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def crash_node(self, node):
        """What a power failure does: slurmd, its step daemons and all that they started are gone at once."""
        daemon = self.daemons.pop(node)
        victims = self.node_processes(node)
        daemon.kill()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def node_processes(self, node):
        """Step daemons and tasks of a node; no slurmd."""
        found = set()
        for folder in pathlib.Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().split(b"\0")
                if (f"SLURMD_NODENAME={node}".encode() in words and
                        f"SLURM_CONF={self.folder}/etc/slurm.conf".encode() in words):
                    found.add(int(folder.name))
        return found | {pid for pid in self.step_daemons() if found & set(children_of(pid))}

    def step_daemons(self, step=""):
        """Process numbers of slurmstepd of this cluster, or of one step: "JOB.STEP", "JOB.batch"."""
        found = []
        for folder in pathlib.Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
                if not title.startswith("slurmstepd: [") or (step and f"[{step}]" not in title):
                    continue
                if f"SLURM_CONF={self.folder}/etc/slurm.conf".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def logs(self):
        texts = []
        for log in sorted((self.folder / "log").glob("*")):
            lines = log.read_text(errors="replace").splitlines()[-20:]
            texts.append(f"--- {log.name}\n" + "\n".join(lines))
        return "\n".join(texts)

    # ---- asking it

    def command(self, *words, cwd=None, environment=None, seconds=60):
        result = subprocess.run(words, capture_output=True, text=True, timeout=seconds, cwd=cwd,
                                stdin=subprocess.DEVNULL, env={**self.environment, **(environment or {})})
        if result.returncode:
            raise RuntimeError(f"{' '.join(words)}: status {result.returncode}: {result.stderr}")
        return result.stdout

    def idle_nodes(self):
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return int(self.command("sinfo", "-h", "-t", "idle", "-o", "%D", seconds=10).strip() or 0)
        return 0

    def job(self, job):
        """The fields of `scontrol show job` as a dictionary."""
        words = self.command("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    # ---- configuration

    def _write_configuration(self):
        host = socket.gethostname().split(".")[0]
        controller_port, *node_ports = free_ports(1 + len(self.nodes))
        lines = f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# How long a credential lives is also how long a requeued job is held back; Slurm takes no less than 6.
AuthInfo=socket={self._munge_socket()},cred_expire=6
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
# By node: the PMIx plugin's folders of two nodes would be the same one.
TmpFS={self.folder}/tmp/%n
SlurmctldPidFile={self.folder}/run/slurmctld.pid
SlurmdPidFile={self.folder}/run/%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
# The nodes are larger than the machine, so that jobs made for real nodes fit.
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdTimeout=5
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=600
MessageTimeout=10
BatchStartTimeout=20
PropagateResourceLimitsExcept=MEMLOCK
""".strip().splitlines()
        for node, port in zip(self.nodes, node_ports):
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} Boards=1 "
                         f"SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 RealMemory=65536 "
                         f"Gres=gpu:{self.gpus} State=UNKNOWN")
        lines.append("PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "etc" / "slurm.conf").write_text("\n".join(lines) + "\n")
        # Slurm wants character devices for GPUs; these are further names of /dev/null.
        for gpu in range(self.gpus):
            os.mknod(self.folder / "dev" / f"nvidia{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        gres = ["AutoDetect=off"]
        for node in self.nodes:
            gres.append(f"NodeName={node} Name=gpu File={self.folder}/dev/nvidia[0-{self.gpus - 1}]")
        (self.folder / "etc" / "gres.conf").write_text("\n".join(gres) + "\n")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    if why := missing():
        sys.exit(f"no cluster: {why}")
    cluster = Cluster(sys.argv[1], nodes=int(sys.argv[2]) if len(sys.argv) == 3 else 2)
    try:
        cluster.start()
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        cluster.stop()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
