//! Opens a model by its address: a folder, a repository of the hub, or a folder in an object store.
//! Models that lie elsewhere are fetched first.

use std::path::{Path, PathBuf};

use crate::cli::exit::Failure;
use crate::cli::output::{open_ledger, output_of};
use crate::cli::prepare::print_warnings;
use crate::cli::trial;
use crate::dataset::store::location::Location;
use crate::fetch::address::HubModel;
use crate::fetch::{FetchError, ModelAddress, Snapshot};
use crate::job::Job;
use crate::model::config::Config;
use crate::model::folder;
use crate::tokenizer::Tokenizer;
use crate::worker::model::ModelFiles;

/// A model's folder on this machine.
#[derive(Debug)]
pub(super) struct LocalModel {
    pub dir: PathBuf,
    /// The address of exactly these files, if that of the model may lead to others tomorrow.
    pub pinned: Option<String>,
}

/// The model of a job, whose address becomes that of exactly these files. A job that has begun goes
/// on with the commit that it began with, whatever its branch leads to by now.
pub(super) async fn open_job_model(job: &mut Job, limit: Option<u64>) -> Result<ModelFiles, Failure> {
    let local = bring_of_job(job, limit, "model", &job.model).await?;
    let adapter = match &job.adapter {
        Some(adapter) => Some(bring_of_job(job, limit, "adapter", adapter).await?),
        None => None,
    };
    let folder = adapter.as_ref().map(|adapter| adapter.dir.clone());
    let files = ModelFiles::open_with(local.dir, folder, Vec::new()).map_err(Failure::bad_job)?;
    if let Some(pinned) = local.pinned {
        job.model = pinned;
    }
    if let Some(pinned) = adapter.and_then(|adapter| adapter.pinned) {
        job.adapter = Some(pinned);
    }
    Ok(files)
}

/// Brings the model or the adapter of a job: `text` is its address in the job's field `field`.
async fn bring_of_job(job: &Job, limit: Option<u64>, field: &str, text: &str) -> Result<LocalModel, Failure> {
    let place = format!("{}: `{field}`", job.file);
    let at = |failure: Failure| failure.context(place.clone());
    let mut address = ModelAddress::parse(text, &job.base_dir).map_err(|error| at(failure(error)))?;
    if let ModelAddress::Hub(model) = &mut address
        && !model.is_pinned()
        && let Some(begun) = begun_model(job, limit, field, model).await?
    {
        *model = begun;
    }
    let local = match field {
        "adapter" => bring_adapter(text, &address).await,
        _ => bring(text, &address).await,
    };
    local.map_err(at)
}

/// The model of a job that is read from its record, which names exactly these files.
pub(super) async fn open_recorded_model(job: &Job) -> Result<ModelFiles, Failure> {
    let local = bring_model(&job.model, &job.base_dir).await;
    let local = local.map_err(|failure| failure.context(format!("{}: `model`", job.file)))?;
    let adapter = match &job.adapter {
        Some(adapter) => {
            let brought = open_adapter(adapter, &job.base_dir).await;
            Some(brought.map_err(|failure| failure.context(format!("{}: `adapter`", job.file)))?)
        }
        None => None,
    };
    ModelFiles::open_with(local.dir, adapter, Vec::new()).map_err(Failure::bad_job)
}

/// Opens the model that a command line names, with the adapter that changes it and those beside it, if it names any.
pub(super) async fn open_model(text: &str, adapter: Option<&str>, apart: &[String]) -> Result<ModelFiles, Failure> {
    let local = bring_model(text, Path::new("")).await?;
    let adapter = match adapter {
        Some(adapter) => Some(open_adapter(adapter, Path::new("")).await?),
        None => None,
    };
    let apart = open_adapters(apart).await?;
    ModelFiles::open_with(local.dir, adapter, apart).map_err(Failure::bad_job)
}

/// The folders of the adapters that a command line names.
pub(super) async fn open_adapters(texts: &[String]) -> Result<Vec<PathBuf>, Failure> {
    let mut folders = Vec::new();
    for text in texts {
        folders.push(open_adapter(text, Path::new("")).await?);
    }
    Ok(folders)
}

/// The folder of the adapter at an address; a path is relative to `base_dir`.
async fn open_adapter(text: &str, base_dir: &Path) -> Result<PathBuf, Failure> {
    let address = ModelAddress::parse(text, base_dir).map_err(failure)?;
    Ok(bring_adapter(text, &address).await?.dir)
}

