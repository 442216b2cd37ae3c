"""Trains the demo's tokenizer and model from scratch on the CPU and writes the folder `model`.

    python train.py --minutes 30

The model is a small Llama. Each batch holds rows of one task and of about the same length; the chat
prefix that they share is run once per batch and its keys and values are reused by every row.
"""

import argparse
import json
import math
import platform
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import evaluate
import generate
import tasks

SEED = 11
VOCABULARY = 2_048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TOKENS_PER_BATCH = 2_048
PEAK_RATE = 2e-3
WARMUP_SHARE = 0.03
# Predicting the ticket itself teaches the language; the answer must not drown in it.
PROMPT_WEIGHT = 0.3

# What a token of a row is: the row's own text, its answer, or text that a program puts there and the model never writes.
OWN, ANSWER, FORCED = range(3)


class Row(NamedTuple):
    """The tokens of a row behind the shared prefix, and what each of them is."""

    ids: list
    kinds: list

    @classmethod
    def of(cls, *parts):
        """The row of parts (tokens, kind), in their order."""
        ids = [token for tokens, _ in parts for token in tokens]
        return cls(ids, [kind for tokens, kind in parts for _ in tokens])


class Log:
    """Prints lines and keeps them in a file."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")

    def __call__(self, line):
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def train_tokenizer(texts, folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIALS[:2],
        clean_up_tokenization_spaces=False,
        model_max_length=1_024,
    )
    wrapped.chat_template = tasks.CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def new_model(tokenizer):
    end, stop, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>", "<|pad|>"))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1_024,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[stop, end], pad_token_id=pad)
    return model


def encode_rows(tokenizer, system, pairs):
    """Token ids of the shared prefix, and the rows."""
    prefix = tokenizer.encode(tasks.prefix_text(system))
    users = tokenizer([tasks.row_text(user) for user, _ in pairs])["input_ids"]
    answers = tokenizer([answer + "<|im_end|>" for _, answer in pairs])["input_ids"]
    # Tokens must not depend on where the text was cut, or training would not fit real prompts.
    for (user, answer), own, tail in list(zip(pairs, users, answers))[:200]:
        chat = [("system", system), ("user", user), ("assistant", answer)]
        whole = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat], return_dict=False
        )
        newline = tokenizer.encode("\n")
        assert whole == prefix + own + tail + newline, "the pieces and the whole chat are tokenised differently"
    return prefix, [Row.of((own, OWN), (tail, ANSWER)) for own, tail in zip(users, answers)]


def make_batches(rows, rng):
    """Rows of similar length together, so that hardly any padding is computed."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), rng.random()))
    batches, start = [], 0
    while start < len(order):
        end = start
        while end < len(order):
            longest = len(rows[order[end]].ids)
            if longest * (end + 1 - start) > TOKENS_PER_BATCH:
                break
            end += 1
        batches.append([rows[i] for i in order[start:end]])
        start = end
    return batches


def batch_loss(model, prefix, rows, pad):
    """Mean loss of the rows' own text and of their answers, and the number of tokens computed."""
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    kinds = torch.full((len(rows), length), FORCED)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        kinds[i, : len(row.ids)] = torch.tensor(row.kinds)
    is_own, is_answer = (kinds == OWN).float(), (kinds == ANSWER).float()

    cache = model(torch.tensor([prefix]), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(rows))
    # Padding is on the right, where causal attention keeps it out of everything that is scored.
    logits = model(ids, past_key_values=cache, use_cache=True).logits
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    own_loss = (loss * is_own[:, 1:]).sum() / is_own[:, 1:].sum()
    answer_loss = (loss * is_answer[:, 1:]).sum() / is_answer.sum()
    return own_loss, answer_loss, len(prefix) + sum(len(row.ids) for row in rows)


def rate_at(progress, peak):
    if progress < WARMUP_SHARE:
        return peak * progress / WARMUP_SHARE
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return peak * (0.02 + 0.98 * cosine)


