#!/usr/bin/env python3
"""bf16 gradients at real width: ours may be no farther from fp32 than those of transformers' own bf16 run.

usage: test_bf16.py PARITY_DUMP [OOMB] [TOKENS]

Two layers of Qwen2.5-7B's width (a vocabulary of 32,768, to keep logits small), random weights, dense attention, on the
GPU: some 60 GiB of its memory for 16,384 tokens. Without a GPU a small model on the CPU. The reference is transformers
in fp32 (TF32 off) with the same bf16-valued weights. Prints relative distances of all gradients together and of the
worst tensor; all together must not be farther, and no tensor much: the two round differently, tensor by tensor.
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

PER_TENSOR = 1.5


def attention_without_groups(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """PyTorch's memory-efficient attention, which needs a key head for every query head: in fp32 the plain one would
    store N x N scores."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if GPU else SDPBackend.MATH):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("without_groups", attention_without_groups)


GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
VOCAB = 32768 if GPU else 509
SIZES = (dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4) if GPU else
         dict(hidden_size=448, intermediate_size=640, num_attention_heads=14, num_key_value_heads=2, head_dim=32))


def make_model():
    """bf16 weights, but RoPE's frequencies in fp32 as transformers loads them: model.bfloat16() would round those, too."""
    torch.manual_seed(5)
    config = Qwen2Config(num_hidden_layers=2, vocab_size=VOCAB, rms_norm_eps=1e-6, tie_word_embeddings=False,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                         max_position_embeddings=1 << 20, attn_implementation="sdpa", **SIZES)
    model = Qwen2ForCausalLM(config).bfloat16().to(DEVICE)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(DEVICE)
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


def distances(ours, reference):
    """Relative distance of all gradients together, and of every tensor. Tensors below a thousandth of all gradients are
    measured against that: of a key bias, whose gradient nearly cancels, bf16 leaves little."""
    error = {name: (ours[name].double() - g.double()).norm().item() for name, g in reference.items()}
    norm = {name: g.double().norm().item() for name, g in reference.items()}
    together = sum(n * n for n in norm.values()) ** 0.5
    total = sum(e * e for e in error.values()) ** 0.5 / together
    return total, {name: error[name] / max(norm[name], 1e-3 * together) for name in reference}


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    n = next((int(text) for text in sys.argv[2:] if text.isdigit()), 16384 if GPU else 1100)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model()
    ids = torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model.save_pretrained(work / "model")
        theirs_loss, theirs = gradients(model, ids)
        model.set_attn_implementation("without_groups")
        exact_loss, exact = gradients(model.float(), ids)
        del model
        if GPU:
            torch.cuda.empty_cache()
        save_file({"ids": ids.cpu()}, work / "ids.safetensors")
        cut = ["--chunk", "4096", "--row-tile", "2048", "--gpu"] if GPU else ["--chunk", "512", "--row-tile", "128"]
        subprocess.run([sys.argv[1], work / "model", work / "ids.safetensors", work / "out.safetensors", "--no-eval",
                        "--compute", "bf16", "--page", "128", *cut], check=True, timeout=300)
        out = load_file(work / "out.safetensors")
    ours = {name.removeprefix("grad."): g for name, g in out.items() if name.startswith("grad.")}
    assert ours.keys() == exact.keys(), ours.keys() ^ exact.keys()
    (our_total, our_tensors), (their_total, their_tensors) = distances(ours, exact), distances(theirs, exact)
    print(f"{n} tokens; loss: fp32 {exact_loss:.6f}, transformers bf16 {theirs_loss:.6f}, "
          f"ours bf16 {out['loss_mean'].item():.6f}")
    ratio, worst = max((our_tensors[name] / their_tensors[name], name) for name in exact)
    print(f"all gradients: transformers bf16 {their_total:.3e}, ours bf16 {our_total:.3e}; worst tensor against "
          f"transformers' {worst}: {our_tensors[worst]:.3e} / {their_tensors[worst]:.3e}")
    if our_total > their_total or ratio > PER_TENSOR:
        sys.exit(f"error: ours are farther from fp32 (allowed: all together no farther, a tensor {PER_TENSOR} times)")


if __name__ == "__main__":
    main()
