//! The CUDA device without a GPU: libraries that stand in for NVIDIA's (tests/emulator) run the kernels' own sources on a CPU,
//! and the built program uses them as it would use a card.
//!
//! See docs/decisions/070-kernels-run-in-an-emulator.md.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::model_reference::harness::Reference;
use crate::support::{Run, arg, gristmill, job_in, python, root};

/// The stand-ins, built once.
pub(crate) fn stand_ins() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = root().join("target/emulator");
        let built = Command::new("bash")
            .arg(root().join("tests/emulator/build.sh"))
            .arg(&folder)
            .status();
        assert!(built.unwrap().success(), "the stand-ins are not built");
        folder
    })
}

/// The program on an emulated card of compute capability `card`.
fn on_card(card: &str, arguments: &[&str]) -> Command {
    let mut command = gristmill(arguments);
    command
        .env("GRISTMILL_CUDA_LIBRARIES", stand_ins())
        // Some dozen kernels are compiled once and kept from test to test; a change of theirs is another file.
        .env("GRISTMILL_CACHE", stand_ins().join("cache"))
        .env("LD_LIBRARY_PATH", stand_ins())
        .env("EMULATOR_CARD", card);
    command
}

#[test]
fn every_operation_agrees_with_the_cpu_on_hopper() {
    forget_products(false);
    examine("9.0", &["bf16", "int8", "fp8", "w4a8"]);
    // One product of each format is large enough to be measured in more than one tile.
    let kept = products(false);
    assert!(
        kept.len() == 1 && kept[0].1.matches("consumers").count() >= 3,
        "{kept:?}"
    );
}

/// Files of what products were measured to be computed best by: by a library, or by kernels alone.
fn products(by_library: bool) -> Vec<(PathBuf, String)> {
    let kept = std::fs::read_dir(stand_ins().join("cache/kernels"));
    let paths = kept.into_iter().flatten().map(|entry| entry.unwrap().path());
    let ours = paths.filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("products-") && name.ends_with(".json")
    });
    // Another test may take one away meanwhile.
    ours.filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?)))
        .filter(|(_, text)| text.contains("\"library\":[") == by_library)
        .collect()
}

