"""Loss, logits and every parameter gradient of the chunked step against transformers, on random small Qwen2 models.

usage: test_gradients.py PARITY_DUMP OOMB
"""
import itertools
import sys
import tempfile
import unittest
from pathlib import Path

import torch

import reference as ref

DUMP = sys.argv[1]

# Heads, shape of the model, folder form, and the cuts (N, C, P) it runs with. All N are odd or prime but the smallest.
MODELS = {
    "gqa 4/2, head_dim given": (
        dict(heads=4, kv_heads=2, hidden=20, head_dim=6), "single", [(2, 8, 4), (61, 16, 4), (83, 8, 8)]),
    "gqa 6/1, shards": (
        dict(heads=6, kv_heads=1, hidden=24, vocab=31), "shards", [(37, 12, 3), (97, 24, 4), (5, 16, 4)]),
    "gqa 7/7, tied": (
        dict(heads=7, kv_heads=7, hidden=28, tied=True), "single", [(53, 7, 7), (67, 64, 16), (17, 8, 4)]),
    "gqa 4/2, tied, shards, 3 layers": (
        dict(heads=4, kv_heads=2, hidden=16, tied=True, layers=3), "shards", [(41, 8, 2), (97, 16, 16), (9, 8, 4)]),
    "gqa 14/2, theta 1e6": (
        dict(heads=14, kv_heads=2, hidden=56, head_dim=8, theta=1e6), "single", [(73, 16, 8), (33, 32, 4)]),
    "gqa 3/1, head_dim 2, one layer": (
        dict(heads=3, kv_heads=1, hidden=11, head_dim=2, layers=1, vocab=7), "single", [(89, 16, 1), (31, 5, 5)]),
}
FP32 = 1e-5
FP64 = 1e-12
WIDTHS = (15, 9, 9, 10, 9, 9)


