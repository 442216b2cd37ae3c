//! `gristmill quantize`: what it writes is a checkpoint that jobs run, and how far that is from the model.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gristmill::device::Precision;
use gristmill::model::config::Config;
use gristmill::model::quantize::compare::{self, distance};
use gristmill::model::{Checkpoint, LoadOptions, Transformer};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::commands::run;
use crate::model_jobs::tokenizer;
use crate::model_reference::harness::{MODELS, Reference, Runner, chooses_experts, directory, in_chunks, options};
use crate::support::{Run, arg, copy_folder, gristmill, job_in, root};

/// A copy of the demo model, and a job that labels 400 tickets with the model in the folder `model`.
fn demo(folder: &Path, model: &Path, precision: &str) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    let (job, _) = job_in(folder, "label-tickets.yaml", |text| {
        let text = text.replace("precision: f32", &format!("precision: {precision}"));
        let line = format!("model: {}", model.display());
        let lines = text
            .lines()
            .map(|text| if text.starts_with("model:") { &line } else { text });
        lines.collect::<Vec<_>>().join("\n")
    });
    job
}

/// The files of a folder with their bytes.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let files = files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()));
    files.collect()
}

fn quantize(model: &Path, scheme: &str, out: &Path, more: &[&str]) -> Value {
    let arguments = ["quantize", arg(model), "--to", scheme, "--out", arg(out), "--json"];
    run(&[&arguments, more].concat()).expect(0).json()
}

#[test]
fn the_demo_model_labels_as_well_in_each_scheme() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("jobs/demo/model");
    let label = |name: &str, model: &Path, precision: &str| {
        let job = demo(&folder.path().join(name), model, precision);
        let done = run(&["run", arg(&job), "--limit", "400", "--quiet", "--json"])
            .expect(0)
            .json();
        done["agreement"]["equal"].as_u64().unwrap() as i64
    };
    let of_f32 = label("f32", &model, "f32");
    let calibration = demo(&folder.path().join("calibration"), &model, "f32");
    // Half a percent of 400 rows for 8 bits, and one and a half for 4.
    for (scheme, precision, rows, kl, part) in [
        ("int8", "int8", 2, 1e-3, 0.65),
        ("fp8", "f32", 2, 1e-3, 0.65),
        ("w4a16", "f32", 6, 4e-3, 0.45),
    ] {
        let out = folder.path().join(scheme);
        let done = quantize(
            &model,
            scheme,
            &out,
            &["--calibrate", arg(&calibration), "--rows", "64"],
        );
        println!("{scheme}: {} nats, {} same", done["kl_nats"], done["same_top_token"]);
        assert!(done["kl_nats"].as_f64().unwrap() < kl, "{done}");
        assert!(done["same_top_token"].as_f64().unwrap() > 0.97, "{done}");
        assert_eq!((&done["prompts"], &done["places"]), (&json!(64), &json!(512)), "{done}");
        let [before, after] = ["weight_bytes_before", "weight_bytes"].map(|key| done[key].as_u64().unwrap() as f64);
        assert!(after < part * before, "{done}");
        let layers = done["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 6);
        for matrix in layers.iter().flat_map(|layer| layer["matrices"].as_array().unwrap()) {
            let error = matrix["relative_error"].as_f64().unwrap();
            assert!(error > 0.001 && error < 0.1, "{matrix}");
            assert_eq!(matrix["by_outputs"], json!(scheme == "w4a16"), "{matrix}");
        }
        let equal = label(&format!("job-{scheme}"), &out, precision);
        println!("{scheme}: {equal} of 400, {of_f32} in F32");
        assert!((equal - of_f32).abs() <= rows, "{scheme}: {equal}, {of_f32} in F32");
        // What other programs read.
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization_config"]["quant_method"], "compressed-tensors");
        let index: Value =
            serde_json::from_slice(&fs::read(out.join("model.safetensors.index.json")).unwrap()).unwrap();
        let bytes = files(&out);
        let stored = |name: &str| {
            let file = index["weight_map"][name].as_str().unwrap_or_else(|| panic!("{name}"));
            let tensors = SafeTensors::deserialize(&bytes[file]).unwrap();
            let tensor = tensors.tensor(name).unwrap();
            (tensor.dtype(), tensor.shape().to_vec())
        };
        let up = |part: &str| stored(&format!("model.layers.5.mlp.up_proj.{part}"));
        match scheme {
            "int8" => assert_eq!(up("weight"), (Dtype::I8, vec![512, 192])),
            "fp8" => assert_eq!(up("weight"), (Dtype::F8_E4M3, vec![512, 192])),
            _ => assert_eq!(
                (up("weight_packed"), up("weight_shape")),
                ((Dtype::I32, vec![512, 24]), (Dtype::I64, vec![2]))
            ),
        }
        let groups = if scheme == "w4a16" { 3 } else { 1 };
        assert_eq!(up("weight_scale").1, [512, groups]);
        assert_eq!(bytes["tokenizer.json"], fs::read(model.join("tokenizer.json")).unwrap());
    }
}

