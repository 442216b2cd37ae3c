//! Which tile a product is computed in: the one that took least time on this card, kept from run to run.
//!
//! Tiles add up in the same order, so the choice changes no bit of a result.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::compile::{Compiler, keep};
use super::driver::Card;
use super::plan::{LinearShape, Tile};

/// Of a product's rows, columns and bytes of a row, multiplied: less is not worth measuring, and [`Tile::of`] chooses.
const MEASURED_FROM: usize = 1 << 28;
/// Tiles that are measured take, by counting, at most so many times what the best does.
const TRIED: f64 = 1.6;
/// A file that is larger is not ours.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Products that share a tile: format, columns, bytes of a row, whether results are F32, and rows up to a power of two.
type Key = (u32, u32, u32, bool, u32);

fn key(shape: &LinearShape) -> Key {
    (
        shape.format as u32,
        shape.columns as u32,
        shape.bytes as u32,
        shape.wide,
        (shape.rows as u32).next_power_of_two().clamp(16, 1 << 13),
    )
}

/// Tiles that were found best.
pub(super) struct Tuning {
    path: Option<PathBuf>,
    known: Mutex<BTreeMap<Key, Tile>>,
}

impl Tuning {
    /// What was found on a card like this by kernels like these, if anything.
    pub fn open(compiler: &Compiler, card: &Card) -> Tuning {
        let of = format!("{} {} {}", card.name, card.multiprocessors, card.driver);
        let path = compiler.place_of("linear_sm90", "tiles", &of, "json");
        let text = path.as_ref().and_then(|path| {
            let size = std::fs::metadata(path).ok()?.len();
            (size <= FILE_BYTES_MAX).then(|| std::fs::read(path).ok())?
        });
        Tuning {
            path,
            known: Mutex::new(text.and_then(|text| parse(&text)).unwrap_or_default()),
        }
    }

    /// The tile for a product; where it is not known and worth it, `measure` says how long it takes in one, in seconds, if it can.
    pub fn tile<E>(
        &self,
        shape: &LinearShape,
        multiprocessors: u32,
        mut measure: impl FnMut(Tile) -> Result<Option<f64>, E>,
    ) -> Result<Tile, E> {
        if shape.rows * shape.columns * shape.bytes < MEASURED_FROM {
            return Ok(Tile::of(shape, multiprocessors));
        }
        // Whoever else asks waits: a card is not measured while it does something else.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tile) = known.get(&key(shape)) {
            return Ok(*tile);
        }
        let mut best = (f64::INFINITY, Tile::of(shape, multiprocessors));
        let mut said = String::new();
        for tile in Tile::within(shape, multiprocessors, TRIED) {
            let Some(seconds) = measure(tile)? else {
                return Ok(Tile::of(shape, multiprocessors));
            };
            said += &format!(", {} x {}: {:.1} us", tile.rows(), tile.columns, seconds * 1e6);
            if seconds < best.0 {
                best = (seconds, tile);
            }
        }
        tracing::debug!("tiles of {} x {} x {} B{said}", shape.rows, shape.columns, shape.bytes);
        known.insert(key(shape), best.1);
        if let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(&known.iter().collect::<Vec<_>>())) {
            keep(path, &text);
        }
        Ok(best.1)
    }
}

/// Tiles from a file; `None`: it is not one of ours.
fn parse(text: &[u8]) -> Option<BTreeMap<Key, Tile>> {
    let known: Vec<(Key, Tile)> = serde_json::from_slice(text).ok()?;
    known
        .iter()
        .all(|(_, tile)| Tile::ALL.contains(tile))
        .then(|| known.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::super::plan::Format;
    use super::*;

    fn tuning(path: Option<PathBuf>) -> Tuning {
        Tuning {
            path,
            known: Mutex::default(),
        }
    }

    fn shape(rows: usize) -> LinearShape {
        LinearShape {
            format: Format::E4m3,
            rows,
            columns: 28_672,
            bytes: 4096,
            wide: false,
        }
    }

    #[test]
    fn the_fastest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiles.json");
        let tuning = tuning(Some(path.clone()));
        let mut asked = Vec::new();
        let mut tile = |rows, fastest: usize| {
            let result: Result<Tile, ()> = tuning.tile(&shape(rows), 132, |tile| {
                asked.push(tile);
                Ok((fastest < 9).then_some(if asked.len() == fastest { 1.0 } else { 2.0 }))
            });
            (result.unwrap(), asked.clone())
        };
        let (first, tried) = tile(40, 2);
        assert!(tried.len() > 1 && first == tried[1], "{tried:?}");
        assert_eq!(tile(64, 0), (first, tried.clone()), "as many rows up to a power of two");
        assert_eq!(tile(1, 0).1, tried, "too little to measure");
        assert_eq!(tile(65, 9).1.len(), tried.len() + 1, "nothing to measure with");
        assert!(tile(65, 0).1.len() > tried.len() + 2);
        let kept = parse(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((kept.len(), kept[&key(&shape(33))]), (2, first));
    }

    #[test]
    fn foreign_files_say_nothing() {
        for text in [
            "",
            "[]",
            "[[[1,2,3,true,16],{\"columns\":5,\"consumers\":1}]]",
            "{",
            "null",
        ] {
            assert!(parse(text.as_bytes()).is_none_or(|known| known.is_empty()), "{text}");
        }
    }
}
