//! Whole completions with thoughts, token by token. Each test fixes the tokens that the model
//! prefers.

use std::sync::Arc;

use super::*;
use crate::device::cpu::sample::{Scratch, sample};
use crate::device::draw::{Allowed, Sampling};
use crate::engine::constraint::{Constraint, GrammarState};
use crate::engine::params::{GenerationParams, OutputConstraint};
use crate::engine::request::{Completion, FinishReason, Request, SampleId};
use crate::engine::sequence::{SampleState, TokenOutcome};

const SPECIALS: [&str; 9] = [
    "<pad>",
    "<think>",
    "</think>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|turn|>",
    "<eos>",
];

const ID: SampleId = SampleId {
    job: 0,
    row: 0,
    sample: 0,
    attempt: 0,
};

fn tokenizer() -> Arc<Tokenizer> {
    let words = [
        "shipping",
        "ship",
        "billing",
        "analysis",
        "final",
        "commentary",
        "assistant",
    ];
    Arc::new(Tokenizer::from_words(&words, &SPECIALS).unwrap())
}

/// Ids of a text that may contain control tokens.
fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, false).unwrap()
}

fn id(token: &str) -> u32 {
    tokenizer().id_of(token).unwrap()
}

fn thinking() -> Thinking {
    let mut control_ids = SPECIALS.map(id).to_vec();
    control_ids.sort_unstable();
    Thinking {
        open: ids("<think>"),
        close: ids("</think>"),
        header: Vec::new(),
        gap: ids("\n\n"),
        max_tokens: None,
        forced_close: ids("\n</think>"),
        forced_gap: ids("\n\n"),
        control_ids,
    }
}

fn harmony() -> Thinking {
    Thinking {
        open: ids("<|channel|>analysis<|message|>"),
        close: ids("<|end|><|start|>assistant<|channel|>final<|message|>"),
        header: ids("<|channel|>final<|message|>"),
        gap: Vec::new(),
        forced_close: ids("<|end|><|start|>assistant<|channel|>final<|message|>"),
        forced_gap: Vec::new(),
        ..thinking()
    }
}

fn params(thinking: Thinking, shape: OutputConstraint) -> GenerationParams {
    GenerationParams {
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        max_tokens: 60,
        logprobs: true,
        thinking: Some(Arc::new(thinking)),
        shape,
        ..GenerationParams::default()
    }
}

fn labels(probabilities: bool) -> OutputConstraint {
    OutputConstraint::Choice {
        choices: ["shipping", "billing"].map(String::from).to_vec(),
        probabilities,
    }
}

/// The completion of a prompt by a model that prefers these tokens, one per draw, and the number of
/// draws.
fn complete(prompt: &str, params: &GenerationParams, preferred: &[u32]) -> (Completion, usize) {
    let (tokenizer, eos) = (tokenizer(), id("<eos>"));
    let constraint = Constraint::compile(&params.shape, &tokenizer, &[eos]).unwrap();
    let request = Request {
        id: ID,
        prompt: ids(prompt).into(),
        params: Arc::new(params.clone()),
        eos: [eos].into(),
        cache_salt: Arc::default(),
        adapter: 0,
    };
    let (mut state, mut outcome) = SampleState::new(request, constraint, params.max_tokens as usize, &tokenizer);
    let mut nodes = std::collections::VecDeque::new();
    for draws in 0.. {
        match outcome {
            TokenOutcome::Finished(result) => return (result.unwrap(), draws),
            TokenOutcome::Continue(continuations) => nodes.extend(continuations.into_iter().map(|c| c.node)),
        }
        let node = nodes.pop_front().expect("a sequence goes on");
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        let token = *preferred
            .get(draws)
            .unwrap_or_else(|| panic!("it goes on after {preferred:?}"));
        logits[token as usize] = 5.0;
        state.grammar().into_iter().for_each(GrammarState::prepare);
        state.prepare(&tokenizer);
        let drawn = sample(&logits, state.draw(node, &tokenizer), &mut Scratch::default());
        outcome = state.consume(node, drawn, &tokenizer);
    }
    unreachable!()
}

