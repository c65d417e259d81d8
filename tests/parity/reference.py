"""Random small Qwen2 models, what transformers computes of them, and what parity_dump does.

Two references:
  transformers   as published, eager attention, fp32.
  lifted         the same model in double precision. transformers computes RoPE, RMSNorm, softmax and the loss in fp32
                 whatever the model's dtype; these four are replaced by double-precision ones. The gradient test checks
                 that the two references agree, so lifting changed no formula.

Rule of every comparison: |a - b| <= tol * |b|, Frobenius norm per tensor, without a floor. The exception are gradients
that are zero by mathematics (of q and k when every query that counts sees one key; |b| <= 1e-14 |all gradients| in
double precision): each side may hold rounding there, |a| <= 4 u |all gradients|, u the unit roundoff of `a`.
"""
import json
import math
import subprocess
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IGNORED = -100

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


# --- models and sequences ---------------------------------------------------------------------------------------------
def make_model(seed, heads, kv_heads, hidden, intermediate=22, head_dim=None, layers=2, vocab=29, tied=False,
               theta=1e4):
    """Every parameter random, norms and biases too, so that no term of the mathematics can hide."""
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, vocab_size=vocab,
                 num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
                 max_position_embeddings=4096, rms_norm_eps=1e-5,
                 rope_parameters={"rope_type": "default", "rope_theta": theta})
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    model = Qwen2ForCausalLM(Qwen2Config(attn_implementation="eager", **sizes)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(1 + 0.3 * noise)
            elif p.dim() == 1 or "embed" in name:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise / math.sqrt(p.shape[1]))
    return model


def make_ids(n, vocab, seed, holes=True):
    """ids [n] and shifted labels [n]: the last one is ignored, with `holes` every fifth too."""
    ids = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([ids[1:], torch.tensor([IGNORED])])
    if holes and n > 2:
        labels[::5] = IGNORED
    return ids, labels


