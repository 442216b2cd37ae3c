//! Weights that stay in four bits: near the reference, the same bits however computed, and refused where a checkpoint has none.

use std::sync::Arc;

use gristmill::device::{KvFormat, Precision, cpu};
use gristmill::model::{LoadOptions, Transformer};

use super::harness::{Reference, Runner, folder, in_chunks, options};
use super::precision::distance;

/// Checkpoints with matrices in four bits, and the most nats of mean KL divergence from transformers that are accepted: weights are
/// those of the checkpoint, so only activations are rounded, to steps of 1/127 of a group's largest value. Where tokens use some
/// of the experts, a rounding may choose another one.
pub(crate) const FOUR_BITS: [(&str, f64); 4] = [
    ("mistral-ct-w4a16-zeros", 1e-3),
    ("mixtral-awq", 3e-3),
    ("qwen3moe-ct-w4a16", 3e-3),
    ("qwen2-q4_0-tied", 1e-3),
];

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
    for (name, most) in FOUR_BITS {
        let reference = Reference::load(name);
        for (precision, kv_format) in [(Precision::Int8, KvFormat::F32), (Precision::W4a8, KvFormat::F32)] {
            let options = LoadOptions {
                kv_format,
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
            if precision == Precision::W4a8 && divergence > most {
                failed.push(format!("{name}: {divergence:.1e} nats"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn four_bits_give_the_same_bits_however_computed() {
    for (name, _) in FOUR_BITS {
        let reference = Reference::load(name);
        let tokens = &reference.prompts[3].tokens;
        let mut first: Option<Vec<Vec<f32>>> = None;
        for isa in cpu::Isa::available() {
            for (threads, sizes) in [(1, &[usize::MAX][..]), (2, &[1]), (2, &[7, 40])] {
                let options = LoadOptions {
                    threads: Arc::new(cpu::Threads::new(threads).unwrap()),
                    isa: Some(isa),
                    ..in_four_bits(&reference, KvFormat::Int8)
                };
                let mut model = Transformer::load(&folder(name), &options).unwrap();
                let sizes: Vec<usize> = sizes.iter().map(|size| (*size).min(tokens.len())).collect();
                let rows = in_chunks(&mut Runner::new(&mut model), tokens, &sizes);
                let want = first.get_or_insert_with(|| rows.clone());
                assert!(
                    rows == *want,
                    "{name} on {isa} with {threads} threads in steps of {sizes:?}"
                );
            }
        }
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
