//! Models whose folder has its tokenizer in another form than `tokenizer.json`: whole jobs.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::commands::run;
use crate::support::{arg, root};

/// What splits texts in the demo model.
const PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const TEXTS: [&str; 4] = [
    "The card was charged twice, and I'll want 1,250 back!",
    "Wo bleibt mein Paket?  Grüße",
    "返金してください\n\n",
    "a <|im_end|> b </s> [INST]",
];

/// The demo model without its tokenizer.
fn model(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir_all(&model).unwrap();
    for entry in fs::read_dir(root().join("jobs/demo/model")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "tokenizer.json" {
            fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
        }
    }
    model
}

fn demo_tokenizer() -> Value {
    let path = root().join("jobs/demo/model/tokenizer.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The demo model's tokenizer as Mistral's library writes it.
fn tekken() -> String {
    let whole = demo_tokenizer();
    let is_plain = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255u8).filter(|byte| !is_plain(byte)).zip('\u{100}'..);
    let byte_of: std::collections::HashMap<char, u8> = (0..=255u8)
        .filter(is_plain)
        .map(|byte| (char::from(byte), byte))
        .chain(others.map(|(byte, char)| (char, byte)))
        .collect();
    let specials = whole["added_tokens"].as_array().unwrap();
    let mut vocab: Vec<(u64, &String)> = whole["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(text, id)| (id.as_u64().unwrap(), text))
        .filter(|(id, _)| *id >= specials.len() as u64)
        .collect();
    vocab.sort_unstable();
    let token = |(rank, (_, text)): (usize, &(u64, &String))| {
        let bytes: Vec<u8> = text.chars().map(|char| byte_of[&char]).collect();
        json!({"rank": rank, "token_bytes": STANDARD.encode(bytes), "token_str": null})
    };
    let special = |token: &Value| json!({"rank": token["id"], "token_str": token["content"], "is_control": true});
    json!({
        "config": {"pattern": PATTERN, "num_vocab_tokens": vocab.len(), "default_vocab_size": vocab.len() + specials.len(),
                   "default_num_special_tokens": specials.len(), "version": "v7"},
        "vocab": vocab.iter().enumerate().map(token).collect::<Vec<_>>(),
        "special_tokens": specials.iter().map(special).collect::<Vec<_>>(),
    })
    .to_string()
}

/// Runs a job of the texts: by row, prompt tokens and the answer.
fn answers(folder: &Path, prompt: &str) -> Vec<(u64, String)> {
    let lines: String = TEXTS
        .iter()
        .map(|text| format!("{}\n", json!({"text": text})))
        .collect();
    fs::write(folder.join("rows.jsonl"), lines).unwrap();
    let text = format!(
        "name: small\nmodel: model\nprecision: f32\ninput: {{uri: rows.jsonl}}\nprompt: {prompt}\n\
         generate: {{max_tokens: 6, temperature: 0}}\noutput: {{uri: out}}\n"
    );
    fs::write(folder.join("job.yaml"), text).unwrap();
    run(&["run", arg(&folder.join("job.yaml")), "--quiet"]).expect(0);
    let script = "import pyarrow.parquet as pq, json, glob\n\
                  rows = pq.read_table(sorted(glob.glob('out/part-*.parquet'))).to_pylist()\n\
                  print(json.dumps([[row['status'], row['prompt_tokens'], row['completion']] for row in rows]))";
    let rows: Value = serde_json::from_str(&crate::support::py(folder, script)).unwrap();
    fs::remove_dir_all(folder.join("out")).unwrap();
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| {
        assert_eq!(row[0], "succeeded");
        (row[1].as_u64().unwrap(), row[2].as_str().unwrap().to_owned())
    })
    .collect()
}

const CHAT: &str = "{messages: [{role: user, content: '{{ text }}'}]}";
const TEXT: &str = "{text: '{{ text }}'}";

/// Template, special tokens and the end of an answer come from the files beside it. `tokenizer.json` is read where both are.
#[test]
fn a_job_by_a_tekken_file_has_the_answers_of_tokenizer_json() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    fs::write(model.join("tokenizer.json"), demo_tokenizer().to_string()).unwrap();
    fs::write(model.join("tekken.json"), "{}").unwrap();
    let expected = [CHAT, TEXT].map(|prompt| answers(folder.path(), prompt));
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    fs::write(model.join("tekken.json"), tekken()).unwrap();
    assert_eq!([CHAT, TEXT].map(|prompt| answers(folder.path(), prompt)), expected);
}

#[test]
fn a_job_by_a_sentencepiece_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    fs::copy(
        root().join("tests/fixtures/tokenizers/prefixed.model"),
        model.join("tokenizer.model"),
    )
    .unwrap();
    let config = json!({"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}"});
    fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    let texts = answers(folder.path(), TEXT);
    assert_eq!(texts.len(), TEXTS.len());
    // A token before each prompt, which a template would have to write itself.
    for (text, chat) in texts.iter().zip(answers(folder.path(), CHAT)) {
        assert_eq!(text.0, chat.0 + 1);
    }
}
