"""What the logged loss and gradient norm are: means over all labels of a step."""
import math
import random
import struct

import oomb_cli
from oomb_cli import CliTest


def fp64(values):
    return struct.pack(f"<{len(values)}d", *values)


class ByHand(CliTest):
    """Layers without effect: their outputs are zero, so the loss of a token depends on the one before alone."""

    VOCAB, HIDDEN = 5, 4

    def setUp(self):
        super().setUp()
        rng = random.Random(3)
        self.write_model("config.json", vocab_size=self.VOCAB, hidden_size=self.HIDDEN, num_attention_heads=2,
                         num_key_value_heads=1, intermediate_size=3, num_hidden_layers=1, rms_norm_eps=0.0,
                         dtype="float64")
        folder = self.path("weights")
        folder.mkdir()
        self.path("config.json").rename(folder / "config.json")
        self.embedding = [[rng.gauss(0, 1) for _ in range(self.HIDDEN)] for _ in range(self.VOCAB)]
        self.head = [[rng.gauss(0, 1.5) for _ in range(self.HIDDEN)] for _ in range(self.VOCAB)]

        def zeros(*shape):
            return "F64", list(shape), fp64([0.0] * math.prod(shape))

        def ones(count):
            return "F64", [count], fp64([1.0] * count)

        def matrix(rows):
            return "F64", [len(rows), len(rows[0])], fp64([value for row in rows for value in row])
        layer, width = "model.layers.0.", self.HIDDEN // 2
        tensors = {
            "model.embed_tokens.weight": matrix(self.embedding), "lm_head.weight": matrix(self.head),
            "model.norm.weight": ones(self.HIDDEN), layer + "input_layernorm.weight": ones(self.HIDDEN),
            layer + "post_attention_layernorm.weight": ones(self.HIDDEN),
            layer + "self_attn.q_proj.weight": zeros(2 * width, self.HIDDEN),
            layer + "self_attn.k_proj.weight": zeros(width, self.HIDDEN),
            layer + "self_attn.v_proj.weight": zeros(width, self.HIDDEN),
            layer + "self_attn.q_proj.bias": zeros(2 * width), layer + "self_attn.k_proj.bias": zeros(width),
            layer + "self_attn.v_proj.bias": zeros(width),
            layer + "self_attn.o_proj.weight": zeros(self.HIDDEN, 2 * width),
            layer + "mlp.gate_proj.weight": zeros(3, self.HIDDEN), layer + "mlp.up_proj.weight": zeros(3, self.HIDDEN),
            layer + "mlp.down_proj.weight": zeros(self.HIDDEN, 3),
        }
        oomb_cli.write_safetensors(folder / "model.safetensors", tensors)
        self.write_run(model={"path": "weights", "config": ""}, data={"kind": "tokens", "paths": ["ids.npy"],
                       "holdout_fraction": 0, "shuffle": False}, sequence={"length": 8, "chunk": 4},
                       attention={"kind": "dense", "page_tokens": 1},
                       train={"compute_dtype": "fp64", "learning_rate": 0, "steps": 1})

    def token_loss(self, token, label):
        x = self.embedding[token]
        scale = 1 / math.sqrt(sum(value * value for value in x) / self.HIDDEN)
        logits = [scale * sum(a * b for a, b in zip(row, x)) for row in self.head]
        return math.log(sum(math.exp(value) for value in logits)) - logits[label]

    def losses_of(self, ids):
        return [self.token_loss(token, label) for token, label in zip(ids, ids[1:])]

    def test_no_label_is_lost_at_a_chunk_border(self):
        """8 tokens have 7 labels, whatever the chunk."""
        ids = [1, 2, 3, 4, 0, 1, 3, 2]
        oomb_cli.write_npy(self.path("ids.npy"), ids)
        expected = sum(self.losses_of(ids)) / 7
        for chunk in (1, 2, 3, 4, 7, 8, 16):
            with self.subTest(chunk=chunk):
                self.train(f"sequence.chunk={chunk}", f"run.dir=chunk{chunk}")
                (line,) = self.metrics(f"chunk{chunk}")
                self.assertEqual(line["labels"], 7)
                self.assertEqual(line["tokens"], 8)
                self.assertAlmostEqual(line["loss"], expected, delta=1e-13 * expected)

    def test_mean_over_all_sequences_of_a_step(self):
        rng = random.Random(11)
        sequences = [[rng.randrange(self.VOCAB) for _ in range(8)] for _ in range(6)]
        oomb_cli.write_npy(self.path("ids.npy"), [token for ids in sequences for token in ids])
        self.train("train.sequences_per_step=3", "train.steps=2")
        for line, part in zip(self.metrics(), (sequences[:3], sequences[3:])):
            losses = [loss for ids in part for loss in self.losses_of(ids)]
            self.assertEqual(len(losses), 21)
            self.assertEqual(line["labels"], 21)
            self.assertEqual(line["tokens"], 24)
            self.assertEqual(line["tokens_crc32c"], oomb_cli.crc32c(b"".join(
                struct.pack("<8q", *ids) for ids in part)))
            expected = sum(losses) / 21
            self.assertAlmostEqual(line["loss"], expected, delta=1e-13 * expected)

    def test_a_single_token_has_no_label(self):
        oomb_cli.write_npy(self.path("ids.npy"), [1, 2, 3, 4])
        self.train("sequence.length=1", "sequence.chunk=4", "train.learning_rate=0.1", "train.steps=3",
                   "train.sequences_per_step=2")
        for line in self.metrics():
            self.assertEqual((line["loss"], line["labels"], line["tokens"], line["grad_norm"]), (0, 0, 2, 0))
        made = oomb_cli.read_safetensors(self.checkpoint(3) / "model.safetensors")
        self.assertEqual(made, oomb_cli.read_safetensors(self.path("weights/model.safetensors")))


