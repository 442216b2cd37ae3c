//! In F32 a row has the same bits whatever is computed beside it, before it or on what.

use std::path::Path;
use std::sync::Arc;

use gristmill::device::Placeholders;
use gristmill::device::batch::{BlockCopy, StepBatch};
use gristmill::device::{Dtype, KvFormat, Precision, cpu};
use gristmill::engine::Forward;
use gristmill::model::config::Config;
use gristmill::model::stored_form::StoredForm;
use gristmill::model::weights::Weights;
use gristmill::model::{KvBudget, LoadOptions, Transformer};

use super::harness::{Altered, MODELS, Reference, Runner, Sequence, folder, in_chunks, load, options};

pub(super) fn assert_same_bits(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        for (j, (a, b)) in g.iter().zip(w).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: row {i} id {j}: {a} is not {b}");
        }
    }
}

/// Logits of each sequence, computed alone and in one step.
fn each_alone(runner: &mut Runner<'_>, all: &[&[u32]]) -> Vec<Vec<Vec<f32>>> {
    let whole = |tokens: &&[u32]| in_chunks(runner, tokens, &[tokens.len()]);
    all.iter().map(whole).collect()
}

/// A step's sequences with their next tokens.
type Work<'a> = Vec<(&'a mut Sequence, &'a [u32])>;

/// Whether the token of a sequence, at a position, has logits.
type HasLogits = fn(usize, usize) -> bool;

/// The tokens of each sequence up to its end, and for each of them, in order, its sequence and position.
fn next_work<'a>(
    sequences: &'a mut [Sequence],
    all: &[&'a [u32]],
    ends: [usize; 4],
) -> (Work<'a>, Vec<(usize, usize)>) {
    let (mut work, mut places) = (Vec::new(), Vec::new());
    for (i, s) in sequences.iter_mut().enumerate() {
        let next = &all[i][s.stored..ends[i]];
        if !next.is_empty() {
            places.extend((s.stored..ends[i]).map(|position| (i, position)));
            work.push((s, next));
        }
    }
    (work, places)
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_chunked_and_resumed() {
    for name in MODELS {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, Precision::F32);
        let mut runner = Runner::new(&mut model);
        let all: Vec<&[u32]> = reference.prompts.iter().map(|p| &p.tokens[..]).collect();
        let alone = each_alone(&mut runner, &all);
        // Token by token (decode), and in chunks on both sides of a block.
        for sizes in [&[1][..], &[16], &[5, 1, 17], &[33, 2], &[15, 16, 17]] {
            for (tokens, want) in all.iter().zip(&alone) {
                let got = in_chunks(&mut runner, tokens, sizes);
                assert_same_bits(&got, want, &format!("{name}: chunks of {sizes:?}"));
            }
        }
        // A mixed batch: in each step some prefill whole or in part while others decode.
        let mut sequences = vec![Sequence::default(); all.len()];
        let mut got = vec![Vec::new(); all.len()];
        for ends in [[64, 1, 20, 40], [65, 50, 21, 41], [65, 51, 81, 42], [65, 71, 81, 104]] {
            let (mut work, places) = next_work(&mut sequences, &all, ends);
            let rows = runner.step(&mut work);
            assert_eq!(rows.len(), places.len(), "{name}");
            for (row, (i, _)) in rows.into_iter().zip(places) {
                got[i].push(row);
            }
        }
        for (i, rows) in got.iter().enumerate() {
            assert_same_bits(rows, &alone[i], &format!("{name}: prompt {i} in a mixed batch"));
        }
    }
}

