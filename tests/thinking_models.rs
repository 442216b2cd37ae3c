//! Models that think, in the template styles of seven of them: prompts as transformers renders them, completions token by token.
//!
//! `tests/fixtures/make_thinking_templates.py` wrote down what transformers makes of each template and conversation.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use gristmill::dataset::row::InputRow;
use gristmill::device::cpu::sample::{Scratch, sample};
use gristmill::engine::constraint::{Constraint, GrammarState};
use gristmill::engine::params::{GenerationParams, OutputConstraint};
use gristmill::engine::request::{Completion, FinishReason, Request, SampleId};
use gristmill::engine::sequence::{SampleState, TokenOutcome};
use gristmill::engine::thinking::CompletionStart;
use gristmill::job::{Job, JobFile, RenderSetup, Renderer};
use gristmill::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::support::root;

/// A style: its template, its added tokens with whether each is special, its delimiters as they are generated, and what stands
/// between thought, closing delimiter and answer.
struct Style {
    name: &'static str,
    added: &'static [(&'static str, bool)],
    opens: &'static str,
    closes: &'static str,
    before: &'static str,
    gap: &'static str,
    /// How prompts begin completions, by the fixture's names of conversations: plain ones, `thinking off`, `no thinking asked for`.
    begins: [CompletionStart; 3],
}

/// As published: Qwen's delimiters are added tokens that are not special, Mistral's and OpenAI's are control tokens.
const CHATML: &[(&str, bool)] = &[
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<think>", false),
    ("</think>", false),
];
const DEEPSEEK: &[(&str, bool)] = &[
    ("<｜User｜>", false),
    ("<｜Assistant｜>", false),
    ("<｜end▁of▁sentence｜>", true),
    ("<think>", false),
    ("</think>", false),
];
const MISTRAL: &[(&str, bool)] = &[
    ("[INST]", true),
    ("[/INST]", true),
    ("[SYSTEM_PROMPT]", true),
    ("[/SYSTEM_PROMPT]", true),
    ("[THINK]", true),
    ("[/THINK]", true),
];
const HARMONY: &[(&str, bool)] = &[
    ("<|start|>", true),
    ("<|message|>", true),
    ("<|channel|>", true),
    ("<|end|>", true),
    ("<|return|>", true),
];
const FINAL: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

const fn chatml(name: &'static str, opens: &'static str, gap: &'static str, begins: [CompletionStart; 3]) -> Style {
    Style {
        name,
        added: CHATML,
        opens,
        closes: "</think>",
        before: "\n",
        gap,
        begins,
    }
}

const STYLES: [Style; 7] = [
    Style {
        added: DEEPSEEK,
        ..chatml("r1_distill", "", "\n\n", [CompletionStart::Thought; 3])
    },
    chatml("qwq", "", "\n\n", [CompletionStart::Thought; 3]),
    chatml(
        "qwen3",
        "<think>",
        "\n\n",
        [
            CompletionStart::Either,
            CompletionStart::Answer,
            CompletionStart::Either,
        ],
    ),
    chatml("qwen3_thinking", "", "\n\n", [CompletionStart::Thought; 3]),
    chatml(
        "smollm3",
        "<think>",
        "\n",
        [
            CompletionStart::Either,
            CompletionStart::Either,
            CompletionStart::Answer,
        ],
    ),
    Style {
        name: "magistral",
        added: MISTRAL,
        opens: "[THINK]",
        closes: "[/THINK]",
        before: "",
        gap: "",
        begins: [CompletionStart::Either; 3],
    },
    Style {
        name: "harmony",
        added: HARMONY,
        opens: "<|channel|>analysis<|message|>",
        closes: FINAL,
        before: "",
        gap: "",
        begins: [CompletionStart::Either; 3],
    },
];

/// What the model is asked for of an opening delimiter under a shape: of harmony's, which message it is.
fn asked_opening(opens: &str) -> &str {
    if opens.starts_with("<|channel|>") { "a" } else { opens }
}

