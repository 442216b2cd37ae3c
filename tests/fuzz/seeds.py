"""Small valid inputs for the fuzz targets, a folder each, to start from: .venv/bin/python tests/fuzz/seeds.py DIR"""

import json
import pathlib
import struct
import sys

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).parents[2]


def parquet(path):
    """Files of each compression and kind of page, with their footers and column chunks."""
    table = pa.table({"a": [1, 2, 3], "s": ["x", "yy", None], "l": [[1, 2], [], None]})
    for compression in ("none", "snappy", "zstd", "gzip", "lz4", "brotli"):
        for version in ("1.0", "2.0"):
            for dictionary in (True, False):
                pq.write_table(table, path, compression=compression, data_page_version=version, use_dictionary=dictionary)
                name, file = f"{compression}-{version}-{dictionary}", path.read_bytes()
                length = struct.unpack("<I", file[-8:-4])[0]
                yield "parquet_file", name, file
                yield "part_file", name, file
                yield "parquet_footer", name, file[-8 - length : -8]
                group = pq.ParquetFile(path).metadata.row_group(0)
                for number in range(group.num_columns):
                    column = group.column(number)
                    start = column.dictionary_page_offset or column.data_page_offset
                    yield "parquet_pages", f"{name}-{number}", file[start : start + column.total_compressed_size]


def arrow(path):
    """Files of each compression, of several batches, with dictionaries."""
    words = pa.array(["x", "yy", None]).dictionary_encode()
    table = pa.table({"a": [1, 2, 3], "s": ["x", "yy", None], "l": [[1, 2], [], None], "w": words, "t": [{"k": 1}, None, {"k": None}]})
    for compression in (None, "lz4", "zstd"):
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, max_chunksize=2)
        yield "arrow_file", str(compression), path.read_bytes()


