//! Detects a file's format by its content.

use bytes::Bytes;

use super::arrow::footer::MAGIC;
use super::error::DatasetError;
use super::lines::compression::Codec;
use super::lines::cutter::{LINE_BYTES_MAX, is_blank, lines_of, strip_bom};
use super::lines::text_file::TextFile;
use super::plan::Format;
use super::store::pinned_file::PinnedFile;
use serde_json::{Map, Value};

/// Sizes of the head that is inspected, in bytes. A larger head is read only if the smaller one
/// does not show the format.
const HEAD_BYTES: [u64; 3] = [64 << 10, 1 << 20, LINE_BYTES_MAX as u64 + 1024];

/// Bytes of a Parquet file's head that are read: more than the longest magic number.
const MAGIC_BYTES: u64 = 16;

/// Maximum number of lines searched for a JSON object.
const LINES_MAX: usize = 64;

/// The file as a text file with its detected compression, and its format; `None` for an empty file,
/// which fits every format. `job_format`: the format that the job names.
pub async fn sniff(file: &PinnedFile, job_format: Option<Format>) -> Result<(TextFile, Option<Format>), DatasetError> {
    let mut text = TextFile::new(file.clone(), None);
    let is_named_parquet = match job_format {
        Some(format) => format == Format::Parquet,
        None => text.has_extension(&["parquet", "pq"]),
    };
    // A Parquet file is described by its footer, so its head is not needed.
    let head_bytes = if is_named_parquet { MAGIC_BYTES } else { HEAD_BYTES[0] };
    let stored_head = file.bytes(0..head_bytes.min(file.size)).await?;
    text.codec = Codec::of(&stored_head);
    let format = detect_format(&text, &stored_head, job_format, is_named_parquet).await?;
    Ok((text, format))
}

/// Refuses a Parquet file that is compressed as a whole.
fn check_not_compressed(text: &TextFile) -> Result<(), DatasetError> {
    let Some(codec) = text.codec else { return Ok(()) };
    let why = format!(
        "it is Parquet, compressed with {} as a whole; decompress it first",
        codec.as_str()
    );
    Err(DatasetError::unreadable(&text.file.name, why))
}

/// `stored_head`: the first bytes of the file, not decompressed. `is_named_parquet`: whether the
/// job or the file's name says Parquet.
async fn detect_format(
    text: &TextFile,
    stored_head: &Bytes,
    job_format: Option<Format>,
    is_named_parquet: bool,
) -> Result<Option<Format>, DatasetError> {
    let file = &text.file;
    let is_named = |format: Format, extensions: &[&str]| match job_format {
        Some(job_format) => job_format == format,
        None => text.has_extension(extensions),
    };
    let text_formats = [
        (Format::Text, &["txt", "text"][..]),
        (Format::Csv, &["csv", "tsv", "tab"]),
    ];
    let is_named_arrow = is_named(Format::Arrow, &["arrow", "feather", "ipc", "arrows"]);
    // An empty text file has no rows; an empty table file lacks its columns, which is an error.
    if file.size == 0 && !is_named_parquet && !is_named_arrow {
        return Ok(job_format);
    }
    for (n, &bytes) in HEAD_BYTES.iter().enumerate() {
        let head = if n == 0 && text.codec.is_none() {
            stored_head.clone()
        } else {
            text.read_head(bytes).await?
        };
        let named_text_format = text_formats
            .iter()
            .find(|(format, extensions)| is_named(*format, extensions));
        let named_text_format = named_text_format.map(|(format, _)| *format);
        if is_named_arrow || head.starts_with(b"ARROW1\0\0") {
            return check_arrow(text, &head, job_format).map(Some);
        }
        // A text may begin with `PARENT`, and JSON lines or CSV with `PAR1`.
        let is_text = match job_format {
            Some(format) => !format.is_table(),
            None => named_text_format.is_some() || text.has_extension(&["jsonl", "ndjson", "json"]),
        };
        let is_parquet = (head.starts_with(b"PARE") && named_text_format.is_none())
            || (head.starts_with(b"PAR1") && (!is_text || ends_as_parquet(text).await?));
        if is_named_parquet || is_parquet {
            check_not_compressed(text)?;
            return check_parquet(file, &head, job_format).map(Some);
        }
        if let Some(why) = unsupported_content(&head) {
            return Err(DatasetError::unreadable(&file.name, why));
        }
        if let Some(codec) = text.false_codec_extension().filter(|_| !is_text_so_far(&head)) {
            let why = format!(
                "its name ends in `.{codec}`, but it is neither compressed in that format nor text; was it written or copied completely?"
            );
            return Err(DatasetError::unreadable(&file.name, why));
        }
        if named_text_format.is_some() {
            return Ok(named_text_format);
        }
        let is_whole_file = (head.len() as u64) < bytes || (text.codec.is_none() && head.len() as u64 == file.size);
        match sniff_lines(&head, is_whole_file) {
            LinesFormat::Known(format) => return Ok(Some(job_format.unwrap_or(format))),
            LinesFormat::NeedsMoreBytes if n + 1 < HEAD_BYTES.len() => {}
            LinesFormat::NeedsMoreBytes if head.iter().all(|byte| *byte == 0) => {
                return Err(DatasetError::unreadable(
                    &file.name,
                    "it begins with 16 MB of zero bytes",
                ));
            }
            // The first line is longer than the limit; later lines are checked when they are read.
            LinesFormat::NeedsMoreBytes => return Ok(Some(job_format.unwrap_or(Format::Jsonl))),
            LinesFormat::Unknown(_) if job_format.is_some() => return Ok(job_format),
            LinesFormat::Unknown(why) => return Err(DatasetError::unreadable(&file.name, why)),
        }
    }
    Ok(job_format.or(Some(Format::Jsonl)))
}

