"""Compares answers to a very long prompt with transformers'.

    python3 -m venv target/torch && target/torch/bin/pip install torch transformers==5.23.* pandas pyarrow
    target/torch/bin/python tests/long_prompt.py target/release/gristmill [--tokens 128000] [--vocabulary 262144] [--shape llama|mistral|gemma3|qwen35]

It makes a small random model of each shape (full attention; windows; windows and full attention; recurrent layers and full attention), runs
the program in F32 on a job of one row with so many letters, each a token, and computes the same greedy answer by transformers, in pieces with a
cache. Tokens must be the same, and their log probabilities differ by less than 1e-4. It also prints the memory that `inspect` names
for the context. Some ten minutes per shape on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import pyarrow
import pyarrow.parquet as parquet
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES = ["llama", "mistral", "gemma3", "qwen35"]
NEW_TOKENS = 16
SPECIAL = ["<unk>", "<s>", "</s>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECE = 1000
DIFFERENCE_MAX = 1e-4
COMMON = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=None, tie_word_embeddings=False,
)


def config(shape, context, vocabulary):
    common = COMMON | {"vocab_size": vocabulary}
    if shape == "llama":
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        return transformers.LlamaConfig(**common, num_hidden_layers=2, max_position_embeddings=context, rope_parameters=rope)
    if shape == "mistral":
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        return transformers.MistralConfig(
            **common, num_hidden_layers=2, max_position_embeddings=context, sliding_window=512, rope_parameters=rope)
    if shape == "gemma3":
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}}
        return transformers.Gemma3TextConfig(
            **common, num_hidden_layers=4, max_position_embeddings=context, sliding_window=512, query_pre_attn_scalar=16,
            layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_parameters=rope)
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    return transformers.Qwen3_5TextConfig(
        **common, num_hidden_layers=2, max_position_embeddings=context, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_conv_kernel_dim=4, rope_parameters=rope)


def make(folder, shape, context, vocabulary):
    torch.manual_seed(7)
    wanted = config(shape, context, vocabulary)
    kind = {"llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM, "gemma3": transformers.Gemma3ForCausalLM,
            "qwen35": transformers.Qwen3_5ForCausalLM}[shape]
    model = kind(wanted).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Attention and logits that depend on what is read.
            if weight.dim() > 1 and "conv" not in name:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    # A token a byte; others occur in answers alone.
    symbols = SPECIAL + ALPHABET
    symbols += [f"word{i}" for i in range(len(symbols), vocabulary)]
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@torch.no_grad()
def by_transformers(model, prompt):
    cache, at = None, 0
    while at < len(prompt):
        piece = torch.tensor([prompt[at:at + PIECE]])
        done = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, at = done.past_key_values, at + piece.shape[1]
    tokens, logprobs = [], []
    for _ in range(NEW_TOKENS):
        row = torch.log_softmax(done.logits[0, -1].double(), -1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        done = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        cache = done.past_key_values
    return tokens, logprobs


def by_program(program, folder, model, text):
    parquet.write_table(pyarrow.table({"text": [text]}), folder / "rows.parquet")
    job = {
        "name": "long", "model": str(model), "input": {"uri": str(folder / "rows.parquet")}, "precision": "f32",
        "prompt": {"text": "{{ text }}"},
        "generate": {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True},
        "output": {"uri": str(folder / "out"), "token_ids": True},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    subprocess.run([program, "run", folder / "job.yaml"], check=True)
    [part] = (folder / "out").glob("**/part-*.parquet")
    [row] = parquet.read_table(part).to_pylist()
    return row["token_ids"], row["logprobs"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--vocabulary", type=int, default=len(SPECIAL) + len(ALPHABET), help="ids of the model")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    args = parser.parse_args()
    failed = False
    for shape in args.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "model").mkdir()
            model = make(folder / "model", shape, args.tokens + NEW_TOKENS, args.vocabulary)
            letters = " etaoin shrdlu,.\n"
            text = "".join(letters[(i * i * 31 + i // 7 * 13) % 101 % len(letters)] for i in range(args.tokens))
            prompt = Tokenizer.from_file(str(folder / "model/tokenizer.json")).encode(text).ids
            assert len(prompt) == args.tokens
            print(subprocess.run([args.program, "inspect", folder / "model"], capture_output=True, text=True).stdout)
            tokens, logprobs = by_program(args.program, folder, folder / "model", text)
            wanted, wanted_logprobs = by_transformers(model, prompt)
            worst = max(abs(a - b) for a, b in zip(logprobs, wanted_logprobs))
            same = tokens == wanted and worst < DIFFERENCE_MAX
            failed |= not same
            print(f"{shape}: {args.tokens} tokens, {len(set(tokens))} different tokens of {len(tokens)} in the answer, "
                  f"log probabilities differ by at most {worst:.1e}: {'the same' if same else f'DIFFERENT: {tokens} for {wanted}'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
