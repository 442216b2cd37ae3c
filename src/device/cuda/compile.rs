//! Kernels' sources, their specialisation by macros, and their machine code, cached on disk.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use super::cache;
use super::nvrtc::{Compiled, Nvrtc};
use crate::device::DeviceError;

/// Sources by stem; the stem is also the name of the kernel function.
const SOURCES: [(&str, &str); 32] = [
    ("embed", include_str!("../../../kernels/embed.cu")),
    ("add_norm", include_str!("../../../kernels/add_norm.cu")),
    ("quantize", include_str!("../../../kernels/quantize.cu")),
    ("quantize_groups", include_str!("../../../kernels/quantize_groups.cu")),
    ("gated", include_str!("../../../kernels/gated.cu")),
    ("gate_input", include_str!("../../../kernels/gate_input.cu")),
    ("add_inputs", include_str!("../../../kernels/add_inputs.cu")),
    ("norm_heads", include_str!("../../../kernels/norm_heads.cu")),
    ("rope_store", include_str!("../../../kernels/rope_store.cu")),
    ("latent_store", include_str!("../../../kernels/latent_store.cu")),
    ("attention", include_str!("../../../kernels/attention.cu")),
    ("attention_sm90", include_str!("../../../kernels/attention_sm90.cu")),
    ("merge", include_str!("../../../kernels/merge.cu")),
    ("linear", include_str!("../../../kernels/linear.cu")),
    ("head_linear", include_str!("../../../kernels/head_linear.cu")),
    ("coded_linear", include_str!("../../../kernels/coded_linear.cu")),
    ("linear_sm90", include_str!("../../../kernels/linear_sm90.cu")),
    ("router", include_str!("../../../kernels/router.cu")),
    ("choose_experts", include_str!("../../../kernels/choose_experts.cu")),
    ("sort_rows", include_str!("../../../kernels/sort_rows.cu")),
    ("scale_rows", include_str!("../../../kernels/scale_rows.cu")),
    ("grouped_linear", include_str!("../../../kernels/grouped_linear.cu")),
    (
        "grouped_coded_linear",
        include_str!("../../../kernels/grouped_coded_linear.cu"),
    ),
    ("combine_experts", include_str!("../../../kernels/combine_experts.cu")),
    ("scale_sums", include_str!("../../../kernels/scale_sums.cu")),
    ("recurrent", include_str!("../../../kernels/recurrent.cu")),
    ("keep_inputs", include_str!("../../../kernels/keep_inputs.cu")),
    ("gate", include_str!("../../../kernels/gate.cu")),
    ("soft_cap", include_str!("../../../kernels/soft_cap.cu")),
    ("peak", include_str!("../../../kernels/peak.cu")),
    ("random_weights", include_str!("../../../kernels/random_weights.cu")),
    ("sample", include_str!("../../../kernels/sample.cu")),
];

const HEADERS: [(&str, &str); 13] = [
    ("types.cuh", include_str!("../../../kernels/common/types.cuh")),
    ("ptx.cuh", include_str!("../../../kernels/common/ptx.cuh")),
    ("drawn.cuh", include_str!("../../../kernels/common/drawn.cuh")),
    ("eight_bits.cuh", include_str!("../../../kernels/common/eight_bits.cuh")),
    ("rows.cuh", include_str!("../../../kernels/common/rows.cuh")),
    ("kv_blocks.cuh", include_str!("../../../kernels/common/kv_blocks.cuh")),
    ("attention.cuh", include_str!("../../../kernels/common/attention.cuh")),
    ("linear.cuh", include_str!("../../../kernels/common/linear.cuh")),
    (
        "linear_tile.cuh",
        include_str!("../../../kernels/common/linear_tile.cuh"),
    ),
    ("coded_tile.cuh", include_str!("../../../kernels/common/coded_tile.cuh")),
    ("experts.cuh", include_str!("../../../kernels/common/experts.cuh")),
    ("recurrent.cuh", include_str!("../../../kernels/common/recurrent.cuh")),
    ("hopper.cuh", include_str!("../../../kernels/common/hopper.cuh")),
];

/// Names of all kernels.
pub fn names() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().map(|(name, _)| *name)
}

/// NVRTC's options for all kernels and cards.
const OPTIONS: [&str; 4] = ["--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"];

