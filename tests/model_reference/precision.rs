//! How far the cheap precisions are from F32, and that in 8 bits, too, a row does not depend on how it was computed.

use std::sync::Arc;

use gristmill::device::{KvFormat, Precision, cpu};
use gristmill::model::config::Config;
use gristmill::model::quantize::compare;
use gristmill::model::stored_form::StoredForm;
use gristmill::model::weights::Weights;
use gristmill::model::{ActivationMaxima, LoadOptions, Transformer};

use super::harness::{Altered, Reference, Runner, all_models, chooses_experts, folder, in_chunks, options};

/// Precision, format of keys and values, most nats of mean KL divergence from F32 and least share of the same largest logit
/// that are accepted over all models. The models are tiny and untrained: their distributions are flat, and ties near.
const FORMATS: [(Precision, KvFormat, f64, f64); 3] = [
    (Precision::Bf16, KvFormat::Bf16, 2e-3, 0.95),
    (Precision::Int8, KvFormat::Bf16, 8e-3, 0.9),
    (Precision::Int8, KvFormat::Int8, 8e-3, 0.9),
];

/// What a model may be farther from F32 whose tokens use some of its experts, since a rounding may choose another one: a factor of
/// the divergence, and a share of rows.
const OTHER_EXPERTS: (f64, f64) = (3.0, 0.05);
const ANY: (f64, f64) = (1.0, 0.0);

/// Channels that are blown up a hundredfold in activations, and taken back in the weights that read them.
const OUTLIERS: [usize; 3] = [1, 5, 12];
const OUTLIER: f32 = 100.0;

/// Mean KL divergence in nats of the distributions of `other` from those of `reference`, and the share of rows whose
/// largest logit is the same token's.
pub(super) fn distance(reference: &[Vec<f32>], other: &[Vec<f32>]) -> (f64, f64) {
    assert_eq!(reference.len(), other.len());
    let found = compare::distance(reference, other);
    (found.kl, found.same_top)
}

/// The same function with outliers in activations: channels of a norm and rows of the up projection times 100, what reads them
/// divided by it.
fn with_outliers(name: &str, columns: usize, values: &mut [f32]) {
    let of_columns = |values: &mut [f32]| {
        for row in values.chunks_exact_mut(columns) {
            OUTLIERS.iter().for_each(|c| row[*c] /= OUTLIER);
        }
    };
    if name.ends_with("layernorm.weight") {
        OUTLIERS.iter().for_each(|c| values[*c] *= OUTLIER);
    } else if ["q_proj", "k_proj", "v_proj", "gate_proj"]
        .iter()
        .any(|part| name.contains(part) && name.ends_with("weight"))
    {
        of_columns(values);
    } else if name.ends_with("up_proj.weight") {
        of_columns(values);
        for row in OUTLIERS {
            values[row * columns..][..columns]
                .iter_mut()
                .for_each(|x| *x *= OUTLIER);
        }
    } else if name.ends_with("down_proj.weight") {
        of_columns(values);
    }
}

fn in_format(reference: &Reference, precision: Precision, kv_format: KvFormat) -> LoadOptions {
    LoadOptions {
        kv_format,
        ..options(reference, precision)
    }
}

/// Logits of all prompts' tokens.
fn logits(mut model: Transformer, reference: &Reference) -> Vec<Vec<f32>> {
    let mut runner = Runner::new(&mut model);
    let prompts = reference.prompts.iter();
    prompts
        .flat_map(|p| in_chunks(&mut runner, &p.tokens, &[p.tokens.len()]))
        .collect()
}

