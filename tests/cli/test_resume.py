"""A run that is stopped and resumed gives the bits of one that was not; what may not change between the two."""
import json
import shutil

import oomb_cli
from oomb_cli import CliTest

STEPS = 10
HALF = 5


class Equal(CliTest):
    def compare(self, *settings):
        settings = (f"train.steps={STEPS}", *settings)
        self.train(*settings, "run.dir=whole")
        first = self.train(*settings, f"train.stop_after={HALF}")
        self.assertEqual(len(self.metrics()), HALF)
        self.assertEqual(self.checkpoint_steps(), [HALF])
        second = self.train(*settings)
        self.assertNotIn("resumed", first.out)
        self.assertIn(f"resumed after step {HALF}", second.out)
        self.assertEqual(first.err + second.err, "")
        self.assertEqual(self.checkpoint_steps(), [HALF, STEPS])

        whole, parts = self.metrics("whole"), self.metrics()
        self.assertEqual(len(parts), STEPS)
        self.assertEqual(self.losses(), self.losses("whole"))
        for key in ("grad_norm", "lr", "tokens", "labels", "tokens_crc32c"):
            self.assertEqual([line[key] for line in parts], [line[key] for line in whole], key)
        self.expect_whole_checkpoint(self.checkpoint(STEPS))
        self.expect_equal_checkpoints(self.checkpoint(STEPS), self.checkpoint(STEPS, "whole"))
        # Not because nothing happens: losses and tokens differ from step to step.
        self.assertEqual(len(set(self.losses())), STEPS)
        self.assertEqual(len({line["tokens_crc32c"] for line in parts}), STEPS)
        return self.checkpoint(STEPS)

    def dtypes(self, file):
        return {dtype for dtype, _, _ in oomb_cli.read_safetensors(file).values()}

    def test_dense_fp64(self):
        made = self.compare("attention.kind=dense", "train.compute_dtype=fp64", "train.warmup_steps=7")
        self.assertEqual(self.dtypes(made / "model.safetensors"), {"F64"})

    def test_topk_fp32(self):
        made = self.compare("data.shuffle=false")
        self.assertEqual(self.dtypes(made / "model.safetensors"), {"F32"})

    def test_bf16(self):
        """Weights are rounded, but what they are rounded from is in the checkpoint too."""
        made = self.compare("train.compute_dtype=bf16")
        self.assertEqual(self.dtypes(made / "model.safetensors"), {"BF16"})
        optimizer = oomb_cli.read_safetensors(made / "optimizer.safetensors")
        self.assertEqual({name.split(".")[0] for name in optimizer}, {"m", "v", "master"})
        self.assertEqual({dtype for dtype, _, _ in optimizer.values()}, {"F32"})

    def test_8_bit_moments_without_masters(self):
        """The random bits of a step come from its number: no generator's state is in the checkpoint."""
        made = self.compare("train.compute_dtype=bf16", "train.optimizer_state=int8",
                            "train.master_weights=stochastic_rounding")
        self.assertEqual(self.dtypes(made / "model.safetensors"), {"BF16"})
        optimizer = oomb_cli.read_safetensors(made / "optimizer.safetensors")
        self.assertEqual({name.split(".")[0]: dtype for name, (dtype, _, _) in optimizer.items()},
                         {"m_code": "U8", "m_scale": "F32", "v_code": "U8", "v_scale": "F32"})
        # 257 x 16 elements in blocks of 256.
        self.assertEqual(optimizer["v_code.embedding"][1], [257, 16])
        self.assertEqual(optimizer["v_scale.embedding"][1], [17])

    def test_8_bit_moments_with_fp32_weights(self):
        self.compare("train.optimizer_state=int8")

    def test_stochastic_rounding_with_fp32_moments(self):
        made = self.compare("train.compute_dtype=bf16", "train.master_weights=stochastic_rounding")
        optimizer = oomb_cli.read_safetensors(made / "optimizer.safetensors")
        self.assertEqual({name.split(".")[0] for name in optimizer}, {"m", "v"})

    def test_three_sequences_per_step_over_an_epoch(self):
        """30 sequences from 24 that fit the data: the order and the borders of a second epoch are reached."""
        self.path("text.txt").write_bytes(oomb_cli.text_bytes(24 * 61 + 20))
        self.compare("train.sequences_per_step=3", "data.holdout_fraction=0")
        self.assertEqual(json.loads((self.checkpoint(HALF) / "trainer.json").read_text())["next_sequence"], 15)
        self.assertEqual([line["tokens"] for line in self.metrics()], [3 * 61] * STEPS)

    def test_copy_task_with_two_level_selection(self):
        self.compare("data.kind=copy", "attention.chunk_pages=5", "pages.hbm_bytes=4096")


