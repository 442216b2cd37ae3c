"""Runs a trace through Hugging Face transformers in BF16, in static batches, and prints what `gristmill bench --json` prints.

    python peer_transformers.py MODEL_DIR TRACE [--batch N]

Requests are sorted by prompt length and run in batches of N, padded on the left; a batch generates as many tokens as its longest
request asks for, of which those that were asked for count. What all prompts begin with is computed once, before the clock
starts, as is the first request, and copied to each row.
"""

import argparse
import copy
import json
import pathlib
import time

import torch
import transformers

from report import report, shared


def sampling(batch):
    """As generate() takes it; all requests of a batch are sampled alike."""
    alike = {(request.get("temperature", 0.0), request.get("top_p", 1.0)) for request in batch}
    assert len(alike) == 1, "requests that are sampled in different ways"
    temperature, top_p = alike.pop()
    if temperature == 0.0:
        return {"do_sample": False}
    # 0: none; generate() takes the 50 most probable otherwise.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


class Model:
    def __init__(self, path, requests):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        # No token ends a sequence.
        self.model.generation_config.eos_token_id = None
        self.prefix = requests[0]["prompt_token_ids"][:shared(requests)]
        if self.prefix:
            self.cache = transformers.DynamicCache(config=self.model.config)
            self.model(torch.tensor([self.prefix]), past_key_values=self.cache, logits_to_keep=1)

    def run(self, batch):
        """Generates for all of a batch; returns how many of its tokens were asked for."""
        own = [request["prompt_token_ids"][len(self.prefix):] for request in batch]
        longest = max(map(len, own))
        # The padding comes after the prefix, whose keys and values are there.
        ids = torch.tensor([self.prefix + [0] * (longest - len(tokens)) + tokens for tokens in own])
        mask = torch.ones_like(ids)
        for row, tokens in enumerate(own):
            mask[row, len(self.prefix):ids.shape[1] - len(tokens)] = 0
        options = sampling(batch)
        if self.prefix:
            options["past_key_values"] = copy.deepcopy(self.cache)
            options["past_key_values"].batch_repeat_interleave(len(batch))
        count = max(request["max_tokens"] for request in batch)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **options)
        assert out.shape[1] == ids.shape[1] + count
        return sum(request["max_tokens"] for request in batch)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.trace.read_text().splitlines()]
    with torch.inference_mode():
        model = Model(args.model, requests)
        model.run(requests[:1])
        requests.sort(key=lambda request: (len(request["prompt_token_ids"]), request["max_tokens"]))
        began = time.monotonic()
        generated = sum(model.run(requests[at:at + args.batch]) for at in range(0, len(requests), args.batch))
        seconds = time.monotonic() - began
    report(requests, generated, seconds, batch=args.batch)


if __name__ == "__main__":
    main()