class Accumulation(CliTest):
    """One step over k equal sequences is one step over one of them: nothing is summed that should be averaged."""

    def test_one_or_eight_equal_sequences(self):
        window = oomb_cli.text_bytes(60)
        self.path("text.txt").write_bytes(window)
        # Eight files of 60 bytes and a separator each: eight windows of 61 tokens, all equal.
        for number in range(8):
            self.path(f"copy{number}.txt").write_bytes(window)
        self.write_run(data={"paths": ["copy*.txt"], "holdout_fraction": 0},
                       train={"compute_dtype": "fp64", "steps": 3, "clip_norm": 0.5})
        self.train("run.dir=one")
        self.train("run.dir=eight", "train.sequences_per_step=8")
        for one, eight in zip(self.metrics("one"), self.metrics("eight")):
            self.assertEqual(eight["tokens"], 8 * one["tokens"])
            self.assertEqual(eight["labels"], 8 * one["labels"])
            for key in ("loss", "grad_norm"):
                self.assertAlmostEqual(eight[key], one[key], delta=1e-10 * one[key], msg=key)
        first = oomb_cli.read_safetensors(self.checkpoint(3, "one") / "model.safetensors")
        second = oomb_cli.read_safetensors(self.checkpoint(3, "eight") / "model.safetensors")
        for name, (_, _, data) in first.items():
            for (a,), (b,) in zip(struct.iter_unpack("<d", data), struct.iter_unpack("<d", second[name][2])):
                self.assertAlmostEqual(a, b, delta=1e-6, msg=name)


class Metrics(CliTest):
    def test_every_line_has_its_keys_and_right_values(self):
        self.train("train.steps=6", "train.warmup_steps=2", "train.min_learning_rate_ratio=0.25",
                   "train.sequences_per_step=2", "train.stop_after=4")
        self.train("train.steps=6", "train.warmup_steps=2", "train.min_learning_rate_ratio=0.25",
                   "train.sequences_per_step=2")
        lines = self.metrics()
        self.assertEqual(len(lines), 6)
        for line in lines:
            self.assertEqual(line["tokens"], 122)
            self.assertEqual(line["labels"], 120)
            self.assertAlmostEqual(line["tokens_per_second"] * line["seconds"], 122, delta=1e-6)
            self.assertGreater(line["grad_norm"], 0)
            self.assertEqual(line["hbm_peak_bytes"], 0)  # train.device is cpu
            self.assertGreater(line["host_peak_bytes"], 10 << 20)
            step, peak, low = line["step"], 0.01, 0.0025
            expected = peak * step / 2
            if step > 2:
                expected = low + (peak - low) * (1 + math.cos(math.pi * (step - 2) / 4)) / 2
            self.assertAlmostEqual(line["lr"], expected, delta=1e-15)


if __name__ == "__main__":
    oomb_cli.main()