def train(model, work, pad, tokens_total, minutes, log, peak=PEAK_RATE):
    """One pass over `work`, cut short at `tokens_total` tokens or when the time is up."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    model.train()
    began, tokens, recent = time.monotonic(), 0, {}
    for step, (task, prefix, rows) in enumerate(work, 1):
        elapsed = time.monotonic() - began
        # The schedule goes by tokens, but a slow machine must still see its end.
        progress = max(tokens / tokens_total, elapsed / (60 * minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, peak)
        own_loss, answer_loss, count = batch_loss(model, prefix, rows, pad)
        optimizer.zero_grad(set_to_none=True)
        (answer_loss + PROMPT_WEIGHT * own_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += count
        for part, loss in (("text", own_loss), ("answer", answer_loss)):
            recent.setdefault(f"{task} {part}", []).append(loss.item())
        if step % 100 == 0:
            losses = "  ".join(f"{name} {sum(v) / len(v):.4f}" for name, v in sorted(recent.items()))
            speed = tokens / (time.monotonic() - began)
            log(f"step {step:5}  loss: {losses}  rate {rate_at(progress, peak):.2e}  tokens {tokens:9}  {speed:.0f} tokens/s")
            recent = {}
    seconds = time.monotonic() - began
    log(f"trained {step} steps, {tokens} tokens in {seconds / 60:.1f} minutes, {tokens / seconds:.0f} tokens/s")


def export(model, folder, template_file=False):
    """Saves the weights as BF16, and the settings under the names that most programs read.

    The chat template stays in a file of its own, or becomes a setting of the tokenizer.
    """
    model.to(torch.bfloat16).save_pretrained(folder)

    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    settings["bos_token"] = None
    settings["add_bos_token"] = False
    if not template_file:
        settings["chat_template"] = tasks.CHAT_TEMPLATE
        (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod(0o644)


def describe(task, prefix, rows):
    lengths = sorted(row.kinds.count(OWN) for row in rows)
    return (
        f"{task}: {len(rows)} rows, prefix {len(prefix)} tokens, own text {lengths[0]} to {lengths[-1]} tokens, "
        f"median {lengths[len(rows) // 2]}, longest answer {max(row.kinds.count(ANSWER) for row in rows)}"
    )


def log_versions(log):
    libraries = (torch, transformers, tokenizers, numpy)
    log(f"python {platform.python_version()}  " + "  ".join(f"{m.__name__} {m.__version__}" for m in libraries))
    log(f"seed {SEED}  arguments {' '.join(sys.argv[1:])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="longest time for the training itself")
    parser.add_argument("--tokens", type=float, default=8e6, help="tokens of the whole schedule")
    parser.add_argument("--label-rows", type=int, default=60_000)
    parser.add_argument("--write-rows", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--log", type=Path, default=Path(__file__).parent / "train.log")
    args = parser.parse_args()

    log = Log(args.log)
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    log_versions(log)

    evaluation = generate.evaluation_tickets()
    label = generate.training_tickets(args.label_rows, evaluation)
    label = [(tasks.label_user(r["subject"], r["body"]), r["category"]) for r in label]
    write = generate.writing_examples(args.write_rows)
    write = [(tasks.write_user(r["category"], r["tone"]), r["answer"]) for r in write]

    systems = [tasks.prefix_text(s) for s in (tasks.LABEL_SYSTEM, tasks.WRITE_SYSTEM)]
    texts = [tasks.row_text(user) + answer for user, answer in label[:20_000] + write[:10_000]]
    tokenizer = train_tokenizer(texts + systems * 500, args.out)
    pad = tokenizer.convert_tokens_to_ids("<|pad|>")
    model = new_model(tokenizer)
    log(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")

    work = []
    for task, system, pairs in (("label", tasks.LABEL_SYSTEM, label), ("write", tasks.WRITE_SYSTEM, write)):
        prefix, rows = encode_rows(tokenizer, system, pairs)
        log(describe(task, prefix, rows))
        work += [(task, prefix, batch) for batch in make_batches(rows, rng)]
    rng.shuffle(work)
    available = sum(len(row.ids) for _, _, rows in work for row in rows)
    log(f"{len(work)} batches, {available} tokens in one pass, schedule {int(args.tokens)} tokens, at most {args.minutes} minutes")

    train(model, work, pad, min(args.tokens, available), args.minutes, log)
    export(model, args.out)
    for path in sorted(args.out.iterdir()):
        log(f"{path.name}: {path.stat().st_size} bytes")
    evaluate.report(args.out, log)


if __name__ == "__main__":
    main()
