#!/usr/bin/env python3
"""What a user would run instead: Hugging Face Transformers, forward and backward of one long sequence on one device.

usage: tests/bench/transformers_baseline.py MODEL.json --lengths 16384,32768,65536 [--variants sdpa,best,compiled]

The weights are random, made on the device; nothing is downloaded. Gradient checkpointing is on, there is no optimizer.
Variants:
  sdpa      as it comes: the model's own loss over all logits, PyTorch's choice of attention
  best      the cross-entropy over slices of rows (logits of the whole sequence never exist), cuDNN attention, and
            reentrant or non-reentrant checkpointing, whichever is faster (both are reported)
  compiled  best, with torch.compile over every MLP and norm

One JSON line per variant and length: tokens_per_second (of the median), seconds of every repeat, loss, grad_norm,
peak_bytes; "out_of_memory": true where it does not fit, "error" where a library refuses. Timed with the device
synchronised, after --warmup untimed repeats.
"""
import argparse
import gc
import json
import math
import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OUT_OF_MEMORY = torch.OutOfMemoryError


def positive_list(text):
    values = [int(part) for part in text.split(",")]
    if any(value < 2 for value in values):
        raise argparse.ArgumentTypeError("a length is at least 2 tokens")
    return values


def variant_list(text):
    values = text.split(",")
    if unknown := [value for value in values if value not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: not one of {', '.join(VARIANTS)}")
    return values


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="Hugging Face config.json of the Qwen2 family")
    parser.add_argument("--lengths", type=positive_list, required=True, help="tokens, separated by commas")
    parser.add_argument("--variants", type=variant_list, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, help="instead of the config's number")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--loss-rows", type=int, default=1024, help="rows of logits that exist at once (best, compiled)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.warmup < 0:
        parser.error("--repeats is at least 1 and --warmup at least 0")
    return arguments


def make_model(arguments, length):
    config = transformers.AutoConfig.from_pretrained(arguments.config)
    if arguments.layers:
        config.num_hidden_layers = arguments.layers
        config.layer_types = None  # derived from the number of layers
        config = type(config).from_dict({key: value for key, value in config.to_dict().items() if value is not None})
    config.max_position_embeddings = max(config.max_position_embeddings, length)
    config.use_cache = False
    torch.manual_seed(arguments.seed)
    # Made where it runs: 7 billion parameters in fp32 on the host would take minutes and 30 GB.
    previous = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[arguments.dtype])
    try:
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(previous)
    model.train()
    return model


# ---- losses ----------------------------------------------------------------------------------------------------------

def whole_loss(model, ids, _rows):
    """Transformers' own: logits of all tokens at once, the loss in fp32."""
    return model(input_ids=ids, labels=ids).loss


def sliced_loss(model, ids, rows):
    """Mean cross-entropy without more than `rows` rows of logits at any time, forward or backward."""
    hidden = model.model(input_ids=ids).last_hidden_state[0, :-1]
    labels, weight = ids[0, 1:], model.lm_head.weight

    def of_slice(part, part_labels):
        return F.cross_entropy(F.linear(part, weight).float(), part_labels, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for begin in range(0, hidden.shape[0], rows):
        part = slice(begin, begin + rows)
        total = total + checkpoint(of_slice, hidden[part], labels[part], use_reentrant=False)
    return total / labels.numel()


# ---- variants --------------------------------------------------------------------------------------------------------

def any_attention():
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                        SDPBackend.MATH])


def cudnn_attention():
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.FLASH_ATTENTION)


def compile_parts(model):
    for module in model.modules():
        if type(module).__name__.endswith(("MLP", "RMSNorm")):
            module.compile(dynamic=False)


# name -> (loss, attention, values of use_reentrant that are tried, what else is done to the model)
VARIANTS = {
    "sdpa": (whole_loss, any_attention, (False,), lambda model: None),
    "best": (sliced_loss, cudnn_attention, (False, True), lambda model: None),
    "compiled": (sliced_loss, cudnn_attention, (False, True), compile_parts),
}


# ---- measuring -------------------------------------------------------------------------------------------------------

def synchronise(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_bytes(device):
    """Device memory since the last reset; on a CPU the process's, since its start."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gradient_norm(model):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))


def one_pass(model, ids, loss_of, attention, rows, device):
    for parameter in model.parameters():
        parameter.grad = None
    synchronise(device)
    start = time.perf_counter()
    with attention():
        loss = loss_of(model, ids, rows)
        loss.backward()
    synchronise(device)
    return time.perf_counter() - start, loss.item()


def measure(arguments, variant, length, reentrant):
    """One variant in one form at one length; what it needs is free again afterwards."""
    loss_of, attention, _, change = VARIANTS[variant]
    device = arguments.device
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    model = make_model(arguments, length)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # else nothing under the first checkpoint would get a gradient
    change(model)
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)
    seconds, losses = [], []
    for repeat in range(arguments.warmup + arguments.repeats):
        taken, loss = one_pass(model, ids, loss_of, attention, arguments.loss_rows, device)
        if repeat >= arguments.warmup:
            seconds.append(taken)
            losses.append(loss)
    return {"reentrant": reentrant, "seconds": seconds,
            "tokens_per_second": length / statistics.median(seconds),
            "tokens_per_second_min": length / max(seconds), "tokens_per_second_max": length / min(seconds),
            "loss": losses, "grad_norm": gradient_norm(model), "peak_bytes": peak_bytes(device),
            "parameters": sum(p.numel() for p in model.parameters()), "layers": model.config.num_hidden_layers}


def attempt(arguments, variant, length, reentrant):
    try:
        return measure(arguments, variant, length, reentrant)
    except OUT_OF_MEMORY:
        return {"reentrant": reentrant, "out_of_memory": True}
    except RuntimeError as error:  # such as a shape that cuDNN does not take
        return {"reentrant": reentrant, "error": str(error).splitlines()[0]}


def clear(device):
    gc.collect()
    torch._dynamo.reset()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def machine(device):
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {"device": device, "gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__,
            "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def main():
    arguments = parse_arguments()
    failed = False
    for length in arguments.lengths:
        for variant in arguments.variants:
            forms = []
            for reentrant in VARIANTS[variant][2]:
                forms.append(attempt(arguments, variant, length, reentrant))
                clear(arguments.device)  # after the exception and its frames are gone
            best = max(forms, key=lambda form: form.get("tokens_per_second", 0.0))
            line = {"variant": variant, "length": length, "dtype": arguments.dtype, "warmup": arguments.warmup,
                    "repeats": arguments.repeats, **machine(arguments.device), **best}
            if len(forms) > 1:
                line["forms"] = forms
            failed = failed or "error" in best
            print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