class Tokens(CliTest):
    """The data position, against a second reader of the data."""

    def windows(self, count):
        data = oomb_cli.text_bytes(count * 61 - 1)  # and the separator after the file
        self.path("text.txt").write_bytes(data)
        ids = [*data, 256]
        return [oomb_cli.crc_of_ids(ids[i * 61:(i + 1) * 61]) for i in range(count)]

    def test_an_epoch_visits_every_window_once(self):
        windows = self.windows(7)
        self.assertEqual(len(set(windows)), 7)
        settings = ["data.holdout_fraction=0", "train.steps=14"]
        self.train(*settings, "train.stop_after=5")
        self.train(*settings)
        seen = [line["tokens_crc32c"] for line in self.metrics()]
        self.assertEqual(sorted(seen[:7]), sorted(windows))
        self.assertEqual(sorted(seen[7:]), sorted(windows))
        self.assertNotEqual(seen[:7], windows)
        self.assertNotEqual(seen[:7], seen[7:])

    def test_file_order(self):
        windows = self.windows(5)
        settings = ["data.holdout_fraction=0", "data.shuffle=false", "train.steps=8"]
        self.train(*settings, "train.stop_after=3")
        self.train(*settings)
        self.assertEqual([line["tokens_crc32c"] for line in self.metrics()], windows + windows[:3])