/// Prints what a table of benches/README.md is made of.
#[test]
fn cheap_precisions_stay_near_f32() {
    println!("| model | precision | keys and values | mean KL, nats | same top token |");
    println!("|---|---|---|---|---|");
    let mut failed = Vec::new();
    let mut compare = |name: &str, label: &str, config: &Config, (factor, share): (f64, f64)| {
        let reference = Reference::load(name);
        let weights = Weights::open(&folder(name), StoredForm::of(config)).unwrap();
        let load = |precision, kv| {
            let options = in_format(&reference, precision, kv);
            Transformer::from_weights(config.clone(), &weights, &options).unwrap()
        };
        let want = logits(load(Precision::F32, KvFormat::F32), &reference);
        for (precision, kv, most, least) in FORMATS {
            let (divergence, same) = distance(&want, &logits(load(precision, kv), &reference));
            println!(
                "| {name}{label} | {precision:?} | {kv:?} | {divergence:.1e} | {:.1} % |",
                same * 100.0
            );
            if divergence > most * factor || same < least - share {
                failed.push(format!(
                    "{name}{label} in {precision:?} over {kv:?}: {divergence:.1e} nats, {same}"
                ));
            }
        }
    };
    for name in all_models() {
        let mut config = Config::load(&folder(name)).unwrap();
        let chooses = chooses_experts(&config);
        let limits = if chooses { OTHER_EXPERTS } else { ANY };
        compare(name, "", &config, limits);
        if chooses {
            // Where every token uses all experts, nothing is chosen, and the limits are those of any model.
            config.experts.iter_mut().for_each(|e| {
                (e.routing.per_token, e.routing.groups) = (e.count, None);
            });
            compare(name, ", all experts", &config, ANY);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// What a bounded gate's down projection reads cannot be rescaled, however different its columns are.
#[test]
fn bounded_up_rows_keep_their_scale() {
    let name = "gptoss-transposed";
    let reference = Reference::load(name);
    let mut config = Config::load(&folder(name)).unwrap();
    config.experts.iter_mut().for_each(|e| e.routing.per_token = e.count);
    let load = |precision, kv| {
        let change = |name: &str, columns: usize, values: &mut [f32]| {
            if name.ends_with(".down_proj") {
                // Stored transposed: a row is what one channel is multiplied with.
                let rows = values.chunks_exact_mut(columns).step_by(5);
                rows.flatten().for_each(|x| *x *= 8.0);
            }
        };
        let source = Altered {
            inner: Weights::open(&folder(name), StoredForm::of(&config)).unwrap(),
            change,
        };
        let options = in_format(&reference, precision, kv);
        Transformer::from_weights(config.clone(), &source, &options).unwrap()
    };
    let want = logits(load(Precision::F32, KvFormat::F32), &reference);
    let (divergence, same) = distance(&want, &logits(load(Precision::Int8, KvFormat::Bf16), &reference));
    println!("{divergence:.1e} nats, {same}");
    assert!(divergence < 0.05, "{divergence:.1e} nats, {same}");
}

/// Prints a table of benches/README.md.
#[test]
fn outliers_cost_precision_and_nothing_else() {
    let name = "llama-plain";
    let reference = Reference::load(name);
    let config = Config::load(&folder(name)).unwrap();
    let load_with = |options: LoadOptions, outliers: bool| {
        let change = |name: &str, columns: usize, values: &mut [f32]| {
            if outliers {
                with_outliers(name, columns, values);
            }
        };
        let source = Altered {
            inner: Weights::open(&folder(name), StoredForm::of(&config)).unwrap(),
            change,
        };
        Transformer::from_weights(config.clone(), &source, &options).unwrap()
    };
    let load = |precision, kv, outliers| load_with(in_format(&reference, precision, kv), outliers);
    let want = logits(load(Precision::F32, KvFormat::F32, false), &reference);
    let (divergence, same) = distance(&want, &logits(load(Precision::F32, KvFormat::F32, true), &reference));
    assert!(
        divergence < 1e-9 && same > 0.999,
        "the change keeps the function: {divergence:.1e} nats, {same}"
    );
    println!("| weights | precision | keys and values | mean KL, nats | same top token |");
    println!("|---|---|---|---|---|");
    for (precision, kv, ..) in FORMATS {
        let (divergence, same) = distance(&want, &logits(load(precision, kv, true), &reference));
        println!(
            "| balanced | {precision:?} | {kv:?} | {divergence:.1e} | {:.1} % |",
            same * 100.0
        );
        assert!(
            divergence < 0.1,
            "{precision:?} over {kv:?}: {divergence:.1e} nats, {same}"
        );
    }
    // How large channels get, measured on other prompts than those that are compared.
    let mut exact = load(Precision::F32, KvFormat::F32, true);
    let channels = ActivationMaxima::measure(&mut exact, calibration(&reference).iter().map(Vec::as_slice)).unwrap();
    let read = |config: &Config, bytes: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        ActivationMaxima::load(file.path(), config)
    };
    let bytes = channels.to_bytes().unwrap();
    assert_eq!(read(&config, &bytes).unwrap(), channels);
    for (precision, kv, ..) in FORMATS.into_iter().filter(|f| f.0 == Precision::Int8) {
        let options = LoadOptions {
            channels: Some(channels.clone().into()),
            ..in_format(&reference, precision, kv)
        };
        let (divergence, same) = distance(&want, &logits(load_with(options, true), &reference));
        println!(
            "| balanced, calibrated on other prompts | {precision:?} | {kv:?} | {divergence:.1e} | {:.1} % |",
            same * 100.0
        );
        assert!(
            divergence < 0.02,
            "calibrated, over {kv:?}: {divergence:.1e} nats, {same}"
        );
    }
    // What was measured says how to balance: channels that are all said to be of one size leave the outliers as they are.
    let mut flat = bytes.clone();
    let header = 8 + u64::from_le_bytes(flat[..8].try_into().unwrap()) as usize;
    flat[header..]
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .for_each(|x| *x = 1.0f32.to_le_bytes());
    let flat = read(&config, &flat).unwrap();
    let options = LoadOptions {
        channels: Some(flat.into()),
        ..in_format(&reference, Precision::Int8, KvFormat::Bf16)
    };
    let (divergence, same) = distance(&want, &logits(load_with(options, true), &reference));
    println!(
        "| balanced as if channels were of one size | {:?} | {:?} | {divergence:.1e} | {:.1} % |",
        Precision::Int8,
        KvFormat::Bf16,
        same * 100.0
    );
    assert!(divergence > 0.02, "{divergence:.1e} nats though the sizes are wrong");
    let other = Config::load(&folder("qwen3-tied")).unwrap();
    for (config, bytes) in [
        (&other, &bytes[..]),
        (&config, &bytes[..bytes.len() - 4]),
        (&config, b"no such file"),
    ] {
        let error = read(config, bytes).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.contains("tmp"), "{error}");
    }
}

/// Prompts of the same vocabulary that are not the reference's.
fn calibration(reference: &Reference) -> Vec<Vec<u32>> {
    (0..8u32)
        .map(|row| {
            (0..64)
                .map(|i| (row * 7919 + i * 104_729) % reference.vocabulary as u32)
                .collect()
        })
        .collect()
}

/// Every instruction set, number of threads and division into steps gives the same bits.
pub(super) fn assert_same_bits(name: &str, tokens: &[u32], options: &LoadOptions) {
    let mut first: Option<Vec<Vec<f32>>> = None;
    for isa in cpu::Isa::available() {
        for (threads, sizes) in [(1, &[usize::MAX][..]), (2, &[1]), (2, &[7, 40])] {
            let options = LoadOptions {
                threads: Arc::new(cpu::Threads::new(threads).unwrap()),
                isa: Some(isa),
                ..options.clone()
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

/// In 8 bits sums are exact, and what is rounded depends on the row alone: chunks, threads and instructions change no bit.
#[test]
fn eight_bits_give_the_same_bits_however_computed() {
    for name in [
        "llama-plain",
        "mistral-window",
        "qwen2-tied",
        "qwen3-tied",
        "mixtral-all-window",
        "qwen3moe-tied",
        "qwen3moe-dense-layers-sharded",
        "deepseek2-groups",
        "kimi-heads",
    ] {
        let reference = Reference::load(name);
        let options = in_format(&reference, Precision::Int8, KvFormat::Int8);
        assert_same_bits(name, &reference.prompts[3].tokens, &options);
    }
}