def checkpoint():
    """A first byte says which file the rest is."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    yield b"\0" + struct.pack("<Q", len(header)) + header + bytes(24)
    yield b"\1" + json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    for first, name in enumerate(("config.json", "tokenizer.json", "tokenizer_config.json"), start=2):
        yield bytes([first]) + (ROOT / "jobs/demo/model" / name).read_bytes()


TALLY = {"succeeded": 2, "invalid_output": 0, "errored": 0, "expired": 0, "cancelled": 0, "prompt_tokens": 9, "cached_tokens": 0,
         "completion_tokens": 3}
JOB = {
    "name": "a", "model": "m", "precision": "auto", "context": None, "input": {"uris": ["x"], "format": None},
    "prompt": {"kind": {"text": "a"}, "chat_template": None, "chat_template_kwargs": {}, "truncate": "none"},
    "generate": {"max_tokens": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                 "frequency_penalty": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False, "logprobs": False, "n": 1,
                 "shape": "free"},
    "output": {"uri": "o", "carry": [], "format": "parquet", "token_ids": False}, "shard_rows": 10, "gold": None,
    "budget": {"usd": None, "usd_per_hour": None, "deadline_seconds": None}, "base_dir": "/", "file": "x.yaml", "hash": "h",
}


def records():
    part = {"name": "part-00000.parquet", "size": 10, "sha256": "ab"}
    place = {"shard": 0, "index": 0, "nonce": "1" * 20}
    yield "log", place | {"data": part | {"name": "0" * 20 + "-0.rows"}, "counts": [[0, 2]], "tally": TALLY}
    yield "attempt", {"shard": 0, "attempt": "1" * 20, "worker": "w", "rows": [[0, 2]], "alone": False, "signs_every": 5.0}
    yield "commit", {"shard": 0, "part": part, "tally": TALLY}
    yield "order", {"index": 0, "nonce": "1" * 20, "order": "extend", "budget_usd": 1.0, "deadline_seconds": 60}
    yield "retry", {"generation": 1, "nonce": "1" * 20, "shards": [{"shard": 0, "rows": [[0, 2]], "tally": TALLY}]}
    yield "spend", {"worker": "w", "device_seconds": 1.5}
def tokenizers():
    """Small tokenizers of three kinds, each with a text."""
    special = {"content": "<s>", "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": True}
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    split = {"type": "Split", "pattern": {"Regex": r" ?\p{L}+|\s+(?!\S)|\s+|."}, "behavior": "Isolated", "invert": False}
    vocab = {text: number for number, text in enumerate(["a", "b", "\u2581", "ab", "\u2581a"])}
    bpe = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["\u2581", "a"]]}
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -1.5], ["\u2581", -2.0]]}
    for model, size, normalizer, pre_tokenizer in ((bpe, 5, mark, None), (bpe, 5, None, split), (unigram, 4, mark, None)):
        whole = {"version": "1.0", "added_tokens": [special | {"id": size}], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                 "decoder": {"type": "Fuse"}, "model": model}
        yield json.dumps(whole).encode() + b"\xffab a<s> ba b"


def tokenizer_files():
    """A first byte says which file the rest is."""
    for first, name in enumerate(("tekken.json", "prefixed.model", "small.tiktoken")):
        yield name, bytes([first]) + (ROOT / "tests/fixtures/tokenizers" / name).read_bytes()


def seeds(scratch):
    yield from (("tokenizer_files", name, seed) for name, seed in tokenizer_files())
    yield from (("tokenizer_text", str(number), seed) for number, seed in enumerate(tokenizers()))
    yield from parquet(scratch)
    yield from arrow(scratch)
    yield from (("checkpoint", str(number), seed) for number, seed in enumerate(checkpoint()))
    files = (ROOT / "tests/fixtures").glob("*/**/*.gguf")
    yield from (("gguf_file", f"{path.parent.name}-{path.name}", path.read_bytes()) for path in sorted(files) if path.stat().st_size < 1 << 16)
    yield from (("job_file", path.name, path.read_bytes()) for path in sorted((ROOT / "jobs").glob("*.yaml")))
    templates = (ROOT / "tests/fixtures").glob("*/*.jinja")
    yield from (("template", f"{path.parent.name}-{path.name}", path.read_bytes()) for path in sorted(templates))
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    lines = [json.dumps({"a": 1, "s": "x"}), json.dumps({"a": 2}), "", json.dumps(request), ""]
    yield "csv_rows", "quotes", b'\xef\xbb\xbfa,"b ""c"",\r\n d"\r\n1,007\r\n\r\n,""'
    yield "jsonl_lines", "lines", "\n".join(lines).encode()
    for name, fields in records():
        yield "ledger_records", name, json.dumps({"v": 1, "job": "0" * 20} | fields).encode()
    yield "job_record", "job", json.dumps(JOB).encode()
    message = {"v": 1, "job": "0" * 32, "output": "s3://a/b", "generation": 0, "shard": 3}
    yield "queue_message", "message", json.dumps(message).encode()
    addresses = ("kafka://h:9092/t", "kafka://u:p@a:1,[::1]:2/t?group=g&partitions=7", "amqp://u:p@h/q", "amqps://u:p%20@h:5671/v/q?ack_timeout=60")
    yield from (("queue_address", str(number), address.encode()) for number, address in enumerate(addresses))
    of = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"enum": ["x", 1, None]}}, "required": ["a"], "$defs": {"a": {
        "anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "string", "pattern": "^a+$", "maxLength": 9}]}}}
    yield "json_schema", "object", json.dumps(of).encode()
    yield "json_schema", "counted", json.dumps({"type": "object", "patternProperties": {"^a": {}}, "maxProperties": 3}).encode()
    expressions = (r"\d{4}-\d{2}", r"(?:a|b)*[^c]{2,9}?", r"\p{L}+( \w)*$")
    yield from (("regex", str(number), text.encode()) for number, text in enumerate(expressions))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    to = pathlib.Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    scratch = to / "scratch.parquet"
    for target, name, seed in seeds(scratch):
        folder = to / target
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(seed)
    scratch.unlink()


main()
