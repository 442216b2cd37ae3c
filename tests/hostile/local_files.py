"""Files, folders, links and pipes on the local disk that somebody laid where a command reads or writes.

A folder `outside` stands for what the job has nothing to do with: it must be the same after each case, to the name and the byte.
"""

import os
import pathlib
import shutil
import stat
import time

from case import DONE, FAILED_ROWS, FAILURE, REFUSED, Case, Step, answered, job, model, rows, statuses

STAGE = "0123456789abcdef0123-7"
TERABYTE = 1 << 40
REFUSALS = (FAILURE, REFUSED)
RUN = ["run", "job.yaml", "--quiet"]


def small_job(folder, **fields):
    job(folder, **fields)
    rows(folder, [{"text": f"ticket {number}"} for number in range(4)])


def outside(folder):
    """Files that are older than an hour, one of them named as a stage is."""
    (folder / "outside").mkdir()
    for name in (STAGE, "thesis.tex"):
        path = folder / "outside" / name
        path.write_text("mine")
        old = time.time() - 7200
        os.utime(path, (old, old))


def untouched(folder, names=(STAGE, "thesis.tex")):
    found = sorted(str(path.relative_to(folder / "outside")) for path in (folder / "outside").rglob("*"))
    assert found == sorted(names), f"outside holds {found}"
    assert (folder / "outside" / STAGE).read_text() == "mine"


def link(folder, at, to):
    path = folder / "out" / at
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(folder / to)


def fifo(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def sparse(path):
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.truncate(TERABYTE)


def dangling(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/nowhere/at/all")


def directory(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def locked(path):
    path.chmod(0)


# What an output is made of


def linked_output(at, to):
    """A first run into an output in which `at` is a link already."""
    def make(folder):
        small_job(folder)
        outside(folder)
        link(folder, at, to)
    return Case(f"link_at_{at.replace('/', '_')}", make, [Step(RUN, REFUSALS, ("is a symbolic link",))], untouched)


def home(folder):
    """The folder of the one job of `out`."""
    [found] = [path for path in (folder / "out/_gristmill").iterdir() if path.is_dir() and path.name != "tmp"]
    return found


def reopened(folder):
    """A job that is done becomes one of which nothing is done."""
    for name in ("_SUCCESS", "part-00000.parquet"):
        (folder / "out" / name).unlink()
    for name in ("shards", "commits", "digests"):
        shutil.rmtree(home(folder) / name, ignore_errors=True)


def linked_in_job(at):
    """A folder of an unfinished job's ledger is a link to where all that was in it lies, so that being a link is the reason to refuse it."""
    def make(folder):
        small_job(folder)
        outside(folder)

    def before(folder):
        reopened(folder)
        place = home(folder) / at
        if place.exists():
            shutil.move(place, folder / "moved")
        else:
            (folder / "moved").mkdir()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(folder / "moved")
        (folder / "kept").write_text("\n".join(sorted(os.listdir(folder / "moved"))))

    def check(folder):
        untouched(folder)
        assert "\n".join(sorted(os.listdir(folder / "moved"))) == (folder / "kept").read_text()
    steps = [Step(RUN, (DONE,)), Step(RUN, REFUSALS, ("is a symbolic link",), before=before)]
    return Case(f"link_in_job_{at.replace('/', '_')}", make, steps, check)


def part_is_a_pipe(folder):
    reopened(folder)
    fifo(folder / "out/part-00000.parquet")


def part_is_a_link(folder):
    reopened(folder)
    link(folder, "part-00000.parquet", "outside/new")


def after_a_job(name, before, step, check=untouched):
    """A whole job; then `before` changes its output, and `step` runs."""
    def make(folder):
        small_job(folder)
        outside(folder)
    step.before = before
    return Case(name, make, [Step(RUN, (DONE,)), step], check)


def tmp_is_a_link(folder):
    tmp = folder / "out/_gristmill/tmp"
    if tmp.exists():
        tmp.rmdir()
    tmp.symlink_to(folder / "outside")


def stranger_in_tmp(folder):
    tmp = folder / "out/_gristmill/tmp"
    tmp.mkdir(exist_ok=True)
    for name in (STAGE, "thesis.tex"):
        shutil.copy2(folder / "outside" / name, tmp / name)
    (tmp / "89abcdef012301234567-1").symlink_to(folder / "outside/thesis.tex")


def only_the_stage_went(folder):
    untouched(folder)
    left = sorted(os.listdir(folder / "out/_gristmill/tmp"))
    assert left == ["89abcdef012301234567-1", "thesis.tex"], left


def shards_of_another_are_linked(folder):
    (home(folder) / "shards/000099").symlink_to(folder / "outside")


def output_is_a_link(folder):
    small_job(folder)
    (folder / "disk").mkdir()
    (folder / "out").symlink_to(folder / "disk")


def modes(folder):
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder / "out").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = 0o777 if path.is_dir() else 0o600 if path.name == "job.json" else 0o666
        assert mode == wanted & ~umask, f"{path} has mode {mode:o}"
    assert len(statuses(folder)) == 4


def special_in_output(at):
    def make(folder):
        small_job(folder)
        fifo(folder / "out" / at)
    return Case(f"pipe_at_{at.replace('/', '_')}", make, [Step(RUN, REFUSALS, ("is no regular file",))])


# What a model is made of


def spoilt_model(name, how, says=()):
    def make(folder):
        small_job(folder, model="model")
        into = model(folder)
        if not (into / name).is_symlink() and not (into / name).exists():
            (into / name).write_text("{}")
        how(into / name)
    label = name.replace(".", "_")
    return Case(f"model_{how.__name__}_{label}", make, [Step(RUN, (REFUSED,), says)])


# Inputs and what a job names


def spoilt_input(how, codes=(REFUSED,), says=("rows.jsonl",), label=""):
    def make(folder):
        small_job(folder)
        how(folder / "rows.jsonl")
    return Case(f"input_{how.__name__}{label}", make, [Step(RUN, codes, says)])


def folder_with_a_pipe(folder):
    job(folder, input={"uri": "in"})
    (folder / "in").mkdir()
    rows(folder / "in", [{"text": "ticket"}] * 2)
    fifo(folder / "in/more.jsonl")


def linked_input(folder):
    small_job(folder)
    (folder / "real.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl").symlink_to("real.jsonl")


def bad_utf8(folder):
    job(folder)
    rows(folder, [{"text": "one"}, b'{"text": "\xff\xfe"}', {"text": "three"}, b'{"text": "\xed\xa0\x80"}'])


def bad_utf8_in_batch(folder):
    body = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"%s"}]}}'
    job(folder, prompt=None)
    rows(folder, [body % (0, b"one"), body % (1, b"\xc3"), body % (2, b"three")])


