//! Resolves addresses to a job's input files, with their partition columns. Opens no file.

use std::path::Path as FsPath;

use super::discover::{FoundFile, discover};
use super::filter::Filter;
use super::partitions::{FolderValues, PartitionColumn, parse_folders, partition_columns};
use crate::dataset::error::DatasetError;
use crate::dataset::options::InputOptions;
use crate::dataset::store::location::Location;
use crate::dataset::store::pinned_file::PinnedFile;

/// Maximum number of files that a message names.
const NAMED_MAX: usize = 3;

/// A job's inputs.
#[derive(Debug, Default)]
pub struct Inputs {
    pub files: Vec<Input>,
    /// The partition columns that folders name.
    pub partitions: Vec<PartitionColumn>,
    /// Notes for the person who starts the job, a line each.
    pub notes: Vec<String>,
}

/// One input.
#[derive(Debug, Clone)]
pub struct Input {
    pub file: PinnedFile,
    /// The partition values from its folders, in column order.
    pub partition: Vec<Option<String>>,
}

/// Finds the files that `uris` and `input.where` match. `own_output` is the output of the
/// requesting job.
pub async fn find_inputs(
    uris: &[String],
    options: &InputOptions,
    base_dir: &FsPath,
    own_output: Option<&Location>,
) -> Result<Inputs, DatasetError> {
    let found = discover(uris, base_dir, own_output).await?;
    let notes = found
        .output_notes
        .into_iter()
        .chain(ignored_files_note(&found.ignored_files))
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
    let folders_of_file = |FoundFile { file, base_parts }: &FoundFile| {
        let folders = parse_folders(file.location.path.as_ref(), *base_parts);
        folders.map_err(|why| DatasetError::Refused(format!("`{}`: {why}", file.name)))
    };
    let named = found
        .files
        .iter()
        .map(|found| Ok((found.file.name.clone(), folders_of_file(found)?)));
    let named: Vec<(String, FolderValues)> = named.collect::<Result<_, DatasetError>>()?;
    let (partitions, texts) = partition_columns(&named)?;
    let filter = Filter::new(&options.filter, &partitions)?;
    let count = found.files.len();
    let all = found.files.into_iter().zip(texts);
    let input = |(FoundFile { file, .. }, partition)| Input { file, partition };
    let files: Vec<Input> = all
        .map(input)
        .filter(|input| filter.accepts(&input.partition))
        .collect();
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

/// The note about files in the inputs' folders that are ignored because of their names.
fn ignored_files_note(names: &[String]) -> Option<String> {
    let first: Vec<&str> = names.iter().take(NAMED_MAX).map(String::as_str).collect();
    let more = match names.len() - first.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!first.is_empty()).then(|| {
        format!(
            "the inputs' folders hold files that are not read because of their names: `{}`{more}; to read such a file, name it by its own address, or rename it",
            first.join("`, `")
        )
    })
}