/// Version of the cache's file format, part of the hash in file names.
const FORMAT_TAG: &str = "after a hash";

/// Maximum number of macros per kernel.
const MACROS_MAX: usize = 14;

/// A kernel, specialised by macros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    pub name: &'static str,
    macros: [(&'static str, u32); MACROS_MAX],
}

impl Kernel {
    /// The kernel `name` with these macros.
    ///
    /// # Panics
    /// `macros` has more than fourteen entries.
    pub fn new(name: &'static str, macros: &[(&'static str, u32)]) -> Kernel {
        let mut all = [("", 0); MACROS_MAX];
        all[..macros.len()].copy_from_slice(macros);
        Kernel { name, macros: all }
    }

    /// The macros, in order.
    pub fn macros(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.macros.into_iter().take_while(|(name, _)| !name.is_empty())
    }
}

impl Display for Kernel {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        self.macros().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// Target of a compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompileTarget {
    /// Machine code for a compute capability, such as 80; for 90, with the features that only
    /// Hopper has (sm_90a).
    Card(u32),
    /// PTX, for cards that NVRTC does not know yet; the driver compiles it to machine code.
    Ptx(u32),
}

impl CompileTarget {
    /// Target for a card of `capability` (such as 89), with an NVRTC that supports `known`.
    ///
    /// # Errors
    /// The card is older than 8.0.
    pub fn of(capability: u32, known: &[u32]) -> Result<CompileTarget, DeviceError> {
        if capability < 80 {
            return Err(DeviceError::Unsupported(format!(
                "the card has compute capability {}.{}, and the kernels need 8.0 or later (Ampere): compute with `--device cpu`",
                capability / 10,
                capability % 10
            )));
        }
        if known.contains(&capability) {
            return Ok(CompileTarget::Card(capability));
        }
        let last = known.iter().copied().filter(|arch| *arch < capability).max();
        Ok(CompileTarget::Ptx(last.unwrap_or(80)))
    }

    fn option(self) -> String {
        match self {
            CompileTarget::Card(90) => "--gpu-architecture=sm_90a".into(),
            CompileTarget::Card(capability) => format!("--gpu-architecture=sm_{capability}"),
            CompileTarget::Ptx(capability) => format!("--gpu-architecture=compute_{capability}"),
        }
    }
}

/// Compiles kernels for one card, and caches them.
pub struct KernelCompiler {
    nvrtc: Nvrtc,
    target: CompileTarget,
    /// `None`: nothing is cached.
    cache: Option<PathBuf>,
}

impl KernelCompiler {
    /// A compiler that caches machine code in `GRISTMILL_CACHE`, or in the user's cache folder.
    pub fn new(nvrtc: Nvrtc, target: CompileTarget) -> KernelCompiler {
        KernelCompiler {
            nvrtc,
            target,
            cache: cache::folder(),
        }
    }

    /// NVRTC's version.
    pub fn version(&self) -> (u32, u32) {
        self.nvrtc.version()
    }

    /// A hash of all that decides the machine code of all kernels, except for their macros and card.
    pub fn fingerprint(&self) -> String {
        let (major, minor) = self.nvrtc.version();
        let own = [format!("{major}.{minor}"), OPTIONS.join(" ")];
        let texts = SOURCES.iter().chain(&HEADERS).flat_map(|(name, text)| [*name, *text]);
        hash_of(own.iter().map(String::as_str).chain(texts))
    }

    /// A cached kernel, with the assembler's log.
    pub fn cached(&self, kernel: &Kernel) -> Option<Compiled> {
        let path = self.cache_path(kernel)?;
        Some(Compiled {
            log: String::from_utf8(cache::read(&path.with_extension("log"))?).ok()?,
            image: cache::read(&path)?,
        })
    }

    /// Compiles a kernel and caches it.
    ///
    /// # Errors
    /// The kernel does not compile.
    pub fn compile_and_cache(&self, kernel: &Kernel) -> Result<Compiled, DeviceError> {
        let compiled = self.compile(kernel)?;
        if let Some(path) = self.cache_path(kernel) {
            cache::store(&path.with_extension("log"), compiled.log.as_bytes());
            cache::store(&path, &compiled.image);
        }
        Ok(compiled)
    }