#[test]
fn a_row_has_the_same_bits_where_others_have_no_logits() {
    for name in MODELS {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, Precision::F32);
        let vocabulary = model.vocab_size();
        let mut runner = Runner::new(&mut model);
        let all: Vec<&[u32]> = reference.prompts.iter().map(|p| &p.tokens[..]).collect();
        let alone = each_alone(&mut runner, &all);
        let mut sequences = vec![Sequence::default(); all.len()];
        // Some rows of a step, none, the last ones, all, and the first ones.
        let steps: [([usize; 4], HasLogits); 5] = [
            ([20, 12, 20, 40], |_, position| position % 7 < 3),
            ([30, 25, 37, 57], |_, _| false),
            ([64, 50, 60, 58], |_, position| [63, 49, 59, 57].contains(&position)),
            ([65, 51, 61, 59], |_, _| true),
            ([65, 71, 81, 104], |sequence, _| sequence < 2),
        ];
        for (ends, has_logits) in steps {
            let (mut work, rows) = next_work(&mut sequences, &all, ends);
            let mut batch = runner.batch(&mut work, vec![]);
            batch.logits_at.retain(|row| {
                let (sequence, position) = rows[*row as usize];
                has_logits(sequence, position)
            });
            let logits = runner.model.forward(&batch).unwrap();
            assert_eq!(logits.len(), batch.logits_at.len() * vocabulary, "{name}");
            for (row, got) in batch.logits_at.iter().zip(logits.chunks_exact(vocabulary)) {
                let (sequence, position) = rows[*row as usize];
                let what = format!("{name}: position {position} of prompt {sequence}");
                assert_same_bits(&[got.to_vec()], &alone[sequence][position..=position], &what);
            }
        }
        sequences.into_iter().for_each(|sequence| runner.release(sequence));
    }
}

#[test]
fn a_row_has_the_same_bits_behind_a_shared_prefix() {
    for name in MODELS {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, Precision::F32);
        if model.config().recurrent.is_some() {
            continue;
        }
        let mut runner = Runner::new(&mut model);
        let first = &reference.prompts[3].tokens[..60];
        // The same 32 tokens, then others.
        let second: Vec<u32> = first[..32]
            .iter()
            .chain(&reference.prompts[2].tokens[..30])
            .copied()
            .collect();
        let alone = in_chunks(&mut runner, &second, &[second.len()]);
        // Both in one step: the second attends to blocks that the first fills in that very step.
        let mut owner = Sequence::default();
        runner.step(&mut [(&mut owner, &first[..0x10])]);
        let (block, rest) = (owner.blocks[0], runner.free.pop().unwrap());
        owner.blocks.push(rest);
        let mut guest = Sequence {
            blocks: vec![block, rest],
            slot: None,
            stored: 32,
            ..Sequence::default()
        };
        let rows = runner.step(&mut [(&mut owner, &first[16..]), (&mut guest, &second[32..])]);
        assert_same_bits(&rows[44..], &alone[32..], &format!("{name}: in one step"));
        // Later, forking inside a block: its copy goes on differently.
        let fork: Vec<u32> = first[..41]
            .iter()
            .chain(&reference.prompts[2].tokens[..30])
            .copied()
            .collect();
        let alone = in_chunks(&mut runner, &fork, &[fork.len()]);
        let copy = runner.free.pop().unwrap();
        let mut guest = Sequence {
            blocks: vec![owner.blocks[0], owner.blocks[1], copy],
            slot: None,
            stored: 41,
            ..Sequence::default()
        };
        let rows = runner.copying_step(
            &mut [(&mut guest, &fork[41..])],
            vec![BlockCopy {
                from: owner.blocks[2],
                to: copy,
            }],
        );
        assert_same_bits(&rows, &alone[41..], &format!("{name}: forked inside a block"));
    }
}

#[test]
fn a_fork_has_the_same_bits_from_a_copied_state() {
    for (name, precision) in [
        ("qwen35-recurrent", Precision::F32),
        ("qwen35-recurrent", Precision::Int8),
        ("qwen35moe-fused", Precision::F32),
        ("granite4-experts", Precision::F32),
        ("granite4-dense", Precision::Int8),
    ] {
        let reference = Reference::load(name);
        let mut model = load(name, &reference, precision);
        let mut runner = Runner::new(&mut model);
        let tokens = &reference.prompts[3].tokens;
        let other: Vec<u32> = tokens[..41].iter().chain(&tokens[60..80]).copied().collect();
        let want = [&tokens[..], &other].map(|tokens| in_chunks(&mut runner, tokens, &[tokens.len()]));
        let mut owner = Sequence::default();
        runner.step(&mut [(&mut owner, &tokens[..41])]);
        let mut fork = owner.clone();
        fork.blocks[2] = runner.free.pop().unwrap();
        fork.slot = runner.free_slots.pop();
        let copy = |from, to| BlockCopy { from, to };
        runner.state_copies = vec![copy(owner.slot.unwrap(), fork.slot.unwrap())];
        let copies = vec![copy(owner.blocks[2], fork.blocks[2])];
        let rows = runner.copying_step(&mut [(&mut owner, &tokens[41..]), (&mut fork, &other[41..])], copies);
        let (first, second) = rows.split_at(tokens.len() - 41);
        assert_same_bits(first, &want[0][41..], &format!("{name}: the parent"));
        assert_same_bits(second, &want[1][41..], &format!("{name}: the fork"));
    }
}

