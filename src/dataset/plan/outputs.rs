//! Outputs of jobs within input folders: answers must not become prompts because a folder holds
//! both.
//!
//! An output is a folder that holds a job's record. An address that names an output, or a file in
//! one, selects its answers. A folder or `**` that only comes across outputs leaves them out. A
//! glob whose wildcards match outputs' names (`out/*/*.parquet`) selects their files if it matches
//! nothing else.

use std::collections::BTreeSet;

use crate::dataset::store::location::Location;
use crate::dataset::store::pinned::display_name;

/// Path of the job's record within an output.
const RECORD: &str = "_gristmill/job.json";

/// Maximum number of outputs that a message names.
const NAMED_MAX: usize = 3;

/// Outputs below a folder, by their keys relative to it.
#[derive(Debug, Default)]
pub struct Outputs(BTreeSet<String>);

impl Outputs {
    /// Records an output if `key` is the key of its job record. The listed folder itself is
    /// ignored, since its address names it.
    pub fn note(&mut self, key: &str) {
        if let Some(output) = key.strip_suffix(RECORD).and_then(|output| output.strip_suffix('/')) {
            self.0.insert(output.to_string());
        }
    }

    /// The outermost output that contains the file at `key`.
    pub fn around(&self, key: &str) -> Option<&str> {
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
pub fn left_out(urls: &BTreeSet<String>) -> Option<String> {
    let line = "lie where the inputs do, and what they hold is no input; to read answers, name such an output itself";
    named(urls).map(|names| format!("outputs of jobs {line}: {names}"))
}

/// The note about outputs whose answers become inputs through wildcards; `None` if
/// there are none.
pub fn taken(urls: &BTreeSet<String>) -> Option<String> {
    named(urls).map(|names| format!("the inputs are answers of other jobs, from their outputs: {names}"))
}

fn named(urls: &BTreeSet<String>) -> Option<String> {
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
    fn what_lies_below_a_record_lies_in_its_output() {
        let mut outputs = Outputs::default();
        for key in [
            "a/out/_gristmill/job.json",
            "_gristmill/job.json",
            "b/job.json",
            "c_gristmill/job.json",
        ] {
            outputs.note(key);
        }
        assert_eq!(outputs.around("a/out/part-00000.parquet"), Some("a/out"));
        assert_eq!(outputs.around("a/out/b/x.parquet"), Some("a/out"));
        for key in ["a/out.parquet", "a/output/x", "a/x", "part-00000.parquet", "b/x", "c/x"] {
            assert_eq!(outputs.around(key), None, "{key}");
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
