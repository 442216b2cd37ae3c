//! Tuning of matmuls: remembers, from run to run, the tile or the algorithm of cuBLASLt that was
//! fastest on this card.
//!
//! All tiles sum in the same order, so the choice of a tile changes no bit of a result. cuBLASLt's
//! algorithms may sum in other orders.
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

/// Minimum of rows x columns x bytes per row for a measurement. Below it, the tile is chosen by
/// estimate.
const MEASURED_SIZE_MIN: usize = 1 << 28;
/// Only tiles whose estimated time is at most this many times the best estimate are measured.
const ESTIMATE_FACTOR_MAX: f64 = 1.6;

/// Matmuls that share one choice: format, columns, bytes per row, whether the output is F32,
/// whether there is a bias, and rows rounded up to a power of two.
type GemmKey = (u32, u32, u32, bool, bool, u32);

fn key(shape: &LinearShape, has_bias: bool) -> GemmKey {
    (
        shape.format as u32,
        shape.columns as u32,
        shape.row_bytes as u32,
        shape.f32_output,
        has_bias,
        (shape.rows as u32).next_power_of_two().clamp(16, 1 << 13),
    )
}

/// A way to compute a matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GemmChoice {
    /// gristmill's kernel with this tile.
    Tile(Tile),
    /// cuBLASLt with this algorithm.
    Library(Algorithm),
}

/// The fastest way to compute the matmuls of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct TunedGemm {
    /// The fastest tile of gristmill's kernel.
    pub tile: Tile,
    /// cuBLASLt's fastest algorithm, if it is faster than the kernel.
    pub library: Option<Algorithm>,
}

impl TunedGemm {
    fn of_kernel(tile: Tile) -> TunedGemm {
        TunedGemm { tile, library: None }
    }
}

/// The choices for all matmuls, kept in a file.
pub(super) struct Tuning {
    path: Option<PathBuf>,
    table: Mutex<TuningTable>,
    is_hopper: bool,
    multiprocessors: u32,
}

#[derive(Default)]
struct TuningTable {
    /// Measured choices, as in the file.
    measured: BTreeMap<GemmKey, TunedGemm>,
    /// Choices of this process alone, which override the measured ones: there was only one way, no
    /// memory to measure with, or cuBLASLt refused another number of rows.
    overrides: BTreeMap<GemmKey, TunedGemm>,
}

impl Tuning {
    /// Loads the measurements that were made with the same kind of card, driver, kernels and
    /// version of cuBLASLt.
    pub(super) fn open(compiler: &KernelCompiler, card: &Card, cublaslt_version: Option<usize>) -> Tuning {
        let mut setup = format!("{} {} {}", card.name, card.multiprocessors, card.driver_version);
        if let Some(version) = cublaslt_version {
            setup += &format!(" cuBLASLt {version}");
        }
        let kernel = if card.is_hopper() { "linear_sm90" } else { "linear" };
        let path = compiler.cache_path_of(kernel, "products", &setup, "json");
        let text = path.as_deref().and_then(cache::read);
        Tuning {
            path,
            table: Mutex::new(TuningTable {
                measured: text.and_then(|text| parse(&text)).unwrap_or_default(),
                overrides: BTreeMap::new(),
            }),
            is_hopper: card.is_hopper(),
            multiprocessors: card.multiprocessors,
        }
    }

