"""The shipped batch scripts under a real Slurm: runs, requeues, and every kind of loss.

What a disturbed run has to show is the losses of an undisturbed one, to the bit. With OOMB_SLURM_WORKERS=2 every run
has two workers, on two nodes.
"""
import json
import os
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cli"))

import oomb_cli  # noqa: E402
from oomb_cli import CliTest, wait_until  # noqa: E402

import cluster  # noqa: E402

NOT_RUN = 77  # the exit status that CTest counts as "not run"
WORKERS = int(os.environ.get("OOMB_SLURM_WORKERS", "1"))
FAKE = "fake" in os.environ.get("OOMB_WORKER", "")  # a build without LibTorch has no other worker
STEPS = 200
SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "slurm"
START = 120  # seconds: from submission to steps, on a busy machine
END = 180    # and to a job's end
REQUEUE = 180  # Slurm holds a job back for 6 s, and finds a dead node after 15 s, on an idle machine


class SlurmTest(CliTest):
    nodes = max(2, WORKERS)
    quick = False  # of the fake worker

    def setUp(self):
        super().setUp()
        self.launcher_may_leave_files = True  # of MPI ranks that were killed
        self.cluster = cluster.Cluster(self.folder / "slurm", nodes=self.nodes, environment=self.environment())
        self.addCleanup(self.end_cluster)
        self.jobs = []
        self.cluster.start()
        self.write_run(train={"steps": STEPS}, checkpoint={"every": 20}, log={"every": 20},
                       topology={"workers": WORKERS},
                       timeouts={"heartbeat_seconds": 0.2, "lost_seconds": 20, "connect_seconds": 100,
                                 "start_seconds": 100})

    def environment(self):
        # A run under Slurm takes seconds with either worker, so that there is time to disturb it.
        return {**super().environment(), "OOMB": oomb_cli.PROGRAM, "OOMB_SLURM": str(SCRIPTS),
                "FAKE_WORKER": "" if self.quick else "slow=0.02"}

    def end_cluster(self):
        if self.failed():
            print(self.cluster.logs(), file=sys.stderr)
        for job in self.jobs:
            try:
                self.cluster.command("scancel", str(job), seconds=20)
            except (RuntimeError, OSError, cluster.subprocess.TimeoutExpired):
                pass
        wait_until(lambda: not self.cluster.step_daemons(), 20, pause=0.1)
        self.cluster.stop()

    def failed(self):
        result = self._outcome.result
        return any(test is self for test, _ in result.failures + result.errors)

    # -- jobs

    def submit(self, script="one-gpu.sbatch", *arguments, options=()):
        size = ["--ntasks-per-node=1", f"--nodes={WORKERS}", "--cpus-per-task=1"]
        if script == "one-gpu.sbatch" and WORKERS > 1:
            script = "many-nodes.sbatch"
        if script != "one-gpu.sbatch":
            size.append("--gpus-per-node=1")
        out = self.cluster.command("sbatch", "--parsable", *(size if "eval" not in script else []), *options,
                                   str(SCRIPTS / script), "run.yaml", *arguments, cwd=self.folder)
        job = int(out.split(";")[0])
        self.jobs.append(job)
        return job

    def nodes_of(self, job):
        return self.cluster.command("scontrol", "show", "hostnames", self.cluster.job(job)["NodeList"]).split()

    def log(self, job):
        path = self.path(f"oomb-{job}.out")
        return path.read_text(errors="replace") if path.exists() else ""

    def steps_done(self):
        path = self.path("out/metrics.jsonl")
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_step(self, step, seconds=START):
        self.assertTrue(wait_until(lambda: self.steps_done() >= step, seconds, pause=0.02), "no steps in time")

    def wait_for_end(self, job, seconds=END):
        def over():
            return self.cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING",
                                                              "REQUEUED")
        self.assertTrue(wait_until(over, seconds, pause=0.2), f"job {job}: {self.cluster.job(job)}\n{self.log(job)}")
        return self.cluster.job(job)

    def wait_for_restart(self, job):
        self.assertTrue(wait_until(lambda: "start 2 on " in self.log(job), REQUEUE, pause=0.1),
                        f"no second start: {self.cluster.job(job)}\n{self.log(job)}")

    def expect_completed(self, job, restarts=0):
        state = self.wait_for_end(job)
        self.assertEqual((state["JobState"], state["ExitCode"]), ("COMPLETED", "0:0"), self.log(job))
        self.assertEqual(int(state["Restarts"]), restarts, self.log(job))
        self.assertEqual(len(self.metrics()), STEPS)

    def expect_undisturbed_losses(self):
        """Against a run of the same settings, outside Slurm."""
        self.quick = True
        self.train("run.dir=undisturbed", "log.level=warning")
        self.assertEqual(self.losses(), self.losses("undisturbed"))
        self.assertEqual(len(self.losses()), STEPS)

    def workers(self):
        name = pathlib.Path(os.environ.get("OOMB_WORKER") or "oomb-worker").name[:15]  # as far as /proc tells it
        return [pid for pid, program in oomb_cli.tagged_processes(self.tag).items() if program == name]


