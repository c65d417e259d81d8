"""Bad input: one clear line on stderr, status 2 (3: no room left), nothing lost."""
import contextlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile

import oomb_cli
from oomb_cli import PROGRAM, CliTest


class Launch(CliTest):
    def test_slurm_task_that_mpi_does_not_see(self):
        """srun without PMIx: every task would take itself for rank 0 of 1 and they would share one checkpoint."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_"))}
        environment.update(SLURM_NTASKS="4", SLURM_STEP_ID="0")
        worker = pathlib.Path(PROGRAM).parent / "oomb-worker"
        result = subprocess.run([worker], env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 2, result)
        for needle in ("SLURM_NTASKS is 4", "MPI sees 1", "srun --mpi=pmix", "mpirun"):
            self.assertIn(needle, result.stderr)


class RunFile(CliTest):
    """What `oomb` sees by itself: nothing is started, and no folder is made."""

    def refuse(self, *needles, settings=(), run="run.yaml"):
        self.expect_refused(*needles, settings=settings, run=run, started=False)
        self.assertFalse(self.path("out").exists())

    def test_missing_run_file(self):
        self.refuse("nowhere.yaml", "no such run file", run="nowhere.yaml")

    def test_broken_yaml(self):
        self.path("broken.yaml").write_text("run: {dir: out\n")
        self.refuse("broken.yaml", run="broken.yaml")

    def test_unknown_key(self):
        self.refuse("train.step", "train.steps", settings=["train.step=3"])

    def test_settings_that_do_not_go_together(self):
        for settings, needles in (
                (["sequence.chunk=18"], ["sequence.chunk", "18", "attention.page_tokens", "multiple"]),
                (["attention.query_tile=6"], ["attention.query_tile", "6", "attention.page_tokens", "multiple"]),
                (["attention.query_tile=8", "sequence.chunk=12"], ["sequence.chunk", "attention.query_tile"]),
                (["attention.chunk_pages=2"], ["attention.chunk_pages", "attention.budget_pages", "at least"]),
                (["attention.chunk_pages=8", "attention.votes=previous_tile"],
                 ["attention.votes", "attention.chunk_pages"]),
                (["train.learning_rate=1e30"], ["train.learning_rate", "1e30", "<= 100"]),
                (["model.path=folder"], ["model.path", "model.config"]),
                (["data.paths=[]"], ["data.paths", "at least one"])):
            with self.subTest(settings):
                self.refuse(*needles, settings=settings)


class WithRun(CliTest):
    """What the worker finds. All cases meet a run that has checkpoints and metrics already: those stay as they are."""

    @classmethod
    def setUpClass(cls):
        cls.made = pathlib.Path(tempfile.mkdtemp(prefix="oomb-cli-made-"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.made, ignore_errors=True)

    def setUp(self):
        super().setUp()
        if not (self.made / "out").exists():
            self.train("train.stop_after=2", "checkpoint.every=1")
            shutil.copytree(self.path("out"), self.made / "out")
        else:
            shutil.copytree(self.made / "out", self.path("out"))


class Model(WithRun):
    def test_model_config(self):
        self.expect_refused("nowhere.json", "cannot be read", settings=["model.config=nowhere.json"])
        self.path("model.json").write_text("{\"model_type\": \"qwen2\",")
        self.expect_refused("model.json")

    def test_features_that_change_the_maths_are_refused_by_name(self):
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        for changes, needles in (
                ({"rope_scaling": yarn}, ["rope_scaling", "yarn", "not supported"]),
                ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters", "llama3"]),
                ({"use_sliding_window": True, "sliding_window": 32}, ["use_sliding_window", "not supported"]),
                ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "sliding_attention"]),
                ({"attention_sinks": True}, ["attention_sinks", "not supported"]),
                ({"model_type": "gpt_oss"}, ["model_type", "gpt_oss", "qwen2"]),
                ({"num_experts": 8}, ["num_experts", "not supported"]),
                ({"model_type": "qwen2_moe"}, ["model_type", "qwen2_moe"]),
                ({"head_dim": 5}, ["head_dim", "5", "even"]),
                ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads", "multiple"])):
            with self.subTest(changes):
                self.write_model("model.json", **changes)
                self.expect_refused("model.json", *needles)


class Weights(WithRun):
    def weights(self):
        """A Hugging Face folder to spoil, as a run's model.path."""
        folder = self.path("weights")
        if not folder.exists():
            folder.mkdir()
            for name in ("model.safetensors", "config.json"):
                shutil.copy(self.made / "out/checkpoints/step-00000002" / name, folder / name)
            self.write_run(model={"path": "weights", "config": ""}, run={"dir": "other"})
        return folder / "model.safetensors"

    def refuse_weights(self, *needles):
        self.expect_refused("weights", *needles)
        self.assertEqual({path.name for path in self.path("other").iterdir()} - oomb_cli.BOOKKEEPING, set())
        shutil.rmtree(self.path("other"))

    def expect_refused(self, *needles, **options):
        # `other` is a run folder that these cases make anew.
        if self.path("weights").exists():
            before = self.snapshot()
            result = self.oomb("train", "run.yaml")
            self.assertEqual(result.code, 2, result)
            self.expect_one_line(result, *needles)
            after = self.snapshot()
            after.pop("other", None)
            self.assertEqual(after, before)
            return result
        return super().expect_refused(*needles, **options)

    def test_whole_weights_are_taken(self):
        self.weights()
        self.train("train.steps=1")

    def test_folder_without_weights(self):
        self.weights().unlink()
        self.refuse_weights("model.safetensors")

    def test_nan_and_infinity_in_weights(self):
        name, file = "model.layers.1.mlp.up_proj.weight", self.weights()
        whole = oomb_cli.read_safetensors(file)
        dtype, shape, data = whole[name]
        for value in (float("nan"), float("inf")):
            with self.subTest(value):
                spoiled = data[:4 * 37] + struct.pack("<f", value) + data[4 * 38:]
                oomb_cli.write_safetensors(file, {**whole, name: (dtype, shape, spoiled)})
                self.refuse_weights("model.safetensors", name, "NaN or infinite")

    def test_weight_with_wrong_shape(self):
        name, file = "model.layers.0.self_attn.k_proj.weight", self.weights()
        whole = oomb_cli.read_safetensors(file)
        dtype, shape, data = whole[name]
        self.assertEqual(shape, [8, 16])
        oomb_cli.write_safetensors(file, {**whole, name: (dtype, [16, 8], data)})
        self.refuse_weights(name, "[16, 8]", "[8, 16]")

    def test_missing_weight(self):
        name, file = "lm_head.weight", self.weights()
        whole = oomb_cli.read_safetensors(file)
        del whole[name]
        oomb_cli.write_safetensors(file, whole)
        self.refuse_weights(name, "missing")

    def test_file_cut_or_grown_by_a_byte(self):
        file = self.weights()
        whole = file.read_bytes()
        for spoiled in (whole[:-1], whole + b"\0", struct.pack("<Q", 1 << 40) + whole[8:], whole[:5]):
            with self.subTest(len(spoiled) - len(whole)):
                file.write_bytes(spoiled)
                self.refuse_weights("model.safetensors")

    def test_shards(self):
        single = self.weights()
        tensors = sorted(oomb_cli.read_safetensors(single).items())
        single.unlink()
        weight_map = {}
        for number, part in ((1, tensors[:9]), (2, tensors[9:])):
            shard = f"model-0000{number}-of-00002.safetensors"
            oomb_cli.write_safetensors(single.with_name(shard), dict(part))
            weight_map.update({name: shard for name, _ in part})
        single.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        self.train("train.steps=1")
        shutil.rmtree(self.path("other"))
        second = single.with_name("model-00002-of-00002.safetensors")
        whole = second.read_bytes()
        second.write_bytes(whole[:-1])
        self.refuse_weights(second.name)
        second.write_bytes(whole + b"\0")
        self.refuse_weights(second.name)
        second.unlink()
        self.refuse_weights(second.name, "missing")


