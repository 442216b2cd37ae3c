//! What the cheap precisions cost the demo model on tickets that it was not trained on: perplexity, by teacher forcing.

use std::fs::File;
use std::sync::Arc;

use gristmill::dataset::row::InputRow;
use gristmill::dataset::value::rows_of;
use gristmill::device::{KvFormat, Precision, cpu};
use gristmill::job::{Job, Parameters};
use gristmill::model::{KvBudget, LoadOptions, Transformer};
use gristmill::worker::model::{ModelFiles, PromptSettings};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::harness::{KV_BLOCKS, Runner, in_chunks};
use crate::support::{is_full, root};

/// One in so many of the 2,000 tickets: of a full run (`GRISTMILL_FAULTS=full`), and of others.
const EVERY: [usize; 2] = [4, 16];

/// Precision, format of keys and values, and how many times F32's perplexity of tickets is accepted: 8 bits were measured at
/// 1.0012 times.
const FORMATS: [(Precision, KvFormat, f64); 4] = [
    (Precision::F32, KvFormat::F32, 1.0),
    (Precision::Bf16, KvFormat::Bf16, 1.001),
    (Precision::Int8, KvFormat::Bf16, 1.005),
    (Precision::Int8, KvFormat::Int8, 1.005),
];

/// A ticket in the labelling job's prompt, then its right category and the end of the turn.
struct Ticket {
    tokens: Vec<u32>,
    /// Where the category begins.
    answer: usize,
}

/// The tickets, and how many tokens all of them begin with: the instruction, which is not scored.
fn tickets(files: &ModelFiles) -> (Vec<Ticket>, usize) {
    let job = Job::load(&root().join("jobs/label-tickets.yaml"), &Parameters::default()).unwrap();
    let renderer = files.renderer(&job, &PromptSettings::UNKNOWN).unwrap();
    let file = File::open(root().join("jobs/demo/tickets.parquet")).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let rows = reader.flat_map(|batch| rows_of(&batch.unwrap()));
    let tickets: Vec<Ticket> = rows
        .step_by(EVERY[usize::from(!is_full())])
        .map(|fields| {
            let fields = fields.unwrap();
            let category = files.tokenizer.encode_plain(fields["category"].as_str().unwrap());
            let row = InputRow {
                row: 0,
                fields: Ok(fields),
            };
            let mut tokens = renderer.render(&row).unwrap().tokens;
            let answer = tokens.len();
            tokens.extend(category);
            tokens.extend(files.tokenizer.eos_id());
            Ticket { tokens, answer }
        })
        .collect();
    let first = &tickets[0].tokens;
    let common = |ticket: &Ticket| first.iter().zip(&ticket.tokens).take_while(|(a, b)| a == b).count();
    let prefix = tickets[1..].iter().map(common).min().unwrap();
    (tickets, prefix)
}

/// Negative log-likelihoods in nats: of the tickets' own tokens, and of the right answers', each with their number.
fn score(mut model: Transformer, tickets: &[Ticket], prefix: usize) -> [(f64, usize); 2] {
    let mut runner = Runner::new(&mut model);
    let mut sums = [(0.0, 0); 2];
    for Ticket { tokens, answer } in tickets {
        let rows = in_chunks(&mut runner, tokens, &[tokens.len()]);
        for at in prefix..tokens.len() {
            let row = &rows[at - 1];
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            let part = &mut sums[usize::from(at >= *answer)];
            part.0 += sum.ln() - f64::from(row[tokens[at] as usize] - max);
            part.1 += 1;
        }
    }
    sums
}

/// Prints a table of benches/README.md.
#[test]
fn eight_bits_cost_little_perplexity() {
    let folder = root().join("jobs/demo/model");
    let files = ModelFiles::open(folder.clone()).unwrap();
    let (tickets, prefix) = tickets(&files);
    let scored: usize = tickets.iter().map(|ticket| ticket.tokens.len() - prefix).sum();
    println!("{} tickets, {scored} tokens:", tickets.len());
    println!("| precision | keys and values | perplexity of tickets | / F32 | perplexity of right answers | / F32 |");
    println!("|---|---|---|---|---|---|");
    let mut reference = None;
    let mut failed = Vec::new();
    for (precision, kv_format, most) in FORMATS {
        let options = LoadOptions {
            precision,
            kv_format,
            channels: None,
            isa: None,
            kv: KvBudget::Blocks(KV_BLOCKS),
            threads: Arc::new(cpu::Threads::new(2).unwrap()),
            max_context: None,
            vocabulary: Some(files.tokenizer.vocab_size()),
        };
        let sums = score(Transformer::load(&folder, &options).unwrap(), &tickets, prefix);
        let [text, answer] = sums.map(|(nats, tokens)| (nats / tokens as f64).exp());
        let [text_f32, answer_f32] = *reference.get_or_insert([text, answer]);
        let (ratio, answers) = (text / text_f32, answer / answer_f32);
        println!("| {precision:?} | {kv_format:?} | {text:.4} | {ratio:.4} | {answer:.4} | {answers:.4} |");
        if ratio > most {
            failed.push(format!(
                "{precision:?} over {kv_format:?}: {ratio:.4} times F32's, more than {most}"
            ));
        }
        assert!(text < 100.0, "the model knows tickets: {text}");
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
