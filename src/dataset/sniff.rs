//! Which format a file has, told by its content.

use super::error::DatasetError;
use super::lines::{LINE_BYTES_MAX, is_blank, lines_of, strip_bom};
use super::pinned::PinnedFile;
use super::plan::Format;
use serde_json::{Map, Value};

/// How much of a file's head is looked at: more only while its first line is longer.
const HEAD_BYTES: [u64; 3] = [64 << 10, 1 << 20, LINE_BYTES_MAX as u64 + 1024];

/// What a file that must be Parquet begins with: `PAR1`.
const PARQUET_HEAD_BYTES: u64 = 4;

/// Lines that are looked at for one that is a JSON object.
const LINES_MAX: usize = 64;

/// The format of `file`; `None` for an empty file, which fits every format. `told`: the format that the job names.
pub async fn sniff(file: &PinnedFile, told: Option<Format>) -> Result<Option<Format>, DatasetError> {
    let name = file.location.path.filename().unwrap_or_default().to_ascii_lowercase();
    let is_named = |extensions: &[&str]| name.rsplit_once('.').is_some_and(|(_, ext)| extensions.contains(&ext));
    let wants_parquet = told == Some(Format::Parquet) || (told.is_none() && is_named(&["parquet", "pq"]));
    if file.size == 0 && !wants_parquet {
        return Ok(told);
    }
    for (n, &bytes) in HEAD_BYTES.iter().enumerate() {
        // A Parquet file's footer tells the rest.
        let bytes = if wants_parquet { PARQUET_HEAD_BYTES } else { bytes };
        let head = file.bytes(0..bytes.min(file.size)).await?;
        if wants_parquet || head.starts_with(b"PAR") {
            return parquet(file, &head, told).map(Some);
        }
        if let Some(why) = unreadable_magic(&head) {
            return Err(DatasetError::unreadable(&file.name, why));
        }
        if told == Some(Format::Text) || (told.is_none() && is_named(&["txt", "text"])) {
            return Ok(Some(Format::Text));
        }
        let whole = head.len() as u64 == file.size;
        match sniff_lines(&head, whole) {
            Sniffed::Is(format) => return Ok(Some(told.unwrap_or(format))),
            Sniffed::More if n + 1 < HEAD_BYTES.len() => {}
            Sniffed::More if head.iter().all(|byte| *byte == 0) => {
                return Err(DatasetError::unreadable(
                    &file.name,
                    "it begins with 16 MB of zero bytes",
                ));
            }
            // One line longer than may be read; the lines after it tell when they are read.
            Sniffed::More => return Ok(Some(told.unwrap_or(Format::Jsonl))),
            Sniffed::Neither(_) if told.is_some() => return Ok(told),
            Sniffed::Neither(why) => return Err(DatasetError::unreadable(&file.name, why)),
        }
    }
    Ok(told.or(Some(Format::Jsonl)))
}

fn parquet(file: &PinnedFile, head: &[u8], told: Option<Format>) -> Result<Format, DatasetError> {
    let unreadable = |why: String| Err(DatasetError::unreadable(&file.name, why));
    match (head.get(..4), told) {
        (Some(b"PARE"), _) => unreadable("it is encrypted Parquet, which is not supported".into()),
        (Some(b"PAR1"), None | Some(Format::Parquet)) => Ok(Format::Parquet),
        (Some(b"PAR1"), Some(told)) => unreadable(format!("it is Parquet, and the job says {}", told.as_str())),
        _ if head.is_empty() => unreadable("it is empty (0 bytes), which is no Parquet file".into()),
        _ => unreadable("it is no Parquet file: it does not begin with `PAR1`".into()),
    }
}

fn unreadable_magic(head: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 7] = [
        (b"\x1f\x8b", "it is compressed with gzip; decompress it first"),
        (b"\x28\xb5\x2f\xfd", "it is compressed with zstd; decompress it first"),
        (b"BZh", "it is compressed with bzip2; decompress it first"),
        (b"\xfd7zXZ", "it is compressed with xz; decompress it first"),
        (b"PK\x03\x04", "it is a zip archive; unpack it first"),
        (b"\xff\xfe", "it is UTF-16 text; convert it to UTF-8"),
        (b"\xfe\xff", "it is UTF-16 text; convert it to UTF-8"),
    ];
    MAGIC
        .iter()
        .find(|(magic, _)| head.starts_with(magic))
        .map(|(_, why)| *why)
}

/// What the first lines say.
#[derive(Debug, PartialEq, Eq)]
enum Sniffed {
    Is(Format),
    /// More bytes are needed.
    More,
    Neither(String),
}

fn sniff_lines(head: &[u8], whole: bool) -> Sniffed {
    let mut seen = 0;
    let mut first = None;
    for (place, line) in lines_of(head) {
        let line = if place.start == 0 { strip_bom(line) } else { line };
        if is_blank(line) {
            continue;
        }
        let complete = whole || head[place].ends_with(b"\n");
        if !complete {
            break;
        }
        first.get_or_insert(line.trim_ascii_start()[0]);
        if let Ok(object) = serde_json::from_slice::<Map<String, Value>>(line) {
            let batch = ["custom_id", "method", "url", "body"]
                .iter()
                .all(|key| object.contains_key(*key));
            return Sniffed::Is(if batch { Format::OpenaiBatch } else { Format::Jsonl });
        }
        seen += 1;
        if seen == LINES_MAX {
            break;
        }
    }
    match (first, seen) {
        (Some(b'['), _) => Sniffed::Neither("it is a JSON list, not JSON lines: write one object a line".into()),
        (_, 0) if whole => Sniffed::Is(Format::Jsonl), // nothing but blank lines: no rows
        (_, LINES_MAX) => Sniffed::Neither(format!(
            "it is neither Parquet nor JSON lines: none of its first {LINES_MAX} lines is a JSON object"
        )),
        (_, seen) if whole => Sniffed::Neither(format!(
            "it is neither Parquet nor JSON lines: none of its {seen} lines is a JSON object"
        )),
        _ => Sniffed::More,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_readable_object_decides() {
        assert_eq!(
            sniff_lines(b"\xef\xbb\xbf\n{\"a\":1}\n", true),
            Sniffed::Is(Format::Jsonl)
        );
        assert_eq!(sniff_lines(b"{broken\n{\"a\":1}", true), Sniffed::Is(Format::Jsonl));
        let batch = br#"{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{}}"#;
        assert_eq!(sniff_lines(batch, true), Sniffed::Is(Format::OpenaiBatch));
        assert_eq!(sniff_lines(batch, false), Sniffed::More);
        assert_eq!(sniff_lines(b" \n\n", true), Sniffed::Is(Format::Jsonl));
        assert!(matches!(sniff_lines(b"[{\"a\":1}]", true), Sniffed::Neither(why) if why.contains("JSON list")));
        assert!(
            matches!(sniff_lines(b"a,b\n1,2\n", true), Sniffed::Neither(why) if why.contains("none of its 2 lines"))
        );
        assert!(matches!(sniff_lines(&b"x\n".repeat(100), false), Sniffed::Neither(why) if why.contains("first 64")));
    }
}
