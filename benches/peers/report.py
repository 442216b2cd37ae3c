"""What the peers' runs have in common: what they print, what their prompts share."""

import json
import os
import resource

# A shorter common beginning is not worth the trouble.
LEAST_SHARED = 16


def shared(requests):
    """How many tokens at the beginning all prompts have in common, short of the whole of any; 0 if too few."""
    prompts = [request["prompt_token_ids"] for request in requests]
    # What the first and the last in order share, all share.
    length = min(len(os.path.commonprefix([min(prompts), max(prompts)])), min(map(len, prompts)) - 1)
    return length if length >= LEAST_SHARED else 0


def report(requests, generated, seconds, **more):
    """One line with the fields of `gristmill bench --json` that run.py reads."""
    prompt = sum(len(request["prompt_token_ids"]) for request in requests)
    print(json.dumps({
        "requests": len(requests), "prompt_tokens": prompt, "generated_tokens": generated, "seconds": seconds,
        "requests_per_second": len(requests) / seconds, "total_tokens_per_second": (prompt + generated) / seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **more,
    }))
