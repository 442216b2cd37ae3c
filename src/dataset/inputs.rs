//! Addresses → the files that are a job's inputs, with the columns that their folders name. No file is opened for it.

use std::path::Path as FsPath;

use super::discover::{FoundFile, discover};
use super::error::DatasetError;
use super::filter::Filter;
use super::location::Location;
use super::options::InputOptions;
use super::partitions::{Folders, PartitionColumn, columns_of, folders_of};
use super::pinned::PinnedFile;

/// Files that a line names.
const NAMED_MAX: usize = 3;

/// A job's inputs.
#[derive(Debug, Default)]
pub struct Inputs {
    pub files: Vec<Input>,
    /// Columns that their folders name.
    pub partitions: Vec<PartitionColumn>,
    /// What whoever starts the job should know, a line each.
    pub notes: Vec<String>,
}

/// One input.
#[derive(Debug, Clone)]
pub struct Input {
    pub file: PinnedFile,
    /// What its folders say, in the order of the columns.
    pub partition: Vec<Option<String>>,
}

/// Finds the files that `uris` match and `options` do not leave out; `own`: the output of the job that asks.
pub async fn find(
    uris: &[String],
    options: &InputOptions,
    base_dir: &FsPath,
    own: Option<&Location>,
) -> Result<Inputs, DatasetError> {
    let found = discover(uris, base_dir, own).await?;
    let notes = found
        .of_outputs
        .into_iter()
        .chain(passed_over(&found.passed_over))
        .collect();
    if !options.hive {
        let input = |FoundFile { file, .. }| Input {
            file,
            partition: Vec::new(),
        };
        return Ok(Inputs {
            files: found.files.into_iter().map(input).collect(),
            partitions: Vec::new(),
            notes,
        });
    }
    let folders = |FoundFile { file, outside }: &FoundFile| {
        let folders = folders_of(file.location.path.as_ref(), *outside);
        folders.map_err(|why| DatasetError::Refused(format!("`{}`: {why}", file.name)))
    };
    let named = found.files.iter().map(|one| Ok((one.file.name.clone(), folders(one)?)));
    let named: Vec<(String, Folders)> = named.collect::<Result<_, DatasetError>>()?;
    let (partitions, texts) = columns_of(&named)?;
    let filter = Filter::new(&options.filter, &partitions)?;
    let count = found.files.len();
    let all = found.files.into_iter().zip(texts);
    let input = |(FoundFile { file, .. }, partition)| Input { file, partition };
    let files: Vec<Input> = all.map(input).filter(|input| filter.takes(&input.partition)).collect();
    if files.is_empty() && count > 0 {
        return Err(DatasetError::Refused(format!(
            "none of the {count} files that `{}` matches fits `input.where`",
            uris.join("`, `")
        )));
    }
    Ok(Inputs {
        files,
        partitions,
        notes,
    })
}

/// Says which files of folders are no inputs.
fn passed_over(names: &[String]) -> Option<String> {
    let first: Vec<&str> = names.iter().take(NAMED_MAX).map(String::as_str).collect();
    let more = match names.len() - first.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!first.is_empty()).then(|| {
        format!(
            "the inputs' folders hold files that are none by their names: `{}`{more}; one that is meant wants its own address, or another name",
            first.join("`, `")
        )
    })
}