fn fixture() -> Value {
    let path = root().join("tests/fixtures/thinking/rendered.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A byte-level tokenizer without words, whose added tokens are as special as a published model's.
fn tokenizer(style: &Style) -> Arc<Tokenizer> {
    // GPT-2's bytes: printable ones stand for themselves, the others lie above 255.
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut above = 256..;
    let chars = (0..256).map(|byte| if printable(byte) { byte } else { above.next().unwrap() });
    let vocab: serde_json::Map<String, Value> = chars
        .zip(0..)
        .map(|(c, id): (u32, u32)| (char::from_u32(c).unwrap().to_string(), id.into()))
        .collect();
    let added = [("<s>", true), ("</s>", true)].iter().chain(style.added).zip(256..);
    let added: Vec<Value> = added
        .map(|((content, special), id)| {
            json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false})
        })
        .collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let template = root().join(format!("tests/fixtures/thinking/{}.jinja", style.name));
    let config =
        json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": std::fs::read_to_string(template).unwrap()});
    Arc::new(Tokenizer::from_json(&tokenizer.to_string(), Some(&config.to_string())).unwrap())
}

/// The renderer of a job with these messages.
fn renderer(style: &Style, messages: &Value, kwargs: &Value, generate: Value) -> Renderer {
    try_renderer(style, messages, kwargs, generate).unwrap()
}

fn try_renderer(style: &Style, messages: &Value, kwargs: &Value, generate: Value) -> Result<Renderer, String> {
    let job = json!({"name": "t", "model": "m", "input": {"uri": "in.parquet"}, "output": {"uri": "out"},
        "prompt": {"messages": messages, "chat_template_kwargs": kwargs}, "generate": generate});
    let parsed = JobFile::parse(&job.to_string(), "t.json").map_err(|e| e.to_string())?;
    let job = Job::check(parsed, "t.json", Path::new(".")).map_err(|e| e.to_string())?;
    let setup = RenderSetup {
        tokenizer: tokenizer(style),
        model_vocabulary: 1 << 20,
        context_tokens: 4096,
        seed: 9,
        now: chrono::DateTime::UNIX_EPOCH.naive_utc(),
        retry_max_tokens: None,
    };
    Renderer::new(&job, setup).map_err(|e| e.to_string())
}

fn row() -> InputRow {
    InputRow {
        row: 0,
        fields: Ok(serde_json::Map::new()),
    }
}

/// The completion where the model wants these tokens, one each time it is asked; all of them are to be taken.
fn complete(tokenizer: &Arc<Tokenizer>, prompt: &[u32], params: &Arc<GenerationParams>, wants: &[u32]) -> Completion {
    let eos = tokenizer.eos_id().unwrap();
    let constraint = Constraint::compile(&params.shape, tokenizer, &[eos]).unwrap();
    let request = Request {
        id: SampleId {
            job: 0,
            row: 0,
            sample: 0,
            attempt: 0,
        },
        prompt: prompt.into(),
        params: params.clone(),
        eos: [eos].into(),
        cache_salt: Arc::default(),
        adapter: 0,
    };
    let (mut state, mut next) = SampleState::new(request, constraint, params.max_tokens as usize, tokenizer);
    let mut nodes = VecDeque::new();
    for asked in 0.. {
        match next {
            TokenOutcome::Finished(result) => {
                assert_eq!(asked, wants.len(), "{:?}", tokenizer.decode(wants));
                return result.unwrap();
            }
            TokenOutcome::Continue(at) => nodes.extend(at.into_iter().map(|at| at.node)),
        }
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        // Certain at a temperature of 1.
        logits[wants[asked] as usize] = 100.0;
        let node = nodes.pop_front().unwrap();
        state.grammar().into_iter().for_each(GrammarState::prepare);
        state.prepare(tokenizer);
        let drawn = sample(&logits, state.draw(node, tokenizer), &mut Scratch::default());
        next = state.consume(node, drawn, tokenizer);
    }
    unreachable!()
}