class Data(WithRun):
    def test_data_paths(self):
        self.expect_refused("nowhere.txt", "cannot be read", settings=["data.paths=[nowhere.txt]"])
        self.expect_refused("*.nothing", "matches no", settings=["data.paths=['*.nothing']"])
        self.path("empty.txt").write_bytes(b"")
        self.expect_refused("empty.txt", "empty", settings=["data.paths=[empty.txt]"])
        self.path("folder").mkdir()
        self.expect_refused("folder", "no data file", settings=["data.paths=[folder]"])

    def test_data_shorter_than_a_sequence(self):
        self.path("short.txt").write_bytes(oomb_cli.text_bytes(40))
        self.expect_refused("training part", "38", "41", "61",
                            settings=["data.paths=[short.txt]", "data.holdout_fraction=0.07"])

    def test_text_needs_a_vocabulary_for_bytes(self):
        self.write_model("model.json", vocab_size=256)
        self.expect_refused("text.txt", "257", "256")

    def test_id_outside_the_vocabulary(self):
        ids = [(7 * i) % 257 for i in range(500)]
        ids[123] = 257
        oomb_cli.write_llmc(self.path("llmc.bin"), ids)
        oomb_cli.write_npy(self.path("ids.npy"), ids)
        oomb_cli.write_megatron(self.path("mega"), [ids[:100], ids[100:]])
        for name in ("llmc.bin", "ids.npy", "mega.idx"):
            with self.subTest(name):
                self.expect_refused(name.split(".")[0], "token 123", "257",
                                    settings=["data.kind=tokens", f"data.paths=[{name}]"])

    def test_token_files_cut_short(self):
        ids = [(7 * i) % 257 for i in range(500)]
        oomb_cli.write_llmc(self.path("llmc.bin"), ids)
        oomb_cli.write_npy(self.path("ids.npy"), ids)
        oomb_cli.write_megatron(self.path("mega"), [ids[:100], ids[100:]])
        for name, cut in (("llmc.bin", 2), ("ids.npy", 1), ("mega.bin", 2), ("mega.idx", 1)):
            with self.subTest(name):
                whole = self.path(name).read_bytes()
                self.path(name).write_bytes(whole[:-cut])
                self.expect_refused(name, settings=["data.kind=tokens", f"data.paths=[{name}]"])
                self.path(name).write_bytes(whole)

    def test_headerless_tokens_of_a_large_vocabulary_need_their_type(self):
        self.path("train.bin").write_bytes(struct.pack("<500H", *[(131 * i) % 65536 for i in range(500)]))
        settings = ["data.kind=tokens", "data.paths=[train.bin]", "run.dir=large", "train.steps=1"]
        self.write_model("model.json", vocab_size=65537, num_hidden_layers=1)
        before = self.snapshot()
        result = self.oomb("train", "run.yaml", settings=settings)
        self.assertEqual(result.code, 2, result)
        self.expect_one_line(result, "train.bin", "uint16", "65537", "dtype")
        after = self.snapshot()
        after.pop("large")
        self.assertEqual(after, before)
        self.train(*settings, "data.dtype=uint16")


