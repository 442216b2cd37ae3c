//! `gristmill quantize`: writes a checkpoint with weights of 8 or 4 bits, and says how far it is from the
//! model.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cli::args::{EngineArgs, JobArgs, QuantizeArgs};
use crate::cli::calibrate;
use crate::cli::device_choice::{DeviceChoice, ResolvedDevice};
use crate::cli::exit::{Exit, Failure};
use crate::cli::model_source::open_model;
use crate::cli::prepare::{PreparedJob, print_warnings};
use crate::cli::setup::{exit_on_signals, load_options};
use crate::device::Precision;
use crate::job::precision::RequestedKvFormat;
use crate::model::channels::cut;
use crate::model::config::Config;
use crate::model::quantize::compare::{Distance, distance, logits};
use crate::model::quantize::{LayerReport, Quantization, QuantizeError, Scheme};
use crate::model::weights::checkpoint_hash;
use crate::model::{ActivationMaxima, Checkpoint, LoadOptions, Transformer};
use crate::report::summary::{counted, number, show_size};
use crate::say;
use crate::worker::model::{Formats, ModelFiles};

pub(super) async fn quantize(args: QuantizeArgs) -> Result<Exit, Failure> {
    check(&args).map_err(Failure::bad_job)?;
    // A layer's file and the record are replaced whole, so a run may end between any two of its instructions.
    exit_on_signals("interrupted: the same command goes on with what is not written yet")?;
    let files = open_model(&args.model, None, &[]).await?;
    let checkpoint = Checkpoint::open(&files.dir, None, files.config.clone()).map_err(Failure::bad_job)?;
    print_warnings(&checkpoint.config.warnings);
    let mut prompts = match &args.calibrate {
        Some(path) => prompts(&args, path, &files).await?,
        None => Vec::new(),
    };
    let options = options(&files, Precision::F32, &args.engine)?;
    tokio::task::block_in_place(|| {
        let done = Done::of(&args, &files, &checkpoint, &mut prompts, &options)?;
        done.print(&args, &prompts);
        Ok(Exit::Done)
    })
}

/// Refuses what would be taken for something else.
fn check(args: &QuantizeArgs) -> anyhow::Result<()> {
    let out = args.out.to_string_lossy();
    if out.contains("://") {
        bail!(
            "--out `{out}` is an address, and a checkpoint is written to a folder of this machine: name one, and copy it afterwards"
        );
    }
    if let Some(file) = args.out.ancestors().find(|path| path.exists())
        && !file.is_dir()
    {
        bail!(
            "--out `{out}`: `{}` is a file, and a checkpoint is written to a folder: name one that is new, or the one of an interrupted run",
            file.display()
        );
    }
    if matches!(args.engine.device, DeviceChoice::Cuda(_)) {
        bail!("--device names a GPU, and checkpoints are quantized on the CPU: leave it out");
    }
    Ok(())
}

/// The prompts of the job at `path`, which must be of this model: tokens of another would mean nothing.
async fn prompts(args: &QuantizeArgs, path: &Path, files: &ModelFiles) -> Result<Vec<Vec<u32>>, Failure> {
    let job = JobArgs {
        path: path.to_owned(),
        set: args.set.clone(),
    };
    let mut prepared = PreparedJob::prepare(&job, None, || Ok(ResolvedDevice::Cpu)).await?;
    let same = |dir: &Path| dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    if same(&prepared.model.dir) != same(&files.dir) {
        return Err(Failure::bad_job(anyhow!(
            "{}: its model is `{}`, and `{}` is quantized: give a job of that model",
            prepared.job.file,
            prepared.model.dir.display(),
            files.dir.display()
        )));
    }
    prepared.resolve_settings(None)?;
    calibrate::prompts(&prepared, args.rows).await
}

fn options(files: &ModelFiles, precision: Precision, engine: &EngineArgs) -> Result<LoadOptions, Failure> {
    let formats = Formats::of(precision.into(), RequestedKvFormat::Auto, precision);
    load_options(formats, None, files.tokenizer.vocab_size(), ResolvedDevice::Cpu, engine)
}

/// What a run came to.
struct Done {
    layers: Vec<LayerReport>,
    /// How far the result is from the model, and the precision in which it ran. `None`: there were no prompts.
    distance: Option<(Distance, Precision)>,
    bytes: [u64; 2],
}

impl Done {
    /// Quantizes. `prompts` are cut to what runs of them.
    fn of(
        args: &QuantizeArgs,
        files: &ModelFiles,
        checkpoint: &Checkpoint,
        prompts: &mut [Vec<u32>],
        options: &LoadOptions,
    ) -> Result<Done, Failure> {
        let mut reference = Vec::new();
        let mut channels = None;
        if !prompts.is_empty() {
            let original = Transformer::from_weights(checkpoint.config.clone(), &checkpoint.weights, options);
            let mut original = original.map_err(Failure::bad_job)?;
            // By another memory for keys and values they are cut elsewhere: then the run is another, too.
            for prompt in prompts.iter_mut() {
                prompt.truncate(cut(&original, prompt).len());
            }
            reference = logits(&mut original, prompts).map_err(Failure::bad_job)?;
            if args.to == Scheme::Int8 && ActivationMaxima::check_model(&checkpoint.config).is_ok() {
                let prompts = prompts.iter().map(Vec::as_slice);
                channels = Some(ActivationMaxima::measure(&mut original, prompts).map_err(Failure::bad_job)?);
            }
        }
        if args.to == Scheme::Int8 && channels.is_none() {
            channels = files.activation_maxima(Precision::Int8).map_err(Failure::bad_job)?;
        }
        let quantization = Quantization {
            checkpoint,
            dir: &files.dir,
            scheme: args.to,
            channels: channels.as_ref(),
            prompts,
            options,
            sums_bytes: (args.sums_memory as usize) << 20,
            identity: identity(args, files, channels.as_ref(), prompts)?,
        };
        let progress = Progress::of(checkpoint.config.layers.len());
        let layers = quantization
            .write(&args.out, |layers| progress.show(layers))
            .map_err(failure)?;
        progress.end();
        let distance = match prompts {
            [] => None,
            _ => Some(compared(args, files, &reference, prompts)?),
        };
        Ok(Done {
            layers,
            distance,
            bytes: [weight_bytes(&files.dir)?, weight_bytes(&args.out)?],
        })
    }

