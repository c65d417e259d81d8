#!/usr/bin/env python3
"""A GPU that others have filled: a clear refusal that names what and how many bytes, or a run that is right.

usage: gpu_memory_full.py OOMB      (needs a GPU and PyTorch)
"""
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

RUN = """
    run: {name: full, dir: %(dir)s}
    model: {config: %(model)s}
    data: {kind: copy, copy: {alphabet: 64}}
    sequence: {length: 16384, chunk: 4096}
    train: {steps: 2, compute_dtype: bf16, device: cuda, learning_rate: 1.0e-5}
    attention: {kind: topk, page_tokens: 128, budget_pages: 16}
"""


def fill(fraction):
    """Takes memory until only 1 - fraction of the device is left."""
    free, total = torch.cuda.mem_get_info()
    wanted = free - int((1 - fraction) * total)
    return torch.empty(max(wanted, 0), dtype=torch.uint8, device="cuda")


def run(oomb, work):
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 1792,
              "intermediate_size": 4736, "num_hidden_layers": 4, "num_attention_heads": 14, "num_key_value_heads": 2,
              "vocab_size": 32768, "max_position_embeddings": 1 << 20, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
              "tie_word_embeddings": False}
    (work / "model.json").write_text(json.dumps(config))
    (work / "run.yaml").write_text(textwrap.dedent(RUN) % {"dir": work / "run", "model": work / "model.json"})
    return subprocess.run([oomb, "train", work / "run.yaml"], capture_output=True, text=True, timeout=300)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.empty(1, device="cuda")
    for fraction in (0.99, 0.97, 0.93, 0.5):
        held = fill(fraction)
        with tempfile.TemporaryDirectory() as folder:
            done = run(sys.argv[1], Path(folder))
        errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
        print(f"{fraction:.0%} full: exit status {done.returncode}; {errors or done.stderr.splitlines()[-2:]}")
        if done.returncode == 0:
            assert fraction < 0.95 and "nan" not in done.stderr.lower()
        else:
            assert done.returncode in (2, 3), done.stderr
            assert fraction > 0.6, "half of the device is enough"
            assert any("device memory" in line and ("GiB" in line or "MiB" in line) for line in errors), done.stderr
        del held
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
