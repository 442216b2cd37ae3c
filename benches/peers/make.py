"""Makes random models and the three traces of the peers' benchmark.

    python make.py --data DIR [--models l30m,q05b] [--four-bits]

DIR/l30m and so on become checkpoints (safetensors in BF16, a byte-level BPE of made-up words); DIR/MODEL-W1.jsonl to -W3.jsonl their
traces, a request a line as `gristmill bench --trace` reads it. Everything follows from the seed. With `--four-bits`, DIR/MODEL-w4 is the same model with linear layers in 4 bits, in the layout of
compressed-tensors: symmetric, with a factor for each 128 numbers of a row. `q3moe` and `gptoss` have the
layers of Qwen3-30B-A3B and of gpt-oss-20b at full width, but few of them, and tied embeddings.

- W1, labelling: each the same instruction of 192 tokens and 64 of its own, 16 generated, greedy.
- W2, synthetic data: 48 tokens, 256 generated, temperature 0.8, top-p 0.95.
- W3, mixed: 16 to 1,024 tokens (log-uniform), 8 to 128 generated, greedy.

Weights are uniform with variance 1 / columns; the last norm is scaled so that sampling sees an entropy of 2 to 3 nats, as
with a real model: logits are nearly normal with standard deviation s, and then ln(vocabulary) - s^2 / 2 nats (the random
energy model, Derrida 1981).
"""

import argparse
import json
import math
import pathlib
import shutil
import struct

import numpy

SEED = 20261121
# Nats that sampling is to see.
ENTROPY = 2.5
EMBEDDING_STD = 0.02

MODELS = {
    "l30m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32_000,
        "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    },
    "q05b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 151_936, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
    },
    "q3moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151_936, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gptoss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
        "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True, "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
}
COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
          "attention_dropout": 0.0, "initializer_range": EMBEDDING_STD, "use_cache": True}

# Rows at scale 1, for each model.
ROWS = {
    "W1": {"l30m": 256, "q05b": 64, "q3moe": 64, "gptoss": 64},
    "W2": {"l30m": 64, "q05b": 64, "q3moe": 64, "gptoss": 64},
    "W3": {"l30m": 128, "q05b": 32, "q3moe": 32, "gptoss": 32},
}


def tensors(config):
    """Name, shape and values of each weight."""
    random = numpy.random.default_rng(SEED)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows, columns, std=None):
        half = math.sqrt(3.0) * (std if std else columns ** -0.5)
        return random.uniform(-half, half, size=(rows, columns)).astype(numpy.float32)

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden, EMBEDDING_STD)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", numpy.ones(hidden, numpy.float32)
        yield at + "post_attention_layernorm.weight", numpy.ones(hidden, numpy.float32)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{at}self_attn.{name}.weight", matrix(rows, hidden)
            if config["model_type"] in ("qwen2", "gpt_oss"):
                yield f"{at}self_attn.{name}.bias", matrix(1, rows)[0]
        yield at + "self_attn.o_proj.weight", matrix(hidden, queries)
        yield from mlp(config, at, matrix)
    std = math.sqrt(2 * (math.log(config["vocab_size"]) - ENTROPY))
    yield "model.norm.weight", numpy.full(hidden, std / (math.sqrt(hidden) * EMBEDDING_STD), numpy.float32)


def mlp(config, at, matrix):
    """As `tensors`, of the MLP or the experts of the layer with names that begin with `at`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    family = config["model_type"]
    if family == "qwen3_moe":
        for part in ("q_norm", "k_norm"):
            yield f"{at}self_attn.{part}.weight", numpy.ones(config["head_dim"], numpy.float32)
        yield at + "mlp.gate.weight", matrix(config["num_experts"], hidden)
        places = [f"{at}mlp.experts.{i}." for i in range(config["num_experts"])]
        inner = config["moe_intermediate_size"]
    elif family == "gpt_oss":
        experts = config["num_local_experts"]
        yield at + "self_attn.o_proj.bias", matrix(1, hidden)[0]
        yield at + "self_attn.sinks", matrix(1, config["num_attention_heads"])[0]
        yield at + "mlp.router.weight", matrix(experts, hidden)
        yield at + "mlp.router.bias", matrix(1, experts)[0]
        # Transposed, columns of gate and up by turns.
        yield at + "mlp.experts.gate_up_proj", numpy.stack(
            [matrix(hidden, 2 * inner, hidden ** -0.5) for _ in range(experts)])
        yield at + "mlp.experts.gate_up_proj_bias", matrix(experts, 2 * inner)
        yield at + "mlp.experts.down_proj", numpy.stack([matrix(inner, hidden, inner ** -0.5) for _ in range(experts)])
        yield at + "mlp.experts.down_proj_bias", matrix(experts, hidden)
        return
    else:
        places = [at + "mlp."]
    for place in places:
        yield place + "gate_proj.weight", matrix(inner, hidden)
        yield place + "up_proj.weight", matrix(inner, hidden)
        yield place + "down_proj.weight", matrix(hidden, inner)


def bf16(values):
    """The nearest BF16 numbers, as 16 bits each."""
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_safetensors(path, config):
    write_tensors(path, ((name, "BF16", values.shape, bf16(values).tobytes()) for name, values in tensors(config)))


def write_tensors(path, all_tensors):
    """Tensors, each by its name, number format, shape and bytes."""
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, dtype, shape, blob in all_tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob)


SPECIAL = ["<unk>", "<s>", "</s>"]
# As vocabularies learned from code have them, besides words.
JSON_PIECES = ['{"', '":', '":"', '": "', '",', '","', '", "', '"}', '"]', '["', '"],', '"},', "},", "],", "[]", "{}", '":{"', '":["',
               '.",', '."']
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
SPACE = "Ġ"


def byte_characters():
    """The characters that stand for the 256 bytes in a byte-level BPE's vocabulary (GPT-2's table): printable ones of Latin-1
    for themselves, the others for what follows U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, spare = {}, 256
    for byte in range(256):
        table[byte] = chr(byte if byte in printable else spare)
        spare += byte not in printable
    return table


