//! The header of a GGUF file: its metadata, and where its tensors lie.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::Problem;
use super::cursor::Cursor;
use super::formats::Format;
use crate::printable::printable_name;

const MAGIC: &[u8; 4] = b"GGUF";
/// The versions that are read. The first had lengths of 32 bits.
const VERSIONS: [u32; 2] = [2, 3];
/// Maximum number of a file's keys. The largest known files have some 60.
const KEYS_MAX: u64 = 1 << 16;
/// Maximum number of a file's tensors.
const TENSORS_MAX: u64 = 1 << 17;
/// Maximum number of a list's elements. The largest known list has 600,000: merges of a vocabulary.
const LIST_MAX: u64 = 1 << 22;
/// Maximum number of all lists' elements together.
const ELEMENTS_MAX: usize = 1 << 23;
/// Maximum length of a name in bytes.
const NAME_BYTES_MAX: usize = 512;
const DIMENSIONS_MAX: usize = 4;
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

/// A key's value, with the bytes that it was read from.
#[derive(Debug, Clone, PartialEq)]
struct Entry {
    value: Value,
    bytes: Range<usize>,
}

/// Where a tensor lies, and what it is.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    pub name: String,
    /// As elsewhere: the last one's numbers are neighbours. (The file lists them the other way round.)
    pub shape: Vec<usize>,
    pub format: Format,
    /// Of the whole file.
    pub bytes: Range<usize>,
}

/// The header of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    entries: BTreeMap<String, Entry>,
    /// In the file's order.
    pub tensors: Vec<StoredTensor>,
}

impl Value {
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn list(&self) -> Option<&[Value]> {
        match self {
            Value::List(list) => Some(list),
            _ => None,
        }
    }

    /// A whole number that is not negative.
    pub fn whole(&self) -> Option<u64> {
        match self {
            Value::Unsigned(number) => Some(*number),
            Value::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Unsigned(number) => Some(*number as f64),
            Value::Signed(number) => Some(*number as f64),
            Value::Float(number) => Some(*number),
            _ => None,
        }
    }

    pub fn flag(&self) -> Option<bool> {
        match self {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        }
    }
}

impl Header {
    /// Reads the header of a file of these bytes.
    ///
    /// # Errors
    /// They are no GGUF file, or one of another version, or with numbers in a format that is not read, or
    /// what the header says does not fit the file.
    pub fn parse(bytes: &[u8]) -> Result<Header, Problem> {
        let mut cursor = Cursor::new(bytes);
        if cursor.take(4, "its first four bytes")? != MAGIC {
            return Err(Problem::Broken("it does not begin as a GGUF file does".into()));
        }
        let version = cursor.u32("its version")?;
        if version.swap_bytes() <= 0xffff && version > 0xffff {
            return Err(Problem::Unsupported(
                "it is a GGUF file of a machine that writes the highest byte first, which is not read".into(),
            ));
        }
        if !VERSIONS.contains(&version) {
            return Err(Problem::Unsupported(format!(
                "it is a GGUF file of version {version}, and versions 2 and 3 are read"
            )));
        }
        // A tensor has at least a name's length, dimensions, a format and an offset.
        let tensors = cursor.count(TENSORS_MAX, 24, "the number of tensors")?;
        let keys = cursor.count(KEYS_MAX, 13, "the number of keys")?;
        let mut elements_left = ELEMENTS_MAX;
        let mut entries = BTreeMap::new();
        for _ in 0..keys {
            let name = name(&mut cursor, "a key's name")?;
            let start = cursor.at;
            let what = format!("`{}`", printable_name(&name));
            let kind = cursor.u32(&what)?;
            let value = read_value(&mut cursor, kind, &what, &mut elements_left)?;
            let bytes = start..cursor.at;
            if entries.insert(name, Entry { value, bytes }).is_some() {
                return Err(Problem::Broken(format!("it has {what} twice")));
            }
        }
        let mut header = Header {
            entries,
            tensors: Vec::with_capacity(tensors),
        };
        let alignment = header.alignment()?;
        let mut offsets = Vec::with_capacity(tensors);
        for _ in 0..tensors {
            let (tensor, offset) = read_tensor(&mut cursor, alignment)?;
            header.tensors.push(tensor);
            offsets.push(offset);
        }
        let start = (cursor.at as u64).next_multiple_of(alignment);
        header.place(&offsets, start, bytes.len() as u64)?;
        Ok(header)
    }

