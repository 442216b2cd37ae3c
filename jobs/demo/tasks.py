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


# The markup of the thinking variant.
THINK, THINK_END = "<think>", "</think>"
# What stands before a thought, after it, and in place of one where the prompt rules thoughts out.
THINK_OPEN, THINK_CLOSE = f"{THINK}\n", f"\n{THINK_END}\n\n"
NO_THOUGHT = f"{THINK}\n\n{THINK_END}\n\n"

# Only what follows the last question keeps its thought, as models that think are mostly trained.
THINKING_TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set last.user = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > last.user -%}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