class Room(WithRun):
    def test_pages_that_do_not_fit_are_refused_before_the_first_step(self):
        # Homes: 2 layers x 12 pages before the last chunk, each of K and V x 2 heads x 4 tokens x 4 dims in fp32.
        homes = 2 * 12 * (2 * 2 * 4 * 4 * 4)
        self.expect_refused("pages", f"needs {homes} bytes", "1000 bytes are there", "pages.host_bytes",
                            "sequence.length", settings=["pages.host_bytes=1000"])
        # Dense: every past page gets a gradient slot as well.
        self.expect_refused(f"needs {2 * homes} bytes", settings=[f"pages.host_bytes={2 * homes - 1}",
                                                                  "attention.kind=dense"])
        self.expect_refused("pages.host_bytes", "left", settings=["pages.host_bytes=1000000GiB"])

    def test_gradient_slots_that_do_not_fit_end_the_step_with_the_numbers(self):
        homes = 2 * 12 * (2 * 2 * 4 * 4 * 4)
        result = self.oomb("train", "run.yaml", settings=[f"pages.host_bytes={homes + 300}"])
        self.assertEqual(result.code, 2, result)
        self.expect_one_line(result, "pages", "bytes", "pages.host_bytes", "attention.chunk_pages")
        self.assertEqual(self.checkpoint_steps(), [1, 2])
        for step in (1, 2):
            self.expect_whole_checkpoint(self.checkpoint(step))
        self.train()

    def test_run_folder_that_cannot_be_written(self):
        self.path("file").write_text("not a folder")
        self.expect_refused("run.dir", "file", settings=["run.dir=file"])
        self.expect_refused("run.dir", "file", settings=["run.dir=file/below"])
        self.expect_refused("file", "checkpoint folder", settings=["checkpoint.dir=file"])
        self.assertEqual(self.path("file").read_text(), "not a folder")

    def test_run_folder_that_is_in_use(self):
        process = self.start("train", "run.yaml", settings=["train.steps=1000000"])
        self.assertTrue(oomb_cli.wait_until(lambda: self.path("out/metrics.jsonl").read_text().count("\n") > 4, 50))
        second = self.oomb("train", "run.yaml")
        self.assertEqual(second.code, 2, second)
        self.expect_one_line(second, "run.dir", "in use")
        process.terminate()
        self.assertEqual(self.finish(process).code, 143)


