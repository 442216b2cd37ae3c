//! `gristmill doctor`: compares a GPU's kernels with the CPU before it is trusted with a night's
//! job. For job files see `checkup.rs`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use serde::Serialize;

use crate::cli::args::DoctorArgs;
use crate::cli::checkup::checkup;
use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::{Exit, Failure};
use crate::cli::model_source::bring_model;
use crate::cli::prepare::{print_signing, print_warnings};
use crate::device::cpu::Threads;
use crate::device::cuda::plan::Tile;
use crate::device::cuda::{Ceilings, Cuda, MatmulBackend};
use crate::device::{KvFormat, Precision};
use crate::doctor::models::{ModelFinding, TestModel, families, families_in_codes};
use crate::doctor::{Comparison, Extent, Finding, LibraryResult, models};

/// All findings.
#[derive(Serialize)]
struct DoctorReport {
    card: String,
    capability: String,
    driver_cuda: String,
    nvrtc: String,
    /// Path of the cuBLASLt library, which can also compute linear operations.
    cublaslt: Option<String>,
    ceilings: Vec<FormatCeilings>,
    operations: Vec<Finding>,
    models: Vec<FormatModelFinding>,
    right: bool,
}

/// The card's peak rates in one format.
#[derive(Serialize)]
struct FormatCeilings {
    format: &'static str,
    #[serde(flatten)]
    ceilings: Ceilings,
}

/// Findings for a small model in one format.
#[derive(Serialize)]
struct FormatModelFinding {
    format: &'static str,
    #[serde(flatten)]
    finding: ModelFinding,
}

pub(super) async fn doctor(args: DoctorArgs) -> Result<Exit, Failure> {
    print_signing(args.json)?;
    if let Some(job) = &args.job {
        return checkup(&args, job).await;
    }
    if args.queue.queue.is_some() || !args.queue.kafka.is_empty() {
        return Err(Failure::bad_job(anyhow!(
            "`--queue` and `--kafka` are for a job: `gristmill doctor JOB.yaml`"
        )));
    }
    let mut folders = Vec::new();
    for model in &args.model {
        folders.push(bring_model(model, Path::new("")).await?.dir);
    }
    let report = tokio::task::block_in_place(|| examine(&args, &folders))?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(if report.right { Exit::Done } else { Exit::Failure })
}

#[expect(clippy::too_many_lines, reason = "an examination, in order")]
fn examine(args: &DoctorArgs, folders: &[PathBuf]) -> Result<DoctorReport, Failure> {
    let ordinal = match args.device.resolve()? {
        ResolvedDevice::Cuda(ordinal) => ordinal,
        ResolvedDevice::Cpu => {
            return Err(Failure::bad_job(anyhow!(
                "doctor found no GPU to check (GPUs are checked against the CPU): `--device cuda:0` says what is missing"
            )));
        }
    };
    let card =
        Cuda::open(ordinal, Precision::Bf16, KvFormat::Bf16, MatmulBackend::Kernels).map_err(Failure::bad_job)?;
    let (major, minor) = card.compiler_version();
    let card = card.card().clone();
    let threads = Arc::new(Threads::new(
        std::thread::available_parallelism().map_or(1, usize::from),
    )?);
    let extent = if args.quick { Extent::Quick } else { Extent::Full };
    let mut report = DoctorReport {
        capability: format!("{}.{}", card.capability / 10, card.capability % 10),
        driver_cuda: format!("{}.{}", card.driver_version / 1000, card.driver_version % 1000 / 10),
        nvrtc: format!("{major}.{minor}"),
        cublaslt: None,
        ceilings: vec![],
        operations: vec![],
        models: vec![],
        right: true,
        card: card.name.clone(),
    };
    let quiet = args.json;
    if !quiet {
        println!(
            "{}, compute capability {}, driver for CUDA {}, NVRTC {}\n",
            report.card, report.capability, report.driver_cuda, report.nvrtc
        );
        println!("{HEADER}");
    }
    let mut subjects = families()?;
    let in_codes = families_in_codes()?;
    for dir in folders {
        let subject = TestModel::open(dir).map_err(Failure::bad_job)?;
        print_warnings(subject.warnings());
        subjects.push(subject);
    }
    let formats = Precision::ON_GPU.into_iter().filter(|precision| {
        (*precision != Precision::Fp8 || card.capability >= 89)
            && (args.formats.is_empty() || args.formats.contains(precision))
    });
    for precision in formats {
        let (kv, format) = (precision.kv_format(), precision.name());
        let open = |backend| Cuda::open(ordinal, precision, kv, backend);
        let device = open(MatmulBackend::Kernels).map_err(Failure::bad_job)?;
        // If the library cannot be opened, the kernels are still examined without the comparison.
        let library = if args.no_cublaslt {
            None
        } else {
            open(MatmulBackend::Library)
                .inspect_err(|why| print_line(quiet, &format!("{format} by our kernels alone: {why}")))
                .ok()
        };
        report.cublaslt = library.as_ref().and_then(Cuda::library_path);
        let ceilings = device.ceilings(args.quick)?;
        if !args.quick {
            let (bytes, operations) = (ceilings.bytes_per_second / 1e9, ceilings.operations_per_second / 1e12);
            let line = format!(
                "ceilings                 {format:<7} {bytes:.0} GB/s copied, {operations:.1} TFLOP/s in registers"
            );
            print_line(quiet, &line);
        }
        report.ceilings.push(FormatCeilings { format, ceilings });
        let mut comparison = Comparison::new(&device, (precision, kv), extent, Arc::clone(&threads));
        comparison.library = library.as_ref();
        let mut report_finding = |finding: Finding| {
            print_line(quiet, &finding_line(&finding, &ceilings));
            report.right &= finding.is_right();
            report.operations.push(finding);
        };
        comparison.operations(&mut report_finding)?;
        // INT8 accumulators are exact in any order, so tiles need no bitwise comparison.
        if card.is_hopper() && !matches!(precision, Precision::Int8 | Precision::W4a8) {
            let mut device = open(MatmulBackend::Kernels).map_err(Failure::bad_job)?;
            comparison.bitwise_equal(&mut device, Tile::ALL, Cuda::fix_tile, &mut report_finding)?;
        }
        comparison.attention(&mut report_finding)?;
        // Logits are F32 in every format, so sampling is checked once.
        if precision == Precision::Bf16 {
            comparison.sampling(&mut report_finding)?;
        }
        let mut report_finding = |finding: ModelFinding| {
            print_line(quiet, &model_line(format, &finding));
            report.right &= finding.is_right();
            report.models.push(FormatModelFinding { format, finding });
        };
        let open = || open(MatmulBackend::Kernels);
        if precision == Precision::W4a8 {
            models(&in_codes, open, (precision, kv), &threads, &mut report_finding)?;
        }
        models(&subjects, open, (precision, kv), &threads, &mut report_finding)?;
    }
    if !quiet {
        println!(
            "\n{}",
            if report.right {
                "all right"
            } else {
                "NOT RIGHT: do not compute on this card"
            }
        );
    }
    Ok(report)
}

