//! Detects a file's format by its content.

use bytes::Bytes;

use super::arrow::footer::MAGIC;
use super::error::DatasetError;
use super::lines::compression::Codec;
use super::lines::cutter::{LINE_BYTES_MAX, is_blank, lines_of, strip_bom};
use super::lines::text_file::TextFile;
use super::plan::Format;
use super::store::pinned::PinnedFile;
use serde_json::{Map, Value};

/// Bytes of a file's head that are read, in steps: more only if the first line is longer.
const HEAD_BYTES: [u64; 3] = [64 << 10, 1 << 20, LINE_BYTES_MAX as u64 + 1024];

/// More than the longest magic number of any format.
const MAGIC_BYTES: u64 = 16;

/// Maximum number of lines searched for a JSON object.
const LINES_MAX: usize = 64;

/// The bytes of `file` as text, and their format; `None` for an empty file, which fits every
/// format. `told`: the format that the job names.
pub async fn sniff(file: &PinnedFile, told: Option<Format>) -> Result<(TextFile, Option<Format>), DatasetError> {
    let wants_parquet =
        |text: &TextFile| told == Some(Format::Parquet) || (told.is_none() && text.is_named(&["parquet", "pq"]));
    let mut text = TextFile::new(file.clone(), None);
    // The footer decides about a Parquet file.
    let first = if wants_parquet(&text) {
        MAGIC_BYTES
    } else {
        HEAD_BYTES[0]
    };
    let first = file.bytes(0..first.min(file.size)).await?;
    text.codec = Codec::of(&first);
    let format = format_of(&text, &first, told, wants_parquet(&text)).await?;
    Ok((text, format))
}

/// `first`: the stored bytes that the file begins with.
#[expect(clippy::too_many_lines, reason = "one order of guesses")]
async fn format_of(
    text: &TextFile,
    first: &Bytes,
    told: Option<Format>,
    wants_parquet: bool,
) -> Result<Option<Format>, DatasetError> {
    let file = &text.file;
    let wants_arrow = match told {
        Some(told) => told == Format::Arrow,
        None => text.is_named(&["arrow", "feather", "ipc", "arrows"]),
    };
    // An empty text file has no rows; an empty table file lacks its columns, which is an error.
    if file.size == 0 && !wants_parquet && !wants_arrow {
        return Ok(told);
    }
    for (n, &bytes) in HEAD_BYTES.iter().enumerate() {
        let head = if n == 0 && text.codec.is_none() {
            first.clone()
        } else {
            text.head(bytes).await?
        };
        let named = |format: Format, extensions: &[&str]| match told {
            Some(told) => told == format,
            None => text.is_named(extensions),
        };
        let format = if named(Format::Text, &["txt", "text"]) {
            Some(Format::Text)
        } else if named(Format::Csv, &["csv", "tsv", "tab"]) {
            Some(Format::Csv)
        } else {
            None
        };
        if wants_arrow || head.starts_with(b"ARROW1\0\0") {
            return arrow(text, &head, told).map(Some);
        }
        // A text may begin with `PARENT`, and JSON lines or CSV with `PAR1`.
        let is_text = match told {
            Some(told) => !told.is_table(),
            None => format.is_some() || text.is_named(&["jsonl", "ndjson", "json"]),
        };
        let begins = |magic: &[u8]| head.starts_with(magic);
        let is_parquet =
            (begins(b"PARE") && format.is_none()) || (begins(b"PAR1") && (!is_text || ends_as_parquet(text).await?));
        if wants_parquet || is_parquet {
            if let Some(codec) = text.codec {
                let why = format!(
                    "it is Parquet, compressed with {} as a whole; decompress it first",
                    codec.as_str()
                );
                return Err(DatasetError::unreadable(&file.name, why));
            }
            return parquet(file, &head, told).map(Some);
        }
        if let Some(why) = unreadable_magic(&head) {
            return Err(DatasetError::unreadable(&file.name, why));
        }
        if let Some(codec) = text.named_codec().filter(|_| !is_text_so_far(&head)) {
            let why = format!(
                "its name ends in `.{codec}`, and it is neither compressed so nor text; was it written or copied whole?"
            );
            return Err(DatasetError::unreadable(&file.name, why));
        }
        if format.is_some() {
            return Ok(format);
        }
        let whole = (head.len() as u64) < bytes || (text.codec.is_none() && head.len() as u64 == file.size);
        match sniff_lines(&head, whole) {
            Sniffed::Is(format) => return Ok(Some(told.unwrap_or(format))),
            Sniffed::More if n + 1 < HEAD_BYTES.len() => {}
            Sniffed::More if head.iter().all(|byte| *byte == 0) => {
                return Err(DatasetError::unreadable(
                    &file.name,
                    "it begins with 16 MB of zero bytes",
                ));
            }
            // The first line is longer than the limit; later lines are checked when they are read.
            Sniffed::More => return Ok(Some(told.unwrap_or(Format::Jsonl))),
            Sniffed::Neither(_) if told.is_some() => return Ok(told),
            Sniffed::Neither(why) => return Err(DatasetError::unreadable(&file.name, why)),
        }
    }
    Ok(told.or(Some(Format::Jsonl)))
}

