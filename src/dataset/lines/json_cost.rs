//! Bounds the memory of a JSON line before the line is parsed: a list item of two bytes takes
//! seventy times as much once it is parsed.

use crate::dataset::row_memory::{ENTRY_BYTES, VALUE_BYTES};

/// Bytes per list item; the list's capacity may be twice its length.
const ITEM_BYTES: u64 = 2 * VALUE_BYTES;

/// Bytes per object entry and its value. They suffice even if the capacity of the object's table is
/// twice its length, so no factor 2 is needed.
const ENTRY_TOTAL_BYTES: u64 = VALUE_BYTES + ENTRY_BYTES;

/// Upper bound of the memory of the line's values, in bytes, from one pass over the line. A line
/// that is not JSON gets a number, too.
pub(crate) fn json_cost(line: &[u8]) -> u64 {
    let (mut items, mut entries, mut containers) = (0u64, 0u64, 1u64);
    let mut offset = 0;
    while let Some(&byte) = line.get(offset) {
        offset += 1;
        match byte {
            b'"' => offset += string_length(&line[offset..]),
            b',' => items += 1,
            b':' => entries += 1,
            b'[' | b'{' => containers += 1,
            _ => {}
        }
    }
    let nodes = items * ITEM_BYTES + entries * ENTRY_TOTAL_BYTES + containers * 2 * ITEM_BYTES;
    nodes + line.len() as u64
}

/// Bytes up to and including the quote that ends the string.
fn string_length(rest: &[u8]) -> usize {
    let mut offset = 0;
    while let Some(found) = memchr::memchr2(b'"', b'\\', &rest[offset.min(rest.len())..]) {
        offset += found;
        if rest[offset] == b'"' {
            return offset + 1;
        }
        // An escaped character never ends the string.
        offset += 2;
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_outside_of_texts() {
        let bare = json_cost(b"{}");
        assert_eq!(json_cost(br#"{"a":"[,,,:{\"[,"}"#), bare + 16 + ENTRY_TOTAL_BYTES);
        assert_eq!(json_cost(b"[0,0,0]"), bare + 5 + 2 * ITEM_BYTES);
        assert_eq!(json_cost(br#""\"#), json_cost(b"") + 2);
        let items = vec![b','; 1 << 20];
        assert!(json_cost(&items) > 170 << 20);
    }

    #[test]
    fn parsed_values_take_no_more_than_the_bound() {
        // A list of a million numbers: its values alone.
        let line = format!("[{}0]", "0,".repeat(1_000_000));
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let items = value.as_array().unwrap();
        assert!(json_cost(line.as_bytes()) >= (items.capacity() * size_of::<serde_json::Value>()) as u64);
        assert!(size_of::<serde_json::Value>() as u64 <= VALUE_BYTES);
    }
}
