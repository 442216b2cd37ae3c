"""Names, rows and files that hold what acts on a terminal: titles, cleared screens, letters in another order. None of it is printed
as it is."""

import json

from case import DONE, FAILED_ROWS, FAILURE, REFUSED, Case, Step, job, model, rows

ATTACK = "\x1b]0;pwned\x07\x1b[2J\u202e\r\x9b2J\u2066\u200f\x7f\u2028"
# What a file's name and a job's may hold of it.
NAME = "\u202ename\u2066\u200f\u200e"
RAW = ("\x1b", "\x07", "\r", "\x9b", "\x7f", "\u202e", "\u2066", "\u200f", "\u200e", "\u2028")
ANY = (DONE, FAILURE, REFUSED, FAILED_ROWS)


def step(*argv, codes=ANY, says=(), env=None):
    return Step(list(argv), codes, says=says, silent=RAW, env=env or {})


def in_rows(folder):
    job(folder, name=NAME, output={"uri": "out", "carry": ["text"]})
    rows(folder, [{"text": ATTACK}, {"text": ATTACK * 40}, {"text": None, ATTACK: ATTACK}])


def in_columns(folder):
    job(folder, prompt={"text": "{{ row[" + json.dumps(ATTACK) + "] }}"})
    rows(folder, [{"text": ATTACK}])


def in_carry(folder):
    job(folder, output={"uri": "out", "carry": [ATTACK]})
    rows(folder, [{"text": "a"}])


def in_template(source):
    def make(folder):
        job(folder, prompt={"text": source})
        rows(folder, [{"text": ATTACK}, {"text": "b"}])
    return make


def in_checkpoint(source):
    def make(folder):
        into = model(folder)
        (into / "chat_template.jinja").write_text(source)
        job(folder, model="model")
        rows(folder, [{"text": ATTACK}])
    return make


def in_files(folder):
    for at in ("in", "out"):
        (folder / (at + ATTACK)).mkdir()
    job(folder, name=NAME, input={"uri": f"in{ATTACK}/*.jsonl"}, output={"uri": f"out{ATTACK}/here"})
    rows(folder, [{"text": "a"}], name=f"in{ATTACK}/rows{ATTACK}.jsonl")


def in_broken_file(folder):
    (folder / f"in{ATTACK}").mkdir()
    job(folder, input={"uri": f"in{ATTACK}/*.jsonl"})
    rows(folder, [b'{"text": "a"', ATTACK.encode()], name=f"in{ATTACK}/rows.jsonl")


def in_model_folder(folder):
    model(folder).rename(folder / f"model{ATTACK}")
    (folder / f"model{ATTACK}" / "config.json").write_text('{"model_type": "' + NAME + '"')
    job(folder, model=f"model{ATTACK}")
    rows(folder, [{"text": "a"}])


def in_config(folder):
    model(folder, config__json=lambda config: config | {"model_type": ATTACK, "architectures": [ATTACK], ATTACK: 1})
    job(folder, model="model")
    rows(folder, [{"text": "a"}])


def in_keys(folder):
    job(folder, **{ATTACK: ATTACK})
    rows(folder, [{"text": "a"}])


def in_yaml(folder):
    (folder / "job.yaml").write_text("name: t\nmodel: m\ninput: {uri: " + "\u202e\x85\u2066" + "\n  output: [\u200f")


def cases():
    out = f"out{ATTACK}/here"
    yield Case("rows_planned", in_rows, [step("plan", "job.yaml"), step("plan", "job.yaml", "--json")])
    yield Case("rows_run", in_rows, [step("run", "job.yaml"), step("status", "out"), step("verify", "out"),
                                     step("retry", "out"), step("clean", "out"), step("cancel", "out")])
    yield Case("rows_logged", in_rows, [step("run", "job.yaml", env={"RUST_LOG": "trace"})])
    yield Case("columns", in_columns, [step("plan", "job.yaml"), step("run", "job.yaml")])
    yield Case("carry", in_carry, [step("plan", "job.yaml"), step("run", "job.yaml")])
    raised = "{{ raise_exception(messages[0].content) }}"
    yield Case("raised_by_checkpoint", in_checkpoint(raised), [step("plan", "job.yaml"), step("run", "job.yaml")])
    yield Case("role_by_checkpoint", in_checkpoint("{{ " + json.dumps(ATTACK)), [step("plan", "job.yaml")])
    yield Case("unknown_filter", in_template("{{ text|" + NAME + " }}"), [step("plan", "job.yaml")])
    yield Case("text_in_error", in_template("{{ text|int }}"), [step("plan", "job.yaml"), step("run", "job.yaml")])
    yield Case("previewed", in_template("{{ text }}" + ATTACK), [step("plan", "job.yaml", codes=(DONE,), says=("\\u001b[2J",))])
    yield Case("files", in_files, [step("plan", "job.yaml"), step("run", "job.yaml"), step("status", out), step("clean", out)])
    yield Case("broken_file", in_broken_file, [step("plan", "job.yaml"), step("run", "job.yaml")])
    yield Case("model_folder", in_model_folder, [step("plan", "job.yaml", codes=(REFUSED,))])
    yield Case("config", in_config, [step("plan", "job.yaml", codes=(REFUSED,))])
    yield Case("job_keys", in_keys, [step("plan", "job.yaml", codes=(REFUSED,))])
    yield Case("job_yaml", in_yaml, [step("plan", "job.yaml", codes=(REFUSED,))])
    yield Case("job_missing", lambda folder: None, [step("plan", f"job{NAME}.yaml", codes=(REFUSED,)),
                                                    step("status", f"out{ATTACK}")])
