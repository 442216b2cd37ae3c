//! The sampling that a GGUF file recommends, as the keys of `generation_config.json`.

use serde_json::{Map, Value, json};

use crate::gguf::Header;

const PREFIX: &str = "general.sampling.";

/// Keys with the names that they have elsewhere.
const KEYS: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// The keys that `generation_config.json` would have. Others keep their names, and are reported as not known.
pub(in crate::model) fn sampling(metadata: &Header) -> Map<String, Value> {
    let own = metadata.keys().filter_map(|(key, value)| {
        let key = key.strip_prefix(PREFIX)?;
        let name = KEYS.iter().find(|(known, _)| *known == key).map(|(_, name)| *name);
        let value = match (value.whole(), value.number()) {
            (Some(whole), _) => json!(whole),
            (None, Some(number)) => json!(number),
            _ => json!(value.text().unwrap_or("set")),
        };
        Some((name.map_or_else(|| format!("{PREFIX}{key}"), str::to_owned), value))
    });
    own.collect()
}

#[cfg(test)]
mod tests {
    use crate::gguf::testing::Writer;
    use crate::model::config::generation::{GenerationFile, Origin};

    #[test]
    fn recommended_sampling_is_taken() {
        let mut writer = Writer::new(3);
        for (key, number) in [("temp", 0.6f32), ("top_p", 0.95), ("penalty_repeat", 1.05)] {
            writer.key(&format!("general.sampling.{key}"), 6, &number.to_le_bytes());
        }
        writer.key("general.sampling.top_k", 5, &20i32.to_le_bytes());
        writer.key("general.sampling.mirostat", 5, &2i32.to_le_bytes());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, writer.bytes()).unwrap();
        let file = GenerationFile::load(&path).unwrap();
        let defaults = file.check().unwrap();
        assert_eq!((defaults.origin, file.name()), (Origin::Gguf, "GGUF metadata"));
        assert_eq!(
            (defaults.temperature, defaults.top_k, defaults.top_p),
            (Some(0.6), Some(20), Some(0.95))
        );
        assert_eq!((defaults.repetition_penalty, defaults.min_p), (Some(1.05), None));
        assert_eq!(defaults.unknown, ["general.sampling.mirostat"]);
    }
}
