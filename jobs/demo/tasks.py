"""What the demo model is taught: the categories, the tones, the two prompts and the chat format.

The two system prompts are repeated, word for word, in the job files next to this folder.
"""

CATEGORIES = [
    "account_access",
    "account_closure",
    "billing",
    "refund",
    "shipping_delay",
    "shipping_damage",
    "defect",
    "technical",
    "feature_request",
    "other",
]

URGENCIES = ["low", "normal", "high"]

TONES = ["polite", "angry", "terse", "anxious", "cheerful", "formal"]

LABEL_SYSTEM = (
    "You sort support tickets of an online shop. Read the subject and the body of the ticket, "
    "ignore quoted mail and small talk, and answer with exactly one category. The categories are: "
    + ", ".join(CATEGORIES)
    + "."
)

WRITE_SYSTEM = (
    "You write short support tickets for testing. Answer with one JSON object "
    "that has the keys subject, body and urgency."
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def prefix_text(system):
    """The part of a rendered chat that every row of a job shares: all up to the user's text."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"


def row_text(user):
    """The part of a rendered chat that follows the shared prefix, up to the answer."""
    return f"{user}<|im_end|>\n<|im_start|>assistant\n"


def label_user(subject, body):
    return f"{subject}\n\n{body}"


def write_user(category, tone):
    return f"category: {category}\ntone: {tone}"