fn forget_products(by_library: bool) {
    for (path, _) in products(by_library) {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn every_operation_agrees_with_the_cpu_on_ada_and_ampere() {
    examine("8.9", &["fp8"]);
    examine("8.0", &["bf16", "int8", "w4a8"]);
}

/// The doctor's quick examination; all that is wrong is shown. Linear operations are right by the library, too, where it computes them.
fn examine(card: &str, formats: &[&str]) {
    for format in formats {
        let run = Run::of(&mut on_card(
            card,
            &["doctor", "--quick", "--json", "--precision", format],
        ));
        println!("{}\n{}", run.stdout, run.stderr);
        let report = run.expect(0).json();
        let library = report["cublaslt"].as_str().unwrap();
        assert!(library.starts_with(arg(stand_ins())), "{library}");
        let linear = report["operations"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|o| o["operation"] == "linear" || o["operation"] == "logits");
        for operation in linear {
            let theirs = &operation["by_library"];
            let computes = card == "9.0" || operation["format"] != "fp8";
            assert_eq!(theirs["right"].as_bool(), computes.then_some(true), "{operation}");
        }
    }
}

/// What `doctor` says where something is missing or does not fit: one line, code 2.
#[test]
fn what_is_missing_is_said_in_one_line() {
    let doctor = |card: &str, change: &dyn Fn(&mut Command), words: &[&str]| {
        let mut command = on_card(card, &["doctor", "--quick"]);
        change(&mut command);
        Run::of(&mut command).expect(2).one_line(words);
    };
    doctor("none", &|_| (), &["cuda:0", "no card", "--device cpu"]);
    doctor("7.5", &|_| (), &["compute capability 7.5", "8.0 or later"]);
    doctor(
        "9.0",
        &|c| _ = c.args(["--device", "cuda:3"]),
        &["cuda:3", "cuda:0` alone"],
    );
    doctor("9.0", &|c| _ = c.args(["--device", "cpu"]), &["no GPU to check"]);
    // A driver without a compiler beside it.
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(stand_ins().join("libcuda.so"), folder.path().join("libcuda.so")).unwrap();
    let alone = |c: &mut Command| {
        c.env("GRISTMILL_CUDA_LIBRARIES", folder.path())
            .env_remove("LD_LIBRARY_PATH");
        ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"]
            .iter()
            .for_each(|name| _ = c.env_remove(name));
    };
    doctor("9.0", &alone, &["NVRTC", "pip install", "--device cpu"]);
    let nothing = |c: &mut Command| {
        alone(c);
        c.env_remove("GRISTMILL_CUDA_LIBRARIES");
    };
    doctor("9.0", &nothing, &["no NVIDIA driver", "libcuda.so.1", "--device cpu"]);
}

/// A few rows of the demo, on the emulated card.
fn label(card: &str, folder: &Path, precision: &str, change: &dyn Fn(&mut Command)) -> Run {
    label_at_once(card, folder, precision, 4, change)
}

/// As [`label`], so many of the four rows at a time.
fn label_at_once(card: &str, folder: &Path, precision: &str, rows: u32, change: &dyn Fn(&mut Command)) -> Run {
    let (job, _) = job_in(folder, "label-tickets.yaml", |text| {
        text.replace("precision: f32", &format!("precision: {precision}"))
    });
    let few = ["--limit", "4", "--step-tokens", "512", "--json", "--quiet"];
    let mut command = on_card(card, &["run", arg(&job)]);
    command
        .args(few)
        .args(["--sequences", &rows.to_string()])
        .args(["--device", "cuda:0", "--kv-memory", "64"]);
    change(&mut command);
    Run::of(&mut command)
}

#[test]
fn a_job_runs_on_the_card() {
    for precision in ["fp8", "auto"] {
        let folder = tempfile::tempdir().unwrap();
        let json = label("9.0", folder.path(), precision, &|_| ()).expect(0).json();
        assert_eq!(json["rows"]["succeeded"], 4, "{json}");
        // The first four tickets are ones that the model knows.
        assert_eq!(json["agreement"]["equal"], 4, "{json}");
    }
}

/// Token ids and logprobs of the answers of a trial of the job in `folder`, row by row.
fn answers_of(folder: &Path) -> Vec<(Vec<u64>, Vec<f64>)> {
    let read = "import sys, glob, json, pyarrow.parquet as pq\n\
                parts = glob.glob(sys.argv[1] + '/_limit/*/*.parquet')\n\
                rows = [r for p in parts for r in pq.read_table(p, columns=['row', 'token_ids', 'logprobs']).to_pylist()]\n\
                print(json.dumps([[r['token_ids'], r['logprobs']] for r in sorted(rows, key=lambda r: r['row'])]))";
    let run = Run::of(Command::new(python()).args(["-c", read, arg(folder)])).expect(0);
    serde_json::from_str(&run.stdout).unwrap()
}

/// The demo's model in four bits: on the card, too, its matrices stay as they are stored, and the answers are those of a CPU.
#[test]
fn a_job_in_four_bits_runs_on_the_card_as_on_a_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let (demo, model) = (root().join("jobs/demo"), folder.path().join("model"));
    let demo_model = demo.join("model");
    let quantize = ["quantize", arg(&demo_model), "--to", "w4a16", "--out", arg(&model)];
    Run::of(&mut gristmill(&quantize)).expect(0);
    let answers = |device: &str| {
        let folder = tempfile::tempdir().unwrap();
        let (job, trace) = (folder.path().join("job.yaml"), folder.path().join("trace"));
        let text = format!(
            "name: some\nmodel: {}\nprecision: w4a8\ninput: {{uri: {}/tickets.parquet}}\n\
             prompt: {{messages: [{{role: user, content: '{{{{ subject }}}}'}}]}}\n\
             generate: {{max_tokens: 2, temperature: 0, logprobs: true, ignore_eos: true}}\n\
             output: {{uri: out, token_ids: true}}\n",
            arg(&model),
            arg(&demo)
        );
        std::fs::write(&job, text).unwrap();
        let few = [
            "--limit",
            "4",
            "--step-tokens",
            "512",
            "--sequences",
            "4",
            "--kv-memory",
            "64",
        ];
        let mut command = on_card("8.0", &["run", arg(&job), "--quiet", "--device", device]);
        Run::of(command.args(few).env("EMULATOR_TRACE", &trace)).expect(0);
        (
            answers_of(folder.path()),
            std::fs::read_to_string(trace).unwrap_or_default(),
        )
    };
    let ((cpu, _), (card, trace)) = (answers("cpu"), answers("cuda:0"));
    assert!(
        trace.lines().any(|line| line.starts_with("coded_linear grid")),
        "{trace}"
    );
    // The demo's own matrices, one and all.
    assert!(!trace.lines().any(|line| line.starts_with("quantize grid")), "{trace}");
    assert_eq!((cpu.len(), card.len()), (4, 4));
    for ((ids, want), (also, got)) in cpu.iter().zip(&card) {
        assert_eq!(ids, also);
        // The card rounds to BF16 between operations.
        assert!(
            want.iter().zip(got).all(|(want, got)| (want - got).abs() < 0.05),
            "{want:?} {got:?}"
        );
    }
}

/// Experts in four bits, whose groups of 16 columns are padded on the card.
#[test]
fn experts_in_four_bits_run_on_the_card() {
    let name = "qwen3moe-ct-w4a16";
    let reference = Reference::load(name);
    let folder = tempfile::tempdir().unwrap();
    let job = crate::model_jobs::job(folder.path(), name, None, &reference);
    let text = std::fs::read_to_string(&job).unwrap();
    std::fs::write(&job, text.replace("precision: f32", "precision: w4a8")).unwrap();
    let mut command = on_card(
        "9.0",
        &["run", arg(&job), "--quiet", "--device", "cuda:0", "--kv-memory", "64"],
    );
    command.args(["--step-tokens", "512", "--sequences", "8"]);
    let trace = folder.path().join("trace");
    Run::of(command.env("EMULATOR_TRACE", &trace)).expect(0);
    let trace = std::fs::read_to_string(trace).unwrap();
    let launches = |kernel: &str| trace.lines().filter(|line| line.starts_with(kernel)).count();
    assert!(launches("grouped_coded_linear grid") > 0 && launches("grouped_linear grid") == 0);
    let rows = crate::bad_input::rows_of(&folder.path().join("out"));
    assert_eq!(rows.len(), reference.prompts.len());
    let is_same = |(row, prompt): (&serde_json::Value, &crate::model_reference::harness::Prompt)| {
        row["token_ids"][0] == serde_json::json!(prompt.tokens[prompt.length])
    };
    let same = rows
        .iter()
        .zip(&reference.prompts)
        .filter(|pair| is_same(*pair))
        .count();
    // A rounding may decide between tokens that are nearly as likely.
    assert!(same * 4 >= rows.len() * 3, "{same} of {}", rows.len());
}

/// On a card that does nothing before it is waited for, by our own kernels alone: what is read too early is what was there before.
#[test]
fn a_job_waits_for_what_it_reads() {
    let folder = tempfile::tempdir().unwrap();
    let late = |c: &mut Command| _ = c.env("EMULATOR_LATE", "1").arg("--no-cublaslt");
    let json = label("9.0", folder.path(), "fp8", &late).expect(0).json();
    assert_eq!(json["agreement"]["equal"], 4, "{json}");
}

/// What the assembler said of a kernel when it was made is said in one line by its name, whenever it is used.
#[test]
fn a_kernel_that_the_compiler_made_slower_is_named() {
    let folder = tempfile::tempdir().unwrap();
    label("9.0", folder.path(), "int8", &|_| ()).expect(0);
    let cache = folder.path().join("cache/kernels");
    std::fs::create_dir_all(&cache).unwrap();
    for entry in std::fs::read_dir(stand_ins().join("cache/kernels")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // Another test may take a file away meanwhile.
        let Ok(mut text) = std::fs::read(&path) else { continue };
        if name.starts_with("gated-") && name.ends_with(".log") {
            let said = "ptxas info    : (C7510) Potential Performance Loss: products are serialized\n";
            text = format!("sha256:{}\n{said}", gristmill::ledger::keys::sha256(said.as_bytes())).into_bytes();
        }
        std::fs::write(cache.join(name), text).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let other = |c: &mut Command| _ = c.env("GRISTMILL_CACHE", cache.parent().unwrap());
    let run = label("9.0", folder.path(), "int8", &other).expect(0);
    run.one_line(&[
        "kernel `gated ",
        "is slower than it is meant to be",
        "NVRTC 13.0",
        "(C7510)",
    ]);
}

/// Logprobs of the answers to a few of the demo's tickets in BF16, row by row, as text; and what the program said.
fn logprobs(card: &str, of: &Asked<'_>) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let demo = root().join("jobs/demo");
    let demo = arg(&demo);
    let job = folder.path().join("job.yaml");
    let Asked {
        instruction,
        deterministic,
        ..
    } = of;
    let text = format!(
        "name: some\nmodel: {demo}/model\nprecision: bf16\ndeterministic: {deterministic}\ninput: {{uri: {demo}/tickets.parquet}}\n\
         prompt:\n  messages:\n    - {{role: system, content: '{instruction}'}}\n    - {{role: user, content: '{{{{ subject }}}}'}}\n\
         generate: {{max_tokens: 3, temperature: 0, logprobs: true, ignore_eos: true}}\noutput: {{uri: out}}\n"
    );
    std::fs::write(&job, text).unwrap();
    let mut command = on_card(
        card,
        &["run", arg(&job), "--device", "cuda:0", "--kv-memory", "64", "--quiet"],
    );
    command
        .args(of.arguments)
        .env("RUST_LOG", "warn,gristmill::device::cuda=debug")
        .env("EMULATOR_FAIL", of.failing);
    let said = Run::of(&mut command).expect(0).stderr;
    let read = "import sys, glob, pyarrow.parquet as pq\n\
                parts = glob.glob(sys.argv[1] + '/_limit/*/*.parquet')\n\
                print([r for p in parts for r in pq.read_table(p, columns=['row', 'logprobs', 'prompt_tokens']).to_pylist()])";
    let mut command = Command::new(python());
    command.args(["-c", read, arg(folder.path())]);
    (Run::of(&mut command).expect(0).stdout, said)
}

/// A failure that does not come.
const NOTHING: &str = "nothing:0:0";

struct Asked<'a> {
    instruction: &'a str,
    deterministic: bool,
    arguments: &'a [&'a str],
    /// What the emulator is to fail in.
    failing: &'a str,
}