#[test]
fn bits_do_not_depend_on_instructions_or_threads() {
    for name in [
        "llama-padded",
        "mistral-window",
        "qwen3-tied",
        "mixtral-twins",
        "qwen3moe-tied",
        "qwen35-recurrent",
    ] {
        let reference = Reference::load(name);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for isa in cpu::Isa::available() {
            for threads in [1, 2, 3] {
                let options = LoadOptions {
                    threads: Arc::new(cpu::Threads::new(threads).unwrap()),
                    ..options(&reference, Precision::F32)
                };
                let device = cpu::Cpu::new(Precision::F32, KvFormat::F32, Arc::clone(&options.threads)).with_isa(isa);
                let config = Config::load(&folder(name)).unwrap();
                let weights = Weights::open(&folder(name), StoredForm::of(&config)).unwrap();
                let mut model = Transformer::on_device(device, config, &weights, &options).unwrap();
                let tokens = &reference.prompts[3].tokens;
                let rows = in_chunks(&mut Runner::new(&mut model), tokens, &[37, 2]);
                let want = first.get_or_insert_with(|| rows.clone());
                assert_same_bits(&rows, want, &format!("{name} on {isa:?} with {threads} threads"));
            }
        }
    }
}

#[test]
fn a_row_that_overflows_harms_no_other() {
    const POISON: u32 = 50;
    // Only `POISON` has something in dimension 0, no layer writes there, and the first layer's network overflows on
    // it: the token's later keys and values are not finite.
    let poisoned = |name: &str, columns: usize, values: &mut [f32]| {
        if name == "model.embed_tokens.weight" {
            for (token, row) in values.chunks_exact_mut(columns).enumerate() {
                row[0] = if token == POISON as usize { 1.0 } else { 0.0 };
            }
        } else if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            values[..columns].fill(0.0);
        } else if name.contains("layers.0.mlp.gate_proj") || name.contains("layers.0.mlp.up_proj") {
            values[..columns].fill(0.0);
            values[0] = 1e25;
        }
    };
    let name = "llama-plain";
    let reference = Reference::load(name);
    let config = Config::load(&folder(name)).unwrap();
    let source = Altered {
        inner: Weights::open(&folder(name), StoredForm::of(&config)).unwrap(),
        change: poisoned,
    };
    let mut model = Transformer::from_weights(config, &source, &options(&reference, Precision::F32)).unwrap();
    let vocabulary = model.vocab_size();
    let mut runner = Runner::new(&mut model);
    let sound: Vec<u32> = reference.prompts[3]
        .tokens
        .iter()
        .map(|&t| if t == POISON { 6 } else { t })
        .collect();
    let alone = in_chunks(&mut runner, &sound, &[sound.len()]);
    assert!(
        alone.iter().flatten().any(|x| x.abs() > 1.0),
        "the altered model still computes something"
    );

    let (mut good, mut bad) = (Sequence::default(), Sequence::default());
    let poison: Vec<u32> = std::iter::repeat_n(POISON, 30).collect();
    let batch = runner.batch(&mut [(&mut bad, &poison), (&mut good, &sound)], vec![]);
    let logits = runner.model.forward(&batch).unwrap();
    let rows: Vec<Vec<f32>> = logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect();
    assert!(rows[..30].iter().all(|row| row.iter().any(|x| !x.is_finite())));
    assert_same_bits(&rows[30..], &alone, "beside a row that overflows");
    // Its blocks go to another sequence, which must not find anything of it there.
    runner.release(good);
    runner.release(bad);
    for sizes in [&[sound.len()][..], &[1], &[9, 30]] {
        let again = in_chunks(&mut runner, &sound, sizes);
        assert_same_bits(&again, &alone, "in blocks that held values that are not finite");
    }
}

