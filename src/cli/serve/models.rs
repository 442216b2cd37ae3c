//! The models on offer, opened, and the jobs that batches for them become.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::cli::device_choice::ResolvedDevice;
use crate::cli::exit::Failure;
use crate::cli::model_source::bring_model;
use crate::cli::prepare::{PreparedJob, print_warnings};
use crate::job::{Job, JobFile, Parameters};
use crate::serve::driver::BatchJob;
use crate::serve::models::ServedModel;
use crate::worker::model::{Formats, Model, ModelFiles};

/// A model's files, and the settings of its jobs, read once at the start.
pub(super) struct OpenModel {
    pub files: ModelFiles,
    pub formats: Formats,
    /// Maximum sequence length in tokens; `None`: the checkpoint's.
    pub context: Option<u32>,
    /// The maximum tokens of an answer whose request states none.
    pub answer_tokens: u32,
}

impl OpenModel {
    /// Opens the files of all models, and checks the fields of jobs that the file of models gives.
    /// The address of a fetched model becomes that of exactly these files.
    pub(super) async fn open_all(
        models: &mut [ServedModel],
        device: ResolvedDevice,
    ) -> Result<HashMap<String, OpenModel>, Failure> {
        let mut all = HashMap::new();
        for model in models {
            let opened = OpenModel::open(model, device).await;
            let opened = opened.map_err(|failure| failure.context(at(&model.name)))?;
            all.insert(model.name.clone(), opened);
        }
        Ok(all)
    }

    async fn open(model: &mut ServedModel, device: ResolvedDevice) -> Result<OpenModel, Failure> {
        let local = bring_model(&model.address, Path::new("/")).await?;
        if let Some(pinned) = local.pinned {
            model.address = pinned;
        }
        let files = ModelFiles::open(local.dir).map_err(Failure::bad_job)?;
        print_warnings(&files.config.warnings);
        let batch = BatchJob::for_check(model).map_err(Failure::bad_job)?;
        let mut prepared = PreparedJob::of_request(job_of(&batch)?, files.clone(), device)?;
        prepared.resolve_settings(None)?;
        let formats = prepared.formats();
        Ok(OpenModel {
            files,
            formats,
            context: prepared.job.context,
            answer_tokens: prepared.job.generate.max_tokens,
        })
    }

    /// The checkpoint's hash. Reads every byte of the checkpoint.
    pub(super) fn hash(&self, name: &str) -> Result<String, Failure> {
        let hash = self.files.hash(self.formats.precision);
        hash.map_err(|error| Failure::bad_job(error).context(at(name)))
    }

    /// The model as workers know it. `hash`: the checkpoint's.
    pub(super) fn for_worker(&self, hash: String) -> Model {
        let context = self.context.unwrap_or(self.files.config.max_position_embeddings);
        Model::new(self.files.clone(), self.formats, context, hash)
    }
}

/// Where an error of a model comes from.
fn at(name: &str) -> String {
    format!("`--models`: model `{name}`")
}

/// The job of a batch, as a job file would describe it.
pub(super) fn job_of(batch: &BatchJob) -> Result<Job, Failure> {
    let fields = job_fields(batch);
    let file = format!("{}.json", batch.name);
    let base_dir = Path::new("/");
    let parsed = JobFile::parse_with(
        &Value::from(fields).to_string(),
        &file,
        base_dir,
        &Parameters::default(),
    );
    let parsed = parsed.map_err(Failure::bad_job)?;
    Job::check(parsed, &file, base_dir).map_err(Failure::bad_job)
}

fn job_fields(batch: &BatchJob) -> Map<String, Value> {
    let mut fields = batch.model.job.clone();
    let mut section = |name: &str, added: Value| {
        let section = fields.entry(name).or_insert_with(|| json!({}));
        if let (Value::Object(section), Value::Object(added)) = (section, added) {
            section.extend(added);
        }
    };
    section("generate", json!({"n": batch.samples}));
    let deadline = format!("{}s", batch.deadline_seconds);
    section("budget", json!({"deadline": deadline, "unfinished": "expire"}));
    fields.insert("name".into(), batch.name.clone().into());
    fields.insert("model".into(), batch.model.address.clone().into());
    fields.insert(
        "input".into(),
        json!({"uri": batch.input.url.as_str(), "format": "openai_batch"}),
    );
    fields.insert(
        "output".into(),
        json!({"uri": batch.output.url.as_str(), "format": "openai"}),
    );
    fields
}