/// Brings an adapter. `text`: the address as it was given.
async fn bring_adapter(text: &str, address: &ModelAddress) -> Result<LocalModel, Failure> {
    match snapshot(text, address).await? {
        Source::Folder(dir) => Ok(LocalModel { dir, pinned: None }),
        Source::Snapshot(snapshot) => {
            snapshot.fetch_description(&say).await.map_err(failure)?;
            snapshot.fetch_weights(&say).await.map_err(failure)?;
            Ok(LocalModel {
                dir: snapshot.dir,
                pinned: snapshot.pinned,
            })
        }
    }
}

/// Brings the model at an address; a path is relative to `base_dir`.
pub(super) async fn bring_model(text: &str, base_dir: &Path) -> Result<LocalModel, Failure> {
    let address = ModelAddress::parse(text, base_dir).map_err(failure)?;
    bring(text, &address).await
}

/// The folder of a model with the files that describe it; its weights may be absent.
pub(super) async fn bring_description(text: &str) -> Result<LocalModel, Failure> {
    let address = ModelAddress::parse(text, Path::new("")).map_err(failure)?;
    match snapshot(text, &address).await? {
        Source::Folder(dir) => Ok(LocalModel { dir, pinned: None }),
        Source::Snapshot(snapshot) => {
            snapshot.fetch_description(&say).await.map_err(failure)?;
            Ok(LocalModel {
                dir: snapshot.dir,
                pinned: snapshot.pinned,
            })
        }
    }
}

/// `text`: the address as it was given.
async fn bring(text: &str, address: &ModelAddress) -> Result<LocalModel, Failure> {
    let snapshot = match snapshot(text, address).await? {
        Source::Folder(dir) => return Ok(LocalModel { dir, pinned: None }),
        Source::Snapshot(snapshot) => snapshot,
    };
    if !snapshot.is_whole() {
        snapshot.fetch_description(&say).await.map_err(failure)?;
        // A model that is refused is not worth the wait for its weights.
        folder::check(&snapshot.dir).map_err(Failure::bad_job)?;
        Config::load(&snapshot.dir).map_err(Failure::bad_job)?;
        Tokenizer::load(&snapshot.dir).map_err(Failure::bad_job)?;
        snapshot.fetch_weights(&say).await.map_err(failure)?;
    }
    Ok(LocalModel {
        dir: snapshot.dir,
        pinned: snapshot.pinned,
    })
}

/// Where a model's files come from.
enum Source {
    /// They are there.
    Folder(PathBuf),
    Snapshot(Box<Snapshot>),
}

async fn snapshot(text: &str, address: &ModelAddress) -> Result<Source, Failure> {
    let snapshot = match address {
        ModelAddress::Folder(dir) => return existing(text, dir).map(Source::Folder),
        ModelAddress::Hub(model) => Snapshot::of_hub(model).await,
        ModelAddress::Store(location) => Snapshot::of_store(location).await,
    };
    let snapshot = snapshot.map_err(failure)?;
    print_warnings(&snapshot.warnings);
    Ok(Source::Snapshot(Box::new(snapshot)))
}

fn existing(text: &str, dir: &Path) -> Result<PathBuf, Failure> {
    if dir.exists() {
        return Ok(dir.to_path_buf());
    }
    let why = folder::missing_folder_message(text);
    Err(Failure::bad_job(anyhow::anyhow!("`{}`: {why}", dir.display())))
}

/// The model or the adapter with which a job began, if its output holds a job with one of this repository.
async fn begun_model(
    job: &Job,
    limit: Option<u64>,
    field: &str,
    model: &HubModel,
) -> Result<Option<HubModel>, Failure> {
    let Some(ledger) = open_ledger(&output_location(job, limit).await?).await? else {
        return Ok(None);
    };
    let recorded = ledger.job().resolved[field].as_str().unwrap_or_default();
    Ok(match ModelAddress::parse(recorded, Path::new("/")) {
        Ok(ModelAddress::Hub(begun)) if begun.is_pinned() && begun.repository == model.repository => Some(begun),
        _ => None,
    })
}

/// The output of a job, or of its trial of the first `limit` rows, so that it does not touch the
/// real one.
pub(super) async fn output_location(job: &Job, limit: Option<u64>) -> Result<Location, Failure> {
    let output = output_of(job)?;
    match limit {
        Some(rows) => trial::location(job, &output, rows).await,
        None => Ok(output),
    }
}

fn failure(error: FetchError) -> Failure {
    match error {
        FetchError::Address(_) | FetchError::Refused { .. } => Failure::bad_job(error),
        FetchError::Failed { .. } => Failure::from(error),
    }
}

fn say(line: &str) {
    eprintln!("gristmill: {line}");
}