/// Rows that begin with the same 300 tokens get the same bits one by one as together, where the job asks for it; else rounding shows (in
/// BF16: weights are rounded to it, against another largest one).
#[test]
fn a_deterministic_job_gives_the_same_bits_in_any_company() {
    let instruction =
        "Answer with exactly one category, and read the subject and the body of the ticket first. ".repeat(18);
    let answers = |deterministic: bool, sequences: &str| {
        let of = Asked {
            instruction: &instruction,
            deterministic,
            arguments: &["--limit", "4", "--step-tokens", "700", "--sequences", sequences],
            failing: NOTHING,
        };
        logprobs("9.0", &of).0
    };
    let together = answers(true, "4");
    assert_eq!(together.matches("'row'").count(), 4, "{together}");
    assert_eq!(together, answers(true, "1"));
    assert_ne!(answers(false, "4"), answers(false, "1"));
}

/// A library that is faster computes large products (plain loops are, of an emulated kernel), but none of a deterministic job.
#[test]
fn large_products_are_computed_by_whom_is_fastest() {
    forget_products(true);
    let answers = |deterministic: bool, also: &[&'static str], failing: &str| {
        let few = ["--limit", "40", "--step-tokens", "1024", "--sequences", "40"];
        let of = Asked {
            instruction: "Answer with exactly one category.",
            deterministic,
            arguments: &[&few, also].concat(),
            failing,
        };
        logprobs("8.0", &of)
    };
    let (fastest, said) = answers(false, &[], NOTHING);
    assert_eq!(fastest.matches("'row'").count(), 40, "{fastest}");
    assert!(
        said.contains("ways of Bf16, ") && said.contains("128 x 128: ") && said.contains("cuBLASLt: "),
        "{said}"
    );
    // Before the first row, on as many rows as each way serves.
    let measured = said
        .match_indices("ways of Bf16, ")
        .map(|(at, words)| &said[at + words.len()..]);
    let rows: Vec<usize> = measured
        .map(|text| text.split(' ').next().unwrap().parse().unwrap())
        .collect();
    // With fewer, this model's products are too small to be worth it.
    assert_eq!(rows, [1024]);
    let (again, said) = answers(false, &[], NOTHING);
    assert_eq!(
        (again, said.contains("ways of")),
        (fastest.clone(), false),
        "what was measured is kept: {said}"
    );
    let (kernels, said) = answers(false, &["--no-cublaslt"], NOTHING);
    assert!(!said.contains("ways of"), "there is nothing to choose from: {said}");
    assert_ne!(kernels, fastest);
    assert_eq!(answers(true, &[], NOTHING).0, kernels);
    // Internal errors of the library, while the card answers: with rows that were not measured, and when it is asked what it offers.
    let (refused, said) = answers(false, &[], "cublasLtMatmul:1:14");
    assert!(said.contains("cublasLtMatmul"), "{said}");
    assert_eq!(refused, kernels);
    forget_products(true);
    let (refused, said) = answers(false, &[], "cublasLtMatmulAlgoGetHeuristic:1:14");
    assert!(said.contains("AlgoGetHeuristic"), "{said}");
    assert_eq!(refused, kernels);
}