/// A model of the size that trains in an hour on two cores.
fn small_model(precision: Precision) -> Transformer {
    let text = r#"{"model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}"#;
    let config = Config::parse(Path::new("config.json"), text).unwrap();
    let options = LoadOptions {
        precision,
        kv_format: precision.kv_format(),
        channels: None,
        isa: None,
        kv: KvBudget::Bytes(256 << 20),
        threads: Arc::new(cpu::Threads::new(2).unwrap()),
        max_context: None,
        vocabulary: None,
    };
    Transformer::random(config, 1, Dtype::Bf16, &options).unwrap()
}

#[test]
fn random_weights_run_and_repeat() {
    let tokens: Vec<u32> = (0..50).map(|i| i * 81 % 4096).collect();
    let rows = in_chunks(&mut Runner::new(&mut small_model(Precision::F32)), &tokens, &[50]);
    let again = in_chunks(&mut Runner::new(&mut small_model(Precision::F32)), &tokens, &[20]);
    assert_same_bits(&again, &rows, "the same seed");
    let all: Vec<f32> = rows.concat();
    let deviation = (all.iter().map(|x| (x * x) as f64).sum::<f64>() / all.len() as f64).sqrt();
    assert!((0.5..2.0).contains(&deviation), "logits spread {deviation}");
}

/// Prints speeds; run by hand with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement, not a check"]
fn speed_of_steps() {
    for precision in [Precision::F32, Precision::Bf16] {
        let mut model = small_model(precision);
        for (what, sequences, tokens) in [("prefill", 4usize, 256usize), ("decode", 64, 1), ("decode", 1, 1)] {
            let mut best = f64::INFINITY;
            for _ in 0..10 {
                let mut batch = StepBatch::default();
                for i in 0..sequences {
                    let (kv_len, blocks) = (if tokens == 1 { 128 } else { tokens }, tokens.max(128).div_ceil(16));
                    let table = (0..blocks).map(|b| (i * blocks + b) as u32);
                    batch.push((0..tokens as u32).map(|t| t * 7 % 4096), kv_len as u32, table);
                    batch.logits_at.push(batch.tokens.len() as u32 - 1);
                }
                let start = std::time::Instant::now();
                model.forward(&batch).unwrap();
                best = best.min(start.elapsed().as_secs_f64());
            }
            let rate = (sequences * tokens) as f64 / best;
            println!(
                "{precision:?} {what}, {sequences} sequences: {:.2} ms a step, {rate:.0} tokens/s",
                best * 1e3
            );
        }
    }
}

/// As transformers' classes of models that see images read them, wherever in a sequence they stand.
#[test]
fn tokens_of_images_are_read_as_another_one() {
    for name in ["gemma4-images", "gemma4-shared"] {
        let reference = Reference::load(name);
        let mut config = Config::load(&folder(name)).unwrap();
        let mut plain = load(name, &reference, Precision::F32);
        let tokens = &reference.prompts[3].tokens;
        let (image, padding) = (tokens[5], tokens[9]);
        config.placeholders = Some(Placeholders {
            ids: [image; 3],
            read_as: padding,
        });
        let weights = Weights::open(&folder(name), StoredForm::of(&config)).unwrap();
        let mut model = Transformer::from_weights(config, &weights, &options(&reference, Precision::F32)).unwrap();
        let read: Vec<u32> = tokens.iter().map(|t| if *t == image { padding } else { *t }).collect();
        assert_ne!(&read, tokens);
        let want = in_chunks(&mut Runner::new(&mut plain), &read, &[read.len()]);
        for sizes in [&[tokens.len()][..], &[1], &[7, 2]] {
            let got = in_chunks(&mut Runner::new(&mut model), tokens, sizes);
            assert_same_bits(&got, &want, &format!("{name}: chunks of {sizes:?}"));
        }
    }
}