/// Like `complete`, and asserts that every token of `preferred` was drawn.
fn completes(prompt: &str, params: &GenerationParams, preferred: &str) -> Completion {
    let (completion, draws) = complete(prompt, params, &ids(preferred));
    assert_eq!(draws, ids(preferred).len(), "{preferred}: {completion:?}");
    completion
}

fn thought(completion: &Completion) -> Option<(&str, u32, bool)> {
    completion
        .thought
        .as_ref()
        .map(|t| (t.text.as_str(), t.tokens, t.is_closed))
}

const OPENED: &str = "<|turn|>a<|turn|><think>\n";
const PLAIN: &str = "<|turn|>a<|turn|>";

#[test]
fn the_prompt_determines_how_its_completion_begins() {
    for (prompt, begin) in [
        (OPENED, CompletionStart::Thought),
        ("<think>", CompletionStart::Thought),
        ("<think>so far", CompletionStart::Thought),
        ("<think>\n\n</think>\n\n", CompletionStart::Answer),
        ("<think>x</think>begun", CompletionStart::Answer),
        (PLAIN, CompletionStart::Either),
        ("", CompletionStart::Either),
        ("a", CompletionStart::Either),
        // Thoughts of earlier turns, and delimiters that are mentioned in a text.
        ("<|turn|><think>x</think>y<|turn|>z<|turn|>", CompletionStart::Either),
        ("write <think> first<|turn|>", CompletionStart::Either),
        ("</think><think>", CompletionStart::Thought),
    ] {
        assert_eq!(thinking().completion_start(&ids(prompt)), begin, "{prompt}");
    }
    for (prompt, begin) in [
        ("<|start|>assistant", CompletionStart::Either),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            CompletionStart::Thought,
        ),
        (
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant",
            CompletionStart::Either,
        ),
        ("<|start|>assistant<|channel|>final<|message|>", CompletionStart::Answer),
    ] {
        assert_eq!(harmony().completion_start(&ids(prompt)), begin, "{prompt}");
    }
}

