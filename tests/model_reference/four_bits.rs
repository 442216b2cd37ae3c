//! Weights that stay in four bits: near the reference, the same bits however computed, and refused where a checkpoint has none.

use gristmill::device::{KvFormat, Precision};
use gristmill::model::config::Config;
use gristmill::model::weights::WeightSource;
use gristmill::model::{Checkpoint, LoadOptions, Transformer};

use super::harness::{Reference, Runner, folder, in_chunks, options};
use super::precision::{assert_same_bits, distance};

/// Checkpoints with matrices in four bits.
pub(crate) const FOUR_BITS: [&str; 5] = [
    "mistral-ct-w4a16-zeros",
    "mixtral-awq",
    "qwen3moe-ct-w4a16",
    "qwen2-q4_0-tied",
    "llama-q4_0",
];

/// The most nats of mean KL divergence from transformers that are accepted: half of what INT8 may have. Matrices in four bits are those of
/// the checkpoint; what is left is the rounding of activations, and an output head in 8 bits.
const NATS_MAX: f64 = 4e-3;
/// The most of INT8's divergence, which rounds these matrices a second time.
const SHARE_OF_INT8_MAX: f64 = 0.8;

/// Checkpoints without such matrices: plain, in 8 bits, in numbers with a table, and with columns in an order of their own.
pub(crate) const OTHERS: [&str; 5] = [
    "llama-plain",
    "qwen2-ct-int8",
    "phi3-bnb-nf4",
    "llama-ct-mxfp4",
    "qwen2-gptq",
];

fn in_four_bits(reference: &Reference, kv_format: KvFormat) -> LoadOptions {
    LoadOptions {
        kv_format,
        ..options(reference, Precision::W4a8)
    }
}

#[test]
fn only_the_rounding_of_activations_is_between_the_reference_and_four_bits() {
    let mut failed = Vec::new();
    for name in FOUR_BITS {
        let reference = Reference::load(name);
        let [eight, four] = [Precision::Int8, Precision::W4a8].map(|precision| {
            let options = LoadOptions {
                kv_format: KvFormat::F32,
                ..options(&reference, precision)
            };
            let mut model = Transformer::load(&folder(name), &options).unwrap();
            let mut runner = Runner::new(&mut model);
            let (mut want, mut got) = (Vec::new(), Vec::new());
            for prompt in &reference.prompts {
                let tokens = &prompt.tokens[..prompt.length];
                got.extend(in_chunks(&mut runner, tokens, &[tokens.len()]));
                want.extend(prompt.logits[..prompt.length].iter().cloned());
            }
            let (divergence, same) = distance(&want, &got);
            println!(
                "{name} in {precision:?}: {divergence:.1e} nats, {:.1} % the same",
                same * 100.0
            );
            divergence
        });
        if four > NATS_MAX || four > SHARE_OF_INT8_MAX * eight {
            failed.push(format!("{name}: {four:.1e} nats, and {eight:.1e} in INT8"));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Logits of all prompts' tokens.
fn logits(mut model: Transformer, reference: &Reference) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(&mut model);
    let prompts = reference.prompts.iter().map(|prompt| &prompt.tokens);
    prompts
        .flat_map(|tokens| in_chunks(&mut runner, tokens, &[tokens.len()]))
        .collect()
}

/// Codes of a matrix that an adapter changes are not its weights.
#[test]
fn a_matrix_that_an_adapter_changes_is_not_kept_in_four_bits() {
    // The adapter's model has the same sizes.
    let (name, adapter) = ("mistral-ct-w4a16-zeros", "llama-plain-stabilized");
    let reference = Reference::load(name);
    let open = |adapter: Option<&str>| {
        let config = Config::load(&folder(name)).unwrap();
        Checkpoint::open(&folder(name), adapter.map(folder).as_deref(), config).unwrap()
    };
    let adapted = open(Some(adapter));
    let group = |part: &str, rows: usize| {
        let name = format!("model.layers.1.{part}.weight");
        adapted.weights.code_group(&name, rows, 32).unwrap()
    };
    assert_eq!(
        (
            group("self_attn.q_proj", 32),
            group("self_attn.o_proj", 32),
            group("mlp.up_proj", 48)
        ),
        (None, Some(8), Some(8))
    );
    let run = |adapter: Option<&str>, precision: Precision| {
        let Checkpoint { config, weights } = open(adapter);
        let options = LoadOptions {
            kv_format: KvFormat::F32,
            ..options(&reference, precision)
        };
        logits(
            Transformer::from_weights(config, &weights, &options).unwrap(),
            &reference,
        )
    };
    let want = run(Some(adapter), Precision::F32);
    let (near, _) = distance(&want, &run(Some(adapter), Precision::W4a8));
    let (far, _) = distance(&want, &run(None, Precision::W4a8));
    println!("{near:.1e} nats with the adapter, {far:.1e} without it");
    assert!(
        near <= 2.0 * NATS_MAX && far > 20.0 * near,
        "{near:.1e} and {far:.1e} nats"
    );
}

#[test]
fn four_bits_give_the_same_bits_however_computed() {
    for name in FOUR_BITS {
        let reference = Reference::load(name);
        let options = in_four_bits(&reference, KvFormat::Int8);
        assert_same_bits(name, &reference.prompts.last().unwrap().tokens, &options);
    }
}

#[test]
fn a_checkpoint_without_four_bits_is_refused() {
    for name in OTHERS {
        let reference = Reference::load(name);
        let error = Transformer::load(&folder(name), &in_four_bits(&reference, KvFormat::F32)).err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        let says = ["`precision` is w4a8", "choose `int8`"];
        assert!(
            says.iter().all(|words| error.contains(words)) && !error.contains('\n'),
            "{name}: {error}"
        );
    }
}
