//! The files of a model: one, or a set of numbered ones of which the first has the metadata.

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::{GgufError, Header, Problem, Value};
use crate::mapped::map;
use crate::regular::{entry_names, first_bytes};

/// Maximum number of a set's files.
const FILES_MAX: usize = 1024;
const END: &str = ".gguf";
/// What names of files begin with that hold a model's other parts (for images and sounds).
const OTHER_PARTS: &str = "mmproj";

/// One file.
pub struct GgufFile {
    pub path: PathBuf,
    pub header: Header,
    pub map: Mmap,
}

/// All files of a model, by their numbers.
pub struct GgufSet {
    pub files: Vec<GgufFile>,
}

/// The parts of a name like `model-00001-of-00003.gguf`.
#[derive(Debug, PartialEq, Eq)]
struct Numbered<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
}

impl Numbered<'_> {
    fn of(name: &str) -> Option<Numbered<'_>> {
        let (rest, count) = name.strip_suffix(END)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let parse = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let (number, count) = (parse(number)?, parse(count)?);
        (1..=count)
            .contains(&number)
            .then_some(Numbered { stem, number, count })
    }

    fn name(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}{END}", self.stem, self.count)
    }
}

/// Whether a path is that of a GGUF file, by its name or its first bytes.
pub fn is_gguf(path: &Path) -> bool {
    let named = path.extension().is_some_and(|end| end.eq_ignore_ascii_case(&END[1..]));
    path.is_file() && (named || first_bytes(path).starts_with(b"GGUF"))
}

/// The file of each GGUF model among a folder's names; of a set, the first one's.
pub fn models<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let is_first = |name: &&str| {
        let is_other = name.to_ascii_lowercase().starts_with(OTHER_PARTS);
        name.ends_with(END) && !is_other && Numbered::of(name).is_none_or(|numbered| numbered.number == 1)
    };
    names.into_iter().filter(is_first).collect()
}

impl GgufSet {
    /// Opens the model at `path`: a file, any file of a set, or a folder that holds one of these and no
    /// other model. `None`: `path` leads to something else.
    ///
    /// # Errors
    /// A file cannot be read, or is no sound GGUF file, or one of another set.
    pub fn open(path: &Path) -> Result<Option<GgufSet>, GgufError> {
        let Some(paths) = paths(path)? else { return Ok(None) };
        let files = paths.into_iter().map(GgufFile::open).collect::<Result<Vec<_>, _>>()?;
        let set = GgufSet { files };
        set.check_numbers()?;
        Ok(Some(set))
    }

    /// The metadata of all files.
    pub fn metadata(&self) -> &Header {
        &self.files[0].header
    }

    /// The file with the metadata.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// Whether each file is the one that its name says.
    fn check_numbers(&self) -> Result<(), GgufError> {
        let count = self.files.len();
        for (index, file) in self.files.iter().enumerate() {
            let whole = |key: &str| file.header.get(key).and_then(Value::whole);
            let number = whole("split.no").map_or(0, |number| number as usize);
            let declared = whole("split.count").map_or(1, |count| (count as usize).max(1));
            if (number, declared) != (index, count) {
                return Err(file.broken(format!(
                    "its metadata makes it file {} of {declared}, and its name file {} of {count}",
                    number + 1,
                    index + 1
                )));
            }
        }
        let tensors: usize = self.files.iter().map(|file| file.header.tensors.len()).sum();
        let declared = self.metadata().get("split.tensors.count").and_then(Value::whole);
        match declared {
            Some(declared) if declared != tensors as u64 => Err(self.files[0].broken(format!(
                "its set has {tensors} tensors, and its metadata says {declared}"
            ))),
            _ => Ok(()),
        }
    }
}

impl GgufFile {
    fn open(path: PathBuf) -> Result<GgufFile, GgufError> {
        let map = match map(&path) {
            Ok(map) => map,
            Err(source) => return Err(GgufError::Read { path, source }),
        };
        match Header::parse(&map) {
            Ok(header) => Ok(GgufFile { path, header, map }),
            Err(problem) => Err(GgufError::File { path, problem }),
        }
    }

    fn broken(&self, why: String) -> GgufError {
        GgufError::File {
            path: self.path.clone(),
            problem: Problem::Broken(why),
        }
    }
}

/// The paths of a model's files, the first one's first. `None`: there is no GGUF model.
pub fn paths(path: &Path) -> Result<Option<Vec<PathBuf>>, GgufError> {
    let file = if path.is_dir() {
        match of_folder(path)? {
            Some(file) => file,
            None => return Ok(None),
        }
    } else if is_gguf(path) {
        path.to_owned()
    } else {
        return Ok(None);
    };
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
    let Some(numbered) = name.as_deref().and_then(Numbered::of) else {
        return Ok(Some(vec![file]));
    };
    if numbered.count > FILES_MAX {
        let why = format!(
            "its name makes it one of {} files, more than {FILES_MAX}",
            numbered.count
        );
        return Err(GgufError::File {
            path: file.clone(),
            problem: Problem::Broken(why),
        });
    }
    let paths: Vec<PathBuf> = (1..=numbered.count)
        .map(|number| file.with_file_name(numbered.name(number)))
        .collect();
    match paths.iter().find(|path| !path.exists()) {
        Some(missing) => Err(GgufError::File {
            path: missing.clone(),
            problem: Problem::Broken(format!(
                "it is not there, and belongs to the {} files of the model: fetch it",
                numbered.count
            )),
        }),
        None => Ok(Some(paths)),
    }
}