#[test]
fn prompts_are_those_of_transformers_and_say_how_completions_begin() {
    let fixture = fixture();
    let cases = fixture["cases"].as_array().unwrap();
    let mut seen = 0;
    for style in &STYLES {
        for case in cases
            .iter()
            .filter(|case| case["template"] == style.name && case["name"] != "answered")
        {
            let name = case["name"].as_str().unwrap();
            let begin = match name {
                "thinking off" => style.begins[1],
                "no thinking asked for" => style.begins[2],
                _ => style.begins[0],
            };
            // Messages of a job have no thoughts of their own; templates that are asked for one drop it, but for Mistral's.
            let mut messages = case["messages"].clone();
            let said = messages.as_array_mut().unwrap().iter_mut();
            let mut shows = false;
            for message in said.filter_map(Value::as_object_mut) {
                message.remove("thinking");
                shows |= message.remove("reasoning_content").is_some();
            }
            let renderer = renderer(style, &messages, &case["kwargs"], json!({}));
            let rendered = renderer.render(&row()).unwrap();
            if !(shows && style.name == "magistral") {
                assert_eq!(rendered.text, case["text"].as_str().unwrap(), "{}, {name}", style.name);
            }
            let thinking = rendered.params.thinking.clone().expect("it thinks");
            assert_eq!(
                thinking.completion_start(&rendered.tokens),
                begin,
                "{}, {name}",
                style.name
            );
            assert_eq!(
                renderer.thinking().unwrap().begin,
                Some(begin),
                "{}, {name}",
                style.name
            );
            let ids = |text: &str| tokenizer(style).encode(text, false).unwrap();
            assert_eq!(thinking.close, ids(style.closes), "{}", style.name);
            assert_eq!(thinking.gap, ids(style.gap), "{}", style.name);
            assert_eq!(
                thinking.forced_close,
                ids(&format!("{}{}", style.before, style.closes)),
                "{}",
                style.name
            );
            seen += 1;
        }
    }
    assert_eq!(seen, 7 * 4 + 1, "Qwen 3 alone reads `enable_thinking`");
}

/// What the model has written in the end is what its template makes of the same thought and answer.
#[test]
fn completions_have_the_form_of_the_template() {
    let fixture = fixture();
    let (thought, answer) = (
        fixture["thought"].as_str().unwrap(),
        fixture["answer"].as_str().unwrap(),
    );
    let cases = fixture["cases"].as_array().unwrap();
    let mut shown = 0;
    for style in &STYLES {
        let case = |name: &str| {
            let mut cases = cases.iter().filter(|case| case["template"] == style.name);
            cases.find(|case| case["name"] == name).unwrap()
        };
        let tokenizer = tokenizer(style);
        let ids = |text: &str| tokenizer.encode(text, false).unwrap();
        for shape in [
            json!({"choice": ["shipping", "billing"]}),
            json!({"choice": ["shipping", "billing"], "choice_probabilities": true}),
            json!({"regex": "shipping|billing"}),
            json!({}),
        ] {
            let renderer = renderer(style, &case("with system")["messages"], &json!({}), shape.clone());
            let prompt = renderer.render(&row()).unwrap();
            let Style {
                opens,
                closes,
                before,
                gap,
                ..
            } = style;
            // Some prompts go on behind the delimiter that they open, and so does the model that opens it.
            let line = if *opens == "<think>" { "\n" } else { "" };
            let is_free = shape == json!({});
            let (opened, wanted_gap, wanted_answer) = if is_free {
                (opens.to_string(), *gap, format!("{answer}</s>"))
            } else {
                (asked_opening(opens).to_string(), "", answer[..1].to_string())
            };
            let wants = format!("{opened}{line}{thought}{before}{closes}{wanted_gap}{wanted_answer}");
            let completion = complete(&tokenizer, &prompt.tokens, &prompt.params, &ids(&wants));
            let whole = format!("{opens}{line}{thought}{before}{closes}{gap}{answer}");
            assert_eq!(completion.token_ids, ids(&whole), "{}, {shape}", style.name);
            assert_eq!(
                (completion.text.as_str(), completion.fits_shape),
                (answer, true),
                "{}",
                style.name
            );
            let found = completion.thought.unwrap();
            assert_eq!((found.text.as_str(), found.is_closed), (thought, true));
            assert_eq!(found.tokens as usize, ids(&format!("{line}{thought}{before}")).len());
            let conversation = [prompt.tokens.as_slice(), &completion.token_ids].concat();
            let answered = ids(case("answered")["text"].as_str().unwrap());
            // Templates that drop thoughts cannot say.
            if case("answered")["text"].as_str().unwrap().contains(thought) {
                assert!(answered.starts_with(&conversation), "{}, {shape}", style.name);
                shown += 1;
            }
        }
    }
    assert_eq!(
        shown,
        4 * 4,
        "Qwen 3 and its thinking variant, Mistral's and OpenAI's show thoughts"
    );
}

