"""`oomb bench`: what it measures is there, adds up, and is what was asked for."""
import json
import math
import statistics

import oomb_cli
from oomb_cli import MODEL, CliTest

MEASURES = ("step", "attention", "select", "kernels")


def keys_attended(length, chunk, page, budget):
    """Of all query tokens of a sequence together; budget None: dense."""
    total = 0
    for begin in range(0, length, chunk):
        tokens, past = min(chunk, length - begin), begin // page
        pages = past if budget is None else min(past, budget)
        total += tokens * (tokens + 1) // 2 + tokens * pages * page
    return total


def model_flops(length, keys, parameters):
    weights = parameters - MODEL["vocab_size"] * MODEL["hidden_size"]  # untied: the input table is no product
    width = MODEL["num_hidden_layers"] * MODEL["hidden_size"]  # query heads * head dim
    return 6 * weights * length + 12 * width * keys


class Bench(CliTest):
    def bench(self, measure, *arguments, settings=()):
        before = self.snapshot()
        result = self.oomb("bench", "run.yaml", measure, "--json", *arguments, settings=settings)
        self.assertEqual(result.code, 0, result)
        self.assertRegex(result.out, r"\A\{[^\n]*\}\n\Z")
        self.assertEqual(self.snapshot(), before, "bench wrote files")
        self.assertFalse(self.path("out").exists())
        answer = json.loads(result.out)
        self.assertEqual(answer["bench"], measure)
        self.assertTrue(answer["complete"])
        return answer

    def expect_facts(self, answer, warmup, repeats):
        facts = answer["facts"]
        self.assertEqual((facts["timing"]["warmup"], facts["timing"]["repeats"]), (warmup, repeats))
        machine = facts["machine"]
        self.assertEqual(machine["device"], "cpu")
        self.assertIsNone(machine["gpu"])
        for key in ("torch", "commit"):
            self.assertRegex(machine[key], r"\S", key)
        check = facts["check"]
        self.assertTrue(check["passed"])
        self.assertLessEqual(check["worst_error"], check["bound"])
        self.assertLess(check["bound"], 1e-4)  # fp32
        for key in ("copy_bytes_per_second", "gemm_flops_per_second"):
            self.assertGreater(facts["ceilings"][key], 0)
        self.assertIsNone(facts["ceilings"]["stated_peak_flops"])
        return facts

    def expect_step_row(self, row, length, repeats):
        for key in ("seconds", "pass1_seconds", "pass2_seconds", "optimizer_seconds", "loss", "grad_norm"):
            self.assertEqual(len(row[key]), repeats, key)
            self.assertTrue(all(math.isfinite(value) for value in row[key]), key)
        for whole, *parts in zip(row["seconds"], row["pass1_seconds"], row["pass2_seconds"], row["optimizer_seconds"]):
            self.assertTrue(all(part > 0 for part in parts))
            self.assertLessEqual(sum(parts), whole * (1 + 1e-9))
        self.assertEqual(row["length"], length)
        self.assertAlmostEqual(row["tokens_per_second"] * statistics.median(row["seconds"]), row["tokens"],
                               delta=1e-6 * row["tokens"])
        self.assertLessEqual(row["tokens_per_second_min"], row["tokens_per_second"])
        self.assertLessEqual(row["tokens_per_second"], row["tokens_per_second_max"])
        # Random weights and little training: near a uniform guess over the vocabulary.
        self.assertTrue(all(0 < loss < 1.2 * math.log(MODEL["vocab_size"]) for loss in row["loss"]))
        self.assertTrue(all(norm > 0 for norm in row["grad_norm"]))
        self.assertIsNone(row["mfu"])

    def test_steps_at_several_lengths(self):
        answer = self.bench("step", "--repeats", "3", "--warmup", "1", "--lengths", "61,127,9999",
                            settings=["train.sequences_per_step=2"])
        facts = self.expect_facts(answer, 1, 3)
        self.assertEqual([row["length"] for row in answer["rows"]], [61, 127, 9999])
        for row in answer["rows"]:
            self.expect_step_row(row, row["length"], 3)
            self.assertEqual(row["tokens"], 2 * row["length"])
            keys = keys_attended(row["length"], 16, 4, 3)
            self.assertEqual(row["model_flops"],
                             2 * model_flops(row["length"], keys, facts["mode"]["parameters"]))
            # The text has 9,001 bytes: the longest one cannot come from it, and that is said.
            random_ids = any("random ids" in note for note in row["notes"])
            self.assertEqual(random_ids, row["length"] > 9001, row["notes"])
        # Parameters move: a step that did nothing would give one loss for one sequence.
        self.assertEqual(len(set(answer["rows"][2]["loss"])), 3)

    def test_the_same_steps_as_training(self):
        """Losses and gradient norms of the bench are those of a training run: no work is left out."""
        row = self.bench("step", "--repeats", "3", "--warmup", "1", settings=["train.compute_dtype=fp64"])["rows"][0]
        self.train("train.compute_dtype=fp64", "train.steps=4")
        trained = self.metrics()[1:]
        self.assertEqual(row["loss"], [line["loss"] for line in trained])
        self.assertEqual(row["grad_norm"], [line["grad_norm"] for line in trained])

    def test_dense_counts_the_causal_half(self):
        answer = self.bench("step", "--repeats", "1", "--warmup", "0", settings=["attention.kind=dense"])
        self.expect_facts(answer, 0, 1)
        self.assertEqual(answer["rows"][0]["model_flops"],
                         model_flops(61, 61 * 62 // 2, answer["facts"]["mode"]["parameters"]))

    def expect_op_rows(self, rows, repeats):
        for row in rows:
            self.assertLessEqual({"op", "shape", "seconds"}, set(row))
            if "difference" in row["op"]:
                continue
            self.assertEqual(len(row["seconds"]), repeats, row)
            middle = statistics.median(row["seconds"])
            self.assertGreater(middle, 0, row)
            for work in ("bytes", "flops"):
                if work in row:
                    self.assertAlmostEqual(row[work] / middle, row[f"{work}_per_second"],
                                           delta=1e-6 * row[f"{work}_per_second"])
                    self.assertGreater(row["share"], 0)

    def test_attention(self):
        answer = self.bench("attention", "--repeats", "2", "--warmup", "1", "--lengths", "16,61")
        self.expect_facts(answer, 1, 2)
        self.expect_op_rows(answer["rows"], 2)
        # One chunk has no past pages.
        names = [row["op"] for row in answer["rows"]]
        own, both = ["own chunk forward", "own chunk backward"], "own chunk + past pages"
        self.assertEqual(names[:2], own)
        self.assertEqual(names[2:6], own + [f"{both} forward", f"{both} backward"])
        self.assertEqual(len(names), 8)
        rows = {row["op"]: row for row in answer["rows"][2:]}
        # 16 queries of 4 heads of 4 dimensions; 3 pages of 4 tokens.
        self.assertEqual(rows["own chunk forward"]["flops"], 4 * 16 * (16 * 17 // 2))
        self.assertEqual(rows[f"{both} backward"]["flops"], 10 * 16 * (16 * 17 // 2 + 16 * 3 * 4))

    def test_selection(self):
        answer = self.bench("select", "--repeats", "2", "--warmup", "0")
        self.expect_op_rows(answer["rows"], 2)
        # 61 tokens in chunks of 16: 12 full pages before the last chunk; then 4 and 16 times the length.
        shapes = list(dict.fromkeys(row["shape"] for row in answer["rows"]))
        self.assertEqual(shapes, ["16 queries, 12 pages", "16 queries, 60 pages", "16 queries, 240 pages"])
        self.assertEqual(len(answer["rows"]), 12)

    def test_kernels(self):
        answer = self.bench("kernels", "--repeats", "2", "--warmup", "0")
        self.expect_op_rows(answer["rows"], 2)
        rows = {row["op"]: row for row in answer["rows"]}
        self.assertEqual(rows["swiglu"]["bytes"], 3 * 4 * 16 * MODEL["intermediate_size"])
        self.assertEqual(rows["wgrad down"]["flops"], 2 * 16 * MODEL["intermediate_size"] * MODEL["hidden_size"])

    def test_text(self):
        for measure in MEASURES:
            result = self.oomb("bench", "run.yaml", measure, "--repeats", "1", "--warmup", "0")
            self.assertEqual(result.code, 0, result)
            for needle in ("machine ", "mode ", "ceilings ", "double precision", "allowed"):
                self.assertIn(needle, result.out)
        self.assertFalse(self.path("out").exists())

    def test_bad_arguments(self):
        for arguments, needles in (
                (["walk"], ["WHAT", "walk", "step", "kernels"]),
                (["step", "--repeats", "0"], ["--repeats", "0"]),
                (["step", "--repeats", "few"], ["--repeats", "few"]),
                (["step", "--warmup", "-1"], ["--warmup", "-1"]),
                (["step", "--lengths", "0"], ["--lengths", "0"]),
                (["step", "--lengths", "64,x"], ["--lengths", "x"]),
                (["kernels", "--lengths", "64"], ["--lengths", "sequence.chunk"]),
                (["select", "--lengths", "16"], ["select", "16 tokens", "budget_pages"]),
                (["select", "--set", "attention.kind=dense"], ["attention.kind", "topk"]),
                (["step", "--set", "topology.workers=2"], ["topology.workers", "allowed: 1"]),
                (["step", "--set", "model.config=nowhere.json"], ["nowhere.json"])):
            with self.subTest(arguments):
                result = self.oomb("bench", "run.yaml", *arguments)
                self.assertEqual(result.code, 2, result)
                self.assertEqual(result.out, "")
                self.expect_one_line(result, *needles)
                self.assertFalse(self.path("out").exists())

    def test_what_was_measured_before_a_failure_is_kept(self):
        result = self.oomb("bench", "run.yaml", "step", "--json", "--repeats", "1", "--warmup", "0", "--lengths",
                           "61,99991", settings=["pages.host_bytes=1000000"])
        self.assertEqual(result.code, 2, result)
        self.expect_one_line(result, "99991 tokens", "pages.host_bytes")
        answer = json.loads(result.out)
        self.assertFalse(answer["complete"])
        self.assertEqual([row["length"] for row in answer["rows"]], [61])


if __name__ == "__main__":
    oomb_cli.main()