    /// The fastest way to compute a matmul. If the matmul is large enough and has no entry yet, the
    /// ways are measured: `algorithms` lists cuBLASLt's, and `measure` returns the seconds that one
    /// way takes (infinity: the way does not work; `None`: nothing can be measured now).
    pub(super) fn best<E>(
        &self,
        shape: &LinearShape,
        has_bias: bool,
        algorithms: impl FnOnce() -> Vec<Algorithm>,
        mut measure: impl FnMut(GemmChoice) -> Result<Option<f64>, E>,
    ) -> Result<TunedGemm, E> {
        let estimated = TunedGemm::of_kernel(if self.is_hopper {
            Tile::of(shape, self.multiprocessors)
        } else {
            Tile::MMA_SYNC
        });
        if shape.rows * shape.columns * shape.row_bytes < MEASURED_SIZE_MIN {
            return Ok(estimated);
        }
        let key = key(shape, has_bias);
        // Other callers wait, so that the card does nothing else during a measurement.
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(best) = table.overrides.get(&key).or(table.measured.get(&key)) {
            return Ok(*best);
        }
        let mut choices = if self.is_hopper {
            Tile::within_factor(shape, self.multiprocessors, ESTIMATE_FACTOR_MAX)
                .map(GemmChoice::Tile)
                .collect()
        } else {
            vec![GemmChoice::Tile(Tile::MMA_SYNC)]
        };
        choices.extend(algorithms().into_iter().map(GemmChoice::Library));
        if choices.len() == 1 {
            table.overrides.insert(key, estimated);
            return Ok(estimated);
        }
        let mut best = estimated;
        let (mut tile_seconds, mut library_seconds) = (f64::INFINITY, f64::INFINITY);
        let mut timings = String::new();
        for choice in choices {
            let Some(seconds) = measure(choice)? else {
                table.overrides.insert(key, estimated);
                return Ok(estimated);
            };
            let name = match choice {
                GemmChoice::Tile(tile) => tile.to_string(),
                GemmChoice::Library(_) => "cuBLASLt".into(),
            };
            timings += &format!(", {name}: {:.1} us", seconds * 1e6);
            match choice {
                GemmChoice::Tile(tile) if seconds < tile_seconds => (tile_seconds, best.tile) = (seconds, tile),
                // All tiles have been measured before.
                GemmChoice::Library(algorithm) if seconds < library_seconds.min(tile_seconds) => {
                    (library_seconds, best.library) = (seconds, Some(algorithm));
                }
                _ => (),
            }
        }
        let LinearShape {
            format,
            rows,
            columns,
            row_bytes,
            ..
        } = shape;
        tracing::debug!("ways of {format:?}, {rows} x {columns} x {row_bytes} B{timings}");
        table.measured.insert(key, best);
        let measured: Vec<_> = table.measured.iter().collect();
        if let (Some(path), Ok(text)) = (&self.path, serde_json::to_vec(&measured)) {
            cache::store(path, &text);
        }
        Ok(best)
    }

    /// From now on, only the kernel computes matmuls of this key: cuBLASLt has refused one.
    pub(super) fn exclude_library(&self, shape: &LinearShape, has_bias: bool) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let key = key(shape, has_bias);
        if let Some(best) = table.measured.get(&key) {
            let best = TunedGemm::of_kernel(best.tile);
            table.overrides.insert(key, best);
        }
    }
}

