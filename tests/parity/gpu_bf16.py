#!/usr/bin/env python3
"""bf16 gradients on a GPU at real width: ours may be no farther from fp32 than those of transformers' own bf16 run.

usage: gpu_bf16.py PARITY_DUMP [TOKENS]

Two layers of Qwen2.5-7B's width (a vocabulary of 32,768, to keep logits small), random weights, dense attention. The
reference is transformers in fp32 (TF32 off) with the same bf16-valued weights. Prints relative distances of all
gradients together and of the worst tensor, and fails where ours are larger. Needs a GPU and some 60 GiB of its memory.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IGNORED = -100


def attention_without_groups(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """PyTorch's memory-efficient attention, which needs a key head for every query head: in fp32 the plain one would
    store N x N scores."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("without_groups", attention_without_groups)


def make_model():
    torch.manual_seed(5)
    config = Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=2, num_attention_heads=28,
                         num_key_value_heads=4, vocab_size=32768, rope_theta=1e6, rms_norm_eps=1e-6,
                         tie_word_embeddings=False, max_position_embeddings=1 << 20, attn_implementation="sdpa")
    model = Qwen2ForCausalLM(config).cuda().bfloat16()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.5)
    return model


def gradients(model, ids):
    """Loss and gradients of the mean loss, from transformers' own loss and autograd."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.detach().float().cpu() for name, p in model.named_parameters()}


def distance(ours, reference):
    """Relative distance of all gradients together, and the worst tensor's with its name."""
    error = {name: (ours[name].double() - g.double()).norm().item() for name, g in reference.items()}
    norm = {name: g.double().norm().item() for name, g in reference.items()}
    total = sum(e * e for e in error.values()) ** 0.5 / sum(n * n for n in norm.values()) ** 0.5
    return total, max((error[name] / norm[name], name) for name in reference)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    n = int(sys.argv[2]) if len(sys.argv) == 3 else 16384
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model()
    ids = torch.randint(32768, (n,), generator=torch.Generator().manual_seed(7)).cuda()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model.save_pretrained(work / "model")
        theirs_loss, theirs = gradients(model, ids)
        model.set_attn_implementation("without_groups")
        exact_loss, exact = gradients(model.float(), ids)
        del model
        torch.cuda.empty_cache()
        save_file({"ids": ids.cpu()}, work / "ids.safetensors")
        subprocess.run([sys.argv[1], work / "model", work / "ids.safetensors", work / "out.safetensors", "--gpu",
                        "--no-eval", "--compute", "bf16", "--chunk", "4096", "--page", "128", "--row-tile", "2048"],
                       check=True, timeout=300)
        out = load_file(work / "out.safetensors")
    ours = {name.removeprefix("grad."): g for name, g in out.items() if name.startswith("grad.")}
    assert ours.keys() == exact.keys(), ours.keys() ^ exact.keys()
    our_distance, their_distance = distance(ours, exact), distance(theirs, exact)
    print(f"{n} tokens; loss: fp32 {exact_loss:.6f}, transformers bf16 {theirs_loss:.6f}, "
          f"ours bf16 {out['loss_mean'].item():.6f}")
    for who, (total, (worst, name)) in (("transformers bf16", their_distance), ("ours bf16", our_distance)):
        print(f"{who:18} all gradients {total:.3e}, worst tensor {worst:.3e} ({name})")
    if our_distance[0] > their_distance[0] or our_distance[1][0] > their_distance[1][0]:
        sys.exit("error: ours are farther from fp32")


if __name__ == "__main__":
    main()