class Checkpoints(WithRun):
    def test_damaged_checkpoint_is_passed_over(self):
        weights = self.checkpoint(2) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        result = self.train("train.stop_after=2")
        self.assertRegex(result.err, r"\Awarning: [^\n]*step 2 is passed over[^\n]*model.safetensors[^\n]*\n\Z")
        self.assertIn("resumed after step 1", result.out)
        self.expect_whole_checkpoint(self.checkpoint(2))
        for name in ("model.safetensors", "optimizer.safetensors"):
            self.assertEqual((self.checkpoint(2) / name).read_bytes(),
                             (self.made / "out/checkpoints/step-00000002" / name).read_bytes())

    def test_damaged_checkpoint_that_was_asked_for(self):
        weights = self.checkpoint(2) / "optimizer.safetensors"
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
        self.expect_refused("optimizer.safetensors", "damaged", settings=[f"checkpoint.resume={self.checkpoint(2)}"])
        self.expect_refused("nowhere", "no checkpoint", settings=["checkpoint.resume=nowhere"])


class NotFinite(CliTest):
    """Weight decay of 100 at a rate of 100 multiplies every matrix by -9999 a step, until fp32 overflows."""

    def test_parameters_of_the_last_good_step_are_kept(self):
        settings = ["train.learning_rate=100", "train.weight_decay=100", "train.steps=40"]
        result = self.oomb("train", "run.yaml", settings=settings)
        self.assertEqual(result.code, 2, result)
        good = len(self.metrics())
        self.assertGreater(good, 0)
        self.expect_one_line(result, f"step {good + 1}", "not finite", f"step {good}", "train.learning_rate",
                             f"step-{good:08d}")
        self.assertEqual(self.checkpoint_steps(), [good])
        self.expect_whole_checkpoint(self.checkpoint(good))
        # They are the parameters that an orderly end after that step would have saved.
        self.train(*settings, f"train.stop_after={good}", "run.dir=orderly")
        self.expect_equal_checkpoints(self.checkpoint(good), self.checkpoint(good, "orderly"))
        again = self.train(*settings, f"train.stop_after={good}")
        self.assertIn(f"resumed after step {good}", again.out)

    def test_no_checkpoint_of_infinite_parameters(self):
        """The update of a step overflows, and its checkpoint would push out the only good one."""
        settings = ["train.learning_rate=100", "train.weight_decay=100", "train.steps=40", "checkpoint.every=1",
                    "checkpoint.keep=1", "train.clip_norm=0"]
        result = self.oomb("train", "run.yaml", settings=settings)
        self.assertEqual(result.code, 2, result)
        self.expect_one_line(result, "step", "train.learning_rate")
        steps = self.checkpoint_steps()
        self.assertEqual(len(steps), 1)
        self.expect_whole_checkpoint(self.checkpoint(steps[0]))
        for name, (_, _, data) in oomb_cli.read_safetensors(self.checkpoint(steps[0]) / "model.safetensors").items():
            largest = max(abs(value) for (value,) in struct.iter_unpack("<f", data))
            self.assertLess(largest, float("inf"), name)


