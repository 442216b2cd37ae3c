//! Memory of this machine, which must hold the weights, keys and values of a model on a CPU. A model
//! that does not fit is refused before it is loaded: the system would kill the process without a
//! word.

use std::fs::read_to_string;

use anyhow::bail;

use crate::device::{Dtype, Precision};
use crate::model::size::{ModelSize, Place};
use crate::report::summary::show_size;

/// Memory that is assumed where the system does not say how much there is.
const ASSUMED_BYTES: u64 = 8 << 30;

/// The memory that this process may use, in bytes.
#[derive(Debug, Clone, Copy)]
struct Available {
    memory: u64,
    swap: u64,
}

impl Available {
    /// That of this machine, or of its container if that has less. `None`: unknown.
    fn here() -> Option<Available> {
        let meminfo = read_to_string("/proc/meminfo").ok()?;
        // A container's own limit, if any ("max" means none).
        let container = read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
        Available::parse(&meminfo, container.trim().parse().ok())
    }

    /// From `/proc/meminfo`, and a container's limit.
    fn parse(meminfo: &str, container: Option<u64>) -> Option<Available> {
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
            Some(kib << 10)
        };
        let (memory, swap) = (bytes("MemTotal:")?, bytes("SwapTotal:").unwrap_or(0));
        Some(match container.filter(|limit| *limit < memory) {
            Some(memory) => Available { memory, swap: 0 },
            None => Available { memory, swap },
        })
    }
}

/// Bytes for keys and values. `kv_memory`: the value of `--kv-memory` in MiB; the default is an eighth
/// of the memory here.
pub(super) fn kv_bytes(kv_memory: Option<u64>) -> u64 {
    let here = || Available::here().map_or(ASSUMED_BYTES, |here| here.memory);
    kv_memory.map_or_else(|| here() / 8, |mib| mib << 20)
}

/// Refuses a model of this size that the memory here does not hold. `stored`: the number format of its weights;
/// `kv_memory`: the value of `--kv-memory`. Without one, keys and values are not counted: memory for
/// them is taken as they come.
pub(super) fn check(
    size: ModelSize,
    stored: Dtype,
    precision: Precision,
    kv_memory: Option<u64>,
) -> anyhow::Result<()> {
    let weights = size.weight_bytes(Place::Cpu, precision, stored);
    match Available::here() {
        Some(here) => here.check(weights, kv_memory.map_or(0, |mib| mib << 20), precision),
        None => Ok(()),
    }
}

impl Available {
    fn check(self, weights: u64, kv: u64, precision: Precision) -> anyhow::Result<()> {
        let total = self.memory + self.swap;
        if weights.saturating_add(kv) <= total {
            return Ok(());
        }
        let there = match self.swap {
            0 => format!("{} of memory", show_size(total)),
            _ => format!("{} of memory and swap", show_size(total)),
        };
        let (weights_text, name) = (show_size(weights), precision.name());
        if weights >= total {
            let smaller = match precision {
                Precision::F32 | Precision::Bf16 => "`precision: int8`, a smaller model",
                Precision::Int8 | Precision::Fp8 | Precision::W4a8 => "a smaller model",
            };
            bail!(
                "the model's weights take {weights_text} in {name}, and there are {there} here: choose {smaller} or a larger machine"
            );
        }
        bail!(
            "the model's weights take {weights_text} in {name}, keys and values get {}, and there are {there} here: choose less by \
             `--kv-memory MIB`",
            show_size(kv)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16000000 kB\nMemFree:        1 kB\nSwapTotal:       1000000 kB\n";

    #[test]
    fn a_container_may_have_less_than_its_machine() {
        let sizes = |container| Available::parse(MEMINFO, container).map(|here| (here.memory, here.swap));
        assert_eq!(sizes(None), Some((16_000_000 << 10, 1_000_000 << 10)));
        assert_eq!(sizes(Some(1 << 60)), sizes(None));
        assert_eq!(sizes(Some(1 << 30)), Some((1 << 30, 0)));
        assert!(Available::parse("MemFree: 1 kB", None).is_none());
        assert!(Available::here().is_some());
    }

    #[test]
    fn a_model_must_fit_into_memory() {
        let here = Available {
            memory: 16_000_000_000,
            swap: 1_000_000_000,
        };
        let refusal = |weights, kv, precision| here.check(weights, kv, precision).unwrap_err().to_string();
        assert!(here.check(15_000_000_000, 2_000_000_000, Precision::F32).is_ok());
        assert_eq!(
            refusal(15_000_000_000, 2_000_000_001, Precision::F32),
            "the model's weights take 15.0 GB in f32, keys and values get 2.0 GB, and there are 17.0 GB of memory and swap here: choose \
             less by `--kv-memory MIB`"
        );
        assert!(refusal(17_000_000_000, 1, Precision::Bf16).contains("choose `precision: int8`, a smaller model or"));
        assert!(refusal(17_000_000_000, u64::MAX, Precision::Int8).contains("choose a smaller model or"));
    }
}