def words(count):
    """Made-up words of two syllables and, where these are not enough, of three; the same ones first for every count."""
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    two = [(a, b) for a in syllables for b in syllables]
    yield from two[:count]
    three = numpy.random.default_rng(SEED).permutation(len(two) * len(syllables))[:max(0, count - len(two))]
    yield from ((*two[at // len(syllables)], syllables[at % len(syllables)]) for at in three.tolist())


def vocabulary(size):
    """Tokens in the order of their ids, special ones left out, and the merges that make them: bytes, JSON's punctuation,
    syllables, words without and with a space in front."""
    table = byte_characters()
    tokens, merges = list(table.values()), []
    known = set(tokens)

    def merge(left, right):
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append([left, right])

    for piece in JSON_PIECES:
        piece = "".join(table[byte] for byte in piece.encode())
        for end in range(2, len(piece) + 1):
            merge(piece[:end - 1], piece[end - 1])
    for syllable in (c + v for c in CONSONANTS for v in VOWELS):
        merge(*syllable)
    for syllable in (c + v for c in CONSONANTS for v in VOWELS):
        merge(SPACE, syllable)
    for parts in words(size):
        for space in ("", SPACE):
            merge(space + "".join(parts[:-1]), parts[-1])
    count = size - len(SPECIAL)
    return tokens[:count], merges[:count - 256]


def write_tokenizer(folder, config):
    tokens, merges = vocabulary(config["vocab_size"])
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i, word in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {word: i for i, word in enumerate([*SPECIAL, *tokens])}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "model_max_length": config["max_position_embeddings"]}))


def write_model(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | COMMON, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    write_tokenizer(folder, config)
    # Last: a folder with it is whole.
    write_safetensors(folder / "model.safetensors", config)


def trace(workload, rows, vocabulary):
    """Requests of one workload."""
    random = numpy.random.default_rng([SEED, int(workload[1])])

    def ids(count):
        return random.integers(3, vocabulary, count).tolist()

    instruction = ids(192)
    for _ in range(rows):
        if workload == "W1":
            yield {"prompt_token_ids": instruction + ids(64), "max_tokens": 16, "temperature": 0.0}
        elif workload == "W2":
            yield {"prompt_token_ids": ids(48), "max_tokens": 256, "temperature": 0.8, "top_p": 0.95}
        else:
            length = int(round(math.exp(random.uniform(math.log(16), math.log(1024)))))
            yield {"prompt_token_ids": ids(length), "max_tokens": int(random.integers(8, 129)), "temperature": 0.0}


def write_trace(data, model, workload, scale):
    """`scale` times as many rows as at scale 1, from the same distribution; the first are the same."""
    with open(data / f"{model}-{workload}.jsonl", "w") as file:
        for request in trace(workload, ROWS[workload][model] * scale, MODELS[model]["vocab_size"]):
            file.write(json.dumps(request) + "\n")


GROUP = 128
IN_FOUR_BITS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}}},
}


def packed(values):
    """The words of a matrix in 4 bits, eight numbers each from the lowest bits on, and the factors in BF16."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // GROUP, GROUP)
    factors = bf16(numpy.abs(groups).max(axis=2) / 7.5)
    exact = (factors.astype(numpy.uint32) << 16).view(numpy.float32)
    codes = numpy.clip(numpy.rint(groups / exact[:, :, None]), -8, 7).astype(numpy.int32) + 8
    codes = codes.reshape(rows, columns // 8, 8).astype(numpy.uint32) << (4 * numpy.arange(8, dtype=numpy.uint32))
    return numpy.bitwise_or.reduce(codes, axis=2).astype("<u4"), factors


def in_four_bits(config):
    """Name, number format, shape and bytes of each tensor."""
    for name, values in tensors(config):
        if not name.endswith("_proj.weight"):
            yield name, "BF16", values.shape, bf16(values).tobytes()
            continue
        words, factors = packed(values)
        stem = name.removesuffix("weight")
        yield stem + "weight_packed", "I32", words.shape, words.tobytes()
        yield stem + "weight_scale", "BF16", factors.shape, factors.tobytes()
        yield stem + "weight_shape", "I64", (2,), numpy.array(values.shape, "<i8").tobytes()


def write_four_bits(source, path):
    path.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copyfile(file, path / file.name)
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": IN_FOUR_BITS}))
    write_tensors(path / "model.safetensors", in_four_bits(config))


def make(data, models, four_bits):
    for name in models:
        if not (data / name / "model.safetensors").exists():
            write_model(data / name, MODELS[name])
        if four_bits and not (data / f"{name}-w4" / "model.safetensors").exists():
            write_four_bits(data / name, data / f"{name}-w4")
        for workload in ROWS:
            write_trace(data, name, workload, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="l30m,q05b")
    parser.add_argument("--four-bits", action="store_true")
    args = parser.parse_args()
    make(args.data, args.models.split(","), args.four_bits)
