//! Whole completions with thoughts, token by token. Each test fixes the tokens that the model
//! prefers.

use std::sync::Arc;

use super::*;
use crate::device::cpu::sample::{Scratch, sample};
use crate::device::draw::{Allowed, Sampling};
use crate::engine::constraint::{Constraint, GrammarState};
use crate::engine::params::{GenerationParams, OutputConstraint};
use crate::engine::request::{Completion, FinishReason, Request, UnitId};
use crate::engine::sequence::{Next, SampleState};

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
    let mut control = SPECIALS.map(id).to_vec();
    control.sort_unstable();
    Thinking {
        open: ids("<think>"),
        close: ids("</think>"),
        header: Vec::new(),
        gap: ids("\n\n"),
        max_tokens: None,
        end: ids("\n</think>"),
        end_gap: ids("\n\n"),
        control,
    }
}

fn harmony() -> Thinking {
    Thinking {
        open: ids("<|channel|>analysis<|message|>"),
        close: ids("<|end|><|start|>assistant<|channel|>final<|message|>"),
        header: ids("<|channel|>final<|message|>"),
        gap: Vec::new(),
        end: ids("<|end|><|start|>assistant<|channel|>final<|message|>"),
        end_gap: Vec::new(),
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
fn complete(prompt: &str, params: &GenerationParams, wants: &[u32]) -> (Completion, usize) {
    let (tokenizer, eos) = (tokenizer(), id("<eos>"));
    let constraint = Constraint::compile(&params.shape, &tokenizer, &[eos]).unwrap();
    let id = UnitId {
        job: 0,
        row: 0,
        sample: 0,
        attempt: 0,
    };
    let request = Request {
        id,
        prompt: ids(prompt).into(),
        params: Arc::new(params.clone()),
        eos: [eos].into(),
        cache_salt: Arc::default(),
    };
    let (mut unit, mut next) = SampleState::new(request, constraint, params.max_tokens as usize, &tokenizer);
    let mut nodes = std::collections::VecDeque::new();
    for asked in 0.. {
        match next {
            Next::Finished(result) => return (result.unwrap(), asked),
            Next::Go(at) => nodes.extend(at.into_iter().map(|at| at.node)),
        }
        let node = nodes.pop_front().expect("somebody goes on");
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        let wanted = *wants.get(asked).unwrap_or_else(|| panic!("it goes on after {wants:?}"));
        logits[wanted as usize] = 5.0;
        unit.grammar().into_iter().for_each(GrammarState::prepare);
        unit.prepare(&tokenizer);
        let drawn = sample(&logits, unit.draw(node, &tokenizer), &mut Scratch::default());
        next = unit.take(node, drawn, &tokenizer);
    }
    unreachable!()
}

/// Like `complete`, and asserts that every token of `wants` was taken.
fn completes(prompt: &str, params: &GenerationParams, wants: &str) -> Completion {
    let (completion, asked) = complete(prompt, params, &ids(wants));
    assert_eq!(asked, ids(wants).len(), "{wants}: {completion:?}");
    completion
}

fn thought(completion: &Completion) -> Option<(&str, u32, bool)> {
    completion
        .thought
        .as_ref()
        .map(|t| (t.text.as_str(), t.tokens, t.closed))
}

const OPENED: &str = "<|turn|>a<|turn|><think>\n";
const PLAIN: &str = "<|turn|>a<|turn|>";

#[test]
fn a_prompt_says_how_its_completion_begins() {
    for (prompt, begin) in [
        (OPENED, Begin::Thought),
        ("<think>", Begin::Thought),
        ("<think>so far", Begin::Thought),
        ("<think>\n\n</think>\n\n", Begin::Answer),
        ("<think>x</think>begun", Begin::Answer),
        (PLAIN, Begin::Either),
        ("", Begin::Either),
        ("a", Begin::Either),
        // Thoughts of earlier turns, and delimiters that are mentioned in a text.
        ("<|turn|><think>x</think>y<|turn|>z<|turn|>", Begin::Either),
        ("write <think> first<|turn|>", Begin::Either),
        ("</think><think>", Begin::Thought),
    ] {
        assert_eq!(thinking().begin(&ids(prompt)), begin, "{prompt}");
    }
    for (prompt, begin) in [
        ("<|start|>assistant", Begin::Either),
        ("<|start|>assistant<|channel|>analysis<|message|>", Begin::Thought),
        (
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant",
            Begin::Either,
        ),
        ("<|start|>assistant<|channel|>final<|message|>", Begin::Answer),
    ] {
        assert_eq!(harmony().begin(&ids(prompt)), begin, "{prompt}");
    }
}

#[test]
fn a_shape_begins_behind_the_thought() {
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
fn a_thought_may_begin_or_the_shape() {
    let choice = |texts: &[&str]| OutputConstraint::Choice {
        choices: texts.iter().map(|text| text.to_string()).collect(),
        probabilities: false,
    };
    for (shape, behind, direct) in [
        (labels(false), "billing", "billing"),
        (labels(true), "billing", "billing"),
        (OutputConstraint::Regex("shipping|billing".into()), "billing", "billing"),
        // The whole answer, or its beginning, is certain after a thought.
        (OutputConstraint::Regex("billing".into()), "", "billing"),
        (choice(&["billing"]), "", "billing"),
        (choice(&["billing ab", "billing", "billing x"]), "<eos>", "billing<eos>"),
    ] {
        let params = params(thinking(), shape.clone());
        let with = completes(PLAIN, &params, &format!("<think>hm</think>{behind}"));
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
        let id = UnitId {
            job: 0,
            row: 0,
            sample: 0,
            attempt: 0,
        };
        let request = Request {
            id,
            prompt: ids(PLAIN).into(),
            params: Arc::new(params),
            eos: Arc::from([]),
            cache_salt: Arc::default(),
        };
        let (mut unit, _) = SampleState::new(request, constraint, 60, &tokenizer);
        unit.grammar().into_iter().for_each(GrammarState::prepare);
        unit.prepare(&tokenizer);
        let mut ids = match unit.draw(0, &tokenizer).allowed {
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
fn a_thought_that_runs_over_is_ended() {
    let text = "abcdef";
    for prompt in [OPENED, PLAIN] {
        for most in 0..=8 {
            for (end, end_gap) in [("\n</think>", "\n\n"), ("! Enough.</think>", "")] {
                let mut thinking = thinking();
                (thinking.max_tokens, thinking.end, thinking.end_gap) = (Some(most), ids(end), ids(end_gap));
                let opens = if prompt == PLAIN { "<think>" } else { "" };
                let said: String = text.chars().take(most as usize).collect();
                let own = said.len() == text.len() && most as usize > text.len();
                let (close, gap) = if own { ("</think>", "\n\n") } else { (end, end_gap) };
                for shape in [
                    labels(false),
                    labels(true),
                    OutputConstraint::Regex("shipping|billing".into()),
                    OutputConstraint::Free,
                ] {
                    let free = shape == OutputConstraint::Free;
                    let gap = if own && free { "" } else { gap };
                    let wants = format!(
                        "{opens}{said}{}billing{}",
                        if own { close } else { "" },
                        if free { "<eos>" } else { "" }
                    );
                    let completion = completes(prompt, &params(thinking.clone(), shape), &wants);
                    let whole = format!("{opens}{said}{close}{gap}billing");
                    assert_eq!(completion.token_ids, ids(&whole), "{most} {end}");
                    assert_eq!(
                        (completion.text.as_str(), completion.fits_shape),
                        ("billing", true),
                        "{most} {end}"
                    );
                    let logprobs = completion.logprobs.unwrap();
                    let forced = ids(&format!("{opens}{said}")).len()..ids(&format!("{opens}{said}{close}{gap}")).len();
                    assert_eq!(logprobs[forced].iter().all(|p| *p == 0.0), !own, "{most} {end}");
                    let tokens = ids(&format!("{said}{}", close.trim_end_matches("</think>"))).len() as u32;
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
        for (wants, tokens) in [("hmhm", 4), ("hm</think>", 3), ("h</think>x", 3)] {
            let cut = GenerationParams {
                max_tokens: tokens,
                ..whole.clone()
            };
            let (completion, _) = complete(OPENED, &cut, &ids(wants));
            assert_eq!(completion.finish_reason, FinishReason::Length, "{shape:?} {wants}");
            let answers = shape == OutputConstraint::Free && wants.ends_with('x');
            assert_eq!(
                (completion.text.is_empty(), completion.fits_shape),
                (!answers, answers),
                "{shape:?} {wants}"
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
fn ends_are_looked_for_in_the_answer_alone() {
    let stops = GenerationParams {
        stop: vec!["\n".into(), "shipping".into()],
        stop_token_ids: ids("z"),
        ..params(thinking(), OutputConstraint::Free)
    };
    for (wants, text) in [
        ("shipping\nz</think>\n\nab\n", "ab"),
        ("z</think>\n\nabz", "ab"),
        ("\n</think> shipping", ""),
        ("x</think>\n \n  a b\n", "a b"),
        ("x</think><eos>", ""),
    ] {
        let completion = completes(OPENED, &stops, wants);
        assert_eq!(
            (completion.text.as_str(), completion.fits_shape),
            (text, true),
            "{wants}"
        );
        assert_eq!(completion.finish_reason, FinishReason::Stop);
        assert!(completion.thought.unwrap().closed);
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
fn free_text_without_a_thought_is_as_it_was() {
    for (wants, text) in [("ab<eos>", "ab"), ("\n\nab<eos>", "\n\nab"), ("<eos>", "")] {
        let completion = completes(PLAIN, &params(thinking(), OutputConstraint::Free), wants);
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
fn delimiters_may_be_several_tokens() {
    const START: &str = "<|turn|><|start|>assistant";
    let again = "<|end|><|start|>assistant<|channel|>analysis<|message|>";
    let close = "<|end|><|start|>assistant<|channel|>final<|message|>";
    for shape in [
        labels(false),
        labels(true),
        OutputConstraint::Regex("shipping|billing".into()),
    ] {
        // Certain tokens of the delimiters cost no forward pass.
        let wants = [ids("analysis"), ids(&format!("hm{close}billing"))].concat();
        let (completion, asked) = complete(START, &params(harmony(), shape.clone()), &wants);
        assert_eq!(asked, wants.len());
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
    for most in 1..=8 {
        let budget = Thinking {
            max_tokens: Some(most),
            ..harmony()
        };
        let said: Vec<u32> = ids("abc")
            .into_iter()
            .chain(closing.iter().copied())
            .take(most as usize)
            .collect();
        let wants: Vec<u32> = ids("analysis")
            .into_iter()
            .chain(said.iter().copied())
            .chain(ids("billing"))
            .collect();
        let (completion, _) = complete(START, &params(budget, labels(false)), &wants);
        let thought = &"abc"[..3usize.min(most as usize)];
        assert_eq!(
            completion.token_ids,
            ids(&format!("<|channel|>analysis<|message|>{thought}{close}billing")),
            "{most}"
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