class Completes(SlurmTest):
    def test_run_completes(self):
        job = self.submit()
        self.expect_completed(job)
        log = self.log(job)
        self.assertIn('"steps": 200', log)  # the resolved run
        self.assertIn("start 1 on node", log)
        self.assertNotIn("OOMB_CONTROL_SECRET", log)
        self.expect_undisturbed_losses()

    def test_workers_see_their_gpu(self):
        """What the scripts ask for arrives at the tasks of a step that is started as ours are."""
        self.path("probe.sh").write_text("#!/bin/bash\nexec srun --overlap --ntasks=1 bash -c "
                                         "'echo gpu=$CUDA_VISIBLE_DEVICES'\n")
        out = self.cluster.command("sbatch", "--parsable", "--ntasks=1", "--gpus-per-task=1", "--output=probe.out",
                                   "probe.sh", cwd=self.folder)
        self.jobs.append(int(out))
        self.wait_for_end(int(out))
        self.assertEqual(self.path("probe.out").read_text(), "gpu=0\n")


class Tasks(SlurmTest):
    def test_another_number_of_tasks_than_workers_is_refused(self):
        job = self.submit("one-gpu.sbatch", "--set", f"topology.workers={WORKERS + 1}")
        state = self.wait_for_end(job)
        self.assertEqual((state["JobState"], state["ExitCode"]), ("FAILED", "2:0"))
        self.assertIn(f"error: topology.workers: {WORKERS + 1}, but Slurm job {job} has {WORKERS} task(s)", self.log(job))
        self.assertFalse(self.path("out", "metrics.jsonl").exists())

    def test_bad_settings_end_before_anything_is_launched(self):
        job = self.submit("one-gpu.sbatch", "--set", "train.stepz=4")
        state = self.wait_for_end(job)
        self.assertEqual((state["JobState"], state["ExitCode"]), ("FAILED", "2:0"))
        self.assertIn("train.stepz", self.log(job))
        self.assertFalse(self.path("out").exists())


class Requeue(SlurmTest):
    def test_requeued_run_goes_on(self):
        job = self.submit()
        self.wait_for_step(30)
        self.cluster.command("scontrol", "requeue", str(job))
        self.wait_for_restart(job)
        self.expect_completed(job, restarts=1)
        self.assertIn("start 1 on ", self.log(job))  # appended, not overwritten
        self.assertIn("going on after step ", self.log(job))
        self.expect_undisturbed_losses()


class StepDaemon(SlurmTest):
    def test_killed_step_daemon_is_a_lost_worker(self):
        job = self.submit("one-gpu.sbatch", "--set", "restart.max=1")
        self.wait_for_step(30)
        daemons = self.cluster.step_daemons(f"{job}.0")
        self.assertEqual(len(daemons), WORKERS)
        os.kill(daemons[0], signal.SIGKILL)
        self.expect_completed(job)
        self.assertIn("lost worker rank ", self.log(job))
        self.assertIn("relaunch 1 of 1, from ", self.log(job))
        self.expect_undisturbed_losses()

    def test_killed_batch_daemon_leaves_no_run_behind(self):
        job = self.submit()
        self.wait_for_step(30)
        os.kill(self.cluster.step_daemons(f"{job}.batch")[0], signal.SIGKILL)
        self.assertTrue(wait_until(lambda: not self.workers(), 30), "workers left")
        # Slurm misses the batch step when the node next registers.
        self.cluster.command("scontrol", "reconfigure")
        self.wait_for_restart(job)
        self.expect_completed(job, restarts=1)
        self.expect_undisturbed_losses()