#[test]
fn a_shape_applies_after_the_thought() {
    for shape in [
        labels(false),
        labels(true),
        OutputConstraint::Regex("(shipping|billing) ok".into()),
    ] {
        let is_choice = matches!(shape, OutputConstraint::Choice { .. });
        let completion = completes(OPENED, &params(thinking(), shape), "shipping? no\n</think>billing");
        let text = if is_choice { "billing" } else { "billing ok" };
        assert_eq!(completion.text, text);
        assert_eq!(completion.token_ids, ids(&format!("shipping? no\n</think>\n\n{text}")));
        assert_eq!(
            thought(&completion),
            Some(("shipping? no", ids("shipping? no\n").len() as u32, true))
        );
        assert!(completion.fits_shape && completion.finish_reason == FinishReason::Stop);
        let logprobs = completion.logprobs.unwrap();
        assert_eq!(logprobs.len(), completion.token_ids.len());
        let gap = ids("shipping? no\n</think>").len();
        assert!(
            logprobs[gap - 1] < 0.0 && logprobs[gap..gap + 2] == [0.0, 0.0] && logprobs[gap + 2] < 0.0,
            "{logprobs:?}"
        );
        if let Some(probabilities) = completion.choice_probabilities {
            assert!(probabilities[1] > 0.9 && (probabilities.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }
}

/// Where the model may open a thought, its first token is the delimiter's or the shape's.
#[test]
fn a_completion_begins_with_a_thought_or_the_shape() {
    let choice = |texts: &[&str]| OutputConstraint::Choice {
        choices: texts.iter().map(|text| text.to_string()).collect(),
        probabilities: false,
    };
    for (shape, after_thought, direct) in [
        (labels(false), "billing", "billing"),
        (labels(true), "billing", "billing"),
        (OutputConstraint::Regex("shipping|billing".into()), "billing", "billing"),
        // The whole answer, or its beginning, is certain after a thought.
        (OutputConstraint::Regex("billing".into()), "", "billing"),
        (choice(&["billing"]), "", "billing"),
        (choice(&["billing ab", "billing", "billing x"]), "<eos>", "billing<eos>"),
    ] {
        let params = params(thinking(), shape.clone());
        let with = completes(PLAIN, &params, &format!("<think>hm</think>{after_thought}"));
        assert_eq!(
            (with.text.as_str(), thought(&with)),
            ("billing", Some(("hm", 2, true))),
            "{shape:?}"
        );
        assert_eq!(with.token_ids, ids("<think>hm</think>\n\nbilling"));
        let without = completes(PLAIN, &params, direct);
        assert_eq!(
            (without.text.as_str(), thought(&without)),
            ("billing", None),
            "{shape:?}"
        );
        assert_eq!(without.token_ids, ids("billing"));
        // The first token was drawn, so it is not certain.
        let logprobs = without.logprobs.unwrap();
        assert!(logprobs.len() == 1 && logprobs[0] < 0.0, "{shape:?} {logprobs:?}");
        // Tokens that neither open a thought nor begin the shape are masked out, at every position.
        let (other, _) = complete(PLAIN, &params, &ids("xxxxxxxxxx"));
        assert!(
            ["billing", "shipping", "billing ab", "billing x"].contains(&other.text.as_str()),
            "{other:?}"
        );
    }
}

#[test]
fn the_first_draw_allows_the_shape_and_the_delimiter() {
    let tokenizer = tokenizer();
    let allowed = |shape: &OutputConstraint| {
        let params = params(thinking(), shape.clone());
        let constraint = Constraint::compile(shape, &tokenizer, &[id("<eos>")]).unwrap();
        let request = Request {
            id: ID,
            prompt: ids(PLAIN).into(),
            params: Arc::new(params),
            eos: Arc::from([]),
            cache_salt: Arc::default(),
            adapter: 0,
        };
        let (mut state, _) = SampleState::new(request, constraint, 60, &tokenizer);
        state.grammar().into_iter().for_each(GrammarState::prepare);
        state.prepare(&tokenizer);
        let mut ids = match state.draw(0, &tokenizer).allowed {
            Allowed::Ids(ids) => ids.to_vec(),
            Allowed::Mask(mask) => (0..32 * mask.len() as u32)
                .filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
                .collect(),
            Allowed::AllBut(_) => Vec::new(),
        };
        ids.sort_unstable();
        ids
    };
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(allowed(&labels(false)), sorted(ids("billing<think>shipping")));
    assert_eq!(
        allowed(&OutputConstraint::Choice {
            choices: vec!["billing".into()],
            probabilities: false
        }),
        ids("billing<think>")
    );
    assert_eq!(allowed(&OutputConstraint::Regex("[xy]".into())), ids("xy<think>"));
    assert!(allowed(&OutputConstraint::Free).is_empty());
}

/// Whatever the maximum, a thought is ended after exactly that many tokens, and an answer follows.
#[test]
fn a_thought_at_its_maximum_is_ended() {
    let text = "abcdef";
    for prompt in [OPENED, PLAIN] {
        for max in 0..=8 {
            for (end, end_gap) in [("\n</think>", "\n\n"), ("! Enough.</think>", "")] {
                let mut thinking = thinking();
                (thinking.max_tokens, thinking.forced_close, thinking.forced_gap) = (Some(max), ids(end), ids(end_gap));
                let opens = if prompt == PLAIN { "<think>" } else { "" };
                let written: String = text.chars().take(max as usize).collect();
                let closes = written.len() == text.len() && max as usize > text.len();
                let (close, gap) = if closes { ("</think>", "\n\n") } else { (end, end_gap) };
                for shape in [
                    labels(false),
                    labels(true),
                    OutputConstraint::Regex("shipping|billing".into()),
                    OutputConstraint::Free,
                ] {
                    let free = shape == OutputConstraint::Free;
                    let gap = if closes && free { "" } else { gap };
                    let preferred = format!(
                        "{opens}{written}{}billing{}",
                        if closes { close } else { "" },
                        if free { "<eos>" } else { "" }
                    );
                    let completion = completes(prompt, &params(thinking.clone(), shape), &preferred);
                    let whole = format!("{opens}{written}{close}{gap}billing");
                    assert_eq!(completion.token_ids, ids(&whole), "{max} {end}");
                    assert_eq!(
                        (completion.text.as_str(), completion.fits_shape),
                        ("billing", true),
                        "{max} {end}"
                    );
                    let logprobs = completion.logprobs.unwrap();
                    let forced =
                        ids(&format!("{opens}{written}")).len()..ids(&format!("{opens}{written}{close}{gap}")).len();
                    assert_eq!(logprobs[forced].iter().all(|p| *p == 0.0), !closes, "{max} {end}");
                    let tokens = ids(&format!("{written}{}", close.trim_end_matches("</think>"))).len() as u32;
                    assert_eq!(completion.thought.unwrap().tokens, tokens);
                }
            }
        }
    }
}

#[test]
fn a_thought_that_does_not_end_leaves_no_answer() {
    for shape in [
        labels(false),
        labels(true),
        OutputConstraint::Regex("a*".into()),
        OutputConstraint::Free,
    ] {
        let whole = params(thinking(), shape.clone());
        let ended = completes(OPENED, &whole, "hm<eos>");
        assert_eq!((ended.text.as_str(), ended.fits_shape), ("", false));
        assert_eq!(
            (thought(&ended), ended.finish_reason),
            (Some(("hm", 2, false)), FinishReason::Stop)
        );
        assert_eq!(ended.choice_probabilities, None);
        // Truncated inside the thought, at its end, after the closing delimiter, after the gap.
        for (preferred, tokens) in [("hmhm", 4), ("hm</think>", 3), ("h</think>x", 3)] {
            let cut = GenerationParams {
                max_tokens: tokens,
                ..whole.clone()
            };
            let (completion, _) = complete(OPENED, &cut, &ids(preferred));
            assert_eq!(completion.finish_reason, FinishReason::Length, "{shape:?} {preferred}");
            let answers = shape == OutputConstraint::Free && preferred.ends_with('x');
            assert_eq!(
                (completion.text.is_empty(), completion.fits_shape),
                (!answers, answers),
                "{shape:?} {preferred}"
            );
            assert_eq!(completion.token_ids.len(), tokens as usize);
        }
        // A forced end is truncated as well.
        let budget = Thinking {
            max_tokens: Some(2),
            ..thinking()
        };
        for tokens in 2..=5 {
            let cut = GenerationParams {
                max_tokens: tokens,
                ..params(budget.clone(), shape.clone())
            };
            let (completion, _) = complete(OPENED, &cut, &ids("hm"));
            assert_eq!(completion.token_ids, ids("hm\n</think>\n\n")[..tokens as usize]);
            assert_eq!(
                (completion.text.as_str(), completion.fits_shape),
                ("", false),
                "{shape:?} {tokens}"
            );
        }
    }
    // A choice that exceeds the tokens left after the thought.
    let choices = vec!["abcd".to_string(), "abce".into()];
    for probabilities in [false, true] {
        let shape = OutputConstraint::Choice {
            choices: choices.clone(),
            probabilities,
        };
        for (tokens, text) in [(7, ""), (8, "abc"), (9, "abcd")] {
            let cut = GenerationParams {
                max_tokens: tokens,
                ..params(thinking(), shape.clone())
            };
            let (completion, _) = complete(OPENED, &cut, &ids("hm</think>d"));
            assert_eq!(
                (completion.text.as_str(), completion.fits_shape),
                (text, text == "abcd"),
                "{tokens}"
            );
            assert!(completion.token_ids.len() <= tokens as usize);
        }
    }
}

#[test]
fn stops_apply_only_to_the_answer() {
    let stops = GenerationParams {
        stop: vec!["\n".into(), "shipping".into()],
        stop_token_ids: ids("z"),
        ..params(thinking(), OutputConstraint::Free)
    };
    for (preferred, text) in [
        ("shipping\nz</think>\n\nab\n", "ab"),
        ("z</think>\n\nabz", "ab"),
        ("\n</think> shipping", ""),
        ("x</think>\n \n  a b\n", "a b"),
        ("x</think><eos>", ""),
    ] {
        let completion = completes(OPENED, &stops, preferred);
        assert_eq!(
            (completion.text.as_str(), completion.fits_shape),
            (text, true),
            "{preferred}"
        );
        assert_eq!(completion.finish_reason, FinishReason::Stop);
        assert!(completion.thought.unwrap().is_closed);
    }
    // A stop token of white space is ignored before the answer has begun.
    let newline = GenerationParams {
        stop_token_ids: ids("\n"),
        ..params(thinking(), OutputConstraint::Free)
    };
    assert_eq!(completes(OPENED, &newline, "x</think>\n\nab\n").text, "ab");
    // Stop texts apply to an answer under a shape, too.
    let shaped = GenerationParams {
        stop: vec!["pp".into()],
        ..params(thinking(), OutputConstraint::Regex("[a-z]+".into()))
    };
    assert_eq!(completes(OPENED, &shaped, "pp</think>abpp").text, "ab");
    // With `ignore_eos`, end-of-sequence tokens are ignored inside a thought.
    let ignoring = GenerationParams {
        ignore_eos: true,
        max_tokens: 5,
        ..params(thinking(), OutputConstraint::Free)
    };
    assert_eq!(completes(OPENED, &ignoring, "h<eos>m</think>a").text, "a");
}

#[test]
fn free_text_without_a_thought_is_unchanged() {
    for (preferred, text) in [("ab<eos>", "ab"), ("\n\nab<eos>", "\n\nab"), ("<eos>", "")] {
        let completion = completes(PLAIN, &params(thinking(), OutputConstraint::Free), preferred);
        assert_eq!(
            (completion.text.as_str(), thought(&completion), completion.fits_shape),
            (text, None, true)
        );
    }
    let completion = completes(
        PLAIN,
        &params(thinking(), OutputConstraint::Free),
        "\n<think>hm</think>ab<eos>",
    );
    assert_eq!(
        (completion.text.as_str(), thought(&completion)),
        ("ab", Some(("hm", 2, true)))
    );
    // A delimiter inside an answer is plain text.
    let completion = completes(
        PLAIN,
        &params(thinking(), OutputConstraint::Free),
        "a<think>b</think>c<eos>",
    );
    assert_eq!(thought(&completion), None);
    let closed = completes("<think>\n\n</think>\n\n", &params(thinking(), labels(false)), "billing");
    assert_eq!((closed.text.as_str(), thought(&closed)), ("billing", None));
    let stop = GenerationParams {
        stop: vec!["\n".into()],
        ..params(thinking(), OutputConstraint::Free)
    };
    assert_eq!(completes(PLAIN, &stop, "\n").text, "");
}

/// Delimiters of several tokens; a thought may contain parts of them.
#[test]
fn delimiters_may_have_several_tokens() {
    const START: &str = "<|turn|><|start|>assistant";
    let again = "<|end|><|start|>assistant<|channel|>analysis<|message|>";
    let close = "<|end|><|start|>assistant<|channel|>final<|message|>";
    for shape in [
        labels(false),
        labels(true),
        OutputConstraint::Regex("shipping|billing".into()),
    ] {
        // Certain tokens of the delimiters cost no forward pass.
        let preferred = [ids("analysis"), ids(&format!("hm{close}billing"))].concat();
        let (completion, draws) = complete(START, &params(harmony(), shape.clone()), &preferred);
        assert_eq!(draws, preferred.len());
        let opened = "<|channel|>analysis<|message|>";
        assert_eq!(completion.token_ids, ids(&format!("{opened}hm{close}billing")));
        assert_eq!(
            (completion.text.as_str(), thought(&completion)),
            ("billing", Some(("hm", 2, true)))
        );
        let direct = completes(START, &params(harmony(), shape), "finalbilling");
        assert_eq!(direct.token_ids, ids("<|channel|>final<|message|>billing"));
        assert_eq!((direct.text.as_str(), thought(&direct)), ("billing", None));
    }
    let free = params(harmony(), OutputConstraint::Free);
    let completion = completes(
        START,
        &free,
        &format!("<|channel|>analysis<|message|>a{again}b{close}ok<eos>"),
    );
    let tokens = ids(&format!("a{again}b")).len() as u32;
    assert_eq!(
        (completion.text.as_str(), thought(&completion)),
        ("ok", Some(("aassistantanalysisb", tokens, true)))
    );
    let direct = completes(START, &free, "<|channel|>final<|message|>ok<eos>");
    assert_eq!((direct.text.as_str(), thought(&direct)), ("ok", None));
    let other = completes(START, &free, "<|channel|>commentary<|message|>ok<eos>");
    assert_eq!((other.text.as_str(), thought(&other)), ("commentaryok", None));
    // A closing delimiter that has begun is completed, rather than begun again.
    let closing = ids(close);
    for max in 1..=8 {
        let budget = Thinking {
            max_tokens: Some(max),
            ..harmony()
        };
        let written: Vec<u32> = ids("abc")
            .into_iter()
            .chain(closing.iter().copied())
            .take(max as usize)
            .collect();
        let preferred: Vec<u32> = ids("analysis")
            .into_iter()
            .chain(written.iter().copied())
            .chain(ids("billing"))
            .collect();
        let (completion, _) = complete(START, &params(budget, labels(false)), &preferred);
        let thought = &"abc"[..3usize.min(max as usize)];
        assert_eq!(
            completion.token_ids,
            ids(&format!("<|channel|>analysis<|message|>{thought}{close}billing")),
            "{max}"
        );
        assert_eq!(completion.thought.unwrap().tokens, thought.len() as u32);
    }
    // An end-of-sequence token that begins the delimiter ends nothing.
    let eos = Thinking {
        close: ids("<eos><|start|>"),
        ..thinking()
    };
    assert_eq!(
        completes(OPENED, &params(eos, OutputConstraint::Free), "hm<eos><|start|>ok<eos>").text,
        "ok"
    );
}

/// Penalties count the thought's tokens, at each node of a choice as well.
#[test]
fn penalties_count_thought_and_answer() {
    let mut params = params(thinking(), labels(true));
    params.sampling.presence_penalty = 100.0;
    let plain = completes(OPENED, &params, "hm</think>billing");
    assert_eq!(
        plain.choice_probabilities.map(|p| p[1] > 0.9),
        Some(true),
        "probabilities are the model's own"
    );
    params.shape = labels(false);
    assert_eq!(completes(OPENED, &params, "hm</think>billing").text, "billing");
    let (repeated, _) = complete(OPENED, &params, &ids("billing</think>billing"));
    assert_eq!(repeated.text, "shipping", "`billing` stands in the thought");
    (params.sampling.presence_penalty, params.sampling.frequency_penalty) = (0.0, 100.0);
    let (repeated, _) = complete(OPENED, &params, &ids("billing</think>billing"));
    assert_eq!(repeated.text, "shipping", "as often as it stands there");
}
