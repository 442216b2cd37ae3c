"""Compares what `gristmill quantize` writes with what transformers reads of it.

    python3 -m venv target/torch && target/torch/bin/pip install torch transformers==5.23.* compressed-tensors==0.20.* accelerate pyarrow
    target/torch/bin/python tests/quantize_readback.py target/release/gristmill [MODEL_FOLDER...]

Without folders it takes the demo model and random models of several families. Each is quantized to `int8`, `fp8` and `w4a16`. A job in F32 then writes greedy answers, and transformers, with the weights that compressed-tensors
decompresses, says what it would have written: tokens must be the same, and their log probabilities differ by less than 1e-3.
Where transformers itself cannot read a model back (experts in FP8 need a GPU), its error is printed.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pyarrow.parquet as parquet
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = dict(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)
# Of a family each: biases, norms less 1, fused projections, norms behind, an MLP beside attention, experts.
SMALL = {
    "Llama": dict(attention_bias=True, mlp_bias=True), "Qwen2": {}, "Qwen3": dict(head_dim=32, tie_word_embeddings=True), "Gemma": dict(head_dim=32),
    "Gemma2": dict(head_dim=32, query_pre_attn_scalar=32), "Phi3": {}, "Olmo2": {}, "Glm4": dict(head_dim=32), "Cohere": {}, "Granite": {}, "SmolLM3": {},
    "Qwen3Moe": dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    "Qwen2Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2), "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
}
DIFFERENCE_MAX = 1e-3
NEW_TOKENS = 24


def small(folder, family):
    """A random model, in BF16 as most are."""
    config = getattr(transformers, f"{family}Config")(**COMMON, **SMALL[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        scale = 1.2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
        weight.normal_(0.0, scale)
        if name.endswith("norm.weight") and not family.startswith("Gemma"):
            weight.add_(1.0)
    model.bfloat16().save_pretrained(folder)


def tokenizer(folder, vocabulary):
    """A tokenizer of so many tokens: prompts are token ids, so it need only be there."""
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    words = {f"w{number}": number for number in range(vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": steps,
        "post_processor": None, "decoder": steps,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": words, "merges": []},
    }))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def by_program(program, folder, model, prompts):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in prompts))
    job = {
        "name": "read-back", "model": str(model), "precision": "f32", "context": 96, "input": {"uri": str(folder / "rows.jsonl")},
        "prompt": {"token_ids": "ids"}, "generate": {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True},
        "output": {"uri": str(folder / "out"), "token_ids": True},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    subprocess.run([program, "run", folder / "job.yaml", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    [part] = (folder / "out").glob("**/part-*.parquet")
    rows = parquet.read_table(part).to_pylist()
    return [(row["token_ids"], row["logprobs"]) for row in rows]


def widen_factors(folder):
    """Stores factors in F32: compressed-tensors multiplies in their format, and BF16 would round the weights once more."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        wide = {name: tensor.float() if name.endswith("_scale") else tensor for name, tensor in tensors.items()}
        save_file(wide, path, metadata={"format": "pt"})


def decompressed(folder):
    """The model with the weights of the quantized one, and no rounding of activations."""
    widen_factors(folder)
    read = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False))
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    state = {name: tensor for name, tensor in read.state_dict().items() if name in names}
    left = model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and all(key == "lm_head.weight" for key in left.missing_keys), left
    model.tie_weights()
    return model.eval()


def main():
    program, given = sys.argv[1], [pathlib.Path(folder) for folder in sys.argv[2:]]
    sources = given or [ROOT / "jobs/demo/model", *SMALL]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = False
    for source in sources:
        for scheme in ["int8", "fp8", "w4a16"]:
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                torch.manual_seed(3)
                folder = pathlib.Path(folder)
                name = getattr(source, "name", source)
                if source in SMALL:
                    small(folder / "model", source)
                else:
                    shutil.copytree(source, folder / "model")
                vocabulary = json.loads((folder / "model/config.json").read_text())["vocab_size"]
                if not (folder / "model/tokenizer.json").exists():
                    tokenizer(folder / "model", vocabulary)
                command = [program, "quantize", folder / "model", "--to", scheme, "--out", folder / "quantized"]
                subprocess.run(command, check=True, capture_output=True)
                prompts = torch.randint(3, vocabulary, (6, 30)).tolist()
                answers = by_program(program, folder, folder / "quantized", prompts)
                try:
                    model = decompressed(folder / "quantized")
                except (RuntimeError, NotImplementedError) as error:
                    print(f"{name} {scheme}: not read by transformers: {str(error).splitlines()[0]}")
                    continue
                worst, same = 0.0, True
                for prompt, (tokens, logprobs) in zip(prompts, answers):
                    rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].double(), -1)[len(prompt) - 1:-1]
                    same &= rows.argmax(-1).tolist() == tokens
                    worst = max(worst, max(abs(float(row[token]) - logprob) for row, token, logprob in zip(rows, tokens, logprobs)))
                same &= worst < DIFFERENCE_MAX
                failed |= not same
                print(f"{name} {scheme}: log probabilities differ by at most {worst:.1e}: {'the same' if same else 'DIFFERENT'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
