"""Checkpoints whose tokenizer.json is too much: expressions that step back for ever, texts that double, vocabularies without end."""

import base64
import json

from case import DONE, FAILED_ROWS, REFUSED, Case, Step, job, model, rows

SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def case(name, change, says=("model/tokenizer.json` is not a usable tokenizer",), text="a ticket", codes=(REFUSED,)):
    """`change` is the new text of tokenizer.json, or changes the parsed one. Most are refused in one line."""
    def edited(whole):
        change(whole)
        return whole

    def make(folder):
        model(folder, tokenizer__json=change if isinstance(change, str) else edited)
        job(folder, model="model")
        rows(folder, [{"text": text}] * 3)
    return Case(name, make, [Step(["plan", "job.yaml"], codes, says), Step(["run", "job.yaml", "--quiet"], codes)])


def setting(name, *path, value, **more):
    def change(tokenizer):
        for key in path[:-1]:
            tokenizer = tokenizer[key]
        tokenizer[path[-1]] = value
    return case(name, lambda tokenizer: change(tokenizer), **more)


def expression(name, regex, **more):
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [SPLIT | {"pattern": {"Regex": regex}}, byte_level]
    return setting(name, "pre_tokenizer", value={"type": "Sequence", "pretokenizers": steps}, **more)


def normalizer(name, *steps, **more):
    return setting(name, "normalizer", value={"type": "Sequence", "normalizers": list(steps)}, **more)


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def added(*contents):
    def change(tokenizer):
        tokenizer["added_tokens"] += [
            {"id": 2048 + number, "content": content, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False} for number, content in enumerate(contents)]
    return change


def table(replacement):
    """A SentencePiece table whose only text is this one."""
    trie = bytes(1024)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + replacement + b"\0").decode()


def cases():
    slow = ("its expression",)
    run = "a" * 100_000
    yield expression("nested_repeats", r"(x+x+)+y|a", text="x" * 100_000, says=slow)
    # Most of these are refused; a fast machine takes them up, and their rows fail or take what they take.
    yield expression("nested_stars", r"(?:a*)*b|.", text=run, says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield expression("alternatives", r"(?:a|a|aa)+$|.", text=run + "!", says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield expression("square_lookahead", r"a(?=a*b)|.", text=run, says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield expression("square_run", r"\s+$|\S", text=" " * 100_000 + "a", says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield expression("back_reference", r"(a+)\1+b|.", text=run, says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield expression("long_expression", "|".join(f"x{number}" for number in range(10_000)), says=("bytes in an expression",))
    # A text that loading does not try: its rows fail, or take what they take, and the process goes on.
    yield expression("own_trigger", r"QZXW(?:(?:QZXW)+)+!|\S|\s", text="QZXW" * 400, says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    yield normalizer("slow_replacement", replace("x", Regex="((?:a+)+b)"), text=run, says=(), codes=(REFUSED, FAILED_ROWS, DONE))
    growth = ("for one input byte",)
    yield normalizer("doubling", *[replace("aa", String="a")] * 30, says=growth)
    yield normalizer("one_long_replacement", replace("q" * 1_000_000, String="q"), text="q" * 1_000, says=growth)
    yield normalizer("long_prefix", {"type": "Prepend", "prepend": "x" * 1_000_000}, says=growth)
    yield normalizer("decompositions", *[{"type": "NFKD"}, {"type": "NFKC"}] * 3, text="\ufdfa", says=growth)
    yield normalizer("table", {"type": "Precompiled", "precompiled_charsmap": table(b"x" * 1_000_000)}, says=growth)
    yield normalizer("steps", *[{"type": "NFC"}] * 100_000, says=("steps in its normalizer",))
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": False}
    yield setting("byte_levels", "pre_tokenizer", value={"type": "Sequence", "pretokenizers": [byte_level] * 40}, says=growth)
    yield setting("id_of_2_31", "model", "vocab", "zz", value=2**31)
    yield setting("long_token", "model", "vocab", "z" * 1_000_000, value=2047, says=("bytes in a token",))
    yield setting("dropout", "model", "dropout", value=0.9999, says=("`dropout`",))
    yield case("merges", lambda whole: whole["model"]["merges"].extend(whole["model"]["merges"][:1] * 2_500_000), says=("merges: ",))
    yield setting("merges_of_nothing", "model", "merges", value=[["", ""]])
    yield case("vocabulary", lambda whole: whole["model"]["vocab"].update((f"w{number}", 2048 + number) for number in range(1_200_000)),
               says=("tokens in its vocabulary",))
    yield case("added_tokens", added(*(f"<{number}>" for number in range(300_000))), says=("added tokens: ",))
    yield case("long_added_token", added("<" + "a" * 100_000), says=("bytes in an added token",))
    vocab = [["<unk>", 0.0], *(["a" * (number + 1), -1.0] for number in range(2_000))]
    yield case("beginnings", lambda whole: whole.update(model={"type": "Unigram", "unk_id": 0, "vocab": vocab}, added_tokens=[]),
               text="a" * 5_000, says=("are prefixes of other tokens",))
    words = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 10**9}
    yield case("long_words", lambda whole: whole.update(model=words, added_tokens=[]), says=("max_input_chars_per_word",))
    yield case("deep", '{"model":' + "[" * 1_000_000 + "]" * 1_000_000 + "}")
    small = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, '
    yield case("deep_normalizer", small + '"normalizer": ' + '{"type": "Sequence", "normalizers": [' * 50_000 + "]}" * 50_000 + "}")
    yield case("values", small + '"decoder": [' + "[]," * 5_000_000 + "0]}", says=("values besides",))
