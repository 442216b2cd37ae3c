#!/usr/bin/env python3
"""What single requests of a batch get: responses, errors with code and field, answers within a closed schema.

    .venv/bin/python tests/serve/rows.py PROGRAM [--only CASE]

The last line counts the cases.
"""

import json
import pathlib
import subprocess
import tempfile

from openai.types.responses import Response

from run import CATEGORIES, DEMO, SYSTEM, lines_of, request, run_cases, service, submit, tickets, wait

TASK = {"model": "demo", "temperature": 0, "max_output_tokens": 8, "structured_outputs": {"choice": CATEGORIES}}


def response_line(custom_id, prompt, **body):
    body = TASK | {"instructions": SYSTEM, "input": prompt} | body
    body = {name: value for name, value in body.items() if value is not None}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}


def answered(client, lines, endpoint):
    """The answers and the errors of a batch, by custom id; each request has one of them."""
    ended = wait(client, submit(client, lines, endpoint=endpoint))
    assert ended.status == "completed", ended
    files = [{line["custom_id"]: line for line in lines_of(client, id)} if id else {} for id in (ended.output_file_id, ended.error_file_id)]
    assert files[0].keys() | files[1].keys() == {line["custom_id"] for line in lines} and not files[0].keys() & files[1].keys()
    return ended, *files


def responses(program):
    """`/v1/responses`: the answers are those of equal chat requests, valid by the client's own type."""
    with service(program) as one:
        client = one.client()
        rows = list(tickets(40))
        lines = [response_line(id, text) for id, text, _ in rows]
        parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": rows[0][1]}]}]
        lines.append(response_line("parts", parts))
        lines.append(response_line("cut", "Write a lot.", structured_outputs=None, max_output_tokens=3, ignore_eos=True))
        schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
        shape = {"format": {"type": "json_schema", "name": "kind", "strict": True, "schema": schema}}
        lines.append(response_line("schema", "Which?", structured_outputs=None, max_output_tokens=60, text=shape))
        wrong = {
            "image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "unsupported_value", "input[0].content[0]"),
            "tools": ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
            "previous": ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
            "unknown": ({"max_tokens": 3}, "unknown_parameter", "max_tokens"),
            "limit": ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
            "effort": ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning.effort"),
            "no_schema": ({"structured_outputs": None, "text": {"format": {"type": "json_schema"}}}, "invalid_type", "text.format.schema"),
            "no_text": ({"input": 3}, "invalid_type", "input"),
            "long": ({"input": "too long " * 5_000}, "context_length_exceeded", "input"),
        }
        lines += [response_line(id, "x", **fields) for id, (fields, _, _) in wrong.items()]
        ended, answers, errors = answered(client, lines, "/v1/responses")
        assert errors.keys() == wrong.keys(), errors.keys()
        check_errors(errors, wrong)
        found = {id: Response.model_validate(line["response"]["body"], strict=True) for id, line in answers.items()}
        assert all(answer.id.startswith("resp_") and answer.model == "demo" and answer.error is None for answer in found.values())
        chat = [request(id, text) for id, text, _ in rows]
        _, chats, _ = answered(client, chat, "/v1/chat/completions")
        for id, line in chats.items():
            body = line["response"]["body"]
            assert found[id].output_text == body["choices"][0]["message"]["content"], id
            assert found[id].status == "completed" and found[id].incomplete_details is None
            assert (found[id].usage.input_tokens, found[id].usage.output_tokens) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        assert found["parts"].output_text == found[rows[0][0]].output_text
        assert found["cut"].status == "incomplete" and found["cut"].incomplete_details.reason == "max_output_tokens"
        assert json.loads(found["schema"].output_text)["kind"] in ("a", "b")
        assert ended.usage.input_tokens == sum(answer.usage.input_tokens for answer in found.values())
        return f"{len(found)} responses, {len(errors)} errors"


def check_errors(errors, wrong):
    for id, (_, code, param) in wrong.items():
        response = errors[id]["response"]
        error = response["body"]["error"]
        assert response["status_code"] == 400 and error["type"] == "invalid_request_error", (id, response)
        assert (error["code"], error["param"]) == (code, param), (id, error)
        assert param.split("[")[0] in error["message"] or code == "context_length_exceeded", (id, error)
        assert "job" not in error["message"] and "truncate" not in error["message"], (id, error)