#[test]
fn prompts_make_four_bits_better() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("jobs/demo/model");
    let job = demo(&folder.path().join("calibration"), &model, "f32");
    let with = folder.path().join("with");
    let found = quantize(&model, "w4a16", &with, &["--calibrate", arg(&job), "--rows", "96"]);
    let without = folder.path().join("without");
    let plain = quantize(&model, "w4a16", &without, &[]);
    assert_eq!((&plain["kl_nats"], &plain["prompts"]), (&Value::Null, &json!(0)));
    // The sums over all layers' inputs need more than a MiB: several passes give the same.
    let passes = folder.path().join("passes");
    quantize(
        &model,
        "w4a16",
        &passes,
        &["--calibrate", arg(&job), "--rows", "96", "--sums-memory", "1"],
    );
    assert!(files(&with) == files(&passes));
    // Compared over texts like those of the prompts, in another form.
    let tickets = fs::read_to_string(root().join("jobs/demo/tickets.csv")).unwrap();
    let tokenizer = gristmill::tokenizer::Tokenizer::load(&model).unwrap();
    let texts = tickets.lines().filter(|line| line.len() > 60);
    let texts: Vec<Vec<u32>> = texts.map(|line| tokenizer.encode(line, false).unwrap()).collect();
    assert!(texts.len() > 64);
    let predictions = |folder: &Path| {
        let options = LoadOptions {
            max_context: Some(512),
            vocabulary: None,
            ..options(&Reference::load("llama-plain"), Precision::F32)
        };
        compare::logits(&mut Transformer::load(folder, &options).unwrap(), &texts).unwrap()
    };
    let of_model = predictions(&model);
    let [by_prompts, nearest] = [&with, &without].map(|folder| compare::distance(&of_model, &predictions(folder)).kl);
    println!(
        "{by_prompts} nats by GPTQ ({} over its own prompts), {nearest} by the nearest numbers",
        found["kl_nats"]
    );
    assert!(by_prompts < nearest, "{by_prompts} {nearest}");
}

/// What models are refused for, and their names.
const REFUSED: [(&str, &[&str]); 7] = [
    ("in other numbers already", &["qwen3-fp8", "deepseek3-fp8"]),
    (
        "the experts of a layer are one tensor",
        &[
            "qwen3moe-dense-layers-sharded",
            "glm4moe-corrected",
            "granitemoe-shared",
            "granitemoe-tied",
            "gptoss-transposed",
            "gptoss-mxfp4",
            "minimaxm2-fused",
            "llama4-images",
            "llama4-biases",
        ],
    ),
    (
        "is the text part of a multimodal model",
        &["gemma3-images", "gemma4-images", "mistral3-images"],
    ),
    ("it has experts beside an MLP", &["gemma4-experts"]),
    ("its layers have inputs of their own", &["gemma4-shared"]),
    (
        "it has recurrent layers",
        &[
            "qwen35-recurrent",
            "qwen35-images",
            "qwen3next-experts",
            "qwen35moe-fused",
            "granite4-experts",
            "granite4-dense",
            "nemotronh-dense",
            "nemotronh-experts",
            "nemotronh-fused",
        ],
    ),
    (
        "its layers keep latents",
        &[
            "deepseek2-lite",
            "deepseek2-groups",
            "deepseek3-groups",
            "kimi-heads",
            "glm4moelite-fused",
        ],
    ),
];

