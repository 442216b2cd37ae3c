//! Ids of files and batches. Their order by name is newest first, so that a listing of object
//! storage returns them in the order in which the API lists them.

use chrono::Utc;
use data_encoding::BASE32HEX_NOPAD;
use sha2::{Digest, Sha256};

use crate::ledger::LedgerError;

/// Prefix of the ids of files.
pub(super) const FILE: &str = "file-";
/// Prefix of the ids of batches.
pub(super) const BATCH: &str = "batch_";
/// Prefix of the ids of uploads in parts.
pub(super) const UPLOAD: &str = "upload_";
/// Prefix of the ids of their parts.
pub(super) const PART: &str = "part_";

/// Bytes of an id: 6 of time, 10 of randomness.
const ID_BYTES: usize = 16;
const TIME_BYTES: usize = 6;
/// Characters after the prefix.
const ID_CHARS: usize = 26;
/// Those of them that hold nothing but the time.
const TIME_CHARS: usize = 9;

/// A new id with this prefix.
///
/// # Errors
/// The operating system gives no random bytes.
pub(super) fn new_id(prefix: &str) -> Result<String, LedgerError> {
    id_at(prefix, Utc::now().timestamp_millis())
}

fn id_at(prefix: &str, milliseconds: i64) -> Result<String, LedgerError> {
    let mut bytes = [0; ID_BYTES];
    getrandom::fill(&mut bytes)
        .map_err(|error| LedgerError::stop(format!("the operating system gives no random bytes: {error}")))?;
    // Later times give smaller numbers. The upper two bytes of the time stay zero until the year
    // 10889.
    let inverted = u64::MAX - milliseconds.cast_unsigned();
    bytes[..TIME_BYTES].copy_from_slice(&inverted.to_be_bytes()[8 - TIME_BYTES..]);
    Ok(format!(
        "{prefix}{}",
        BASE32HEX_NOPAD.encode(&bytes).to_ascii_lowercase()
    ))
}

/// The id of a file that belongs to a batch, which everybody who knows the batch can compute. It has
/// the batch's time.
pub(super) fn file_of_batch(batch: &str, name: &str) -> String {
    let hash = Sha256::digest(format!("{batch} {name}"));
    let random = BASE32HEX_NOPAD.encode(&hash[..]).to_ascii_lowercase();
    let time = batch.strip_prefix(BATCH).unwrap_or(batch);
    let time: String = time.chars().take(TIME_CHARS).collect();
    format!("{FILE}{time}{}", &random[..ID_CHARS - TIME_CHARS])
}

/// Whether `text` has the form of an id with this prefix. Ids of requests become parts of keys, so
/// nothing else may pass.
pub(super) fn is_id(prefix: &str, text: &str) -> bool {
    text.strip_prefix(prefix).is_some_and(|rest| {
        rest.len() == ID_CHARS && rest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'v').contains(&b))
    })
}

/// The time at which an id was made, in seconds since 1970.
pub(super) fn seconds_of(id: &str) -> Option<i64> {
    let text = id.get(id.len().checked_sub(ID_CHARS)?..)?.to_ascii_uppercase();
    let bytes = BASE32HEX_NOPAD.decode(text.as_bytes()).ok()?;
    let mut time = [0xff; 8];
    time[8 - TIME_BYTES..].copy_from_slice(bytes.get(..TIME_BYTES)?);
    i64::try_from((u64::MAX - u64::from_be_bytes(time)) / 1_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_batch_have_ids_of_their_own() {
        let batch = new_id(BATCH).unwrap();
        let ids = ["output", "error"].map(|name| file_of_batch(&batch, name));
        assert!(ids.iter().all(|id| is_id(FILE, id)), "{ids:?}");
        assert_ne!(ids[0], ids[1]);
        assert_eq!(ids[0], file_of_batch(&batch, "output"));
    }

    #[test]
    fn later_ids_come_first() {
        let times = [
            0,
            1,
            1_000_000_000_000,
            1_764_000_000_000,
            1_764_000_000_001,
            9_000_000_000_000,
        ];
        let ids: Vec<String> = times.iter().map(|&at| id_at(FILE, at).unwrap()).collect();
        assert!(ids.windows(2).all(|pair| pair[1] < pair[0]), "{ids:?}");
        let seconds: Vec<_> = ids.iter().filter_map(|id| seconds_of(id)).collect();
        assert_eq!(seconds, times.map(|at| at / 1_000));
        assert_ne!(new_id(BATCH).unwrap(), new_id(BATCH).unwrap());
    }

    #[test]
    fn only_ids_are_ids() {
        let id = new_id(FILE).unwrap();
        assert!(is_id(FILE, &id), "{id}");
        assert!(!is_id(BATCH, &id));
        let upper = id.to_ascii_uppercase();
        for text in [
            "",
            "file-",
            "file-../../x",
            &id[..id.len() - 1],
            &format!("{id}0"),
            &upper,
        ] {
            assert!(!is_id(FILE, text), "{text}");
        }
    }
}
