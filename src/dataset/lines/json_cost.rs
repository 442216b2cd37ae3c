//! Memory cost of a JSON line, counted before it is parsed: list items of two bytes take seventy
//! times as much once parsed.

use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Bytes per list item; the list's capacity may be twice its length.
const ITEM_BYTES: u64 = 2 * VALUE_BYTES;

/// Bytes per object entry; the table's capacity may be twice its length.
const NAMED_BYTES: u64 = VALUE_BYTES + ENTRY_BYTES;

/// Upper bound of the memory of `line`'s values, in one pass over the bytes. Lines that are not
/// JSON also get a number.
pub(crate) fn json_cost(line: &[u8]) -> u64 {
    let (mut items, mut entries, mut groups) = (0u64, 0u64, 1u64);
    let mut at = 0;
    while let Some(&byte) = line.get(at) {
        at += 1;
        match byte {
            b'"' => at += string_length(&line[at..]),
            b',' => items += 1,
            b':' => entries += 1,
            b'[' | b'{' => groups += 1,
            _ => {}
        }
    }
    let nodes = items * ITEM_BYTES + entries * NAMED_BYTES + groups * 2 * ITEM_BYTES;
    nodes + line.len() as u64
}

/// Bytes up to the string's end, its quote included.
fn string_length(rest: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = memchr::memchr2(b'"', b'\\', &rest[at.min(rest.len())..]) {
        at += found;
        if rest[at] == b'"' {
            return at + 1;
        }
        // An escaped character never ends the string.
        at += 2;
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_outside_of_texts() {
        let bare = json_cost(b"{}");
        assert_eq!(json_cost(br#"{"a":"[,,,:{\"[,"}"#), bare + 16 + NAMED_BYTES);
        assert_eq!(json_cost(b"[0,0,0]"), bare + 5 + 2 * ITEM_BYTES);
        assert_eq!(json_cost(br#""\"#), json_cost(b"") + 2);
        let items = vec![b','; 1 << 20];
        assert!(json_cost(&items) > 170 << 20);
    }

    #[test]
    fn what_is_parsed_takes_no_more() {
        // A list of a million numbers: its values alone.
        let line = format!("[{}0]", "0,".repeat(1_000_000));
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let items = value.as_array().unwrap();
        assert!(json_cost(line.as_bytes()) >= (items.capacity() * size_of::<serde_json::Value>()) as u64);
        assert!(size_of::<serde_json::Value>() as u64 <= VALUE_BYTES);
    }
}
