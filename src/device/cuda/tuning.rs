//! Tuning of matrix products: the tile, or the library's algorithm, that was fastest on this card,
//! kept from run to run.
//!
//! All tiles add up in the same order, so the choice of a tile changes no bit of a result. The
//! library's algorithms do not promise that.
//!
//! See docs/decisions/079-product-kernels-are-chosen-by-measuring.md.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::cache;
use super::compile::KernelCompiler;
use super::cublaslt::Algorithm;
use super::driver::Card;
use super::plan::{LinearShape, Tile};

/// Minimum of rows times columns times bytes per row that is worth a measurement. Below it, the
/// tile is chosen by estimate.
const MEASURED_FROM: usize = 1 << 28;
/// Only tiles whose estimated time is at most this many times the best estimate are measured.
const TRIED: f64 = 1.6;

/// Products that share one choice: format, columns, bytes per row, whether results are F32, whether
/// there is a bias, and rows rounded up to a power of two.
type GemmKey = (u32, u32, u32, bool, bool, u32);

fn key(shape: &LinearShape, biased: bool) -> GemmKey {
    (
        shape.format as u32,
        shape.columns as u32,
        shape.bytes as u32,
        shape.wide,
        biased,
        (shape.rows as u32).next_power_of_two().clamp(16, 1 << 13),
    )
}

/// A way to compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GemmChoice {
    /// gristmill's kernel with this tile.
    Tile(Tile),
    Library(Algorithm),
}

/// The best way to compute products of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Best {
    /// The fastest tile of gristmill's kernel.
    pub tile: Tile,
    /// The library's algorithm, where it is faster than the kernel.
    pub library: Option<Algorithm>,
}

impl Best {
    fn of_kernel(tile: Tile) -> Best {
        Best { tile, library: None }
    }
}

/// The best ways that were found.
pub(super) struct Tuning {
    path: Option<PathBuf>,
    known: Mutex<TuningTable>,
    hopper: bool,
    multiprocessors: u32,
}

#[derive(Default)]
struct TuningTable {
    /// Measurements, as in the file.
    measured: BTreeMap<GemmKey, Best>,
    /// Choices of this process that override the measurements: there was only one way or nothing to
    /// measure with, or the library refused other rows.
    settled: BTreeMap<GemmKey, Best>,
}

impl Tuning {
    /// Loads the results for cards, kernels and a version of the library that are the same as
    /// these.
    pub(super) fn open(compiler: &KernelCompiler, card: &Card, library: Option<usize>) -> Tuning {
        let mut of = format!("{} {} {}", card.name, card.multiprocessors, card.driver);
        if let Some(version) = library {
            of += &format!(" cuBLASLt {version}");
        }
        let kernel = if card.is_hopper() { "linear_sm90" } else { "linear" };
        let path = compiler.cache_path_of(kernel, "products", &of, "json");
        let text = path.as_deref().and_then(cache::read);
        Tuning {
            path,
            known: Mutex::new(TuningTable {
                measured: text.and_then(|text| parse(&text)).unwrap_or_default(),
                settled: BTreeMap::new(),
            }),
            hopper: card.is_hopper(),
            multiprocessors: card.multiprocessors,
        }
    }

    /// The best way to compute a product. For a product that is large enough and has no entry yet,
    /// `offered` lists the library's algorithms, and `measure` returns the seconds that one way
    /// takes: infinity where the way does not work, `None` where nothing can be measured now.
    pub(super) fn best<E>(
        &self,
        shape: &LinearShape,
        biased: bool,
        offered: impl FnOnce() -> Vec<Algorithm>,
        mut measure: impl FnMut(GemmChoice) -> Result<Option<f64>, E>,
    ) -> Result<Best, E> {
        let counted = Best::of_kernel(if self.hopper {
            Tile::of(shape, self.multiprocessors)
        } else {
            Tile::SYNC
        });
        if shape.rows * shape.columns * shape.bytes < MEASURED_FROM {
            return Ok(counted);
        }
        let key = key(shape, biased);
        // Other callers wait, so that the card does nothing else during a measurement.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(best) = known.settled.get(&key).or(known.measured.get(&key)) {
            return Ok(*best);
        }
        let mut ways = if self.hopper {
            Tile::within(shape, self.multiprocessors, TRIED)
                .map(GemmChoice::Tile)
                .collect()
        } else {
            vec![GemmChoice::Tile(Tile::SYNC)]
        };
        ways.extend(offered().into_iter().map(GemmChoice::Library));
        if ways.len() == 1 {
            known.settled.insert(key, counted);
            return Ok(counted);
        }
        let mut best = counted;
        let (mut of_tiles, mut of_all) = (f64::INFINITY, f64::INFINITY);
        let mut said = String::new();
        for way in ways {
            let Some(seconds) = measure(way)? else {
                known.settled.insert(key, counted);
                return Ok(counted);
            };
            let name = match way {
                GemmChoice::Tile(tile) => tile.to_string(),
                GemmChoice::Library(_) => "cuBLASLt".into(),
            };
            said += &format!(", {name}: {:.1} us", seconds * 1e6);
            match way {
                GemmChoice::Tile(tile) if seconds < of_tiles => (of_tiles, best.tile) = (seconds, tile),
                GemmChoice::Library(algorithm) if seconds < of_all.min(of_tiles) => {
                    (of_all, best.library) = (seconds, Some(algorithm));
                }
                _ => (),
            }
        }
        let LinearShape {
            format,
            rows,
            columns,
            bytes,
            ..
        } = shape;
        tracing::debug!("ways of {format:?}, {rows} x {columns} x {bytes} B{said}");
        known.measured.insert(key, best);
        let measured: Vec<_> = known.measured.iter().collect();
        if let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(&measured)) {
            cache::keep(path, &text);
        }
        Ok(best)
    }

    /// Computes such products by the kernel from now on, because the library has refused one.
    pub(super) fn without_library(&self, shape: &LinearShape, biased: bool) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let key = key(shape, biased);
        if let Some(best) = known.measured.get(&key) {
            let best = Best::of_kernel(best.tile);
            known.settled.insert(key, best);
        }
    }
}