/// Without `--kv-memory` the pool takes what is left; a step that does not fit is made smaller.
#[test]
fn memory_that_is_short_makes_steps_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("precision: f32", "precision: int8")
    });
    let mut command = on_card(
        "9.0",
        &[
            "run",
            arg(&job),
            "--limit",
            "2",
            "--device",
            "cuda:0",
            "--quiet",
            "--json",
        ],
    );
    command.args(["--step-tokens", "256", "--sequences", "2"]);
    // Some ninety allocations, of weights and of a first pool, come before those of the step.
    command
        .env("EMULATOR_MEMORY", (1u64 << 30).to_string())
        .env("EMULATOR_FAIL", "cuMemAlloc_v2:100:2");
    let run = Run::of(&mut command).expect(0);
    run.one_line(&["a step does not fit in memory", "steps now have at most 128 tokens"]);
    assert_eq!(run.json()["rows"]["succeeded"], 2);
}

/// Where memory ends in the middle of a job, steps become smaller, and every row has its answer.
#[test]
fn memory_that_ends_makes_steps_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    label("9.0", folder.path(), "int8", &|c| _ = c.env("EMULATOR_TRACE", &trace)).expect(0);
    let trace = std::fs::read_to_string(&trace).unwrap();
    let allocations = trace.lines().filter_map(|line| line.strip_prefix("cuMemAlloc_v2 "));
    let bytes: Vec<usize> = allocations.map(|bytes| bytes.parse().unwrap()).collect();
    // The last large ones are the pool's; what comes after them grows with steps, so there is some.
    let pool = bytes.iter().rposition(|bytes| *bytes >= 100_000).unwrap() + 1;
    assert!(pool < bytes.len(), "no allocation comes after the pool's");
    for allocation in pool + 1..=bytes.len() {
        let folder = tempfile::tempdir().unwrap();
        let fail = format!("cuMemAlloc_v2:{allocation}:2");
        let run = label("9.0", folder.path(), "int8", &|c| _ = c.env("EMULATOR_FAIL", &fail));
        let said = run.stderr.contains("steps now have at most") && run.stderr.contains("tokens and 2 sequences");
        assert!(said, "allocation {allocation}: {}", run.stderr);
        assert_eq!(run.expect(0).json()["agreement"]["equal"], 4, "allocation {allocation}");
    }
}