/// The only GGUF model of a folder without safetensors.
fn of_folder(folder: &Path) -> Result<Option<PathBuf>, GgufError> {
    let names = entry_names(folder).map_err(|source| GgufError::Read {
        path: folder.to_owned(),
        source,
    })?;
    // What calibration writes is no model.
    let is_weights = |name: &String| name.ends_with(".safetensors") && !name.ends_with("channels.safetensors");
    if names.iter().any(is_weights) {
        return Ok(None);
    }
    match models(names.iter().map(String::as_str))[..] {
        [name] => Ok(Some(folder.join(name))),
        [] => Ok(None),
        [first, second, ..] => Err(GgufError::File {
            path: folder.to_owned(),
            problem: Problem::Unsupported(format!(
                "it holds several models as GGUF (`{first}`, `{second}`): give the file of one"
            )),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::Writer;

    #[test]
    fn names_of_sets_have_five_digits() {
        let numbered = Numbered::of("a-b-00002-of-00012.gguf").unwrap();
        assert_eq!((numbered.stem, numbered.number, numbered.count), ("a-b", 2, 12));
        assert_eq!(numbered.name(7), "a-b-00007-of-00012.gguf");
        for name in [
            "a.gguf",
            "a-1-of-2.gguf",
            "a-00003-of-00002.gguf",
            "a-00000-of-00002.gguf",
            "a-00001-of-00002.safetensors",
        ] {
            assert_eq!(Numbered::of(name), None, "{name}");
        }
        let names = [
            "b-00001-of-00002.gguf",
            "b-00002-of-00002.gguf",
            "c.gguf",
            "mmproj-c.gguf",
            "d.txt",
        ];
        assert_eq!(models(names), ["b-00001-of-00002.gguf", "c.gguf"]);
    }

    fn file(number: u16, count: u16, tensor: &str) -> Vec<u8> {
        let mut writer = Writer::new(3);
        writer.key("split.no", 2, &number.to_le_bytes());
        writer.key("split.count", 2, &count.to_le_bytes());
        writer.key("split.tensors.count", 5, &2i32.to_le_bytes());
        writer.tensor(tensor, &[1], 0, &[0; 4]);
        writer.bytes()
    }

    #[test]
    fn a_set_is_found_from_any_of_its_files_and_from_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let error = |path: &Path| GgufSet::open(path).err().unwrap().to_string();
        assert!(GgufSet::open(dir.path()).unwrap().is_none(), "an empty folder");
        std::fs::write(at("m-00001-of-00002.gguf"), file(0, 2, "a")).unwrap();
        assert!(error(dir.path()).contains("m-00002-of-00002.gguf`: it is not there"));
        std::fs::write(at("m-00002-of-00002.gguf"), file(1, 2, "b")).unwrap();
        for path in [
            dir.path().to_owned(),
            at("m-00001-of-00002.gguf"),
            at("m-00002-of-00002.gguf"),
        ] {
            let set = GgufSet::open(&path).unwrap().unwrap();
            let names: Vec<&str> = set.files.iter().map(|file| &*file.header.tensors[0].name).collect();
            assert_eq!((names, set.path()), (vec!["a", "b"], &*at("m-00001-of-00002.gguf")));
        }
        // Files of other sets, and files that are taken for whole models.
        std::fs::write(at("m-00002-of-00002.gguf"), file(0, 2, "b")).unwrap();
        assert!(error(dir.path()).contains("its metadata makes it file 1 of 2, and its name file 2 of 2"));
        std::fs::write(at("m-00002-of-00002.gguf"), Writer::new(3).bytes()).unwrap();
        assert!(error(dir.path()).contains("file 1 of 1"));
        std::fs::write(at("whole.gguf"), file(0, 2, "a")).unwrap();
        assert!(error(&at("whole.gguf")).contains("file 1 of 2, and its name file 1 of 1"));
        assert!(error(dir.path()).contains("several models as GGUF"));
        std::fs::write(at("model.safetensors"), "").unwrap();
        assert!(GgufSet::open(dir.path()).unwrap().is_none(), "a folder of safetensors");
        // A file by its first bytes alone; no GGUF file at all.
        std::fs::write(at("model"), Writer::new(3).bytes()).unwrap();
        assert!(GgufSet::open(&at("model")).unwrap().is_some());
        std::fs::write(at("other"), "text").unwrap();
        assert!(GgufSet::open(&at("other")).unwrap().is_none());
        std::fs::write(at("broken.gguf"), "text").unwrap();
        assert!(error(&at("broken.gguf")).contains("broken.gguf`: it does not begin as a GGUF file does"));
    }

    #[test]
    fn a_set_holds_as_many_tensors_as_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, file(0, 1, "a")).unwrap();
        let error = GgufSet::open(&path).err().unwrap().to_string();
        assert!(error.contains("has 1 tensors, and its metadata says 2"), "{error}");
    }
}