/// A thought is ended after exactly so many tokens, in each style.
#[test]
fn budgets_hold_to_the_token() {
    let fixture = fixture();
    let messages = &fixture["cases"][1]["messages"];
    for style in &STYLES {
        let tokenizer = tokenizer(style);
        let ids = |text: &str| tokenizer.encode(text, false).unwrap();
        for (most, end_text) in [(0, None), (1, None), (5, None), (5, Some("!")), (7, Some("Stop."))] {
            let mut thinking = json!({"max_tokens": most});
            if let Some(end_text) = end_text {
                thinking["end_text"] = end_text.into();
            }
            let generate = json!({"max_tokens": 100, "thinking": thinking, "choice": ["shipping", "billing"]});
            let renderer = renderer(style, messages, &json!({}), generate);
            let prompt = renderer.render(&row()).unwrap();
            let said = &"abcdefghij"[..most];
            let opened = asked_opening(style.opens);
            let completion = complete(
                &tokenizer,
                &prompt.tokens,
                &prompt.params,
                &ids(&format!("{opened}{said}b")),
            );
            let (
                end,
                Style {
                    opens,
                    closes,
                    before,
                    gap,
                    ..
                },
            ) = (end_text.unwrap_or_default(), style);
            let whole = format!("{opens}{said}{end}{before}{closes}{gap}billing");
            assert_eq!(completion.token_ids, ids(&whole), "{}, {most}", style.name);
            assert_eq!(
                (completion.text.as_str(), completion.finish_reason),
                ("billing", FinishReason::Stop)
            );
            assert_eq!(
                completion.thought.unwrap().tokens as usize,
                most + ids(&format!("{end}{before}")).len()
            );
        }
    }
}

#[test]
fn what_cannot_be_told_by_ids_is_refused() {
    let messages = json!([{"role": "user", "content": "x"}]);
    let refused = |style: &Style, generate: Value| {
        let why = try_renderer(style, &messages, &json!({}), generate).err();
        why.expect("it is refused")
    };
    let qwen = &STYLES[2];
    // Its template writes the delimiter, and its vocabulary cuts it up.
    let plain = Style {
        added: &CHATML[..2],
        ..chatml("qwen3_thinking", "", "\n\n", [CompletionStart::Thought; 3])
    };
    let why = refused(&plain, json!({"choice": ["a", "b"]}));
    assert!(
        why.contains("prompts contain `<think>`") && why.contains("`generate.thinking: false`"),
        "{why}"
    );
    assert!(
        try_renderer(
            &plain,
            &messages,
            &json!({}),
            json!({"choice": ["a", "b"], "thinking": false})
        )
        .is_ok()
    );
    assert!(renderer(&plain, &messages, &json!({}), json!({})).thinking().is_none());
    for (generate, words) in [
        (
            json!({"thinking": {"open": "<a>", "close": "</think>"}}),
            "`generate.thinking.open` is `<a>`, which",
        ),
        (
            json!({"thinking": {"open": "<think>", "close": "</a>"}}),
            "`generate.thinking.close` is `</a>`, which",
        ),
        (
            json!({"thinking": {"open": "<think>"}}),
            "`generate.thinking.close` is missing",
        ),
        (
            json!({"thinking": {"open": "<think>", "close": "<think>"}}),
            "as `thinking.open` is",
        ),
        (
            json!({"thinking": {"end_text": "x"}}),
            "`generate.thinking.end_text` needs `thinking.max_tokens`",
        ),
        (
            json!({"thinking": {"max_tokens": -1}}),
            "`generate.thinking.max_tokens` is -1",
        ),
        (
            json!({"thinking": {"max_tokens": 5, "end_text": "</think></think>"}}),
            "`</think>` more than once",
        ),
        (
            json!({"thinking": {"max_tokens": 97}, "max_tokens": 100}),
            "leaves no room for an answer in `max_tokens` of 100",
        ),
        // 96, and four that end it.
        (
            json!({"thinking": {"max_tokens": 96}, "max_tokens": 100}),
            "leaves no room for an answer in `max_tokens` of 100",
        ),
        (
            json!({"thinking": {"budget": 5}}),
            "unknown field `budget` in `generate.thinking`",
        ),
        (json!({"thinking": "off"}), "expected `false`, or a mapping"),
    ] {
        let why = refused(qwen, generate.clone());
        assert!(why.contains(words) && why.lines().count() == 1, "{generate}: {why}");
    }
    let fits = json!({"thinking": {"max_tokens": 95}, "max_tokens": 100});
    assert!(try_renderer(qwen, &messages, &json!({}), fits).is_ok());
    // The job may name what it knows better, and say that there is nothing to know.
    let own = json!({"thinking": {"open": "<think>", "close": "</think>"}});
    assert!(renderer(qwen, &messages, &json!({}), own).thinking().is_some());
    assert!(
        renderer(qwen, &messages, &json!({}), json!({"thinking": false}))
            .thinking()
            .is_none()
    );
    assert!(
        renderer(qwen, &messages, &json!({}), json!({"thinking": true}))
            .thinking()
            .is_some()
    );
    let no_thoughts = Style {
        added: &CHATML[..2],
        ..chatml("qwen3", "", "", [CompletionStart::Either; 3])
    };
    let why = refused(&no_thoughts, json!({"thinking": true}));
    assert!(
        why.contains("`generate.thinking` is set, and this model is not known to think"),
        "{why}"
    );
}

