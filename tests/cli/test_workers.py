"""Several workers train one sequence together: real processes, over UCX and MPI, against one worker."""
import os
import signal
import time

import oomb_cli
from oomb_cli import CliTest


class Workers(CliTest):
    def setUp(self):
        super().setUp()
        self.write_run(train={"steps": 5, "compute_dtype": "fp32", "sequences_per_step": 2})

    def train_with(self, workers, *settings):
        self.train(f"topology.workers={workers}", f"run.dir=out{workers}", *settings)
        return self.metrics(f"out{workers}")

    def expect_same(self, ours, reference, what):
        self.assertEqual(len(ours), len(reference), what)
        for line, expected in zip(ours, reference):
            for key in ("loss", "grad_norm"):
                self.assertAlmostEqual(line[key] / expected[key], 1, delta=1e-5, msg=f"{what}, step {line['step']}, {key}")
            for key in ("tokens", "labels", "tokens_crc32c"):
                self.assertEqual(line[key], expected[key], f"{what}, step {line['step']}, {key}")

    def test_losses_and_gradient_norms_are_those_of_one_worker(self):
        for kind in ("topk", "dense"):
            setting = f"attention.kind={kind}"
            reference = self.train_with(1, setting, "checkpoint.resume=never")
            for workers in (2, 3, 5):  # 4 chunks: of five workers one or more own nothing
                lines = self.train_with(workers, setting, "checkpoint.resume=never")
                self.expect_same(lines, reference, f"{kind}, {workers} workers")
                self.assertGreater(lines[-1]["exchange_page_bytes"], 0)
                self.assertGreater(lines[-1]["exchange_contribution_bytes"], 0)

    def test_a_checkpoint_goes_on_with_another_number_of_workers(self):
        reference = self.train_with(1)
        self.train("topology.workers=2", "run.dir=moved", "train.stop_after=2")
        self.expect_whole_checkpoint(self.checkpoint(2, run="moved"))
        self.train("topology.workers=3", "run.dir=moved", "train.stop_after=4")
        self.train("topology.workers=1", "run.dir=moved")
        self.expect_same(self.metrics("moved"), reference, "2, then 3, then 1 workers")

    def lose_one(self, how):
        process = self.start("train", "run.yaml", settings=[
            "topology.workers=3", "train.steps=100000", "timeouts.lost_seconds=5", "run.dir=lost"])
        log = self.path("lost", "metrics.jsonl")
        self.assertTrue(oomb_cli.wait_until(lambda: log.exists() and log.read_text().count("\n") >= 3, 50), "no step")
        workers = sorted(pid for pid, name in oomb_cli.tagged_processes(self.tag).items() if name == "oomb-worker")
        self.assertEqual(len(workers), 3)
        victim = workers[1]
        begun = time.monotonic()
        os.kill(victim, how)
        result = self.finish(process, seconds=40)
        self.assertLess(time.monotonic() - begun, 30, result)
        self.assertEqual(result.code, 1, result)
        self.assertRegex(result.err + result.out, rf"lost worker rank \d on \S+ \(pid {victim}\)")
        self.assertTrue(oomb_cli.wait_until(lambda: not oomb_cli.tagged_processes(self.tag), 15))

    def test_a_killed_worker_is_named_and_ends_the_run(self):
        self.launcher_may_leave_files = True
        self.lose_one(signal.SIGKILL)

    def test_a_stopped_worker_is_named_and_ends_the_run(self):
        self.launcher_may_leave_files = True
        self.lose_one(signal.SIGSTOP)


if __name__ == "__main__":
    oomb_cli.main()