#[test]
fn each_small_model_is_quantized_or_refused() {
    let mut refused = 0;
    for name in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let (model, out) = (folder.path().join("model"), folder.path().join("out"));
        let reference = Reference::load(name);
        copy_folder(&directory(name), &model);
        fs::write(
            model.join("tokenizer.json"),
            tokenizer(reference.vocabulary).to_string(),
        )
        .unwrap();
        let done = run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&out), "--json"]);
        if done.code != Some(0) {
            let why = done.expect(2).stderr;
            let expected = REFUSED.iter().find(|(_, names)| names.contains(&name));
            let (expected, _) = expected.unwrap_or_else(|| panic!("{name}: {why}"));
            assert!(
                why.contains(expected) && why.contains("is not quantized"),
                "{name}: {why}"
            );
            assert!(!out.exists(), "{name}");
            refused += 1;
            continue;
        }
        let logits = |folder: &Path, precision| {
            let checkpoint = Checkpoint::open(folder, None, Config::load(folder).unwrap()).unwrap();
            let options = options(&reference, precision);
            let mut model = Transformer::from_weights(checkpoint.config, &checkpoint.weights, &options).unwrap();
            let mut runner = Runner::new(&mut model);
            let prompts = reference.prompts.iter();
            prompts
                .flat_map(|p| in_chunks(&mut runner, &p.tokens, &[p.tokens.len()]))
                .collect::<Vec<_>>()
        };
        let own = logits(&model, Precision::Int8);
        let of_quantized = distance(&own, &logits(&out, Precision::Int8));
        let of_weights = distance(&logits(&model, Precision::F32), &logits(&out, Precision::F32));
        println!(
            "{name}: {:.1e} from the model in int8, {:.1e} by weights alone",
            of_quantized.kl, of_weights.kl
        );
        let config = Config::load(&model).unwrap();
        let stored = Checkpoint::open(&model, None, config.clone())
            .unwrap()
            .weights
            .main_dtype();
        if stored == Some(gristmill::device::Dtype::F32) {
            // Factors are exact: each weight is the one that a job in int8 has.
            assert_eq!(of_quantized.kl, 0.0, "{name}");
        }
        let most = if chooses_experts(&config) { 5e-2 } else { 1e-2 };
        assert!(
            of_quantized.kl < most && of_weights.kl < most,
            "{name}: {of_quantized:?} {of_weights:?}"
        );
    }
    let listed: usize = REFUSED.iter().map(|(_, names)| names.len()).sum();
    assert_eq!(refused, listed);
}

