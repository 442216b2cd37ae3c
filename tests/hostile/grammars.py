"""JSON Schemas, regular expressions and lists that lines of an OpenAI batch file bring, among healthy neighbours."""

import json

from case import DONE, FAILED_ROWS, REFUSED, Case, Step, answered, job, rows

ROWS = 16


def line(number, **body):
    body = {"messages": [{"role": "user", "content": f"ticket {number}"}], "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "hostile", "schema": value}}, "max_tokens": 64}


def among(name, body, bad=(3,), codes=(FAILED_ROWS,), of=ROWS, seconds=30.0, allowed=("errored", "invalid_output")):
    """A case of `of` lines; those in `bad` have `body` too, which may be a function of the line's number."""
    def make(folder):
        at = lambda number: body(number) if callable(body) else body  # noqa: E731
        rows(folder, [line(number, **(at(number) if number in bad else {})) for number in range(of)])
        job(folder, input={"uri": "rows.jsonl", "format": "openai_batch"}, prompt=None)
    return Case(name, make, [Step(["run", "job.yaml"], codes, seconds=seconds)], answered(bad, of, allowed=allowed))


def optional(count, of=None):
    return {f"p{number}": of or {"type": "string"} for number in range(count)}


def deep(levels, link, last=None):
    value = last or {"type": "string"}
    for _ in range(levels):
        value = link(value)
    return value


def chain(count, link):
    """Definitions, each of which names the next by `link`."""
    definitions = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count - 1}": {"type": "null"}}}


def doubled(next):
    half = {"allOf": [{"type": "object"}, next]}
    return {"type": "object", "properties": {"a": half, "b": half}}


def objects(count, key="k"):
    return [{"type": "object", "properties": {key: {"const": f"c{number}"}}, "required": [key]} for number in range(count)]


def raw(name, text, bad=(3,)):
    """A line whose body is text, so that it can be what Python's json would not write."""
    def make(folder):
        lines = [line(number) for number in range(ROWS)]
        for number in bad:
            lines[number] = text(number).encode()
        rows(folder, lines)
        job(folder, input={"uri": "rows.jsonl", "format": "openai_batch"}, prompt=None)
    return Case(name, make, [Step(["run", "job.yaml"], (FAILED_ROWS,))], answered(bad, ROWS))


def own(name, generate, says, commands=("plan", "run")):
    """A job's own shape is refused in one line before anything is computed."""
    def make(folder):
        rows(folder, [{"text": f"ticket {number}"} for number in range(4)])
        job(folder, generate={"max_tokens": 4, "temperature": 0} | generate)
    return Case(name, make, [Step([command, "job.yaml"], (REFUSED,), (says,)) for command in commands])


def deep_text(levels):
    def text(number):
        body = json.dumps(line(number, **schema("HERE")))
        return body.replace('"HERE"', '{"items":' * levels + "{}" + "}" * levels)
    return text


def schemas():
    yield among("grammar-7000-optional-properties", schema({"type": "object", "properties": optional(7000)}))
    yield among("grammar-7000-in-four-of-64", schema({"type": "object", "properties": optional(7000), "additionalProperties": False}),
                bad=(0, 17, 40, 63), of=64)
    yield among("grammar-20000-properties-in-one-of-256", schema({"type": "object", "properties": optional(20000, {})}), bad=(100,), of=256)
    yield among("grammar-9000-required-names", schema({"type": "object", "required": [f"p{number}" for number in range(9000)]}))
    yield among("grammar-merged-properties", schema({"allOf": [{"properties": {f"a{part}_{number}": {} for number in range(900)}} for part in range(9)]}))
    yield among("grammar-99-levels-of-anyof", schema(deep(49, lambda v: {"anyOf": [v, {"type": "object", "properties": optional(50)}]})))
    yield among("grammar-120-levels", schema(deep(60, lambda v: {"type": "object", "properties": {"x": v}})))
    yield raw("grammar-5000-levels", deep_text(5000))
    yield among("grammar-chain-of-5000-definitions", schema(chain(5000, lambda next: {"type": "array", "items": next})))
    yield among("grammar-chain-of-5000-all-of", schema(chain(5000, lambda next: {"allOf": [next, {"type": "null"}]})))
    yield among("grammar-definitions-that-double", schema(chain(40, doubled)))
    yield among("grammar-definitions-that-double-to-half-a-million", schema(chain(18, doubled)))
    yield among("grammar-definition-in-itself", schema({"type": "object", "$ref": "#"}))
    yield among("grammar-one-of-10000", schema({"oneOf": objects(10000)}))
    yield among("grammar-any-of-20000", schema({"anyOf": objects(20000)}))
    yield among("grammar-any-of-twelve-times", schema({"allOf": [{"anyOf": objects(4, f"k{at}")} for at in range(12)]}))
    yield among("grammar-text-times-alternatives", schema({"const": "x" * 500_000, "anyOf": [{"type": "string"}] * 9_000}))
    yield among("grammar-400-pattern-properties", schema({"type": "object", "patternProperties": {f"^p{at}x.*$": {} for at in range(400)}}))
    yield among("grammar-counted-properties", schema({"type": "object", "properties": optional(900), "minProperties": 1, "additionalProperties": False}))
    yield among("grammar-pattern-of-optional-letters", schema({"type": "string", "pattern": "a?" * 30_000}))
    yield among("grammar-100-hard-patterns", schema({"type": "object", "properties": {f"p{at}": {"type": "string", "pattern": r"\w?" * 900} for at in range(100)}}))
    yield among("grammar-hard-separator", schema({"type": "object", "x-guidance": {"item_separator": "a?" * 30_000}}))
    yield among("grammar-schema-of-2-mb", schema({"type": "string", "description": "x" * (2 << 20)}))
    yield among("grammar-length-of-a-cut-character", schema({"type": "string", "minLength": {"x": "a" * 93 + "é" * 50}}))
    yield among("grammar-each-line-its-own", lambda at: schema({"type": "object", "properties": optional(3000 + at)}), bad=tuple(range(0, 64, 2)), of=64)
    # A string of a thousand million letters never ends within max_tokens.
    yield among("grammar-endless-string", schema({"type": "string", "minLength": 1_000_000_000}))


