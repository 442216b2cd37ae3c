"""Templates of jobs and of checkpoints that double texts and lists, hold themselves, nest or never end."""

from case import DONE, FAILED_ROWS, REFUSED, Case, Step, answered, job, model, rows

# Refused from the template alone.
GROWING = {
    "text_doubled": "{% set n = namespace(s='x') %}{% for i in range(80) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}",
    "text_added": "{% set n = namespace(s='x') %}{% for i in range(80) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s|length }}",
    "doubled_without_a_loop": "{% set s = 'x' * 1000 %}" + "{% set s = s ~ s %}" * 60,
    "text_times_number": "{% set s = 'x' * 100000 %}{% set n = namespace(l=[]) %}{% for i in range(2000) %}"
                         "{% set n.l = n.l + [s ~ i] %}{% endfor %}",
    "constant_times_constant": "{{ " + " ~ ".join(["'x' * 99999999"] * 60) + " }}",
    "replaced": "{% set s = 'x' * 100000 %}{{ s|replace('x', s)|length }}",
    "replaced_by_method": "{% set s = 'x' * 100000 %}{{ s.replace('', s)|length }}",
    "joined": "{% set s = 'x' * 100000 %}{{ (s|list)|join(s)|length }}",
    "indented": "{% set s = '\\n' * 100000 %}{{ s|indent('x' * 100000)|length }}",
    "formatted": "{% set s = '%s' * 100000 %}{{ s|format('x' * 100000)|length }}",
    "tuple_repeated": "{% set s = (1, 'x') * 49000000 %}{{ s|length }}",
    "list_doubled": "{% set n = namespace(l=[1]) %}{% for i in range(80) %}{% set n.l = n.l + n.l %}{% endfor %}{{ n.l|length }}",
    "list_batched": "{{ [1]|batch(2000000000, 'x')|length }}",
    "letters_listed": "{% set s = 'x' * 90000000 %}{{ s|list|length }}",
    "captured": "{% set s = 'x' * 1000000 %}{% set t %}{% for i in range(90000) %}{{ s }}{% endfor %}{% endset %}",
    "raw_text_repeated": "{% set t %}{% for i in range(90000) %}{% for j in range(90) %}" + "words " * 2000
                         + "{% endfor %}{% endfor %}{% endset %}",
    "shared_lists": "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    "shared_mappings": "{% set n = namespace(l=1) %}{% for i in range(60) %}{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}"
                       "{{ n.l|tojson }}",
    "shared_lists_compared": "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}"
                             "{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m }}",
    "holds_itself": "{% set n = namespace() %}{% set n.a = [n] %}{{ n }}",
    "values_too_deep": "{% set n = namespace(l=[]) %}{% for i in range(90000) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
    "never_ends": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "compares_for_long": "{% set a = ('x' * 30000000) ~ 'y' %}{% set b = ('x' * 30000000) ~ 'z' %}{% for i in range(90000) %}"
                         "{% for j in range(90000) %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
}
NESTED = {
    "not_not": "{{ " + "not " * 100_000 + "true }}",
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lists": "{{ " + "[" * 100_000 + "1" + "]" * 100_000 + " }}",
    "attributes": "{{ text" + ".a" * 100_000 + " }}",
    "filters": "{{ text" + "|trim" * 100_000 + " }}",
    "sums": "{{ text" + "~text" * 100_000 + " }}",
    "choices": "{{ 1" + " if text else 1" * 60_000 + " }}",
    "blocks": "{% if text %}" * 50_000 + "x" + "{% endif %}" * 50_000,
    "elifs": "{% if text %}" + "{% elif text %}x" * 50_000 + "{% endif %}",
}


def of_job(source):
    def make(folder):
        job(folder, prompt={"text": source + "{{ text }}"})
        rows(folder, [{"text": "a"}, {"text": "b"}])
    return make


def of_checkpoint(source):
    def make(folder):
        into = model(folder)
        (into / "chat_template.jinja").write_text(source + "{% for m in messages %}{{ m.content }}{% endfor %}")
        job(folder, model="model")
        rows(folder, [{"text": "a"}, {"text": "b"}])
    return make


def of_rows(source, values):
    def make(folder):
        job(folder, prompt={"text": source})
        rows(folder, values)
    return make


def with_arguments(folder):
    job(folder, prompt={"messages": [{"role": "user", "content": "{{ text }}"}], "chat_template": "{{ messages[0].content }}{{ a }}",
                        "chat_template_kwargs": {"a": "x" * 1_000_000}})
    rows(folder, [{"text": "a"}])


def cases():
    plan, run = Step(["plan", "job.yaml"]), Step(["run", "job.yaml"], (FAILED_ROWS,))
    for name, source in (GROWING | NESTED).items():
        yield Case(f"job_{name}", of_job(source), [plan])
        yield Case(f"checkpoint_{name}", of_checkpoint(source), [plan])
    # Refused for the rows that make them large, and their neighbours are answered.
    doubled = "{% set n = namespace(s='x') %}{% for i in range(times) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s[:9] }}"
    times = [{"times": number} for number in (1, 60, 2, 80, 3)]
    yield Case("row_doubles", of_rows(doubled, times), [run], answered({1, 3}, 5))
    multiplied = [{"times": number} for number in (1, 2_000_000_000, 2, 2**62, 3)]
    yield Case("row_multiplies", of_rows("{{ ('word ' * times)[:9] }}", multiplied), [run], answered({1, 3}, 5))
    summed = [{"texts": ["x"] * number} for number in (10, 500_000, 100)]
    yield Case("row_sums_texts", of_rows("{{ (texts|sum(start=''))[:9] }}", summed), [run], answered({1}, 3))
    backwards = [{"text": text} for text in ("ab", "", "cd")]
    yield Case("row_backwards", of_rows("a{{ text[::-1] }}", backwards), [Step(["run", "job.yaml"], (DONE,))], answered(set(), 3))
    deep = b'{"text": ' + b"[" * 120 + b"1" + b"]" * 120 + b"}"
    nested = [{"text": "a"}, deep, {"text": "b"}]
    # A row as deep as its reader allows is written out, or is the only one that is not.
    for name, source in (("shown", "{{ text }}"), ("as_json", "{{ text|tojson }}"), ("compared", "{{ text == [text] }}")):
        yield Case(f"row_nested_{name}", of_rows(source, nested), [Step(["run", "job.yaml"], (DONE, FAILED_ROWS))])
    yield Case("kwargs_large", with_arguments, [Step(["run", "job.yaml"], (DONE, FAILED_ROWS, REFUSED))])