    /// Where tensors begin is a multiple of this.
    fn alignment(&self) -> Result<u64, Problem> {
        let Some(value) = self.get(ALIGNMENT) else {
            return Ok(DEFAULT_ALIGNMENT);
        };
        let alignment = value.whole().filter(|n| n.is_power_of_two() && (*n <= ALIGNMENT_MAX));
        alignment.ok_or_else(|| {
            Problem::Broken(format!(
                "`{ALIGNMENT}` is {value:?}, not a power of two up to {ALIGNMENT_MAX}"
            ))
        })
    }

    /// Checks that tensors lie within the file, behind the header, and not in one another.
    fn place(&mut self, offsets: &[u64], start: u64, file_bytes: u64) -> Result<(), Problem> {
        let mut names = HashSet::new();
        for (tensor, offset) in self.tensors.iter_mut().zip(offsets) {
            let what = printable_name(&tensor.name);
            if !names.insert(tensor.name.clone()) {
                return Err(Problem::Broken(format!("it has the tensor `{what}` twice")));
            }
            let begin = start.saturating_add(*offset);
            let end = begin.saturating_add(tensor.bytes.len() as u64);
            if end > file_bytes {
                return Err(Problem::Broken(format!(
                    "tensor `{what}` ends at byte {end}, and the file has {file_bytes}: if its copy or download was cut off, fetch \
                     it again"
                )));
            }
            // Both are at most the length of a slice.
            tensor.bytes = begin as usize..end as usize;
        }
        let mut order: Vec<&StoredTensor> = self.tensors.iter().filter(|t| !t.bytes.is_empty()).collect();
        order.sort_by_key(|tensor| tensor.bytes.start);
        match order.windows(2).find(|pair| pair[0].bytes.end > pair[1].bytes.start) {
            Some(pair) => Err(Problem::Broken(format!(
                "tensors `{}` and `{}` lie in one another",
                printable_name(&pair[0].name),
                printable_name(&pair[1].name)
            ))),
            None => Ok(()),
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// All keys, ascending.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, entry)| (key.as_str(), &entry.value))
    }

    /// Where the values of all keys that begin with `prefix` lie in the file, each with its key.
    pub fn places(&self, prefix: &str) -> impl Iterator<Item = (&str, Range<usize>)> {
        let of_prefix = self.entries.iter().filter(move |(key, _)| key.starts_with(prefix));
        of_prefix.map(|(key, entry)| (key.as_str(), entry.bytes.clone()))
    }

    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn name(cursor: &mut Cursor<'_>, what: &str) -> Result<String, Problem> {
    let at = cursor.at;
    let name = cursor.text(what)?;
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(Problem::Broken(format!(
            "{what} at byte {at} has {} bytes, and 1 to {NAME_BYTES_MAX} are expected",
            name.len()
        )));
    }
    Ok(name)
}

/// The kind of lists, and the bytes that a value of each kind takes at least.
const LIST: u32 = 9;
const VALUE_BYTES: [usize; 13] = [1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8];

fn read_value(cursor: &mut Cursor<'_>, kind: u32, what: &str, elements_left: &mut usize) -> Result<Value, Problem> {
    if kind != LIST {
        return read_single(cursor, kind, what);
    }
    let kind = cursor.u32(what)?;
    let size = VALUE_BYTES.get(kind as usize).filter(|_| kind != LIST);
    let Some(size) = size else {
        return Err(Problem::Broken(format!(
            "{what} is a list of values of the kind {kind}"
        )));
    };
    let count = cursor.count(LIST_MAX, *size, &format!("the length of {what}"))?;
    let Some(left) = elements_left.checked_sub(count) else {
        return Err(Problem::Broken(format!(
            "its lists have more than {ELEMENTS_MAX} elements together"
        )));
    };
    *elements_left = left;
    (0..count)
        .map(|_| read_single(cursor, kind, what))
        .collect::<Result<_, _>>()
        .map(Value::List)
}

fn read_single(cursor: &mut Cursor<'_>, kind: u32, what: &str) -> Result<Value, Problem> {
    Ok(match kind {
        0 => Value::Unsigned(cursor.u8(what)?.into()),
        1 => Value::Signed(cursor.u8(what)?.cast_signed().into()),
        2 => Value::Unsigned(cursor.u16(what)?.into()),
        3 => Value::Signed(cursor.u16(what)?.cast_signed().into()),
        4 => Value::Unsigned(cursor.u32(what)?.into()),
        5 => Value::Signed(cursor.u32(what)?.cast_signed().into()),
        6 => Value::Float(shortest(f32::from_bits(cursor.u32(what)?))),
        7 => match cursor.u8(what)? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => {
                return Err(Problem::Broken(format!(
                    "{what} is {other}, neither false (0) nor true (1)"
                )));
            }
        },
        8 => Value::Text(cursor.text(what)?),
        10 => Value::Unsigned(cursor.u64(what)?),
        11 => Value::Signed(cursor.u64(what)?.cast_signed()),
        12 => Value::Float(f64::from_bits(cursor.u64(what)?)),
        _ => {
            return Err(Problem::Broken(format!(
                "{what} is a value of the kind {kind}, which is none"
            )));
        }
    })
}

