"""Makes the demo's data: support tickets with their category, and briefs for writing tickets.

    python generate.py            writes tickets.parquet, tickets.csv (its first hundred), briefs.parquet and nightly/ next to this file

train.py takes its examples from `training_tickets` and `writing_examples`. Everything follows from
the seeds. The evaluation set is drawn first; training never gets a ticket whose normalised text is
in it, and never a phrase from a `*_held` list of phrases.py.
"""

import argparse
import csv
import datetime
import json
import random
import re
from pathlib import Path

import phrases
from tasks import CATEGORIES, TONES, URGENCIES

EVALUATION_SEED = 20_001
TRAINING_SEED = 20_002
WRITING_SEED = 20_003
BRIEFS_SEED = 20_004
NIGHTLY_SEED = 20_005

EVALUATION_ROWS = 2_000
BRIEF_ROWS = 400
ROWS_PER_GROUP = 250
CSV_ROWS = 100
NIGHTS = ["2026-11-23", "2026-11-24"]
NIGHTLY_ROWS = 24
MAX_WORDS = 170

ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"<([a-z]+)>")


def order_number(rng):
    return rng.choice(["A-{}", "#{}", "{}", "ORD{}"]).format(rng.randint(10_000, 99_999))


def date(rng):
    day, month = rng.randint(1, 28), rng.choice(phrases.SLOTS["month"])
    return rng.choice([f"{day} {month}", f"{month} {day}", f"{day:02}/{rng.randint(1, 12):02}"])


def amount(rng):
    value = f"{rng.randint(3, 400)}.{rng.choice(['00', '50', '90', '95', '99'])}"
    return rng.choice(["EUR {}", "{} euros", "${}", "£{}"]).format(value)


MADE_SLOTS = {
    "order": order_number,
    "date": date,
    "amount": amount,
    "invoice": lambda rng: f"{rng.choice('BRTX')}{rng.choice('KLMN')}-{rng.randint(1_000, 9_999)}",
    "email": lambda rng: f"{rng.choice(phrases.SLOTS['person']).lower()}{rng.randint(1, 99)}@mail.example",
    "phone": lambda rng: f"0{rng.randint(100, 999)} {rng.randint(1_000, 9_999)}",
    "code": lambda rng: str(rng.choice([400, 403, 404, 500, 502, 503, 1012, 1207])),
    "version": lambda rng: f"{rng.randint(1, 9)}.{rng.randint(0, 12)}.{rng.randint(0, 9)}",
}


def fill_slot(rng, name):
    return MADE_SLOTS[name](rng) if name in MADE_SLOTS else rng.choice(phrases.SLOTS[name])


def draw_facts(rng):
    """What stays the same throughout one ticket."""
    return {name: fill_slot(rng, name) for name in ("product", "order", "feature", "courier")}


def expand(rng, template, facts={}):
    """Picks alternatives from the innermost brackets outwards, then fills the slots."""
    while True:
        template, found = ALTERNATIVES.subn(lambda m: rng.choice(m[1].split("|")), template)
        if not found:
            break
    text = SLOT.sub(lambda m: facts.get(m[1]) or fill_slot(rng, m[1]), template).strip()
    text = re.sub(r"\ba (?=[AEIOU][a-z])", "an ", text)
    # "the courier" can open a sentence.
    return text[:1].upper() + text[1:] if template.startswith("<courier>") else text


def pick(rng, templates, facts={}):
    return expand(rng, rng.choice(templates), facts)


def typos(rng, text, rate):
    """Swaps, drops or doubles single letters."""
    letters = list(text)
    for i in range(len(letters) - 1):
        if letters[i].isalpha() and rng.random() < rate:
            kind = rng.randrange(3)
            if kind == 0 and letters[i + 1].isalpha():
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
            elif kind == 1:
                letters[i] = ""
            else:
                letters[i] *= 2
    return "".join(letters)


def pick_urgency(rng, tone):
    weights = {"angry": (1, 3, 4), "anxious": (1, 3, 4), "cheerful": (4, 3, 1)}
    return rng.choices(URGENCIES, weights.get(tone, (1, 2, 1)))[0]


def distractor(rng, category):
    topic = pick(rng, phrases.TOPIC[rng.choice([c for c in CATEGORIES if c != category])])
    return pick(rng, phrases.DISTRACTOR, {"topic": topic})