    fn print(&self, args: &QuantizeArgs, prompts: &[Vec<u32>]) {
        let matrices = || self.layers.iter().flat_map(|layer| &layer.matrices);
        let worst = matrices().max_by(|a, b| a.relative_error.total_cmp(&b.relative_error));
        let [before, after] = self.bytes;
        if args.json {
            println!(
                "{}",
                json!({
                    "to": args.to.name(), "out": args.out.display().to_string(), "layers": self.layers, "prompts": prompts.len(),
                    "weight_bytes_before": before, "weight_bytes": after,
                    "precision": self.distance.map(|(_, precision)| precision.name()),
                    "places": self.distance.map(|(distance, _)| distance.places),
                    "kl_nats": self.distance.map(|(distance, _)| distance.kl),
                    "same_top_token": self.distance.map(|(distance, _)| distance.same_top),
                })
            );
            return;
        }
        println!(
            "quantized   {} matrices in {} to {}: {} of weights became {}",
            number(matrices().count() as u64),
            counted(self.layers.len() as u64, "layer"),
            args.to.name(),
            show_size(before),
            show_size(after)
        );
        if let Some(worst) = worst {
            let of = if worst.by_outputs { "outputs" } else { "weights" };
            println!(
                "rounding    changes {of} of `{}` most, by {:.2} %",
                worst.name,
                100.0 * worst.relative_error
            );
        }
        if let Some((distance, precision)) = &self.distance {
            println!(
                "compared    {:.2} % of {} have the same most likely token, {:.5} nats KL divergence (in {})",
                100.0 * distance.same_top,
                counted(distance.places as u64, "place"),
                distance.kl,
                precision.name()
            );
        }
        println!("written     {}", args.out.display());
    }
}

/// Loads what was written, as a job does, and compares it with the model's predictions.
fn compared(
    args: &QuantizeArgs,
    files: &ModelFiles,
    reference: &[Vec<f32>],
    prompts: &[Vec<u32>],
) -> Result<(Distance, Precision), Failure> {
    // FP8 is a GPU's, and activations of 4-bit weights stay: what is compared is the weights' rounding alone.
    let precision = match args.to {
        Scheme::Int8 => Precision::Int8,
        Scheme::Fp8 | Scheme::W4a16 => Precision::F32,
    };
    let config = Config::load(&args.out).map_err(Failure::bad_job)?;
    let written = Checkpoint::open(&args.out, None, config).map_err(Failure::bad_job)?;
    let options = options(files, precision, &args.engine)?;
    let mut model = Transformer::from_weights(written.config, &written.weights, &options).map_err(Failure::bad_job)?;
    let found = logits(&mut model, prompts).map_err(Failure::bad_job)?;
    Ok((distance(reference, &found), precision))
}

fn failure(error: QuantizeError) -> Failure {
    match error {
        QuantizeError::Write { .. } | QuantizeError::Unobserved { .. } => Failure::from(anyhow::Error::from(error)),
        other => Failure::bad_job(other),
    }
}

/// What the result depends on: an interrupted run goes on for the same alone.
fn identity(
    args: &QuantizeArgs,
    files: &ModelFiles,
    channels: Option<&ActivationMaxima>,
    prompts: &[Vec<u32>],
) -> Result<Value, Failure> {
    let mut hash = Sha256::new();
    for prompt in prompts {
        hash.update((prompt.len() as u64).to_le_bytes());
        prompt.iter().for_each(|token| hash.update(token.to_le_bytes()));
    }
    let prompts_hash = data_encoding::HEXLOWER.encode(&hash.finalize());
    Ok(json!({
        "gristmill": env!("CARGO_PKG_VERSION"), "to": args.to.name(),
        "model_sha256": checkpoint_hash(&files.dir).map_err(Failure::bad_job)?,
        "channels_sha256": channels.map(ActivationMaxima::hash),
        "prompts": prompts.len(), "prompts_sha256": prompts_hash,
    }))
}

/// Bytes of a folder's weights.
fn weight_bytes(dir: &Path) -> Result<u64, Failure> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read `{}`", dir.display()))? {
        let path = entry
            .with_context(|| format!("cannot read `{}`", dir.display()))?
            .path();
        if path.extension().is_some_and(|end| end == "safetensors") && !path.ends_with("channels.safetensors") {
            bytes += std::fs::metadata(&path)
                .with_context(|| format!("cannot read `{}`", path.display()))?
                .len();
        }
    }
    Ok(bytes)
}

/// A bar on a terminal, otherwise a line for each layer.
struct Progress {
    bar: Option<ProgressBar>,
    layers: usize,
}

impl Progress {
    fn of(layers: usize) -> Progress {
        let shows_bar = std::io::stderr().is_terminal() && !say::stderr_is_logged();
        Progress {
            bar: shows_bar.then(|| ProgressBar::new(layers as u64)),
            layers,
        }
    }

    fn show(&self, done: usize) {
        match &self.bar {
            Some(bar) => bar.set_position(done as u64),
            None => eprintln!("gristmill: {done} of {}", counted(self.layers as u64, "layer")),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
