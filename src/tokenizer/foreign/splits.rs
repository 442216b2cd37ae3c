//! How texts are split before merges, by the names that GGUF files have for it.
//!
//! A file has such a name and not the steps themselves. The steps here are those of the published
//! `tokenizer.json` of the models that a name stands for.

use serde_json::{Value, json};

use super::tiktoken::LLAMA3;

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What stands before the step that turns bytes into characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// An expression whose matches are pieces.
    Expression(&'static str),
    /// Digits by themselves, then GPT-2's expression.
    Digits,
    /// GPT-2's expression.
    Gpt2,
}

/// How the models of a name split texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Split {
    step: Step,
    /// Whether texts are put into Unicode's form NFC first.
    is_composed: bool,
    /// Whether a piece that is a token is that token, whatever merges would make of it.
    pub(super) ignores_merges: bool,
    /// Whether a prompt begins with the token for that, if the file does not say it.
    pub(super) adds_bos: bool,
}

const PLAIN: Split = Split {
    step: Step::Gpt2,
    is_composed: false,
    ignores_merges: false,
    adds_bos: false,
};

/// Names with their splits.
const SPLITS: [(&str, Split); 11] = [
    ("llama-bpe", LLAMA),
    ("llama3", LLAMA),
    ("llama-v3", LLAMA),
    ("qwen2", QWEN),
    ("gpt-2", PLAIN),
    ("smollm", DIGITS),
    (
        "command-r",
        Split {
            is_composed: true,
            ..DIGITS
        },
    ),
    (
        "dbrx",
        Split {
            step: Step::Expression(LLAMA3),
            ..PLAIN
        },
    ),
    (
        "tekken",
        Split {
            step: Step::Expression(TEKKEN),
            ignores_merges: true,
            adds_bos: true,
            ..PLAIN
        },
    ),
    (
        "gpt-4o",
        Split {
            step: Step::Expression(GPT4O),
            ..PLAIN
        },
    ),
    (
        "seed-coder",
        Split {
            step: Step::Expression(SEED),
            ..PLAIN
        },
    ),
];

const LLAMA: Split = Split {
    step: Step::Expression(LLAMA3),
    ignores_merges: true,
    adds_bos: true,
    ..PLAIN
};
const QWEN: Split = Split {
    step: Step::Expression(QWEN2),
    is_composed: true,
    ..PLAIN
};
const DIGITS: Split = Split {
    step: Step::Digits,
    ..PLAIN
};

impl Split {
    /// The split of a name.
    ///
    /// # Errors
    /// It is not known.
    pub(super) fn of(name: &str) -> Result<Split, String> {
        let found = SPLITS.iter().find(|(known, _)| *known == name);
        found.map(|(_, split)| *split).ok_or_else(|| {
            let known: Vec<&str> = SPLITS.iter().map(|(known, _)| *known).collect();
            format!(
                "how its texts are split (`tokenizer.ggml.pre`: `{}`) is not known; {} are: put the `tokenizer.json` of the model \
                 beside the file, in a folder of their own, and give the folder",
                name.escape_debug(),
                known.join(", ")
            )
        })
    }

    /// The step of `tokenizer.json` that normalises texts.
    pub(super) fn normalizer(self) -> Value {
        if self.is_composed {
            json!({"type": "NFC"})
        } else {
            Value::Null
        }
    }

    /// The steps of `tokenizer.json` that split texts.
    pub(super) fn pre_tokenizer(self) -> Value {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex});
        let both = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
        match self.step {
            Step::Gpt2 => bytes(true),
            Step::Digits => both(json!({"type": "Digits", "individual_digits": true}), bytes(true)),
            Step::Expression(expression) => both(
                json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false}),
                bytes(false),
            ),
        }
    }
}
