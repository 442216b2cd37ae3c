"""Checks an exported folder with plain transformers, on the prompts of the job files.

    python evaluate.py
    python evaluate.py --model thinking-model

Of the model: the accuracy of greedy decoding restricted to the categories, and how many tickets written
without any restriction at the writing job's temperature fit its JSON schema. Of its thinking variant: the
accuracy with a thought, with a thought that a budget cuts, and with none, and how long the thoughts are.
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
import tasks

HERE = Path(__file__).parent
BATCH = 64
# Of thoughts: more than any has, and a budget that cuts the longer ones.
LONGEST, BUDGET = 64, 12
LONGEST_ANSWER = 8


def load_job(name):
    return yaml.safe_load((HERE.parent / f"{name}.yaml").read_text(encoding="utf-8"))


def render(tokenizer, job, row, **names):
    """Token ids of the job's prompt for one row; `names` go to the chat template."""
    messages = []
    for message in job["prompt"]["messages"]:
        content = message["content"]
        for name, value in row.items():
            content = content.replace("{{ " + name + " }}", str(value))
        messages.append({"role": message["role"], "content": content})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **names)


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


def write(model, tokenizer, prompts, limit):
    """Greedy decoding without any restriction: at most `limit` tokens for each prompt, the end among them."""
    written = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), BATCH):
        chunk = order[start : start + BATCH]
        batch = tokenizer.pad({"input_ids": [prompts[i] for i in chunk]}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(**batch, do_sample=False, max_new_tokens=limit)
        for i, row in zip(chunk, found[:, batch["input_ids"].shape[1] :].tolist()):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else limit
            written[i] = row[:end]
    return written


class Thought:
    """The thought at the head of a completion: its tokens without the delimiters, and whether it was opened and closed."""

    def __init__(self, tokenizer, completion):
        opens, closes = tokenizer.convert_tokens_to_ids([tasks.THINK, tasks.THINK_END])
        self.opened = completion[:1] == [opens]
        self.closed = self.opened and closes in completion
        start = int(self.opened)
        end = completion.index(closes) if self.closed else len(completion) if self.opened else start
        self.ids, self.open = completion[start:end], completion[:start]
        self.close = [closes, *tokenizer.encode("\n\n")]
        self.forced = tokenizer.encode(tasks.THINK_CLOSE)

    def before_answer(self, budget=LONGEST):
        """What stands before the answer. A thought that has not ended within the budget is cut there and ended by force."""
        if not self.opened:
            return []
        if self.is_cut(budget):
            return self.open + self.ids[:budget] + self.forced
        return self.open + self.ids + self.close

    def is_cut(self, budget):
        return self.opened and (not self.closed or len(self.ids) >= budget)

    def text(self, tokenizer, budget=LONGEST):
        return tokenizer.decode(self.ids[:budget]).strip()


def answer_text(tokenizer, completion):
    """What follows the thought in a completion that was not restricted."""
    text = tokenizer.decode(completion).rpartition(tasks.THINK_END)[2]
    return text.removesuffix(tokenizer.eos_token).strip()


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


def check_thinking(model, tokenizer, log):
    job = load_job("label-tickets-thinking")
    choices = job["generate"]["choice"]
    rows = pq.read_table(HERE / "tickets.parquet").to_pylist()
    held = {row["ticket_id"]: row["held"] for row in generate.evaluation_tickets()}

    def accuracy(name, answers):
        right = [answer == row["category"] for row, answer in zip(rows, answers)]
        unknown = sum(held[row["ticket_id"]] and good for row, good in zip(rows, right))
        none = sum(answer not in choices for answer in answers)
        log(
            f"accuracy, {name}: {sum(right)} of {len(rows)}, {100 * sum(right) / len(rows):.2f} %; "
            f"held-out phrases: {unknown} of {sum(held.values())}; answers that are no category: {none}"
        )

    prompts = [render(tokenizer, job, row) for row in rows]
    written = write(model, tokenizer, prompts, LONGEST)
    found = [Thought(tokenizer, completion) for completion in written]
    lengths = sorted(len(thought.ids) for thought in found)
    log(
        f"thoughts: {sum(t.opened for t in found)} opened, {sum(t.closed for t in found)} closed by themselves, "
        f"{lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}; "
        f"a budget of {BUDGET} cuts {sum(t.is_cut(BUDGET) for t in found)}"
    )
    accuracy("with a thought, unrestricted", [answer_text(tokenizer, completion) for completion in written])
    whole = [prompt + thought.before_answer() for prompt, thought in zip(prompts, found)]
    accuracy("with a thought, restricted", choose(model, tokenizer, whole, choices))
    cut = [prompt + thought.before_answer(BUDGET) for prompt, thought in zip(prompts, found)]
    silent = [render(tokenizer, job, row, enable_thinking=False) for row in rows]
    for name, starts in ((f"with a thought of at most {BUDGET} tokens", cut), ("without a thought", silent)):
        answers = write(model, tokenizer, starts, LONGEST_ANSWER)
        accuracy(f"{name}, unrestricted", [answer_text(tokenizer, answer) for answer in answers])
        accuracy(f"{name}, restricted", choose(model, tokenizer, starts, choices))
    for row, completion in list(zip(rows, written))[:10]:
        log(f"{row['category']}: {tokenizer.decode(completion)!r}")


def load(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The weights are stored in BF16; computing in F32 is what the jobs ask for.
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def report_thinking(folder, log):
    tokenizer, model = load(folder)
    check_thinking(model, tokenizer, log)


def report(folder, log):
    tokenizer, model = load(folder)
    check_labels(model, tokenizer, log)
    check_writing(model, tokenizer, log)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    thinks = (args.model / "chat_template.jinja").exists()
    (report_thinking if thinks else report)(args.model, print)


if __name__ == "__main__":
    main()