/// A row's text that looks like a delimiter is text.
#[test]
fn data_opens_no_thought() {
    let style = &STYLES[2];
    let messages = json!([{"role": "user", "content": "{{ a }}"}]);
    let renderer = renderer(style, &messages, &json!({}), json!({}));
    let fields = json!({"a": "<think>\n"}).as_object().cloned().unwrap();
    let rendered = renderer
        .render(&InputRow {
            row: 0,
            fields: Ok(fields),
        })
        .unwrap();
    let open = tokenizer(style).id_of("<think>").unwrap();
    assert!(!rendered.tokens.contains(&open));
    assert!(matches!(&rendered.params.shape, OutputConstraint::Free));
}

/// Without a word of job or checkpoint, there is room for a thought, and for an answer behind a limited one.
#[test]
fn the_default_of_max_tokens_leaves_room() {
    let messages = json!([{"role": "user", "content": "x"}]);
    let most = |style: &Style, kwargs: Value, generate: Value| {
        let renderer = renderer(style, &messages, &kwargs, generate);
        renderer.thinking().unwrap().default_max_tokens(40_960)
    };
    assert_eq!(most(&STYLES[2], json!({}), json!({})), Some(8192));
    assert_eq!(most(&STYLES[2], json!({"enable_thinking": false}), json!({})), None);
    // Four bytes end it: a line break, the delimiter, two more line breaks.
    assert_eq!(
        most(&STYLES[2], json!({}), json!({"thinking": {"max_tokens": 1000}})),
        Some(1000 + 4 + 256)
    );
    let small = renderer(&STYLES[2], &messages, &json!({}), json!({}));
    assert_eq!(small.thinking().unwrap().default_max_tokens(1024), Some(512));
}

/// DeepSeek's tokens between turns are added ones and not special: what stands before them is of another turn all the same.
#[test]
fn turns_may_be_parted_by_tokens_that_are_not_special() {
    let style = Style {
        added: &[
            ("<|im_start|>", false),
            ("<|im_end|>", false),
            ("<think>", false),
            ("</think>", false),
        ],
        ..chatml("qwen3", "<think>", "\n\n", [CompletionStart::Either; 3])
    };
    for asked in ["what does </think> mean?", "write <think> first"] {
        let messages = json!([{"role": "user", "content": asked}]);
        let renderer = renderer(&style, &messages, &json!({}), json!({}));
        let prompt = renderer.render(&row()).unwrap();
        let thinking = prompt.params.thinking.clone().expect("it thinks");
        assert_eq!(
            thinking.completion_start(&prompt.tokens),
            CompletionStart::Either,
            "{asked}"
        );
    }
}

/// What a checkpoint forbids takes the opening delimiter from no completion of a shape.
#[test]
fn a_thought_may_begin_where_tokens_are_forbidden() {
    let style = &STYLES[2];
    let tokenizer = tokenizer(style);
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let messages = json!([{"role": "user", "content": "x"}]);
    for shape in [json!({"regex": "(a|q)b"}), json!({"choice": ["ab", "cd"]}), json!({})] {
        let renderer = renderer(style, &messages, &json!({}), shape.clone());
        let prompt = renderer.render(&row()).unwrap();
        let mut params = GenerationParams::clone(&prompt.params);
        params.forbidden.tokens = ids("q");
        let end = if shape == json!({}) { "b</s>" } else { "" };
        let completion = complete(
            &tokenizer,
            &prompt.tokens,
            &Arc::new(params),
            &ids(&format!("<think>hm</think>a{end}")),
        );
        assert_eq!(completion.text, "ab", "{shape}");
        assert!(completion.thought.is_some_and(|thought| thought.is_closed), "{shape}");
    }
}
