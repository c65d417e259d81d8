"""Hugging Face folders in and out: what we save, transformers loads as the same model, and what others save loads here.

usage: test_folders.py PARITY_DUMP OOMB
"""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reference as ref

DUMP, OOMB = sys.argv[1:3]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"fp64": (torch.float64, "F64"), "fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16")}
FP32, FP64 = 1e-5, 1e-12


def load_strictly(folder, **options):
    """The model of a folder; an AssertionError if transformers missed, ignored or guessed anything."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", local_files_only=True, **options)
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise AssertionError(f"{folder}: {problems}")
    return model


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.work = Path(self.folder.name)

    def tearDown(self):
        self.folder.cleanup()

    def save(self, model, name, **options):
        model.save_pretrained(self.work / name, **options)
        return self.work / name

    def check_layout(self, folder, model, dtype):
        """One file without an index, format pt, the tensors and shapes of `model` and no others."""
        weights = sorted(p.name for p in folder.iterdir() if "model" in p.name)
        self.assertEqual(weights, ["model.safetensors"])
        tensors, metadata = ref.tensor_set(folder)
        self.assertEqual(metadata.get("format"), "pt")
        expected = {name: (DTYPES[dtype][1], tuple(p.shape)) for name, p in model.named_parameters()}
        self.assertEqual(tensors, expected)
        self.assertEqual(json.loads((folder / "config.json").read_text())["torch_dtype"],
                         str(DTYPES[dtype][0]).removeprefix("torch."))

    def check_one_line(self, stderr, *parts):
        lines = [line for line in stderr.splitlines() if line.strip()]
        self.assertEqual(len(lines), 1, stderr)
        for part in parts:
            self.assertIn(part, lines[0])


class RoundTrip(WithFolder):
    def test_same_tensors_values_and_logits(self):
        shapes = {"untied": dict(heads=4, kv_heads=2, hidden=16, head_dim=6, vocab=31, theta=5e5),
                  "tied": dict(heads=6, kv_heads=1, hidden=24, tied=True)}
        for seed, (name, shape) in enumerate(shapes.items(), start=51):
            model = ref.make_model(seed, **shape)
            ids, labels = ref.make_ids(29, model.config.vocab_size, seed)
            source = self.save(model, name, **({"max_shard_size": 3000} if name == "untied" else {}))
            for dtype, (torch_dtype, _) in DTYPES.items():
                with self.subTest(model=name, dtype=dtype):
                    saved = self.work / f"{name}-{dtype}"
                    saved.mkdir()
                    ref.run_dump(DUMP, source, self.work, ids, labels, compute=dtype, save=saved)
                    self.check_layout(saved, model, dtype)
                    loaded = load_strictly(saved, dtype="auto")
                    self.assertEqual(loaded.dtype, torch_dtype)
                    self.assertEqual(loaded.config.tie_word_embeddings, name == "tied")
                    rounded = {key: p.detach().to(torch_dtype) for key, p in model.named_parameters()}
                    for key, p in loaded.named_parameters():
                        self.assertTrue(torch.equal(p, rounded[key]), key)
                    # The config too means the same: this is the model that was read, with rounded weights. (A model is
                    # not cast to bf16 for this: that would round its RoPE frequencies as well.)
                    single, twin = load_strictly(saved, dtype=torch.float32), ref.make_model(seed, **shape)
                    twin.load_state_dict(rounded, strict=name == "untied")
                    self.assertTrue(torch.equal(ref.logits_of(single, ids), ref.logits_of(twin, ids)))
                    # And it loads here again, from any dtype.
                    again = ref.run_dump(DUMP, saved, self.work, ids, labels)
                    self.assertEqual(again["stderr"], "")
                    ref.check(again, ref.run_model(single, ids, labels), FP32, dtype)


class TiedWeights(WithFolder):
    def setUp(self):
        super().setUp()
        self.model = ref.make_model(61, heads=4, kv_heads=2, hidden=16, tied=True)
        self.ids, self.labels = ref.make_ids(43, self.model.config.vocab_size, 61)
        self.plain = self.save(self.model, "plain")

    def variant(self, name, change, tied=True):
        """A copy of the tied model's folder whose tensors went through `change`."""
        folder = self.save(self.model, name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = tied
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def dump(self, folder, **options):
        return ref.run_dump(DUMP, folder, self.work, self.ids, self.labels, **options)

    def test_one_gradient_is_the_sum_of_both_uses(self):
        ours = self.dump(self.plain, compute="fp64")
        self.assertNotIn(HEAD, ours["grads"])
        twin = ref.make_model(62, heads=4, kv_heads=2, hidden=16, tied=False)
        twin.load_state_dict({**self.model.state_dict(), HEAD: self.model.state_dict()[EMBEDDING]})
        apart = ref.run_model(ref.lifted(twin), self.ids, self.labels)["grads"]
        self.assertGreater(min(apart[EMBEDDING].norm(), apart[HEAD].norm()), 1e-2 * ref.total_norm(apart))
        self.assertLessEqual(ref.distance(ours["grads"][EMBEDDING], apart[EMBEDDING] + apart[HEAD]), FP64)

    def test_stored_once_or_twice_is_the_same_model(self):
        def both(tensors):
            tensors[HEAD] = tensors[EMBEDDING].clone()

        def head_only(tensors):
            tensors[HEAD] = tensors.pop(EMBEDDING)

        expected = self.dump(self.plain)
        ref.check(expected, ref.run_model(self.model, self.ids, self.labels), FP32, "tied")
        for name, change in (("both", both), ("head only", head_only)):
            folder = self.variant(name, change)
            ours = self.dump(folder)
            self.assertEqual(ours["stderr"], "", name)
            self.assertEqual(max(ref.distances(ours, expected).values()), 0.0, name)
            load_strictly(folder)  # transformers has it as whole, too

    def test_two_different_tensors_are_refused(self):
        def other_head(tensors):
            tensors[HEAD] = tensors[EMBEDDING] + 1

        folder = self.variant("differ", other_head)
        done, out = ref.call_dump(DUMP, folder, self.work, self.ids)
        self.assertEqual(done.returncode, 2)
        self.assertFalse(out.exists())
        self.check_one_line(done.stderr, str(folder / "model.safetensors"), HEAD, "tie_word_embeddings")

    def test_untied_without_head_is_refused(self):
        folder = self.variant("headless", lambda tensors: None, tied=False)
        done, _ = ref.call_dump(DUMP, folder, self.work, self.ids)
        self.assertEqual(done.returncode, 2)
        self.check_one_line(done.stderr, str(folder), HEAD, "missing")

    def test_untied_without_head_stops_a_run(self):
        folder = self.variant("headless", lambda tensors: None, tied=False)
        run = Run(self.work, {"path": str(folder)}, vocab=self.model.config.vocab_size)
        done = run.oomb("train")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(HEAD, done.stderr)
        self.assertEqual(sum(HEAD in line for line in done.stderr.splitlines()), 1, done.stderr)

    def test_unused_tensor_is_named(self):
        folder = self.variant("extra", lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(3)}))
        ours = self.dump(folder)
        self.check_one_line(ours["stderr"], "warning", "model.layers.9.extra")