/// Whether the file ends with Parquet's magic. A text that begins with it by chance ends
/// differently.
async fn ends_as_parquet(text: &TextFile) -> Result<bool, DatasetError> {
    let file = &text.file;
    let last = file.size.saturating_sub(4)..file.size;
    Ok(text.codec.is_some() || &file.bytes(last).await?[..] == b"PAR1")
}

/// Whether the head is UTF-8 without zero bytes; its last character may be cut.
fn is_text_so_far(head: &[u8]) -> bool {
    let valid = std::str::from_utf8(head).map_or_else(|e| e.error_len().is_none(), |_| true);
    valid && !head.contains(&0)
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

/// Handles a file that is Arrow by content, by name or by the job's settings.
fn arrow(text: &TextFile, head: &[u8], told: Option<Format>) -> Result<Format, DatasetError> {
    let unreadable = |why: String| Err(DatasetError::unreadable(&text.file.name, why));
    match (text.codec, told) {
        (Some(codec), _) => unreadable(format!(
            "it is Arrow, compressed with {} as a whole; decompress it first",
            codec.as_str()
        )),
        (None, Some(told)) if told != Format::Arrow => {
            unreadable(format!("it is Arrow, and the job says {}", told.as_str()))
        }
        _ if head.starts_with(MAGIC) => Ok(Format::Arrow),
        _ if head.is_empty() => unreadable("it is empty (0 bytes), which is no Arrow file".into()),
        // An Arrow stream begins with a continuation marker.
        _ if head.starts_with(&[0xff; 4]) => unreadable(
            "it is a stream of Arrow messages, which has no footer; write it as a file (pyarrow: `ipc.new_file` or `feather.write_feather`)".into(),
        ),
        _ if head.starts_with(b"FEA1") => {
            unreadable("it is Feather V1; write it as Feather V2 (pyarrow: `write_feather`, without `version=1`)".into())
        }
        _ => unreadable("it is no Arrow file: it does not begin with `ARROW1`".into()),
    }
}

const UTF_16: &str = "it is UTF-16 text; convert it to UTF-8 (`iconv -f UTF-16 -t UTF-8`)";

fn unreadable_magic(head: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 6] = [
        (
            b"\x1f\x8b",
            "it is compressed with gzip, in another way or twice; decompress it first",
        ),
        (
            b"\x28\xb5\x2f\xfd",
            "it is compressed twice, with zstd last; decompress it first",
        ),
        (b"\xfd7zXZ", "it is compressed with xz; decompress it first"),
        (b"PK\x03\x04", "it is a zip archive; unpack it first"),
        (b"\xff\xfe", UTF_16),
        (b"\xfe\xff", UTF_16),
    ];
    let known = MAGIC.iter().find(|(magic, _)| head.starts_with(magic));
    match (known, head.first_chunk::<4>()) {
        (Some((_, why)), _) => Some(why),
        // Every second byte of the first characters is zero.
        (None, Some([1..=255, 0, 1..=255, 0] | [0, 1..=255, 0, 1..=255])) => Some(UTF_16),
        _ => None,
    }
}

/// Result of inspecting the first lines.
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