class FullDisk(CliTest):
    """On a small tmpfs, which only root can make."""

    @contextlib.contextmanager
    def disk(self, size, options=""):
        if os.geteuid() != 0 or shutil.which("mount") is None:
            self.skipTest("only root can mount a small disk")
        folder = self.path("disk")
        folder.mkdir(exist_ok=True)
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "oomb-test", folder],
                              capture_output=True, text=True)
        if made.returncode != 0:
            self.skipTest(f"a small disk cannot be mounted here: {made.stderr.strip()}")
        try:
            yield folder
        finally:
            oomb_cli.wait_until(lambda: not oomb_cli.tagged_processes(self.tag), 15)
            subprocess.run(["umount", folder], check=True)

    def test_read_only_disk(self):
        with self.disk("64k", ",ro"):
            result = self.oomb("train", "run.yaml", settings=["run.dir=disk/run"])
            self.assertEqual(result.code, 2, result)
            self.expect_one_line(result, "run.dir", "disk/run", "Read-only")
            result = self.oomb("train", "run.yaml", settings=["checkpoint.dir=disk/checkpoints"])
            self.assertEqual(result.code, 2, result)
            self.expect_one_line(result, "disk/checkpoints", "Read-only")
            self.assertFalse(self.path("out/metrics.jsonl").exists())

    def test_no_room_for_a_first_checkpoint(self):
        with self.disk("64k"):
            result = self.oomb("train", "run.yaml", settings=["checkpoint.dir=disk/checkpoints"])
            self.assertEqual(result.code, 2, result)
            self.expect_one_line(result, "disk/checkpoints", "needs", "65536")
            self.assertFalse(self.path("out/metrics.jsonl").exists())

    def test_full_at_checkpoint_time(self):
        self.train("train.steps=4", "run.dir=whole")  # undisturbed, and how large one is
        pages = sum(-(-path.stat().st_size // 4096) for path in self.checkpoint(4, "whole").iterdir())
        # One page less than two checkpoints: the second passes the check of free space and fails while it is written.
        # One checkpoint and a half: the check finds it.
        for size, needle in ((2 * pages - 1, "No space left"), (pages * 3 // 2, "needs")):
            with self.subTest(needle), self.disk(size * 4096) as disk:
                settings = ["run.dir=out", "checkpoint.dir=disk/checkpoints", "checkpoint.every=1"]
                result = self.oomb("train", "run.yaml", settings=settings)
                self.assertEqual(result.code, 3, result)
                self.expect_one_line(result, "disk/checkpoints", needle)
                self.assertEqual([path.name for path in (disk / "checkpoints").iterdir()], ["step-00000001"])
                self.expect_whole_checkpoint(disk / "checkpoints/step-00000001")
                # With room again the run goes on as if nothing had been.
                subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
                again = self.train(*settings)
                self.assertIn("resumed after step 1", again.out)
                self.assertEqual(self.losses(), self.losses("whole"))
                self.expect_equal_checkpoints(disk / "checkpoints/step-00000004", self.checkpoint(4, "whole"))
                shutil.rmtree(self.path("out"))

    def test_full_where_everything_is_written(self):
        with self.disk("500k") as disk:
            settings = ["run.dir=disk/run", "checkpoint.every=1", "checkpoint.keep=100", "train.steps=100"]
            result = self.oomb("train", "run.yaml", settings=settings)
            self.assertEqual(result.code, 3, result)
            self.expect_one_line(result, "disk/run")
            steps = self.checkpoint_steps("disk/run")
            self.assertEqual(steps, list(range(1, len(steps) + 1)))
            self.assertGreaterEqual(len(steps), 2)
            for step in steps:
                self.expect_whole_checkpoint(self.checkpoint(step, "disk/run"))
            self.assertEqual(self.metrics("disk/run")[-1]["step"], steps[-1] + 1)
            subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
            self.train(*settings, f"train.stop_after={steps[-1] + 3}")
            self.assertEqual(len(self.metrics("disk/run")), steps[-1] + 3)


if __name__ == "__main__":
    oomb_cli.main()