#[test]
fn an_interrupted_run_goes_on_and_another_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("jobs/demo/model");
    let whole = folder.path().join("whole");
    quantize(&model, "int8", &whole, &[]);
    let bytes = files(&whole);
    // Nothing but three layers is there, and a file that was being written.
    let part = folder.path().join("part");
    fs::create_dir(&part).unwrap();
    for number in 2..5 {
        let name = format!("model-{number:05}-of-00007.safetensors");
        fs::write(part.join(&name), &bytes[&name]).unwrap();
    }
    let half = part.join("model-00006-of-00007.tmp");
    fs::write(&half, "half").unwrap();
    let record: Value = serde_json::from_slice(&bytes["quantize.json"]).unwrap();
    // The fourth file was written, and that was not noted.
    let done = record["layers"].as_array().unwrap()[..2].to_vec();
    let begun = json!({
        "identity": record["identity"], "group": null, "finished": false, "layers": done, "files": record["files"],
    });
    fs::write(part.join("quantize.json"), begun.to_string()).unwrap();
    let found = run(&["inspect", arg(&part)]).expect(2).stdout;
    assert!(
        found.contains("`gristmill quantize` was interrupted") && found.contains("--to int8 --out"),
        "{found}"
    );
    let refused = |scheme: &str, out: &Path, words: &[&str]| {
        run(&["quantize", arg(&model), "--to", scheme, "--out", arg(out)])
            .expect(2)
            .one_line(words);
    };
    refused(
        "fp8",
        &part,
        &[
            "was begun for another model, scheme or calibration",
            "give another folder",
        ],
    );
    let went_on = run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&part)]).expect(0);
    assert!(
        went_on.stderr.contains("2 of 6 layers") && !went_on.stderr.contains("1 of 6"),
        "{}",
        went_on.stderr
    );
    let mut found = files(&part);
    found.remove("model-00006-of-00007.tmp");
    assert!(found == bytes, "{:?}", found.keys());
    // Once more, as a scheduler does: nothing is written, and the report is the same.
    let written = |name: &str| fs::metadata(part.join(name)).unwrap().modified().unwrap();
    let before = written("model-00001-of-00007.safetensors");
    let again = run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&part)]).expect(0);
    assert_eq!(
        (&again.stdout, written("model-00001-of-00007.safetensors")),
        (&went_on.stdout, before)
    );
    // What somebody has damaged or removed is made again.
    for (name, keep) in [
        ("model-00003-of-00007.safetensors", 1000),
        ("model-00001-of-00007.safetensors", 0),
    ] {
        fs::write(part.join(name), &bytes[name][..keep]).unwrap();
        run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&part)]).expect(0);
        assert!(files(&part)[name] == bytes[name], "{name}");
    }
    // One bit of a number, of a layer and of what belongs to none.
    for name in ["model-00002-of-00007.safetensors", "model-00001-of-00007.safetensors"] {
        let mut other = bytes[name].clone();
        *other.last_mut().unwrap() ^= 1;
        fs::write(part.join(name), other).unwrap();
        run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&part)]).expect(0);
        assert!(files(&part)[name] == bytes[name], "{name}");
    }
    for name in [
        "model-00004-of-00007.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ] {
        fs::remove_file(part.join(name)).unwrap();
        run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&part)]).expect(0);
        assert!(files(&part)[name] == bytes[name], "{name}");
    }
    refused("int8", &model, &["is not empty", "give a new folder"]);
    let again = folder.path().join("again");
    run(&["quantize", arg(&whole), "--to", "int8", "--out", arg(&again)])
        .expect(2)
        .one_line(&["is not quantized", "in other numbers already", "give the checkpoint"]);
    assert!(!again.exists());
    let to = ["quantize", arg(&model), "--to", "int8", "--out"];
    run(&[&to[..], &["s3://bucket/model"]].concat())
        .expect(2)
        .one_line(&["`s3://bucket/model` is an address", "a folder of this machine"]);
    run(&[&to[..], &[arg(&again), "--device", "cuda"]].concat())
        .expect(2)
        .one_line(&["--device", "on the CPU"]);
    assert!(!again.exists() && !Path::new("s3:").exists());
    for out in [half.clone(), half.join("below")] {
        fs::write(&half, "half").unwrap();
        run(&[&to[..], &[arg(&out)]].concat()).expect(2).one_line(&[
            "--out",
            "model-00006-of-00007.tmp` is a file",
            "name one that is new",
        ]);
    }
    // By its file, and as a folder that has a `config.json`, too.
    let gguf = folder.path().join("gguf");
    copy_folder(&directory("qwen2-q4_0-tied"), &gguf);
    fs::remove_file(gguf.join("reference.safetensors")).unwrap();
    fs::write(gguf.join("config.json"), "{}").unwrap();
    for model in [gguf.join("model.gguf"), gguf] {
        run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&again)])
            .expect(2)
            .one_line(&["is not quantized", "it is a GGUF file", "give the checkpoint"]);
        assert!(!again.exists());
    }
    // A job of another model has other tokens.
    let other = folder.path().join("other");
    copy_folder(&model, &other);
    let job = demo(&folder.path().join("job"), &other, "f32");
    run(&[
        "quantize",
        arg(&model),
        "--to",
        "int8",
        "--out",
        arg(&again),
        "--calibrate",
        arg(&job),
    ])
    .expect(2)
    .one_line(&["give a job of that model"]);
}

/// Changes the record of a folder.
fn alter_record(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("quantize.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut record);
    fs::write(path, record.to_string()).unwrap();
}

/// A folder's files, without the record: its numbers may lose their last bit where it is read once more.
fn without_record(mut files: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    assert!(files.remove("quantize.json").is_some());
    files
}

#[test]
fn a_run_goes_on_for_the_same_model_channels_and_prompts_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    copy_folder(&root().join("jobs/demo/model"), &model);
    let job = demo(&folder.path().join("calibration"), &model, "f32");
    // Prompts of more tokens than a MiB holds the keys and values of, which is 341.
    let text = fs::read_to_string(&job).unwrap();
    let body = ["{{ body }}"; 6].join(" ");
    fs::write(&job, text.replace("{{ body }}", &format!("{body} ${{LAST}}"))).unwrap();
    let calibrate = |rows, last| ["--calibrate", arg(&job), "--rows", rows, "--set", last];
    let prompts = calibrate("8", "LAST=.");
    let begun = |scheme: &str, more: &[&str]| {
        let out = folder.path().join(scheme);
        quantize(&model, scheme, &out, more);
        let whole = files(&out);
        alter_record(&out, |record| {
            record["finished"] = json!(false);
            record["layers"].as_array_mut().unwrap().truncate(2);
        });
        (out, whole)
    };
    let goes_on = |scheme: &str, out: &Path, more: &[&str]| {
        let arguments = ["quantize", arg(&model), "--to", scheme, "--out", arg(out)];
        run(&[&arguments, more].concat())
    };
    let refused = |scheme: &str, out: &Path, more: &[&str]| {
        let before = files(out);
        let why = goes_on(scheme, out, more).expect(2);
        why.one_line(&["was begun for another model, scheme or calibration"]);
        assert!(files(out) == before);
    };
    let (four, whole) = begun("w4a16", &prompts);
    refused("w4a16", &four, &[]);
    refused("w4a16", &four, &calibrate("9", "LAST=."));
    // As many other prompts, and the same ones cut.
    refused("w4a16", &four, &calibrate("8", "LAST=!"));
    refused("w4a16", &four, &[&prompts[..], &["--kv-memory", "1"]].concat());
    let went_on = goes_on("w4a16", &four, &prompts).expect(0);
    assert!(went_on.stderr.contains("2 of 6 layers"), "{}", went_on.stderr);
    assert!(without_record(files(&four)) == without_record(whole));

    let (eight, whole) = begun("int8", &[]);
    run(&["calibrate", arg(&job), "--rows", "8", "--set", "LAST=."]).expect(0);
    refused("int8", &eight, &[]);
    fs::remove_file(model.join("channels.safetensors")).unwrap();
    // One bit of one weight.
    let weights = model.join("model.safetensors");
    let stored = fs::read(&weights).unwrap();
    let mut other = stored.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&weights, other).unwrap();
    refused("int8", &eight, &[]);
    fs::write(&weights, stored).unwrap();
    goes_on("int8", &eight, &[]).expect(0);
    assert!(without_record(files(&eight)) == without_record(whole));
}