def short_ticket(rng, category, held):
    """A ticket of a few words, without any decoration; the last value is the phrase that names its problem."""
    words, facts = phrases.CATEGORY[category], draw_facts(rng)
    problem = rng.choice(words["short_held" if held else "short"])
    body = expand(rng, problem, facts)
    subject = pick(rng, phrases.GENERIC_SUBJECT, facts)
    urgency = rng.choice(URGENCIES)
    if rng.random() < 0.5:
        subject = pick(rng, words["subject_held" if held else "subject"], facts)
    if urgency != "normal":
        body += rng.choice([". ", " - ", ", "]) + pick(rng, phrases.URGENCY[urgency]).lower()
    return subject, body, urgency, problem


def long_ticket(rng, category, held):
    words, facts = phrases.CATEGORY[category], draw_facts(rng)
    suffix = "_held" if held else ""
    tone = rng.choice(TONES)
    voice = phrases.TONE[tone]
    urgency = pick_urgency(rng, tone)

    if rng.random() < 0.2:
        subject = pick(rng, phrases.GENERIC_SUBJECT, facts)
    else:
        subject = pick(rng, words["subject" + suffix], facts)

    problem = rng.choice(words["core" + suffix])
    sentences = [expand(rng, problem, facts)]
    if rng.random() < 0.25:
        sentences.append(pick(rng, words["core" + suffix], facts))
    details = rng.sample(words["detail"], rng.choice([0, 0, 1, 1, 2, 3]))
    sentences += [expand(rng, detail, facts) for detail in details]
    if rng.random() < 0.5:
        sentences.append(pick(rng, words["ask"], facts))
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4])):
        sentences.insert(rng.randrange(len(sentences) + 1), pick(rng, phrases.OFF_TOPIC))
    if rng.random() < 0.12:
        sentences.insert(rng.randrange(len(sentences) + 1), distractor(rng, category))
    if rng.random() < 0.5:
        sentences.insert(0, pick(rng, voice["open"]))
    sentences.insert(rng.choice([1, len(sentences)]), pick(rng, phrases.URGENCY[urgency]))
    if rng.random() < 0.5:
        sentences.append(pick(rng, voice["close"]))
    body = rng.choice([" ", " ", "\n", "\n\n"]).join(s for s in sentences if s)

    if rng.random() < 0.6:
        body = pick(rng, voice["greeting"]) + rng.choice([" ", "\n", "\n\n"]) + body
    if rng.random() < 0.6:
        body += "\n\n" + pick(rng, voice["sign"]) + "\n" + pick(rng, ["<person>"])
    if rng.random() < 0.12:
        body = pick(rng, phrases.FORWARD) + body
    if rng.random() < 0.15:
        body += "\n\n" + pick(rng, phrases.FOOTER)
    if rng.random() < 0.15:
        body += "\n\n" + pick(rng, phrases.HISTORY)
    return subject, body, urgency, problem


def add_noise(rng, subject, body):
    if rng.random() < 0.2:
        rate = rng.choice([0.005, 0.01, 0.03])
        subject, body = typos(rng, subject, rate), typos(rng, body, rate)
    style = rng.random()
    if style < 0.10:
        subject, body = subject.lower(), body.lower()
    elif style < 0.15:
        subject = subject.upper()
    if rng.random() < 0.08:
        body = re.sub(" ", lambda m: "  " if rng.random() < 0.2 else " ", body)
    if rng.random() < 0.10:
        subject = rng.choice(["Re: ", "RE: ", "Fwd: ", "AW: "]) + subject
    return subject.strip(), body.strip()


def ticket(rng, category, held):
    while True:
        make = short_ticket if rng.random() < 0.12 else long_ticket
        subject, body, urgency, problem = make(rng, category, held)
        subject, body = add_noise(rng, subject, body)
        # Typos can eat a whole short text.
        if subject and body and len(body.split()) <= MAX_WORDS:
            return {
                "subject": subject,
                "body": body,
                "category": category,
                "urgency": urgency,
                "problem": problem,
            }


def normalised(row):
    return " ".join(re.findall(r"[a-z0-9]+", f"{row['subject']} {row['body']}".lower()))


