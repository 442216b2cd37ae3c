//! Writes GGUF files for tests, also such as no program writes.

/// A text as files store it.
pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A list of texts as the value of a key.
pub(crate) fn texts(list: &[&str]) -> Vec<u8> {
    let texts = list.iter().flat_map(|item| text(item)).collect();
    [
        8u32.to_le_bytes().to_vec(),
        (list.len() as u64).to_le_bytes().to_vec(),
        texts,
    ]
    .concat()
}

/// A file that is written.
#[derive(Default, Clone)]
pub(crate) struct Writer {
    pub version: u32,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(version: u32) -> Writer {
        Writer {
            version,
            ..Writer::default()
        }
    }

    pub(crate) fn key(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.keys.push([&text(name)[..], &kind.to_le_bytes(), value].concat());
    }

    /// A tensor with its dimensions in the order of the file, the innermost first.
    pub(crate) fn tensor(&mut self, name: &str, dimensions: &[u64], format: u32, data: &[u8]) {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        let offset = self.data.len() as u64;
        self.data.extend_from_slice(data);
        self.entry(name, dimensions, format, offset);
    }

    /// A tensor of F32 at an offset that may be wrong.
    pub(crate) fn tensor_at(&mut self, name: &str, offset: u64, numbers: u64) {
        self.entry(name, &[numbers], 0, offset);
    }

    fn entry(&mut self, name: &str, dimensions: &[u64], format: u32, offset: u64) {
        let sizes = dimensions
            .iter()
            .flat_map(|size| size.to_le_bytes())
            .collect::<Vec<u8>>();
        let count = (dimensions.len() as u32).to_le_bytes();
        self.tensors.push(
            [
                &text(name)[..],
                &count,
                &sizes,
                &format.to_le_bytes(),
                &offset.to_le_bytes(),
            ]
            .concat(),
        );
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }
}
