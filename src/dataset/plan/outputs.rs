//! Outputs of jobs within input folders: answers must not become prompts only because a folder
//! holds both inputs and outputs.
//!
//! An output is a folder that holds a job's record. An address that names an output, or a file in
//! an output, selects its answers. A folder or a glob with `**` excludes the outputs below it. A
//! glob whose wildcards match outputs' names (`out/*/*.parquet`) selects their files if it matches
//! no other files.

use std::collections::BTreeSet;

use crate::dataset::store::location::Location;
use crate::dataset::store::pinned_file::display_name;

/// Path of the job's record within an output.
const RECORD: &str = "_gristmill/job.json";

/// Maximum number of outputs that a message names.
const NAMED_MAX: usize = 3;

/// Outputs below a folder: their keys relative to the folder.
#[derive(Debug, Default)]
pub struct Outputs(BTreeSet<String>);

impl Outputs {
    /// Adds an output if `key` is the key of its job record. The listed folder itself is not added:
    /// its address names it, so its answers are meant.
    pub fn add_if_record(&mut self, key: &str) {
        if let Some(output) = key.strip_suffix(RECORD).and_then(|output| output.strip_suffix('/')) {
            self.0.insert(output.to_string());
        }
    }

    /// The outermost output that contains the file at `key`.
    pub fn output_of(&self, key: &str) -> Option<&str> {
        let mut folders = key.match_indices('/').map(|(end, _)| &key[..end]);
        folders.find_map(|folder| self.0.get(folder)).map(String::as_str)
    }
}

/// Whether `file` lies in `output`, even if their store clients differ.
pub fn lies_in(output: &Location, file: &Location) -> bool {
    let store = |location: &Location| {
        (
            location.url.scheme().to_string(),
            location.url.host().map(|host| host.to_string()),
        )
    };
    store(output) == store(file) && file.path.prefix_matches(&output.path)
}

/// The note about excluded outputs; `None` if there are none.
pub fn excluded_note(urls: &BTreeSet<String>) -> Option<String> {
    let line =
        "are in the inputs' folders, and their files are not read; to read answers, give the address of such an output";
    name_list(urls).map(|names| format!("outputs of jobs {line}: {names}"))
}

/// The note about outputs whose answers become inputs through wildcards; `None` if there are
/// none.
pub fn included_note(urls: &BTreeSet<String>) -> Option<String> {
    name_list(urls).map(|names| format!("the inputs are answers of other jobs, from their outputs: {names}"))
}

fn name_list(urls: &BTreeSet<String>) -> Option<String> {
    let first: Vec<String> = urls
        .iter()
        .take(NAMED_MAX)
        .map(|url| format!("`{}`", display_name(url)))
        .collect();
    let more = match urls.len() - first.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!first.is_empty()).then(|| format!("{}{more}", first.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn files_below_a_record_are_in_its_output() {
        let mut outputs = Outputs::default();
        for key in [
            "a/out/_gristmill/job.json",
            "_gristmill/job.json",
            "b/job.json",
            "c_gristmill/job.json",
        ] {
            outputs.add_if_record(key);
        }
        assert_eq!(outputs.output_of("a/out/part-00000.parquet"), Some("a/out"));
        assert_eq!(outputs.output_of("a/out/b/x.parquet"), Some("a/out"));
        for key in ["a/out.parquet", "a/output/x", "a/x", "part-00000.parquet", "b/x", "c/x"] {
            assert_eq!(outputs.output_of(key), None, "{key}");
        }
    }

    #[test]
    fn a_file_lies_in_a_folder_of_its_own_store() {
        let at = |text: &str| Location::parse(text, Path::new("/data")).unwrap();
        assert!(lies_in(&at("out"), &at("out/part.parquet")));
        assert!(lies_in(&at("out/"), &at("/data/out/a/b.parquet")));
        for file in ["output/part.parquet", "out.parquet", "/out/part.parquet"] {
            assert!(!lies_in(&at("out"), &at(file)), "{file}");
        }
    }
}