/// Decodes a file of measurements; `None`: the file is not valid.
fn parse(text: &[u8]) -> Option<BTreeMap<GemmKey, TunedGemm>> {
    let entries: Vec<(GemmKey, TunedGemm)> = serde_json::from_slice(text).ok()?;
    entries
        .iter()
        .all(|(_, best)| Tile::ALL.contains(&best.tile))
        .then(|| entries.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::super::plan::KernelFormat;
    use super::*;

    fn tuning(path: Option<PathBuf>, is_hopper: bool) -> Tuning {
        Tuning {
            path,
            table: Mutex::default(),
            is_hopper,
            multiprocessors: 132,
        }
    }

    fn shape(rows: usize) -> LinearShape {
        LinearShape {
            format: KernelFormat::E4m3,
            rows,
            columns: 28_672,
            row_bytes: 4096,
            f32_output: false,
        }
    }

    fn algorithm(number: u64) -> Algorithm {
        serde_json::from_value(serde_json::json!([number, 0, 0, 0, 0, 0, 0, 0])).unwrap()
    }

    #[test]
    fn the_fastest_choice_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels/products.json");
        let tuning = tuning(Some(path.clone()), true);
        let mut measured = Vec::new();
        let mut best = |rows, fastest: usize| {
            let result: Result<TunedGemm, ()> = tuning.best(&shape(rows), false, Vec::new, |choice| {
                measured.push(choice);
                Ok((fastest < 9).then_some(if measured.len() == fastest { 1.0 } else { 2.0 }))
            });
            (result.unwrap().tile, measured.clone())
        };
        let (first, tried) = best(40, 2);
        assert!(tried.len() > 1 && GemmChoice::Tile(first) == tried[1], "{tried:?}");
        assert_eq!(best(64, 0), (first, tried.clone()), "as many rows up to a power of two");
        assert_eq!(best(1, 0).1, tried, "too little to measure");
        assert!(best(65, 0).1.len() > tried.len() + 1);
        let measured = best(129, 9).1.len();
        assert_eq!(best(129, 0).1.len(), measured, "there was nothing to measure with");
        let kept = parse(&cache::read(&path).unwrap()).unwrap();
        assert_eq!((kept.len(), kept[&key(&shape(33), false)].tile), (2, first));
    }

    /// The library is chosen if one of its algorithms is faster than the best tile, whatever their
    /// order; the best tile is recorded in either case.
    #[test]
    fn the_library_is_chosen_if_it_is_faster() {
        for (tiles, library, chosen) in [
            (2.0, [3.0, 1.0], Some(2)),
            (2.0, [1.0, 1.5], Some(1)),
            (2.0, [2.0, 3.0], None),
            (2.0, [f64::INFINITY, f64::INFINITY], None),
        ] {
            let seconds = |choice: GemmChoice| match choice {
                GemmChoice::Tile(tile) => tiles + f64::from(tile.columns == 256),
                GemmChoice::Library(algorithm) if algorithm == self::algorithm(1) => library[0],
                GemmChoice::Library(_) => library[1],
            };
            let measure = |choice| Ok::<_, ()>(Some(seconds(choice)));
            let tuning = tuning(None, true);
            let best = || {
                tuning
                    .best(&shape(2048), true, || vec![algorithm(1), algorithm(2)], measure)
                    .unwrap()
            };
            assert_eq!(best().library, chosen.map(algorithm));
            assert_ne!(best().tile.columns, 256);
            // The library refuses another number of rows.
            let tile = best().tile;
            tuning.exclude_library(&shape(1500), true);
            assert_eq!(best(), TunedGemm::of_kernel(tile));
        }
    }

    #[test]
    fn cards_with_one_tile_compare_it_with_the_library() {
        let tuning = tuning(None, false);
        let mut calls = 0;
        let mut best = |rows, algorithms: Vec<Algorithm>| {
            let measure = |choice| {
                calls += 1;
                Ok::<_, ()>(Some(if matches!(choice, GemmChoice::Tile(_)) {
                    2.0
                } else {
                    1.0
                }))
            };
            let best = tuning.best(&shape(rows), false, || algorithms, measure).unwrap();
            assert_eq!(best.tile, Tile::MMA_SYNC);
            (best.library, calls)
        };
        assert_eq!(best(512, vec![algorithm(7)]), (Some(algorithm(7)), 2));
        assert_eq!(best(300, vec![]), (Some(algorithm(7)), 2), "known");
        assert_eq!(best(128, vec![]), (None, 2), "there is nothing to choose from");
        assert_eq!(best(128, vec![algorithm(7)]), (None, 2), "which is not asked again");
    }

    #[test]
    fn invalid_files_are_ignored() {
        for text in [
            "",
            "[]",
            "[[[1,2,3,true,false,16],{\"tile\":{\"columns\":5,\"consumers\":1},\"library\":null}]]",
            "[[[1,2,3,true,false,16],{\"columns\":128,\"consumers\":1}]]",
            "{",
            "null",
        ] {
            assert!(
                parse(text.as_bytes()).is_none_or(|entries| entries.is_empty()),
                "{text}"
            );
        }
    }
}
