//! Logits and greedy tokens are the reference's; mutants of the model fail the same comparison.
//!
//! "Relative" difference of logits: the largest absolute difference over a prompt's rows, divided by the largest
//! absolute logit of those rows in the reference.

use std::cell::RefCell;

use gristmill::device::{Activation, ExpertGroups, KvSpec, Precision};
use gristmill::model::Transformer;
use gristmill::model::config::Config;
use gristmill::model::rope::Scaling;
use gristmill::model::stored_form::StoredForm;
use gristmill::model::weights::Weights;

use super::harness::{
    GGUF, MODELS, Prompt, QUANTIZED, Reference, Runner, Sequence, all_models, chooses_experts, folder, load, options,
};

/// Largest relative difference of logits in F32.
pub(super) const RELATIVE_MAX: f64 = 1e-4;
/// Largest relative difference in BF16, whose numbers have 8 significant bits: roundings of about 0.2 % add up over
/// the layers, and these models' attention is made to react sharply.
const BF16_RELATIVE_MAX: f64 = 0.08;

fn best(row: &[f32]) -> u32 {
    (0..row.len())
        .max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)))
        .unwrap() as u32
}

fn relative(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut difference = 0.0f64;
    let mut largest = 0.0f64;
    for (g, w) in got.iter().zip(want) {
        assert_eq!(g.len(), w.len());
        for (a, b) in g.iter().zip(w) {
            difference = difference.max((*a as f64 - *b as f64).abs());
            largest = largest.max(b.abs() as f64);
        }
    }
    difference / largest
}

/// Runs all prompts as one batch, then greedy steps as one batch: (worst relative difference of logits, prompts whose
/// greedy tokens differ).
pub(super) fn compare(model: &mut Transformer, reference: &Reference) -> (f64, usize) {
    compare_together(model, &[(0, reference)])[0]
}

/// As [`compare`], of several references in the same batches, each with the number of the adapter that it is of.
pub(super) fn compare_together(model: &mut Transformer, references: &[(u32, &Reference)]) -> Vec<(f64, usize)> {
    let prompts: Vec<(u32, &Prompt)> = references
        .iter()
        .flat_map(|(adapter, reference)| reference.prompts.iter().map(|prompt| (*adapter, prompt)))
        .collect();
    let mut runner = Runner::new(model);
    let sequence = |adapter| Sequence {
        adapter,
        ..Sequence::default()
    };
    let mut sequences: Vec<_> = prompts.iter().map(|(adapter, _)| sequence(*adapter)).collect();
    let mut work: Vec<(&mut Sequence, &[u32])> = sequences
        .iter_mut()
        .zip(&prompts)
        .map(|(s, (_, p))| (s, &p.tokens[..p.length]))
        .collect();
    let mut rows = runner.step(&mut work).into_iter();
    let mut logits: Vec<Vec<Vec<f32>>> = prompts
        .iter()
        .map(|(_, p)| rows.by_ref().take(p.length).collect())
        .collect();
    let mut chosen: Vec<Vec<u32>> = logits.iter().map(|rows| vec![best(rows.last().unwrap())]).collect();
    let steps = prompts[0].1.tokens.len() - prompts[0].1.length;
    for step in 1..steps {
        // The reference's own tokens go in, so that one difference does not hide what comes after it.
        let next: Vec<[u32; 1]> = prompts.iter().map(|(_, p)| [p.tokens[p.length + step - 1]]).collect();
        let mut work: Vec<(&mut Sequence, &[u32])> =
            sequences.iter_mut().zip(&next).map(|(s, t)| (s, &t[..])).collect();
        for (i, row) in runner.step(&mut work).into_iter().enumerate() {
            chosen[i].push(best(&row));
            if step == steps - 1 {
                logits[i].push(row);
            }
        }
    }
    let mut answers = logits.iter().zip(&chosen);
    let of_reference = |(_, reference): &(u32, &Reference)| {
        let mut worst = 0.0f64;
        let mut differ = 0;
        for (p, (rows, chosen)) in reference.prompts.iter().zip(answers.by_ref()) {
            worst = worst.max(relative(rows, &p.logits));
            differ += usize::from(chosen[..] != p.tokens[p.length..]);
        }
        (worst, differ)
    };
    references.iter().map(of_reference).collect()
}