class Killed(SlurmTest):
    def test_killed_worker_is_relaunched(self):
        job = self.submit("one-gpu.sbatch", "--set", "restart.max=1")
        self.wait_for_step(30)
        victim = self.workers()[0]
        os.kill(victim, signal.SIGKILL)
        self.expect_completed(job)
        self.assertRegex(self.log(job), rf"lost worker rank \d on \S+ \(pid {victim}\), last phase")
        self.assertIn("relaunch 1 of 1, from ", self.log(job))
        self.expect_undisturbed_losses()

    def test_without_relaunches_the_job_is_requeued(self):
        job = self.submit()
        self.wait_for_step(30)
        os.kill(self.workers()[0], signal.SIGKILL)
        self.wait_for_restart(job)
        self.expect_completed(job, restarts=1)
        self.assertIn("workers were lost; back into the queue", self.log(job))
        self.expect_undisturbed_losses()


class NodeCrash(SlurmTest):
    nodes = WORKERS + 1

    def test_run_goes_on_on_another_node(self):
        job = self.submit()
        self.wait_for_step(30)
        self.assertIn("node1", self.nodes_of(job))
        self.cluster.crash_node("node1")
        self.wait_for_restart(job)
        self.expect_completed(job, restarts=1)
        self.assertNotIn("node1", self.nodes_of(job))
        self.expect_undisturbed_losses()


class Warning(SlurmTest):
    def test_warning_makes_a_checkpoint_and_requeues(self):
        """The signal that Slurm sends before the time limit, sent by hand."""
        job = self.submit("one-gpu.sbatch", "--set", "checkpoint.every=0")
        self.wait_for_step(30)
        self.cluster.command("scancel", "--signal=USR1", "--batch", str(job))
        self.assertTrue(wait_until(lambda: "checkpoint of step " in self.log(job), 60), self.log(job))
        reached = int(self.log(job).split("checkpoint of step ")[1].split(":")[0])
        self.assertGreaterEqual(reached, 30)
        self.assertLess(reached, STEPS)
        self.wait_for_restart(job)
        self.expect_completed(job, restarts=1)
        self.assertIn(f"going on after step {reached}", self.log(job))
        self.assertIn("stopping after this step, with a checkpoint", self.log(job))
        self.expect_undisturbed_losses()


class Array(SlurmTest):
    def test_evaluates_one_checkpoint_in_each_task(self):
        self.train("train.stop_after=40", "log.level=warning")
        checkpoints = sorted(self.path("out/checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[-1]))
        self.assertEqual(len(checkpoints), 2)
        job = self.submit("eval-array.sbatch", *map(str, checkpoints), str(self.path("nowhere")),
                          options=["--array=0-3", f"--ntasks={WORKERS}", "--cpus-per-task=1", "--gpus-per-task=1"])

        def states():
            words = self.cluster.command("scontrol", "--oneliner", "show", "job", str(job)).split()
            return sorted(word for word in words if word.startswith("JobState="))
        expected = ["JobState=COMPLETED"] * 2 + ["JobState=FAILED"] * 2
        self.assertTrue(wait_until(lambda: states() == expected, END, pause=0.2), states())
        for index, folder in enumerate(checkpoints):
            result = json.loads(self.path(f"oomb-eval-{job}_{index}.out").read_text())
            self.assertEqual(pathlib.Path(result["checkpoint"]).name, folder.name)
            direct = self.oomb("eval", "run.yaml", "--json", settings=[f"checkpoint.resume={folder}"])
            self.assertEqual(result, json.loads(direct.out))
        self.assertIn("array index 3, but 3 checkpoint(s) are given; allowed: --array=0-2",
                      self.path(f"oomb-eval-{job}_3.err").read_text())


if __name__ == "__main__":
    if why := cluster.missing():
        print(f"not run: {why}")
        sys.exit(NOT_RUN)
    oomb_cli.main()