    /// Warns in one line if this NVRTC made a kernel slower than intended.
    pub fn warn_if_slow(&self, kernel: &Kernel, log: &str) {
        if let Some(why) = slowdown_line(log) {
            let (major, minor) = self.nvrtc.version();
            tracing::warn!(
                "kernel `{kernel}` is slower than it is meant to be: NVRTC {major}.{minor} says `{why}`: install another version of NVRTC"
            );
        }
    }

    fn cache_path(&self, kernel: &Kernel) -> Option<PathBuf> {
        self.cache_path_of(kernel.name, kernel.name, &self.options(kernel).join(" "), "cubin")
    }

    /// Path of a cached file. Its name is `what` and a hash of the source of kernel `name`, the
    /// headers, NVRTC's version and `key`.
    pub(super) fn cache_path_of(&self, name: &str, what: &str, key: &str, extension: &str) -> Option<PathBuf> {
        let folder = self.cache.as_ref()?;
        let (major, minor) = self.nvrtc.version();
        let version = format!("{major}.{minor}");
        let own_parts = [source(name).ok()?, &version, key, FORMAT_TAG];
        let hash = hash_of(own_parts.into_iter().chain(HEADERS.iter().map(|(_, text)| *text)));
        Some(folder.join(format!("{what}-{hash}.{extension}")))
    }

    /// Compiles a kernel; the result has the assembler's log.
    ///
    /// # Errors
    /// The kernel does not compile.
    pub fn compile(&self, kernel: &Kernel) -> Result<Compiled, DeviceError> {
        let name = format!("{}.cu", kernel.name);
        let compiled = self
            .nvrtc
            .compile(&name, source(kernel.name)?, &HEADERS, &self.options(kernel));
        compiled.map_err(|error| match error {
            DeviceError::Unsupported(why) => DeviceError::Unsupported(format!("{why} ({kernel})")),
            other => other,
        })
    }

    fn options(&self, kernel: &Kernel) -> Vec<String> {
        let mut options = vec![self.target.option()];
        options.extend(OPTIONS.map(str::to_owned));
        options.extend(kernel.macros().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// The first line of the assembler's log that reports a loss of speed: serialised `wgmma`
/// instructions (warnings C7500 to C7599), stack frames, or register spills.
pub fn slowdown_line(log: &str) -> Option<&str> {
    let has_nonzero = |line: &str, unit: &str| {
        line.split(',').any(|part| {
            let number = part.trim().strip_suffix(unit).map(str::trim);
            number.is_some_and(|number| number != "0" && number.bytes().all(|digit| digit.is_ascii_digit()))
        })
    };
    let memory_units = ["bytes stack frame", "bytes spill stores", "bytes spill loads"];
    log.lines()
        .find(|line| line.contains("(C75") || memory_units.iter().any(|unit| has_nonzero(line, unit)))
        .map(str::trim)
}

/// The first half of the SHA-256 of texts and their lengths, in hexadecimal.
fn hash_of<'t>(parts: impl Iterator<Item = &'t str>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    HEXLOWER.encode(&hash.finalize()[..16])
}

fn source(name: &str) -> Result<&'static str, DeviceError> {
    let found = SOURCES.iter().find(|(stem, _)| *stem == name);
    found
        .map(|(_, text)| *text)
        .ok_or_else(|| DeviceError::Unsupported(format!("there is no kernel `{name}`")))
}

#[cfg(test)]
mod tests {
    use super::slowdown_line;

    #[test]
    fn slowdowns_are_found_in_the_assembler_log() {
        let normal = "ptxas info    : 3 bytes gmem\nptxas info    : Function properties for linear\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 168 registers, used 1 barriers";
        assert_eq!(slowdown_line(normal), None);
        assert_eq!(slowdown_line(""), None);
        let serialized = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions defining accumulator registers";
        assert_eq!(slowdown_line(&format!("{normal}\n{serialized}\n")), Some(serialized));
        for spilled in [
            "16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads",
            "0 bytes stack frame, 0 bytes spill stores, 120 bytes spill loads",
        ] {
            assert_eq!(
                slowdown_line(&format!("ptxas info    : x\n    {spilled}\nrest")),
                Some(spilled)
            );
        }
    }
}
