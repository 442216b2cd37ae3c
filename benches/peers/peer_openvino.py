"""Runs a trace through OpenVINO GenAI's continuous batching pipeline and prints what `gristmill bench --json` prints.

    python peer_openvino.py MODEL_DIR TRACE [--property NAME=VALUE]... [--cache-gb N]

MODEL_DIR holds the exported model (see run.py). Requests go in all at once; prefixes are cached, and the first request is
run before the clock starts, so that a shared prefix is there already.
"""

import argparse
import json
import pathlib
import time

import numpy
import openvino
import openvino_genai

from report import report


def config(request):
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = request["max_tokens"]
    settings.ignore_eos = True
    if request.get("temperature", 0.0) > 0.0:
        settings.do_sample = True
        settings.temperature = request["temperature"]
        settings.top_p = request.get("top_p", 1.0)
    return settings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--property", action="append", default=[])
    parser.add_argument("--cache-gb", type=int, default=4)
    args = parser.parse_args()
    requests = [json.loads(line) for line in args.trace.read_text().splitlines()]
    prompts = [openvino.Tensor(numpy.array([r["prompt_token_ids"]], dtype=numpy.int64)) for r in requests]
    settings = [config(r) for r in requests]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gb
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 256
    properties = dict(entry.split("=", 1) for entry in args.property)
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties, {})
    pipeline.generate(prompts[:1], settings[:1])
    began = time.monotonic()
    results = pipeline.generate(prompts, settings)
    seconds = time.monotonic() - began
    generated = sum(len(result.m_generation_ids[0]) for result in results)
    expected = sum(request["max_tokens"] for request in requests)
    assert generated == expected, f"{generated} tokens generated, {expected} asked for"
    report(requests, generated, seconds)


if __name__ == "__main__":
    main()