/// A fault of the card ends the process with a code of its own; the next one goes on.
#[test]
fn a_lost_card_is_said_and_the_job_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let one_by_one = |folder: &Path, change: &dyn Fn(&mut Command)| label_at_once("9.0", folder, "int8", 1, change);
    one_by_one(folder.path(), &|c| _ = c.env("EMULATOR_TRACE", &trace)).expect(0);
    let trace = std::fs::read_to_string(&trace).unwrap();
    let launches = trace.lines().filter(|line| !line.starts_with("cuMemAlloc")).count();
    // In the last step: those before the job measure how products are computed best.
    let fail = format!("cuLaunchKernel:{}:700", launches - 20);
    let folder = tempfile::tempdir().unwrap();
    let run = one_by_one(folder.path(), &|c| _ = c.env("EMULATOR_FAIL", &fail)).expect(7);
    run.one_line(&["the device failed", "CUDA_ERROR_ILLEGAL_ADDRESS"]);
    // The trial's output.
    let mut trials = std::fs::read_dir(folder.path().join("_limit")).unwrap();
    let output = trials.next().unwrap().unwrap().path();
    let kept = Run::of(&mut gristmill(&["status", arg(&output), "--json"]))
        .expect(0)
        .json();
    let rows = kept["rows"]["succeeded"].as_u64().unwrap();
    assert!((1..4).contains(&rows), "what was finished is written: {kept}");
    one_by_one(folder.path(), &|_| ()).expect(0);
}