def spoilt_template(how):
    def make(folder):
        small_job(folder, prompt={"messages": [{"role": "user", "content": "{{ text }}"}], "chat_template": "t.jinja"})
        (folder / "t.jinja").write_text("{{ messages }}")
        how(folder / "t.jinja")
    return Case(f"template_{how.__name__}", make, [Step(RUN, (REFUSED,), ("t.jinja",))])


def spoilt_job(how):
    def make(folder):
        small_job(folder)
        how(folder / "job.yaml")
    return Case(f"job_{how.__name__}", make, [Step(RUN, (REFUSED,), ("job.yaml",))])


def password(how, label):
    def make(folder):
        small_job(folder)
        (folder / "password").write_text("x")
        how(folder / "password")
    env = {"GRISTMILL_QUEUE_PASSWORD_FILE": "password"}
    step = Step(["submit", "job.yaml", "--queue", "amqp://me@127.0.0.1:1/jobs"], (REFUSED,), ("password",), env=env)
    return Case(f"password_{label}", make, [step])


def cases():
    yield linked_output("_gristmill", "outside")
    yield linked_output("_gristmill/tmp", "outside")
    yield linked_output("_gristmill/job.json", "outside/new")
    yield linked_output("_SUCCESS", "outside/new")
    yield after_a_job("part_is_a_link", part_is_a_link, Step(RUN, REFUSALS, ("is a symbolic link",)))
    for at in ("shards", "shards/000000", "shards/000000/log", "commits", "spend", "control"):
        yield linked_in_job(at)
    for name, argv in (("run", RUN), ("clean", ["clean", "out", "--yes"])):
        yield after_a_job(f"tmp_is_a_link_{name}", tmp_is_a_link, Step(argv, REFUSALS, ("is a symbolic link",)))
        yield after_a_job(f"strangers_in_tmp_{name}", stranger_in_tmp, Step(argv, (DONE,)), only_the_stage_went)
    yield after_a_job("clean_passes_no_link", shards_of_another_are_linked, Step(["clean", "out", "--yes"], (DONE,)))
    yield Case("output_is_a_link", output_is_a_link, [Step(RUN, (DONE,))], answered((), 4))
    yield Case("modes", small_job, [Step(RUN, (DONE,))], modes)
    for at in ("_gristmill/job.json", "_SUCCESS"):
        yield special_in_output(at)
    yield after_a_job("part_is_a_pipe", part_is_a_pipe, Step(RUN, REFUSALS, ("is no regular file",)))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        for how in (fifo, sparse, directory, dangling):
            yield spoilt_model(name, how)
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        for how in (fifo, sparse):
            yield spoilt_model(name, how)
    yield spoilt_input(fifo, says=("rows.jsonl", "a pipe"))
    yield spoilt_input(sparse)
    yield spoilt_input(dangling)
    yield Case("input_folder_with_a_pipe", folder_with_a_pipe, [Step(RUN, (DONE,))], answered((), 2))
    yield Case("input_is_a_link", linked_input, [Step(RUN, (DONE,))], answered((), 4))
    yield Case("rows_that_are_not_utf8", bad_utf8, [Step(RUN, (FAILED_ROWS,))], answered((1, 3), 4))
    yield Case("batch_lines_that_are_not_utf8", bad_utf8_in_batch, [Step(RUN, (FAILED_ROWS,))], answered((1,), 3))
    for how in (fifo, sparse, directory, dangling):
        yield spoilt_template(how)
        yield spoilt_job(how)
    yield Case("job_is_a_device", small_job, [Step(["run", "/dev/zero"], (REFUSED,), ("a device",))])
    yield password(fifo, "is_a_pipe")
    yield password(sparse, "is_sparse")