def evaluation_tickets():
    """The evaluation set; the key `held` says whether the phrases are ones never trained on."""
    rng = random.Random(EVALUATION_SEED)
    rows, seen = [], set()
    while len(rows) < EVALUATION_ROWS:
        held = len(rows) % 2 == 1
        row = ticket(rng, CATEGORIES[len(rows) // 2 % len(CATEGORIES)], held)
        if normalised(row) not in seen:
            seen.add(normalised(row))
            rows.append(row | {"held": held})
    rng.shuffle(rows)
    start = datetime.datetime(2025, 1, 6, 8, tzinfo=datetime.timezone.utc)
    for i, row in enumerate(rows):
        start += datetime.timedelta(seconds=rng.randint(20, 3_600))
        row["ticket_id"] = f"T{100_000 + i}"
        row["created_at"] = start
    return rows


def training_tickets(count, evaluation):
    """`count` tickets of seen phrases, none of them in the evaluation set."""
    rng = random.Random(TRAINING_SEED)
    barred = {normalised(row) for row in evaluation}
    rows = []
    while len(rows) < count:
        row = ticket(rng, CATEGORIES[len(rows) % len(CATEGORIES)], held=False)
        if normalised(row) not in barred:
            rows.append(row)
    assert not barred & {normalised(row) for row in rows}, "an evaluation ticket is in the training set"
    rng.shuffle(rows)
    return rows


def writing_examples(count):
    """Short, clean tickets with their tone, as the JSON text that the model is to write."""
    rng = random.Random(WRITING_SEED)
    rows = []
    for _ in range(count):
        category, tone = rng.choice(CATEGORIES), rng.choice(TONES)
        words, voice, facts = phrases.CATEGORY[category], phrases.TONE[tone], draw_facts(rng)
        urgency = pick_urgency(rng, tone)
        parts = [pick(rng, words["core"], facts)]
        if tone == "terse":
            parts = [pick(rng, words["core"] + words["short"], facts)]
        else:
            if rng.random() < 0.4:
                parts.insert(0, pick(rng, voice["open"]))
            parts.append(pick(rng, rng.choice([words["detail"], words["ask"]]), facts))
        parts.append(pick(rng, phrases.URGENCY[urgency]))
        if tone != "terse" and rng.random() < 0.7:
            parts.append(pick(rng, voice["close"]))
        body = " ".join(p for p in parts if p)
        greeting = pick(rng, voice["greeting"])
        if greeting:
            body = greeting + ("\n" if tone in ("polite", "formal") else " ") + body
        answer = {"subject": pick(rng, words["subject"], facts), "body": body, "urgency": urgency}
        rows.append({"category": category, "tone": tone, "answer": json.dumps(answer, ensure_ascii=False)})
    return rows


def briefs():
    rng = random.Random(BRIEFS_SEED)
    pairs = [(c, t) for c in CATEGORIES for t in TONES]
    rows = [pairs[i % len(pairs)] for i in range(BRIEF_ROWS)]
    rng.shuffle(rows)
    return [{"brief_id": i + 1, "category": c, "tone": t} for i, (c, t) in enumerate(rows)]


def nightly_briefs():
    """For each night the briefs that came in on that day."""
    rng = random.Random(NIGHTLY_SEED)
    drawn = [(rng.choice(CATEGORIES), rng.choice(TONES)) for _ in range(NIGHTLY_ROWS * len(NIGHTS))]
    rows = [{"brief_id": i + 1, "category": c, "tone": t} for i, (c, t) in enumerate(drawn)]
    return {night: rows[n * NIGHTLY_ROWS :][:NIGHTLY_ROWS] for n, night in enumerate(NIGHTS)}


def write_parquet(path, rows, schema):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: [row[name] for row in rows] for name in schema.names}, schema=schema)
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP)
    print(f"{path.name}: {table.num_rows} rows, {path.stat().st_size} bytes")


def main():
    import pyarrow as pa

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--check", type=int, default=60_000, help="training tickets to check against the evaluation set")
    args = parser.parse_args()

    evaluation = evaluation_tickets()
    training_tickets(args.check, evaluation)
    text = ["ticket_id", "subject", "body", "category", "urgency"]
    fields = {name: pa.string() for name in text} | {"created_at": pa.timestamp("us", tz="UTC")}
    order = ["ticket_id", "created_at", "subject", "body", "category", "urgency"]
    write_parquet(args.out / "tickets.parquet", evaluation, pa.schema([(n, fields[n]) for n in order]))
    with open(args.out / "tickets.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, order, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(evaluation[:CSV_ROWS])
    brief = pa.schema([("brief_id", pa.int64()), ("category", pa.string()), ("tone", pa.string())])
    write_parquet(args.out / "briefs.parquet", briefs(), brief)
    for night, rows in nightly_briefs().items():
        folder = args.out / "nightly" / f"date={night}"
        folder.mkdir(parents=True, exist_ok=True)
        write_parquet(folder / "briefs.parquet", rows, brief)


if __name__ == "__main__":
    main()
