"""What each peer's run prints."""

import json
import resource


def report(requests, generated, seconds):
    """One line with the fields of `gristmill bench --json` that run.py reads."""
    prompt = sum(len(request["prompt_token_ids"]) for request in requests)
    print(json.dumps({
        "requests": len(requests), "prompt_tokens": prompt, "generated_tokens": generated, "seconds": seconds,
        "requests_per_second": len(requests) / seconds, "total_tokens_per_second": (prompt + generated) / seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))
