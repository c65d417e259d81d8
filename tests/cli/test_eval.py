"""`oomb eval`: the held-out loss of a checkpoint."""
import json
import math

import oomb_cli
from oomb_cli import CliTest


class Eval(CliTest):
    def evaluate(self, *settings):
        result = self.oomb("eval", "run.yaml", "--json", settings=settings)
        self.assertEqual(result.code, 0, result)
        self.assertRegex(result.out, r"\A\{[^\n]*\}\n\Z")
        answer = json.loads(result.out)
        self.assertEqual(set(answer), {"loss", "tokens", "checkpoint"})
        self.assertTrue(math.isfinite(answer["loss"]))
        return answer

    def test_no_checkpoint(self):
        result = self.oomb("eval", "run.yaml", "--json")
        self.assertEqual(result.code, 2, result)
        self.assertEqual(result.out, "")
        self.expect_one_line(result, "checkpoints", "no checkpoint to evaluate", "checkpoint.resume")
        self.assertFalse(self.path("out").exists())

    def test_no_held_out_data(self):
        self.train("train.steps=1", "data.holdout_fraction=0")
        result = self.oomb("eval", "run.yaml", settings=["data.holdout_fraction=0"])
        self.assertEqual(result.code, 2, result)
        self.expect_one_line(result, "held-out")

    def test_copy_task(self):
        self.write_model("model.json", vocab_size=8, num_hidden_layers=1)
        self.write_run(data={"kind": "copy", "copy": {"alphabet": 8}}, eval={"sequences": 5},
                       train={"steps": 60, "learning_rate": 0.02})
        self.train()
        before = self.snapshot()
        one, two = self.evaluate("train.threads=1"), self.evaluate("train.threads=2")
        self.assertEqual(self.snapshot(), before)
        self.assertEqual(one["checkpoint"], str(self.checkpoint(60)))
        # 61 tokens: the first 31 are random and have no labels, nor has the last one.
        self.assertEqual(one["tokens"], 5 * 29)
        self.assertEqual(two["tokens"], one["tokens"])
        # Threads may split sums otherwise: single roundings of fp32 (6e-8) in sums of at most 61 terms.
        self.assertAlmostEqual(two["loss"], one["loss"], delta=1e-5 * one["loss"])
        # Trained on it: not worse than guessing, and not the loss of the initial weights.
        self.assertLess(one["loss"], math.log(8) * 1.05)
        # The same numbers in the same order are the same bits.
        self.assertEqual(self.evaluate("train.threads=1"), one)
        # Without --json it is one line for people.
        shown = self.oomb("eval", "run.yaml")
        self.assertIn(f"held-out loss {one['loss']:.6f} over {one['tokens']} tokens", shown.out)

    def test_during_training_it_is_the_same_number(self):
        """eval.every in training and `oomb eval` afterwards; fp64, so selection has no ties that rounding decides."""
        self.write_run(train={"steps": 5, "compute_dtype": "fp64"}, eval={"every": 2, "sequences": 3})
        self.train("checkpoint.every=2", "checkpoint.keep=9")
        lines = self.metrics()
        self.assertEqual([line["step"] for line in lines if "eval_loss" in line], [2, 4, 5])
        for line in lines:
            if "eval_loss" in line:
                self.assertEqual(line["eval_tokens"], 3 * 60)
                answer = self.evaluate(f"checkpoint.resume={self.checkpoint(line['step'])}")
                self.assertEqual(answer["loss"], line["eval_loss"])
        self.assertEqual(len({line["eval_loss"] for line in lines if "eval_loss" in line}), 3)

    def test_weights_of_a_hugging_face_folder(self):
        self.train("train.steps=2")
        answer = self.evaluate()
        made = self.checkpoint(2)
        self.write_run(model={"path": str(made), "config": ""}, run={"dir": "other"})
        other = self.evaluate()
        self.assertIsNone(other["checkpoint"])
        self.assertEqual(other["loss"], answer["loss"])


if __name__ == "__main__":
    oomb_cli.main()
