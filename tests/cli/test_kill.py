"""SIGKILL in the middle of a checkpoint, at random moments: a resume starts from a whole one, no process is left."""
import os
import random
import re
import signal
import time

import oomb_cli
from oomb_cli import CliTest

KILLS = int(os.environ.get("OOMB_TEST_KILLS", "20"))
SEED = int(os.environ.get("OOMB_TEST_SEED", "20240611"))
STEPS = 120  # more than all the launches together reach before they are killed


class Killed(CliTest):
    def setUp(self):
        super().setUp()
        self.known = set()  # workers of earlier launches
        # Large enough that a save takes a while, small enough that its checksums are quick to compute here.
        self.write_model("model.json", hidden_size=48, intermediate_size=64)
        self.write_run(sequence={"length": 37}, train={"steps": STEPS},
                       checkpoint={"every": 1, "keep": 2})

    def saving(self, worker):
        """The name of the folder that a save of this worker writes to, while there is one."""
        for name in os.listdir(self.path("out/checkpoints")):
            if name.endswith(f".tmp-{worker}"):
                return name
        return None

    def new_worker(self, process, known):
        found = set()

        def look():
            found.update(pid for pid, name in oomb_cli.tagged_processes(self.tag).items() if name == "oomb-worker")
            return found - known and self.path("out/checkpoints").is_dir() or process.poll() is not None
        oomb_cli.wait_until(look, 40)
        self.assertEqual(len(found - known), 1, process.poll())
        return (found - known).pop()

    def stop(self, pid):
        os.kill(pid, signal.SIGSTOP)
        oomb_cli.wait_until(lambda: oomb_cli.process_state(pid) in ("T", None), 10)

    def kill_in_a_save(self, process, victim, skip, moment):
        """Lets `skip` saves pass, and kills when the part `moment` of a save's time has gone by.

        The worker is stopped before, to see whether that save is still going on; if not, the next one is taken. Returns
        the folder of the save and the files in it."""
        worker = self.new_worker(process, self.known)
        self.known.add(worker)
        longest = 0
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline and process.poll() is None:
            name = self.saving(worker)
            if name is None:
                time.sleep(0.0002)
                continue
            if skip > 0:
                skip -= 1
                begun = time.monotonic()
                oomb_cli.wait_until(lambda: self.saving(worker) != name, 10, 0.0002)
                longest = max(longest, time.monotonic() - begun)
                continue
            time.sleep(longest * moment)
            self.stop(worker)
            inside = self.saving(worker)
            if inside is not None:
                files = sorted(os.listdir(self.path("out/checkpoints", inside)))
                self.launcher_may_leave_files |= victim == "oomb"
                os.kill(process.pid if victim == "oomb" else worker, signal.SIGKILL)
            os.kill(worker, signal.SIGCONT)
            if inside is not None:
                return inside, files
        self.fail(f"no save to kill in: {self.finish(process)}")

    def test_kill_at_random_moments(self):
        print(f"seed {SEED}", flush=True)
        rng = random.Random(SEED)
        begun = time.monotonic()
        self.train("run.dir=undisturbed", "checkpoint.every=0")
        reached, killed_in = 0, []
        for number in range(KILLS):
            victim = ("worker", "oomb")[number % 2]
            with self.subTest(number=number, victim=victim):
                process = self.start("train", "run.yaml")
                inside, files = self.kill_in_a_save(process, victim, 1 + rng.randrange(3), rng.random())
                killed_in.append(files)
                result = self.finish(process)
                if victim == "worker":
                    self.assertEqual(result.code, 1, result)
                    # The phase is that of its last sign of life, up to a second old.
                    self.assertRegex(result.err, r"error: lost worker rank 0 on \S+ \(pid \d+\), last phase \"[^\"]+\"",
                                     result)
                    self.assertIn("error: training stopped; what was reached is in", result.err)
                else:
                    self.assertEqual(result.code, -signal.SIGKILL)
                self.expect_nothing_left()
                steps = self.checkpoint_steps()
                for step in steps:
                    self.expect_whole_checkpoint(self.checkpoint(step))
                if number > 0 or steps:
                    resumed = re.search(r"resumed after step (\d+)", result.out)
                    self.assertEqual(int(resumed.group(1)) if resumed else 0, reached, result)
                reached = steps[-1] if steps else 0
                # A worker whose coordinator is gone may come to the end of its save before it notices.
                step = int(inside[5:13])
                self.assertIn(reached, [step - 1] if victim == "worker" else [step - 1, step])
        self.assertEqual(len(killed_in), KILLS)
        self.assertLess(reached, STEPS)
        # Moments of all kinds: with no file yet, with some, with all but the marker.
        print(f"{KILLS} kills, {reached} steps reached, {time.monotonic() - begun:.0f} s; files at the kill: "
              f"{sorted(len(names) for names in killed_in)}", flush=True)
        self.assertGreater(len({len(names) for names in killed_in}), 1)

        self.train("checkpoint.every=0")
        self.assertEqual([path.name for path in self.path("out/checkpoints").iterdir() if ".tmp-" in path.name], [])
        self.assertEqual(self.losses(), self.losses("undisturbed"))
        self.expect_equal_checkpoints(self.checkpoint(STEPS), self.checkpoint(STEPS, "undisturbed"))

    def test_a_new_run_at_once_after_its_coordinator_was_killed(self):
        """The old worker may still be ending: it must not spoil what the new one writes."""
        self.train("run.dir=undisturbed", "checkpoint.every=0", "train.stop_after=30")
        for _ in range(3):
            process = self.start("train", "run.yaml")
            self.kill_in_a_save(process, "oomb", 2, 0.5)
            process.wait()
            process.stdout.close()
            process.stderr.close()
        self.train("train.stop_after=30")
        self.assertEqual(self.losses(), self.losses("undisturbed"))
        self.expect_whole_checkpoint(self.checkpoint(30))
        self.expect_equal_checkpoints(self.checkpoint(30), self.checkpoint(30, "undisturbed"))

    def test_relaunch_after_a_killed_worker(self):
        self.train("run.dir=undisturbed", "checkpoint.every=0", "train.stop_after=20")
        process = self.start("train", "run.yaml", settings=["restart.max=1", "train.stop_after=20"])
        self.kill_in_a_save(process, "worker", 3, 0.5)
        result = self.finish(process)
        self.assertEqual(result.code, 0, result)
        self.assertIn("warning: relaunch 1 of 1", result.err)
        self.assertEqual(self.losses(), self.losses("undisturbed"))
        self.expect_equal_checkpoints(self.checkpoint(20), self.checkpoint(20, "undisturbed"))


if __name__ == "__main__":
    oomb_cli.main()