/// Which models give other logits than the reference, or other greedy tokens.
fn differences(names: impl IntoIterator<Item = &'static str>) -> Vec<String> {
    let mut found = Vec::new();
    for name in names {
        let reference = Reference::load(name);
        let (worst, differ) = compare(&mut load(name, &reference, Precision::F32), &reference);
        println!("{name}: {worst:.1e}");
        if worst > RELATIVE_MAX || differ > 0 {
            found.push(format!(
                "{name}: logits differ by {worst:.1e} relative, greedy tokens of {differ} prompts differ"
            ));
        }
    }
    found
}

#[test]
fn logits_and_greedy_tokens_are_those_of_the_reference() {
    let found = differences(MODELS.into_iter().chain(QUANTIZED));
    assert!(found.is_empty(), "{found:#?}");
}

/// With the numbers that the files hold, as the Python package `gguf` decodes them.
#[test]
fn logits_of_gguf_files_are_those_of_the_reference() {
    let found = differences(GGUF);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn bf16_stays_near_the_reference() {
    let mut far = Vec::new();
    for name in all_models() {
        let reference = Reference::load(name);
        let (worst, _) = compare(&mut load(name, &reference, Precision::Bf16), &reference);
        println!("{name}: {worst:.1e}");
        // A rounding may choose another expert. `cheap_precisions_stay_near_f32` compares without a choice, too.
        let chooses = chooses_experts(&Config::load(&folder(name)).unwrap());
        if worst > BF16_RELATIVE_MAX * if chooses { 2.0 } else { 1.0 } {
            far.push(format!("{name}: logits differ by {worst:.1e} relative"));
        }
        assert!(worst > RELATIVE_MAX, "{name}: BF16 cannot be that exact: is it used?");
    }
    assert!(far.is_empty(), "{far:#?}");
}

thread_local! {
    /// The mutants that passed: the test names all of them.
    static PASSED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// A mutant must fail the comparison that the true model passes, by a wide margin.
fn assert_mutant_fails(name: &str, what: &str, change: impl FnOnce(&mut Config)) {
    let reference = Reference::load(name);
    let mut config = Config::load(&folder(name)).unwrap();
    let before = config.clone();
    change(&mut config);
    assert_ne!(config, before, "{name}: {what} changes nothing");
    let weights = Weights::open(&folder(name), StoredForm::of(&config)).unwrap();
    let mut mutant = Transformer::from_weights(config, &weights, &options(&reference, Precision::F32)).unwrap();
    let (worst, _) = compare(&mut mutant, &reference);
    println!("{name}: {what}: {worst:.1e}");
    if worst <= 3.0 * RELATIVE_MAX {
        PASSED.with_borrow_mut(|passed| passed.push(format!("{name}: {what} passes with {worst:.1e}")));
    }
}

#[test]
fn mutants_fail_the_comparison() {
    let [
        mut windows,
        mut biases,
        mut epsilons,
        mut caps,
        mut rotations,
        mut joint_norms,
        mut layer_norms,
        mut routers,
        mut sinks,
        mut states,
        mut latents,
    ] = [0; 11];
    for name in MODELS {
        let config = Config::load(&folder(name)).unwrap();
        // Of a large base, most pairs hardly turn within so few tokens.
        let times = if config.rope.theta < 1e6 { 1.05 } else { 2.0 };
        if config.rotates.contains(&true) {
            assert_mutant_fails(name, "RoPE base", |c| c.rope.theta *= times);
        }
        if config.norm_eps > 5e-4 {
            epsilons += 1;
            assert_mutant_fails(name, "norm epsilon", |c| c.norm_eps = 1e-5);
        }
        if config.rope.scaling != Scaling::None && name != "llama-dynamic" {
            assert_mutant_fails(name, "no RoPE scaling", |c| {
                c.rope.scaling = Scaling::None;
                c.max_position_embeddings = 128;
            });
        }
        if config.layers.iter().any(|l| *l != KvSpec::Full) {
            windows += 1;
            for by in [-1i32, 1] {
                assert_mutant_fails(name, "window off by one", |c| {
                    for layer in &mut c.layers {
                        if let KvSpec::Window(w) = layer {
                            *w = w.wrapping_add_signed(by);
                        }
                    }
                });
            }
            assert_mutant_fails(name, "no window", |c| {
                for layer in &mut c.layers {
                    if let KvSpec::Window(w) = layer {
                        *w = 1 << 20;
                    }
                }
            });
        }
        if config.qkv_bias {
            biases += 1;
            assert_mutant_fails(name, "no q, k, v bias", |c| c.qkv_bias = false);
        }
        if config.o_bias {
            assert_mutant_fails(name, "no o bias", |c| c.o_bias = false);
        }
        if config.mlp_bias {
            assert_mutant_fails(name, "no MLP bias", |c| c.mlp_bias = false);
        }
        if config.layer_norms {
            layer_norms += 1;
            assert_mutant_fails(name, "norms that subtract no mean", |c| c.layer_norms = false);
        }
        if config.joint_qk_norm {
            joint_norms += 1;
        }
        if config.qk_norm {
            assert_mutant_fails(name, "no q, k norm", |c| c.qk_norm = false);
        }
        if config.unit_qk_norm {
            assert_mutant_fails(name, "no norm of queries and keys", |c| c.unit_qk_norm = false);
        }
        if config
            .experts
            .as_ref()
            .is_some_and(|experts| experts.routing.scales_input)
        {
            assert_mutant_fails(name, "weights of what experts write", |c| {
                c.experts.iter_mut().for_each(|e| e.routing.scales_input = false);
            });
        }
        if config.value_norm {
            assert_mutant_fails(name, "no norm of values", |c| c.value_norm = false);
        }
        if config.layer_inputs.is_some() {
            assert_mutant_fails(name, "no inputs of layers", |c| c.layer_inputs = None);
        }
        if config.kv_sources.contains(&Some(2)) {
            assert_mutant_fails(name, "keys and values of an earlier layer", |c| {
                for source in c.kv_sources.iter_mut().filter(|source| **source == Some(2)) {
                    *source = Some(0);
                }
            });
        }
        if config.layer_scalars {
            assert_mutant_fails(name, "no factors of layers", |c| c.layer_scalars = false);
        }
        if let Scaling::Proportional { share, factor } = config.rope.scaling {
            assert_mutant_fails(name, "a pair more that turns", |c| {
                let share = share + 2.0 / c.global.as_ref().unwrap().heads.head_dim as f64;
                c.rope.scaling = Scaling::Proportional { share, factor };
            });
        }
        assert_mutant_fails(name, "attention's scale", |c| c.attention_scale *= 1.1);
        let activation = match config.activation {
            Activation::Silu => Activation::GeluTanh,
            Activation::GeluTanh | Activation::ClampedSwiglu { .. } => Activation::Silu,
            // The others have a gate, which these models do not store.
            Activation::SquaredRelu => Activation::SquaredRelu,
        };
        if config.activation.has_gate() {
            assert_mutant_fails(name, "the other activation", |c| c.activation = activation);
        }
        if let Activation::ClampedSwiglu { alpha, limit } = config.activation {
            let alpha = alpha * 1.05;
            assert_mutant_fails(name, "the gate's factor", |c| {
                c.activation = Activation::ClampedSwiglu { alpha, limit };
            });
        }
        if config.attention_sinks {
            sinks += 1;
            assert_mutant_fails(name, "no sinks", |c| c.attention_sinks = false);
        }
        if config.attention_soft_cap.is_some() {
            caps += 1;
            assert_mutant_fails(name, "no soft cap of attention", |c| c.attention_soft_cap = None);
        }
        if config.logit_soft_cap.is_some() {
            caps += 1;
            assert_mutant_fails(name, "no soft cap of logits", |c| c.logit_soft_cap = None);
        }
        if config.embedding_scale != 1.0 {
            assert_mutant_fails(name, "no scale of the embedding", |c| c.embedding_scale = 1.0);
        }
        if config.unit_offset_norms {
            assert_mutant_fails(name, "norms as they are stored", |c| c.unit_offset_norms = false);
        }
        if config.post_norms {
            assert_mutant_fails(name, "no norms behind attention and network", |c| c.post_norms = false);
        }
        if let Some(recurrent) = &config.recurrent {
            states += 1;
            assert_mutant_fails(name, "epsilon of the recurrent norm", |c| {
                c.recurrent.iter_mut().for_each(|r| r.norm_eps = 1e-5);
            });
            if recurrent.conv_bias {
                assert_mutant_fails(name, "no biases of the convolution", |c| {
                    c.recurrent.iter_mut().for_each(|r| r.conv_bias = false);
                });
            }
        }
        if let Some(experts) = &config.experts {
            routers += 1;
            if experts.routing.per_token > 1 {
                assert_mutant_fails(name, "an expert less per token", |c| {
                    c.experts.iter_mut().for_each(|e| e.routing.per_token -= 1);
                });
            }
            if experts.router_bias {
                assert_mutant_fails(name, "no bias of the router", |c| {
                    c.experts.iter_mut().for_each(|e| e.router_bias = false);
                });
            }
            // The weights of all experts sum to 1 by themselves.
            if experts.routing.per_token < experts.count {
                assert_mutant_fails(name, "weights renormalized or not", |c| {
                    c.experts.iter_mut().for_each(|e| e.routing.renormalized ^= true);
                });
                assert_mutant_fails(name, "an expert more per token", |c| {
                    c.experts.iter_mut().for_each(|e| e.routing.per_token += 1);
                });
            }
        }
        if config.logit_scale != 1.0 {
            assert_mutant_fails(name, "no factor of logits", |c| c.logit_scale = 1.0);
        }
        if config.rotates.contains(&false) {
            rotations += 1;
            assert_mutant_fails(name, "a rotation in every layer", |c| c.rotates.fill(true));
        }
        if config.rotary_dims < config.heads.head_dim && config.latent.is_none() {
            rotations += 1;
            assert_mutant_fails(name, "whole heads rotate", |c| c.rotary_dims = c.heads.head_dim);
        }
        if config.rotates_neighbours {
            assert_mutant_fails(name, "halves rotate", |c| c.rotates_neighbours = false);
        }
        if config.latent.is_some() {
            latents += 1;
            if !config.rotates_neighbours {
                assert_mutant_fails(name, "neighbours rotate", |c| c.rotates_neighbours = true);
            }
        }
        if let Some(groups) = config.experts.as_ref().and_then(|experts| experts.routing.groups) {
            assert_mutant_fails(name, "no groups of experts", |c| {
                c.experts.iter_mut().for_each(|e| e.routing.groups = None);
            });
            assert_mutant_fails(name, "the other score of a group", |c| {
                let best = 3 - groups.best;
                c.experts
                    .iter_mut()
                    .for_each(|e| e.routing.groups = Some(ExpertGroups { best, ..groups }));
            });
        }
        if config
            .experts
            .as_ref()
            .is_some_and(|experts| experts.routing.scale != 1.0)
        {
            assert_mutant_fails(name, "no factor of experts", |c| {
                c.experts.iter_mut().for_each(|e| e.routing.scale = 1.0);
            });
        }
        if let Scaling::LongRope(_) = config.rope.scaling {
            assert_mutant_fails(name, "the other factors of LongRoPE", |c| {
                if let Scaling::LongRope(long) = &mut c.rope.scaling {
                    std::mem::swap(&mut long.short_factors, &mut long.long_factors);
                }
            });
            assert_mutant_fails(name, "no attention factor of LongRoPE", |c| {
                if let Scaling::LongRope(long) = &mut c.rope.scaling {
                    long.attention_factor = 1.0;
                }
            });
        }
        if let Some(rope) = &config.window_rope {
            rotations += 1;
            assert_mutant_fails(name, "one rotation for all layers", |c| c.window_rope = None);
            let theta = rope.theta * 1.05;
            assert_mutant_fails(name, "RoPE base of windows", |c| {
                c.window_rope.iter_mut().for_each(|rope| rope.theta = theta);
            });
        }
    }
    PASSED.with_borrow(|passed| assert!(passed.is_empty(), "{passed:#?}"));
    let counts = [
        windows,
        biases,
        epsilons,
        caps,
        rotations,
        joint_norms,
        layer_norms,
        routers,
        sinks,
        states,
        latents,
    ];
    let least = [6, 8, 20, 3, 6, 3, 2, 7, 2, 6, 5];
    assert!(counts.iter().zip(least).all(|(n, least)| *n >= least), "{counts:?}");
}
