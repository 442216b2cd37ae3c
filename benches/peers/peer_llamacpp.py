"""Runs a trace through llama.cpp's C API and prints what `gristmill bench --json` prints.

    python peer_llamacpp.py FILE.gguf TRACE [--sequences N] [--batch N] [--physical-batch N] [--cache f16|q8_0]
        [--buffers auto|one|many]

gguf_model.py writes FILE.gguf. Batches are continuous: up to `--sequences` requests run at once, another begins as soon as one
ends, prompts and next tokens go into one batch. What all prompts begin with is computed once, before the clock starts, as is the
first request, and copied to each sequence. `--buffers one` keeps keys and values of all sequences in one buffer, `many` gives each
its own, between which llama.cpp copies no beginnings; `auto`, as llama.h advises, is one where prompts share a beginning, many
where they do not. Samplers are llama.cpp's.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import sys
import time

import llama_cpp
import numpy

from report import report, shared

CACHES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
LOG_LEVEL_ERROR = 4


@llama_cpp.llama_log_callback
def log(level, text, _):
    if level == LOG_LEVEL_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class Batch:
    """A llama_batch in numpy's arrays, which take a prompt in one go."""

    def __init__(self, size):
        self.token, self.pos, self.seq_id = (numpy.zeros(size, numpy.int32) for _ in range(3))
        self.logits = numpy.zeros(size, numpy.int8)
        # A token belongs to one sequence.
        self.n_seq_id = numpy.ones(size, numpy.int32)
        self.pointers = self.seq_id.ctypes.data + self.seq_id.itemsize * numpy.arange(size, dtype=numpy.uint64)
        types = dict(llama_cpp.llama_batch._fields_)
        arrays = {"token": self.token, "pos": self.pos, "n_seq_id": self.n_seq_id, "seq_id": self.pointers, "logits": self.logits}
        self.batch = llama_cpp.llama_batch(**{name: ctypes.cast(a.ctypes.data, types[name]) for name, a in arrays.items()})
        self.clear()

    def clear(self):
        self.length = 0

    def add(self, tokens, position, sequence, wanted):
        """Appends tokens of one sequence; logits are wanted of the last or of none. Returns the last one's index."""
        end = self.length + len(tokens)
        here = slice(self.length, end)
        self.token[here] = tokens
        self.pos[here] = range(position, position + len(tokens))
        self.seq_id[here] = sequence
        self.logits[here] = 0
        self.logits[end - 1] = wanted
        self.length = end
        return end - 1

    def decode(self, context):
        self.batch.n_tokens = self.length
        status = llama_cpp.llama_decode(context, self.batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")


class Sequence:
    def __init__(self, index, request, position):
        self.index, self.position = index, position
        self.waiting = request["prompt_token_ids"][position:]
        self.left = request["max_tokens"]
        self.sampling = request.get("temperature", 0.0), request.get("top_p", 1.0)


class Engine:
    def __init__(self, path, requests, sequences, batch=2048, physical_batch=512, cache="f16", split=False):
        llama_cpp.llama_log_set(log, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self.sequences, self.size = sequences, batch
        # The most that so many requests can take.
        lengths = sorted(len(request["prompt_token_ids"]) + request["max_tokens"] for request in requests)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = lengths[-1] * sequences if split else sum(lengths[-sequences - 1:])
        # One more for what is shared.
        params.n_seq_max = params.n_outputs_max = sequences + (not split)
        params.n_batch, params.n_ubatch = batch, physical_batch
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = not split
        params.type_k = params.type_v = CACHES[cache]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = Batch(batch)
        self.samplers = {}
        # In a sequence of its own, which stays. Without a buffer in common llama.cpp copies whole sequences only.
        self.shared = 0 if split else shared(requests)
        for at in range(0, self.shared, batch):
            self.batch.clear()
            self.batch.add(requests[0]["prompt_token_ids"][at:min(at + batch, self.shared)], at, sequences, False)
            self.batch.decode(self.context)

    def sampler(self, temperature, top_p):
        if (temperature, top_p) not in self.samplers:
            chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
            if temperature > 0.0:
                parts = [llama_cpp.llama_sampler_init_temp(temperature), llama_cpp.llama_sampler_init_top_p(top_p, 1),
                         llama_cpp.llama_sampler_init_dist(0)]
            else:
                parts = [llama_cpp.llama_sampler_init_greedy()]
            for part in parts:
                llama_cpp.llama_sampler_chain_add(chain, part)
            self.samplers[temperature, top_p] = chain
        return self.samplers[temperature, top_p]

    def run(self, requests):
        """The tokens that each request generates."""
        generated = [[] for _ in requests]
        waiting, running = collections.deque(range(len(requests))), {}
        free = list(range(self.sequences))
        while waiting or running:
            while waiting and free:
                slot, index = free.pop(), waiting.popleft()
                if self.shared:
                    llama_cpp.llama_memory_seq_cp(self.memory, self.sequences, slot, 0, self.shared)
                running[slot] = Sequence(index, requests[index], self.shared)
            self.batch.clear()
            sampled = []
            # Next tokens first: what is left of the batch goes to prompts, which may be cut.
            for slot, sequence in sorted(running.items(), key=lambda entry: len(entry[1].waiting)):
                tokens = sequence.waiting[:self.size - self.batch.length]
                if not tokens:
                    break
                sequence.waiting = sequence.waiting[len(tokens):]
                last = self.batch.add(tokens, sequence.position, slot, not sequence.waiting)
                sequence.position += len(tokens)
                if not sequence.waiting:
                    sampled.append((slot, sequence, last))
            self.batch.decode(self.context)
            for slot, sequence, last in sampled:
                token = llama_cpp.llama_sampler_sample(self.sampler(*sequence.sampling), self.context, last)
                generated[sequence.index].append(token)
                sequence.waiting = [token]
                sequence.left -= 1
                if sequence.left == 0:
                    llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
        return generated


def instructions():
    """What llama.cpp was built for; an error if that is less than the machine has."""
    info = llama_cpp.llama_print_system_info().decode()
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    for flag in ("avx2", "avx512_vnni", "avx512_bf16"):
        if flag in flags and f"{flag.upper()} = 1" not in info:
            raise SystemExit(f"llama.cpp was built without {flag}, which this machine has ({info})")
    return info


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("trace", type=pathlib.Path)
    # Of 16, 32 and 64 on one core (Zen 4) never more than a tenth behind the fastest: l30m W1 to W3, q05b W1 and W2, Q8_0.
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--physical-batch", type=int, default=512)
    parser.add_argument("--cache", choices=CACHES, default="f16")
    parser.add_argument("--buffers", choices=("auto", "one", "many"), default="auto")
    args = parser.parse_args()
    info = instructions()
    requests = [json.loads(line) for line in args.trace.read_text().splitlines()]
    split = args.buffers == "many" or args.buffers == "auto" and not shared(requests)
    engine = Engine(args.model, requests, args.sequences, args.batch, args.physical_batch, args.cache, split)
    engine.run(requests[:1])
    began = time.monotonic()
    generated = engine.run(requests)
    seconds = time.monotonic() - began
    assert [len(tokens) for tokens in generated] == [request["max_tokens"] for request in requests]
    report(requests, sum(map(len, generated)), seconds, sequences=args.sequences,
           buffers="many" if split else "one", llama_cpp_python=llama_cpp.__version__, built_for=info)


if __name__ == "__main__":
    main()