def expressions():
    regex = lambda text: {"guided_regex": text, "max_tokens": 64}  # noqa: E731
    yield among("regex-32000-optional-letters", regex("a?" * 32_000))
    yield among("regex-32000-stars-in-six", regex("a*" * 32_000), bad=(0, 3, 6, 9, 12, 15))
    yield among("regex-optional-words", regex(r"\w?" * 2000))
    yield among("regex-within-the-bounds", regex(r"\w?" * 1000), bad=(1, 2, 3))
    yield among("regex-each-within-the-bounds", lambda at: regex(r"\w?" * 1000 + str(at)), bad=tuple(range(8)), seconds=60.0)
    yield among("regex-21000-classes", regex("|".join([r"\w"] * 21_000)))
    yield among("regex-states-that-explode", regex("|".join(f".{{0,{at}}}x" for at in range(900))), codes=(DONE, FAILED_ROWS),
                allowed=("errored", "invalid_output", "succeeded"))
    yield among("regex-masks-that-cost-too-much", regex("(x{0,99}y?z{0,999}){0,50}" * 190 + "w"), codes=(DONE, FAILED_ROWS),
                allowed=("errored", "invalid_output", "succeeded"))
    yield among("regex-nested-groups", regex("(" * 400 + "a" + ")*" * 400))


def lists():
    yield among("choice-of-20000", {"guided_choice": [f"label {at}" for at in range(20_000)]})
    yield among("choice-of-2-mb", {"guided_choice": [f"{at} " + "x" * 2000 for at in range(1000)]})
    yield among("choice-of-long-texts", {"guided_choice": ["<" * 16_000 + str(at) for at in range(60)]}, codes=(DONE, FAILED_ROWS),
                allowed=("errored", "invalid_output", "succeeded"))
    yield among("stop-of-1000", {"stop": ["x"] * 1000})
    yield among("stop-of-long-texts", {"stop": ["a" * 16_000] * 60})
    yield among("stop-token-ids-of-100000", {"stop_token_ids": list(range(100_000))})
    numbers = {"n": 4_000_000_000, "max_tokens": 1 << 40, "logprobs": 20, "top_logprobs": 5, "temperature": -1, "top_p": 2, "min_p": -0.5,
               "repetition_penalty": 0, "presence_penalty": 1e308, "top_k": 1 << 40, "seed": 1.5, "stop_token_ids": [-1]}
    for name, value in numbers.items():
        yield among(f"number-{name}", {name: value})
    yield among("number-that-is-a-text-of-a-megabyte", {"max_tokens": "9" * (1 << 20)})
    yield among("role-of-a-megabyte", {"messages": [{"role": "u" * (1 << 20), "content": "x"}]})
    yield among("field-of-a-megabyte", {"t" * (1 << 20): 1})


def cases():
    yield from schemas()
    yield from expressions()
    yield from lists()
    yield own("own-schema-of-7000-properties", {"json_schema": {"type": "object", "properties": optional(7000)}}, "7000 properties of one object, at most 2000")
    yield own("own-regex-of-32000-operators", {"regex": "a?" * 32_000}, "32000 operators")
    yield own("own-schema-that-doubles", {"json_schema": chain(8, doubled) | {"oneOf": objects(9000)}}, "multiply to more than 64 MiB")
    yield own("own-choice-of-2-mb", {"choice": [f"{at} " + "x" * 2000 for at in range(1000)]}, "bytes together")
    yield own("own-stop-of-long-texts", {"stop": ["a" * 16_000] * 60}, "bytes together")