/// Without `--device`, a machine whose card cannot be used computes on its CPU, and says why; one that has none says nothing.
#[test]
fn a_card_that_is_too_old_means_the_cpu() {
    for (card, warns) in [("7.5", true), ("none", false)] {
        let folder = tempfile::tempdir().unwrap();
        let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| text);
        let ran = Run::of(&mut on_card(
            card,
            &["run", arg(&job), "--limit", "4", "--json", "--quiet"],
        ))
        .expect(0);
        assert_eq!(ran.json()["rows"]["succeeded"], 4);
        for words in ["computing on the CPU", "compute capability 7.5"] {
            assert_eq!(ran.stderr.contains(words), warns, "{card}: {}", ran.stderr);
        }
    }
}

#[test]
fn what_a_card_does_not_do_is_refused_before_the_job_starts() {
    let refused = |card: &str, precision: &str, change: &dyn Fn(&mut Command), code: i32, words: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        label(card, folder.path(), precision, change)
            .expect(code)
            .one_line(words);
    };
    refused("8.0", "fp8", &|_| (), 2, &["FP8 needs 8.9", "`int8`"]);
    refused("9.0", "f32", &|_| (), 2, &["does not compute in f32", "--device cpu"]);
    let small = |c: &mut Command| _ = c.env("EMULATOR_MEMORY", "4000000");
    refused(
        "9.0",
        "bf16",
        &small,
        2,
        &["out of memory", "the model's weights take", "MiB are free", "8 bits"],
    );
    // On a CPU there is no FP8.
    let folder = tempfile::tempdir().unwrap();
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("precision: f32", "precision: fp8")
    });
    let mut command = on_card(
        "none",
        &["run", arg(&job), "--limit", "4", "--quiet", "--device", "cpu"],
    );
    Run::of(&mut command)
        .expect(2)
        .one_line(&["a CPU does not compute in fp8", "`int8`"]);
}