/// Prints a line of findings, to stderr if stdout is for the report. Each finding is printed at
/// once, so that it is known even if a later check fails or hangs.
fn print_line(to_stderr: bool, line: &str) {
    if to_stderr {
        eprintln!("{line}")
    } else {
        println!("{line}")
    }
}

const HEADER: &str = "operation                format  shape                             error   allowed    worst   allowed     µs    GB/s  TFLOP/s ceiling";

fn finding_line(finding: &Finding, ceilings: &Ceilings) -> String {
    let speed = finding.seconds.map_or(String::new(), |seconds| {
        format!(
            " {:>7.0} {:>7.0} {:>8.1} {:>5.0} %",
            seconds * 1e6,
            finding.bytes / seconds / 1e9,
            finding.operations / seconds / 1e12,
            // Percentage of the roofline: the larger of memory time and compute time, over the
            // measured time.
            100.0
                * (finding.bytes / ceilings.bytes_per_second).max(finding.operations / ceilings.operations_per_second)
                / seconds
        )
    });
    let library_text = match &finding.by_library {
        Some(LibraryResult {
            right: false, error, ..
        }) => {
            format!(", cuBLASLt gives something else (error {error:.5}): compute with `--no-cublaslt`")
        }
        Some(LibraryResult {
            seconds: Some(library_seconds),
            ..
        }) => format!(
            ", cuBLASLt {:.0} µs, {:.2} times ours",
            library_seconds * 1e6,
            library_seconds / finding.seconds.unwrap_or(f64::NAN)
        ),
        _ => String::new(),
    };
    let verdict = match (&finding.mismatch, finding.is_right()) {
        (Some(mismatch), _) => format!("  WRONG: {mismatch}"),
        (None, false) => "  WRONG".into(),
        (None, true) => String::new(),
    };
    format!(
        "{:<24} {:<7} {:<30} {:>8.5} {:>9.5} {:>8.5} {:>9.5}{speed}{library_text}{verdict}",
        finding.operation,
        finding.format,
        finding.shape,
        finding.error,
        finding.tolerance.error,
        finding.worst,
        finding.tolerance.worst
    )
}

fn model_line(format: &str, finding: &ModelFinding) -> String {
    format!(
        "{:<24} {:<7} {:<30} {:>8.5} {:>9.5} nats, {} of {} rows with the same largest logit, {} wrong{}{}",
        "model",
        format,
        finding.model,
        finding.divergence,
        finding.divergence_max,
        finding.same,
        finding.rows,
        finding.wrong,
        if finding.alone_alike {
            ", the same bits alone"
        } else {
            ", not the same bits alone"
        },
        if finding.is_right() { "" } else { "  WRONG" }
    )
}