/// Whether the file ends with Parquet's magic number; a text that begins with `PAR1` does not.
/// A compressed file is taken for Parquet without a look at its end.
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

/// Checks a file that is Parquet by its content, its name or the job.
fn check_parquet(file: &PinnedFile, head: &[u8], job_format: Option<Format>) -> Result<Format, DatasetError> {
    let unreadable = |why: String| Err(DatasetError::unreadable(&file.name, why));
    match (head.get(..4), job_format) {
        (Some(b"PARE"), _) => unreadable("it is encrypted Parquet, which is not supported".into()),
        (Some(b"PAR1"), None | Some(Format::Parquet)) => Ok(Format::Parquet),
        (Some(b"PAR1"), Some(format)) => unreadable(format!("it is Parquet, and the job says {}", format.as_str())),
        _ if head.is_empty() => unreadable("it is empty (0 bytes), which is no Parquet file".into()),
        _ => unreadable("it is no Parquet file: it does not begin with `PAR1`".into()),
    }
}

/// Checks a file that is Arrow by its content, its name or the job.
fn check_arrow(text: &TextFile, head: &[u8], job_format: Option<Format>) -> Result<Format, DatasetError> {
    let unreadable = |why: String| Err(DatasetError::unreadable(&text.file.name, why));
    match (text.codec, job_format) {
        (Some(codec), _) => unreadable(format!(
            "it is Arrow, compressed with {} as a whole; decompress it first",
            codec.as_str()
        )),
        (None, Some(format)) if format != Format::Arrow => {
            unreadable(format!("it is Arrow, and the job says {}", format.as_str()))
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

/// The reason why a file that begins like this cannot be read; `None` if it may be text.
fn unsupported_content(head: &[u8]) -> Option<&'static str> {
    const MAGIC_NUMBERS: [(&[u8], &str); 6] = [
        (
            b"\x1f\x8b",
            "it is compressed with gzip twice, or by a method that is not supported; decompress it first",
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
    let known = MAGIC_NUMBERS.iter().find(|(magic, _)| head.starts_with(magic));
    match (known, head.first_chunk::<4>()) {
        (Some((_, why)), _) => Some(why),
        // Every second byte of the first characters is zero: UTF-16 without a byte order mark.
        (None, Some([1..=255, 0, 1..=255, 0] | [0, 1..=255, 0, 1..=255])) => Some(UTF_16),
        _ => None,
    }
}

/// The format that the first lines show.
#[derive(Debug, PartialEq, Eq)]
enum LinesFormat {
    Known(Format),
    NeedsMoreBytes,
    /// Neither JSON lines nor OpenAI batch lines, for this reason.
    Unknown(String),
}

fn sniff_lines(head: &[u8], is_whole_file: bool) -> LinesFormat {
    let mut lines_seen = 0;
    let mut first_byte = None;
    for (range, line) in lines_of(head) {
        let line = if range.start == 0 { strip_bom(line) } else { line };
        if is_blank(line) {
            continue;
        }
        let is_complete = is_whole_file || head[range].ends_with(b"\n");
        if !is_complete {
            break;
        }
        first_byte.get_or_insert(line.trim_ascii_start()[0]);
        if let Ok(object) = serde_json::from_slice::<Map<String, Value>>(line) {
            let is_batch = ["custom_id", "method", "url", "body"]
                .iter()
                .all(|key| object.contains_key(*key));
            return LinesFormat::Known(if is_batch { Format::OpenaiBatch } else { Format::Jsonl });
        }
        lines_seen += 1;
        if lines_seen == LINES_MAX {
            break;
        }
    }
    match (first_byte, lines_seen) {
        (Some(b'['), _) => LinesFormat::Unknown("it is a JSON list, not JSON lines: write one object a line".into()),
        (_, 0) if is_whole_file => LinesFormat::Known(Format::Jsonl), // nothing but blank lines: no rows
        (_, LINES_MAX) => LinesFormat::Unknown(format!(
            "it is neither Parquet nor JSON lines: none of its first {LINES_MAX} lines is a JSON object"
        )),
        (_, lines_seen) if is_whole_file => LinesFormat::Unknown(format!(
            "it is neither Parquet nor JSON lines: none of its {lines_seen} lines is a JSON object"
        )),
        _ => LinesFormat::NeedsMoreBytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_readable_object_decides() {
        assert_eq!(
            sniff_lines(b"\xef\xbb\xbf\n{\"a\":1}\n", true),
            LinesFormat::Known(Format::Jsonl)
        );
        assert_eq!(
            sniff_lines(b"{broken\n{\"a\":1}", true),
            LinesFormat::Known(Format::Jsonl)
        );
        let batch = br#"{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{}}"#;
        assert_eq!(sniff_lines(batch, true), LinesFormat::Known(Format::OpenaiBatch));
        assert_eq!(sniff_lines(batch, false), LinesFormat::NeedsMoreBytes);
        assert_eq!(sniff_lines(b" \n\n", true), LinesFormat::Known(Format::Jsonl));
        assert!(matches!(sniff_lines(b"[{\"a\":1}]", true), LinesFormat::Unknown(why) if why.contains("JSON list")));
        assert!(
            matches!(sniff_lines(b"a,b\n1,2\n", true), LinesFormat::Unknown(why) if why.contains("none of its 2 lines"))
        );
        assert!(
            matches!(sniff_lines(&b"x\n".repeat(100), false), LinesFormat::Unknown(why) if why.contains("first 64"))
        );
    }
}