class Rules(CliTest):
    def setUp(self):
        super().setUp()
        self.train("train.stop_after=2", "checkpoint.every=1")

    def test_settings_that_the_data_position_rests_on(self):
        trainer = self.checkpoint(2) / "trainer.json"
        for setting, needles in (
                ("sequence.length=62", ["sequence.length", "61", "62"]),
                ("train.seed=2", ["train.seed", "1", "2"]),
                ("train.sequences_per_step=2", ["train.sequences_per_step", "1", "2"]),
                ("data.shuffle=false", ["data.shuffle", "true", "false"]),
                ("data.holdout_fraction=0.5", ["the number of sequences in the data"])):
            with self.subTest(setting):
                self.expect_refused(str(trainer), "allowed", *needles, settings=[setting])
        self.train()
        self.assertEqual(len(self.metrics()), 4)

    def test_another_model(self):
        self.write_model("model.json", hidden_size=32)
        self.expect_refused("step-00000002", "shape", "[257, 16]", "[257, 32]")

    def test_another_number_format(self):
        self.expect_refused("trainer.json", "train.compute_dtype", "fp32", "bf16", settings=["train.compute_dtype=bf16"])

    def test_fp32_from_a_bf16_checkpoint(self):
        # Its weights are rounded and its masters would be left out.
        self.train("train.compute_dtype=bf16", "train.stop_after=2", "run.dir=narrow")
        self.expect_refused("trainer.json", "train.compute_dtype", "bf16", "fp32", settings=["run.dir=narrow"])

    def test_another_format_of_the_optimizer_state(self):
        self.expect_refused("trainer.json", 'train.optimizer_state was "fp32" and is now "int8"', "allowed",
                            settings=["train.optimizer_state=int8"])
        bare = ["train.compute_dtype=bf16", "train.master_weights=stochastic_rounding", "train.optimizer_state=int8",
                "run.dir=bare"]
        self.train(*bare, "train.stop_after=2")
        self.expect_refused("trainer.json", 'train.optimizer_state was "int8" and is now "fp32"', "allowed",
                            settings=[*bare, "train.optimizer_state=fp32"])
        for master in ("auto", "fp32"):
            self.expect_refused("trainer.json", 'train.master_weights was "stochastic_rounding" and is now "fp32"',
                                settings=[*bare, f"train.master_weights={master}"])
        # What is named is all that is in the way: the weights alone may be gone on from.
        self.train("train.compute_dtype=bf16", f"model.path={self.checkpoint(2, 'bare')}", "model.config=",
                   "checkpoint.resume=never", "run.dir=anew")
        self.train(*bare)
        self.assertEqual(self.checkpoint_steps("bare"), [2, 4])

    def test_checkpoints_older_than_the_choice_of_formats(self):
        state = self.checkpoint(2) / "trainer.json"
        text = json.loads(state.read_text())
        self.assertEqual((text.pop("optimizer_state"), text.pop("master_weights")), ("fp32", "fp32"))
        self.rewrite(self.checkpoint(2), "trainer.json", json.dumps(text).encode())
        self.expect_refused("trainer.json", "train.optimizer_state", settings=["train.optimizer_state=int8"])
        self.assertIn("resumed after step 2", self.train().out)

    def test_never_starts_anew(self):
        self.train()
        losses, made = self.losses(), self.checkpoint(4)
        shutil.copytree(self.path("out"), self.path("kept"))
        result = self.train("checkpoint.resume=never", "train.stop_after=3")
        self.assertNotIn("resumed", result.out)
        # The older run's last step would be taken by a later `auto`: that is said.
        self.assertRegex(result.err, r"\Awarning: [^\n]*up to step 4[^\n]*starts after step 0[^\n]*\n\Z")
        self.assertEqual(self.losses(), losses[:3])
        self.assertEqual(self.checkpoint_steps(), [3, 4])
        self.expect_equal_checkpoints(made, self.checkpoint(4, "kept"))

    def test_path_of_one_checkpoint_and_of_a_folder_of_them(self):
        self.train()
        losses = self.losses()
        shutil.copytree(self.path("out"), self.path("kept"))
        shutil.rmtree(self.path("kept/checkpoints/step-00000004"))
        for number, resume in enumerate(("kept/checkpoints/step-00000002", "kept/checkpoints/step-00000002/",
                                         "kept/checkpoints")):
            with self.subTest(resume):
                run = f"run{number}"
                result = self.train(f"checkpoint.resume={resume}", f"run.dir={run}")
                self.assertIn("resumed after step 2", result.out)
                lines = [json.loads(line) for line in self.path(run, "metrics.jsonl").read_text().splitlines()]
                self.assertEqual([line["step"] for line in lines], [3, 4])
                self.assertEqual([line["loss"] for line in lines], [float(loss) for loss in losses[2:]])
                self.expect_equal_checkpoints(self.checkpoint(4, run), self.checkpoint(4))

    def test_nothing_to_do(self):
        self.train()
        before = self.snapshot()
        result = self.train()
        self.assertIn("nothing to do", result.out)
        self.assertEqual(self.snapshot(), before)

    def test_metrics_of_steps_that_are_done_again(self):
        """Lines of steps after the checkpoint, and a line that was cut, are gone after a resume."""
        self.train()
        whole = self.path("out/metrics.jsonl").read_text()
        shutil.rmtree(self.checkpoint(4))
        self.path("out/metrics.jsonl").write_text(whole + whole.splitlines()[0][:40])
        again = self.train()
        self.assertIn("resumed after step 2", again.out)
        self.assertEqual(self.losses(), [line.split('"loss":')[1].split(",")[0] for line in whole.splitlines()])

    def test_leftovers_of_a_killed_save_are_removed(self):
        leftover = self.path("out/checkpoints/step-00000003.tmp-12345")
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half of it")
        self.train()
        self.assertFalse(leftover.exists())
        self.assertEqual(self.checkpoint_steps(), [2, 4])


if __name__ == "__main__":
    oomb_cli.main()
