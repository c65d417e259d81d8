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
    "gqa 4/2, head_dim given": (dict(heads=4, kv_heads=2, hidden=20, head_dim=6), "single", [(2, 8, 4), (61, 16, 4), (83, 8, 8)]),
    "gqa 6/1, untied, shards": (dict(heads=6, kv_heads=1, hidden=24, vocab=31), "shards", [(37, 12, 3), (97, 24, 4), (5, 16, 4)]),
    "gqa 7/7, tied": (dict(heads=7, kv_heads=7, hidden=28, tied=True), "single", [(53, 7, 7), (67, 64, 16), (17, 8, 4)]),
    "gqa 4/2, tied, shards": (dict(heads=4, kv_heads=2, hidden=16, tied=True, layers=3), "shards", [(41, 8, 2), (97, 16, 16), (9, 8, 4)]),
    "gqa 14/2, theta 1e6": (dict(heads=14, kv_heads=2, hidden=56, head_dim=8, theta=1e6), "single", [(73, 16, 8), (33, 32, 4)]),
    "gqa 3/1, head_dim 2, one layer": (dict(heads=3, kv_heads=1, hidden=11, head_dim=2, layers=1, vocab=7), "single", [(89, 16, 1), (31, 5, 5)]),
}
FP32 = 1e-5
FP64 = 1e-12


class Gradients(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.work = Path(self.folder.name)

    def tearDown(self):
        self.folder.cleanup()

    def test_random_models(self):
        print(f"\n{'model':32} {'N':>4} {'C':>3} {'P':>3}   fp32: loss    logits   gradient   fp64: loss  logits   gradient")
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
                print(f"{name:32} {n:4} {chunk:3} {page:3}      ", *(f"{v:9.2e}" for v in (*single, *fine)))

    @staticmethod
    def drop_key(path, key):
        lines = [line for line in path.read_text().splitlines() if f'"{key}"' not in line]
        path.write_text("\n".join(lines))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