#[test]
fn a_signal_ends_a_run_and_the_same_command_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let model = root().join("jobs/demo/model");
    let job = demo(&folder.path().join("calibration"), &model, "f32");
    // A pass over the prompts for each layer.
    let prompts = ["--calibrate", arg(&job), "--rows", "64", "--sums-memory", "1"];
    let whole = folder.path().join("whole");
    quantize(&model, "w4a16", &whole, &prompts);
    for signal in ["-TERM", "-INT"] {
        let out = folder.path().join(signal);
        let arguments = ["quantize", arg(&model), "--to", "w4a16", "--out", arg(&out)];
        let arguments = [&arguments, &prompts[..]].concat();
        let mut child = gristmill(&arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        lines.find(|line| line.contains("2 of 6 layers")).unwrap();
        Run::of(Command::new("kill").args([signal, &child.id().to_string()])).expect(0);
        let said: Vec<String> = lines.collect();
        assert_eq!(child.wait().unwrap().code(), Some(6), "{said:?}");
        assert!(
            said.last().unwrap().contains("interrupted: the same command goes on"),
            "{said:?}"
        );
        assert!(!out.join("config.json").exists());
        let went_on = run(&arguments).expect(0).stderr;
        assert!(!went_on.contains("1 of 6 layers"), "{went_on}");
        let mut found = without_record(files(&out));
        found.retain(|name, _| !name.ends_with(".tmp"));
        assert!(found == without_record(files(&whole)));
    }
}

#[test]
fn one_process_writes_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (model, out) = (root().join("jobs/demo/model"), folder.path().join("out"));
    fs::create_dir(&out).unwrap();
    let other = fs::File::open(&out).unwrap();
    other.try_lock().unwrap();
    run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&out)])
        .expect(2)
        .one_line(&["another process quantizes into", "wait for it, or give another folder"]);
    assert!(files(&out).is_empty());
    drop(other);
    quantize(&model, "int8", &out, &[]);
    // Whoever goes on with it waits, too.
    alter_record(&out, |record| record["finished"] = json!(false));
    let other = fs::File::open(&out).unwrap();
    other.try_lock().unwrap();
    let before = files(&out);
    run(&["quantize", arg(&model), "--to", "int8", "--out", arg(&out)])
        .expect(2)
        .one_line(&["another process quantizes into"]);
    assert!(files(&out) == before);
}

/// A limit of a file's size, in place of a disk that is full.
#[test]
fn a_file_that_does_not_fit_may_be_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let (model, out) = (root().join("jobs/demo/model"), folder.path().join("out"));
    let arguments = ["quantize", arg(&model), "--to", "int8", "--out", arg(&out)];
    let mut limited = Command::new("sh");
    limited.args([
        "-c",
        "trap '' XFSZ; ulimit -f 100; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_gristmill"),
    ]);
    let failed = Run::of(limited.args(arguments)).expect(1);
    let said = failed.stderr.lines().last().unwrap();
    assert!(
        said.contains("cannot write") && said.contains("model-00002-of-00007.safetensors"),
        "{said}"
    );
    run(&arguments).expect(0);
}
