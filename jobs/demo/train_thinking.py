"""Teaches the trained demo model to think before it names a category, and writes the folder `thinking-model`.

    python train_thinking.py --minutes 10

The vocabulary gets the two delimiters of a thought. Three kinds of rows are learned: with a whole thought, with a thought
that a budget has cut, where all but the forced end counts, and with none, as the chat template
renders a prompt that rules thoughts out. The other task of the demo, writing tickets, is not practised here.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
import generate
import tasks
import thoughts
import train
from train import ANSWER, FORCED, OWN, Row

HERE = Path(__file__).parent
PEAK_RATE = 8e-4
# Shares of rows with a whole thought and with a cut one; the others have none.
WHOLE, CUT = 0.5, 0.25


def add_delimiters(base):
    """The tokenizer and the model with rows for the delimiters; they are no control tokens, so they are decoded as text."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (tasks.THINK, tasks.THINK_END)])
    tokenizer.chat_template = tasks.THINKING_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    return tokenizer, model


def check_pieces(tokenizer, ticket, thought):
    """The rows' pieces must make the text that the chat template makes."""
    user = tasks.label_user(ticket["subject"], ticket["body"])
    question = [{"role": "system", "content": tasks.LABEL_SYSTEM}, {"role": "user", "content": user}]
    answer = {"role": "assistant", "content": ticket["category"], "reasoning_content": thought}
    start = tasks.prefix_text(tasks.LABEL_SYSTEM) + tasks.row_text(user)
    ending = thought + tasks.THINK_CLOSE + ticket["category"] + "<|im_end|>\n"
    render = tokenizer.apply_chat_template
    assert render([*question, answer], tokenize=False) == start + tasks.THINK_OPEN + ending
    assert render(question, tokenize=False, add_generation_prompt=True) == start
    silent = render(question, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert silent == start + tasks.NO_THOUGHT


def encode_rows(tokenizer, tickets, rng):
    """The rows of the three kinds. Each piece is encoded by itself, as it is where a program forces it."""
    phrase_thoughts = thoughts.by_phrase()
    encode = tokenizer.encode
    opened, closed, silent = encode(tasks.THINK_OPEN), encode(tasks.THINK_CLOSE), encode(tasks.NO_THOUGHT)
    answers = {category: encode(category + "<|im_end|>") for category in tasks.CATEGORIES}
    rows = []
    for i, ticket in enumerate(tickets):
        text = generate.expand(rng, phrase_thoughts[ticket["category"], ticket["problem"]])
        if i < 200:
            check_pieces(tokenizer, ticket, text)
        own = encode(tasks.row_text(tasks.label_user(ticket["subject"], ticket["body"])))
        thought, answer = encode(text), answers[ticket["category"]]
        draw = rng.random()
        if draw < WHOLE:
            rows.append(Row.of((own, OWN), (opened + thought + closed + answer, ANSWER)))
        elif draw < WHOLE + CUT:
            begun = opened + thought[: rng.randrange(len(thought))]
            rows.append(Row.of((own, OWN), (begun, ANSWER), (closed, FORCED), (answer, ANSWER)))
        else:
            rows.append(Row.of((own, OWN), (silent, FORCED), (answer, ANSWER)))
    return tokenizer.encode(tasks.prefix_text(tasks.LABEL_SYSTEM)), rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="longest time for the training itself")
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--base", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "thinking-model")
    parser.add_argument("--log", type=Path, default=HERE / "train_thinking.log")
    args = parser.parse_args()

    log = train.Log(args.log)
    torch.set_num_threads(args.threads)
    torch.manual_seed(train.SEED)
    rng = random.Random(train.SEED)
    train.log_versions(log)

    tokenizer, model = add_delimiters(args.base)
    log(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    tickets = generate.training_tickets(args.rows, generate.evaluation_tickets())
    prefix, rows = encode_rows(tokenizer, tickets, rng)
    log(train.describe("think", prefix, rows))
    work = [("think", prefix, batch) for batch in train.make_batches(rows, rng)]
    rng.shuffle(work)
    available = sum(len(row.ids) for row in rows)
    log(f"{len(work)} batches, {available} tokens in one pass, at most {args.minutes} minutes")

    train.train(model, work, tokenizer.pad_token_id, available, args.minutes, log, PEAK_RATE)
    tokenizer.save_pretrained(args.out)
    train.export(model, args.out, template_file=True)
    for path in sorted(args.out.iterdir()):
        log(f"{path.name}: {path.stat().st_size} bytes")
    evaluate.report_thinking(args.out, log)


if __name__ == "__main__":
    main()
