"""Checks the exported folder with plain transformers, on the prompts of the two job files.

    python evaluate.py

Prints the accuracy of greedy decoding restricted to the categories, and how many tickets written
without any restriction at the writing job's temperature fit its JSON schema.
"""

import argparse
import collections
import json
from pathlib import Path

import pyarrow.parquet as pq
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import generate

HERE = Path(__file__).parent
BATCH = 64


def load_job(name):
    return yaml.safe_load((HERE.parent / f"{name}.yaml").read_text(encoding="utf-8"))


def render(tokenizer, job, row):
    """Token ids of the job's prompt for one row."""
    messages = []
    for message in job["prompt"]["messages"]:
        content = message["content"]
        for name, value in row.items():
            content = content.replace("{{ " + name + " }}", str(value))
        messages.append({"role": message["role"], "content": content})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def last_logits(model, tokenizer, prompts):
    """Logits after each prompt, computed in batches of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found = [None] * len(prompts)
    for start in range(0, len(order), BATCH):
        chunk = order[start : start + BATCH]
        batch = tokenizer.pad({"input_ids": [prompts[i] for i in chunk]}, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            hidden = model.model(**batch).last_hidden_state
            last = hidden[torch.arange(len(chunk)), batch["attention_mask"].sum(1) - 1]
            logits = model.lm_head(last).float()
        for i, row in zip(chunk, logits):
            found[i] = row
    return found


def choose(model, tokenizer, prompts, choices):
    """Greedy decoding restricted to the token sequences of the choices."""
    sequences = {choice: tokenizer.encode(choice) for choice in choices}
    answers = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    while open_rows:
        undecided = []
        for i in open_rows:
            while True:
                depth = len(answers[i])
                nexts = {s[depth] for s in sequences.values() if s[:depth] == answers[i] and len(s) > depth}
                if len(nexts) != 1:
                    break
                answers[i] += nexts
            if nexts:
                undecided.append((i, sorted(nexts)))
        logits = last_logits(model, tokenizer, [prompts[i] + answers[i] for i, _ in undecided])
        for (i, nexts), row in zip(undecided, logits):
            answers[i].append(nexts[row[nexts].argmax().item()])
        open_rows = [i for i, _ in undecided]
    names = {tuple(sequence): choice for choice, sequence in sequences.items()}
    return [names[tuple(answer)] for answer in answers]


def fits_schema(text, schema):
    """Whether the text is a JSON object of the writing job's schema: only strings, all required."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    properties = schema["properties"]
    if not isinstance(value, dict) or value.keys() != properties.keys():
        return False
    return all(
        isinstance(value[name], str)
        and len(value[name]) <= rule.get("maxLength", len(value[name]))
        and value[name] in rule.get("enum", [value[name]])
        for name, rule in properties.items()
    )


def check_labels(model, tokenizer, log):
    job = load_job("label-tickets")
    rows = pq.read_table(HERE / "tickets.parquet").to_pylist()
    held = {row["ticket_id"]: row["held"] for row in generate.evaluation_tickets()}
    prompts = [render(tokenizer, job, row) for row in rows]
    lengths = sorted(len(tokenizer.encode(f"{row['subject']}\n\n{row['body']}")) for row in rows)
    log(f"{len(rows)} tickets of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(rows) // 2]}")
    answers = choose(model, tokenizer, prompts, job["generate"]["choice"])

    right, total, mistakes = collections.Counter(), collections.Counter(), collections.Counter()
    for row, answer in zip(rows, answers):
        groups = ["all", "held-out phrases" if held[row["ticket_id"]] else "seen phrases", row["category"]]
        for group in groups:
            total[group] += 1
            right[group] += answer == row["category"]
        if answer != row["category"]:
            mistakes[row["category"], answer] += 1
    for group in ["all", "seen phrases", "held-out phrases", *job["generate"]["choice"]]:
        log(f"accuracy, {group}: {right[group]} of {total[group]}, {100 * right[group] / total[group]:.2f} %")
    for (gold, answer), count in mistakes.most_common(8):
        log(f"mistake: {gold} taken for {answer}: {count}")


def check_writing(model, tokenizer, log):
    job = load_job("write-tickets")
    settings = job["generate"]
    rows = pq.read_table(HERE / "briefs.parquet").to_pylist()
    torch.manual_seed(settings["seed"])
    texts, stopped = [], 0
    for start in range(0, len(rows), BATCH):
        prompts = [render(tokenizer, job, row) for row in rows[start : start + BATCH]]
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        written = model.generate(
            **batch,
            do_sample=True,
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            top_k=0,
            max_new_tokens=settings["max_tokens"],
        )[:, batch["input_ids"].shape[1] :]
        stopped += sum(tokenizer.eos_token_id in row for row in written.tolist())
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
    valid = sum(fits_schema(text, settings["json_schema"]) for text in texts)
    log(f"writing: {valid} of {len(texts)} fit the schema, {100 * valid / len(texts):.2f} %; {stopped} ended by themselves")
    for row, text in list(zip(rows, texts))[:5]:
        log(f"{row['category']}, {row['tone']}: {text}")


def report(folder, log):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The weights are stored in BF16; computing in F32 is what the jobs ask for.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_labels(model, tokenizer, log)
    check_writing(model, tokenizer, log)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "model")
    torch.set_num_threads(2)
    report(parser.parse_args().model, print)


if __name__ == "__main__":
    main()