# --- the two references -----------------------------------------------------------------------------------------------
def attention_in_double(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Causal attention of [1, Hq, N, D] queries and [1, Hkv, N, D] keys; `score_noise` is for score_response()."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if getattr(module, "score_noise", None) is not None:
        unit, generator = module.score_noise
        size = query.detach().norm(dim=-1)[..., :, None] * key.detach().norm(dim=-1)[..., None, :] * scaling
        scores = scores + unit * size * torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
    n = query.shape[2]
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class RopeInDouble(torch.nn.Module):
    def __init__(self, dim, theta):
        super().__init__()
        self.inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


ALL_ATTENTION_FUNCTIONS.register("double", attention_in_double)


def lifted(model):
    """A double-precision copy of `model`."""
    config = Qwen2Config(**model.config.to_dict())
    config._attn_implementation = "double"
    copy = Qwen2ForCausalLM(config).double()
    copy.load_state_dict(model.state_dict())
    for parent in list(copy.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen2RMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    head_dim = copy.model.layers[0].self_attn.head_dim
    copy.model.rotary_emb = RopeInDouble(head_dim, config.rope_parameters["rope_theta"])
    return copy


def run_model(model, ids, labels):
    """Loss, logits and gradients of the mean loss, as transformers' own loss (if not lifted) and autograd give them."""
    model.zero_grad(set_to_none=True)
    if model.dtype == torch.float64:
        out = model(input_ids=ids[None], use_cache=False)
        loss = torch.nn.functional.cross_entropy(out.logits[0], labels, ignore_index=IGNORED)
    else:
        # The model shifts labels itself: position i predicts its label i + 1.
        unshifted = torch.cat([torch.tensor([IGNORED]), labels[:-1]])
        out = model(input_ids=ids[None], labels=unshifted[None], use_cache=False)
        loss = out.loss
    loss.backward()
    count = int((labels != IGNORED).sum())
    return {
        "loss_mean": loss.item(),
        "loss_sum": loss.item() * count,
        "num_labels": count,
        "logits": out.logits[0].detach(),
        "grads": {name: p.grad.detach().clone() for name, p in model.named_parameters()},
    }


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def attention_entropies(model, ids):
    """Mean entropy of the attention weights in nats, per layer of a lifted model."""
    entropies = []

    def record(_module, _inputs, outputs):
        entropies.append(torch.special.entr(outputs[1]).sum(-1).mean().item())

    hooks = [layer.self_attn.register_forward_hook(record) for layer in model.model.layers]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return entropies


def score_response(model, ids, labels, unit, seeds):
    """How much every quantity of a lifted model moves, at worst over random draws from `seeds`, when each attention
    score q_i . k_j / sqrt(D) gets an independent error of standard deviation `unit` * |q_i| |k_j| / sqrt(D). With the
    unit roundoff of a format, that is what keeping q and k in that format costs, however exact everything else is."""
    exact = run_model(model, ids, labels)
    worst = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for layer in model.model.layers:
            layer.self_attn.score_noise = (unit, generator)
        moved = distances(run_model(model, ids, labels), exact)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in moved.items()}
    for layer in model.model.layers:
        layer.self_attn.score_noise = None
    return worst


# --- parity_dump ------------------------------------------------------------------------------------------------------
def call_dump(program, folder, work, ids, labels=None, name="out", **options):
    """Runs parity_dump; returns the finished process and the path of its output."""
    work = Path(work)
    tensors = {"ids": ids} if labels is None else {"ids": ids, "labels": labels}
    save_file(tensors, work / f"{name}.ids.safetensors")
    out = work / f"{name}.safetensors"
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    done = subprocess.run([program, str(folder), str(work / f"{name}.ids.safetensors"), str(out), *arguments],
                          capture_output=True, text=True, timeout=60)
    return done, out


def run_dump(program, folder, work, ids, labels=None, name="out", **options):
    done, out = call_dump(program, folder, work, ids, labels, name, **options)
    if done.returncode != 0:
        raise AssertionError(f"parity_dump {folder} ended with {done.returncode}: {done.stderr}")
    tensors = load_file(out)
    out.unlink()
    result = {key: tensors[key].item() for key in ("loss_mean", "loss_sum", "eval_loss_sum", "num_labels")}
    result["logits"] = tensors["logits"]
    result["grads"] = {key[5:]: value for key, value in tensors.items() if key.startswith("grad.")}
    result["stderr"] = done.stderr
    return result


# --- comparison -------------------------------------------------------------------------------------------------------
def distance(a, b):
    """|a - b| / |b|; infinite if a holds NaN."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    if a.shape != b.shape:
        raise AssertionError(f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    value = ((a - b).norm() / b.norm()).item() if b.norm() > 0 else a.norm().item()
    return value if math.isfinite(value) else math.inf


def total_norm(grads):
    return math.sqrt(sum(g.double().pow(2).sum().item() for g in grads.values()))


def zero_gradients(exact):
    """Names of the gradients that are zero by mathematics, from a lifted run."""
    total = total_norm(exact["grads"])
    return {name for name, grad in exact["grads"].items() if grad.norm().item() <= 1e-14 * total}


def distances(ours, theirs, zeros=frozenset()):
    """Distance of every quantity, by name; gradients in `zeros` are checked by themselves."""
    if ours["grads"].keys() != theirs["grads"].keys():
        raise AssertionError(f"gradients of {sorted(ours['grads'].keys() ^ theirs['grads'].keys())} on one side only")
    if ours["num_labels"] != theirs["num_labels"]:
        raise AssertionError(f"{ours['num_labels']} and {theirs['num_labels']} labels")
    result = {key: distance(ours[key], theirs[key]) for key in ("loss_mean", "loss_sum", "logits")}
    if "eval_loss_sum" in ours:
        result["eval_loss_sum"] = distance(ours["eval_loss_sum"], theirs["loss_sum"])
    total = total_norm(theirs["grads"])
    for name, grad in theirs["grads"].items():
        mine = ours["grads"][name]
        if name not in zeros:
            result[f"grad {name}"] = distance(mine, grad)
        elif not mine.double().norm() <= 2 * torch.finfo(mine.dtype).eps * total:  # eps = 2 u
            raise AssertionError(f"grad {name} is zero by mathematics, but has norm {mine.norm():.3e} of {total:.3e}")
    return result


def check(ours, theirs, tolerance, what, zeros=frozenset()):
    """Every quantity within its tolerance (a number or a dictionary of them). Returns the worst loss, logits, grad."""
    found = distances(ours, theirs, zeros)
    for name, value in found.items():
        allowed = tolerance[name] if isinstance(tolerance, dict) else tolerance
        if not value <= allowed:
            raise AssertionError(f"{what}: {name} differs by {value:.3e}, allowed {allowed:.3e}")
    losses = [value for name, value in found.items() if name.startswith("loss") or name == "eval_loss_sum"]
    return max(losses), found["logits"], max(value for name, value in found.items() if name.startswith("grad "))


def tensor_set(folder):
    """{name: (dtype, shape)} of the weights of a single-file Hugging Face folder, and the file's metadata."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__", {})
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}, metadata