def errors(program):
    """The error of each request names its field, with OpenAI's code; good requests beside them are answered."""
    with service(program) as one:
        client = one.client()
        wrong = {
            "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
            "unknown": ({"frequency": 1}, "unknown_parameter", "frequency"),
            "range": ({"temperature": -1}, "invalid_value", "temperature"),
            "type": ({"temperature": "hot"}, "invalid_type", "temperature"),
            "limit": ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
            "choice": ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
            "logprobs": ({"logprobs": True}, "invalid_value", "logprobs"),
            "empty": ({"messages": []}, "invalid_value", "messages"),
            "no_list": ({"messages": "x"}, "invalid_type", "messages"),
            "missing": ({"messages": None}, "missing_required_parameter", "messages"),
            "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_value", "messages[0].content[0]"),
            "format": ({"structured_outputs": None, "response_format": {"type": "grammar"}}, "unsupported_value", "response_format.type"),
            "long": ({"messages": [{"role": "user", "content": "too long " * 5_000}]}, "context_length_exceeded", "messages"),
        }
        lines = [request(id, "x", **fields) for id, (fields, _, _) in wrong.items()] + [request("good", "Refund, please.")]
        _, answers, found = answered(client, lines, "/v1/chat/completions")
        assert answers.keys() == {"good"}, answers.keys()
        assert answers["good"]["response"]["body"]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        check_errors(found, wrong)
        assert "tokens" in found["long"]["response"]["body"]["error"]["message"]


def closed_schemas(program):
    """An object of a request's schema has its own properties and no others, in each way to ask for it. A job file's schema is literal."""
    properties = {"category": {"enum": CATEGORIES}, "urgent": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    ways = {
        "format": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        "guided": {"guided_json": schema},
        "structured": {"structured_outputs": {"json": schema}},
    }
    with service(program) as one:
        client = one.client()
        lines = []
        for way, fields in ways.items():
            for id, text, _ in tickets(30):
                body = {"structured_outputs": None, "temperature": 0, "max_completion_tokens": 60} | fields
                lines.append(request(f"{way}-{id}", text, **body))
        # A property that is needed and not listed keeps its object open: else no answer could be whole.
        needy = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a", "z"]}
        for id, one_schema in [("needy", needy), ("broken", {"type": "string", "pattern": "("})]:
            shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": one_schema}}
            lines.append(request(id, "x", structured_outputs=None, response_format=shape, max_completion_tokens=60))
        _, answers, found = answered(client, lines, "/v1/chat/completions")
        assert found.keys() == {"broken"}, found
        error = found["broken"]["response"]["body"]["error"]
        assert (error["code"], error["param"]) == ("invalid_json_schema", None), error
        answers.pop("needy")
        seen = 0
        for line in answers.values():
            [choice] = line["response"]["body"]["choices"]
            if choice["finish_reason"] == "stop":
                value = json.loads(choice["message"]["content"])
                assert value.keys() == {"category", "urgent"}, value
                seen += 1
        assert seen > 60, seen
        return f"{seen} of {len(lines)} answers were whole"


def job_files(program):
    """A job file over lines of `/v1/responses` writes response objects, which another generation copies."""
    with tempfile.TemporaryDirectory(prefix="gristmill-rows-") as folder:
        folder = pathlib.Path(folder)
        lines = [response_line(id, text) for id, text, _ in tickets(20)]
        lines.append(response_line("long", "too long " * 5_000))
        (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "job.yaml").write_text(
            f"name: responses\nmodel: {DEMO / 'model'}\nprecision: f32\ninput: {{uri: requests.jsonl, format: openai_batch}}\n"
            "output: {uri: out, format: openai}\nshards: {rows: 8}\n"
        )

        def found():
            lines = [json.loads(line) for path in sorted((folder / "out").glob("part-*")) for line in path.read_text().splitlines()]
            return {line["custom_id"]: line for line in lines}

        run = [program, "run", folder / "job.yaml", "--quiet"]
        assert subprocess.run(run, capture_output=True, text=True).returncode == 3
        first = found()
        assert len(first) == 21 and first["long"]["response"] is None
        bodies = [Response.model_validate(line["response"]["body"], strict=True) for line in first.values() if line["response"]]
        assert len(bodies) == 20 and all(body.output_text in CATEGORIES for body in bodies)
        retried = subprocess.run([program, "retry", folder / "out"], capture_output=True, text=True)
        assert retried.returncode == 0, retried.stderr
        assert subprocess.run(run, capture_output=True, text=True).returncode == 3
        assert found() == first, "rows that were answered are copied as they were"
        verified = subprocess.run([program, "verify", folder / "out"], capture_output=True, text=True)
        assert verified.returncode == 0, verified.stderr


CASES = [responses, errors, closed_schemas, job_files]


if __name__ == "__main__":
    run_cases(__doc__, CASES)
