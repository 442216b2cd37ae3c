"""Writes a checkpoint that make.py has made as a GGUF file for llama.cpp.

    python gguf_model.py MODEL_DIR FILE.gguf [--type q8_0|q4_0|q4_k|bf16|f32] [--check]

Llama, Qwen2, Qwen3 MoE and gpt-oss with tied embeddings. Matrices get the type asked for, norms and biases stay F32; a file that is there is kept.
It has the vocabulary's size only, since the benchmark's prompts are token ids.

`--check` generates 12 tokens from each of 24 prompts with a common beginning, greedily, as peer_llamacpp.py does it (8 sequences at
once, keys and values in one buffer, then in many), and asks transformers in F32 whether each is the most probable one after those
before it. Less than 90 % (in four bits 30 %) is an error.

Q4_K (as Q4_K_M) is made by llama.cpp itself from a file in BF16. Rows that blocks of 256 do not divide get another type there, as with
any model of such rows.
"""

import argparse
import json
import pathlib
import struct

import gguf
import numpy

# The type of matrices, the type of the file, and how often a greedy token is to be that of F32.
TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0, 0.9),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0, 0.3),
    "q4_k": (None, gguf.LlamaFileType.MOSTLY_Q4_K_M, 0.3),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16, 0.9),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32, 0.9),
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
}
# llama.cpp's names of families that it calls otherwise.
FAMILIES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}


def tensors(path):
    """Name and values, in F32, of each tensor of a safetensors file in BF16."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = numpy.memmap(path, mode="r", offset=8 + length)
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is in {entry['dtype']}"
        begin, end = entry["data_offsets"]
        bits = data[begin:end].view("<u2").astype(numpy.uint32) << 16
        yield name, bits.view(numpy.float32).reshape(entry["shape"])


def by_layer(all_tensors):
    """The same tensors, experts of a layer as one: `blk.0.ffn_up_exps.weight`, `[experts][out features][in features]`."""
    experts = {}
    for name, values in all_tensors:
        if ".mlp.experts." not in name:
            yield name, values
            continue
        layer, part = name.removeprefix("model.layers.").split(".mlp.experts.")
        if part.startswith("gate_up_proj"):
            kind = "bias" if part.endswith("_bias") else "weight"
            for first, to in enumerate(("gate", "up")):
                of_one = values[..., first::2]
                yield f"blk.{layer}.ffn_{to}_exps.{kind}", of_one if kind == "bias" else of_one.transpose(0, 2, 1)
        elif part == "down_proj":
            yield f"blk.{layer}.ffn_down_exps.weight", values.transpose(0, 2, 1)
        elif part == "down_proj_bias":
            yield f"blk.{layer}.ffn_down_exps.bias", values
        else:
            _, projection, _ = part.split(".")
            experts.setdefault((layer, projection.removesuffix("_proj")), []).append(values)
    for (layer, part), matrices in experts.items():
        yield f"blk.{layer}.ffn_{part}_exps.weight", numpy.stack(matrices)


def renamed(name, family):
    if name in WHOLE or name.startswith("blk."):
        return WHOLE.get(name, name)
    _, _, layer, part = name.split(".", 3)
    if part == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    if family == "gpt_oss" and part.startswith("post_attention_layernorm"):
        return f"blk.{layer}.post_attention_norm.weight"
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def paired(rows, dim):
    """Rotary embedding of Llama turns dimensions 2i and 2i + 1 in llama.cpp, i and dim / 2 + i in the checkpoint."""
    order = numpy.arange(dim).reshape(2, dim // 2).T.ravel()
    return rows.reshape(-1, dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def quantized(values, kind):
    """The bytes of a matrix, or of a stack of matrices one by one, which takes less memory."""
    if values.ndim == 2:
        return gguf.quants.quantize(numpy.ascontiguousarray(values), kind)
    return numpy.stack([quantized(matrix, kind) for matrix in values])


def write(model, path, kind):
    config = json.loads((model / "config.json").read_text())
    family = config["model_type"]
    assert family in ("llama", "qwen2", *FAMILIES) and config["tie_word_embeddings"], "only what make.py makes"
    matrices, file_type, _ = TYPES[kind]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, FAMILIES.get(family, family))
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if family in FAMILIES:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if family == "gpt_oss":
        rope = config["rope_scaling"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, values in by_layer(tensors(model / "model.safetensors")):
        if family == "gpt_oss" and name == "model.embed_tokens.weight":
            # llama.cpp takes no tied table here.
            writer.add_tensor("output.weight", quantized(values, matrices), raw_dtype=matrices)
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = paired(values, config["head_dim"])
        to = renamed(name, family)
        # As llama.cpp's own conversion, routers and biases stay F32.
        if values.ndim >= 2 and not to.endswith((".bias", "ffn_gate_inp.weight")):
            writer.add_tensor(to, quantized(values, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(to, numpy.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Last: a file of that name is whole.
    part.rename(path)


def write_by_llamacpp(model, path, kind):
    """Writes a file of a type that llama.cpp alone makes."""
    import llama_cpp

    plain, part = path.with_suffix(".bf16"), path.with_suffix(".part")
    # It says a line of each matrix otherwise.
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    write(model, plain, "bf16")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(TYPES[kind][1])
    failed = llama_cpp.llama_model_quantize(str(plain).encode(), str(part).encode(), params)
    plain.unlink()
    if failed:
        raise SystemExit(f"llama.cpp did not quantize {model}: error {failed}")
    part.rename(path)


def check(model, path, kind):
    """How many greedy tokens of llama.cpp are the most probable ones in F32."""
    import torch
    import transformers

    import peer_llamacpp

    random = numpy.random.default_rng(1)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    beginning = random.integers(3, vocabulary, 32).tolist()
    requests = [{"prompt_token_ids": beginning + random.integers(3, vocabulary, 4 + 3 * i).tolist(), "max_tokens": 12}
                for i in range(24)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for split in (False, True):
        same = count = 0
        for request, tokens in zip(requests, peer_llamacpp.Engine(path, requests, sequences=8, split=split).run(requests)):
            prompt = request["prompt_token_ids"]
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1:]
            same += (logits.argmax(-1) == torch.tensor(tokens)).sum().item()
            count += len(tokens)
        print(f"{path.name}, {'many buffers' if split else 'one buffer'}: {same} of {count} greedy tokens are those of F32")
        if same < TYPES[kind][2] * count:
            raise SystemExit("too few: the file or the way it is run is wrong")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--type", choices=TYPES, default="q8_0")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.file.exists():
        by = write if TYPES[args.type][0] is not None else write_by_llamacpp
        by(args.model, args.file, args.type)
    if args.check:
        check(args.model, args.file, args.type)


if __name__ == "__main__":
    main()
