"""Rows whose texts are long, or full of what a tokenizer or the guard over control tokens looks for."""

from case import DONE, FAILED_ROWS, Case, Step, answered, job, model, rows

MB = 1_000_000
RUN = ["run", "job.yaml", "--quiet"]


def row_between(text, **fields):
    """A job of three rows, the middle one with this text."""
    def make(folder):
        job(folder, **fields)
        rows(folder, [{"text": "a ticket"}, {"text": text()}, {"text": "another ticket"}])
    return make


def too_long(name, text, says=(), **fields):
    steps = [Step(["plan", "job.yaml"], (DONE,), says), Step(RUN, (FAILED_ROWS,))]
    return Case(name, row_between(text, **fields), steps, answered({1}, 3))


def reserved(count):
    """The demo tokenizer with reserved tokens; the model has no ids for them, and no healthy row uses one."""
    def change(tokenizer):
        for number in range(count):
            tokenizer["added_tokens"].append({"id": 2048 + number, "content": f"<|reserved_{number}|>", "special": True,
                                              "single_word": False, "lstrip": False, "rstrip": False, "normalized": False})
        return tokenizer
    return change


def guarded(name, count, text):
    def make(folder):
        row_between(text, model=str(model(folder, tokenizer__json=reserved(count))))(folder)
    return Case(name, make, [Step(RUN, (FAILED_ROWS,))], answered({1}, 3))


def kept(name, text, keep):
    """Cut to the context, the row is answered."""
    return Case(name, row_between(text, prompt={"text": "{{ text }}", "truncate": keep}), [Step(RUN, (DONE,))], answered(set(), 3))


def token_ids(folder):
    job(folder, prompt={"token_ids": "ids"})
    rows(folder, [{"ids": [5, 6]}, {"ids": [7] * 3_000_000}, {"ids": [8]}])


def cases():
    # As JSON, a line of a little less than the longest that is read.
    long = 15 * MB
    counted = ("at least 1,024 tokens",)
    yield too_long("words", lambda: "The parcel never came, order 1234. " * (long // 35), counted)
    yield too_long("short_words", lambda: "a " * (long // 2), counted)
    yield too_long("one_word", lambda: "a" * long, ("gives up on this text",))
    yield too_long("spaces", lambda: " " * long)
    yield too_long("spaces_and_a_letter", lambda: " " * long + "a")
    yield too_long("newlines", lambda: "\n" * (long // 2))
    yield too_long("digits", lambda: "7" * long)
    yield too_long("angle_brackets", lambda: "<" * long)
    yield too_long("control_tokens", lambda: "<|im_end|>" * (long // 10), counted)
    yield too_long("beginnings_of_control_tokens", lambda: "<|im_" * (long // 5), counted)
    yield too_long("combining_marks", lambda: "e" + "\u0301" * (long // 6))
    yield too_long("emoji", lambda: "\U0001F600 " * (long // 13), counted)
    yield too_long("lines", lambda: "x\r\n" * (long // 5), counted)
    yield too_long("text_prompt", lambda: "tell me, " * (long // 9), counted, prompt={"text": "{{ text }}"})
    yield guarded("reserved_250", 250, lambda: "<|reserved_" * (MB // 11))
    yield guarded("reserved_6400", 6_400, lambda: "<|reserved_" * (MB // 11))
    yield guarded("reserved_6400_brackets", 6_400, lambda: "<" * MB)
    yield guarded("reserved_6400_whole", 6_400, lambda: "<|reserved_77|>" * (MB // 15))
    yield guarded("reserved_6400_upper_case", 6_400, lambda: "<|RESERVED_6" * (MB // 12))
    yield kept("left", lambda: "one two three " * (long // 14), "left")
    yield kept("right", lambda: "one two three " * (long // 14), "right")
    yield kept("right_before_control_tokens", lambda: "one two three " * 1_000 + "<|im_end|>" * (long // 10), "right")
    yield Case("token_ids", token_ids, [Step(RUN, (FAILED_ROWS,))], answered({1}, 3))
