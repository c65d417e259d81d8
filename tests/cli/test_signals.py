"""Ctrl-C and the other signals that end a run: after the running step, with a checkpoint."""
import os
import re
import signal
import time

import oomb_cli
from oomb_cli import CliTest

STEPS = 1_000_000  # of the schedule: no run gets there


class Stopped(CliTest):
    def start_and_wait(self, steps, *settings):
        process = self.start("train", "run.yaml", settings=[f"train.steps={STEPS}", *settings])

        def lines():
            path = self.path("out/metrics.jsonl")
            return path.read_text().count("\n") if path.exists() else 0
        begun = lines()
        self.assertTrue(oomb_cli.wait_until(lambda: lines() >= begun + steps or process.poll() is not None, 50))
        self.assertIsNone(process.poll())
        return process

    def expect_orderly_end(self, result, code):
        self.assertEqual(result.code, code, result)
        self.assertEqual(result.err, "")
        self.assertIn("stopping after this step, with a checkpoint", result.out)
        last = len(self.metrics())
        self.assertEqual(self.checkpoint_steps()[-1], last)
        self.assertIn(f"checkpoint of step {last}: ", result.out)
        self.expect_whole_checkpoint(self.checkpoint(last))
        self.expect_nothing_left()
        return last

    def test_interrupt_and_resume(self):
        """The terminal sends SIGINT to the whole foreground group."""
        process = self.start_and_wait(5)
        os.killpg(process.pid, signal.SIGINT)
        first = self.expect_orderly_end(self.finish(process), 130)
        self.assertGreaterEqual(first, 5)
        process = self.start_and_wait(3)
        os.killpg(process.pid, signal.SIGINT)
        result = self.finish(process)
        second = self.expect_orderly_end(result, 130)
        self.assertIn(f"resumed after step {first} ", result.out)
        self.train(f"train.steps={STEPS}", f"train.stop_after={second + 2}")
        self.train(f"train.steps={STEPS}", f"train.stop_after={second + 2}", "run.dir=undisturbed")
        self.assertEqual(self.losses(), self.losses("undisturbed"))
        self.expect_equal_checkpoints(self.checkpoint(second + 2), self.checkpoint(second + 2, "undisturbed"))

    def test_signals_of_a_batch_system(self):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number):
                process = self.start_and_wait(2)
                process.send_signal(number)
                self.expect_orderly_end(self.finish(process), 128 + number)

    def test_interrupt_before_the_first_step(self):
        process = self.start("train", "run.yaml", settings=[f"train.steps={STEPS}"])
        self.assertTrue(oomb_cli.wait_until(
            lambda: "oomb-worker" in oomb_cli.tagged_processes(self.tag).values() or process.poll() is not None, 50))
        process.send_signal(signal.SIGINT)
        result = self.finish(process)
        self.assertEqual(result.code, 130, result)
        self.assertRegex(result.err, r"\A(warning: ended before the first step\n)?\Z")
        # A quick machine may have been past that.
        self.assertEqual(result.err == "", self.checkpoint_steps() != [])
        self.expect_nothing_left()

    def test_second_interrupt_ends_at_once(self):
        """The worker is stopped, so its step never ends: the first Ctrl-C waits for it, the second does not."""
        process = self.start_and_wait(3, "checkpoint.every=1")
        worker = next(pid for pid, name in oomb_cli.tagged_processes(self.tag).items() if name == "oomb-worker")
        os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        self.assertIsNone(process.poll())
        self.launcher_may_leave_files = True  # it is killed
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        result = self.finish(process)
        self.assertLess(time.monotonic() - begun, 10)
        self.assertEqual(result.code, 130, result)
        self.assertTrue(re.search(r"^warning: ended at once; [^\n]*$", result.err, re.M), result)
        self.expect_nothing_left()
        for step in self.checkpoint_steps():
            self.expect_whole_checkpoint(self.checkpoint(step))

    def test_stopped_worker_is_found_out(self):
        """A worker that shows no sign of life for timeouts.lost_seconds is lost, and does not stay."""
        process = self.start_and_wait(3, "timeouts.lost_seconds=2", "timeouts.heartbeat_seconds=0.2")
        worker = next(pid for pid, name in oomb_cli.tagged_processes(self.tag).items() if name == "oomb-worker")
        os.kill(worker, signal.SIGSTOP)
        begun = time.monotonic()
        result = self.finish(process)
        self.assertLess(time.monotonic() - begun, 30)
        self.assertEqual(result.code, 1, result)
        self.assertRegex(result.err, rf"lost worker rank 0 on \S+ \(pid {worker}\), last phase \"[^\"]+\"")
        self.expect_nothing_left()


if __name__ == "__main__":
    oomb_cli.main()