/// The number with the fewest digits that F32 rounds to `number`: the one that was written in
/// decimal, as in `config.json`.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// A tensor whose bytes are counted from 0, and the offset of its first one.
fn read_tensor(cursor: &mut Cursor<'_>, alignment: u64) -> Result<(StoredTensor, u64), Problem> {
    let name = name(cursor, "a tensor's name")?;
    let what = format!("tensor `{}`", printable_name(&name));
    let broken = |why: String| Problem::Broken(format!("{what} {why}"));
    let dimensions = cursor.u32(&what)? as usize;
    if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
        return Err(broken(format!(
            "has {dimensions} dimensions, and 1 to {DIMENSIONS_MAX} are expected"
        )));
    }
    let mut shape = Vec::with_capacity(dimensions);
    let mut numbers = 1usize;
    for _ in 0..dimensions {
        let size = usize::try_from(cursor.u64(&what)?).ok().filter(|size| *size > 0);
        let product = size.and_then(|size| Some((size, numbers.checked_mul(size)?)));
        let Some((size, product)) = product else {
            return Err(broken("has no size that a tensor can have".into()));
        };
        numbers = product;
        shape.insert(0, size);
    }
    let format = Format::of(cursor.u32(&what)?).map_err(|why| Problem::Unsupported(format!("{what} {why}")))?;
    let columns = shape[dimensions - 1];
    let (block, _) = format.block();
    if !columns.is_multiple_of(block) {
        return Err(broken(format!(
            "is stored as {}, in blocks of {block} numbers, and has rows of {columns}",
            format.name()
        )));
    }
    let bytes = format
        .bytes(numbers)
        .ok_or_else(|| broken("is larger than any file".into()))?;
    let offset = cursor.u64(&what)?;
    if !offset.is_multiple_of(alignment) {
        return Err(broken(format!(
            "begins at {offset}, which is no multiple of {alignment}"
        )));
    }
    let tensor = StoredTensor {
        name,
        shape,
        format,
        bytes: 0..bytes,
    };
    Ok((tensor, offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::{Writer, text};

    fn refused(bytes: &[u8]) -> String {
        let problem = Header::parse(bytes).expect_err("it is read");
        assert!(!problem.message().contains('\n'), "{problem:?}");
        problem.message().to_owned()
    }

    fn small() -> Writer {
        let mut writer = Writer::new(3);
        writer.key("general.architecture", 8, &text("llama"));
        writer.key("llama.block_count", 4, &7u32.to_le_bytes());
        writer.key("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes());
        writer.tensor("a.weight", &[4, 2], 0, &[1; 32]);
        writer.tensor("b", &[32], 8, &[2; 34]);
        writer
    }

    #[test]
    fn keys_and_tensors_are_read() {
        for version in [2, 3] {
            let mut writer = small();
            writer.version = version;
            let bytes = writer.bytes();
            let header = Header::parse(&bytes).unwrap();
            assert_eq!(header.get("general.architecture"), Some(&Value::Text("llama".into())));
            assert_eq!(header.get("llama.block_count"), Some(&Value::Unsigned(7)));
            let epsilon = header.get("llama.attention.layer_norm_rms_epsilon");
            assert_eq!(epsilon, Some(&Value::Float(1e-5)), "the number that was written");
            let [a, b] = &header.tensors[..] else { panic!("two") };
            assert_eq!((&a.shape[..], a.format), (&[2, 4][..], Format::F32));
            assert_eq!((&b.shape[..], b.format), (&[32][..], Format::Q8_0));
            assert!(bytes[a.bytes.clone()].iter().all(|byte| *byte == 1) && a.bytes.len() == 32);
            assert!(bytes[b.bytes.clone()].iter().all(|byte| *byte == 2) && b.bytes.len() == 34);
            assert_eq!((a.bytes.start % 32, b.bytes.start % 32), (0, 0));
            assert_eq!(header.tensor("b").unwrap().name, "b");
        }
    }

    #[test]
    fn every_kind_of_value_is_read() {
        let mut writer = Writer::new(3);
        let single: [(u32, &[u8], Value); 12] = [
            (0, &[200], Value::Unsigned(200)),
            (1, &[200], Value::Signed(-56)),
            (2, &[1, 200], Value::Unsigned(51201)),
            (3, &[1, 200], Value::Signed(-14335)),
            (4, &[1, 0, 0, 200], Value::Unsigned(3_355_443_201)),
            (5, &[255; 4], Value::Signed(-1)),
            (6, &0.1f32.to_le_bytes(), Value::Float(0.1)),
            (7, &[1], Value::Bool(true)),
            (8, &text("é"), Value::Text("é".into())),
            (10, &[255; 8], Value::Unsigned(u64::MAX)),
            (11, &[255; 8], Value::Signed(-1)),
            (12, &0.1f64.to_le_bytes(), Value::Float(0.1)),
        ];
        for (kind, bytes, _) in &single {
            writer.key(&format!("k{kind}"), *kind, bytes);
            let list = [&kind.to_le_bytes()[..], &2u64.to_le_bytes(), bytes, bytes].concat();
            writer.key(&format!("list{kind}"), LIST, &list);
        }
        let bytes = writer.bytes();
        let header = Header::parse(&bytes).unwrap();
        for (kind, _, value) in single {
            assert_eq!(header.get(&format!("k{kind}")), Some(&value), "{kind}");
            let list = header.get(&format!("list{kind}")).unwrap();
            assert_eq!(list.list().unwrap(), [value.clone(), value], "{kind}");
        }
        let (key, place) = header.places("k8").next().unwrap();
        assert_eq!((key, &bytes[place][4..]), ("k8", &text("é")[..]));
        assert_eq!(Value::Unsigned(3).number(), Some(3.0));
        assert_eq!((Value::Signed(-3).whole(), Value::Signed(3).whole()), (None, Some(3)));
    }

    #[test]
    fn a_file_cut_at_any_byte_is_refused() {
        let whole = small().bytes();
        for length in 0..whole.len() {
            let why = refused(&whole[..length]);
            assert!(why.contains("cut off") || why.contains("can hold"), "{length}: {why}");
        }
        Header::parse(&whole).unwrap();
    }

    /// Whatever a byte becomes, reading ends without a panic.
    #[test]
    fn a_file_with_a_changed_byte_is_read_or_refused() {
        let whole = small().bytes();
        for at in 0..whole.len() {
            for to in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = to;
                if let Err(problem) = Header::parse(&bytes) {
                    assert!(!problem.message().contains('\n'), "{problem:?}");
                }
            }
        }
    }

    #[test]
    fn other_versions_and_formats_are_named() {
        assert!(refused(b"GGUF\x01\0\0\0________").contains("version 1"));
        assert!(refused(b"GGUF\0\0\0\x03________").contains("highest byte first"));
        assert!(refused(b"PK\x03\x04________").contains("does not begin as a GGUF file"));
        for (id, name) in [
            (16, "IQ2_XXS"),
            (19, "IQ1_S"),
            (34, "TQ1_0"),
            (31, "Q4_0_4_4"),
            (26, "I32"),
        ] {
            let mut writer = Writer::new(3);
            writer.tensor("x", &[256], id, &[0; 256]);
            let why = refused(&writer.bytes());
            assert!(why.contains("tensor `x`") && why.contains(name), "{why}");
        }
        let mut writer = Writer::new(3);
        writer.tensor("x", &[256], 99, &[0; 256]);
        assert!(refused(&writer.bytes()).contains("a format of the number 99"));
    }

    #[test]
    fn sizes_that_cannot_be_are_not_believed() {
        let of = |change: &dyn Fn(&mut Writer)| {
            let mut writer = small();
            change(&mut writer);
            refused(&writer.bytes())
        };
        let key = |kind: u32, bytes: &[u8]| of(&|writer| writer.key("k", kind, bytes));
        let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
        assert!(key(8, &u64::MAX.to_le_bytes()).contains("the length of `k` is 18446744073709551615"));
        assert!(key(8, &(1u64 << 20).to_le_bytes()).contains("can hold"));
        assert!(key(9, &list(0, u64::MAX)).contains("more than 4194304"));
        assert!(key(9, &list(8, 1 << 20)).contains("can hold"));
        assert!(key(9, &list(9, 1)).contains("a list of values of the kind 9"));
        assert!(key(9, &list(13, 1)).contains("of the kind 13"));
        assert!(key(13, &[]).contains("a value of the kind 13"));
        assert!(key(7, &[2]).contains("neither false"));
        assert!(key(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).contains("not UTF-8"));
        let alignment = |n: u32| of(&|writer| writer.key("general.alignment", 4, &n.to_le_bytes()));
        for n in [0, 3, 24, 1 << 21] {
            assert!(alignment(n).contains("not a power of two"), "{n}");
        }
        assert!(of(&|writer| writer.key("llama.block_count", 4, &[0; 4])).contains("`llama.block_count` twice"));
        assert!(of(&|writer| writer.key("", 4, &[0; 4])).contains("a key's name"));
        assert!(of(&|writer| writer.key(&"k".repeat(600), 4, &[0; 4])).contains("600 bytes"));
        assert!(of(&|writer| writer.tensor("b", &[32], 8, &[2; 34])).contains("tensor `b` twice"));
        assert!(of(&|writer| writer.tensor("c", &[33], 8, &[2; 34])).contains("rows of 33"));
        assert!(of(&|writer| writer.tensor("c", &[0], 0, &[])).contains("no size"));
        assert!(of(&|writer| writer.tensor("c", &[u64::MAX, 4], 0, &[])).contains("no size"));
        assert!(of(&|writer| writer.tensor("c", &[1 << 61], 0, &[])).contains("larger than any"));
        assert!(of(&|writer| writer.tensor("c", &[1 << 40], 0, &[0; 4])).contains("and the file has"));
        assert!(of(&|writer| writer.tensor("c", &[1; 5], 0, &[0; 4])).contains("5 dimensions"));
        assert!(of(&|writer| writer.tensor("c", &[], 0, &[0; 4])).contains("0 dimensions"));
        assert!(of(&|writer| writer.tensor_at("c", 5, 4)).contains("no multiple of 32"));
        assert!(of(&|writer| writer.tensor_at("c", 32, 4)).contains("lie in one another"));
        assert!(of(&|writer| writer.tensor_at("c", u64::MAX - 31, 4)).contains("and the file has"));
    }

    #[test]
    fn counts_are_bounded() {
        let head = |tensors: u64, keys: u64| {
            let bytes = [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &keys.to_le_bytes()].concat();
            refused(&[bytes, vec![0; 64]].concat())
        };
        assert!(head(u64::MAX, 0).contains("the number of tensors is 18446744073709551615"));
        assert!(head(1000, 0).contains("can hold"));
        assert!(head(0, 1 << 40).contains("the number of keys"));
        let mut writer = Writer::new(3);
        let list = [&0u32.to_le_bytes()[..], &(1u64 << 22).to_le_bytes(), &vec![0; 1 << 22]].concat();
        for key in ["a", "b", "c"] {
            writer.key(key, LIST, &list);
        }
        assert!(refused(&writer.bytes()).contains("elements together"));
    }
}