/// Decodes a file of measurements; `None`: the file is not valid.
fn parse(text: &[u8]) -> Option<BTreeMap<GemmKey, Best>> {
    let known: Vec<(GemmKey, Best)> = serde_json::from_slice(text).ok()?;
    known
        .iter()
        .all(|(_, best)| Tile::ALL.contains(&best.tile))
        .then(|| known.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::super::plan::KernelFormat;
    use super::*;

    fn tuning(path: Option<PathBuf>, hopper: bool) -> Tuning {
        Tuning {
            path,
            known: Mutex::default(),
            hopper,
            multiprocessors: 132,
        }
    }

    fn shape(rows: usize) -> LinearShape {
        LinearShape {
            format: KernelFormat::E4m3,
            rows,
            columns: 28_672,
            bytes: 4096,
            wide: false,
        }
    }

    fn way(number: u64) -> Algorithm {
        serde_json::from_value(serde_json::json!([number, 0, 0, 0, 0, 0, 0, 0])).unwrap()
    }

    #[test]
    fn the_fastest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels/products.json");
        let tuning = tuning(Some(path.clone()), true);
        let mut asked = Vec::new();
        let mut best = |rows, fastest: usize| {
            let result: Result<Best, ()> = tuning.best(&shape(rows), false, Vec::new, |way| {
                asked.push(way);
                Ok((fastest < 9).then_some(if asked.len() == fastest { 1.0 } else { 2.0 }))
            });
            (result.unwrap().tile, asked.clone())
        };
        let (first, tried) = best(40, 2);
        assert!(tried.len() > 1 && GemmChoice::Tile(first) == tried[1], "{tried:?}");
        assert_eq!(best(64, 0), (first, tried.clone()), "as many rows up to a power of two");
        assert_eq!(best(1, 0).1, tried, "too little to measure");
        assert!(best(65, 0).1.len() > tried.len() + 1);
        let asked = best(129, 9).1.len();
        assert_eq!(best(129, 0).1.len(), asked, "there was nothing to measure with");
        let kept = parse(&cache::read(&path).unwrap()).unwrap();
        assert_eq!((kept.len(), kept[&key(&shape(33), false)].tile), (2, first));
    }

    /// The library is chosen where it is faster than the best tile, in any order of measurements;
    /// the best tile is recorded in either case.
    #[test]
    fn the_library_is_taken_where_it_is_faster() {
        for (tiles, library, taken) in [
            (2.0, [3.0, 1.0], Some(2)),
            (2.0, [1.0, 1.5], Some(1)),
            (2.0, [2.0, 3.0], None),
            (2.0, [f64::INFINITY, f64::INFINITY], None),
        ] {
            let seconds = |of: GemmChoice| match of {
                GemmChoice::Tile(tile) => tiles + f64::from(tile.columns == 256),
                GemmChoice::Library(algorithm) if algorithm == way(1) => library[0],
                GemmChoice::Library(_) => library[1],
            };
            let measure = |way| Ok::<_, ()>(Some(seconds(way)));
            let tuning = tuning(None, true);
            let best = || {
                tuning
                    .best(&shape(2048), true, || vec![way(1), way(2)], measure)
                    .unwrap()
            };
            assert_eq!(best().library, taken.map(way));
            assert_ne!(best().tile.columns, 256);
            // The library refuses other rows.
            let tile = best().tile;
            tuning.without_library(&shape(1500), true);
            assert_eq!(best(), Best::of_kernel(tile));
        }
    }

    #[test]
    fn cards_with_one_tile_measure_the_library_alone_against_it() {
        let tuning = tuning(None, false);
        let mut asked = 0;
        let mut best = |rows, offered: Vec<Algorithm>| {
            let measure = |way| {
                asked += 1;
                Ok::<_, ()>(Some(if matches!(way, GemmChoice::Tile(_)) { 2.0 } else { 1.0 }))
            };
            let best = tuning.best(&shape(rows), false, || offered, measure).unwrap();
            assert_eq!(best.tile, Tile::SYNC);
            (best.library, asked)
        };
        assert_eq!(best(512, vec![way(7)]), (Some(way(7)), 2));
        assert_eq!(best(300, vec![]), (Some(way(7)), 2), "known");
        assert_eq!(best(128, vec![]), (None, 2), "there is nothing to choose from");
        assert_eq!(best(128, vec![way(7)]), (None, 2), "which is not asked again");
    }

    #[test]
    fn foreign_files_say_nothing() {
        for text in [
            "",
            "[]",
            "[[[1,2,3,true,false,16],{\"tile\":{\"columns\":5,\"consumers\":1},\"library\":null}]]",
            "[[[1,2,3,true,false,16],{\"columns\":128,\"consumers\":1}]]",
            "{",
            "null",
        ] {
            assert!(parse(text.as_bytes()).is_none_or(|known| known.is_empty()), "{text}");
        }
    }
}
