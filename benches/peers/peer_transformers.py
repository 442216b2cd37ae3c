"""Runs a trace through Hugging Face transformers in BF16, in static batches, and prints what `gristmill bench --json` prints.

    python peer_transformers.py MODEL_DIR TRACE [--batch N]

Requests are sorted by prompt length and run in batches of N, padded on the left; a batch generates as many tokens as its
longest request asks for, of which those that were asked for count.
"""

import argparse
import json
import pathlib
import time

import torch
import transformers

from report import report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.trace.read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    requests.sort(key=lambda request: (len(request["prompt_token_ids"]), request["max_tokens"]))
    began = time.monotonic()
    generated = 0
    with torch.inference_mode():
        for at in range(0, len(requests), args.batch):
            batch = requests[at:at + args.batch]
            longest = max(len(r["prompt_token_ids"]) for r in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                prompt = torch.tensor(request["prompt_token_ids"])
                ids[row, longest - len(prompt):] = prompt
                mask[row, longest - len(prompt):] = 1
            count = max(r["max_tokens"] for r in batch)
            sampling = {"do_sample": False}
            if batch[0].get("temperature", 0.0) > 0.0:
                sampling = {"do_sample": True, "temperature": batch[0]["temperature"], "top_p": batch[0].get("top_p", 1.0),
                            "top_k": 0}
            model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **sampling)
            generated += sum(r["max_tokens"] for r in batch)
    seconds = time.monotonic() - began
    report(requests, generated, seconds)


if __name__ == "__main__":
    main()