class Gradients(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.work = Path(self.folder.name)

    def tearDown(self):
        self.folder.cleanup()

    def test_random_models(self):
        print(f"\n{'model':32} {'N':>4} {'C':>3} {'P':>3} {'fp32: loss':>15} {'logits':>9} {'gradient':>9} "
              f"{'fp64: loss':>10} {'logits':>9} {'gradient':>9}")
        for seed, (name, (shape, form, cuts)) in enumerate(MODELS.items(), start=1):
            model = ref.make_model(seed, **shape)
            folder = self.work / str(seed)
            model.save_pretrained(folder, **({"max_shard_size": 3000} if form == "shards" else {}))
            self.assertEqual((folder / "model.safetensors.index.json").exists(), form == "shards")
            if shape.get("head_dim") is None:
                self.drop_key(folder / "config.json", "head_dim")
            double = ref.lifted(model)
            for n, chunk, page in cuts:
                ids, labels = ref.make_ids(n, model.config.vocab_size, seed=100 * seed + n)
                cut, what = dict(chunk=chunk, page=page), f"{name}, N={n} C={chunk} P={page}"
                theirs, exact = ref.run_model(model, ids, labels), ref.run_model(double, ids, labels)
                zeros = ref.zero_gradients(exact)
                self.assertTrue(not zeros or n == 2, f"{what}: {zeros}")
                ref.check(theirs, exact, FP32, f"{what}: the two references", zeros)
                single = ref.run_dump(DUMP, folder, self.work, ids, labels, **cut)
                single = ref.check(single, theirs, FP32, what, zeros)
                ours = ref.run_dump(DUMP, folder, self.work, ids, labels, compute="fp64", **cut)
                fine = ref.check(ours, exact, FP64, f"{what}, fp64", zeros)
                print(f"{name:32} {n:4} {chunk:3} {page:3}", *(f"{v:{w}.2e}" for v, w in zip((*single, *fine), WIDTHS)))

    def test_key_bias_of_norm_900(self):
        """As Qwen2.5 has them. With scores like a trained model's, fp32 keeps to 1e-5; with saturated ones it cannot.

        A score q . k / sqrt(D) computed with unit roundoff u is off by up to (D + 3) u |q| |k| / sqrt(D): D for the sum
        of D products, 1 each for rounding q, k and the log-sum-exp that is subtracted. What may differ is D + 3 times
        what a random error of size u in every score moves (worst of five draws), where that is more than the plain
        tolerance. The same rule with u of double precision bounds the fp64 run, which is the sharp test here.
        """
        print(f"\n{'D':>3} {'|q|':>5} {'entropy':>8} {'worst of all quantities: fp32':>33} {'its bound':>11}"
              f" {'transformers':>14} {'fp64':>9}")
        dims = itertools.product(((8, 1e4), (16, 1e6)), (0.01, 1.0))
        for seed, ((head_dim, theta), query_scale) in enumerate(dims, start=11):
            model = ref.make_model(seed, heads=4, kv_heads=2, hidden=20, head_dim=head_dim, theta=theta)
            with torch.no_grad():
                for attention in (layer.self_attn for layer in model.model.layers):
                    attention.k_proj.bias.mul_(900 / attention.k_proj.bias.norm())
                    attention.q_proj.weight.mul_(query_scale)
                    attention.q_proj.bias.mul_(query_scale)
            folder = self.work / str(seed)
            model.save_pretrained(folder)
            double = ref.lifted(model)
            ids, labels = ref.make_ids(61, model.config.vocab_size, seed)
            exact = ref.run_model(double, ids, labels)
            entropy = min(ref.attention_entropies(double, ids))
            self.assertEqual(entropy > 1, query_scale < 1, f"entropy {entropy}: not the case it should be")
            response = ref.score_response(double, ids, labels, unit=2.0**-24, seeds=range(5))
            response["eval_loss_sum"] = response["loss_sum"]
            bounds = {name: max(FP32, (head_dim + 3) * value) for name, value in response.items()}
            if query_scale < 1:
                bounds = dict.fromkeys(bounds, FP32)
            fine_bounds = {name: max(FP64, (head_dim + 3) * value * 2.0**-29) for name, value in response.items()}
            what = f"key bias 900, D={head_dim}, query scale {query_scale}"
            single = ref.run_dump(DUMP, folder, self.work, ids, labels)
            fine = ref.run_dump(DUMP, folder, self.work, ids, labels, compute="fp64")
            worst = max(ref.check(single, exact, bounds, what))
            worst_fine = max(ref.check(fine, exact, fine_bounds, f"{what}, fp64"))
            theirs = max(ref.distances(ref.run_model(model, ids, labels), exact).values())
            print(f"{head_dim:3} {query_scale:5} {entropy:8.2f} {worst:33.2e} {max(bounds.values()):11.2e}"
                  f" {theirs:14.2e} {worst_fine:9.2e}")

    def test_rope_on_16_tokens(self):
        """Half-split RoPE with the config's base: the logits equal, and another layout or base would be seen."""
        shape = dict(heads=4, kv_heads=2, hidden=32, head_dim=128, theta=1e6)
        model = ref.make_model(21, **shape)
        model.save_pretrained(self.work / "rope")
        ids, _ = ref.make_ids(16, model.config.vocab_size, 21)
        exact = ref.logits_of(ref.lifted(model), ids)
        cut = dict(chunk=8, page=4)
        fine = ref.run_dump(DUMP, self.work / "rope", self.work, ids, compute="fp64", **cut)["logits"]
        single = ref.run_dump(DUMP, self.work / "rope", self.work, ids, **cut)["logits"]
        self.assertLessEqual(ref.distance(fine, exact), FP64)
        self.assertLessEqual(ref.distance(single, ref.logits_of(model, ids)), FP32)

        # RoPE of neighbouring pairs is half-split RoPE of heads whose even dimensions come first.
        interleaved = ref.lifted(model)
        order = torch.arange(128).view(64, 2).t().flatten()
        with torch.no_grad():
            for attention in (layer.self_attn for layer in interleaved.model.layers):
                for p in (*attention.q_proj.parameters(), *attention.k_proj.parameters()):
                    p.copy_(p.view(-1, 128, *p.shape[1:])[:, order].reshape(p.shape))
        other_base = ref.lifted(model)
        other_base.model.rotary_emb = ref.RopeInDouble(128, 1e4)
        for name, wrong in (("interleaved", interleaved), ("base 1e4", other_base)):
            self.assertGreater(ref.distance(ref.logits_of(wrong, ids), exact), 1e-2, f"{name} would not be seen")

    def test_one_token_has_no_label(self):
        model = ref.make_model(31, heads=4, kv_heads=2, hidden=16)
        model.save_pretrained(self.work / "one")
        ids, labels = ref.make_ids(1, model.config.vocab_size, 31)
        ours = ref.run_dump(DUMP, self.work / "one", self.work, ids, labels)
        self.assertEqual((ours["num_labels"], ours["loss_sum"], ours["loss_mean"]), (0, 0.0, 0.0))
        self.assertLessEqual(ref.distance(ours["logits"], ref.logits_of(model, ids)), FP32)
        self.assertEqual(ours["grads"].keys(), {name for name, _ in model.named_parameters()})
        for name, grad in ours["grads"].items():
            self.assertEqual(grad.abs().max().item(), 0.0, name)

    def test_labels_default_to_the_next_ids(self):
        model = ref.make_model(41, heads=4, kv_heads=2, hidden=16)
        model.save_pretrained(self.work / "labels")
        ids, labels = ref.make_ids(23, model.config.vocab_size, 41, holes=False)
        ours = ref.run_dump(DUMP, self.work / "labels", self.work, ids, chunk=8, page=4)
        ref.check(ours, ref.run_model(model, ids, labels), FP32, "labels not given")
        self.assertEqual(ours["num_labels"], 22)

    @staticmethod
    def drop_key(path, key):
        lines = [line for line in path.read_text().splitlines() if f'"{key}"' not in line]
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