class Run:
    """A run of `oomb` over token ids that this test knows: two held-out sequences of LENGTH."""
    LENGTH, TOKENS, HELD_OUT = 97, 4000, 400

    def __init__(self, work, model, vocab, compute="fp32"):
        generator = torch.Generator().manual_seed(71)
        # Words of a small dictionary: something to learn in a few steps.
        words = torch.randint(vocab, (20, 5), generator=generator)
        self.ids = words[torch.randint(20, (self.TOKENS // 5,), generator=generator)].flatten()
        (work / "data.bin").write_bytes(self.ids.to(torch.uint16).numpy().tobytes())
        settings = {
            "run": {"dir": str(work / "run")},
            "model": model,
            "data": {"kind": "tokens", "format": "nanogpt", "dtype": "uint16", "paths": [str(work / "data.bin")],
                     "holdout_fraction": self.HELD_OUT / self.TOKENS},
            "sequence": {"length": self.LENGTH, "chunk": 32},
            "attention": {"kind": "dense", "page_tokens": 8},
            "train": {"steps": 4, "learning_rate": 0.01, "compute_dtype": compute, "threads": 1, "device": "cpu"},
            "eval": {"sequences": 2},
        }
        self.file = work / "run.yaml"
        self.file.write_text(json.dumps(settings))  # JSON is YAML

    def oomb(self, command, *arguments):
        return subprocess.run([OOMB, command, str(self.file), *arguments], capture_output=True, text=True, timeout=120)

    def held_out_loss(self, model):
        """Mean loss of the held-out sequences, as `model` computes it."""
        total = count = 0
        for i in range(2):
            begin = self.TOKENS - self.HELD_OUT + i * self.LENGTH
            ids = self.ids[begin:begin + self.LENGTH]
            labels = torch.cat([ids[1:], torch.tensor([ref.IGNORED])])
            result = ref.run_model(model, ids, labels)
            total, count = total + result["loss_sum"], count + result["num_labels"]
        return total / count


class Checkpoints(WithFolder):
    """`oomb train`, `oomb eval` and transformers on the same held-out sequences."""
    SHAPE = dict(heads=4, kv_heads=2, hidden=20, head_dim=6)

    def train(self, start, section, compute):
        """Four steps; returns the run, its loss in `oomb eval`, and the checkpoint's folder, which was checked."""
        run = Run(self.work, section, start.config.vocab_size, compute)
        trained = run.oomb("train")
        self.assertEqual(trained.returncode, 0, trained.stderr)
        evaluated = run.oomb("eval", "--json")
        self.assertEqual(evaluated.returncode, 0, evaluated.stderr)
        result = json.loads(evaluated.stdout)
        self.assertEqual(result["tokens"], 2 * (Run.LENGTH - 1))
        checkpoint = Path(result["checkpoint"])
        self.check_layout(checkpoint, start, compute)
        self.assertEqual(load_strictly(checkpoint, dtype="auto").dtype, DTYPES[compute][0])
        return run, result["loss"], checkpoint

    def check_all_moved(self, start, after):
        for (name, before), now in zip(start.named_parameters(), after.parameters(), strict=True):
            self.assertFalse(torch.equal(before.to(now.dtype), now), f"{name} did not move")

    def report(self, ours, theirs, what):
        print(f"{what}: oomb eval {ours:.9f}, transformers {theirs:.9f}, difference {abs(ours - theirs) / theirs:.2e}")

    def check_fp32(self, tied):
        start = ref.make_model(82, tied=tied, **self.SHAPE)
        run, loss, checkpoint = self.train(start, {"path": str(self.save(start, "start"))}, "fp32")
        loaded = load_strictly(checkpoint)
        self.check_all_moved(start, loaded)
        expected, before = run.held_out_loss(loaded), run.held_out_loss(start)
        self.report(loss, expected, f"fp32, {'tied' if tied else 'untied'}, {before:.3f} before training")
        self.assertLessEqual(abs(loss - expected), FP32 * expected)
        self.assertLess(loss, 0.99 * before, "four steps taught nothing")

    def test_fp32_untied(self):
        self.check_fp32(tied=False)

    def test_fp32_tied(self):
        self.check_fp32(tied=True)

    def test_fp64_from_a_config(self):
        shape = ref.make_model(81, **self.SHAPE)
        config = self.save(shape, "start") / "config.json"
        run, loss, checkpoint = self.train(shape, {"config": str(config)}, "fp64")
        expected = run.held_out_loss(ref.lifted(load_strictly(checkpoint, dtype="auto")))
        self.report(loss, expected, "fp64, random weights")
        self.assertLessEqual(abs(loss - expected), FP64 * expected)
        # Read as fp32, it is the same model to fp32.
        single = run.held_out_loss(load_strictly(checkpoint, dtype=torch.float32))
        self.assertLessEqual(abs(loss - single), FP32 * single)

    def test_bf16_from_a_folder(self):
        start = ref.make_model(83, **self.SHAPE)
        run, loss, checkpoint = self.train(start, {"path": str(self.save(start, "start"))}, "bf16")
        single = load_strictly(checkpoint, dtype=torch.float32)
        self.check_all_moved(start, load_strictly(checkpoint, dtype="auto"))
        # `oomb eval` computes in bf16, whose unit roundoff is 2^-8: a logit of size s is off by about s 2^-8, the mean
        # loss of 192 tokens by less. What the weights are worth is compared in fp32.
        expected = run.held_out_loss(single)
        self.report(loss, expected, "bf16 against fp32 of the same weights")
        self.assertLessEqual(abs(loss - expected), 2.0**-8 * expected)
        ids, labels = ref.make_ids(61, single.config.vocab_size, 83)
        ours = ref.run_dump(DUMP, checkpoint, self.work, ids, labels)
        ref.check(ours, ref.run_model(single, ids, labels), FP32, "bf16 checkpoint")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
